"""Backend "flash": runs one part of an attention plan with flash-attn 4, as block-sparse tensors and a mask function."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import register_block_attend
from mmaccel.backends.ops.operator import import_on_first_call


def why_unusable(device: torch.device) -> str | None:
    """Why this backend cannot run on `device`, or None if it can; imports no kernel of flash-attn."""
    return operators.why_kernels_unusable("flash", device) or (
        None if is_installed() else "it needs flash-attn 4 (pip install flash-attn-4)"
    )


@cache
def is_installed() -> bool:
    """Whether flash-attn 4 can be imported: looked for once, since a pass asks at each layer."""
    # Of version 2 the package has the same name, and no `cute`.
    try:
        return all(find_spec(name) is not None for name in ("flash_attn.cute", "cutlass"))
    except Exception:  # whatever a broken package raises
        return False


op = register_block_attend(
    "block_attend_flash", import_on_first_call("mmaccel.backends.flash.attend", "block_attend")
)
op.prepare = import_on_first_call("mmaccel.backends.flash.attend", "prepare_mask_tensors")
op.extra = False  # no bias, no keys of a span's own, no window: see `select.with_extended_support`
