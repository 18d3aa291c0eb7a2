"""A test processor for tiny models of any family: one token per character, pixels made from frames; no files, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.layout import VIDEO
from mmaccel.models.chat import as_messages
from mmaccel.models.processor import Processor
from mmaccel.models.prompt_layout import PIXELS

OPEN, CLOSE = "user: ", " model: "
"""Around what a user says."""


class CharTokenizer:
    """A character-level test tokenizer with ids from `begin` to below `end`."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.count = begin, end - begin

    def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.begin + ord(letter) % self.count for letter in text]}

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        """Return the ids as decimal numbers, separated by spaces."""
        return " ".join(map(str, ids))


class CharProcessor(Processor):
    """A test processor that makes prompts for tiny models of `config`; an image or video becomes the tokens of
    `Family.tiny_visual_input`."""

    video_token, video_token_id = "<video>", -1

    def __init__(self, family: Any, config: Any, words: tuple[int, int]) -> None:
        self.family, self.config, self.model_type = family, config, config.model_type
        self.tokenizer = CharTokenizer(*words)

    def template_ids(self, content: Sequence[Mapping[str, Any]]) -> list[int]:
        text = "".join(piece.get("text", "") for one in as_messages(content) for piece in one["content"])
        before, after = (self.tokenizer(words)["input_ids"] for words in (OPEN, text + CLOSE))
        marks = [getattr(self.config, f"video_{side}_token_id", None) for side in ("start", "end")]
        opens, closes = ([] if mark is None else [mark] for mark in marks)
        return [*before, *opens, self.video_token_id, *closes, *after]

    def __call__(
        self, text: Any, images: Any = None, videos: Any = None, *rest: Any, **how: Any
    ) -> dict[str, Tensor]:
        """The inputs of one video alone."""
        (frames,) = videos
        ids, made = self._made(frames)
        shown = torch.tensor([ids])
        if not self.family.has_frame_text:
            # The words around a video are of the template, and none stand between its frames.
            visual = self.family.token_modalities(self.config, shown)[0].nonzero()[:, 0]
            shown = shown[:, visual[0] : visual[-1] + 1]
        if "mm_token_type_ids" in self.family.extra_inputs:
            made["mm_token_type_ids"] = self.family.token_modalities(self.config, shown).int()
        return {name: x.to(how.get("device")) for name, x in {"input_ids": shown, **made}.items()}

    def prepare_pixels(
        self, frames: Tensor, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        made = self._made(frames)[1]
        return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in made.items()}

    def _made(self, frames: Tensor) -> tuple[list[int], dict[str, Tensor]]:
        """Ids and inputs of a video of `frames` [T, 3, H, W]: those of a unit follow from its frames alone."""
        frames_per_unit = int(getattr(self.config.vision_config, "temporal_patch_size", None) or 1)
        units = frames.split(frames_per_unit)
        ids, made = self.family.tiny_visual_input(self.config, VIDEO, len(units), torch.Generator())
        made = self.family.complete_tiny_inputs(self.config, made)
        pixels = next(made[name] for name in PIXELS.values() if name in made)
        for unit, out in zip(units, pixels.view(-1).chunk(len(units)), strict=True):
            generator = torch.Generator().manual_seed(int(unit.long().sum()))
            out.copy_(torch.randn(out.shape, generator=generator))
        return ids, made
