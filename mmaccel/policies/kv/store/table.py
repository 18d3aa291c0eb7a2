"""Where each unit of each layer lies: a table on the host, and its copy on the device for indices that live there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmaccel.policies.kv.store.wire import on_device

Numbers = NDArray[np.int64]


class Table:
    """[L, units] slots and groups, -1 for none; it widens with the unit numbers."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._device = device
        self.slot: Numbers = np.full((layers, 0), -1, dtype=np.int64)
        self.group: Numbers = self.slot.copy()
        self._copy: Tensor | None = None
        self._stale = True

    def set(
        self, layer: int, units: Sequence[int], slots: Sequence[int], groups: Sequence[int | None]
    ) -> None:
        """Units of a layer lie in `slots` from now on, each in a group."""
        self._widen(max(units, default=-1) + 1)
        self.slot[layer, units] = slots
        self.group[layer, units] = [-1 if group is None else group for group in groups]
        self._stale = True

    def unset(self, layer: int, units: Sequence[int]) -> list[int]:
        """Forget units of a layer; the slots they lay in. Those not held are passed over."""
        wanted = np.unique([unit for unit in units if 0 <= unit < self.slot.shape[1]]).astype(np.int64)
        slots = self.slot[layer, wanted]
        self.slot[layer, wanted] = self.group[layer, wanted] = -1
        self._stale = True
        return [int(slot) for slot in slots if slot >= 0]

    def look(self, layer: int, units: Sequence[int]) -> list[int]:
        """Slots of units, -1 where there is none."""
        wanted = np.asarray(units, dtype=np.int64)
        known = (wanted >= 0) & (wanted < self.slot.shape[1])
        slots = np.full(wanted.shape, -1, dtype=np.int64)
        slots[known] = self.slot[layer, wanted[known]]
        return [int(slot) for slot in slots]

    def units(self, layer: int, first: int = 0) -> list[int]:
        """The units from number `first` on that a layer holds, ascending."""
        return [first + int(unit) for unit in np.flatnonzero(self.slot[layer, first:] >= 0)]

    def count(self) -> int:
        """Units held, summed over the layers."""
        return int(np.count_nonzero(self.slot >= 0))

    def oldest(self, keep: Sequence[int]) -> int | None:
        """The least number of a unit that any layer holds and that is not among `keep`."""
        held = np.flatnonzero((self.slot >= 0).any(0))
        held = held[~np.isin(held, np.asarray(keep, dtype=np.int64))]
        return int(held[0]) if held.size else None

    def held(self) -> int:
        """Units that some layer holds."""
        return int((self.slot >= 0).any(0).sum())

    def group_of(self, layer: int, unit: int) -> int | None:
        known = 0 <= unit < self.group.shape[1] and self.group[layer, unit] >= 0
        return int(self.group[layer, unit]) if known else None

    def rows(self) -> Tensor:
        """[L, units] slots on the device: uploaded whole, and only when asked for after a change, for streams change
        in one phase and are asked in another. It stays where it is until the table widens."""
        if self._copy is None or self._copy.shape != self.slot.shape:
            with torch.inference_mode(False):
                self._copy = torch.empty(self.slot.shape, dtype=torch.long, device=self._device)
            self._stale = True
        if self._stale:
            self._copy.copy_(on_device(torch.from_numpy(self.slot).clone(), self._device))
            self._stale = False
        return self._copy

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return 0 if self._copy is None else self._copy.nbytes

    def _widen(self, units: int) -> None:
        have = self.slot.shape[1]
        if units > have:
            more = np.full((self.slot.shape[0], max(units, 2 * have) - have), -1, dtype=np.int64)
            self.slot = np.concatenate([self.slot, more], 1)
            self.group = np.concatenate([self.group, more], 1)
