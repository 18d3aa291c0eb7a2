"""Units (time steps) of a stream with the text that prompts write beside each frame, such as its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.streams.parts import Moment
from mmaccel.models.stream import HFStreamAdapter

Around = tuple[list[int], list[int]]
"""Ids before and behind the visual tokens of a unit."""


class TextAroundUnits:
    """The text that a processor writes around each unit (frame, or pair of frames) of a stream, such as its time.

    head, tail  token ids of the prompt before and after the video, without those that belong to units
    length      numbers of tokens before and after each unit
    """

    def __init__(
        self, family: Any, model: nn.Module, processor: Any, head: list[int], tail: list[int]
    ) -> None:
        self._family, self._config, self._tokenizer = family, model.config, processor.tokenizer
        (first, _), (later, after) = self._plain((0, [0.0])), self._plain((1, [1.0]))
        if head[-1:] == later[-1:] and tail[:1] == after[:1]:
            # What a template has around the place stands around each frame; releases differ in whether it also stays.
            marks = [processor.decode(ids, skip_special_tokens=False) for ids in (head[-1:], tail[:1])]
            frames = torch.zeros(family.frames_per_unit(model), 3, 64, 64, dtype=torch.uint8)
            made = processor(processor.video_token.join(marks), videos=[frames], add_special_tokens=False)
            if int(made["input_ids"][0, 0]) != head[-1]:
                head, tail = head[:-1], tail[1:]
        at = len(head) - (len(later) - len(first))
        self.head, self.tail, self._lead = head[:at], tail, head[at:]
        self.length = len(later), len(after)

    def _plain(self, moment: Moment) -> Around:
        before, after = self._family.text_around_frame(self._config, *moment)
        return self._ids(before), self._ids(after)

    def _ids(self, pieces: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            whole = isinstance(piece, int)
            ids += [piece] if whole else self._tokenizer(piece, add_special_tokens=False)["input_ids"]  # type: ignore[list-item]
        return ids

    def text_ids(self, moment: Moment) -> Around:
        """Return the token ids before and after the unit `moment` (number of its first frame, seconds of its frames). If a
        separator stands before each later unit, unit 0 gets the last tokens of the head in its place. Raises `ModelError`
        if the numbers of tokens are not `length`."""
        before, after = self._plain(moment)
        before = before if moment[0] else self._lead + before
        if (len(before), len(after)) != self.length:
            raise ModelError(
                f"the tokenizer writes {self._tokenizer.decode(before)!r} in {len(before)} tokens and other times in "
                f"{self.length[0]}, and a memory of streams has units of one length; use the model's own tokenizer."
            )
        return before, after


def join_unit_embeds(words: Callable[[Tensor], Tensor], features: Tensor, around: Sequence[Around]) -> Tensor:
    """Embed by `words` the text ids `around` each of n units and join them to its `features` [n, P, E] along P."""
    whole, wide = [], features.shape[2]
    for side in zip(*around, strict=True):
        ids = torch.tensor(side, dtype=torch.long, device=features.device)
        rows = words(ids.flatten()).unflatten(0, ids.shape) if ids.numel() else features[:, :0]
        whole.append(torch.nn.functional.pad(rows, (0, wide - rows.shape[2])))
    return torch.cat([whole[0], features, whole[1]], 1)


def find_longest_evenly_spaced_run(layout: TokenLayout, mine: Tensor) -> tuple[range, int, tuple[int, int]]:
    """Find the longest run of frames with equally long text between them, in the video whose tokens `mine` [S] marks. Return
    its frames, the number of text tokens before each, and the columns where the run begins and ends."""
    text, frame = (layout.modality[0] == TEXT).tolist(), layout.frame[0].masked_fill(~mine, -1)
    numbers, sizes = frame[frame >= 0].unique_consecutive(return_counts=True)
    starts = [int((frame == number).nonzero()[0, 0]) for number in numbers]
    gaps, first, best = [b - a for a, b in pairwise(starts)], 0, range(min(1, len(starts)))
    for _, same in groupby(gaps):
        last = first + len(list(same))
        best, first = max(best, range(first, last + 1), key=len), last
    words = gaps[best[0]] - int(sizes[0]) if len(best) > 1 else 0
    begin = starts[best[0]] - words
    if begin < 1 or not all(text[begin : begin + words]):
        best = best[1:]  # what stands before the first is less
    return best, words, (starts[best[0]] - words, starts[best[-1]] + int(sizes[0]))


class TimestampedStreamAdapter(HFStreamAdapter):
    """Stream adapter (`HFStreamAdapter`) for families that write text beside each frame (`Family.has_frame_text`)."""

    @cached_property
    def _written(self) -> TextAroundUnits:
        return TextAroundUnits(self.family, self.model, self.processor, *super()._chat(""))

    @property
    def text_around_unit(self) -> tuple[int, int]:  # type: ignore[override]
        return self._written.length

    def _chat(self, question: str | list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        less = len(super()._chat("")[1]) - len(self._written.tail)
        return self._written.head, super()._chat(question)[1][less:]

    def _shown(self, inputs: Mapping[str, Any], times: Sequence[float]) -> Tensor:
        if not any(self.text_around_unit):
            return super()._shown(inputs, times)
        ids, frames_per_unit, shown = inputs["input_ids"], self.frames_a_step, list[int]()
        # Of a frame that repeats the last some processors leave tokens out, of the first none.
        holders = self.family.placeholders(self.model)
        visual = next([*run] for held, run in groupby(ids[0].tolist(), holders.__contains__) if held)
        for first in range(0, len(times), frames_per_unit):
            before, after = self._written.text_ids((first, times[first : first + frames_per_unit]))
            shown += [*before, *visual, *after]
        return torch.tensor([shown], device=ids.device)

    def _pixels(self, frames: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        made = super()._pixels(frames, size)
        if self.family.frame_size(self.model, made) == size:
            return made
        # The processor has a budget for a whole video, which a stream is not: each unit for itself.
        each = [
            super(TimestampedStreamAdapter, self)._pixels(unit, size)
            for unit in frames.split(self.frames_a_step)
        ]
        rows = [self.family.split_pixels_by_frame(self.model, one)[0] for one in each]
        return self.family.split_pixels_by_frame(self.model, each[0])[1](torch.cat(rows))  # type: ignore[no-any-return]

    def prompt(
        self, frames: Tensor, fps: float | None, times: Sequence[float], tail: Sequence[int]
    ) -> dict[str, Any]:
        made, frames_per_unit = super().prompt(frames, fps, times, tail), self.frames_a_step
        if any(self.text_around_unit) and len(frames) > frames_per_unit:
            one = super().prompt(frames[:frames_per_unit], fps, times, tail)
            size, whole = (self.family.frame_size(self.model, inputs) for inputs in (one, made))
            made |= {} if size == whole else {**one, **self._pixels(frames, size)}
        return {name: x for name, x in made.items() if name != "video_compression_mask"}

    def embed_units(self, features: Tensor, moments: Sequence[Moment]) -> Tensor:
        return join_unit_embeds(
            self.embed_tokens, features, [self._written.text_ids(moment) for moment in moments]
        )
