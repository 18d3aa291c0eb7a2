"""The benchmarks of drafts: what is replayed has the chances that rows state, and the commands run from end to end."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import decode_gpu
import held
import pair
import pytest
import replayed
import torch
from transformers import DynamicCache

from mmaccel import Recipe, accelerate, load_model, load_processor
from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.models.runner import HFRunner
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.eval.cases import Film
from tests import python
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.spies import returned


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


def test_a_step_that_outlasts_its_time_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(options: Any, log: Any) -> None:
        while True:
            try:
                pass
            except Exception:
                pytest.fail("a handler of errors took it for one")

    real = decode_gpu.signal.setitimer
    monkeypatch.setattr(decode_gpu.signal, "setitimer", lambda which, s: real(which, min(s, 0.2)))
    step = decode_gpu.limited(decode_gpu.Step("endless", 1.0, endless))
    with pytest.raises(TimeoutError, match="more than 23 s"):
        step.run(None, None)  # type: ignore[arg-type]


def test_reading_and_saying_keeps_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a long prompt's pass is larger than the weights."""
    seen: list[torch.Tensor] = []
    for name in ("prefill", "step"):
        returned(monkeypatch, HFRunner, name, lambda made, *_, **__: seen.append(made))
    model = BUILD["qwen"](layers=1)
    assert all(p.requires_grad for p in model.parameters())
    told = pair.read_and_say(model, prompt("qwen", PROMPTS["video"]))
    assert told["prefill_s"] > 0 and len(told["said"]) == 5
    assert len(seen) > 6 and not any(x.requires_grad for x in seen)


def test_bytes_of_tensors_are_counted_once_and_until_they_go() -> None:
    weight = torch.nn.Linear(8, 4, bias=False)
    with held.Held([weight]) as counted:
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
        with held.Held([model, draft]) as counted, accelerate(model, recipe) as fast:
            answer.generate(fast, inputs, max_new_tokens=32)
        most[kind] = counted.most
    assert min(most.values()) > weights and most["parallel"] <= 1.02 * most["sequential"]


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
    ways = (f"pipeline:{way}" for way in ("steps", "alone", "parallel", "sequential", "tree"))
    words = ("--layers", "1", "--draft", SHAPE, "--windows", "3", "--tokens", "12800", "--draws", "1")
    found = run(tmp_path / "rows", "pipeline", 128, *words, "--repeats", "2", "--only", *ways)
    rows = {row["case"]: row for row in found if "case" in row}
    assert {"step", "alone", "parallel", "sequential", "tree"} <= set(rows)
    assert rows["parallel"]["counters"]["post_verify"] > 0 and not rows["parallel"]["failed"]
    assert 0.6 < rows["parallel"]["kept_share"] < 0.95
    assert rows["sequential"]["a_step"] > 1.5 and rows["tree"]["a_step"] > 1.5


@pytest.mark.slow
def test_memory_of_two_processes_and_two_models_on_one_device(tmp_path: Path) -> None:
    """Both processes are counted, the weights of both models among it."""
    words = ("--layers", "1", "--draft", SHAPE, "--windows", "3", "--tokens", "1600", "--repeats", "2")
    only = ("--only", "pipeline:memory", "pipeline:one-device")
    rows = run(tmp_path / "rows", "pipeline", 64, *words, *only)
    first, second = (row for row in rows if row.get("case") == "memory")
    assert (first["way"], second["way"]) == ("parallel", "sequential pruned")
    weights = 2 * sum(p.nbytes for p in replayed.model_of(SHAPE, "cpu", 1).parameters())
    for row in (first, second):
        assert row["failed"] is None and weights < row["total"] == sum(row["bytes"]) < 1.5 * weights
    assert second["parallel_over_this"] == first["total"] / second["total"]
    ways = {row["way"]: row for row in rows if row.get("case") == "one device"}
    assert set(ways) == {"alone", "sequential", "parallel"} and ways["alone"]["speedup"] == 1.0
    assert ways["parallel"]["failed"] is None and ways["parallel"]["counters"]["post_verify"] > 0


@pytest.mark.slow
def test_a_batch_is_held_against_plain_steps_of_it(tmp_path: Path) -> None:
    """On one device, through `generate`; what is measured drafts only where that was faster than plain steps."""
    words = ("--layers", "1", "--draft", SHAPE, "--windows", "3", "--repeats", "1", "--only", "batch:2")
    (row,) = (row for row in run(tmp_path / "rows", "batch", 64, *words) if "case" in row)
    assert row["case"] == "batched" and row["sequences"] == 2
    assert row["always_over_plain"] == row["always_per_s"] / row["plain_per_s"]
    # A draft as large as its target, on the same core: turns are slower by far.
    assert row["always_over_plain"] < 1 and row["measured_drafts"] is False


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


@pytest.mark.parametrize("shape", ["qwen2.5-vl-3b", "llava-onevision-0.5b"])
def test_a_question_fits_its_shape(shape: str) -> None:
    """As many marks as a video has tokens, for both families: else the whole way of a prompt is no row."""
    asked = replayed.question(shape, 3 * 196, "cpu")
    model = replayed.model_of(shape, "meta", 1)
    layout = adapter_for(model).layout(model, asked)
    assert int((layout.frame[0] >= 0).sum()) == 3 * 196
    assert layout.length in (3 * 196 + 2 * replayed.LATER, 3 * 196 + 1 + 2 * replayed.LATER)


@pytest.mark.slow
def test_ratios_and_a_target_over_devices(tmp_path: Path) -> None:
    """The rows of Tables 3 and 5, and the whole way with a target whose layers are dealt out."""
    out, more = tmp_path / "rows", f"--draft-device cpu --draft {SHAPE} --windows 3 --layers 2"
    words = [*more.split(), "--tokens", "6400", "--draws", "1", "--repeats", "2"]
    found = run(out, "ratios", 128, *words, device="cpu cpu")
    ratios = [row for row in found if row.get("case") == "ratios"]
    assert [row["retention"] for row in ratios] == [1.0, 0.5, 0.1, 0.05, 0.01, 0.0]
    assert all(one["byte_ratio"] <= two["byte_ratio"] for one, two in itertools.pairwise(ratios))
    only = ("pipeline:alone", "pipeline:parallel:3", "pipeline:end:alone", "pipeline:end:parallel")
    found = run(out, "pipeline", 128, *words, "--only", *only, device="cpu cpu")
    ways = {row["way"]: row for row in found if row.get("case") == "end"}
    assert ways["parallel"]["failed"] is None and ways["parallel"]["a_step"] > 1
