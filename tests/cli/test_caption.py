"""`mmaccel caption`: the text streams, and what the draft did is told; a draft that does nothing does not pass unseen."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmaccel.cli import answer
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.recipe import Recipe
from mmaccel.serve.speech import TextStreamer
from tests.cli import Call
from tests.spies import heard


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
    for word in ("20 tokens said in", "x plain decoding", "tokens a round", "in a row", "only read weights"):
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
