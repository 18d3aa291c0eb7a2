"""Retrieval for a question to a stream: scores of clusters by their representative keys, the mean query of the question's
words, and copies of units of keys and values out of host memory.

Letters: R layers, C clusters, V visual clusters, N entries, d size of a key. One cluster comes before another whose score is
lower, or as high if it has the lower number. Of n rows of a question the first are words, as many as `count` [1] long on the
device says; the others may be anything.
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


class Lists(NamedTuple):
    """The entries of clusters: owner [R, N] the cluster of each entry, C or more: none; within [R, N] its place in its
    cluster; flat [R, N] entries, cluster by cluster, ascending, those of one from first [R, C] on; size [R, C] of each.
    `largest`: a bound of all sizes. All but that are long."""

    owner: Tensor
    within: Tensor
    flat: Tensor
    first: Tensor
    size: Tensor
    largest: int


class Own(NamedTuple):
    """The entries' own keys: `keys` [M, L, d] where the device can read them, those of `layer`; `read` gives rows [n, d] in
    float32 of entries [n]; `query` [d] float32 to compare them with, by the angle if `cosine`."""

    keys: Tensor
    layer: int
    read: Callable[[Tensor], Tensor]
    query: Tensor
    cosine: bool


class Words(NamedTuple):
    """Queries `rows` [R, n, d] float32 of a question, the first `number` [1] of them its words'; see above."""

    rows: Tensor
    number: Tensor


class Late(NamedTuple):
    """The last `entries` entries of a stream of `units` [1] units, on the device, of `parts` each."""

    units: Tensor
    parts: int
    entries: int

    def numbers(self) -> Tensor:
        """[entries], ascending."""
        return self.units * self.parts - self.entries + torch.arange(self.entries, device=self.units.device)


def _few(first: Tensor, *rest: object) -> bool:
    return first.shape[-1 if first.dim() < 3 else 1] <= MOST and runs_triton(first)


@operator("stream", serves=_few)
def scored(key: Tensor, query: Tensor, cosine: bool) -> Tensor:
    """[R, C] float32: keys [R, C, d] times queries [R, d] float32; if `cosine` of both at length one."""
    key = key.float()
    score = torch.bmm(key, query[:, :, None])[:, :, 0]
    if cosine:
        score = score / (key.norm(dim=-1) * query.norm(dim=-1, keepdim=True)).clamp_min(1e-12)
    return score


