"""Units of keys and values out of host slabs, in plain PyTorch: the meaning of `mmaccel.backends.ops.gather_units`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_units(out: Tensor, slab: Sequence[Tensor], base: Tensor, slot: Tensor) -> None:
    """See `mmaccel.backends.ops.gather_units`; the slots are read on the host, slab by slab."""
    slots = slab[0].shape[0]
    target = out if out.dim() == 5 else out.view(*out.shape[:2], -1, *slab[0].shape[3:])
    wanted = slot.cpu()
    empty = torch.nonzero(wanted < 0)[:, 0]
    if empty.numel():
        target.index_fill_(2, empty.to(out.device), 0)
    holder = wanted // slots
    for number in torch.unique(holder[wanted >= 0]).tolist():
        at = torch.nonzero(holder == number)[:, 0]
        units = slab[number].index_select(0, wanted[at] % slots)
        target.index_copy_(2, at.to(out.device), units.permute(1, 2, 0, 3, 4).to(out.device))
