"""Attention weights of the last queries, by which content-dependent patterns choose keys (MMInference, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mmaccel.backends.ops.lines import has_kernel, line_weights, rowwise_logsumexp
from mmaccel.core.layout import MODALITIES, TokenLayout
from mmaccel.core.prefill.plan import HeadRun

Score = Literal["contrast", "mean", "sum"]
"""How the lines of one class are weighed together."""

BUDGET = 1 << 28
"""Most attention weights held at a time; beyond it key/value groups go one by one."""


def modality_run_limits(layout: TokenLayout) -> dict[int, tuple[int, int]]:
    """Return modality -> (most runs of a sequence, fewest tokens of a run that is neither first nor last); a run is a
    stretch of adjacent tokens of the modality. Padding does not count. Copies the layout to the host once."""

    def read() -> dict[int, tuple[int, int]]:
        runs = dict.fromkeys(MODALITIES, (0, layout.length))
        for row in torch.where(layout.valid, layout.modality, -1).to(torch.int8).cpu():
            kinds, sizes = torch.unique_consecutive(row[row >= 0], return_counts=True)
            for m, (most, least) in runs.items():
                own = sizes[kinds == m]
                inner = int(own[1:-1].min()) if len(own) > 2 else least
                runs[m] = max(most, len(own)), min(least, inner)
        return runs

    return layout.host_value("runs", read)  # type: ignore[no-any-return]


ROUNDS = 8
"""Runs of ranks of the last queries beyond which the sums of diagonals are made of stored weights."""


@dataclass(frozen=True, eq=False)
class SampledQueryLayout:
    """Which queries are sampled (the last ones in an order) and which keys they see; made from token layouts, not tensors.

    query_row [B, L] long: rows of the queries; at [B, L] long: rank of each among the keys, -1 for none. row [B, n] long:
    rows of the keys in the key tensor, or None for its first n. seen [B, n]: whether the key exists and is not after the
    last query. queries_are_last_keys: whether the queries are known to be the last rows and keys, in order; runs: estimated
    number of runs of consecutive ranks, by which the faster algorithm is chosen.
    """

    query_row: Tensor
    at: Tensor
    row: Tensor | None
    seen: Tensor
    queries_are_last_keys: bool
    runs: int

    def select_queries(self, query: Tensor) -> Tensor:
        """Return the sampled queries [B, H, L, D] of query [B, H, n_query, D]."""
        L = self.at.shape[1]
        if self.queries_are_last_keys:
            return query[:, :, query.shape[2] - L :]
        return query.gather(2, self.query_row[:, None, :, None].expand(*query.shape[:2], L, query.shape[3]))

    def causal_key_mask(self) -> Tensor:
        """Return [B, L, n] bool: the keys before each sampled query, the query's own key left out."""
        return torch.arange(self.seen.shape[1], device=self.at.device) < self.at[..., None]

    @cached_property
    def query_counts(self) -> Tensor:
        """[B, 1, n] float32: number of sampled queries that see column j (or have a key on diagonal j), at least 1."""
        column = torch.arange(self.seen.shape[1], device=self.at.device)
        return (column <= self.at[..., None]).sum(1, keepdim=True).clamp(min=1).float()


