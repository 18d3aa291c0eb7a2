"""One part of an attention plan in Triton: gathered inside the kernel, one softmax over all spans, long rows split."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmaccel.backends.ops.block_attend import define
from mmaccel.backends.ops.operator import usable as usable


def _block_attend(*args: Any) -> tuple[Tensor, Tensor]:
    from mmaccel.backends.triton.prefill.attend import block_attend

    return block_attend(*args)


op = define("block_attend_triton", _block_attend)
