"""Models and processors from a folder, a hub name, or the shipped tiny family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmaccel.core.errors import ModelError
from mmaccel.models import tiny
from mmaccel.models.spread import spread


def resolve(name: str | Path) -> str:
    """A folder's path for a shipped model's name; folders and hub names as they are."""
    return str(tiny.path(str(name))) if str(name) in tiny.NAMES else str(name)


def load_model(
    name: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    devices: Sequence[torch.device | str] | None = None,
) -> nn.Module:
    """An unmodified transformers model in evaluation mode. Raises `ModelError` when the folder holds none.

    With `devices` its layers are spread over these, in order, and all else is on the first: see `spread.spread`. It is read
    into host memory before.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForImageTextToText

    source = resolve(name)
    folder = Path(source)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ModelError(f"model {source!r} has no config.json; give a folder written by save_pretrained.")
    try:
        model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        first = " ".join(str(error).split())
        known = ", ".join(tiny.NAMES)
        raise ModelError(
            f"model {source!r} cannot be loaded; give a folder, a hub name or one of {known} ({first[:200]})."
        ) from error
    if devices is not None:
        spread(model, devices)
        return model.eval()  # type: ignore[no-any-return]
    return model.to(device).eval()  # type: ignore[no-any-return]


def load_processor(name: str | Path) -> Any:
    """Our processor for the model `name` (see `mmaccel.models.processor.Processor`)."""
    from mmaccel.models.processor import Processor

    return Processor.from_pretrained(resolve(name))
