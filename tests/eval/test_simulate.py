"""The chain, the simulation and the closed form agree; the theorems are off where they leave something out.

And the page from ParallelVLM to the code: its table is what the simulator says, and what it names is there.
Figures of drafting, and the certificate: rounding passes, a wrong token does not.
"""

import copy
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.cli import answer
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.policies.draft import Parallel, Sequential
from mmaccel.policies.draft._window_model import tokens_per_round
from mmaccel_lab.eval import self_draft, simulate
from mmaccel_lab.eval.simulate import Costs
from tests.core.test_generate import limit, run
from tests.core.toy import ToyRunner, bigram_rule, toy_prompt
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.draft.test_parallel import pipeline

CASES = [(0.3, 3, 3.0), (0.6, 5, 5.0), (0.81, 4, 4.4), (0.9, 2, 1.7), (0.95, 9, 9.0), (0.8, 6, 4.0)]


@pytest.mark.parametrize(("keep", "window", "ratio"), CASES)
def test_chain_simulation_and_closed_form_agree(keep: float, window: int, ratio: float) -> None:
    costs = Costs(step=ratio, draft=1.0)
    exact = simulate.parallel_rate(keep, window, costs)
    assert exact == pytest.approx(tokens_per_round(keep, window) / max(window, ratio), rel=1e-9)
    assert simulate.simulate(keep, window, costs, 60_000).rate == pytest.approx(exact, rel=0.02)
    one = simulate.sequential_rate(keep, window, costs)
    assert simulate.simulate_sequential(keep, window, costs, 60_000).rate == pytest.approx(one, rel=0.02)


def test_the_chain_by_hand() -> None:
    shares = simulate.stationary(simulate.chain(0.5, 2))
    assert shares.tolist() == pytest.approx([0.6, 0.4, 0.0])
    assert simulate.committed(0.5, 1) == 1.5 and simulate.committed(0.5, 0) == 1


def test_the_theorems_hold_where_nothing_is_refused_and_not_elsewhere() -> None:
    whole = simulate.theorems(1.0, 5, Costs(step=5.0, draft=1.0))
    exact = simulate.speedup(1.0, 5, Costs(step=5.0, draft=1.0), parallel=True)
    assert whole["theorem 3"] == whole["theorem 5"] == whole["theorem 1"] == pytest.approx(exact) == 5
    assert whole["theorem 2"] == pytest.approx(
        simulate.speedup(1.0, 5, Costs(step=5.0, draft=1.0), parallel=False)
    )
    row = simulate.table([0.8], [5.0])[0]
    assert row["simulated"] == pytest.approx(row["chain"], rel=0.03)
    assert row["off"]["theorem 1"] > 0.2, "without rollbacks it promises too much"
    assert "theorem 6" in simulate.markdown([row])


@pytest.mark.parametrize("keep", [0.6, 0.9])
def test_a_streak_is_as_long_as_chance_has_it(keep: float) -> None:
    (row,) = simulate.table([keep], [5.0], tokens=60_000)
    assert row["streak"] == pytest.approx(simulate.streak_mean(keep), rel=0.03)


def test_a_streak_that_nothing_ends_is_endless() -> None:
    (row,) = simulate.table([1.0], [5.0])
    assert row["streak"] == simulate.streak_mean(1.0) == float("inf")
    assert row["simulated"] == pytest.approx(row["chain"], rel=1e-3) and "inf" in simulate.markdown([row])
    assert simulate.table([0.0], [5.0])[0]["streak"] == 0.0


def test_a_replayed_run_is_the_one_that_was_told() -> None:
    """Figure 8: kept, kept, kept, kept, refused, refused, after a start-up round of its own."""
    told = [True, True, True, True, True, False, False]
    result = simulate.simulate(told, 3, Costs(step=3.0, draft=1.0), 7)
    assert (result.steps, result.tokens, max(result.streaks)) == (4, 7, 5) and result.seconds == 12


def test_best_windows() -> None:
    costs = Costs(step=5.0, draft=1.0)
    assert simulate.best(0.9, costs, parallel=True)[0] == 5
    assert simulate.best(0.9, costs, parallel=True)[1] > simulate.best(0.9, costs, parallel=False)[1]
    assert simulate.best(0.9, Costs(step=1.0, draft=1.0), parallel=True) == (1, pytest.approx(1.0))


