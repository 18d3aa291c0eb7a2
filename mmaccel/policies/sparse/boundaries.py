"""Patterns within the boundaries of modalities: what Q-, K- and 2D-boundary heads are composed of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from mmaccel.core import errors
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, MODALITIES, TEXT, VIDEO, TokenLayout
from mmaccel.core.plan import AttentionPlan, HeadRun, KeySpan, Part
from mmaccel.core.registry import policy, registry
from mmaccel.core.sparse import SparsePattern
from mmaccel.policies.sparse.intra import IntraPattern, Layer, seen_share, shown
from mmaccel.policies.sparse.orders import whole_blocks

Inner = SparsePattern | Mapping[str, Any] | str | None
"""What a field for a pattern within a boundary may be given; it holds an `IntraPattern`, or None for nothing."""


def inner(value: Any, where: str, block: int) -> IntraPattern | None:
    """The pattern of a field of that kind, in blocks of `block` tokens; `where` names the field in errors."""
    pattern = policy("sparse", value, where)
    if pattern is None:
        return None
    if not isinstance(pattern, IntraPattern):
        known = [n for n in registry("sparse") if issubclass(registry("sparse")[n], IntraPattern)]
        told = getattr(pattern, "name", pattern)
        raise RecipeError(
            f"{where} is {errors.shown(told)}; give one of {', '.join(known)}, by name, as a mapping with a name, or null."
        )
    return replace(pattern, block=block)


@dataclass(frozen=True, kw_only=True)
class Boundary(SparsePattern):
    """Groups of queries over groups of keys, each pair under a pattern of its own, all under one softmax.

    What a pattern within a boundary measures, it measures in ranks among the keys of its group (MMInference, section 2.4),
    and what it estimates, it estimates from the last queries of its group, whatever island they are in (section 3.2): the
    weights that those queries give to the keys of the group, of all that they see. Causality is that of the sequence. In
    chunked prefill the last queries of each chunk decide.
    """

    adaptive: ClassVar[bool] = True
    rounded: ClassVar[bool] = True

    @abstractmethod
    def within(self, query: int | None, key: int | None) -> IntraPattern | None:
        """The pattern of queries of one modality over keys of another; None stands for all of them."""

    @abstractmethod
    def groups(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """The groups of queries and those of keys."""

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return self._planned(Layer(query, key, q_layout, k_layout, self.block))

    def plan_of(
        self, run: HeadRun, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return self._planned(Layer.of(run, query, key, q_layout, k_layout, self.block))

    def _planned(self, layer: Layer) -> AttentionPlan:
        of_queries, of_keys = self.groups()
        used = [pattern for q in of_queries for k in of_keys if (pattern := self.within(q, k)) is not None]

        def made() -> AttentionPlan:
            return layer.plan([part for q in of_queries for part in self._parts(layer, q)])

        return made() if any(pattern.adaptive for pattern in used) else layer.once(self, made)

    def _parts(self, layer: Layer, q: int | None) -> list[Part]:
        """The parts of one group of queries."""
        if q is not None and not layer.q_layout.census[q]:
            return []
        # Parts in the order of the queries are one part: their spans share its softmax.
        parts: list[Part] = []
        spans: list[KeySpan] = []
        number, sight = 0, None
        for k in self.groups()[1]:
            pattern = self.within(q, k)
            if pattern is None or (k is not None and not layer.k_layout.census[k]):
                continue
            sight = layer.sight(q, k)
            found = pattern.found(sight)
            apart = [p for p in found if p.q_row is not sight.q_row]
            parts += [replace(p, merge_group=number + p.merge_group) for p in apart]
            number += max((p.merge_group + 1 for p in apart), default=0)
            spans += [s for p in found if p.q_row is sight.q_row for s in p.spans]
        return parts if sight is None or not spans else [*parts, sight.part(spans, number)]

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        of_queries, of_keys = self.groups()
        # Blocks of groups, each of which may end in a part of one.
        rows = whole_blocks(n_query, self.block) + len(of_queries) - 1
        keys = whole_blocks(n_key, self.block) + len(of_keys) - 1
        total = 0
        for k in of_keys:
            most = [(0, 0)]
            for q in of_queries:
                pattern = self.within(q, k)
                if pattern is not None:
                    gaps, ties = q is not None and q != k, k is not None and q != k
                    most.append(pattern.max_blocks(n_query, n_key, gaps=gaps, ties=ties))
            total += rows * max(each for each, _ in most) + sum(more for _, more in most)
        # No pattern lists a block of keys more than three times for a block of queries.
        return min(total, 3 * rows * keys)

    def expected_blocks(
        self, n_query: int, n_key: int, layouts: tuple[TokenLayout, TokenLayout] | None = None
    ) -> float:
        if layouts is None:
            return self.max_blocks_total(n_query, n_key)
        queries, keys = (layout.census for layout in layouts)
        layer, share = shown(*layouts, self.block), seen_share(n_query, n_key)
        total = 0.0
        of_queries, of_keys = self.groups()
        for q in of_queries:
            for k in of_keys:
                pattern = self.within(q, k)
                rows, among = n_query if q is None else queries[q], n_key if k is None else keys[k]
                if pattern is not None and rows and among:
                    total += pattern.estimate_blocks(rows, among, share, layer.sight(q, k))
        return total

    def per_head(self, heads: int) -> tuple[str, ...]:
        """The boundary and, in brackets, the pattern that most pairs follow within it: that of videos, or of text."""
        of_queries, of_keys = self.groups()
        for m in (VIDEO, TEXT, IMAGE):
            pattern = self.within(m if m in of_queries else None, m if m in of_keys else None)
            if pattern is not None:
                return (f"{self.name}({pattern.name})",) * heads
        return (self.name,) * heads


@dataclass(frozen=True, kw_only=True)
class OneSided(Boundary):
    """A boundary on one side: a pattern for each modality, None (null) for one that is left out."""

    text: Inner = "a_shape"
    image: Inner = "a_shape"
    video: Inner = "a_shape"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in MODALITIES.values():
            found = inner(getattr(self, name), f"{self.name}: {name}", self.block)
            object.__setattr__(self, name, found)
        if not any(getattr(self, name) for name in MODALITIES.values()):
            raise RecipeError(f"{self.name}: text, image and video are all null; give one of them a pattern.")

    def of(self, modality: int) -> IntraPattern | None:
        """The pattern of one modality."""
        found: IntraPattern | None = getattr(self, MODALITIES[modality])
        return found
