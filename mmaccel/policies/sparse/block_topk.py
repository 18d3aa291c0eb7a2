"""The `block_topk` pattern: for each query block, the key blocks with the largest estimated attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.decoding.replay import LazilyCompiled
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.plan import FAR, AttentionPlan, span_by_range, span_from_table
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import SHARE, at_least, limited, register
from mmaccel.policies.sparse.orders import AttentionRegion, LayerInputs, ceil_block_count

ROOM = 1 << 28
"""Most pairs of blocks for which lists are made that have room for all."""

ENTRIES = 1 << 24
"""Most scores held at a time; query blocks go in runs of as many as fit."""

GAIN_S = 4e-11
"""Seconds that the compiled choice saves a score on CUDA: 4.8 of 9.3 ms at 32k tokens and 28 heads (lab/LOG.md)."""


@register("sparse", "block_topk", compile=False)  # the choice of blocks alone is: `_CHOICE`
@dataclass(frozen=True, kw_only=True)
class BlockTopK(SparsePattern):
    """Each query block sees the fewest key blocks that hold the share `budget` of its estimated attention, at most `top`.

    The blocks of the first `sink` tokens, and those on the diagonal, are always kept and counted first. `budget` 1 keeps
    every block, up to `top`; a `top` of None is no limit.

    score="antidiagonal"  queries and keys in tiles of `stride`; the weight of a pair of tiles is the mean of the scores on
                          its antidiagonal, which every row, column and diagonal crosses, under a softmax over the tiles; a
                          block has the sum over its tiles (XAttention, arXiv 2503.16428)
    score="mean"          the softmax of the scores of mean queries and mean keys of whole blocks (the query-aware half of
                          FlexPrefill, arXiv 2502.20766; `stride` is not used)

    Each query head chooses for itself. Scores are computed for some query blocks at a time; the choice is a bool per pair of
    blocks. Departures: in chunked prefill, tiles whose first key is not after their first query take part; XAttention has
    thresholds per head from a table, FlexPrefill also has vertical-slash heads.
    """

    adaptive: ClassVar[bool] = True

    score: Literal["antidiagonal", "mean"] = "antidiagonal"
    stride: int = 16
    budget: float = limited(0.9, SHARE)
    top: int | None = limited(None, at_least(1, " block, or null for no limit"))
    sink: int = limited(128, at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride < 1 or self.block % self.stride:
            raise RecipeError(
                f"block_topk: stride is {self.stride}; give a divisor of block, which is {self.block}."
            )

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        layer = LayerInputs(query, key, q_layout, k_layout, self.block)
        region = layer.region()
        keys, table = region.keys, torch.cat(list(self._kept(region)), 2)
        # Room for every block is made without a look at how many are kept, where it can be.
        order = region.q_row, keys.row[:, None], region.at[:, None], keys.rank[:, None]
        known: dict[str, Any] = dict(ordered=keys.count, ranks=True)
        if table.numel() <= ROOM:
            span = span_by_range(*order, 0, FAR, self.block, self.block, table=table, **known)
        else:
            span = span_from_table(*order, 0, FAR, table, self.block, self.block, **known)
        return layer.plan([region.plan_part([span])])

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        block, first = self.block, n_key - n_query
        most = ceil_block_count(n_key, block)
        if self.top is not None:
            most = min(most, max(self.top, ceil_block_count(self.sink, block) + 2))
        ends = range(block, n_query + block, block)
        return sum(min(most, ceil_block_count(first + min(end, n_query), block)) for end in ends)

    def _kept(self, region: AttentionRegion) -> Iterator[Tensor]:
        """[B, H, m, N] bool for consecutive runs of m query blocks: which of the N key blocks are kept."""
        query, block, q_row = region.layer.query, self.block, region.q_row[:, 0]
        B, H = query.shape[:2]
        size = block if self.score == "mean" else self.stride
        keys = self._tiles(region.layer.key, region.keys.row, size)
        run = block * max(1, ENTRIES // (B * H * (block // size) * keys[0].shape[2]))
        for begin in range(0, q_row.shape[1], run):
            rows, at = q_row[:, begin : begin + run], region.at[:, begin : begin + run]
            queries = self._tiles(query, rows, size, flip=True)
            shapes = self, queries[0].shape, keys[0].shape, query.dtype, query.device
            scores = B * H * queries[0].shape[2] * keys[0].shape[2]
            yield _CHOICE(shapes, scores * GAIN_S if query.is_cuda else 0.0, self, queries, keys, at)

    def _tiles(self, x: Tensor, row: Tensor, size: int, flip: bool = False) -> tuple[Tensor, Tensor]:
        """Tiles of `size` rows `row` [B, n] of x [B, X, rows, D]; flipped, their tokens are in reverse.

        What is compared [B, X, T, E], and which of their tokens there are [B, T, size].
        """
        B, X, _, D = x.shape
        there = (row >= 0)[:, None, :, None]
        picked = x.gather(2, row.clamp(min=0).long()[:, None, :, None].expand(B, X, -1, D)) * there
        tiles = picked.view(B, X, -1, size, D)
        present = (row >= 0).view(B, -1, size)
        if self.score == "mean":
            return tiles.sum(3) / present.sum(2).clamp(min=1)[:, None, :, None].to(x.dtype), present
        if flip:
            tiles, present = tiles.flip(3), present.flip(2)
        return tiles.reshape(B, X, -1, size * D), present

    def _shares(self, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], at: Tensor) -> Tensor:
        """[B, H, m, N]: the share of each key block in the estimated weight of each query block, 0 where none is seen."""
        (query, q_present), (key, k_present) = queries, keys
        B, H, rows, E = query.shape
        G, tiles = key.shape[1:3]
        size, high = q_present.shape[2], torch.promote_types(query.dtype, torch.float32)
        score = query.view(B, G, -1, E) @ key.transpose(2, 3)
        score = score.to(high).view(B, H, rows, tiles)
        if self.score == "mean":
            score = score * E**-0.5
        else:
            pairs = q_present.float() @ k_present.float().transpose(1, 2)
            score = score * (E // size) ** -0.5 / pairs.clamp(min=1)[:, None]
        first = at.view(B, rows, size)
        first = torch.where(first >= 0, first, FAR).amin(2).masked_fill((first < 0).all(2), -1)
        begin = size * torch.arange(tiles, device=at.device)
        hidden = (begin > first[..., None]) | ~k_present.any(2)[:, None]
        weight = score.masked_fill_(hidden[:, None], -torch.inf).softmax(-1).nan_to_num_(0.0)
        inside = self.block // size
        weight = weight.view(B, H, rows // inside, inside, tiles // inside, inside).sum((3, 5))
        there = (first >= 0).view(B, -1, inside).sum(2).clamp(min=1)
        share: Tensor = weight / there[:, None, :, None]
        return share

    def _chosen(self, share: Tensor, at: Tensor) -> Tensor:
        """[B, H, m, N] bool: the blocks that are kept, of shares and the ranks of the queries."""
        block = self.block
        rank = at.view(at.shape[0], -1, block)
        last = rank.amax(2)[:, None, :, None]
        first = torch.where(rank >= 0, rank, FAR).amin(2)[:, None, :, None]
        number = torch.arange(share.shape[3], device=at.device)
        seen = number * block <= last
        always = seen & ((number * block < self.sink) | (number >= first // block))
        # Shares are at most 1: what is always kept comes first.
        order = torch.where(always, share + 2.0, share).argsort(dim=-1, descending=True, stable=True)
        if self.budget < 1:
            share = share.gather(3, order)
            keep = share.cumsum(3) - share < self.budget
        else:
            keep = torch.ones_like(order, dtype=torch.bool)
        if self.top is not None:
            keep &= number < self.top
        return (torch.zeros_like(keep).scatter_(3, order, keep) | always) & seen


def _choice(
    pattern: BlockTopK, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], at: Tensor
) -> Tensor:
    """[B, H, m, N] bool: the blocks that are kept, from the tiles of queries and keys and the ranks of the queries."""
    return pattern._chosen(pattern._shares(queries, keys, at), at)


_CHOICE = LazilyCompiled(_choice, warmup_s=32.0)
