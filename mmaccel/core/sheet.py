"""Tensors put together of many pieces at once: each `put` is noted, and all are written in two launches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmaccel.backends.ops import pieces

ALIGNED = 128
"""Elements to whose multiples rooms begin: kernels are compiled for how addresses divide."""


@dataclass(frozen=True, eq=False)
class Room:
    """Where a tensor [b, h, n, ...] will be in the result of its kind."""

    kind: int
    begin: int
    shape: tuple[int, ...]

    @property
    def line(self) -> int:
        """Elements of one head."""
        return self.shape[2] * (self.shape[3] if len(self.shape) > 3 else 1)

    @property
    def size(self) -> int:
        """Elements in all."""
        return self.shape[0] * self.shape[1] * self.line


@dataclass(eq=False)
class Sheet:
    """Rooms, and what is put into them."""

    _sources: list[Tensor] = field(default_factory=list)
    _fills: list[int] = field(default_factory=list)
    _puts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=lambda: [0] * len(pieces.KINDS))
    _tiles: list[int] = field(default_factory=lambda: [0, 0])
    _made: list[Tensor] = field(default_factory=list)

    def room(self, shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Room:
        """A tensor of `shape` [b, h, n], or of lists [b, h, n, 5], that is `value` wherever nothing is put."""
        kind = pieces.KINDS.index(dtype)
        room = Room(kind, self._ends[kind], shape)
        self._ends[kind] += room.size + -room.size % ALIGNED
        if room.size:
            tiles = self._next(0, 1, room.size)
            self._fills += (tiles, room.begin, kind, 0, 0, 1, 1, room.size, -1, 0, 0, 0, value, 0, 0)
        return room

    def put(
        self, room: Room, slots: tuple[int, ...], t: Tensor, begin: int, more: int = 0, shift: int = 0
    ) -> None:
        """Write `t` [b or 1, slots or 1, n, ...] plus `more` into the columns from `begin` of the heads `slots`.

        In a room of lists `more` is added to where each begins, and `shift` to its last number.
        """
        of_row = len(room.shape) > 3
        size = t.shape[2] * (pieces.ROW if of_row else 1)
        dense = t.stride(-1) == 1 and (not of_row or t.stride(2) == pieces.ROW)
        if not size or not t.shape[0] * t.shape[1]:
            return
        t = t if dense else t.contiguous()
        source, from_kind = len(self._sources), pieces.KINDS.index(t.dtype)
        self._sources.append(t)
        batch, line = room.shape[0], room.line
        from_b, from_h = (t.stride(i) if t.shape[i] > 1 else 0 for i in (0, 1))
        at = 0
        while at < len(slots):
            # One piece for each run of adjacent heads.
            end = at + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1:
                end += 1
            here, to = t, room.begin + slots[at] * line + begin * (pieces.ROW if of_row else 1)
            if from_h and at:
                here, source = t[:, at:end], len(self._sources)
                self._sources.append(here)
            lead = to, room.kind, room.shape[1] * line, line, end - at, batch, size
            tail = source, from_kind, from_b, from_h, more, int(of_row), shift
            self._puts += (self._next(1, (end - at) * batch, size), *lead, *tail)
            at = end

    def _next(self, phase: int, lines: int, size: int) -> int:
        """The tiles of a phase so far, to which those of a piece are added."""
        before = self._tiles[phase]
        self._tiles[phase] += lines * -(-size // pieces.TILE)
        return before

    def write(self) -> None:
        """Make the tensors of all rooms."""
        self._made = pieces.assembled(
            self._sources, [*self._fills, *self._puts], len(self._fills) // len(pieces.FIELDS), self._ends
        )

    def tensor(self, room: Room) -> Tensor:
        """What was made of a room."""
        return self._made[room.kind][room.begin : room.begin + room.size].view(room.shape)