@operator("stream", serves=_few)
def scored_by_words(key: Tensor, words: Words, size: Tensor, cosine: bool) -> Tensor:
    """[R, C] float32: how far keys [R, C, d] are above others for the word that singles them out.

    The scores of a word have mean 0 and variance 1 over clusters of `size` [R, C] above 0; a cluster has that of its best
    word, less the mean over all words and one more that scores 0 everywhere (so that one word alone counts): what any
    question finds. So what many words agree on does not outweigh what one is about, as it does in a mean query.
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
def outside(score: Tensor, size: Tensor, limit: int, fewest: int) -> Tensor:
    """[R, V] whether `limit` entries or more are in the clusters before one, by score [R, V]; never of the first `fewest`.
    size [V]; clusters without entries come last."""
    order = score.masked_fill(size == 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    held = size[order]
    before = held.cumsum(1) - held
    before[:, :fewest].zero_()
    found = torch.empty(score.shape, dtype=torch.bool, device=score.device)
    return found.scatter_(1, order, before >= limit)


@operator("stream", serves=_few)
def scores_and_preceding(
    score: Tensor, size: Tensor, parent: Tensor | None, without: Tensor | None
) -> tuple[Tensor, Tensor]:
    """score [R, C], -inf where a cluster's parent [R, C], V for none, is in `without` [R, V], or, if there are no parents,
    where its size is 0; and [R, C] long, how many entries are in the clusters before each. size [R, C]."""
    hidden = (
        size == 0 if parent is None or without is None else pad(without, (0, 1), value=True).gather(1, parent)
    )
    score = score.masked_fill(hidden, -torch.inf)
    return score, preceding(score, size)


@operator("stream", serves=_few)
def selected(
    before: Tensor, lists: Lists, budget: int, ahead: int, own: Own, late: Late | None
) -> tuple[Tensor, Tensor | None]:
    """The entries that the first of R = 1 or 2 layers retrieves; and `ahead` entries to fetch early for the second, or None.

    Retrieved are `budget` entries, of which clusters must hold as many: whole clusters, best first, and of the one that does
    not fit those whose own keys score highest. They ascend; those of `late` follow. Fetched early are entries by cluster,
    best first, ascending within one, -1 past the last. before [R, C]: see `scores_and_preceding`."""
    width = budget + lists.largest - 1
    found = lined_up(before, lists, max(width, ahead))
    # What comes after the last entry is none, and is looked up as the first one.
    entries = found[0, :width].clamp_min(0)
    cluster = lists.owner[0][entries].clamp(max=before.shape[1] - 1)
    begin, end = before[0][cluster], (before[0] + lists.size[0])[cluster]
    apart = (end <= budget).long() - (begin >= budget).long()
    apart = apart.masked_fill(found[0, :width] < 0, -1)
    scores = scored(own.read(entries)[None], own.query[None], own.cosine)[0]
    best = scores.add(apart, alpha=APART).sort(descending=True, stable=True).indices[:budget]
    chosen = entries[best].sort().values
    if late is not None:
        chosen = torch.cat([chosen, late.numbers()])
    return chosen, found[1, :ahead] if len(found) > 1 else None


@operator("stream", serves=_few)
def stand_ins(
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
    """Write summary tokens to `out` [2, G, m, D]: the keys and values (rows [C, G * D] each) that stand for the first m
    clusters in the order of `stand_in_order`. size [C] counts entries; picked [C] bool: the cluster was retrieved.

    Gives their times [m], out of `time` [C], and what to add to attention scores, [head + m] float32: 0 for the `head`
    columns before them; for each of them 0, or with `tokens` (tokens of an entry) ``log(size * tokens)``, about -69 where
    picked or empty. With `left` [1], -inf for those from number `left` on."""
    count = out.shape[2]
    ids = stand_in_order(score, picked, size)[:count]
    for side, one in zip(out, rows, strict=True):
        side.copy_(one.index_select(0, ids).view(count, *side.shape[::2]).transpose(0, 1))
    added = torch.zeros(count, device=score.device)
    if tokens:
        # What stands for retrieved tokens adds nothing to them.
        added = (size.masked_fill(picked, 0)[ids] * tokens).float().clamp_min(1e-30).log()
    if left is not None:
        added = added.masked_fill(torch.arange(count, device=added.device) >= left, -torch.inf)
    return time[ids], pad(added, (head, 0))


def stand_in_order(score: Tensor, picked: Tensor, size: Tensor) -> Tensor:
    """[C] long: clusters by falling score, after them the `picked`, last those of size 0 (all [C]). In plain PyTorch."""
    # Finite, so that clusters outside the first stage's choice still come before those that are no candidates.
    lowest = torch.finfo(torch.float32).min / 2
    rank = score.clamp_min(lowest).masked_fill(picked, 1.5 * lowest).masked_fill(size == 0, -torch.inf)
    return rank.sort(descending=True, stable=True).indices


def preceding(score: Tensor, size: Tensor) -> Tensor:
    """[R, C] long: how many entries are in the clusters before each, by score [R, C] and size [R, C]. In plain PyTorch."""
    order = score.sort(dim=1, descending=True, stable=True).indices
    held = size.gather(1, order)
    return torch.empty_like(held).scatter_(1, order, held.cumsum(1) - held)


def lined_up(before: Tensor, lists: Lists, width: int) -> Tensor:
    """[R, width] entries of clusters one after the other, of which `before` [R, C] come before each; -1 where there are no
    more. In plain PyTorch."""
    line = before.gather(1, lists.owner.clamp(max=before.shape[1] - 1)) + lists.within
    line = line.masked_fill(lists.owner >= before.shape[1], width).clamp(max=width)
    entry = torch.arange(line.shape[1], device=line.device).expand_as(line)
    found = torch.full((len(line), width + 1), -1, dtype=torch.long, device=line.device)
    return found.scatter_(1, line, entry)[:, :width]


def mean(rows: Tensor, count: Tensor | None) -> Tensor:
    """[..., D] float32 of rows [..., n, D]."""
    if count is None:
        return rows.float().mean(-2)
    inside = torch.arange(rows.shape[-2], device=rows.device)[:, None] < count
    return torch.where(inside, rows.float(), 0.0).sum(-2) / count


def by_word(rows: Tensor, groups: int) -> Tensor:
    """[n, G * D] float32 of rows [H, n, D]: the H / G heads of a group summed. In plain PyTorch."""
    return rows.view(groups, -1, *rows.shape[1:]).sum(1, dtype=torch.float32).transpose(0, 1).flatten(1)


@operator("stream", serves=runs_triton_in_float32)
def folded(rows: Tensor, count: Tensor | None, groups: int) -> Tensor:
    """[G * D] float32: the mean of rows [H, n, D] over the words (None: over all), the H / G heads of a group summed."""
    return mean(rows, count).view(groups, -1, rows.shape[2]).sum(1).flatten()


@operator("stream", serves=runs_triton_in_float32)
def moved(words: Tensor, count: Tensor, known: Tensor, before: Tensor, seen: Tensor | None) -> Tensor:
    """Return rows `words` [n, E] plus `known` [E] float32, which is rounded to their type first. Write the mean of the first
    `count` [1] rows to `before` [E], and its difference from the old `before` to `seen` [E], unless that is None."""
    now = mean(words, count)
    if seen is not None:
        torch.sub(now, before, out=seen)
    before.copy_(now)
    return words + known.to(words.dtype)


@operator("stream")
def foretold(table: Tensor, entries: Tensor, slots: Tensor, begin: Tensor) -> Tensor:
    """Host slots [n] of `entries` [n] (-1: none; no other twice), -1 where there is none. table [m] has the code of each
    entry's place, a host slot if below `slots` [1]; for entry i that has one it becomes ``begin + i``, where that will lie.
    All long; the table's last element is scratch."""
    found = table[entries]
    host = (found >= 0) & (found < slots)
    place = begin + torch.arange(len(entries), device=found.device)
    table.scatter_(0, torch.where(host, entries, len(table) - 1), place)
    return torch.where(host, found, -1)


def grain_of(slab: Sequence[Tensor]) -> int:
    """A number of bytes that divides the addresses of all slabs."""
    return math.gcd(*(one.data_ptr() for one in slab))


@operator("stream", mutates=("out",), fake=lambda: None)
def gather_units(out: Tensor, slab: Sequence[Tensor], base: Tensor, slot: Tensor, grain: int = 0) -> None:
    """Bring units of keys and values from host memory into `out`, in the order of `slot`; one launch where Triton runs.

    out    [2, G, n * P, D] on the device: keys, then values, the last two dimensions dense; or [2, G, n, P, D], where units
           may lie apart
    slab   host tensors [slots, 2, G, P, D], pinned where `out` is on a CUDA device
    base   [slabs] long, on the device: the bytes from the first slab to each
    slot   [n] long, on the device: slot s is entry ``s % slots`` of slab ``s // slots``, and -1 gives zeros
    grain  what `grain_of` says of the slabs, 0 where it is not known: asking a hundred slabs takes time

    The plain form reads the slots on the host, slab by slab.
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
