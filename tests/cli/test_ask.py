"""`mmaccel ask`: what it prints, for people and for programs; also of what a pruner left, and of an answer cut off.

`mmaccel caption`: the text streams, and what the draft did is told; a draft that does nothing does not pass unseen."""

import inspect
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import media
from mmaccel.cli import answer, console
from mmaccel.cli.ask import ask
from mmaccel.cli.console import describe_cut_off, group_table_columns
from mmaccel.cli.watch import watch
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, Deadline
from mmaccel.core.recipe import Recipe
from mmaccel.policies.draft._draft_model import DraftModelState
from mmaccel.serve.speech import TextStreamer
from tests.cli import Call
from tests.policies.draft.toy_service import forking
from tests.spies import heard

FIGURES = {"answer", "ttft_s", "tokens_per_s", "kept", "peak_bytes"}


def test_ask_gives_one_object(call: Call, clip: str, ov: str) -> None:
    told = call.object(
        "ask", clip, "How many cards were shown?", "--model", ov, "--json", "--max-new-tokens", 4
    )
    assert set(told) >= FIGURES | {"recipe", "model", "frames", "prompt_tokens", "heads", "question", "video"}
    assert told["frames"] == 64 and 64 * 16 < told["prompt_tokens"] < 64 * 16 + 40
    assert told["recipe"] == "dense" and told["kept"] == 1.0 and told["ttft_s"] > 0
    assert told["peak_bytes"] > 1 << 20
    assert 1 <= told["new_tokens"] <= 4 and "dense" not in told and "runs" not in told
    assert told["video_tokens"] == {"prompt": 64 * 16} and told["draft"] is None
    seen = told["prompt_tokens"] + told["new_tokens"] - 1
    assert told["cache"] == {"bytes": told["cache"]["bytes"], "held": seen, "seen": seen}
    assert told["cache"]["bytes"] > 0


def test_compare_puts_dense_beside_the_recipe(call: Call, clip: str, ov: str) -> None:
    how = f"--model {ov} --recipe a_shape-short --compare".split()
    arguments = ("ask", clip, "what colour was the star ?", *how)
    told = call.object(*arguments, "--recipe", "grid", "--recipe", "window", "--json", "--max-new-tokens", 2)
    assert [run["recipe"] for run in told["runs"]] == ["a_shape-short", "grid", "window"]
    assert told["dense"]["recipe"] == "dense" and told["recipe"] == "a_shape-short"
    assert set(told["dense"]) >= FIGURES
    assert told["kept"] < 1 == told["dense"]["kept"]
    assert set(told["heads"]) == {"a_shape"} and set(told["dense"]["heads"]) == {"dense"}
    status, out, _ = call(*arguments, "--max-new-tokens", 2)
    assert status == 0 and out.index("dense") < out.index("a_shape-short")
    assert "what colour was the star ?" in out and "64 frames" in out
    for label in ("answer", "first token", "pairs computed", "heads", "peak memory"):
        assert label in out


def test_a_share_above_all_pairs_says_why(call: Call, clip: str, ov: str) -> None:
    asked = ("ask", clip, "hi", "--model", ov, "--recipe", "grid", "--max-new-tokens", 1)
    status, out, _ = call(*asked, "--frames", 8)
    assert status == 0 and re.search(r"computed +│ 1[0-9]{2}\.\d% of causal \(blocks count whole\)", out)
    status, out, _ = call(*asked)
    assert status == 0 and re.search(r"computed +│ \d\d\.\d% of causal ", out) and "blocks" not in out


def test_a_memory_of_streams_reads_the_file_as_a_stream(call: Call, clip: str, ov: str) -> None:
    asked = f"ask {clip} hi --model {ov} --recipe mosaic --json --max-new-tokens 2 --compare".split()
    told = call.object(*asked)
    assert told["answer"] == told["dense"]["answer"]
    assert told["prompt_tokens"] == told["dense"]["prompt_tokens"] and told["cache"]["seen"] > 1000


