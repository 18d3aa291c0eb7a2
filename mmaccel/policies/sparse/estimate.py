"""What the last queries attend to: the signal of the adaptive patterns (MMInference, Algorithm 1, last_q = 64)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.policies.sparse.orders import Order

BUDGET = 1 << 28
"""Most attention weights held at a time; beyond it key/value groups go one by one."""


@dataclass(frozen=True, eq=False)
class LastQueries:
    """The attention of the last `count` valid queries of each sequence to its valid keys, in their order.

    query [B, H, L, D], key [B, G, n, D]; at [B, L] place of each query among the keys, -1 where a sequence is shorter;
    seen [B, n] whether there is a key.
    """

    query: Tensor
    key: Tensor
    at: Tensor
    seen: Tensor

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, queries: Order, keys: Order, place: Tensor, count: int, padded: bool
    ) -> LastQueries:
        """The last `count` of `queries`, whose places among `keys` are `place` [B, n]; no host read.

        `padded` says whether the rows of `keys` are anything but 0, 1, 2, ...
        """
        L = min(count, query.shape[2])
        last = (queries.row >= 0).sum(1, keepdim=True) - L + torch.arange(L, device=query.device)
        row = (
            queries.row.gather(1, last.clamp(min=0)).long().clamp(min=0)
        )  # a sequence may be all padding here
        at = torch.where(last >= 0, place.gather(1, last.clamp(min=0)).long(), -1)
        n = key.shape[2]
        if padded:
            key = key.gather(2, keys.row[:, None, :n, None].clamp(min=0).long().expand_as(key))
        picked = query.gather(2, row[:, None, :, None].expand(*query.shape[:2], L, query.shape[3]))
        return cls(picked, key, at, keys.row[:, :n] >= 0)

    def weights(self) -> Iterator[Tensor]:
        """Softmax weights [B, h, L, n] float32 of consecutive runs of heads, all heads at once where memory allows."""
        B, H, L, D = self.query.shape
        G, n = self.key.shape[1:3]
        group = H // G
        column = torch.arange(n, device=self.key.device)
        hidden = (column > self.at[..., None])[:, None]
        step = max(1, min(G, BUDGET // (B * group * L * n)))
        for g in range(0, G, step):
            run = min(step, G - g)
            q = self.query[:, g * group : (g + run) * group].reshape(B, run, group * L, D)
            scores = (q.float() * D**-0.5) @ self.key[:, g : g + run].float().transpose(2, 3)
            scores = scores.view(B, -1, L, n).masked_fill_(hidden, -torch.inf)
            yield scores.softmax(-1).nan_to_num_(0.0)

    def lines(self) -> tuple[Tensor, Tensor]:
        """[B, H, n] float32, twice: the weight of each column, and of each diagonal (query place minus key place).

        Sums over the queries; divided by `askers`, means over the queries that have a key there.
        """
        n = self.key.shape[2]
        source = self.at[..., None] - torch.arange(n, device=self.key.device)
        outside = (source < 0)[:, None]
        index = source.clamp(min=0)[:, None]
        columns, diagonals = [], []
        for weight in self.weights():
            columns.append(weight.sum(2))
            across = weight.gather(3, index.expand_as(weight)).masked_fill_(outside, 0.0)
            diagonals.append(across.sum(2))
        return torch.cat(columns, 1), torch.cat(diagonals, 1)

    def askers(self) -> Tensor:
        """[B, 1, n] float32: the queries that see column j, which are as many as have a key on diagonal j; at least 1."""
        place = torch.arange(self.key.shape[2], device=self.key.device)
        return (place <= self.at[..., None]).sum(1, keepdim=True).clamp(min=1).float()


def class_means(score: Tensor, number: Tensor, seen: Tensor, classes: int) -> Tensor:
    """[B, H, classes]: the mean of score [B, H, n] over each class, its largest member left out.

    number [B or 1, H or 1, n] class of each column, seen [B, n] which columns there are. A line of a grid has many
    members; without its largest one a single strong column (a sink, the query itself) no longer looks like a line.
    Classes with fewer than two members get 0.
    """
    B, H, _ = score.shape
    number = number.expand_as(score).long()
    there = seen[:, None].expand_as(score).to(score.dtype)
    zeros = score.new_zeros(B, H, classes)
    count = zeros.scatter_add(2, number, there)
    total = zeros.scatter_add(2, number, score * there)
    largest = zeros.scatter_reduce(2, number, score * there, "amax")
    return trimmed(total, largest, count)


def trimmed(total: Tensor, largest: Tensor, count: Tensor) -> Tensor:
    """Mean without the largest member, from sums; 0 where there are fewer than two."""
    return torch.where(count >= 2, (total - largest) / (count - 1).clamp(min=1), 0.0)
