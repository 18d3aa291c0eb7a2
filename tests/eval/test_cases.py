"""Questions about worlds, worlds as files, captions under teacher forcing; the model card's table, its rows and bounds."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import load_model, load_processor
from mmaccel.cli.answer import answer_prompts
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError, WorldError
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval import table
from mmaccel_lab.eval.caption import agreement, caption_cases, caption_scores, forced, predicted
from mmaccel_lab.eval.cases import Case, Film, cases, seed_at, tokens_per_frame
from mmaccel_lab.eval.jobs import Job, measure_in, merged
from mmaccel_lab.eval.needle import Judged, Tally, judge
from mmaccel_lab.eval.table import ENTRIES, Entry, Line, frames_of, markdown, measure, step_ratio
from mmaccel_lab.world import World


def loaded(folder: Path) -> tuple[Any, Any]:
    return load_model(folder, dtype=torch.float32), load_processor(folder)


def drafting(folder: Path) -> tuple[Any, Any, Any]:
    """A model that is its own draft."""
    model, processor = loaded(folder)
    return model, processor, model


def test_as_many_questions_of_each_kind_as_asked() -> None:
    asked = list(cases(32, 6, 10, ("needle", "order", "count")))
    assert Counter(case.kind for case in asked) == {"needle": 6, "order": 6, "count": 6}
    seeds = [case.world.seed for case in asked if case.kind == "needle"]
    assert seeds == list(range(10, 16))
    for case in asked:
        truths = {(q.text, q.answer) for q in case.world.questions([case.kind])}
        assert (case.question, case.answer) in truths


def test_cases_are_the_same_every_time() -> None:
    assert list(cases(16, 3, 0, ("count",))) == list(cases(16, 3, 0, ("count",)))


def test_an_impossible_kind_ends() -> None:
    """One frame holds one card, so there is no order to ask about."""
    assert list(cases(1, 2, 0, ("order",))) == []


def test_one_world_alone() -> None:
    asked = list(cases(64, 1, 7, ("needle", "count"), worlds=1))
    assert [case.world.seed for case in asked] == [7, 7]


def test_a_document_keeps_its_order() -> None:
    case = next(cases(8, 1, 1, ("note",), documents=4, tokens_per_frame=15))
    video = Film().watch(case.world)
    content = case.content(video)
    assert [piece["type"] for piece in content[:-1]] == [piece[0] for piece in case.pieces]
    shown = torch.cat([piece["video"].frames for piece in content if piece["type"] == "video"])
    assert torch.equal(shown, video.frames)
    assert content[-1] == {"type": "text", "text": case.question}


def test_right_is_the_word_and_nothing_more() -> None:
    case = Case(World.generate(0, 4), "needle", (("video", 0, 4),), "what colour was the star ?", "red")
    assert case.right(" Red ") and case.right("red")
    assert not any(case.right(said) for said in ("", "redd", "red red", "blue", "the red one"))


def test_a_film_is_written_once_and_read_whole(tmp_path: Path) -> None:
    world = World.generate(2, 12)
    with Film(tmp_path) as film:
        first = film.watch(world)
        made = film.path(world).stat().st_mtime_ns
        assert film.watch(world) is first and len(first) == 12
    with Film(tmp_path) as film:
        assert torch.equal(film.watch(world).frames, first.frames)
        assert film.path(world).stat().st_mtime_ns == made


def test_a_temporary_film_leaves_nothing() -> None:
    with Film() as film:
        one, two = World.generate(0, 4), World.generate(1, 4)
        film.watch(one)
        film.watch(two)
        folder = film.folder
        assert [path.name for path in folder.iterdir()] == [film.path(two).name]
    assert not folder.exists()


def test_cut_keeps_times() -> None:
    video = Film().watch(World.generate(0, 6))
    piece = video.slice_frames(2, 5)
    assert len(piece) == 3 and torch.equal(piece.times, video.times[2:5]) and piece.fps == video.fps
    assert video.slice_frames(0, 6) is video


@pytest.mark.parametrize(("name", "tokens"), [("tiny-ov-draft", 16), ("tiny-qwen-draft", 15)])
def test_tokens_of_a_frame(name: str, tokens: int, random_folder: Callable[[str], Path]) -> None:
    assert tokens_per_frame(load_processor(random_folder(name))) == tokens


@pytest.mark.parametrize("name", ["tiny-ov-draft", "tiny-qwen-draft"])
def test_judging_counts_what_was_said(name: str, random_folder: Callable[[str], Path]) -> None:
    """A model that knows nothing is wrong, unless the truth is what it happens to say."""
    model, processor = loaded(random_folder(name))
    recipes = {"dense": Recipe(), "near": Recipe.load("a_shape-short")}
    with Film() as film:
        seen = list(judge(model, processor, recipes, cases(8, 2, 0, ("needle", "count")), film))
    assert len(seen) == 4 and all(set(one.answers) == {"dense", "near"} for one in seen)
    tally = Tally("dense")
    for one in seen:
        tally.add(one)
    assert tally.share() == 0.0
    lucky = [Judged(_answered_by(one.case, one.answers["dense"].raw), one.answers) for one in seen]
    tally = Tally("dense")
    for one in [*lucky, seen[0]]:
        tally.add(one)
    (row,) = tally.rows()
    said = [one for one in lucky if one.answers["dense"].raw]
    assert row["right"] == len(said) and row["asked"] == 5 and row["accuracy"] == len(said) / 5
    assert row["frames"] == 8 and row["kept"] == 1.0 and row["kinds"]["needle"]["asked"] == 3


def _answered_by(case: Case, said: str) -> Case:
    return Case(case.world, case.kind, case.pieces, case.question, said.strip().lower() or "something else")


def test_a_tally_of_nothing() -> None:
    assert Tally("dense").rows() == [] and Tally("dense").share() is None


def test_seeds_of_training_are_refused() -> None:
    for seed in (-1, 2**31, 2**32):
        with pytest.raises(WorldError, match="seed must lie between"):
            next(cases(8, 1, seed, ("count",)))
        with pytest.raises(WorldError, match="seed must lie between"):
            seed_at(seed, 8)


def test_lengths_ask_about_other_worlds() -> None:
    """A seed has the same cards at every length, so rows of one seed would be one sample asked again."""
    rows = [
        {case.world.seed for case in cases(frames, 50, seed_at(3, frames), ("count",))}
        for frames in (8, 32, 128, 512, 2048, 4096)
    ]
    assert len(set().union(*rows)) == sum(map(len, rows)) == 300
    assert max(max(row) for row in rows) < 2**32


def test_films_of_one_seed_are_told_apart(tmp_path: Path) -> None:
    short, long = (World.generate(0, 64, style="caption", max_words=words) for words in (60, 480))
    told: list[tuple[str, int, int | None]] = []
    with Film(tmp_path, lambda *step: told.append(step)) as film:
        assert film.path(short) != film.path(long)
        assert not torch.equal(film.watch(short).frames, film.watch(long).frames)
    assert {what for what, _, _ in told} == {"write", "read"} and ("write", 64, 64) in told


def test_an_answer_ends_where_its_model_ends(random_folder: Callable[[str], Path], monkeypatch) -> None:
    """Whichever of its ends that is: answers of a batch are padded from there on. A special token before it is wrong."""
    model, processor = loaded(random_folder("tiny-ov-draft"))
    red, start, end, pad = processor.tokenizer.convert_tokens_to_ids(
        ["\u0120red", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    )
    case = Case(World.generate(0, 4), "needle", (("video", 0, 4),), "what colour was the star ?", "red")
    said = torch.tensor(
        [[red, pad, end, end], [red, end, pad, pad], [red, red, red, red], [start, red, end, pad]]
    )
    prompts = torch.zeros(4, 3, dtype=torch.long)
    monkeypatch.setattr(model, "generate", lambda input_ids, **_: torch.cat([input_ids, said], 1))
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, pad])
    answers = answer_prompts(model, processor, {"input_ids": prompts})
    assert [answer.raw for answer in answers] == ["red", "red", "red red red red", "<|im_start|> red"]
    assert [answer.text for answer in answers] == ["red", "red", "red red red red", "red"]
    assert [case.right(answer.raw) for answer in answers] == [True, True, False, False]
    # Of a model that names none, the tokenizer's end of a turn is one.
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    answers = answer_prompts(model, processor, {"input_ids": prompts})
    assert [answer.raw for answer in answers[:2]] == ["red<|endoftext|>", "red"]


def test_what_was_expected_stays_in_a_tally() -> None:
    tally = Tally("dense")
    tally.expect(8, ("order",), 2)
    (row,) = tally.rows()
    assert row["asked"] == 0 and row["accuracy"] is None
    assert row["kinds"] == {"order": {"right": 0, "asked": 0}}
    assert tally.missing() == [{"frames": 8, "kind": "order", "asked": 0, "wanted": 2}]


@pytest.mark.parametrize("name", ["tiny-ov-draft", "tiny-qwen-draft"])
def test_the_answer_stands_at_the_end_and_is_held_against_the_plain_model(
    name: str, random_folder: Callable[[str], Path]
) -> None:
    model, processor = loaded(random_folder(name))
    (case,) = caption_cases(12, 1, 5)
    with Film() as film:
        content = case.content(film.watch(case.world))
    inputs, answer = forced(processor, content, case.answer, model)
    assert torch.equal(inputs["input_ids"][0, -len(answer) :], answer)
    assert processor.decode(answer).strip() == case.answer
    assert int(answer[-1]) == processor.tokenizer.eos_token_id
    # What stands before the answer is what `generate` would be given.
    asked = processor.chat(content)["input_ids"]
    assert torch.equal(inputs["input_ids"][:, : -len(answer)], asked)
    for extra in ("attention_mask", "mm_token_type_ids"):
        assert extra not in inputs or inputs[extra].shape == inputs["input_ids"].shape
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    assert torch.equal(predicted(model, inputs, len(answer)), logits[-len(answer) - 1 : -1].argmax(-1))


def test_a_model_agrees_with_itself(random_folder: Callable[[str], Path]) -> None:
    model, processor = loaded(random_folder("tiny-ov-draft"))
    other = load_model(random_folder("tiny-ov"), dtype=torch.float32)
    with Film() as film:
        told = list(caption_cases(8, 2, 0, words=60))
        same = agreement(list(caption_scores(model, processor, told, film, draft=model)))
        apart = agreement(list(caption_scores(model, processor, told, film, draft=other)))
    assert same["agreement"] == 1.0 and same["captions"] == 2
    assert apart["agreement"] is not None and apart["agreement"] < 0.5
    assert same["accuracy"] == apart["accuracy"] and same["accuracy"] is not None and same["accuracy"] < 0.5


def test_shares_are_weighted_by_tokens() -> None:
    rows = [{"tokens": 10, "right": 10, "agrees": 0}, {"tokens": 30, "right": 0, "agrees": 30}]
    assert agreement(rows) == {"captions": 2, "tokens": 40, "accuracy": 0.25, "agreement": 0.75}
    assert agreement([{"tokens": 4, "right": 1}])["agreement"] is None
    assert agreement([])["accuracy"] is None


def test_lengths_are_met_in_frames() -> None:
    found = [frames_of(entry, 16) for entry in ENTRIES if entry.task == "V-NIAH"]
    assert found == [8, 32, 128, 512, 2048, 4096]
    for entry in ENTRIES:
        frames = frames_of(entry, 15)
        tokens = frames * 15 / (0.75 if entry.documents else 1)
        assert abs(tokens - entry.tokens) <= max(0.1 * entry.tokens, 4 * 15)
        assert not entry.documents or frames % entry.documents == 0


def test_a_line_is_held_to_its_bounds() -> None:
    assert Line("V-NIAH", 8, 128, 0.98, 50, 0.98).met
    assert not Line("V-NIAH", 8, 128, 0.979, 50, 0.98).met
    assert not Line("draft agrees", 8, 128, 0.95, 50, 0.5, 0.9).met
    assert not Line("V-NIAH", 8, 128, None, 0, 0.98).met


def test_markdown_tells_what_was_missed() -> None:
    lines = [
        Line("V-NIAH", 8, 128, 1.0, 50, 0.98),
        Line("count", 512, 8192, 0.5, 50, 0.9),
        Line("draft step", 0, 1024, 4.2, 1, 3.0, 6.0),
        Line("scene", 512, 8192, 0.3, 50, 0.0),
    ]
    rows = markdown(lines).splitlines()[2:]
    assert rows[0] == "| V-NIAH | 8 | 128 | 100.0% | 50 | at least 98.0% |  |"
    assert rows[1].endswith("at least 90.0% (missed) |  |")
    assert rows[2] == "| draft step | - | 1024 | 4.20 | 1 | 3.00 to 6.00 |  |"
    assert rows[3].endswith("| - |  |")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many are asked for, and not given: on a busy machine two threads spin while they wait for each other."""
    asked = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> None:
    """What a step costs is told by few of them."""
    monkeypatch.setattr(table, "step_ratio", partial(step_ratio, length=16, steps=4, rounds=1))


