"""Backend "triton": one part of an attention plan in Triton. Keys are gathered inside the kernel, all spans share one
softmax, and long lists are split over programs."""

from __future__ import annotations

from mmaccel.backends.ops.block_attend import register_block_attend
from mmaccel.backends.ops.operator import import_on_first_call, why_triton_unusable

why_unusable = why_triton_unusable
op = register_block_attend(
    "block_attend_triton", import_on_first_call("mmaccel.backends.triton.prefill.attend", "block_attend")
)
