"""`TokenLayout`: the modality, frame and cell of each token of a prompt; `PositionIds`: the rotary positions of a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

TEXT, IMAGE, VIDEO = 0, 1, 2
MODALITIES = {TEXT: "text", IMAGE: "image", VIDEO: "video"}
NEAR = 1e-3  # share of a unit's interval: a unit this near to its time at the even rate counts as even


def _fact(read: Callable[[Any], Any]) -> Any:
    """A property of a layout that is read from the device once: see `TokenLayout.fact`."""
    return property(lambda layout: layout.host_value(read.__name__, partial(read, layout)), doc=read.__doc__)


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The tokens of a batch of sequences, in their original order: integer tensors [B, S] on one device; -1 is "none".
    modality   TEXT, IMAGE or VIDEO
    segment    number of the text, image or video the token is in; a video includes what is between its frames
    frame      number of the frame, counted through the whole sequence; -1 outside frames (text, row-end marks)
    row, column  cell of the token in its frame's grid
    position   rank of the token among the valid tokens of its sequence, by which causality is defined
    valid      bool, False on padding
    asked      bool, True on the words of the question, if some of them come before the last image or video. If all are
               False, the question is the text after it, or unknown (`core.prefill.prune.question_text_columns`)

    A token of an image's high-resolution tiles is in no frame; its cell is its place in the picture that all tiles form.
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
        """Create a layout from modality [B, S]. Defaults: segments are runs of one modality, no padding, the rest "none"."""
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
        """Return the number of video tokens and the number of units (steps of time) they belong to; waits for the device."""
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

    @_fact
    def max_tokens_by_modality(self) -> dict[int, int]:
        """For each modality, the largest number of valid tokens in any sequence (read from the device once)."""
        kinds = list(MODALITIES)
        counts = torch.stack([((self.modality == m) & self.valid).sum(1).amax() for m in kinds])
        return dict(zip(kinds, counts.tolist(), strict=True))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """A cache of values derived from this layout, keyed by what derived them; it lives as long as the layout."""
        return {}

    @_fact
    def has_padding(self) -> bool:
        """Whether any token is padding (read from the device once)."""
        return not bool(self.valid.all())

    def host_value(self, name: Any, read: Callable[[], Any]) -> Any:
        """Return the fact `name` as a host value: cached, or from ``read()``, which may wait for the device."""
        if name not in (facts := self.memo.setdefault("facts", {})):
            facts[name] = read()
        return facts[name]

    def share_host_values(self, equal: TokenLayout) -> None:
        """Use one cache of host values with `equal`, a copy of this layout that may be on another device."""
        self.memo["facts"] = equal.memo.setdefault("facts", {})

    def _map(self, f) -> TokenLayout:  # type: ignore[no-untyped-def]
        return TokenLayout(*(f(getattr(self, name)) for name in self.__dataclass_fields__))

    def select_tokens(self, tokens: slice | Tensor) -> TokenLayout:
        """Return the layout of some tokens of each sequence, a slice or indices [n]; their positions stay the same."""
        part = self._map(lambda t: t[:, tokens])
        if isinstance(tokens, slice):
            part.memo["facts"] = self.host_value((tokens.start, tokens.stop, tokens.step), dict)
        return part

    def select_sequences(self, sequences: slice | Tensor) -> TokenLayout:
        """Return the layout of some sequences of the batch, a slice or indices [B'] long."""
        return self._map(lambda t: t[sequences if isinstance(sequences, slice) else sequences.to(t.device)])

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
        """Return the layout on `device`; both share the values that are read to the host."""
        moved = self._map(lambda t: t.to(device))
        moved.share_host_values(self)
        return moved


class TimeScale(NamedTuple):
    """How rotary positions follow time: positions per second, and seconds per unit (frame) at the stream's even rate."""

    per_second: float
    unit_s: float


class PositionIds:
    """Rotary positions of a video stream: of the prompt before it, of any unit (step of time), and of the text after it.

    All results are long, [n], or [3, n] for M-RoPE. A unit's number in the stream gives *original* positions, its rank among
    the units that a question sees *compact* ones. For a prefix of the stream both are the model's own.

    A session makes it from the model's own rope index: `head` [A, h] and `unit` [A, P], positions of the prompt and of unit
    0, with A = 1 or 3; ``steps(n)`` [n] long, the offsets of units 0 .. n - 1 on the first axis; `text`, the position of the
    first text token after one unit, and `slope`, its shift by each further unit; `limit`, the model's number of positions;
    `after` [A, t], offsets of the first t text tokens from the first one, if images are among them (None: 0, 1, 2, ...).

    With `time_scale`, positions on the first axis can follow time: `record_unit_times` sets when units were shown, and the
    position that follows from a unit's time is its *own* one. A time is counted in slots, the unit intervals at the stream's
    even rate since unit 0: unit n is in slot n if none was late. Between two slots the position is rounded down.
    """

    def __init__(
        self,
        head: Tensor,
        unit: Tensor,
        steps: Callable[[int], Tensor],
        text: int,
        slope: int,
        limit: int,
        time_scale: TimeScale | None = None,
        after: Tensor | None = None,
    ) -> None:
        self._head, self._unit, self._make = head, unit, steps
        self._text, self._slope, self.follows = text, slope, after
        self._steps, self._known = torch.zeros(0, dtype=torch.long), list[int]()
        self._upto(32)
        # On the host, for a question is not to wait for the device.
        self._last, self._largest = int(unit[0].max()), int(unit.max())
        self.axes, self.limit = head.shape[0], limit
        """1, or 3 for M-RoPE; and the positions that the model has."""
        self.moved, self.tokens = 1, unit.shape[1]
        """The first so many axes of a unit follow its number; and P, its tokens."""
        self._time_scale, self._origin, self._slots = time_scale, 0.0, list[float]()
        self._odd: int | None = (
            None  # the first unit that is not in the slot of its number; and what is added for each
        )
        self._own = torch.zeros(0, dtype=torch.long, device=head.device)

    @classmethod
    def evenly_spaced(cls, head: Tensor, unit: Tensor, text: int, slope: int, limit: int, *more: Any) -> Self:
        """Create the `PositionIds` of units (frames) that follow each other as text does, `slope` apart on every axis."""
        made = cls(head, unit, lambda n: torch.arange(n) * slope, text, slope, limit, None, *more)
        made.moved = made.axes
        return made

    def renumbered_positions(self, tokens: int) -> PositionIds:
        """Return `PositionIds` that give all tokens positions 0, 1, 2, ... on every axis; a unit has `tokens` tokens."""
        first = self._head.shape[1]
        line = torch.arange(first + tokens, device=self._head.device).expand(self.axes, -1)
        return self.evenly_spaced(line[:, :first], line[:, first:], first + tokens, tokens, self.limit)

    # Units at times of their own.

    def record_unit_times(self, first: int, times: Sequence[float]) -> None:
        """Record the times, in seconds, of units (frames) from `first` on; forget the times of later ones."""
        time_scale = self._time_scale
        if time_scale is None or first > len(self._slots):
            return
        self._slots = slots = self._slots[:first]  # a copy of these has what it had
        if not first and times:
            self._origin = times[0]
        for moment in times:
            slot = (moment - self._origin) / time_scale.unit_s
            even = float(round(slot))
            slots.append(even if abs(slot - even) < NEAR else slot)
        begin = 0 if self._odd is None else first
        if self._odd is None or self._odd >= first:
            self._odd = next((unit for unit in range(first, len(slots)) if slots[unit] != unit), None)
        if self._odd is None or not slots[begin:]:
            return
        if len(slots) > self._own.numel():
            self._own = torch.nn.functional.pad(self._own, (0, 2 * len(slots) - self._own.numel()))
        steps = torch.tensor([self._step(slot) for slot in slots[begin:]])
        self._own[begin : len(slots)] = steps.to(self._own.device)

    def unit_step(self, unit: int) -> float:
        """Return when a unit (frame) was shown, as a number of unit intervals of the stream's even rate since unit 0. Units
        without a recorded time count as following the last recorded one at that rate."""
        if self._odd is None:
            return unit
        last = len(self._slots) - 1
        return self._slots[unit] if unit <= last else self._slots[last] + unit - last

    def count_intervals(self, count: int) -> int:
        """Return how many intervals of the even frame rate `count` units span; `count` if the stream has no gaps."""
        return math.floor(self.unit_step(count - 1)) + 1 if count else 0

    @property
    def has_even_rate(self) -> bool:
        """Whether units (frames) came at the stream's even rate, without gaps: positions by time and by number are equal."""
        return self._odd is None

    def positions_by_time(self, first: int, count: int, base: int = 0) -> Tensor:
        """Return positions [count * P] or [3, count * P] of units (frames) from number `first` on, by the times at which
        they were shown; times count from `base` unit intervals of the stream's even rate after unit 0."""
        if self._odd is None:
            return self.position_range(first - base, count)
        if not base:
            return self._placed(self._own[first : first + count])
        steps = [self._step(self.unit_step(unit) - base) for unit in range(first, first + count)]
        return self._placed(torch.tensor(steps, dtype=torch.long, device=self._own.device))

    def _step(self, slot: float) -> int:
        """What is added to the first coordinate in a slot, 0 before the first."""
        whole = int(max(slot, 0))
        if slot <= whole and whole < self.limit:
            self._upto(whole + 1)
            step = self._known[whole]
        else:
            assert self._time_scale is not None
            step = math.floor(slot * self._time_scale.unit_s * self._time_scale.per_second + NEAR * NEAR)
        return min(step, self.limit - 1 - self._last)

    # Units by number: all of them at an even rate, or ranks among those that are seen.

    def positions_before_video(self) -> Tensor:
        """Return the positions [h] or [3, h] of the prompt before the video."""
        return self._shaped(self._head)

    def position_range(self, first: int, count: int) -> Tensor:
        """Return positions [count * P] or [3, count * P] of the `count` units (frames) from number `first` on."""
        return self._placed(self._upto(first + count)[first : first + count])

    def of_units(self, numbers: Tensor, most: int, token: int | None = None, own: bool = False) -> Tensor:
        """Return positions [k * P] or [3, k * P] of the units (frames) `numbers` [k] long, none above `most`. With `token`,
        of only that token of each unit: [k] or [3, k]. `own`: by the times of the units, not their numbers."""
        return self._placed(self._table(most + 1, own)[numbers.to(self._head.device)], token)

    def token_positions(self, columns: Tensor, most: int, own: bool = False) -> Tensor:
        """Return positions [k] or [3, k] of single video tokens, by column: u * P + c is token c of unit (frame) u, no u
        above `most`. `own`: by the times of the units, not their numbers."""
        columns, tokens = columns.to(self._head.device), self._unit.shape[1]
        out = self._unit[:, columns % tokens].clone()
        out[: self.moved] += self._table(most + 1, own)[columns // tokens]
        return self._shaped(out)

    def text_positions(self, units: int, start: int, count: int) -> Tensor:
        """Return positions [count] or [3, count] of the text after `units` units (frames), from its token `start` on."""
        begin = self._text + (units - 1) * self._slope
        first = start if self.follows is not None else begin + start
        row = torch.arange(first, first + count, device=self._head.device)
        if self.follows is None:
            return self._shaped(row.expand(self.axes, -1))
        last = row.clamp(max=self.follows.shape[1] - 1)
        return self._shaped(self.follows[:, last] + (row - last) + begin)

    def positions_after(self, units: int, pending: int, start: int, count: int, own: bool = False) -> Tensor:
        """Return positions [count] or [3, count] of `count` tokens from index `start` on after `units` units (frames): the
        first `pending` are of further units, the rest are text. `own`: by the times of the units, not their numbers."""
        more = pending // self._unit.shape[1]
        if start >= pending:
            return self.text_positions(units + more, start - pending, count)
        first = self.positions_by_time(units, more) if own else self.position_range(units, more)
        return torch.cat([first, self.text_positions(units + more, 0, count - pending)], -1)

    def largest_position(self, units: int, own: bool = False) -> int:
        """Return the largest position of `units` units (frames) and a text token after them. `own`: by the units' times."""
        last = max(units, 1) - 1
        self._upto(last + 1)
        step = self._step(self.unit_step(last)) if own and self._odd is not None else self._known[last]
        return max(self._last + step, self._largest, self._text + (units - 1) * self._slope)

    def last_position(self, units: int, pending: int, rows: int, own: bool = False) -> tuple[int, int]:
        """Return the position of the last of `rows` tokens that follow `units` units (frames), and how many positions are
        then used. The first `pending` tokens are of further units, the rest text. `own`: units have positions by time."""
        whole = units + pending // self._unit.shape[1]
        first, count = self._text + (whole - 1) * self._slope, rows - pending
        if self.follows is None:
            last = most = first + count - 1
        else:
            last = int(self.text_positions(whole, count - 1, 1).max())
            most = max(last, first + int(self.follows.max()))
        return last, max(most, self.largest_position(whole, own)) + 1

    def fits_limit(self, units: int, pending: int, rows: int, own: bool = False) -> bool:
        """Return whether the model has enough positions for the `rows` tokens of `last_position` and one more."""
        last, taken = self.last_position(units, pending, rows, own)
        return last + 1 < self.limit and taken <= self.limit

    def position_table_capacity(self, count: int, own: bool = False) -> int:
        """Return how many units (frames) the position table holds; it is first rebuilt if these are fewer than `count`."""
        return self._table(count, own).numel()

    def position_table_address(self, count: int) -> tuple[int, int]:
        """Return the memory addresses of the position tables of at least `count` units; they change when one is rebuilt."""
        return self._upto(count).data_ptr(), 0 if self._odd is None else self._own.data_ptr()

    def _table(self, count: int, own: bool) -> Tensor:
        return self._own if own and self._odd is not None else self._upto(count)

    def _upto(self, count: int) -> Tensor:
        """The steps of at least `count` units, where the head is; `_known` has them on the host."""
        if count > self._steps.numel():
            steps = self._make(2 * count)
            self._steps, self._known = steps.to(self._head.device), steps.tolist()
        return self._steps

    def _placed(self, steps: Tensor, token: int | None = None) -> Tensor:
        unit = self._unit if token is None else self._unit[:, token, None]
        if self.axes == 1:
            # A question asks for this at every layer: one launch.
            return (unit + steps[:, None]).flatten()
        out = unit[:, None, :].expand(-1, steps.numel(), -1).clone(memory_format=torch.contiguous_format)
        out[: self.moved] += steps[:, None]
        return out.flatten(1)

    @staticmethod
    def _shaped(positions: Tensor) -> Tensor:
        return positions[0] if positions.shape[0] == 1 else positions
