"""The forward pass of packed sequences: several one after the other in a batch row, each attending to itself alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.attention import ForwardPass


@dataclass(frozen=True, eq=False)
class PackedPass:
    """A prefill of packed sequences without cache, each attending to itself alone.

    runs  (batch row, columns, `ForwardPass`) of each sequence; together they cover the batch
    """

    runs: tuple[tuple[int, slice, ForwardPass], ...]
    ticket: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, run: ForwardPass, packed: Tensor) -> PackedPass:
        """Split `run`, a batch's forward pass, at changes of the sequence number `packed` [B, S] of its tokens."""
        runs = []
        for b, row in enumerate(packed):
            begin = 0
            for size in torch.unique_consecutive(row, return_counts=True)[1].tolist():
                columns = slice(begin, begin + size)
                layout = _alone(run.layout.pick(slice(b, b + 1)).take(columns))
                images = None if run.images is None else run.images.select_sequence(b, begin, begin + size)
                runs.append((b, columns, replace(run, layout=layout, listed={}, images=images)))
                begin += size
        return cls(tuple(runs))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention [B, H, S, D] of query [B, H, S, D] on key and value [B, G, S, D], within each packed sequence."""
        out = value.new_empty(*query.shape[:3], value.shape[-1])
        for b, columns, run in self.runs:
            some = (slice(b, b + 1), slice(None), columns)
            out[some] = run.attend(layer, query[some], key[some], value[some], scale)
        return out


def _alone(layout: TokenLayout) -> TokenLayout:
    """The layout of a part of a sequence as if nothing stood before it."""
    framed = layout.frame >= 0
    first = layout.frame.masked_fill(~framed, torch.iinfo(layout.frame.dtype).max).amin(1, keepdim=True)
    return replace(
        layout,
        position=layout.position - layout.position[:, :1],
        segment=layout.segment - layout.segment[:, :1],
        frame=torch.where(framed, layout.frame - first, layout.frame),
    )
