"""The share of drafted tokens that is kept at a window of 1: measured, and expected by the distributions of both models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CLOSE = 0.02
"""How far apart the shares kept by `parallel` and `sequential` may be at a window of 1."""


@torch.no_grad()
def chances(
    target: nn.Module, draft: nn.Module, inputs: Mapping[str, Tensor], ids: Tensor, temperature: float
) -> Tensor:
    """[n - 1] the chance that a token of the draft was kept at each place of the text `ids` [n], which the target drew after
    the prompt `inputs`; its first token is the target's own.

    A drafted token x is kept with probability min(1, p(x) / q(x)) and y is said with probability p(y): where y is said, the
    draft's token was kept with probability min(1, q(y) / p(y)).
    """
    whole = torch.cat([inputs["input_ids"], ids[None]], 1)
    given = {**inputs, "input_ids": whole, "attention_mask": torch.ones_like(whole)}
    if (kinds := inputs.get("mm_token_type_ids")) is not None:
        given["mm_token_type_ids"] = nn.functional.pad(kinds, (0, len(ids)))
    rows = slice(inputs["input_ids"].shape[1] - 1, -1)
    p, q = (torch.softmax(one(**given).logits[0, rows].float() / temperature, -1) for one in (target, draft))
    places = torch.arange(len(ids))
    return (q[places, ids] / p[places, ids]).clamp(max=1)[1:]


def shares(texts: Iterable[Tensor]) -> dict[str, Any]:
    """The expected shares over texts of `chances` [n].

    `parallel` has every place judged. `sequential` goes two places on after a token that was kept, for the target adds one
    of its own: where easy and hard places alternate its share is another.
    """
    kept, judged = dict.fromkeys(("parallel 1", "sequential 1"), 0.0), 0.0
    tokens = 0
    for chance in texts:
        begun = [1.0] + [0.0] * (len(chance) + 1)
        for place, keep in enumerate(chance.tolist()):
            begun[place + 1] += begun[place] * (1 - keep)
            begun[place + 2] += begun[place] * keep
            kept["parallel 1"] += keep
            kept["sequential 1"] += begun[place] * keep
            judged += begun[place]
        tokens += len(chance)
    return {
        "tokens": tokens,
        "parallel 1": kept["parallel 1"] / tokens,
        "sequential 1": kept["sequential 1"] / judged,
    }


def as_often(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The shares that `parallel` and `sequential` keep at a window of 1; None where a row is missing.

    `parallel` has every token of a text judged, `sequential` leaves out those that the target adds to what it kept: in a
    text whose easy and hard places alternate the shares differ by that too. `expected_gap` is by how much (expected.py).
    """
    expected = next((r for r in rows if r["case"] == "expected"), None)
    by = {r["case"]: r for r in rows if r["case"] in ("sequential 1", "parallel 1") and "rounds" in r}
    if len(by) < 2:
        return None
    kept = {name: r["kept"] for name, r in by.items()}
    gap = gap_of(kept)
    error = math.sqrt(sum(r["kept"] * (1 - r["kept"]) / r["rounds"] for r in by.values()))
    rounds = {name: r["rounds"] for name, r in by.items()}
    told = {"case": "kept", **kept, "rounds": rounds, "gap": gap, "standard_error": error}
    if expected is not None:
        told["expected_gap"] = gap_of(expected)
    return {**told, "reached": abs(gap) <= CLOSE}


def gap_of(shares: Mapping[str, Any]) -> float:
    """How much larger the share of `parallel` is than that of `sequential`."""
    return float(shares["parallel 1"] - shares["sequential 1"])
