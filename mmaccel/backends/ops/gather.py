"""Units of keys and values out of slabs that lie apart, by an index on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.backends.ops.operator import operator


def grain_of(slab: Sequence[Tensor]) -> int:
    """A number of bytes that divides the addresses of all slabs."""
    return math.gcd(*(one.data_ptr() for one in slab))


@operator("stream.gather.gather_units", mutates=("out",), fake=lambda: None)
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
