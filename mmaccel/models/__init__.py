"""The supported model families, and `load_processor`. Importing this module registers the families; it does not import
transformers."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmaccel.models import gemma, generic, glm4v, llava_onevision, qwen2_5_vl, qwen3_5, qwen3_vl

__all__ = [
    "gemma",
    "generic",
    "glm4v",
    "llava_onevision",
    "load_processor",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_vl",
]


def load_processor(
    name: Any, *, revision: str | None = None, special_tokens: bool = True, like: nn.Module | None = None
) -> Any:
    """Load the processor of the model `name`: transformers' own if torchvision is installed; else ours, which gives the same
    tensors without it, for LLaVA-OneVision, Qwen2-VL and Qwen2.5-VL. Both have the methods of
    `mmaccel.models.processor.Processor`. Raises `ModelError` if neither can be loaded.

    name            a folder, a hub name (owner/name), a tiny model; or a loaded processor, which then gets these methods
    revision        branch, tag or commit of a hub name
    special_tokens  whether special tokens inside the user's texts act as such, as in transformers; with False, for texts of
                    untrusted users, they are tokenized as plain text
    like            for a loaded processor: the model that it is for; None: the model type follows from the processor's class
    """
    from mmaccel.models import stock

    if not isinstance(name, str | Path):
        kind = None if like is None else like.config.model_type  # type: ignore[union-attr]
        return stock.wrap_processor(name, kind, special_tokens=special_tokens)  # type: ignore[arg-type]
    return stock.load_processor(name, revision, special_tokens=special_tokens)


def _declare_operators() -> None:
    """Declare the two operators that a torchvision built for CUDA registers for, beside a torch for CPUs.

    Without them it does not import, and transformers with it, though all that transformers takes of it is Python.
    """
    found = PathFinder.find_spec("torchvision") if torch.version.cuda is None else None
    if found is None or found.origin is None:
        return
    told = Path(found.origin).with_name("version.py")
    if told.is_file() and "+cu" in told.read_text(encoding="utf-8"):
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                DECLARED.append(name)


DECLARED: list[str] = []
"""Operators of torchvision that this process declared, since torchvision is built for another torch."""
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
_declare_operators()
