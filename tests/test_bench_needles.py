"""The benchmark of needles: what it asks first, that it goes on where it stopped, and what its rows tell."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import sys
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.cli.answer import ask, prompt
from mmaccel_lab.eval.haystack import Shot

BENCH = Path(__file__).parent.parent / "bench"
RECORD = BENCH / "results" / "haystack_h200_202611.jsonl"


@pytest.fixture(scope="module")
def needles() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("needles")
    finally:
        sys.path.remove(str(BENCH))


def test_a_round_is_a_whole_map(needles: Any, shipped: Callable[[str], str]) -> None:
    models = [shipped("tiny-ov"), shipped("tiny-qwen")]
    options = Namespace(models=models, documents=[0, 4], lengths=[2, 8, 4], depths=3, samples=3, seed=0)
    options.methods = list(needles.METHODS)
    asked = list(needles.units(options, "bfloat16"))
    cells = sorted((model, documents) for model in models for documents in (0, 4))
    plain = [unit for unit in asked if unit.setting.compress is None and unit.setting.dtype == "bfloat16"]
    # Three rounds: each asks every method at every length and depth of both tasks and models, the longest first.
    turns = [list(units) for _, units in groupby(plain, lambda unit: unit.turn)]
    assert len(turns) == 3
    for units in turns:
        assert [unit.world.frames for unit in units] == [
            512,
            512,
            384,
            384,
            256,
            256,
            192,
            192,
            128,
            128,
            96,
            96,
        ]
        assert sorted((unit.setting.model, unit.setting.documents) for unit in units) == sorted(cells * 3)
        assert all(unit.names == needles.METHODS for unit in units)
        for unit in units:
            places = [
                next(c.frame for c in unit.world.cards if c.shape in case.question) for case in unit.cases
            ]
            assert [place * 3 // unit.world.frames for place in places] == [0, 1, 2]
    # Both models, and both dtypes, are asked about the same worlds.
    assert turns[0][0].cases == turns[0][1].cases
    zipped = [unit for unit in asked if unit.setting.compress]
    assert zipped[0].turn > turns[1][0].turn and zipped[-1].turn < turns[2][0].turn
    assert "visionzip" not in zipped[0].names and {unit.world.frames for unit in zipped} == {
        512,
        384,
        256,
        192,
    }
    exact = [unit for unit in asked if unit.setting.dtype == "float32"]
    assert {unit.names for unit in exact} == {("dense", "searched")} and exact[0].cases == asked[0].cases
    keys = [(unit.setting, unit.world, case.question) for unit in asked for case in unit.cases]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("model", ["tiny-ov", "tiny-qwen"])
def test_a_batch_answers_as_each_question_alone(
    needles: Any, shipped: Callable[[str], str], tmp_path: Path, model: str
) -> None:
    """Rows of a document's questions: right, kept and tokens are those of questions asked one by one, encoded each time."""
    options = Namespace(models=[shipped(model)], documents=[4], lengths=[0.5], depths=2, samples=1, seed=0)
    options.methods = ["dense", "searched", "visionzip"]
    unit = next(needles.units(options, "float32"))
    asker = needles.Asker("cpu", str(tmp_path), number=1)
    fields = {"visionzip": {"prune": {"name": "visionzip", "retention": 0.5}}}
    calls = []
    held = asker._model(model, "float32")
    tower = held.model.vision_tower if model == "tiny-ov" else held.model.visual
    tower.register_forward_pre_hook(lambda *_: calls.append(1))
    rows = list(asker.rows(replace(unit, fields=fields)))
    assert len(calls) == 1 and len(rows) == 6
    processor, methods = needles.choices.processor(model), asker._methods(unit.setting)
    for name in options.methods:
        recipe = methods.fixed.get(name) or methods.recipe(fields[name])
        shots = []
        for depth, case in enumerate(unit.cases):
            inputs = prompt(processor, case.content(asker.film.watch(case.world)), held)
            answer = ask(held, processor, inputs, recipe, max_new_tokens=needles.MAX_NEW_TOKENS)
            shots.append(Shot.of(name, depth, case, answer))
        mine = [row for row in rows if row["recipe"] == name]
        for row, shot in zip(mine, shots, strict=True):
            told = shot.to_dict()
            kept = sum(shot.kept for shot in shots) / len(shots) if recipe.prune is None else told["kept"]
            assert {**told, "kept": pytest.approx(kept)} == {key: row[key] for key in told}


def test_a_run_goes_on_where_it_stopped(
    needles: Any, shipped: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["--models", shipped("tiny-ov"), "--documents", "0", "--lengths", "0.25", "--depths", "2"]
    words += ["--samples", "1", "--methods", "dense", "searched", "tri_shape", "--device", "cpu"]
    words += ["--renderers", "1", "--out", str(rows)]
    needles.main([*words, "--processes", "0", "--limit", "0"])
    assert "not complete" in capsys.readouterr().err
    needles.main([*words, "--processes", "2"])
    told = capsys.readouterr()
    assert "not complete" not in told.err and "  dense               16: " in told.out
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    answers = [line for line in lines if "recipe" in line]
    # Two questions to three methods, and again with a compressor before; a level for the rival of each.
    assert len(answers) == 12 and sum("level" in line for line in lines) == 2
    assert {line["compress"] for line in answers} == {None, "visionzip"}
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines if line not in answers[-3:]))
    needles.main([*words, "--processes", "1"])
    again = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted(map(json.dumps, answers)) == sorted(json.dumps(line) for line in again if "recipe" in line)
    assert len([line for line in again if "level" in line]) == 2


