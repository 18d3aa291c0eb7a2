"""Units of keys and values out of slabs that lie apart, by an index on the device; torch only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _gather_units(out: Tensor, slab: Sequence[Tensor], base: Tensor, slot: Tensor) -> None:
    from mmaccel.backends import triton

    if triton.usable(out.device) is None:
        from mmaccel.backends.triton.stream.gather import gather_units as launch

        launch(out, slab, base, slot)
    else:
        from mmaccel.backends.reference.gather import gather_units as plain

        plain(out, slab, base, slot)


gather_units = torch.library.custom_op(
    "mmaccel::gather_units",
    _gather_units,
    mutates_args=("out",),
    schema="(Tensor(a!) out, Tensor[] slab, Tensor base, Tensor slot) -> ()",
)
"""Bring units of keys and values from host memory into `out`, in the order of `slot`; one launch where Triton runs.

out [2, G, n * P, D] on the device: keys, then values, the last two dimensions dense; or [2, G, n, P, D], where units may lie
apart. slab: host tensors [slots, 2, G, P, D],
pinned where `out` is on a CUDA device. base [slabs] long, on the device: the bytes from the first slab to each. slot [n]
long, on the device: slot s is entry ``s % slots`` of slab ``s // slots``, and -1 gives zeros.
"""


@gather_units.register_fake
def _gather_units_shape(out: Tensor, slab: Sequence[Tensor], base: Tensor, slot: Tensor) -> None:
    return None


def gather_now(out: Tensor, slab: Sequence[Tensor], base: Tensor, slot: Tensor, grain: int) -> None:
    """`gather_units` for code that nobody compiles: with a hundred slabs a call through torch.library takes the host 200 us
    more. `grain`: what `grain_of` says of the slabs."""
    from mmaccel.backends import triton

    if triton.usable(out.device) is None:
        from mmaccel.backends.triton.stream.gather import gather_units as launch

        launch(out, slab, base, slot, grain=grain)
    else:
        gather_units(out, slab, base, slot)


def grain_of(slab: Sequence[Tensor]) -> int:
    """A number of bytes that divides the addresses of all slabs."""
    return math.gcd(*(one.data_ptr() for one in slab))
