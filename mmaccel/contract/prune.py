"""What a token pruner promises: what it declares, and which columns it keeps."""

from __future__ import annotations

from random import Random

import torch

from mmaccel.contract.prompts import layout, signals_for
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prune import TokenPruner, checked_columns, checked_stages, thin

DEPTH = 32


def check_pruner(pruner: TokenPruner, rounds: int, seed: int) -> None:
    """Raise `RecipeError` for the first of `rounds` prompts on which the contract is broken."""
    for n in range(rounds):
        check_cuts(pruner, layout(Random(seed * 1000 + n), (20, 60, 150)[n % 3]), seed * 1000 + n)


def check_cuts(pruner: TokenPruner, layout: TokenLayout, seed: int) -> None:
    """Raise `RecipeError` where the cuts of one prompt break the contract."""
    who, total, left = f"prune {pruner.name!r}", pruner.candidates(layout).numel(), layout
    if pruner.lossy != (pruner.seat != "draft"):
        raise RecipeError(f"{who}: lossy is {pruner.lossy}; give True, unless seat is 'draft'.")
    for stage in checked_stages(pruner, DEPTH):
        if not total and pruner.seat != "draft":
            return
        signals = signals_for(left, stage, seed)
        for name in signals.keys() - pruner.needs:
            del signals[name]
        kept = pruner.cut(signals, left, stage, total)
        columns = checked_columns(pruner, kept.columns, left)
        if not torch.equal(columns, pruner.keep(signals, left, stage, total)):
            raise RecipeError(
                f"{who}: keep and cut keep different columns, or differ from call to call; let them agree."
            )
        if kept.states is not None and kept.states.shape != (len(columns), signals["hidden"].shape[-1]):
            raise RecipeError(
                f"{who}: cut gives states {list(kept.states.shape)}; give a row for each of {len(columns)} columns."
            )
        left = thin(left, columns)
    at = pruner.candidates(left)
    if pruner.glance is not None and at.numel():
        shown = pruner.recall(torch.rand(at.numel()).softmax(0), at, None)
        if shown is not None and not (
            bool(torch.isin(shown, at).all()) and bool((shown[1:] > shown[:-1]).all())
        ):
            raise RecipeError(
                f"{who}: recall gives columns that are none of `columns`, or do not ascend; choose out of these."
            )
