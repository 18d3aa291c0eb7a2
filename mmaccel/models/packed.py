"""Forward passes over several sequences concatenated in one batch row, each attending to itself alone: packed prompts
without cache, and units of several streams, each with a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.attention import ForwardPass


@contextmanager
def collect_error(errors: dict[int, Exception], number: int) -> Iterator[None]:
    """Context in which an error is stored as `errors[number]`: what fails in one memory leaves the others."""
    try:
        yield
    except Exception as error:
        errors[number] = error


@dataclass(frozen=True, eq=False)
class PackedForwardPass:
    """A prefill of packed sequences without cache, each attending to itself alone.

    runs  (batch row, columns, `ForwardPass`) of each sequence; together they cover the batch
    """

    runs: tuple[tuple[int, slice, ForwardPass], ...]
    ticket: Tensor | None = field(default=None, init=False)

    @classmethod
    def split_by_sequence(cls, run: ForwardPass, packed: Tensor) -> PackedForwardPass:
        """Split the forward pass `run` of a batch by sequences; `packed` [B, S] is each token's sequence number."""
        runs = []
        for b, row in enumerate(packed):
            begin = 0
            for size in torch.unique_consecutive(row, return_counts=True)[1].tolist():
                columns = slice(begin, begin + size)
                layout = _alone(run.layout.select_sequences(slice(b, b + 1)).select_tokens(columns))
                images = None if run.images is None else run.images.select_sequence(b, begin, begin + size)
                runs.append((b, columns, replace(run, layout=layout, listed={}, images=images)))
                begin += size
        return cls(tuple(runs))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute attention [B, H, S, D] of query [B, H, S, D] to key and value [B, G, S, D] within each sequence."""
        out = value.new_empty(*query.shape[:3], value.shape[-1])
        for b, columns, run in self.runs:
            some = (slice(b, b + 1), slice(None), columns)
            out[some] = run.attend(layer, query[some], key[some], value[some], scale)
        return out


class BatchedStreamPass:
    """Forward passes of several streams as one; used in place of a single `ForwardPass` and of its KV memory.

    passes  for each stream its `ForwardPass`, its number of rows, and whether its memory reads hidden states; in row order
    check   called before each stream's attention at each layer; what it raises is kept as that stream's error
    errors  exceptions of streams that failed, by index; the others go on
    """

    stream, ticket = True, None

    def __init__(self, passes: Sequence[tuple[ForwardPass, int, bool]], check: Callable[[], None]) -> None:
        ends = accumulate(rows for _, rows, _ in passes)
        self._runs = [(slice(end - n, end), run) for end, (run, n, _) in zip(ends, passes, strict=True)]
        self._check, self.errors = check, dict[int, Exception]()

    def _each(self, act: Callable[[slice, ForwardPass], object]) -> None:
        for number, (rows, run) in enumerate(self._runs):
            if number not in self.errors:
                with collect_error(self.errors, number):
                    act(rows, run)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Append each stream's rows of key and value [1, G, n, D] to that stream's KV memory."""
        self._each(lambda rows, run: run.state.append(layer, key[:, :, rows], value[:, :, rows]))  # type: ignore[union-attr]

    def receive_hidden(self, layer: int, hidden: Tensor) -> None:
        """Give each stream's KV memory its rows of the layer's input [1, n, E]."""
        self._each(lambda rows, run: run.state.receive_hidden(layer, hidden[:, rows]))  # type: ignore[union-attr]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute attention [1, H, n, D] of each stream's rows to what its own KV memory shows; zeros for failed streams."""
        out = torch.empty_like(query, dtype=value.dtype)

        def attend(rows: slice, run: ForwardPass) -> None:
            self._check()
            out[:, :, rows] = run.attend(layer, query[:, :, rows], key[:, :, rows], value[:, :, rows], scale)

        self._each(attend)
        for number in self.errors:
            out[:, :, self._runs[number][0]] = 0
        return out

    def length(self) -> int:
        """Return 0, as the cache length that transformers asks for; each stream's own memory gives the positions of its
        rows."""
        return 0

    held_columns = length


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
