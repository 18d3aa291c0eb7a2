"""Evenly spaced lines: slashes, columns and rows of one stride, made dense by the order (class, position)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from mmaccel.core.errors import RecipeError, check_choice, check_least, shown
from mmaccel.core.plan import Part
from mmaccel.core.registry import register
from mmaccel.policies.sparse.a_shape import near_and_first, near_and_first_blocks
from mmaccel.policies.sparse.estimate import Score
from mmaccel.policies.sparse.intra import IntraPattern, Sight
from mmaccel.policies.sparse.orders import touched, whole_blocks
from mmaccel.policies.sparse.residue import Beyond, ClassOrder, Residue, dense_rows
from mmaccel.policies.sparse.stride import (
    Classes,
    Frames,
    Search,
    frame_phases,
    room,
    strided_classes,
)

Phase = Literal["keys", "queries"]
Estimate = Literal["head", "group"]


MOST_STRIDE = 1 << 16
"""The largest stride: every phase of each that is tried has a score of its own."""


@register("sparse", "grid")
@dataclass(frozen=True, kw_only=True)
class Grid(IntraPattern):
    """Every token has a class; a head attends along lines of one class. Exact, no block is rounded up.

    slash       a query of class c sees the keys of class (c - p) mod s not after it: lines parallel to the diagonal
    vertical    every query sees the keys of class v not after it
    horizontal  a query of class v sees every key not after it
    window      every query sees the last `window` keys not after it, itself counted. 0, as the paper's algorithm: none
    sink        every query sees the first `sink` keys. 0: none

    The stride s and the phases p and v are estimated, head by head, from the last `last_q` queries (MMInference,
    Algorithm 1). With no window and no sink, a query on no line sees nothing, and its output is zero. The authors' code
    (microsoft/MInference, `minference/modules/mminference.py`) adds to the lines a sink of all that precedes the video, a
    local window, and dense rows for the text after the video (here the recipe's `dense_tail`); its window is what Table 3
    prints as 1024. There the stride and the phases come from the table of heads, and a grid has no slash. What the paper
    leaves open is a field:

    score             "mean": a class of lines weighs the mean over its members, the largest one left out, of what they get
                      from each of those queries; "contrast": the mean of the logarithms, in standard errors, which is
                      greatest at the stride itself, where the mean of many classes under noise is greatest at one of its
                      multiples; "sum": the sum over the members, which favours small strides
    slack             of the strides within this share of the best the smallest wins, for multiples of a stride weigh alike
    horizontal_phase  "keys": v of the horizontal lines is that of the columns, for grids are symmetrical (section 2.2) and
                      few queries cannot show which rows are dense; "queries": the class whose queries spread their weight
                      most evenly, among the last ones
    estimate          "head": each query head by itself; "group": the heads that share a key head together

    stride="free"   class = place mod s, with s searched in min_stride..max_stride
    stride="frame"  class = number of the token in its frame, s = tokens of the largest frame (at most max_stride, beyond
                    which classes wrap), so that neither ragged frames nor timestamps shift a line; tokens outside frames
                    count on from the first token of the frame before them

    A sequence of fewer than 3 * min_stride tokens is one class, and so attended densely. One that has no frame, or a class
    that holds more than 1 / min_stride of its tokens, takes a searched stride under "frame" too. Within a modality boundary
    places and frames are those of the keys, and a query is of the class of the last key not after it.
    """

    adaptive: ClassVar[bool] = True

    stride: Literal["frame", "free"] = "frame"
    max_stride: int = 1024
    min_stride: int = 8
    horizontal: bool = True
    vertical: bool = True
    slash: bool = True
    window: int = 0
    sink: int = 0
    last_q: int = 64
    slack: float = 0.02
    score: Score = "contrast"
    horizontal_phase: Phase = "keys"
    estimate: Estimate = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("grid", "stride", self.stride, ("frame", "free"))
        if self.min_stride < 2 or self.max_stride < self.min_stride:
            raise RecipeError(
                f"grid: min_stride {self.min_stride} and max_stride {self.max_stride} are no range from 2 upwards."
            )
        if self.max_stride > MOST_STRIDE:
            raise RecipeError(f"grid: max_stride is {self.max_stride}; give at most {MOST_STRIDE}.")
        if not (self.horizontal or self.vertical or self.slash):
            raise RecipeError("grid: horizontal, vertical and slash are all off; turn one on.")
        for name in ("window", "sink"):
            if getattr(self, name) < 0:
                raise RecipeError(f"grid: {name} is {getattr(self, name)}; give 0 or more tokens.")
        check_least(self, 1, "last_q", of=" query")
        if not 0 <= self.slack < 1:
            raise RecipeError(f"grid: slack is {self.slack}; give a share from 0 to 1.")
        for name, kind in (("score", Score), ("horizontal_phase", Phase), ("estimate", Estimate)):
            known = get_args(kind)
            if getattr(self, name) not in known:
                told = ", ".join(map(repr, known[:-1]))
                raise RecipeError(
                    f"grid: {name} is {shown(getattr(self, name))}; give {told} or {shown(known[-1])}."
                )

    def parts(self, sight: Sight) -> tuple[Part, ...]:
        lines = self._lines(sight)
        if not (self.window or self.sink):
            return lines
        near = near_and_first(sight, self.sink, self.window)
        # Every row is served twice, over disjoint keys: the two are merged by their log-sum-exps.
        return (*lines, sight.part(near, merge_group=1))

    def _lines(self, sight: Sight) -> tuple[Part, ...]:
        """The lines, without the keys of the window and the sink."""
        classes, beyond = self._classes(sight), Beyond(self.window, self.sink)
        if self.slash and classes.frames is not None:
            order = ClassOrder.of(sight, classes.frames, beyond)
            return order.parts(sight, classes, beyond, vertical=self.vertical, horizontal=self.horizontal)
        residue = Residue.of(sight, classes, beyond, slash=self.slash)
        parts: list[Part] = []
        if self.slash or self.vertical:
            q_row = residue.q_row
            if self.horizontal:
                q_row = torch.where(residue.own == classes.dense, -1, q_row)
            spans = [residue.slash(q_row, self.vertical)] if self.slash else []
            spans += [residue.vertical(q_row)] if self.vertical else []
            parts.append(Part(q_row, tuple(spans)))
        if self.horizontal:
            parts.append(dense_rows(sight, classes, beyond))
        return tuple(parts)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        block, most = self.block, room(n_key, self.min_stride)
        keys = whole_blocks(n_key, block)
        each, more = near_and_first_blocks(n_key, self.sink, self.window, block, gaps=gaps)
        if self.slash:
            # A block of queries touches one class, and one more for each class that begins in it.
            each += touched(most, block)
            more += keys + 2 * min(self.max_stride, n_query)
        if self.vertical:
            each += touched(most, block)
        if self.horizontal:
            more += whole_blocks(n_query if ties else min(most, n_query), block) * keys
        return each, more

    def estimate_blocks(self, rows: int, keys: int, share: float, sight: Sight | None) -> float:
        block = self.block
        line = room(keys, self.min_stride)
        if self.stride == "frame" and sight is not None:
            frames = Frames.of(sight, self._search(sight))
            line = min(line, frames.room) if frames.whole else line
        # A block of queries that begins in one class and ends in the next lists all of the one, and lines begin anywhere.
        blocks, each = whole_blocks(rows, block), share * line / block + 2
        dense = whole_blocks(min(line, rows), block) * (share * keys / block + 1)
        near = min(self.window, keys) / block + bool(self.window) + min(self.sink, keys) / block
        near = min(near, share * keys / block + 1)
        return blocks * each * (self.slash + self.vertical) + self.horizontal * dense + blocks * near

    def _search(self, sight: Sight) -> Search:
        return Search(
            low=self.min_stride,
            most=self.max_stride,
            slack=self.slack,
            score=self.score,
            rows=self.horizontal_phase == "queries",
            keys=sight.width,
        )

    def _classes(self, sight: Sight) -> Classes:
        sample = sight.last(self.last_q, self.estimate == "group")
        search = self._search(sight)
        frames = Frames.of(sight, search) if self.stride == "frame" else None
        framed = frame_phases(sample, frames, search) if frames is not None and frames.some else None
        if framed is not None and framed.frames is not None:
            return framed
        free = strided_classes(
            sample,
            sight.keys,
            search,
            by_columns=self.horizontal or self.vertical,
            by_diagonals=self.slash,
        )
        return free if frames is None or framed is None else framed.where(frames.fits, free)
