"""The contract of a sparse prefill pattern."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import AttentionPlan, HeadRun
from mmaccel.core.registry import Policy, refuse_former_names

BLOCK = 256
"""The largest block: kernels hold a block's places at once."""

MOST = 2**31 - 1
"""The largest number of a field: kernels count places in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class SparsePattern(Policy, ABC, kind="sparse"):
    """Which key blocks each block of queries attends to in prefill.

    Subclasses are frozen keyword dataclasses: parameters are fields, ranges are checked at birth, nothing on a device is
    kept. `block` is the edge of a block in tokens, for queries and keys alike.

    adaptive  the plan looks at queries and keys, not only at the layout
    rounded   the plan lists whole blocks beyond the paper's element mask (element <= plan <= its block closure)
    dense     it plans nothing by itself: prefill stays dense
    reads_values  the plan looks at values too, as pooled keys need pooled values: `plan` is given `value`
    """

    adaptive: ClassVar[bool] = False
    rounded: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False

    block: int = 64

    def __init_subclass__(cls) -> None:
        """One that says anew what its plan is has not said how some heads of a layer are planned: its parent's way of that
        would pass it by."""
        super().__init_subclass__()
        former = {"toll": "max_blocks", "bound": "max_blocks_total"}
        former |= {"expected": "expected_blocks", "guess": "estimate_blocks"}
        refuse_former_names(cls, former)
        if "plan" in vars(cls) and "plan_of" not in vars(cls):
            cls.plan_of = SparsePattern.plan_of  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        if not 16 <= self.block <= BLOCK or self.block & (self.block - 1):
            raise RecipeError(f"{self.name}: block is {self.block}; give a power of two from 16 to {BLOCK}.")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value > MOST:
                raise RecipeError(f"{self.name}: {each.name} is {value}; give at most {MOST}.")

    @abstractmethod
    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        """The plan of one layer; None stands for dense attention.

        query [B, H, n_query, D] and key [B, G, n_key, D] after rotation, H a multiple of G; layouts of the same lengths,
        `q_layout.position` and `k_layout.position` in the same count. Queries may be the last rows of a longer sequence.
        """

    def plan_of(
        self, run: HeadRun, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        """As `plan`, of the heads `run` of query [B, H, n_query, D] and key [B, G, n_key, D], the tensors of the layer.

        A pattern that looks at few rows of the queries need not have those of some heads copied.
        """
        return self.plan(run.of(query), key[:, run.groups], q_layout, k_layout)

    def plan_layer(
        self, query: Tensor, key: Tensor, value: Tensor | None, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        """As `plan`, for whoever has the values [B, G, n_key, D] too: they go to a pattern that reads them."""
        more = {} if value is None or not self.reads_values else {"value": value}
        return self.plan(query, key, q_layout, k_layout, **more)

    def bind(self, model: ModelView) -> SparsePattern:
        """This pattern as it serves `model`, asked once when a recipe is attached; `RecipeError` where it cannot."""
        return self

    @property
    def context(self) -> int | None:
        """The length of the prompts, in tokens, that its budgets were chosen for; None: any."""
        return None

    def at(self, layer: int) -> SparsePattern:
        """The pattern of one layer: itself, unless it differs between layers."""
        return self

    @abstractmethod
    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        """The most key blocks the pattern can list for one head and `n_query` rows over `n_key` keys; host numbers alone."""

    def expected_blocks(
        self, n_query: int, n_key: int, layouts: tuple[TokenLayout, TokenLayout] | None = None
    ) -> float:
        """About how many key blocks the pattern lists for one head, before it has seen a query: what its estimates will
        find they are taken to find at best. `layouts`, of queries and keys, may tell more; they are looked at once.
        """
        return self.max_blocks_total(n_query, n_key)

    def per_head(self, heads: int) -> tuple[str, ...]:
        """The name of the pattern of each head of a layer, for the report; within a boundary as "boundary(pattern)"."""
        return (self.name,) * heads