class Thread(threading.Thread):
    """What stands for a process, so that it knows what is patched here; it ends when nobody holds its line."""

    def run(self) -> None:
        with contextlib.suppress(EOFError):
            super().run()

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


def test_what_had_no_memory_is_asked_again_one_by_one(
    needles: Any,
    shipped: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, when all else is done and by fewer processes; what fails again, or for another reason, is missing and told."""
    tries = tmp_path / "tries"

    def rows(self: Any, unit: Any) -> Any:
        with tries.open("a", encoding="utf-8") as file:
            file.write(f"{unit.world.frames} {unit.alone} {self.number} {','.join(unit.names)}\n")
        if unit.alone and unit.world.frames == 64:
            raise RuntimeError("CUDA: out of memory")
        for name in unit.names:
            for depth, case in enumerate(unit.cases):
                shot = Shot(name, unit.world.frames, depth, case.world.seed, case.question, True, 9, 1.0)
                yield {**asdict(unit.setting), **shot.to_dict()}
            if unit.world.frames == 16:
                raise ValueError("no answer")
            if not unit.alone:
                raise torch.OutOfMemoryError("no memory")

    context = Namespace(Pipe=multiprocessing.Pipe, Process=Thread)
    monkeypatch.setattr(needles.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(needles.Asker, "rows", rows)
    words = ["--models", shipped("tiny-ov"), "--documents", "0", "--lengths", "0.25", "0.5", "1"]
    words += ["--depths", "2", "--samples", "1", "--methods", "dense", "searched", "--device", "cpu"]
    needles.main([*words, "--processes", "2", "--renderers", "0", "--out", str(tmp_path / "rows.jsonl")])
    told = capsys.readouterr()
    whole = [line.split() for line in tries.read_text().splitlines()]
    again = [line for line in whole if line[1] == "True"]
    assert whole[-len(again) :] == again and {number for _, _, number, _ in again} == {"0"}
    # Of a plain and a compressed unit of 64 and 32 frames each the first method is there, and is not asked again.
    assert sorted((frames, names) for frames, _, _, names in again) == [
        *[("32", "searched")] * 2,
        *[("64", "searched")] * 2,
    ]
    assert "no answer" in told.err and told.err.count("RuntimeError: CUDA: out of memory") == 1
    assert "OutOfMemoryError" not in told.err
    assert "not complete: 6 of 20 answers are missing" in told.err


def test_questions_of_unlike_length_are_asked_one_by_one(
    needles: Any, shipped: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Namespace(
        models=[shipped("tiny-ov")], documents=[0], lengths=[0.25], depths=2, samples=1, seed=0
    )
    options.methods = ["dense"]
    unit = next(needles.units(options, "float32"))
    first, last = unit.cases
    longer = replace(last, question=last.question.replace("what", "and what"))
    sizes: list[int] = []
    ask_each = needles.ask_each

    def told(model: Any, processor: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        return ask_each(model, processor, inputs, *rest, **more)

    monkeypatch.setattr(needles, "ask_each", told)
    asker = needles.Asker("cpu", str(tmp_path))
    rows = list(asker.rows(replace(unit, cases=(first, longer))))
    assert sizes == [1, 1] and rows[1]["tokens"] > rows[0]["tokens"]
    alone = list(asker.rows(replace(unit, alone=True)))
    assert sizes == [1] * 4 and [row["right"] for row in alone] == [True, True]
    assert list(asker.rows(unit)) == alone and sizes[4:] == [2]


def test_figures_and_maps_follow_from_the_rows(
    needles: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needles.main(["--rows", str(RECORD), str(RECORD), "--maps", str(tmp_path / "maps")])
    told = capsys.readouterr().out
    both = told[told.index("all models, both tasks, bfloat16\n") :]
    assert "searched            800/800 = 100.0% (99.5% to 100.0%)\n" in both
    assert "block_topk          564/800 = 70.5%" in both and "against searched -29.5" in both
    # With the question's rows dense, boundaries are worth little here; without, three answers of ten.
    mixed = told[told.index("all models, MM-NIAH, bfloat16\n") :]
    boundaries = next(line for line in mixed.splitlines() if "ours, less ours without boundaries" in line)
    words = boundaries.split("boundaries")[1].split()
    assert words[0] == "+0.2" and " ".join(words[6:]) == "+32.0 (+25.1 to +38.3), 400 questions"
    # Of every cell of every method, eight questions; its share against ours is told where it is a tenth off.
    rows = needles.Rows(RECORD)
    whole = {setting: shots for setting, shots in rows.shots.items() if setting.dtype == "bfloat16"}
    for setting, shots in whole.items():
        asked = Counter((shot.recipe, shot.frames, shot.depth) for shot in shots)
        methods, lengths, times = (11, 2, 2) if setting.compress else (12, 5, 8)
        assert len(asked) == methods * lengths * 5 and set(asked.values()) == {times}
    assert (
        "tiny-qwen V-NIAH bfloat16, 128 frames: minference computes 41.6% where ours computes 29.8% (+40%)\n"
        in told
    )
    assert "bfloat16, 1536 frames: tri_shape computes" not in told
    # A map of each setting in which rivals were asked.
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == [
        f"needles_{model}_{task}_{setting}.svg"
        for model in ("tiny-ov", "tiny-qwen")
        for task in ("mm-niah", "v-niah")
        for setting in ("bfloat16", "float32", "visionzip_bfloat16")
    ]
