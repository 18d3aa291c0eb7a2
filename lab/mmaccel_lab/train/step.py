"""One step on the device: batch in, loss out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel_lab.tiny import delta, forward, tower
from mmaccel_lab.tiny.configs import Spec
from mmaccel_lab.train.data import KINDS, Batch


@dataclass
class Feed:
    """A batch on the device; `codec` stays on the CPU. `seen` as in `TokenTree`."""

    ids: Tensor
    positions: Tensor
    seen: Tensor
    rows: Tensor
    columns: Tensor
    labels: Tensor
    kinds: Tensor
    weights: Tensor
    table: dict[str, Tensor]
    codec: Tensor
    recall: Tensor
    past: Tensor
    notes: Tensor
    owners: Tensor
    prefix: int
    videos: int
    chunks: delta.Chunks | None


def upload(batch: Batch, device: torch.device) -> Feed:
    """The tensors of a batch on `device`."""

    def send(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    branch, length = send(batch.branch), send(batch.length)
    return Feed(
        ids=send(batch.ids),
        positions=send(batch.positions),
        seen=forward.see(length, branch, batch.prefix),
        rows=send(batch.rows),
        columns=send(batch.columns + batch.prefix),
        labels=send(batch.labels),
        kinds=send(batch.kinds),
        weights=send(batch.weights),
        table={name: send(column) for name, column in batch.table.items()},
        codec=torch.from_numpy(batch.codec),
        recall=send(batch.recall),
        past=send(batch.past),
        notes=send(batch.notes),
        owners=send(batch.owners),
        prefix=batch.prefix,
        videos=batch.videos,
        chunks=None if batch.chunks is None else batch.chunks.to(device),
    )


@dataclass
class Seen:
    """What a pass leaves: last hidden states [B, P + N, hidden], features [F, tokens_per_frame, hidden] of the frames,
    and halfway up the states [C, tokens_per_frame, hidden] of the frames that have a past to remember and [M, hidden]
    of the colours in notes."""

    states: Tensor
    features: Tensor
    halfway: Tensor
    noted: Tensor


def look(model: Any, spec: Spec, feed: Feed, frames: Tensor) -> Seen:
    """Run a batch."""
    branches = forward.Branches(feed.prefix, feed.seen, feed.chunks)
    features = tower.encode(model, spec, frames)
    states, halfway = forward.hidden_states(
        model, spec, feed.ids, feed.positions, features, feed.videos, branches
    )
    return Seen(states, features[..., : spec.hidden], halfway[feed.recall], halfway[feed.notes])


def label_logits(model: Any, feed: Feed, seen: Seen) -> Tensor:
    """Logits [L, vocabulary] at the labelled places only."""
    marked = seen.states[feed.rows, feed.columns]
    return F.linear(marked, model.lm_head.weight.to(marked.dtype))


def losses(logits: Tensor, feed: Feed) -> tuple[Tensor, Tensor, Tensor]:
    """The loss to minimise, and the sums [K] of losses and counts [K] of labels by kind (see `data.KINDS`)."""
    each = F.cross_entropy(logits.float(), feed.labels, reduction="none")
    loss = (each * feed.weights).sum() / feed.weights.sum()
    sums = torch.zeros(len(KINDS), device=each.device).index_add_(0, feed.kinds, each.detach())
    counts = torch.zeros(len(KINDS), device=each.device).index_add_(0, feed.kinds, torch.ones_like(each))
    return loss, sums, counts
