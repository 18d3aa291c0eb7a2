"""What a decoded token sees of a stream: a part of what was recalled, by what it looked at in an earlier layer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.prune import best
from mmaccel.core.prefill.recalled import RecallPruning
from mmaccel.core.streams.asking import asked as asked_of
from mmaccel.policies.prune import FastV
from tests.models.streams import QUESTION
from tests.models.test_recalled import DEPTH, TIGHT, session, watched


@dataclass(frozen=True, kw_only=True)
class Both(FastV):
    """Drops between layers, and of what is left a decoded token sees a part; every other one chooses anew."""

    @property
    def scoring_layer(self) -> int:
        return 1

    def recall(self, attention: Tensor, columns: Tensor, before: Tensor | None) -> Tensor | None:
        LOOKS.append((attention, columns, before))
        if len(attention) and len(LOOKS) % 2 == 0:
            return None
        return columns[best(attention, len(columns) // 2)]


LOOKS: list[tuple[Tensor, Tensor, Tensor | None]] = []


@pytest.mark.parametrize("kv", ("full", "rekv", "mosaic"))
def test_a_decoded_token_sees_what_it_looked_at(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its attention in the scoring layer, or in each layer that shows units of its own."""
    views: list[tuple[int, KVView, KVView, int]] = []

    def see(pruning: RecallPruning, layer: int, whole: KVView, left: KVView) -> None:
        assert pruning._pass is not None
        if pruning._pass.kind == "answer":
            views.append((layer, whole, left, pruning._stream.head + pruning.state.summaries(layer)))

    watched(monkeypatch, see)
    LOOKS.clear()
    steps = 5
    with session("random-ov", {"kv": TIGHT[kv], "prune": Both(layer=2, retention=0.5)}) as one:
        live = one._live
        assert live is not None
        with asked_of(live, QUESTION, 8) as asked:
            kept = {layer: columns.clone() for layer, columns in asked.state._columns.items()}  # type: ignore[attr-defined]
            start = asked.length()
            for n in range(steps):
                asked.step(torch.tensor([[5 + n]]))
            rows = start - asked.state._start  # type: ignore[attr-defined]
    unlike = kv != "full"
    assert len(views) == steps * DEPTH and sorted(kept) == [2, 3]
    told, chosen, past = iter(LOOKS), {}, {}
    for number, (layer, whole, left, first) in enumerate(views):
        base = whole.key.shape[2] - rows - 1 - number // DEPTH
        own = kept.get(layer, torch.arange(base))
        at = own[own >= first]
        looks = layer > 1 if unlike else layer == 1
        if looks:
            attention, columns, before = next(told)
            query, groups = whole.query, whole.key.shape[1]
            assert query is not None and torch.equal(columns, at)
            key = whole.key[0].repeat_interleave(query.shape[1] // groups, 0)
            scores = (query[0] @ key.mT)[:, 0] * key.shape[-1] ** -0.5
            torch.testing.assert_close(attention, scores.softmax(-1).mean(0)[at])
            assert (before is None) == (layer not in past)
            assert before is None or torch.equal(before, past[layer])
            past[layer] = attention
            index = next(i for i, one in enumerate(LOOKS) if one[0] is attention)
            if index % 2 == 0:
                chosen[layer] = columns[best(attention, len(columns) // 2)]
        seen = chosen.get(layer if unlike else 1) if layer > 1 else None
        shown = own if seen is None else torch.cat([torch.arange(first), seen[torch.isin(seen, own)]])
        shown = torch.cat([shown, torch.arange(base, whole.key.shape[2])])
        assert torch.equal(left.key, whole.key[:, :, shown]) and torch.equal(
            left.value, whole.value[:, :, shown]
        )
    assert next(told, None) is None and len(past) == (2 if unlike else 1)
