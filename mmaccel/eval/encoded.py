"""Videos that are encoded once for all recipes that leave the vision tower alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe


class Encoded:
    """What the vision tower made of the pixels seen last.

    A pruner that reads the tower needs it at work, and gets it so.
    """

    def __init__(self) -> None:
        self._pixels: Tensor | None = None
        self._out: Any = None

    @contextmanager
    def shared(self, model: nn.Module, recipe: Recipe) -> Iterator[None]:
        """While inside, the model's tower is not asked twice about the same tensor of pixels."""
        if recipe.prune is not None:
            yield
            return
        family: Any = adapter_for(model)
        multimodal = family.multimodal(model)
        encode = multimodal.get_video_features

        @functools.wraps(encode)
        def once(pixel_values_videos: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._pixels is not pixel_values_videos:
                self._out = encode(pixel_values_videos, *args, **kwargs)
                self._pixels = pixel_values_videos
            return self._out

        before = multimodal.__dict__.get("get_video_features")
        multimodal.__dict__["get_video_features"] = once
        try:
            yield
        finally:
            multimodal.__dict__.pop("get_video_features")
            if before is not None:
                multimodal.__dict__["get_video_features"] = before
