"""Videos that are encoded once for all recipes, and for all questions about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.models.install import Hooks
from mmaccel.models.modules import install_batched_tower
from mmaccel.models.signals import VisionAttentionProbe

GRID = "video_grid_thw"


class Encoded:
    """What the vision tower made of the pixels seen last, and what entered its layer that pruners look at."""

    def __init__(self) -> None:
        self._pixels: Tensor | None = None
        self._out: Any = None
        self._entered: list[tuple[Any, Any]] = []
        self._batch: tuple[Tensor, Tensor, int] | None = None

    def together(self, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The inputs of one batch: prompts of equal length about the same video, which the tower sees once."""
        batch = {name: torch.cat([one[name] for one in prompts]) for name in prompts[0]}
        self._batch = prompts[0]["pixel_values_videos"], batch["pixel_values_videos"], len(prompts)
        return batch

    @contextmanager
    def shared(self, model: nn.Module, recipe: Recipe) -> Iterator[None]:
        """While inside, the model's tower is not asked twice about a tensor of pixels, nor about its copies in a batch.

        A pruner that reads the tower is told again what entered the layer it looks at.
        """
        family: Any = adapter_for(model)
        multimodal = family.multimodal(model)
        # Parts are cut within what is shared: a recipe laid outside finds a tower that sees some frames at a time.
        with Hooks() as brief:
            listened = VisionAttentionProbe(brief, model, family).tower.attention

        def once(encode: Any, pixel_values_videos: Tensor, *args: Any, **kwargs: Any) -> Any:
            copies = 1
            if self._batch is not None and pixel_values_videos is self._batch[1]:
                pixel_values_videos, _, copies = self._batch
                args = tuple(x[: len(x) // copies] if isinstance(x, Tensor) else x for x in args)
                if GRID in kwargs:
                    kwargs[GRID] = kwargs[GRID][: len(kwargs[GRID]) // copies]
            if self._pixels is not pixel_values_videos:
                self._entered = []
                handle = listened.register_forward_pre_hook(
                    lambda module, args, kwargs: self._entered.append((args, kwargs)), with_kwargs=True
                )
                try:
                    self._out = _features(encode(pixel_values_videos, *args, **kwargs))
                finally:
                    handle.remove()
                self._pixels = pixel_values_videos
            else:
                for hook in list(listened._forward_pre_hooks.values()):
                    for entered in self._entered:
                        hook(listened, *entered)
            return _features(self._out, copies)

        with Hooks() as hooks:
            install_batched_tower(hooks, family, model)
            hooks.wrap(multimodal, "get_video_features", once)
            yield


def _features(out: Any, copies: int = 1) -> Any:
    """What a model takes of its tower's output, without the states of its layers, for so many copies of the videos."""
    found = out.pooler_output
    several = found.repeat(copies, *[1] * (found.dim() - 1)) if isinstance(found, Tensor) else found * copies
    return type(out)(pooler_output=several)
