"""Orders of tokens and their ranks: what the patterns are written in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import FAR


@dataclass(frozen=True, eq=False)
class Order:
    """Some tokens of each sequence, by position.

    row [B, n] rows of the tensor the tokens lie in, -1 past the last; position [B, n] their positions, FAR past the last;
    rank [B, n] int32 0, 1, 2, ... count: the rows are 0 .. count - 1 in every sequence, as far as the host knows.
    """

    row: Tensor
    position: Tensor
    count: int | None = None
    rank: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rank = torch.arange(len(self), dtype=torch.int32, device=self.row.device)
        object.__setattr__(self, "rank", rank.expand(len(self.row), -1))

    def __len__(self) -> int:
        return self.row.shape[1]


def natural(
    layout: TokenLayout, member: Tensor | None = None, *, block: int, size: int | None = None
) -> Order:
    """The valid tokens of `layout` (those of `member`, bool [B, S]) in their order, padded to whole blocks.

    `size` is the most tokens that any sequence has, where the host knows it; otherwise the length of the layout.
    """
    chosen = layout.valid if member is None else layout.valid & member
    B, S = chosen.shape
    n = S if size is None else size
    n += -n % block if n else block
    if member is None and size is None and not layout.padded:
        ends = torch.nn.functional.pad(layout.position.long(), (0, n - S), value=FAR)
        row = torch.arange(n, dtype=torch.int32, device=chosen.device)
        return Order(row.masked_fill(row >= S, -1).repeat(B, 1), ends, S)
    # Tokens that are not chosen, and those past `size`, fall into a last column that is cut off.
    slot = torch.where(chosen, chosen.long().cumsum(1) - 1, n).clamp(max=n)
    index = torch.arange(S, device=chosen.device, dtype=torch.int32).expand(B, S)
    row = torch.full((B, n + 1), -1, dtype=torch.int32, device=chosen.device).scatter_(1, slot, index)
    position = torch.full((B, n + 1), FAR, dtype=torch.long, device=chosen.device)
    position.scatter_(1, slot, layout.position.long())
    return Order(row[:, :n].contiguous(), position[:, :n].contiguous())


def at_or_before(keys: Order, queries: Order) -> Tensor:
    """[B, n] int32: the rank of each query among `keys`, the number of keys not after it, minus one; -1 for padding."""
    found = torch.searchsorted(keys.position, queries.position, right=True) - 1
    return found.masked_fill(queries.row < 0, -1).to(torch.int32)


def whole_blocks(n: int, block: int) -> int:
    """Blocks of `block` tokens that cover `n`."""
    return -(-n // block)


def touched(n: int, block: int) -> int:
    """The most blocks that a run of `n` tokens can touch."""
    return (n + block - 2) // block + 1 if n > 0 else 0