def test_the_real_pipeline_takes_the_rounds_of_the_chain() -> None:
    """Fates drawn by a random draft over a target that says nothing but zeros: tokens a step within 5% of the chain."""
    keep, window = 0.8, 4
    dice = torch.Generator().manual_seed(5)

    class Loose(ToyRunner):
        def step(self, ids: Tensor, branches: Any = None) -> Tensor:
            right = torch.rand(1, ids.shape[1], generator=dice) < keep
            return torch.nn.functional.one_hot((~right).long(), 2).float() + super().step(ids) * 0

    rule = bigram_rule(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    state = pipeline(rule, rule, 2, window=window)
    state._engine._writer._runner = Loose(rule)  # type: ignore[attr-defined]
    count = 6_000
    _, runner, _ = run(rule, state, limit(1 + count), toy_prompt([0]))
    assert count / runner.steps == pytest.approx(tokens_per_round(keep, window), rel=0.05)


def test_simulation_is_quick() -> None:
    began = time.perf_counter()
    simulate.table([0.6, 0.9], [2.0, 9.0], tokens=5_000)
    assert time.perf_counter() - began < 5


ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "parallelvlm.md").read_text(encoding="utf-8")
LOG = (ROOT / "lab" / "LOG.md").read_text(encoding="utf-8")


def test_the_table_is_the_simulator_s() -> None:
    told = LOG.split("<!-- mmaccel_lab.eval.simulate.table -->\n\n")[1]
    assert told == simulate.markdown(simulate.table([0.6, 0.7, 0.81, 0.9], [3.0, 5.0, 9.0])) + "\n"


def test_why_self_speculation_is_not_used_is_computed() -> None:
    rows = self_draft.gains()
    assert (
        self_draft.markdown(rows) + "\n\n## Theorems" in PAGE.split("<!-- mmaccel_lab.eval.self_draft -->")[1]
    )
    short = rows[0]
    assert short.columns == 25_088 and not short.worth and all(row.worth for row in rows[1:])
    told = f"T_p / T_q is {short.ratio:.2f}, and the simulator's best window is worth {short.speedup:.2f} x at 90% kept"
    assert told in " ".join(PAGE.split())


def test_what_is_named_is_there() -> None:
    files = re.findall(r"`((?:mmaccel|bench|tests)/[\w/.]+)", PAGE)
    assert len(files) > 15 and all((ROOT / name).exists() for name in files)
    parts = re.findall(r"decode_gpu\.py ((?:\w+ ?)+)", PAGE)
    source = (ROOT / "bench" / "decode_gpu.py").read_text(encoding="utf-8")
    assert parts and all(f'    "{part}": ' in source for words in parts for part in words.split())


def test_every_table_and_figure_of_a_measurement_has_its_counterpart() -> None:
    rows = PAGE.split("## Figures and tables")[1].split("## Theorems")[0]
    tables = {int(n) for told in re.findall(r"Tables? ([\d and,]+)", rows) for n in re.findall(r"\d+", told)}
    figures = {
        int(n) for told in re.findall(r"Figures? ([\dab and,]+)", rows) for n in re.findall(r"\d+", told)
    }
    assert tables == set(range(1, 8)) and figures == {1, 3, 4, 6, 7, 8, 9, 10, 11}
    assert all(
        f"`{name}" in PAGE or f"/{name}.py" in PAGE or f"{name}.py" in PAGE
        for name in set(registry("draft")) - {"off", "prompt_lookup"}
    )


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param](layers=3)
    model.generation_config.eos_token_id = None
    return request.param, model


