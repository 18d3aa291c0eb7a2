"""Pruners of a prompt on a memory that lets columns go: its window counts what a layer holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.memory.kv import KVView
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.policies.kv import Window
from mmaccel.policies.prune import DyCoke, FastV, PyramidDrop, SparseVLM, VisionZip
from tests.models.test_recalled import CLOSE, DEPTH, FAMILIES, SHARP, prompt, said
from tests.products import product

PRUNERS: dict[str, TokenPruner] = {
    "fastv": FastV(retention=0.2),
    "pyramid_drop": PyramidDrop(),
    "sparsevlm": SparseVLM(layers=(0, 1), retention=(0.5, 0.2)),
    "visionzip": VisionZip(retention=0.5),
    "dycoke": DyCoke(layer=2, forget=0.6, refresh=1.0),
    "dycoke that drops nothing": DyCoke(layer=2, drop=0.0, forget=0.6, refresh=1.0),
}


@pytest.mark.parametrize(("kind", "name"), product(PRUNERS, FAMILIES))
def test_with_room_for_all_it_is_the_pruned_model(kind: str, name: str) -> None:
    inputs = prompt(name)
    runs = [said(name, {"kv": kv, "prune": PRUNERS[kind]}, inputs) for kv in ("full", Window(window=4096))]
    assert torch.equal(runs[0][0], runs[1][0]) and len(runs[0][0].unique()) > 1
    torch.testing.assert_close(runs[1][1], runs[0][1], **CLOSE)  # type: ignore[arg-type]
    for at in ("visual", "held_mean"):
        assert runs[1][2].kv[at] == runs[0][2].kv[at]


@pytest.mark.parametrize(("kind", "name"), product(PRUNERS, FAMILIES))
def test_what_goes_is_gone(kind: str, name: str) -> None:
    """A window that is shorter than what is left of the prompt: it holds less, and says something else."""
    inputs = prompt(name)
    full, tight = (
        said(name, {"kv": kv, "prune": PRUNERS[kind]}, inputs) for kv in ("full", Window(window=40, margin=8))
    )
    assert tight[2].kv["held"] <= 4 + 40 + 8 + 1 < full[2].kv["held"] and tight[2].kv["visual"] > 0
    assert not torch.equal(full[1], tight[1])


def test_a_decoded_token_chooses_among_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DyCoke forgets, on a window: of the tokens that the window still shows, and at each step of those."""
    asked: list[tuple[Tensor, Tensor, Tensor | None]] = []

    class Spied(DyCoke):
        def recall(self, attention: Tensor, columns: Tensor, before: Tensor | None) -> Tensor | None:
            asked.append((attention, columns, before))
            return super().recall(attention, columns, before)

    seen: list[tuple[int, Tensor, KVView]] = []
    inner = PrunedKVState.view

    def view(self: Any, layer: int, query: Tensor) -> KVView:
        made = inner(self, layer, query)
        if query.shape[2] == 1:
            seen.append((layer, query, made))
        return made

    monkeypatch.setattr(PrunedKVState, "view", view)
    prune = Spied(layer=2, drop=0.0, forget=0.5, refresh=1.0)
    kv, inputs = Window(window=70, margin=30), prompt("random-qwen")
    model = SHARP["random-qwen"][0]
    with mmaccel.accelerate(model, kv=kv, prune=prune) as fast:
        layout = fast.adapter.layout(model, inputs)
        fast.generate(**inputs, max_new_tokens=5, do_sample=False)
    visual = prune.candidates(layout)
    assert len(asked) == 4 == len(seen) // DEPTH
    for step, (attention, columns, before) in enumerate(asked):
        last = layout.length + step
        line = torch.arange(last + 1)
        within = line[(line < 4) | (line > last - 70)]
        want = visual[torch.isin(visual, within)]
        assert torch.equal(columns, want) and 0 < len(want) < len(visual)
        glance, later = (seen[step * DEPTH + layer] for layer in (1, 2))
        assert (glance[0], later[0]) == (1, 2) and glance[2].column is not None
        heads = glance[1].shape[1]
        key = glance[2].key[0].repeat_interleave(heads // glance[2].key.shape[1], 0)
        scores = (glance[1][0] @ key.mT)[:, 0] * key.shape[-1] ** -0.5
        unseen = ~torch.isin(glance[2].column, within)
        assert bool(unseen.any()) and torch.isin(within, glance[2].column).all()
        paid = scores.masked_fill(unseen, -torch.inf).softmax(-1).mean(0)
        torch.testing.assert_close(attention, paid[torch.isin(glance[2].column, want)])
        if before is not None:
            old = asked[step - 1]
            torch.testing.assert_close(before, old[0][torch.isin(old[1], want)])
        chosen = want[attention.topk(int(0.5 * len(want) + 1e-9)).indices]
        shown = later[2].column
        assert shown is not None
        inside = shown[torch.isin(shown, within)]
        text = within[~torch.isin(within, visual)]
        assert torch.equal(inside, torch.cat([text, chosen]).sort().values)
        assert not torch.isin(shown, visual[~torch.isin(visual, chosen)]).any()
