"""The benchmarks of drafts: what is replayed has the chances that rows state, and the commands run from end to end."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pair
import pytest
import recommend
import replayed
import torch
from transformers import DynamicCache

from mmaccel import Recipe, accelerate, load_model, load_processor
from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.policies.draft import Sequential, Tree
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.eval.cases import Film
from tests import python
from tests.models.tiny_random import BUILD


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "VOCAB", 180)


def counting(**choices: Any) -> replayed.Counting:
    model = BUILD["qwen"](layers=1)
    return replayed.Counting(model, adapter_for(model), DynamicCache(), (8,), **choices)


@torch.no_grad()
def test_a_target_says_the_next_number_with_the_chance_asked_for() -> None:
    runner = counting(keep=0.7, seed=1)
    ids = torch.arange(8)[None] + 20
    runner.prefill({"input_ids": ids})
    said: Counter[int] = Counter()
    for _ in range(400):
        said.update((runner.step(ids)[0].argmax(-1) - ids[0]).tolist())
        runner.truncate(8)
    shares = [said[n] / sum(said.values()) for n in (1, 2, 3)]
    assert shares == pytest.approx([0.7, 0.21, 0.063], abs=0.03)


@torch.no_grad()
def test_a_draw_of_zero_says_the_last_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = counting(keep=0.7)
    ids = torch.tensor([[9, 20]])
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.zeros(*size))
    assert runner.prefill({"input_ids": ids}).argmax() == 20 + replayed.RANKS


@torch.no_grad()
def test_a_draft_ranks_the_numbers_that_follow() -> None:
    runner = counting()
    assert runner.prefill({"input_ids": torch.tensor([[4, 5]])}).argmax() == 6
    said = runner.step(torch.tensor([[9, 178]]))[0]
    assert said.topk(replayed.RANKS).indices.tolist() == [[10, 11, 12, 13], [179, 0, 1, 2]]


def test_bytes_of_tensors_are_counted_once_and_until_they_go() -> None:
    weight = torch.nn.Linear(8, 4, bias=False)
    with recommend.Held([weight]) as counted:
        assert counted.now == counted.most == 8 * 4 * 4
        made = torch.zeros(16, dtype=torch.float32)
        view = made[4:].view(3, 4)
        assert counted.now == 128 + 64 and weight.weight.T is not None and view.shape == (3, 4)
        del made
        assert counted.now == 128 + 64
        del view
        assert counted.now == 128 and counted.most == 128 + 64


@pytest.mark.parametrize("name", ["tiny-ov", pytest.param("tiny-qwen", marks=pytest.mark.slow)])
def test_the_pipeline_holds_no_more_than_drafting_in_turns(name: str) -> None:
    """At most two hundredths more: weights, caches, and whatever else is a tensor."""
    model, draft = load_model(name, dtype=torch.float32), load_model(f"{name}-draft", dtype=torch.float32)
    (case,) = caption_cases(16, 1, seed=40)
    with Film() as film:
        inputs = answer.prompt_inputs(load_processor(name), case.content(film.watch(case.world)), model)
    weights = sum(p.nbytes for one in (model, draft) for p in one.parameters())
    most = {}
    for kind, more in (("sequential", {}), ("parallel", {"process": False})):
        pruned = {"name": "uv", "retention": 0.1}
        recipe = Recipe(draft={"name": kind, "model": draft, "window": 4, "prune": pruned, **more})
        with recommend.Held([model, draft]) as counted, accelerate(model, recipe) as fast:
            answer.generate(fast, inputs, max_new_tokens=32)
        most[kind] = counted.most
    assert min(most.values()) > weights and most["parallel"] <= 1.02 * most["sequential"]


@torch.no_grad()
@pytest.mark.parametrize("way", ["alone", "in turns", "by trees"])
def test_generations_are_replayed(way: str) -> None:
    """By the loop and the drafts of the package: what these are given and call is there."""
    model = BUILD["qwen"](layers=1)
    target, small = (replayed.after(model, 40, rows=(), keep=keep) for keep in (0.9, None))
    device = model.device
    drafts = {
        "alone": None,
        "in turns": pair.InTurns(small, device, Sequential(model="shape", window=3), replayed.VOCAB),
        "by trees": pair.InTrees(small, device, Tree(model="shape"), replayed.VOCAB),
    }
    row = replayed.decode(target, drafts[way], [40, 40], 24, seed=1)
    assert row["failed"] == [] and row["tokens"] == 24
    assert row["a_step"] == 1 if way == "alone" else row["a_step"] > 1.5


SHAPE = "llava-onevision-0.5b"


def run(out: Path, part: str, shrink: int, *words: str, device: str = "cpu") -> list[dict[str, Any]]:
    """The rows of a part of the script, none of which failed: on a CPU, at sizes that say nothing."""
    few = f"--device {device} --shrink {shrink} --limit 10000 --target {SHAPE} --out {out}".split()
    python("bench/decode_gpu.py", part, *few, *words, OMP_NUM_THREADS="1")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [row for row in rows if row.get("failed") and row.get("case", "").startswith("pipeline")]
    return rows


@pytest.mark.slow
def test_the_pipeline_runs_in_two_processes(tmp_path: Path) -> None:
    """The draft is right as often as was asked."""
    ways = (f"pipeline:{way}" for way in ("alone", "parallel", "sequential", "tree"))
    words = ("--layers", "1", "--draft", SHAPE, "--windows", "3", "--tokens", "12800", "--draws", "1")
    found = run(tmp_path / "rows", "pipeline", 128, *words, "--repeats", "2", "--only", *ways)
    rows = {row["case"]: row for row in found if "case" in row}
    assert {"alone", "parallel", "sequential", "tree"} <= set(rows)
    assert rows["parallel"]["counters"]["post_verify"] > 0 and not rows["parallel"]["failed"]
    assert 0.6 < rows["parallel"]["kept_share"] < 0.95
    assert rows["sequential"]["a_step"] > 1.5 and rows["tree"]["a_step"] > 1.5


@pytest.mark.slow
def test_sequences_together_are_held_against_one_at_a_time(tmp_path: Path) -> None:
    found = run(tmp_path / "rows", "together", 64, "--layers", "1", "--repeats", "2")
    rows = [row for row in found if "case" in row]
    assert [row["sequences"] for row in rows] == [1, 2, 4, 8]
    for row in rows:
        assert row["case"] == "together" and len(row["agreed_tokens"]) == row["sequences"]
        assert row["over_alone"] == row["tokens_per_s"] / row["alone_per_s"]
    # The weights are read once for all: eight in one step take less than eight steps.
    assert rows[-1]["step_median_s"] < 8 * rows[0]["step_median_s"]


@pytest.mark.slow
def test_a_trained_pair_captions_films_together(tmp_path: Path) -> None:
    more = [
        "--target",
        "tiny-ov",
        "--draft",
        "tiny-ov-draft",
        "--tokens",
        "40",
        "--draws",
        "2",
        "--context",
        "400",
    ]
    found = run(tmp_path / "rows", "verified", 1, *more, "--only", "verified:2")
    (row,) = (row for row in found if "case" in row)
    assert (row["sequences"], row["keep"]) == (2, None) and 400 < row["columns"] < 420
    assert row["kept_share"] > 0.9 and row["over_plain"] > 1.2 and set(row["window_ms"]) > {"0", "7"}


@pytest.mark.parametrize("shape", ["qwen2.5-vl-3b", "llava-onevision-0.5b"])
def test_a_question_fits_its_shape(shape: str) -> None:
    """As many marks as a video has tokens, for both families: else the whole way of a prompt is no row."""
    asked = replayed.question(shape, 3 * 196, "cpu")
    model = replayed.model_of(shape, "meta", 1)
    layout = adapter_for(model).layout(model, asked)
    assert int((layout.frame[0] >= 0).sum()) == 3 * 196
    assert layout.length in (3 * 196 + 2 * replayed.LATER, 3 * 196 + 1 + 2 * replayed.LATER)


@pytest.mark.slow
def test_a_target_over_devices(tmp_path: Path) -> None:
    """The whole way with a target whose layers are dealt out, until the draft has read the prompt."""
    more = f"--draft-device cpu --draft {SHAPE} --windows 3 --layers 2 --tokens 19200 --draws 1 --repeats 2"
    only = ("pipeline:alone", "pipeline:parallel:3", "pipeline:end:alone", "pipeline:end:parallel")
    found = run(tmp_path / "rows", "pipeline", 128, *more.split(), "--only", *only, device="cpu cpu")
    ways = {row["way"]: row for row in found if row.get("case") == "end"}
    own = ways["parallel"]
    assert own["failed"] is None and own["counters"]["drafted"] > 0  # late on a slow machine
