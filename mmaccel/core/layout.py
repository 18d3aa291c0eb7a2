"""What each token of a prompt is: modality, segment, frame and cell; made by the model adapter, used by everyone."""

from __future__ import annotations

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
    segment    number of the contiguous run of one text, image or video the token lies in
    frame      number of the frame, counted through the whole sequence; -1 outside frames (text, row-end marks)
    row, column  cell of the token in its frame's grid
    position   rank of the token among the valid tokens of its sequence; causality is measured in it
    valid      bool, False on padding
    asked      bool, True on the words of the question, where they are known to stand elsewhere than after the last image or
               video; all False: they stand there, or it is not known (`core.prune.question`)

    A token of an image that lies in no frame, a finer tile's, has a cell too: that of the picture that the tiles make.
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
        """A layout from the modality of each token [B, S]; what is not given is derived (segments, positions) or -1."""
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
        """`length` text tokens in each of `batch` sequences."""
        return cls.build(torch.zeros(batch, length, dtype=torch.long, device=device))

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
        """[B, S] number of the token within its frame, in reading order; -1 outside frames.

        Marks between the rows of a frame are not counted. Of a layout that starts within a frame, the first is a part.
        """
        framed = self.frame >= 0
        count = framed.long().cumsum(1) - 1
        latest = self.frame.cummax(1).values
        start = framed.clone()
        start[:, 1:] &= latest[:, 1:] > latest[:, :-1]
        first = torch.where(start, count, 0).cummax(1).values
        return torch.where(framed, count - first, -1)

    @cached_property
    def census(self) -> dict[int, int]:
        """The most valid tokens that any sequence has of each modality (one device read, kept)."""
        kinds = list(MODALITIES)
        counts = torch.stack([((self.modality == m) & self.valid).sum(1).amax() for m in kinds])
        return dict(zip(kinds, counts.tolist(), strict=True))

    @cached_property
    def runs(self) -> dict[int, tuple[int, int]]:
        """For each modality the most runs of it that any sequence has, padding left out, and the fewest tokens of one that
        is neither its first nor its last there (one copy to the host, kept)."""
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
        """What was derived of this layout and will be wanted again, by whoever derived it; lives as long as the layout."""
        return {}

    @cached_property
    def padded(self) -> bool:
        """Whether any token is padding (one device read, kept)."""
        return not bool(self.valid.all())

    def _map(self, f) -> TokenLayout:  # type: ignore[no-untyped-def]
        return TokenLayout(*(f(getattr(self, name)) for name in self.__dataclass_fields__))

    def take(self, rows: slice | Tensor) -> TokenLayout:
        """The layout of some columns: a slice, or a long tensor of indices [n]; positions stay those of the whole."""
        return self._map(lambda t: t[:, rows])

    def sequence(self, b: int) -> TokenLayout:
        """The layout of one sequence of the batch."""
        return self._map(lambda t: t[b : b + 1])

    def pick(self, rows: Tensor) -> TokenLayout:
        """The sequences at the batch rows `rows` [B']."""
        return self._map(lambda t: t[rows.to(t.device)])

    def repeat(self, times: int) -> TokenLayout:
        """Each sequence `times` over (beams, samples)."""
        return self if times == 1 else self._map(lambda t: t.repeat_interleave(times, 0))

    def append(self, new: TokenLayout) -> TokenLayout:
        """This layout followed by `new`, whose positions, segments and frames are shifted to go on from here."""
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
        """This layout followed by `count` generated text tokens."""
        return self.append(TokenLayout.text(self.batch, count, self.device)) if count else self

    def to(self, device: torch.device | str) -> TokenLayout:
        return self._map(lambda t: t.to(device))
