"""The `vertical_slash` pattern (MInference): the columns and diagonals to which the last queries attend most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import BlockLists, KeySpan, Part
from mmaccel.backends.ops.lines import choose_lines, list_slash_blocks, split_columns
from mmaccel.core.prefill.plan import FAR, span_by_range
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.sparse.estimate import modality_run_limits
from mmaccel.policies.sparse.orders import AttentionRegion, IntraPattern, ceil_block_count

MOST_ENTRIES = 1 << 28
"""Most entries of lists made by the host's bound of their sizes; beyond it the sizes are read."""


@register("sparse", "vertical_slash")
@dataclass(frozen=True, kw_only=True)
class VerticalSlash(IntraPattern):
    """Every query sees the `vertical` strongest columns and the blocks that the `slash` strongest diagonals touch.

    Strength is the softmax weight of the last `last_q` queries of a head, summed along the line; the main diagonal is always
    kept, so that a token sees itself. Columns are exact. Diagonals are rounded: a key block that a kept diagonal touches is
    seen whole, up to causality. A column in such a block is computed once. After MInference and MMInference (Appendix C.3,
    Table 3).

    sink: number of first keys that are always among the columns, 0 in the paper; MInference's released code has 30. Earlier
    rows may attend to the first tokens even if the last ones do not.

    nearest: number of nearest diagonals that are always kept, 1 (the main one) in the paper; MInference's released code has
    100.

    estimate="head" estimates for each query head alone, "group" for the heads that share a key head together. Within a
    modality boundary diagonals count only keys of the modality.
    """

    adaptive: ClassVar[bool] = True
    rounded: ClassVar[bool] = True

    vertical: int = limited(1000, at_least(0, " columns"))
    slash: int = limited(1024, at_least(1, ", the main diagonal"))
    sink: int = limited(0, at_least(0, " columns"))
    nearest: int = limited(1, at_least(1, ", the main diagonal"))
    last_q: int = limited(64, at_least(1, " query"))
    estimate: Literal["head", "group"] = "head"

    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        sample = region.last_query_attention(self.last_q, self.estimate == "group")
        columns, diagonals = self._strongest(*sample.line_weights(), sample.query_ranks)
        keys, at, heads = region.keys, region.at[:, None], columns.shape[1]
        left, kind, kept, k_row, k_pos = split_columns(
            keys.row, columns, diagonals, region.max_keys, self.block
        )
        runs = region.get_or_compute(("query runs", heads), lambda: DiagonalKeyBlocks.make(region, heads))
        # A query block lists every key block that a kept diagonal touches in its rows: diagonal d pairs a query of rank i
        # with the key of rank i - d. The ranks say nothing of the rows: those of columns are left out.
        lists = BlockLists(*list_slash_blocks(kept, [*runs], self.block), kind)
        spans = [
            KeySpan(left, at, keys.rank[:, None], 0, FAR, lists, ranks=True, q_first=region.first_query_rank)
        ]
        if self.vertical:
            # The columns, gathered; a column's position is that of its token.
            spans.append(span_by_range(region.q_row, k_row, at, k_pos, 0, FAR, self.block, self.block))
        return (region.plan_part(spans),)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        blocks = ceil_block_count(n_key, self.block)
        columns = ceil_block_count(min(self.vertical, n_key), self.block)
        # A diagonal touches two blocks of a run of queries, and as many as there are queries where none follow.
        slash = min((self.block if gaps else 2) * self.slash, blocks)
        return slash + columns, 0

    def estimate_blocks(self, rows: int, keys: int, share: float, region: AttentionRegion | None) -> float:
        # At best the diagonals lie side by side; apart, each touches two blocks.
        blocks, seen = ceil_block_count(rows, self.block), share * keys / self.block + 1
        columns = min(self.vertical, keys) / self.block
        return blocks * min(min(self.slash, keys) / self.block + 1 + columns, seen)

    def _strongest(self, columns: Tensor, diagonals: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, K] kept columns and diagonals, the main one among them, ascending, n where a sequence has fewer."""
        if self.sink:
            first = torch.arange(columns.shape[-1], device=columns.device) < min(self.sink, self.vertical)
            columns = columns.masked_fill(first, torch.inf)
        if self.nearest > 1:
            near = torch.arange(diagonals.shape[-1], device=diagonals.device) < min(self.nearest, self.slash)
            diagonals = diagonals.masked_fill(near, torch.inf)
        return choose_lines(columns, diagonals, at[:, -1], self.vertical, self.slash)


class DiagonalKeyBlocks(NamedTuple):
    """Which key blocks the diagonals can touch, for each of M query blocks, from the ranks of its queries among the keys.
    Made from token layouts, not tensors.

    Query blocks of consecutive ranks that begin at the same offset in a key block and have equally many ranks touch the same
    key blocks, relative to the first: they share a list, called a shape. There is one shape if the queries are in the order
    of the sequence. Query blocks whose ranks have gaps, between segments of a modality, have lists of their own.

    shape [3, C] int32: sequence, offset in a key block, number of ranks; member [B, M] int32: shape of each query block;
    home [B, M] int32: key block in which its ranks begin. reach [3, B, M] int32: entry u of a shape's list is key block home
    + 1 - u, and `reach` says which entries a query block uses: the first u, the end, and the first u that needs no causal
    mask; 0 for blocks with gaps. broken [B, G] int32: the query blocks with gaps, M for none; runs [B, G, R, 2] int32: the
    lowest and the highest rank of each of their runs, -1 for none; sure [B, G] int32: number of key blocks that all their
    queries see whole.
    """

    shape: Tensor
    member: Tensor
    home: Tensor
    reach: Tensor
    broken: Tensor
    runs: Tensor
    sure: Tensor

    @classmethod
    def make(cls, region: AttentionRegion, heads: int) -> DiagonalKeyBlocks:
        """Return the `DiagonalKeyBlocks` of the queries of `region`, for plans of `heads` heads."""
        block = region.layer.block
        most_shapes, most_gaps, most_pieces = _run_bounds(region)
        blocks = len(region.keys) // block
        B, M = region.at.shape[0], region.at.shape[1] // block
        at = region.at.long().view(B, M, block)
        live = at >= 0
        low = torch.where(live, at, FAR).amin(2)
        length = (at.amax(2) - low + 1).clamp(min=0)
        jump = live[..., 1:] & live[..., :-1] & (at[..., 1:] - at[..., :-1] > 1)
        whole = live.any(2) & ~jump.any(2)
        home, offset = low // block, low % block
        sequence = torch.arange(B, device=at.device)[:, None]

        shape = torch.where(whole, (sequence * block + offset) * (block + 1) + length, FAR)
        sorted_shape, order = shape.flatten().sort()
        rank = torch.nn.functional.pad((sorted_shape[1:] != sorted_shape[:-1]).long().cumsum(0), (1, 0))
        C = min(B * M, B * most_shapes) + 1
        if C * heads * (blocks + 2) > MOST_ENTRIES:
            C = int(rank[-1]) + 1
        member = torch.empty_like(rank).scatter_(0, order, rank).view(B, M)
        shapes = torch.zeros(C, dtype=torch.long, device=at.device).scatter_(0, rank, sorted_shape)
        shapes = torch.where(shapes == FAR, 0, shapes)
        fields = shapes // ((block + 1) * block), shapes // (block + 1) % block, shapes % (block + 1)

        # Step u of a block is key block home + 1 - u; those past its own, and past the last, are cut off.
        width = blocks + 2
        first, last = (home + 2 - blocks).clamp(0, width), (home + 2).clamp(0, width)
        # A query before the first key, if there is one, sees nothing: such a block is tested whole.
        early = ((region.q_row[:, 0] >= 0).view(B, M, block) & ~live).any(2)
        sure = torch.where(early, 0, (low + 1) // block)
        head = torch.maximum((home + 2 - sure).clamp(0, width), first)
        reach = torch.where(whole, torch.stack([first, last, head]), 0)

        gaps = min(M, most_gaps)
        if gaps and B * heads * gaps * blocks > MOST_ENTRIES:
            gaps = int(jump.any(2).sum(1).amax())
        broken, runs = _broken(at, jump, gaps, min(most_pieces, block))
        sure = sure.gather(1, broken.clamp(max=M - 1))
        of_shapes = torch.stack(fields), member, home.clamp(max=FAR), reach
        return cls(*(t.to(torch.int32) for t in (*of_shapes, broken, runs, sure.clamp(max=FAR))))


def _run_bounds(region: AttentionRegion) -> tuple[int, int, int]:
    """How far from one run of ranks the queries of a sequence are: bounds from the layout alone.

    Different (offset in a key block, number of ranks) of query blocks whose ranks leave none out; query blocks whose ranks
    jump; runs of ranks in one of those.
    """
    query_kind, key_kind = region.kinds
    if query_kind == key_kind:
        return 2, 0, 1
    runs = modality_run_limits(region.layer.q_layout)
    # In each run of the sequence whole blocks have one shape; one more where it begins, and one where it ends.
    shapes = 3 * sum(count for count, _ in runs.values()) + 3
    if query_kind is None:
        return shapes, 0, 1
    most, least = runs[query_kind]
    return shapes, most, 2 + (region.layer.block - 2) // max(least, 1)


def _broken(at: Tensor, jump: Tensor, gaps: int, pieces: int) -> tuple[Tensor, Tensor]:
    """`broken` and `runs` of `DiagonalKeyBlocks`, of at most `gaps` blocks of a sequence in at most `pieces` runs each.

    at [B, M, block] the ranks of all blocks, jump [B, M, block - 1] whether the next is further than one.
    """
    B, M, block = at.shape
    is_broken = jump.any(2)
    slot = torch.where(is_broken, is_broken.long().cumsum(1) - 1, gaps).clamp(max=gaps)
    every = torch.arange(M, device=at.device).expand(B, M)
    broken = torch.full((B, gaps + 1), M, device=at.device).scatter_(1, slot, every)[:, :gaps]
    chosen, there = broken.clamp(max=M - 1)[..., None], (broken < M)[..., None]
    own = at.gather(1, chosen.expand(-1, -1, block))
    cut = jump.gather(1, chosen.expand(-1, -1, block - 1))
    run = torch.nn.functional.pad(cut.long().cumsum(2), (1, 0)).clamp(max=max(pieces - 1, 0))
    seen, shape = there & (own >= 0), (B, gaps, max(pieces, 1))
    least = own.new_full(shape, FAR).scatter_reduce_(2, run, torch.where(seen, own, FAR), "amin")
    most = own.new_full(shape, -1).scatter_reduce_(2, run, torch.where(seen, own, -1), "amax")
    return broken, torch.stack([least, most], -1)
