"""Where the tokens of a stream stand for the rotary embedding, in the positions of the installed model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Places:
    """Positions of the head, of any unit, and of the text after any number of units.

    All results are long, [n], or [3, n] for M-RoPE. A unit's place follows from its number alone: give true numbers for
    *original* places, and ranks among what is seen for *compact* ones. When a prefix of the stream is seen they are equal,
    and equal to what the model gives the same prompt.

    Made by the session from the model's own rope index: `head` [A, h], `unit` [A, P] (those of unit 0), with A = 1 or 3;
    `steps(n)` [n] long, what is added to the first coordinate of units 0 .. n - 1; `text` the position of the first token
    after one unit, `slope` how much a further unit adds to it. `limit` is the length the model was made for.
    """

    def __init__(
        self,
        head: Tensor,
        unit: Tensor,
        steps: Callable[[int], Tensor],
        text: int,
        slope: int,
        limit: int,
    ) -> None:
        self._head, self._unit, self._make = head, unit, steps
        self._text, self._slope = text, slope
        self._steps, self._known = self._made(64)
        # On the host, for a question is not to wait for the device.
        self._last, self._largest = int(unit[0].max()), int(unit.max())
        self.limit = limit

    @property
    def axes(self) -> int:
        """1, or 3 for M-RoPE."""
        return self._head.shape[0]

    def head(self) -> Tensor:
        """[h] or [3, h]."""
        return self._shaped(self._head)

    def units(self, first: int, count: int) -> Tensor:
        """[count * P] or [3, count * P]: units ``first .. first + count``."""
        return self._placed(self._upto(first + count)[first : first + count])

    def chosen(self, numbers: Tensor, most: int, token: int | None = None) -> Tensor:
        """[k * P] or [3, k * P]: the units of `numbers` [k] long, on any device; none is larger than `most`. With `token`
        that one of each unit: [k] or [3, k]."""
        return self._placed(self._upto(most + 1)[numbers.to(self._head.device)], token)

    def cells(self, columns: Tensor, most: int) -> Tensor:
        """[k] or [3, k]: single tokens, by column: u * P + c is token c of unit u; no unit is larger than `most`."""
        unit = columns.to(self._head.device) // self._unit.shape[1]
        out = self._unit[:, columns.to(self._head.device) % self._unit.shape[1]].clone()
        out[0] += self._upto(most + 1)[unit]
        return self._shaped(out)

    def tail(self, units: int, start: int, count: int) -> Tensor:
        """[count] or [3, count]: columns ``start .. start + count`` of what follows the video after `units` units."""
        begin = self._text + (units - 1) * self._slope + start
        one = torch.arange(begin, begin + count, device=self._head.device)
        return self._shaped(one.expand(self.axes, -1))

    def after(self, units: int, pending: int, start: int, count: int) -> Tensor:
        """[count] or [3, count]: columns ``start .. start + count`` of what follows `units` units: first the `pending`
        columns of units that are not among them, if any, from their beginning or not at all; then the text."""
        more = pending // self._unit.shape[1]
        if start >= pending:
            return self.tail(units + more, start - pending, count)
        return torch.cat([self.units(units, more), self.tail(units + more, 0, count - pending)], -1)

    def span(self, units: int) -> int:
        """The largest position that `units` units and their text's first token take."""
        count = max(units, 1)
        self._upto(count)
        return max(self._last + self._known[count - 1], self._largest, self._text + (units - 1) * self._slope)

    def ends(self, units: int, pending: int, rows: int) -> tuple[int, int]:
        """The position of the last of `rows` columns after `units` units, as `after` has them, and how many positions all
        take up to there: of three coordinates that of time may be further out than the text."""
        whole = units + pending // self._unit.shape[1]
        last = self._text + (whole - 1) * self._slope + rows - pending - 1
        return last, max(last, self.span(whole)) + 1

    def admits(self, units: int, pending: int, rows: int) -> bool:
        """Whether the model has the positions of `ends`, and one more for an answer."""
        last, taken = self.ends(units, pending, rows)
        return last + 1 < self.limit and taken <= self.limit

    def known(self, count: int) -> int:
        """How many units, `count` or more, can be looked up before the table is made anew."""
        return self._upto(count).numel()

    def mark(self, count: int) -> int:
        """Where the places of `count` units are looked up; it changes when the table is made anew."""
        return self._upto(count).data_ptr()

    def _upto(self, count: int) -> Tensor:
        if count > self._steps.numel():
            self._steps, self._known = self._made(2 * count)
        return self._steps

    def _made(self, count: int) -> tuple[Tensor, list[int]]:
        """The steps of `count` units where the head is, and on the host."""
        steps = self._make(count)
        return steps.to(self._head.device), steps.tolist()

    def _placed(self, steps: Tensor, token: int | None = None) -> Tensor:
        unit = self._unit if token is None else self._unit[:, token, None]
        if self.axes == 1:
            # A question asks for this at every layer: one launch.
            return (unit + steps[:, None]).flatten()
        out = unit[:, None, :].expand(-1, steps.numel(), -1).clone(memory_format=torch.contiguous_format)
        out[0] += steps[:, None]
        return out.flatten(1)

    @staticmethod
    def _shaped(positions: Tensor) -> Tensor:
        return positions[0] if positions.shape[0] == 1 else positions
