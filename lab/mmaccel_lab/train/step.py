"""One step on the device: batch in, loss out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel_lab.tiny import forward, tower
from mmaccel_lab.tiny.configs import Spec
from mmaccel_lab.tiny.delta import on
from mmaccel_lab.train.data import KINDS, Batch


def upload(batch: Batch, device: torch.device) -> Batch:
    """The batch with tensors on `device` in the place of arrays (`codec` on the CPU), and with whom each token sees;
    `columns` count from the start of the prompt."""
    feed: Batch = on(device, replace(batch, codec=torch.from_numpy(batch.codec)))
    seen = forward.see(feed.length, feed.branch, batch.prefix)
    return replace(feed, columns=feed.columns + batch.prefix, seen=seen)


@dataclass
class Seen:
    """What a pass leaves: last hidden states [B, P + N, hidden], features [F, tokens_per_frame, hidden] of the frames,
    and halfway up the states [C, tokens_per_frame, hidden] of the frames that have a past to remember and [M, hidden]
    of the colours in notes."""

    states: Tensor
    features: Tensor
    halfway: Tensor
    noted: Tensor


def look(model: Any, spec: Spec, feed: Batch, frames: Tensor) -> Seen:
    """Run a batch."""
    features = tower.encode(model, spec, frames)
    states, halfway = forward.hidden_states(model, spec, feed, features)
    return Seen(states, features[..., : spec.hidden], halfway[feed.recall], halfway[feed.notes])


def label_logits(model: Any, feed: Batch, seen: Seen) -> Tensor:
    """Logits [L, vocabulary] at the labelled places only."""
    marked = seen.states[feed.rows, feed.columns]
    return F.linear(marked, model.lm_head.weight.to(marked.dtype))


def losses(logits: Tensor, feed: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The loss to minimise, and the sums [K] of losses and counts [K] of labels by kind (see `data.KINDS`)."""
    each = F.cross_entropy(logits.float(), feed.labels, reduction="none")
    loss = (each * feed.weights).sum() / feed.weights.sum()
    sums = torch.zeros(len(KINDS), device=each.device).index_add_(0, feed.kinds, each.detach())
    counts = torch.zeros(len(KINDS), device=each.device).index_add_(0, feed.kinds, torch.ones_like(each))
    return loss, sums, counts
