"""`TokenLayout`: the modality, frame and cell of each token of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

TEXT, IMAGE, VIDEO = 0, 1, 2
MODALITIES = {TEXT: "text", IMAGE: "image", VIDEO: "video"}


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The tokens of a batch of sequences, in their original order.

    All tensors are integer, shape [B, S], on one device; -1 stands for "none".

    modality   TEXT, IMAGE or VIDEO
    segment    number of the text, image or video the token is in; a video includes what is between its frames
    frame      number of the frame, counted through the whole sequence; -1 outside frames (text, row-end marks)
    row, column  cell of the token in its frame's grid
    position   rank of the token among the valid tokens of its sequence, by which causality is defined
    valid      bool, False on padding
    asked      bool, True on the words of the question, if they are known to be elsewhere than after the last image or
               video; all False: they are there, or it is not known (`core.prefill.prune.question_text_columns`)

    A token of an image that is in no frame, a finer tile's, has a cell too: that of the picture that the tiles form.
    """

    modality: Tensor
    segment: Tensor
    frame: Tensor
    row: Tensor
    column: Tensor
    position: Tensor
    valid: Tensor
    asked: Tensor

    @classmethod
    def build(
        cls,
        modality: Tensor,
        *,
        segment: Tensor | None = None,
        frame: Tensor | None = None,
        row: Tensor | None = None,
        column: Tensor | None = None,
        valid: Tensor | None = None,
        asked: Tensor | None = None,
    ) -> TokenLayout:
        """Create a layout from each token's modality [B, S]. If not given, segment and position are derived, others -1."""
        none = torch.full_like(modality, -1)
        valid = torch.ones_like(modality, dtype=torch.bool) if valid is None else valid.bool()
        if segment is None:
            change = torch.zeros_like(modality)
            change[:, 1:] = (modality[:, 1:] != modality[:, :-1]).to(modality.dtype)
            segment = change.cumsum(1)
        frame, row, column = (none if t is None else t for t in (frame, row, column))
        asked = torch.zeros_like(valid) if asked is None else asked
        position = (valid.long().cumsum(1) - 1).clamp(min=0)
        return cls(modality, segment, frame, row, column, position, valid, asked)

    @classmethod
    def text(cls, batch: int, length: int, device: torch.device | str = "cpu") -> TokenLayout:
        """Return the layout of a text-only batch: `batch` sequences of `length` text tokens."""
        return cls.build(torch.zeros(batch, length, dtype=torch.long, device=device))

    def video(self) -> tuple[int, int]:
        """Return the number of video tokens and the number of units (steps of time) they show; waits for the device."""
        shown = (self.modality == VIDEO) & self.valid
        begins = self.frame.diff(prepend=torch.full_like(self.frame[:, :1], -1), dim=1) != 0
        return int(shown.sum()), int((shown & begins & (self.frame >= 0)).sum())

    @property
    def batch(self) -> int:
        return self.modality.shape[0]

    @property
    def length(self) -> int:
        return self.modality.shape[1]

    @property
    def device(self) -> torch.device:
        return self.modality.device

    @cached_property
    def cell(self) -> Tensor:
        """[B, S] index of each token within its frame, in reading order; -1 outside frames.

        Marks between the rows of a frame are not counted. If the layout starts within a frame, its cells count from there.
        """
        framed = self.frame >= 0
        count = framed.long().cumsum(1) - 1
        latest = self.frame.cummax(1).values
        start = framed.clone()
        start[:, 1:] &= latest[:, 1:] > latest[:, :-1]
        first = torch.where(start, count, 0).cummax(1).values
        return torch.where(framed, count - first, -1)

    @property
    def max_tokens_of(self) -> dict[int, int]:
        """For each modality, the largest number of valid tokens in any sequence (read from the device once)."""
        return self.fact("max_tokens_of", self._max_tokens_of)  # type: ignore[no-any-return]

    def _max_tokens_of(self) -> dict[int, int]:
        kinds = list(MODALITIES)
        counts = torch.stack([((self.modality == m) & self.valid).sum(1).amax() for m in kinds])
        return dict(zip(kinds, counts.tolist(), strict=True))

    @property
    def runs(self) -> dict[int, tuple[int, int]]:
        """For each modality, the most runs of it in any sequence, padding left out, and the fewest tokens of a run that is
        neither the first nor the last of its sequence (copied to the host once)."""
        return self.fact("runs", self._runs)  # type: ignore[no-any-return]

    def _runs(self) -> dict[int, tuple[int, int]]:
        runs = dict.fromkeys(MODALITIES, (0, self.length))
        for row in torch.where(self.valid, self.modality, -1).to(torch.int8).cpu():
            kinds, sizes = torch.unique_consecutive(row[row >= 0], return_counts=True)
            for m, (most, least) in runs.items():
                own = sizes[kinds == m]
                inner = int(own[1:-1].min()) if len(own) > 2 else least
                runs[m] = max(most, len(own)), min(least, inner)
        return runs

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """A cache of values derived from this layout, keyed by what derived them; it lives as long as the layout."""
        return {}

    @property
    def has_padding(self) -> bool:
        """Whether any token is padding (read from the device once)."""
        return self.fact("has_padding", lambda: not bool(self.valid.all()))  # type: ignore[no-any-return]

    @cached_property
    def _facts(self) -> dict[Any, Any]:
        return {}

    def fact(self, name: Any, read: Callable[[], Any]) -> Any:
        """Return the fact `name`, of the host: ``read()`` reads the device, if no copy of this layout has it."""
        if name not in self._facts:
            self._facts[name] = read()
        return self._facts[name]

    def share_facts(self, equal: TokenLayout) -> None:
        """Know from now on what is known of an `equal` layout, on any device; both are as long and say the same."""
        self.__dict__["_facts"] = equal._facts

    def _map(self, f) -> TokenLayout:  # type: ignore[no-untyped-def]
        return TokenLayout(*(f(getattr(self, name)) for name in self.__dataclass_fields__))

    def take(self, rows: slice | Tensor) -> TokenLayout:
        """Return the layout of some columns, a slice or indices [n] long; positions stay those in the whole sequence."""
        part = self._map(lambda t: t[:, rows])
        if isinstance(rows, slice):
            part.__dict__["_facts"] = self.fact((rows.start, rows.stop, rows.step), dict)
        return part

    def sequence(self, b: int) -> TokenLayout:
        """Return the layout of only sequence `b` of the batch."""
        return self._map(lambda t: t[b : b + 1])

    def pick(self, rows: Tensor) -> TokenLayout:
        """Return the layout of the sequences with batch indices `rows` [B']."""
        return self._map(lambda t: t[rows.to(t.device)])

    def repeat(self, times: int) -> TokenLayout:
        """Return the layout with each sequence repeated `times` times (beams, samples)."""
        return self if times == 1 else self._map(lambda t: t.repeat_interleave(times, 0))

    def append(self, new: TokenLayout) -> TokenLayout:
        """Return this layout followed by `new`, whose positions, segments and frames continue from this one's."""
        base = {
            "position": self.position.amax(1, keepdim=True) + self.valid.any(1, keepdim=True).long(),
            "segment": self.segment[:, -1:] + (self.modality[:, -1:] != new.modality[:, :1]).long(),
            "frame": self.frame.amax(1, keepdim=True) + 1,
        }
        columns = []
        for name in self.__dataclass_fields__:
            tail = getattr(new, name)
            tail = torch.where(tail >= 0, tail + base[name], tail) if name in base else tail
            columns.append(torch.cat([getattr(self, name), tail], 1))
        return TokenLayout(*columns)

    def extend(self, count: int) -> TokenLayout:
        """Return this layout followed by `count` generated text tokens."""
        return self.append(TokenLayout.text(self.batch, count, self.device)) if count else self

    def to(self, device: torch.device | str) -> TokenLayout:
        """Return the layout on `device`; what the host knows of one, it knows of both."""
        moved = self._map(lambda t: t.to(device))
        moved.share_facts(self)
        return moved
