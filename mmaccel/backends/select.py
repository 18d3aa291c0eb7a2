"""Which backend serves a device: what is usable and why not, and one choice, made once."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, UnknownName

BlockAttend = Callable[..., tuple[Tensor, Tensor]]

BACKENDS = {
    "reference": "mmaccel.backends.reference",
    "flex": "mmaccel.backends.flex",
}
"""Name to module; each has ``usable(device) -> str | None`` and ``op``, a custom operator of the flat schema."""

PREFERENCE = {"cuda": ("flex", "reference"), "cpu": ("reference", "flex")}
"""Order in which "auto" looks; fastest first."""


def usable(device: torch.device | str) -> dict[str, str | None]:
    """For each backend None when it can run on `device`, or else the reason in a few words."""
    return {name: _why_not(name, torch.device(device)) for name in BACKENDS}


def choose(device: torch.device | str) -> str:
    """The name that "auto" stands for on `device`."""
    device = torch.device(device)
    for name in PREFERENCE.get(device.type, ("reference",)):
        if _why_not(name, device) is None:
            return name
    return "reference"


def get(name: str, device: torch.device | str) -> BlockAttend:
    """The operator of backend `name` ("auto": the one `choose` picks), with the schema of `ops.block_attend`.

    Raises `UnknownName` for a name that is not known, and `RecipeError` for one that cannot run on `device`.
    """
    device = torch.device(device)
    if name == "auto":
        name = choose(device)
    if name not in BACKENDS:
        raise UnknownName("backend", name, ("auto", *BACKENDS))
    reason = _why_not(name, device)
    if reason is not None:
        raise RecipeError(
            f"backend {name!r} cannot run on {device}: {reason}; choose 'auto' or one of {_others(device)}."
        )
    op: BlockAttend = import_module(BACKENDS[name]).op
    return op


def _others(device: torch.device) -> str:
    return ", ".join(repr(n) for n, reason in usable(device).items() if reason is None)


def _why_not(name: str, device: torch.device) -> str | None:
    try:
        module = import_module(BACKENDS[name])
    except ImportError as error:
        return f"it needs {error.name or error}"
    reason: str | None = module.usable(device)
    return reason
