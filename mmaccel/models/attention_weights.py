"""Computes the attention weights of dense layers, for `output_attentions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.core.attention import Probe, Run
from mmaccel.core.packed import PackedRun


class Weights(Probe):
    """Computes the weights [B, H, n, N] of one run and layer from what enters its attention, in the type of the queries.

    Rows of padding are zeros, where transformers spreads them evenly.
    """

    weights: Tensor

    def attending(
        self, run: Run, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        rows, columns = query.shape[2], key.shape[2]
        at = torch.arange(columns, device=query.device)
        unseen = at > at[run.start : run.start + rows, None]
        if run.layout.padded:
            valid = run.layout.valid.to(query.device)
            unseen = (unseen | ~valid[:, None] | ~valid[:, run.start : run.start + rows, None])[:, None]
        heads = query.unflatten(1, (key.shape[1], -1))
        scores = (heads @ key[:, :, None].transpose(-1, -2)).flatten(1, 2) * scale
        weights = scores.float().masked_fill(unseen, float("-inf")).softmax(-1)
        self.weights = weights.nan_to_num(0.0).to(query.dtype)


def watched(run: Run | PackedRun) -> tuple[Run | PackedRun, Callable[[], Tensor]]:
    """A run of one layer whose weights are computed beside it, and what gives them once it has attended."""
    if isinstance(run, Run):
        probe = Weights()
        return replace(run, probes=(*run.probes, probe)), lambda: probe.weights
    pairs = [watched(one) for _, _, one in run.runs]
    places = [(b, columns) for b, columns, _ in run.runs]

    def whole() -> Tensor:
        each = [found() for _, found in pairs]
        size = max(columns.stop for _, columns in places)
        weights = each[0].new_zeros(places[-1][0] + 1, each[0].shape[1], size, size)
        for (b, columns), one in zip(places, each, strict=True):
            weights[b, :, columns, columns] = one[0]
        return weights

    watching = [(*place, one) for place, (one, _) in zip(places, pairs, strict=True)]
    return PackedRun(tuple(watching)), whole  # type: ignore[arg-type]