def test_many_recipes_are_several_tables_that_fit(call: Call, clip: str, ov: str) -> None:
    names = ["dense", "a_shape-short", "grid", "window", "tri_shape"]
    recipes = [word for name in names for word in ("--recipe", name)]
    status, out, _ = call("ask", clip, "hi", "--model", ov, *recipes, "--frames", 8, "--max-new-tokens", 1)
    lines = out.splitlines()
    assert status == 0 and max(map(len, lines)) <= 120
    heads = [[cell.strip() for cell in line.split("┃")[2:-1]] for line in lines if line.startswith("┃")]
    assert heads == [names[:2], names[2:]] and out.count("│ first token ") == 2


@pytest.mark.parametrize(
    ("count", "room", "groups"),
    [(1, 5, [1]), (3, 30, [3]), (4, 30, [2, 2]), (7, 30, [2, 2, 3]), (2, 9, [1, 1]), (0, 30, [])],
)
def test_columns_are_shared_out_evenly(count: int, room: int, groups: list[int]) -> None:
    names = [str(number) for number in range(count)]
    found = list(group_table_columns(names, room, 10))
    assert [len(one) for one in found] == groups and [name for one in found for name in one] == names


def test_a_yaml_file_is_a_recipe(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("sparse: {name: a_shape, sink: 16, window: 128}\nchunk: 256\ndense_layers: [0]\n")
    told = call.object("ask", clip, "hi", "--model", ov, "--recipe", path, "--json", "--max-new-tokens", 2)
    assert told["recipe"] == "mine"
    # The nine columns of the last piece are too few to run sparse.
    assert told["heads"]["dense"] == told["heads"]["a_shape+dense"] / 2 and told["kept"] < 1


def test_a_draft_of_the_same_weights_is_always_right(call: Call, clip: str, ov: str) -> None:
    how = f"--model {ov} --draft {ov} --json --max-new-tokens 24".split()
    arguments = ("ask", clip, "describe the video .", *how)
    for extra in ((), ("--recipe", "sequential"), ("--recipe", "a_shape-short", "--compare")):
        told = call.object(*arguments, *extra)
        assert told["draft"]["proposed"] > 0
        if "a_shape-short" not in extra:
            assert told["draft"]["accepted"] == told["draft"]["proposed"]
        assert told["draft"]["accepted_length"] * told["draft"]["rounds"] == told["draft"]["accepted"]
        if "--compare" in extra:
            assert told["dense"]["draft"] is None
    status, out, _ = call(*(one for one in arguments if one != "--json"))
    told = " ".join(out.replace("│", " ").split())
    said = re.search(r"drafted (\d+) of \1 accepted in (\d+) rounds?, (\d+\.\d\d) a round", told)
    assert status == 0 and said and float(said[3]) == pytest.approx(int(said[1]) / int(said[2]), abs=0.005)


@pytest.mark.parametrize(
    ("option", "given", "frames"), [("--frames", 5, 5), ("--max-frames", 7, 7), ("--fps", 0.25, 16)]
)
def test_fewer_frames(call: Call, clip: str, ov: str, option: str, given: float, frames: int) -> None:
    told = call.object("ask", clip, "hi", "--model", ov, "--json", option, given, "--max-new-tokens", 1)
    assert told["frames"] == frames


def test_a_damaged_video_is_answered_with_a_warning(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    source = media.read(clip)
    cut = tmp_path / "cut.ts"
    import av

    with av.open(str(cut), "w", format="mpegts") as container:
        stream = container.add_stream("libx264", rate=2)
        stream.width, stream.height, stream.pix_fmt = 280, 168, "yuv420p"
        stream.thread_count = 3  # the same bytes on every processor
        for frame in source.frames:
            picture = av.VideoFrame.from_ndarray(frame.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    whole = cut.read_bytes()
    # Four holes: one alone may take two whole frames, as many as rounding may.
    for place in range(len(whole) // 5, len(whole) * 5 // 6, len(whole) // 5):
        whole = whole[:place] + b"\x00" * 4000 + whole[place + 4000 :]
    cut.write_bytes(whole)
    status, out, err = call("ask", cut, "hi", "--model", ov, "--json", "--max-new-tokens", 1)
    assert status == 0 and 0 < json.loads(out)["frames"] <= 64
    assert err.startswith("warning: ") and "cut.ts" in err and "Warning" not in err


@pytest.mark.parametrize("name", ["tiny-ov-draft", "tiny-qwen-draft"])
def test_progress_tells_what_is_under_way(
    name: str, call: Call, clip: str, random_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmaccel.cli import ask
    from mmaccel.core.attach import adapter_for

    lines: list[str] = []

    def watching(model: Any, recipe: Any, progress: Any, most: int) -> Any:
        adapter = adapter_for(model)
        tower = adapter.multimodal(model).get_submodule("vision_tower" if "ov" in name else "visual")
        block = tower.encoder.layers[1].self_attn if "ov" in name else tower.blocks[1].attn
        for module in (block, tower, adapter.layers(model)[0].self_attn, adapter.layers(model)[1].mlp):
            # As it is called, after the hooks that move the bars.

            def note(*_: Any, **__: Any) -> None:
                lines.append(console._line(progress.tasks, 0))

            heard(monkeypatch, module, "forward", note)
        return made(model, recipe, progress, most)

    made = ask._layers
    monkeypatch.setattr(ask, "_layers", watching)
    status, _, err = call("ask", clip, "hi", "--model", random_folder(name), "--max-new-tokens", 2)
    assert status == 0, err
    depth = [int(line.split("/")[1].split()[0]) for line in lines[1:4]]
    assert lines[:4] == [
        "at work; 0 s",
        f"encode 1/{depth[0]} layers, in the attention of layer 2; 0 s",
        f"prefill 0/{depth[1]} layers, in the attention of layer 1; 0 s",
        f"prefill 1/{depth[2]} layers, in layer 2; 0 s",
    ]


def test_progress_tells_that_a_draft_is_started(
    call: Call, clip: str, random_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmaccel.policies.draft import Sequential

    heard(monkeypatch, Sequential, "check_target", lambda *_: time.sleep(0.5))
    monkeypatch.setattr(console, "EVERY_S", 0.02)
    folder = random_folder("tiny-ov-draft")
    status, _, err = call("ask", clip, "hi", "--model", folder, "--draft", folder, "--max-new-tokens", 2)
    assert status == 0 and "draft 0/1 started; " in err


@pytest.mark.parametrize(
    "fields, told",
    [
        ("prune: {name: fastv, retention: 0.25, layer: 1}", "256 from layer 1"),
        ("prune: {name: visionzip, retention: 0.5}\nsparse: a_shape", "512 from layer 0"),
        ("prune: {name: dycoke, drop: 0.5, forget: 0.5, layer: 2}", "640 from layer 0"),
    ],
)
def test_ask_names_what_was_pruned(
    call: Call, clip: str, ov: str, tmp_path: Path, fields: str, told: str
) -> None:
    recipe = tmp_path / "pruned.yaml"
    recipe.write_text(fields)
    status, out, _ = call(
        "ask", clip, "What colour was the star?", "--model", ov, "--recipe", recipe, "--max-new-tokens", 2
    )
    assert status == 0 and "1024 tokens" in out and told in " ".join(out.split())
    mean = "held, the mean of the layers" in " ".join(out.replace("│", " ").split())
    assert mean == ("layer 0" not in told), "after a cut before the first layer all hold as many"
    if mean:
        how = ("--model", ov, "--recipe", recipe, "--max-new-tokens", 2, "--json")
        told = call.object("ask", clip, "hi", *how)
        assert told["video_tokens"] == {"prompt": 1024, "from layer 1": 256} and told["cache"]["bytes"] > 0
        layers = len(told["patterns"])
        assert told["cache"]["held"] - told["cache"]["held_mean"] == 768 * (layers - 1) // layers


@pytest.mark.parametrize("pruner", ["uv", "attention", "uniform", "random"])
def test_ask_names_what_the_draft_read(
    call: Call, clip: str, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruner: str
) -> None:
    read: list[int] = heard(
        monkeypatch, DraftModelState, "keep_columns", lambda state, columns: columns.numel()
    )
    recipe = tmp_path / "pruned.yaml"
    fields = f"prune: {{name: {pruner}, retention: 0.07}}"
    recipe.write_text(f"draft: {{name: sequential, model: {ov}, {fields}}}")
    how = f"--model {ov} --recipe {recipe} --max-new-tokens 6".split()
    arguments = ("ask", clip, "describe the video .", *how)
    told = call.object(*arguments, "--json")
    # All that is not a video stays.
    assert told["video_tokens"] == {"prompt": 1024, "in the draft": read[0] - told["prompt_tokens"] + 1024}
    assert told["video_tokens"]["in the draft"] == 71
    assert pruner != "uniform" or "1024 tokens, 71 in the draft" in call(*arguments)[1]


MARK = "cut off at 2 tokens (--max-new-tokens)"


def test_one_default_serves_everywhere() -> None:
    for call in (ask, watch, mmaccel.VideoSession.ask):
        assert inspect.signature(call).parameters["max_new_tokens"].default == MAX_NEW_TOKENS


def test_a_cut_is_told_of() -> None:
    assert describe_cut_off("stop", 3) == ""
    told = [describe_cut_off(reason, 1) for reason in ("length", "positions", "timeout", "cancelled")]
    assert len(set(told)) == 4 and all("1 token" in one and "1 tokens" not in one for one in told)


@pytest.mark.parametrize(
    "words",
    [
        ("watch", "{clip}", "--recipe", "recent", "--fps", 0.25, "--question", "what was it ?"),
        ("ask", "{clip}", "what was it ?", "--frames", 2),
        ("caption", "{clip}", "--recipe", "prompt_lookup", "--no-compare", "--frames", 2),
    ],
    ids=lambda words: words[0],
)
def test_a_command_marks_an_answer_that_is_cut_off(call: Call, clip: str, ov: str, words: tuple) -> None:
    line = [str(word).format(clip=clip) for word in words]
    assert MARK in call.text(*line, "--model", ov, "--max-new-tokens", 2)
    told = call.object(*line, "--model", ov, "--max-new-tokens", 2, "--json")
    assert told.get("answers", [told])[0]["finish_reason"] == "length"


def test_a_whole_answer_has_no_mark(call: Call, clip: str, shipped: Callable[[str], str]) -> None:
    name = shipped("tiny-ov")
    question = "what colour was the star ?"
    out = call.text("watch", clip, "--model", name, "--fps", 0.25, "--question", question)
    assert "cut off" not in out
    told = call.object("ask", clip, question, "--model", name, "--frames", 4, "--json")
    assert told["finish_reason"] == "stop"


def test_evidence_may_be_left_out(call: Call, clip: str, ov: str) -> None:
    base = ("watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.25, "--question", "what was it ?")
    status, out, _ = call(*base, "--max-new-tokens", 2, "--evidence", 0)
    assert status == 0 and "based on" not in out and "first token" in out
    (told,) = call.object(*base, "--max-new-tokens", 2, "--evidence", 0, "--json")["answers"]
    assert (told["evidence"], told["moments"]) == ([], 0)


@pytest.fixture(scope="module")
def pair(random_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that knows nothing, and beside it a draft that knows as little, in the same words."""
    root = tmp_path_factory.mktemp("pair")
    for name in ("small", "small-draft"):
        shutil.copytree(random_folder("tiny-ov-draft"), root / name)
    return str(root / "small")


SHORT = ("--frames", 8, "--max-new-tokens", 20)
LONG = ("--max-new-tokens", 120)
"""On a busy machine the target says some tokens alone before a process of its own has read the prompt."""


@pytest.mark.parametrize("recipe", ["specvlm", "vanilla-sd", "std"])
def test_caption_gives_one_object(call: Call, clip: str, pair: str, recipe: str) -> None:
    told = call.object("caption", clip, "--model", pair, "--recipe", recipe, "--json", *SHORT)
    assert told["same"] and told["certificate"] is None and told["failed"] is None
    assert told["steps"] > 0 and told["rounds"] > 0 and told["tokens"] == 20
    # The draft has the target's weights: at the least its guesses are not all refused.
    assert "kept" not in told and told["accepted_length"] > 0 and told["a_step"] > 1
    assert 0 < told["share"] <= 1
    assert told["speedup"] > 0 and told["floor_tokens_per_s"] > 0 and told["text"]


def test_a_pairing_s_preset_takes_another_draft(call: Call, clip: str, pair: str) -> None:
    words = ("--recipe", "parallelvlm-qwen-7b-32b", "--draft", f"{pair}-draft", "--json", *SHORT)
    with forking():
        told = call.object("caption", clip, "--model", pair, *words, *LONG)
    assert told["same"] and told["failed"] is None and told["rounds"] > 0
    assert told["counters"]["window"] == 5


def test_a_lossy_prefill_is_held_against_itself_without_the_draft(
    call: Call, clip: str, pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Recipe] = heard(monkeypatch, answer, "generate", lambda model, *_, **__: model.recipe)
    recipe = tmp_path / "short.yaml"
    recipe.write_text("sparse: {name: a_shape, sink: 16, window: 16}\ndense_tail: 0\ndraft: prompt_lookup\n")
    told = call.object("caption", clip, "--model", pair, "--recipe", recipe, "--json", *SHORT)
    assert told["same"] and told["certificate"] is None
    assert [(one.sparse.name, one.draft.name) for one in met] == [
        ("a_shape", one) for one in ("prompt_lookup", "off")
    ]


def test_people_read_the_text_and_the_figures(call: Call, clip: str, pair: str) -> None:
    status, out, err = call("caption", clip, "--model", pair, "--recipe", "vanilla-sd", *SHORT)
    _, plain, _ = call("caption", clip, "--model", pair, "--recipe", "vanilla-sd", "--json", *SHORT)
    assert status == 0 and err == ""
    assert out.startswith(json.loads(plain)["text"][:10])
    for word in ("20 tokens said in", "x as fast", "tokens a round", "consecutive", "only read weights"):
        assert word in out
    assert out.count("tokens/s") == 3, "of the run, of plain decoding and of one that only reads"


def test_a_piece_of_text_is_shown_once_it_is_whole_and_the_last_in_any_case() -> None:
    """Token n is byte n: a character of two bytes waits for its second, unless nothing follows."""
    shown: list[str] = []
    words = TextStreamer(lambda ids: bytes(ids).decode(errors="replace"), (), shown.append, Deadline())
    words.put(torch.tensor([[65, 66]]))
    for byte in "a\u00e9b".encode() + b"\xc3":
        words.put(torch.tensor([byte]))
    assert shown == ["a", "\u00e9", "b"]
    words.end()
    assert shown[3:] == ["\N{REPLACEMENT CHARACTER}"] and words.cutter.said == "".join(shown)


def test_the_pipeline_runs_in_its_own_process(call: Call, clip: str, pair: str) -> None:
    told = call.object("caption", clip, "--model", pair, "--json", "--no-compare", *SHORT, *LONG)
    assert told["recipe"] == "parallelvlm" and told["failed"] is None
    assert told["speedup"] is None and told["counters"]["draft_step_s"] > 0
    assert told["counters"]["drafted"] > 0
