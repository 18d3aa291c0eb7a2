"""Operators for retrieval in a video stream: scores of clusters by their representative keys, the question's mean query, and
copies of key/value units from host memory.

An *entry* is what clusters hold and a search retrieves: one unit of the stream (a frame, or a temporal patch of frames), or
a part of one. Letters: R layers, C clusters, V visual clusters, N entries, d key size. Clusters are ranked by score, ties by
lower number. A question's n rows begin with `count` [1] (on the device) words of the user; the others are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops.operator import operator, runs_triton, runs_triton_in_float32

# Most clusters of a layer that kernels serve: they sort by comparing all pairs, and 4 ** 13 take some ten microseconds.
MOST = 8192
APART = 1e30  # above any score


class ClusterMembership(NamedTuple):
    """Which entries each cluster holds, as index tensors (long). owner [R, N]: the cluster of each entry (>= C: none);
    within [R, N]: the entry's index in its cluster; flat [R, N]: entries grouped by cluster, ascending; first [R, C]: where
    each cluster begins in `flat`; size [R, C]: entries of each cluster; `largest`: an upper bound of the sizes."""

    owner: Tensor
    within: Tensor
    flat: Tensor
    first: Tensor
    size: Tensor
    largest: int


class EntryKeys(NamedTuple):
    """Keys by which single entries are chosen from a cluster that is retrieved only in part. `keys` [M, L, d], readable by
    the device: the keys of M entries in L layers, of which layer `layer` is used; `read` returns those of entries [n] as
    float32 rows [n, d]. They are compared with `query` [d] float32, by cosine if `cosine`, else by dot product."""

    keys: Tensor
    layer: int
    read: Callable[[Tensor], Tensor]
    query: Tensor
    cosine: bool


class WordQueries(NamedTuple):
    """A question's query vectors: `rows` [R, n, d] float32, of which the first `number` [1] belong to words of the user."""

    rows: Tensor
    number: Tensor


class NewestEntryRange(NamedTuple):
    """The newest `entries` entries of a stream, which every search retrieves. The stream has `units` units so far ([1], a
    device tensor), and each unit has `parts` entries."""

    units: Tensor
    parts: int
    entries: int

    def newest_entry_indices(self) -> Tensor:
        """Indices of the last `entries` entries of the stream, ascending."""
        return self.units * self.parts - self.entries + torch.arange(self.entries, device=self.units.device)


def _few(first: Tensor, *rest: object) -> bool:
    return first.shape[-1 if first.dim() < 3 else 1] <= MOST and runs_triton(first)


@operator("stream", serves=_few)
def score_keys(key: Tensor, query: Tensor, cosine: bool) -> Tensor:
    """Return the dot product, or the cosine if `cosine`, of keys [R, C, d] and queries [R, d]: [R, C] float32."""
    key = key.float()
    score = torch.bmm(key, query[:, :, None])[:, :, 0]
    if cosine:
        score = score / (key.norm(dim=-1) * query.norm(dim=-1, keepdim=True)).clamp_min(1e-12)
    return score


@operator("stream", serves=_few)
def score_by_words(key: Tensor, words: WordQueries, size: Tensor, cosine: bool) -> Tensor:
    """Score clusters by the question word that matches each best, [R, C] float32; keys [R, C, d].

    The scores of each word are standardized over clusters with `size` [R, C] > 0. A cluster's score is that of its best word
    minus its mean over all words and one extra score of 0. Unlike a mean query, this does not favour clusters that all words
    match a little.
    """
    key = key.float()
    score = key @ words.rows.mT
    if cosine:
        score = score / key.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    here = (size > 0)[..., None]
    share = here / here.sum(1, keepdim=True).clamp_min(1)
    score = score - (score * share).sum(1, keepdim=True)
    score = score * (score.square() * share).sum(1, keepdim=True).clamp_min(1e-12).rsqrt()
    inside = torch.arange(score.shape[2], device=score.device) < words.number
    best = score.masked_fill(~inside, -torch.inf).amax(2)
    return best - score.masked_fill(~inside, 0.0).sum(2) / (words.number + 1)


