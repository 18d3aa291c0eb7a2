"""Streams an answer: turns token ids into pieces of text, until a stop text, a deadline, or a disconnect."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.decoding.generate import Deadline


class StopTextFilter:
    """Cuts the growing text of an answer into pieces to send, without stop texts and without incomplete characters."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self.said, self.stopped = stops, "", False

    def next_text_piece(self, text: str, whole: bool = False) -> str:
        """Return the next piece of text to send, given all text so far; `whole`: the text is complete."""
        if self.stopped:
            return ""
        cut = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if cut is not None:
            self.stopped, text = True, text[:cut]
        elif not whole:
            if text.endswith("\ufffd"):
                return ""
            # What may be the beginning of a stop text waits.
            ends = ((stop, range(1, min(len(stop), len(text) + 1))) for stop in self._stops)
            held = (n for stop, lengths in ends for n in lengths if text.endswith(stop[:n]))
            text = text[: len(text) - max(held, default=0)]
        piece = text[len(self.said) :]
        self.said += piece
        return piece


def count_tokens_through_stop(
    decode: Callable[[list[int]], str], ids: Sequence[int], stops: Sequence[str]
) -> int:
    """Return how many of `ids` it takes until their text contains one of `stops`; a step may have decoded more tokens."""

    def stopped(count: int) -> bool:
        text = decode([*ids[:count]])
        return any(stop in text for stop in stops)

    return bisect.bisect_left(range(len(ids)), True, key=stopped)


class TextStreamer:
    """A streamer for transformers' `generate` that turns tokens into text; its method `ended` is the stopping criterion.

    The constructor's argument `put` is called with each new piece of text, in the thread of `generate`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str],
        put: Callable[[str], None],
        deadline: Deadline,
    ) -> None:
        self.ids: list[int] = []
        self.cutter, self._stops = StopTextFilter(stops), stops
        self._decode, self._put, self._deadline, self._prompt = decode, put, deadline, True

    def put(self, value: Tensor) -> None:
        """Receive token ids from `generate`: first the prompt's, then new ones [1] or [1, n]."""
        if not self._prompt:
            self.ids += value.flatten().tolist()
            self._say(False)
        self._prompt = False

    def end(self) -> None:
        self._say(True)
        if self.cutter.stopped:
            del self.ids[count_tokens_through_stop(self._decode, self.ids, self._stops) :]

    def _say(self, whole: bool) -> None:
        if piece := self.cutter.next_text_piece(self._decode(self.ids), whole):
            self._put(piece)

    def ended(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Whether each sequence has ended, bool [B]: at a stop text or the deadline."""
        over = self.cutter.stopped or self._deadline.end_reason() is not None
        return torch.full((ids.shape[0],), over, dtype=torch.bool, device=ids.device)
