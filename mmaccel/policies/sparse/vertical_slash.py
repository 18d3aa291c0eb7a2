"""Columns and diagonals that the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.backends.ops.lines import line_keys, strongest
from mmaccel.core.errors import RecipeError, check_choice, check_least
from mmaccel.core.plan import FAR, KeySpan, Part, span_by_range
from mmaccel.core.registry import register
from mmaccel.policies.sparse.intra import IntraPattern, Sight
from mmaccel.policies.sparse.orders import whole_blocks
from mmaccel.policies.sparse.slashes import slash_lists


@register("sparse", "vertical_slash")
@dataclass(frozen=True, kw_only=True)
class VerticalSlash(IntraPattern):
    """Every query sees the `vertical` strongest columns and the blocks that the `slash` strongest diagonals touch.

    Strength is the softmax weight of the last `last_q` queries of a head, summed along the line; the main diagonal is
    always kept, so that a token sees itself. Columns are exact. Diagonals are rounded: in blocks of the tokens' order, a
    block that a kept diagonal touches is seen whole, as far as causality goes. A column that stands in such a block is
    computed once. After MInference and MMInference (Appendix C.3, Table 3).

    sink: so many first keys are among the columns whatever the last queries think of them, 0 in the paper; MInference's
    released code has 30. Rows before may look at the first tokens where the last ones do not.

    nearest: so many of the nearest diagonals are among those kept, 1 (the main one) in the paper; MInference's released code
    has 100.

    estimate="head" weighs each query head by itself, "group" the heads that share a key head together. Within a modality
    boundary diagonals count in keys of the modality.
    """

    adaptive: ClassVar[bool] = True
    rounded: ClassVar[bool] = True

    vertical: int = 1000
    slash: int = 1024
    sink: int = 0
    nearest: int = 1
    last_q: int = 64
    estimate: Literal["head", "group"] = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vertical < 0:
            raise RecipeError(f"vertical_slash: vertical is {self.vertical}; give 0 or more columns.")
        if self.slash < 1:
            raise RecipeError(f"vertical_slash: slash is {self.slash}; give at least 1, the main diagonal.")
        if self.sink < 0:
            raise RecipeError(f"vertical_slash: sink is {self.sink}; give 0 or more columns.")
        if self.nearest < 1:
            raise RecipeError(
                f"vertical_slash: nearest is {self.nearest}; give at least 1, the main diagonal."
            )
        check_least(self, 1, "last_q", of=" query")
        check_choice("vertical_slash", "estimate", self.estimate, ("head", "group"))

    def parts(self, sight: Sight) -> tuple[Part, ...]:
        sample = sight.last(self.last_q, self.estimate == "group")
        columns, diagonals = sample.lines()
        keys, order = sight.keys, sight.at[:, None]
        chosen, found = self._strongest(columns, diagonals, sample.at)
        left, kind, kept, *gathered = line_keys(keys.row, chosen, found, sight.width, self.block)
        shapes = sight.shapes(chosen.shape[1])
        # The ranks say nothing of the rows: those of columns are left out.
        lists = slash_lists(kind, kept, self.block, shapes)
        spans = [KeySpan(left, order, keys.rank[:, None], 0, FAR, lists, ranks=True, q_first=sight.q_first)]
        if self.vertical:
            # The columns, gathered; a column's place is that of its token.
            k_row, k_pos = gathered
            spans.append(span_by_range(sight.q_row, k_row, order, k_pos, 0, FAR, self.block, self.block))
        return (sight.part(spans),)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        blocks = whole_blocks(n_key, self.block)
        columns = whole_blocks(min(self.vertical, n_key), self.block)
        # A diagonal touches two blocks of a run of queries, and as many as there are queries where none follow.
        slash = min((self.block if gaps else 2) * self.slash, blocks)
        return slash + columns, 0

    def estimate_blocks(self, rows: int, keys: int, share: float, sight: Sight | None) -> float:
        # At best the diagonals lie side by side; apart, each touches two blocks.
        blocks, seen = whole_blocks(rows, self.block), share * keys / self.block + 1
        columns = min(self.vertical, keys) / self.block
        return blocks * min(min(self.slash, keys) / self.block + 1 + columns, seen)

    def _strongest(self, columns: Tensor, diagonals: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, K] kept columns and diagonals, the main one among them, ascending, n where a sequence has fewer."""
        if self.sink:
            first = torch.arange(columns.shape[-1], device=columns.device) < min(self.sink, self.vertical)
            columns = columns.masked_fill(first, torch.inf)
        if self.nearest > 1:
            near = torch.arange(diagonals.shape[-1], device=diagonals.device) < min(self.nearest, self.slash)
            diagonals = diagonals.masked_fill(near, torch.inf)
        found: tuple[Tensor, Tensor] = strongest(columns, diagonals, at[:, -1], self.vertical, self.slash)
        return found
