"""Which key blocks each block of queries lists: one list after another, or runs of an index that many share.

Letters: M query blocks, N key blocks. Leading dimensions b and h are batch and heads, or 1 where all share the lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.backends.ops import present, ragged


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Ragged lists of key blocks, one for each query block.

    offset [b, h, M + 1] int64: the list of query block m is ``index[offset[m]:offset[m + 1]]``; the lists of one head
    follow those of the head before it.
    index int32, kind int8: number and kind (FULL, ABSENT, TEST) of each listed block; may be longer than the last offset.
    """

    offset: Tensor
    index: Tensor
    kind: Tensor

    @property
    def blocks(self) -> int:
        """M, a number of the host."""
        return self.offset.shape[-1] - 1

    @property
    def count(self) -> Tensor:
        """[b, h, M]: how many blocks each list holds."""
        return self.offset[..., 1:] - self.offset[..., :-1]

    def area(self, q_row: Tensor, k_row: Tensor, block_q: int, block_k: int) -> Tensor:
        """[b, h], whole numbers: over listed blocks, the rows q_row [b, h, P] there are of its query block times those there
        are, k_row [b, h, N], of its keys."""
        b, h, m1 = self.offset.shape
        m = m1 - 1
        nq, nk = present(q_row, block_q), present(k_row, block_k)
        nq, nk = nq.expand(b, h, m), nk.expand(b, h, nk.shape[-1])
        entry = torch.arange(self.index.numel(), device=self.index.device)
        row = torch.searchsorted(self.offset[..., 1:].reshape(-1).contiguous(), entry, right=True)
        row = row.clamp(max=b * h * m - 1)
        used = (entry < self.offset[..., -1].max()).double()
        of_keys = nk.reshape(-1)[(row // m) * nk.shape[-1] + self.index.long()].double()
        area = nq.reshape(-1)[row].double() * of_keys * used
        total = torch.zeros(b * h, dtype=torch.float64, device=area.device)
        return total.index_add_(0, row // m, area).view(b, h)

    def to(self, device: torch.device | str) -> BlockLists:
        """The same with its tensors on `device`."""
        return BlockLists(self.offset.to(device), self.index.to(device), self.kind.to(device))

    def table(self, n_blocks: int) -> Tensor:
        """[b, h, M, n_blocks] int8, the kind of each listed block and -1 elsewhere; for tests and small sizes."""
        b, h, m1 = self.offset.shape
        m = m1 - 1
        count = (self.offset[..., 1:] - self.offset[..., :-1]).reshape(-1)
        total = int(count.sum())
        rows = torch.repeat_interleave(
            torch.arange(count.numel(), device=count.device), count, output_size=total
        )
        begin = self.offset[..., :-1].reshape(-1)
        inside = torch.arange(total, device=count.device) - (count.cumsum(0) - count)[rows]
        entry = begin[rows] + inside
        table = torch.full((b * h * m, n_blocks), -1, dtype=torch.int8, device=count.device)
        table[rows, self.index[entry].long()] = self.kind[entry]
        return table.view(b, h, m, n_blocks)


BEGIN, COUNT, HEAD, TAIL, SHIFT = range(5)
"""What `BlockRuns.row` tells of a list."""


@dataclass(frozen=True, eq=False)
class BlockRuns:
    """Lists of key blocks, each a run of one index that many may share: made without knowing on the host how long they are.

    row [b, h, M, 5] int64: BEGIN, COUNT, HEAD, TAIL, SHIFT of each query block. Its list holds the key blocks
    ``index[BEGIN + e] + SHIFT`` for e < COUNT; those with e < HEAD or e >= TAIL are tested pair by pair, the rest are of
    the kind of their key block. Where places ascend along keys, what passes every test is a run in any sorted list.
    index [E] int32, or None: entry e is block e, and a block that is not listed holds no pair in the range of its span.
    kind [b, h, N] int8: FULL, or ABSENT where some key of the block is. most: no list is longer.
    """

    row: Tensor
    index: Tensor | None
    kind: Tensor
    most: int

    @property
    def blocks(self) -> int:
        """M, a number of the host."""
        return self.row.shape[2]

    @property
    def count(self) -> Tensor:
        """[b, h, M]: how many blocks each list holds."""
        return self.row[..., COUNT]

    @property
    def entries(self) -> Tensor:
        """The index as operators take it, empty for none."""
        return self.row.new_empty(0, dtype=torch.int32) if self.index is None else self.index

    def area(self, q_row: Tensor, k_row: Tensor, block_q: int, block_k: int) -> Tensor:
        """As `BlockLists.area`."""
        area: Tensor = ops.area_now(self.row, self.entries, q_row, k_row, block_q, block_k)
        return area

    def to(self, device: torch.device | str) -> BlockRuns:
        """The same with its tensors on `device`."""
        index = None if self.index is None else self.index.to(device)
        return BlockRuns(self.row.to(device), index, self.kind.to(device), self.most)

    def lists(self) -> BlockLists:
        """The same lists one after another; reads their sizes on the host."""
        return BlockLists(*ragged(self.row, self.entries, self.kind))

    def table(self, n_blocks: int) -> Tensor:
        """As `BlockLists.table`."""
        return self.lists().table(n_blocks)