def test_both_conventions_of_a_perfect_draft(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    twin = copy.deepcopy(model)
    recipes = {
        "in turns": Recipe(draft=Sequential(model=twin, window=4)),
        "at once": Recipe(draft=Parallel(model=twin, window=4, process=False)),
    }
    plain = answer.generate(model, inputs, max_new_tokens=21)
    rows = {
        name: answer.draft_metrics(answer.generate(model, inputs, recipe, max_new_tokens=21), plain)
        for name, recipe in recipes.items()
    }
    turns, once = rows["in turns"], rows["at once"]
    assert turns["same"] and once["same"]
    assert (turns["kept"], turns["a_step"], turns["steps"], turns["share"]) == (4.0, 5.0, 4, 1.0)
    assert once["steps"] == 5 and once["a_step"] == 4.0 and once["streak"] >= 16 and once["share"] == 1.0
    assert turns["speedup"] > 0


def test_a_draft_that_fails_is_told(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    plain = answer.generate(model, inputs, max_new_tokens=6)
    broken = copy.deepcopy(model)
    broken.model.forward = None
    with pytest.warns(UserWarning, match="dropped"):
        run = answer.generate(model, inputs, Recipe(draft=Sequential(model=broken)), max_new_tokens=6)
    told = answer.draft_metrics(run, plain)
    assert told["failed"] and told["same"] and told["kept"] == 0 and told["a_step"] <= 1.25


@pytest.fixture(scope="module")
def low(family):
    """The model in bfloat16, its inputs, and what it says."""
    name, model = family
    model = copy.deepcopy(model).bfloat16()
    inputs = prompt(name, PROMPTS["video"])
    inputs = {k: x.bfloat16() if x.is_floating_point() else x for k, x in inputs.items()}
    return model, inputs, answer.generate(model, inputs, max_new_tokens=24)[0][0]


def test_equal_texts_need_no_proof(low):
    model, inputs, ids = low
    assert answer.compare_generations(model, inputs, ids, ids, 4) == answer.GenerationComparison(None)


def test_a_wrong_token_is_not_certified(low):
    """The least likely token stands in the place of the likeliest."""
    model, inputs, ids = low
    logits = answer._logits(model, inputs, ids[:9], [1])
    wrong = ids.clone()
    wrong[9] = logits.argmin()
    told = answer.compare_generations(model, inputs, wrong, ids, 4)
    assert told.first == 9 and told.gap > told.slack and not told.is_explained


def test_a_text_that_ends_early_is_not_certified(low):
    """Both say the same tokens, so that the same token ended one of them and not the other."""
    model, inputs, ids = low
    for ours, plain in ((ids[:9], ids), (ids, ids[:9])):
        told = answer.compare_generations(model, inputs, ours, plain, 4)
        assert told.first == 9 and not told.is_explained


def test_a_near_tie_is_certified(low):
    """Two candidates whose logits are made equal in every precision: the output row of one is copied to the other."""
    model, inputs, ids = low
    tied = copy.deepcopy(model)
    head = tied.get_output_embeddings().weight.data
    other = int((ids[9] + 1) % 150)
    head[other] = head[ids[9]]
    ours = ids.clone()
    ours[9] = other
    told = answer.compare_generations(tied, inputs, ours, ids, 4)
    assert told.first == 9 and told.gap < 1e-5 and told.is_explained


def test_the_slack_is_what_a_wide_pass_changes(low, monkeypatch):
    model, inputs, ids = low
    other = ids.clone()
    other[20] = (ids[20] + 1) % 150
    honest, asked = answer._logits, []

    def rounding(model, inputs, before, sizes):
        asked.append(sizes)
        out = honest(model, inputs, before, sizes)
        out[7] += 0.25 * (len(sizes) == 1)
        return out

    before = answer.compare_generations(model, inputs, other, ids, 8)
    monkeypatch.setattr(answer, "_logits", rounding)
    after = answer.compare_generations(model, inputs, other, ids, 8)
    assert asked == [[1] * 8, [8], [1] * 8]
    assert after.gap == before.gap and 0.2 < after.slack <= before.slack + 0.25


def test_fp32_leaves_no_room(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    ids = answer.generate(model, inputs, max_new_tokens=12)[0][0]
    other = ids.clone()
    other[10] = (ids[10] + 1) % 150
    told = answer.compare_generations(model, inputs, other, ids, 8, exact=model)
    assert told.slack < 1e-5 and not told.is_explained


def test_the_floor_is_weights_and_cache_over_the_rate(family):
    _, model = family
    text = sum(p.numel() for p in model.model.language_model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    want = 4 * (text if tied else text - embedding + head) + 1000
    assert answer.min_decode_step_s(model, 1000, 1e6) == pytest.approx(want / 1e6)
    assert answer.memory_bandwidth(size=1 << 22) > 1e8