def test_measuring_gives_a_line_an_entry(random_folder: Callable[[str], Path], few_steps: None) -> None:
    model, processor = loaded(random_folder("tiny-qwen-draft"))
    entries = (
        Entry("V-NIAH", 128, ("needle",), 0.98),
        Entry("MM-NIAH", 240, ("needle", "note"), 0.95, documents=2),
        Entry("caption", 128, (), 0.9),
    )
    told: list[tuple[str, int, int]] = []
    how: dict[str, Any] = {"entries": entries, "progress": lambda *what: told.append(what)}
    with Film() as film:
        lines = list(measure(model, processor, film, samples=1, draft=model, **how))
    assert [line.task for line in lines] == ["V-NIAH", "MM-NIAH", "caption", "draft agrees", "draft step"]
    assert [line.asked for line in lines[:2]] == [1, 2] and lines[3].value == 1.0
    assert told[-1] == ("caption 128", 1, 1) and ("MM-NIAH 240", 2, 2) in told


def test_steps_are_compared_by_what_they_cost_alone(
    random_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    """On a clock that each layer moves on by one, and that other work holds up for a third of the time."""
    small = load_model(random_folder("tiny-ov-draft"), dtype=torch.float32)
    large = load_model(random_folder("tiny-ov"), dtype=torch.float32)
    clock = itertools.count(1)
    now = [0.0]

    def layer(*_: Any) -> None:
        now[0] += 1 if next(clock) % 24 < 16 else 50

    monkeypatch.setattr(table.time, "perf_counter", lambda: now[0])
    depths = {}
    for model in (small, large):
        layers = adapter_for(model).layers(model)
        depths[model] = len(layers)
        for module in layers:
            module.register_forward_hook(layer)
    assert depths[large] > depths[small]
    assert step_ratio(small, small, length=16, steps=12) == 1
    assert step_ratio(large, small, length=16, steps=12) == depths[large] / depths[small]
    assert threads == [2, torch.get_num_threads()] * 2


@pytest.mark.usefixtures("forkserver")
def test_jobs_change_no_figure(random_folder: Callable[[str], Path], few_steps: None) -> None:
    """Answers over two processes, and captions over more processes than there are captions."""
    load = partial(drafting, random_folder("tiny-qwen-draft"))
    entries = (Entry("V-NIAH", 128, ("needle", "count"), 0.98), Entry("caption", 128, (), 0.9))
    recipe = Recipe()
    told: list[tuple[str, int, int]] = []
    model, processor, draft = load()
    with Film() as film:
        alone = list(measure(model, processor, film, samples=1, draft=draft, entries=entries))
    assert {line.device for line in alone} == {"CPU, float32"}
    with Film() as film:
        rest = measure(model, processor, film, samples=1, draft=draft, entries=entries, done=alone[1:])
        assert [line.task for line in rest] == ["V-NIAH"]
    job = Job(load=load, samples=1, seed=0, recipe=recipe, entries=entries)
    together = list(measure_in(2, job, lambda *what: told.append(what)))
    assert [line.task for line in together] == ["V-NIAH", "caption", "draft agrees", "draft step"]
    for one, same in zip(alone[:-1], together[:-1], strict=True):
        assert one.value is not None and same.value is not None
        assert replace(same, value=round(same.value, 9)) == replace(one, value=round(one.value, 9))
    # Which process is heard last depends on the machine.
    assert told[-1] in {("V-NIAH 128", 2, 2), ("caption 128", 1, 1)} <= set(told)


def test_merged_lines_weigh_answers() -> None:
    lines = [Line("count", 8, *own) for own in ((120, 1.0, 3, 0.9), (130, 0.0, 1, 0.9), (128, None, 0, 0.9))]
    assert merged(lines) == Line("count", 8, 122, 0.75, 4, 0.9)
    assert merged(lines[2:]) == lines[2]


@pytest.mark.usefixtures("forkserver")
def test_an_error_of_a_job_is_raised(tmp_path: Path) -> None:
    job = Job(load=partial(drafting, tmp_path), samples=1, seed=0, recipe=Recipe())
    with pytest.raises(ModelError, match="config"):
        list(measure_in(1, job))
