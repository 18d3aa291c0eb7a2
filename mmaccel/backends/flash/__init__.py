"""One part of an attention plan through flash-attn 4: block lists as its block tensors, places as its mask."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends import architectures
from mmaccel.backends.ops.block_attend import define


def usable(device: torch.device) -> str | None:
    """Why this backend cannot run on `device`; None when it can. To tell, no kernel of flash-attn is imported."""
    return architectures.why_not("flash", device) or (
        None if installed() else "it needs flash-attn 4 (pip install flash-attn-4)"
    )


def installed() -> bool:
    """Whether flash-attn 4 can be imported."""
    # Of version 2 the package has the same name, and no `cute`.
    try:
        return all(find_spec(name) is not None for name in ("flash_attn.cute", "cutlass"))
    except Exception:  # whatever a broken package raises
        return False


def _block_attend(*args: Any) -> tuple[Tensor, Tensor]:
    from mmaccel.backends.flash.attend import block_attend

    return block_attend(*args)


def _prepare(*args: Any) -> list[Tensor]:
    from mmaccel.backends.flash.attend import prepare

    return prepare(*args)


op = define("block_attend_flash", _block_attend)
op.prepare = _prepare
op.extra = False  # neither a bias nor keys of a span's own: see `select.serving_extra`
