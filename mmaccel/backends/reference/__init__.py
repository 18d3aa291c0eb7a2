"""Block-sparse attention in plain PyTorch: the oracle of every other backend, on any device."""

from mmaccel.backends.ops import block_attend as op
from mmaccel.backends.reference.blocks import block_attend, usable

__all__ = ["block_attend", "op", "usable"]