def concatenate_heads(made: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [B, h, ...] of consecutive heads; a single one is not copied."""
    return made[0] if len(made) == 1 else torch.cat(tuple(made), 1)


@dataclass(frozen=True, eq=False)
class LastQueryAttention:
    """Softmax weights of a prompt's last L queries over its keys, computed on demand; patterns choose keys by them.

    query [B, H, L, D]: the queries; key [B, G, N, D]: the tensor with the keys. total [B, H, L]: the log-sum-exp over all
    keys that a query sees, if `sample` has only some of them; else None. pooled: query heads that share a key/value head get
    their mean weights. runs: ranges of query heads, each with its key/value heads; empty: H / G heads for each of G.
    """

    query: Tensor
    key: Tensor
    sample: SampledQueryLayout
    total: Tensor | None
    pooled: bool
    runs: tuple[HeadRun, ...] = ()

    def split_by_head_run(self) -> Iterator[LastQueryAttention]:
        """Yield a `LastQueryAttention` for each of `runs`: a range of query heads, with the keys that these heads read."""
        first = 0
        for run in self.runs:
            heads = slice(first, first := first + len(run.heads))
            total = None if self.total is None else self.total[:, heads]
            yield LastQueryAttention(
                self.query[:, heads], self.key[:, run.groups], self.sample, total, self.pooled
            )
        if not self.runs:
            yield self

    @property
    def query_ranks(self) -> Tensor:
        """[B, L] long: rank of each sampled query among the keys, -1 for none."""
        return self.sample.at

    @property
    def key_count(self) -> int:
        """n, the largest number of keys that a query can see."""
        return self.sample.seen.shape[1]

    @property
    def has_kernel(self) -> bool:
        """Whether a fused kernel reduces the attention weights without storing them."""
        return self.query.is_cuda and has_kernel(self.query.device, self.query.dtype, *self.query.shape[2:])

    @property
    def kernel_args(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, int, bool]:
        """The first arguments of the operators that reduce attention weights to sums of columns and diagonals."""
        return (
            self.query,
            self.key,
            self.sample.row,
            self.query_ranks,
            self.total,
            self.key_count,
            self.pooled,
        )

    def attention_weights(self) -> Iterator[Tensor]:
        """Yield softmax weights [B, h, L, n] float32 of h consecutive heads at a time, as many as memory allows."""
        for one in self.split_by_head_run():
            yield from one._weights()

    def _weights(self) -> Iterator[Tensor]:
        first, group = 0, self.query.shape[1] // self.key.shape[1]
        for scores in self._scores():
            last = first + scores.shape[1]
            total = None if self.total is None else self.total[:, first:last, :, None]
            weight = scores.softmax(-1) if total is None else scores.sub_(total).exp_()
            weight.nan_to_num_(0.0)
            if self.pooled:
                shared = weight.view(weight.shape[0], -1, group, *weight.shape[2:]).mean(2, keepdim=True)
                weight = shared.expand(-1, -1, group, -1, -1).flatten(1, 2)
            first = last
            yield weight

    def logsumexp(self) -> Tensor:
        """Return the log-sum-exp [B, H, L] float32 of each query's scores."""
        if self.has_kernel:
            made = [
                rowwise_logsumexp(*one.kernel_args[:4], self.key_count) for one in self.split_by_head_run()
            ]
        else:
            made = [scores.logsumexp(-1) for one in self.split_by_head_run() for scores in one._scores()]
        return concatenate_heads(made)

    def line_weights(self) -> tuple[Tensor, Tensor]:
        """Return attention weights summed along columns and along diagonals (query minus key position), each [B, H, n]
        float32.

        The sums are over queries; divided by `query_counts`, they are means over the queries that have a key there.
        """
        if self.has_kernel and self.sample.runs <= ROUNDS:
            each = [
                [one.expand_heads(t) for t in line_weights(*one.kernel_args)]
                for one in self.split_by_head_run()
            ]
            column, diagonal = map(concatenate_heads, zip(*each, strict=True))
            return column, diagonal
        columns, diagonals = [], []
        for weight in self.attention_weights():
            columns.append(weight.sum(2))
            if self.sample.queries_are_last_keys:
                diagonals.append(_skewed(weight))
                continue
            # Queries at any ranks: the key of each on each diagonal.
            key = (self.query_ranks[..., None] - torch.arange(self.key_count, device=weight.device))[:, None]
            across = weight.gather(3, key.clamp(min=0).expand_as(weight))
            diagonals.append(across.masked_fill_(key < 0, 0.0).sum(2))
        return torch.cat(columns, 1), torch.cat(diagonals, 1)

    def entropy(self) -> Tensor:
        """Return the entropy [B, H, L] (in nats) of each query's attention weights."""
        return torch.cat([torch.special.entr(weight).sum(-1) for weight in self.attention_weights()], 1)

    def expand_heads(self, found: Tensor) -> Tensor:
        """Expand results [B, h, ...] to all query heads, [B, H, ...]: `pooled` results are one for each key/value head."""
        times = self.query.shape[1] // found.shape[1]
        return found if times == 1 else found.repeat_interleave(times, 1)

    def _scores(self) -> Iterator[Tensor]:
        """Scaled scores [B, h, L, n] float32, -inf where a key is after the query."""
        B, H, L, D = self.query.shape
        G, n = self.key.shape[1], self.key_count
        group = H // G
        column = torch.arange(n, device=self.key.device)
        # Queries that are the last keys see all but the last.
        first = max(0, n - L) if self.sample.queries_are_last_keys else 0
        hidden = (column[first:] > self.query_ranks[..., None])[:, None]
        step = max(1, min(G, BUDGET // max(1, B * group * L * n)))
        for g in range(0, G, step):
            run = min(step, G - g)
            q = self.query[:, g * group : (g + run) * group].reshape(B, run, group * L, D)
            k = self.key[:, g : g + run]
            if self.sample.row is None:
                k = k[:, :, :n]
            else:
                k = k.gather(2, self.sample.row[:, None, :, None].expand(B, run, n, D))
            if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
                # Products of short types are exact in float32: no wide copy of the keys is wanted.
                wide = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
                scores = wide.mul_(D**-0.5).view(B, -1, L, n)
            else:
                scores = ((q.float() * D**-0.5) @ k.float().transpose(2, 3)).view(B, -1, L, n)
            scores[..., first:].masked_fill_(hidden, -torch.inf)
            yield scores


def _skewed(weight: Tensor) -> Tensor:
    """[B, h, n]: the sums of weight [B, h, L, n] along diagonals, of the last L queries over n keys.

    Query r is at n - L + r, so that its key on diagonal d is one to the right of that of query r - 1: rows one longer
    than they are line up.
    """
    B, h, L, n = weight.shape
    weight = weight.contiguous()
    near = weight.as_strided((B, h, L, n - L + 1), (h * L * n, L * n, n + 1, 1))
    found = weight.new_zeros(B, h, n)
    found[..., : n - L + 1] = near.sum(2).flip(-1)
    # The first L - 1 keys are on further diagonals, of some of the queries each.
    corner = weight[..., : L - 1]
    row = torch.arange(L, device=weight.device)[:, None]
    far = row - torch.arange(L - 1, device=weight.device) + n - L
    inside = far > n - L
    index = torch.where(inside, far, 0).expand_as(corner).flatten(2)
    return found.scatter_add_(2, index, (corner * inside).flatten(2))


def score_columns_or_diagonals(weight: Tensor, seen: Tensor, score: Score) -> Tensor:
    """Score lines (columns or diagonals) by their `weight` [..., B, H, n] as `score` says; seen [B, n]: which lines exist.

    For "contrast" a line's score is the logarithm of its weight, in standard deviations above the mean over the lines. This
    limits the effect of a line with nearly all weight, such as a sink. Weights are scaled so that an even spread is 1;
    values far below 0.1 are not distinguished. For other scores it is the weight itself.
    """
    if score != "contrast":
        return weight
    there = seen[:, None].to(weight.dtype)
    count = there.sum(-1, keepdim=True).clamp(min=1)
    level = (weight * count + 0.1).log() * there
    level = (level - level.sum(-1, keepdim=True) / count) * there
    spread = (level.square().sum(-1, keepdim=True) / count).sqrt()
    return level / spread.clamp(min=1e-6)


def score_line_classes(value: Tensor, number: Tensor, seen: Tensor, classes: int, score: Score) -> Tensor:
    """Score residue classes of lines, [..., B, H, classes]: a class is all columns (or diagonals) with one index modulo a
    stride. value [..., B, H, n]: the score of each line, from `score_columns_or_diagonals`.

    number [B or 1, H or 1, n]: class of each line; seen [B, n]: which lines exist.
    """
    number = number.expand_as(value).long()
    there = seen[:, None].expand_as(value)
    zeros = value.new_zeros(*value.shape[:-1], classes)
    total = zeros.scatter_add(-1, number, value.masked_fill(~there, 0.0))
    count = zeros.scatter_add(-1, number, there.to(value.dtype))
    largest = zeros.scatter_reduce(
        -1, number, value.masked_fill(~there, -torch.inf), "amax", include_self=False
    )
    return score_class_totals(total, largest, count, score)


def score_class_totals(total: Tensor, largest: Tensor, count: Tensor, score: Score) -> Tensor:
    """Score residue classes of lines, given the sum of the scores of a class's lines, the largest of them and their number.

    "mean" leaves the largest member out: a grid line has many strong members, a single strong column (a sink, the query
    itself) only one. "contrast" is that mean in standard errors. Both are -inf for classes of fewer than two members.
    """
    if score == "sum":
        return total
    rest = (count - 1).clamp(min=1)
    mean = (total - largest) / (rest if score == "mean" else rest.sqrt())
    return torch.where(count >= 2, mean, -torch.inf)
