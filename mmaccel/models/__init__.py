"""The supported families, and our processor by a model's name; importing this registers the families, and does not import
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.models import generic, glm4v, llava_onevision, qwen2_5_vl, qwen3_5, qwen3_vl
from mmaccel.models.loading import resolve

__all__ = ["generic", "glm4v", "llava_onevision", "load_processor", "qwen2_5_vl", "qwen3_5", "qwen3_vl"]


def load_processor(name: str | Path, *, special_tokens: bool = True) -> Any:
    """Our processor for the model `name` (see `mmaccel.models.processor.Processor`).

    special_tokens  whether special tokens in the texts that `chat` and a session are given are such, as they are for stock;
                    give False where other people ask: they are then text
    """
    from mmaccel.models.processor import Processor

    return Processor.from_pretrained(resolve(name), special_tokens=special_tokens)
