"""The supported families, and the processor by a model's name; importing this registers the families, and does not import
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
    """The processor of the model `name`: transformers' own where it can run, else ours, which makes the same without
    torchvision; both with the calls of `mmaccel.models.processor.Processor`. A processor in the place of a name comes back
    with these calls.

    revision        of a name on the hub: a branch, tag or commit
    like            the model that it is to serve, where that is at hand

    special_tokens  whether special tokens in the texts that `chat` and a session are given are such, as they are for stock;
                    give False where other people ask: they are then text
    """
    from mmaccel.models import stock

    if not isinstance(name, str | Path):
        kind = None if like is None else like.config.model_type  # type: ignore[union-attr]
        return stock.wrapped(name, kind, special_tokens=special_tokens)  # type: ignore[arg-type]
    return stock.load(name, revision, special_tokens=special_tokens)


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


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
_declare_operators()