@operator("stream", serves=_few)
def mark_clusters_beyond_budget(score: Tensor, size: Tensor, limit: int, fewest: int) -> Tensor:
    """Mark the visual clusters beyond the budget, [R, V] bool: those for which better-scored clusters already hold `limit`
    entries or more. The best `fewest` clusters are never marked. score [R, V], size [V]; empty clusters rank last."""
    order = score.masked_fill(size == 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    held = size[order]
    before = held.cumsum(1) - held
    before[:, :fewest].zero_()
    found = torch.empty(score.shape, dtype=torch.bool, device=score.device)
    return found.scatter_(1, order, before >= limit)


@operator("stream", serves=_few)
def mask_and_count_better(
    score: Tensor, size: Tensor, parent: Tensor | None, without: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Set the score [R, C] of excluded clusters to -inf; return it, and how many entries better-scored clusters hold, [R, C]
    long. A cluster is excluded if it has no visual cluster (its `parent` [R, C] is V), or if `without` [R, V] bool marks
    that. If `parent` or `without` is None, the empty clusters are excluded instead."""
    hidden = (
        size == 0 if parent is None or without is None else pad(without, (0, 1), value=True).gather(1, parent)
    )
    score = score.masked_fill(hidden, -torch.inf)
    return score, count_better_entries(score, size)


@operator("stream", serves=_few)
def select_entries(
    before: Tensor,
    lists: ClusterMembership,
    budget: int,
    ahead: int,
    own: EntryKeys,
    late: NewestEntryRange | None,
) -> tuple[Tensor, Tensor | None]:
    """Select the entries that the first of R = 1 or 2 layers retrieves, and those to prefetch for the second (else None).

    The first layer retrieves `budget` entries: whole clusters of `lists`, best first; and of the first cluster that no
    longer fits, the entries whose keys score best (`own`). They are returned in ascending order, followed by the newest
    entries (`late`), which are always retrieved. For the second layer `ahead` entries are returned, best cluster first,
    padded with -1. before [R, C]: for each cluster, how many entries the better-scored ones hold.
    """
    width = budget + lists.largest - 1
    found = _entries_in_order(before, lists, max(width, ahead))
    # What comes after the last entry is none, and is looked up as the first one.
    entries = found[0, :width].clamp_min(0)
    cluster = lists.owner[0][entries].clamp(max=before.shape[1] - 1)
    begin, end = before[0][cluster], (before[0] + lists.size[0])[cluster]
    apart = (end <= budget).long() - (begin >= budget).long()
    apart = apart.masked_fill(found[0, :width] < 0, -1)
    scores = score_keys(own.read(entries)[None], own.query[None], own.cosine)[0]
    best = scores.add(apart, alpha=APART).sort(descending=True, stable=True).indices[:budget]
    chosen = entries[best].sort().values
    if late is not None:
        chosen = torch.cat([chosen, late.newest_entry_indices()])
    return chosen, found[1, :ahead] if len(found) > 1 else None


@operator("stream", serves=_few)
def write_best_clusters(
    score: Tensor,
    picked: Tensor,
    size: Tensor,
    rows: tuple[Tensor, Tensor],
    time: Tensor,
    out: Tensor,
    head: int,
    left: Tensor | None,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    """Write summary tokens to `out` [2, G, m, D]: mean keys and values (rows [C, G * D] each) of the first m clusters in the
    order of `rank_summary_clusters`. size [C] counts entries; picked [C] bool: the cluster was retrieved.

    Returns their times [m] from `time` [C], and score biases [head + m] float32: 0 for the first `head` columns, then one
    for each summary token: 0 if `tokens` is 0, else ``log(size * tokens)`` for entries of `tokens` tokens (about -69 if the
    cluster is picked or empty); and -inf from summary token `left` on.
    """
    count = out.shape[2]
    ids = rank_summary_clusters(score, picked, size)[:count]
    for side, one in zip(out, rows, strict=True):
        side.copy_(one.index_select(0, ids).view(count, *side.shape[::2]).transpose(0, 1))
    added = torch.zeros(count, device=score.device)
    if tokens:
        # What stands for retrieved tokens adds nothing to them.
        added = (size.masked_fill(picked, 0)[ids] * tokens).float().clamp_min(1e-30).log()
    if left is not None:
        added = added.masked_fill(torch.arange(count, device=added.device) >= left, -torch.inf)
    return time[ids], pad(added, (head, 0))


def rank_summary_clusters(score: Tensor, picked: Tensor, size: Tensor) -> Tensor:
    """Return the order [C] of clusters for summary tokens: by falling score, then retrieved (`picked`), then empty ones."""
    # Finite, so that clusters outside the first stage's choice still come before those that are no candidates.
    lowest = torch.finfo(torch.float32).min / 2
    rank = score.clamp_min(lowest).masked_fill(picked, 1.5 * lowest).masked_fill(size == 0, -torch.inf)
    return rank.sort(descending=True, stable=True).indices


def count_better_entries(score: Tensor, size: Tensor) -> Tensor:
    """Count for each cluster the entries of better-scored clusters, [R, C] long; score, size [R, C]. Plain PyTorch."""
    order = score.sort(dim=1, descending=True, stable=True).indices
    held = size.gather(1, order)
    return torch.empty_like(held).scatter_(1, order, held.cumsum(1) - held)


def _entries_in_order(before: Tensor, lists: ClusterMembership, width: int) -> Tensor:
    """Entries in cluster order, [R, width], padded with -1; `before` [R, C] entries precede each cluster. Plain PyTorch."""
    line = before.gather(1, lists.owner.clamp(max=before.shape[1] - 1)) + lists.within
    line = line.masked_fill(lists.owner >= before.shape[1], width).clamp(max=width)
    entry = torch.arange(line.shape[1], device=line.device).expand_as(line)
    found = torch.full((len(line), width + 1), -1, dtype=torch.long, device=line.device)
    return found.scatter_(1, line, entry)[:, :width]


def _mean_of_rows(rows: Tensor, count: Tensor | None) -> Tensor:
    """Mean over the first `count` [1] (None: all) of rows [..., n, D]: [..., D] float32."""
    if count is None:
        return rows.float().mean(-2)
    inside = torch.arange(rows.shape[-2], device=rows.device)[:, None] < count
    return torch.where(inside, rows.float(), 0.0).sum(-2) / count


def sum_query_groups(rows: Tensor, groups: int) -> Tensor:
    """Sum the H / G query heads of each key/value head: rows [H, n, D] to [n, G * D] float32. Plain PyTorch."""
    return rows.view(groups, -1, *rows.shape[1:]).sum(1, dtype=torch.float32).transpose(0, 1).flatten(1)


@operator("stream", serves=runs_triton_in_float32)
def mean_query(rows: Tensor, count: Tensor | None, groups: int) -> Tensor:
    """Return the mean query [G * D] float32 of the first `count` (None: all) of rows [H, n, D], heads of a group summed."""
    return _mean_of_rows(rows, count).view(groups, -1, rows.shape[2]).sum(1).flatten()


@operator("stream", serves=runs_triton_in_float32)
def predict_next_layer_input(
    words: Tensor, count: Tensor, known: Tensor, before: Tensor, seen: Tensor | None
) -> Tensor:
    """Predict a question's hidden states [n, E] at the next layer's input, to prefetch units for that layer: `words` [n, E],
    the states at this layer's input, plus `known` [E] float32, the change that this layer made to the mean state in the last
    question. Also replaces `before` [E], the mean state at the previous layer's input, by the mean over the first `count`
    [1] rows of `words`, and writes the difference (new minus old) to `seen` [E], if given."""
    now = _mean_of_rows(words, count)
    if seen is not None:
        torch.sub(now, before, out=seen)
    before.copy_(now)
    return words + known.to(words.dtype)


@operator("stream")
def mark_host_slots(table: Tensor, entries: Tensor, slots: Tensor, begin: Tensor) -> Tensor:
    """Look up which of the distinct `entries` [n] are in host memory, and mark them in `table` as prefetched. table [m] says
    where each entry is: a number below `slots` [1] is a host slot, a larger one a place on the device; the last element is
    scratch. Returns the host slots [n], -1 for an entry that is not on the host. If the i-th entry was on the host, `table`
    gives it the place ``begin + i`` from now on, to which the caller must copy it. All tensors are long."""
    found = table[entries]
    host = (found >= 0) & (found < slots)
    place = begin + torch.arange(len(entries), device=found.device)
    table.scatter_(0, torch.where(host, entries, len(table) - 1), place)
    return torch.where(host, found, -1)


def slab_alignment(slab: Sequence[Tensor]) -> int:
    """The largest power of two, at most 64, of bytes that divides the addresses of all slabs."""
    return math.gcd(64, *(one.data_ptr() for one in slab))


@operator("stream", mutates=("out",), fake=lambda: None)
def copy_units(out: Tensor, slab: Sequence[Tensor], base: Tensor, slot: Tensor, grain: int) -> None:
    """Copy key/value units from host memory to `out`, in the order of `slot`; one kernel launch if Triton runs.

    out    [2, G, n * P, D] on the device: keys, then values, the last two dimensions dense; or [2, G, n, P, D], where units
           need not be adjacent
    slab   host tensors [slots, 2, G, P, D], pinned if `out` is on CUDA
    base   [slabs] long, on the device: byte offset of each slab from the first
    slot   [n] long, on the device: slot s is entry ``s % slots`` of slab ``s // slots``; -1 writes zeros
    grain  `slab_alignment(slab)`, which for a hundred slabs is to be computed once, not at each call

    The plain PyTorch form reads the slots on the host.
    """
    slots = slab[0].shape[0]
    target = out if out.dim() == 5 else out.view(*out.shape[:2], -1, *slab[0].shape[3:])
    wanted = slot.cpu()
    empty = torch.nonzero(wanted < 0)[:, 0]
    if empty.numel():
        target.index_fill_(2, empty.to(out.device), 0)
    holder = wanted // slots
    for number in torch.unique(holder[wanted >= 0]).tolist():
        at = torch.nonzero(holder == number)[:, 0]
        units = slab[number].index_select(0, wanted[at] % slots).permute(1, 2, 0, 3, 4)
        first, end = int(at[0]), int(at[-1]) + 1
        if end - first == len(at):
            # In half the time.
            target[:, :, first:end] = units
        else:
            target.index_copy_(2, at.to(out.device), units.to(out.device))
