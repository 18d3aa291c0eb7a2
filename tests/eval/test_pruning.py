"""What pruning costs: the measures against hand-made cases and against whole and pruned models run by themselves."""

from __future__ import annotations

import pytest
import torch

import mmaccel
from mmaccel.core.recipe import Recipe
from mmaccel.policies.prune import DyCoke, FastV, UniformPrune, UVPrune, VisionZip
from mmaccel_lab.eval.pruning import (
    agrees,
    at_ends,
    average_share,
    by_frame,
    chosen,
    continued,
    draft_agrees,
    left,
    paired,
    rounds,
    write,
)
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.prune.layouts import layout_of, videos


@pytest.fixture(scope="module", params=BUILD)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_model_agrees_with_its_own_text(family: str) -> None:
    model, inputs = BUILD[family](layers=4), prompt(family, PROMPTS["video"])
    said, report = write(model, inputs, None, 8)
    assert report.new_tokens == len(said) and agrees(model, inputs, said).all()
    wrong = said.clone()
    wrong[3] = (said[3] + 1) % 180
    told = agrees(model, inputs, wrong)
    assert told[:3].all() and not told[3]


def test_a_lossy_model_is_judged_by_the_whole_one(family: str) -> None:
    model, inputs = BUILD[family](layers=4), prompt(family, PROMPTS["long"])
    lossy = DyCoke(drop=1.0, forget=0.0)
    said, _ = write(model, inputs, Recipe(prune=lossy), 10)
    assert agrees(model, inputs, said, lossy).all()
    told = agrees(model, inputs, said)
    for n in range(len(said)):
        ids = continued(inputs, said[:n])
        with torch.no_grad():
            assert bool(told[n]) == (int(model(**ids).logits[0, -1].argmax()) == int(said[n]))
    assert not told.all()


@pytest.mark.parametrize("compact", [False, True])
def test_a_draft_that_sees_what_it_is_told(family: str, compact: bool) -> None:
    """Against the draft's own runner over the kept columns, token by token."""
    target, draft = BUILD[family](layers=4), BUILD[family](layers=2, seed=3)
    with torch.no_grad():  # heads that look: what is written hangs on what is seen
        for layer in draft.model.language_model.layers:
            layer.self_attn.q_proj.weight *= 30
            layer.self_attn.o_proj.weight *= 10
    inputs = prompt(family, PROMPTS["video"])
    said = torch.randint(3, 180, (8,), generator=torch.Generator().manual_seed(1))
    layout, found = chosen(
        target, inputs, {"uv": UVPrune(retention=0.3), "half": UniformPrune(retention=0.5)}
    )
    assert layout.length == inputs["input_ids"].shape[1]
    agree = draft_agrees(draft, inputs, said, found, compact)
    for name, columns in found.items():
        told = agree[name]
        runner = mmaccel.core.attach.adapter_for(draft).runner(draft)
        with torch.no_grad():
            logits = [runner.prefill(inputs, keep=columns, compact=compact)]  # type: ignore[call-arg]
            logits += [runner.step(said[None, n : n + 1])[:, -1] for n in range(len(said) - 1)]
        mine = torch.cat(logits).argmax(-1)
        assert told.tolist() == (mine == said).tolist()
        # What the draft would write at each place, judged at that place, is right everywhere.
        for n in range(len(said)):
            text = torch.cat([said[:n], mine[n : n + 1]])
            assert draft_agrees(draft, inputs, text, {name: columns}, compact)[name][n]


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_rounds_are_those_of_greedy_speculation(window: int) -> None:
    """Round by round: up to `window` right tokens, then one from the target."""
    g = torch.Generator().manual_seed(window)
    for _ in range(20):
        agree = torch.rand(40, generator=g) < 0.7
        lengths = rounds(agree, window)
        assert max(lengths) <= window and sum(lengths) + len(lengths) in (40, 41)
        place = 0
        for run in lengths:
            assert agree[place : place + run].all()
            assert run == window or place + run >= 40 or not agree[place + run]
            place += run + 1
    assert rounds(torch.ones(12, dtype=torch.bool), 5) == [5, 5]
    assert rounds(torch.zeros(3, dtype=torch.bool), 5) == [0, 0, 0]


def test_average_share_is_a_mean_over_layers(family: str) -> None:
    model, inputs = BUILD[family](layers=4), prompt(family, PROMPTS["video"])
    layout, columns, share = left(model, inputs, FastV(retention=0.5, layer=1))
    m = len(videos(layout))
    assert share == pytest.approx((1 + 3 * (m // 2) / m) / 4)
    assert len(columns) == layout.length - m + m // 2 == layout.length - m + sum(by_frame(layout, columns))
    assert left(model, inputs, VisionZip(retention=1.0))[2] == 1.0
    told = {"visual": 100.0, "visual from layer 2": 50.0, "visual from layer 3": 10.0}
    assert average_share(told, 5) == pytest.approx((1 + 1 + 0.5 + 0.1 + 0.1) / 5)


def test_by_frame_and_at_the_ends() -> None:
    layout = layout_of(
        [("text", 2), ("video", [(1, 2)] * 3, 1), ("text", 1), ("video", [(2, 2)] * 3), ("text", 2)]
    )
    columns = torch.tensor([0, 1, 2, 3, 6, 8, 9, 10, 11, 18, 22, 23])
    assert by_frame(layout, columns) == [2, 0, 1, 2, 0, 1]
    assert at_ends([5, 5, 5, 5, 5, 5, 5, 5]) == 1.0
    assert at_ends([10, 0, 0, 0, 0, 0, 0, 10]) == 2.0
    assert at_ends([0, 0, 5, 5, 5, 5, 0, 0]) == 0.0
    assert at_ends([]) == at_ends([0, 0, 0]) == 1.0


def test_paired_sees_through_what_is_common() -> None:
    g = torch.Generator().manual_seed(0)
    common = torch.randn(60, generator=g, dtype=torch.float64) * 10
    better = common + 0.5 + 0.1 * torch.randn(60, generator=g, dtype=torch.float64)
    mean, low, high = paired(better.tolist(), common.tolist())
    assert 0.4 < low < mean < high < 0.6
    assert paired([1.0, 2.0], [1.0, 2.0]) == (0.0, 0.0, 0.0)
