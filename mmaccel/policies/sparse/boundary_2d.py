"""The `boundary_2d` pattern: one pattern per pair of query and key modality; and the base class of all boundaries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mmaccel.backends.ops.block_attend import KeySpan, Part
from mmaccel.core.errors import RecipeError, UnknownName, quoted
from mmaccel.core.layout import IMAGE, MODALITIES, TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import policy, register, registry
from mmaccel.policies.sparse.orders import (
    IntraPattern,
    LayerInputs,
    RegionPlannedPattern,
    ceil_block_count,
    mean_causal_share,
)

Inner = SparsePattern | Mapping[str, Any] | str | None
"""What a field for a pattern within a boundary may be given; it holds an `IntraPattern`, or None for nothing."""

Groups = Mapping[int | None, Mapping[int | None, IntraPattern | None]]
"""For each group of queries and each group of keys, a modality or None for all, the pattern between them, or None."""

PAIRS = tuple(f"{q}>{k}" for q in MODALITIES.values() for k in MODALITIES.values())


def _inner_pattern(value: Any, where: str, block: int) -> IntraPattern | None:
    """Build the sparse pattern given as a boundary's field, with blocks of `block` tokens; `where` names the field in
    errors. None stays None."""
    pattern = policy("sparse", value, where)
    if pattern is None:
        return None
    if not isinstance(pattern, IntraPattern):
        known = [n for n in registry("sparse") if issubclass(registry("sparse")[n], IntraPattern)]
        name = getattr(pattern, "name", pattern)
        raise RecipeError(
            f"{where} is {quoted(name)}; give one of {', '.join(known)}, by name, as a mapping with a name, or null."
        )
    return replace(pattern, block=block)


@dataclass(frozen=True, kw_only=True)
class ModalityBoundary(RegionPlannedPattern):
    """Base of patterns that group queries and keys by modality: each pair of a query group and a key group has a sparse
    pattern of its own, all under one softmax.

    A pattern within a boundary measures distances in ranks among the keys of its group (MMInference, section 2.4), and
    estimates from the last queries of its group, wherever they are (section 3.2): from the weights that these give to the
    keys of the group, out of all that they see. Causality is that of the sequence. In chunked prefill the last queries of
    each chunk are used.
    """

    adaptive: ClassVar[bool] = True
    rounded: ClassVar[bool] = True

    @property
    @abstractmethod
    def modality_groups(self) -> Groups:
        """Query group -> key group -> the pattern of this pair, or None; a group is a modality, or None for all tokens."""

    @property
    def reads_layer(self) -> bool:
        return any(
            pattern and pattern.adaptive for row in self.modality_groups.values() for pattern in row.values()
        )

    def layer_plan_parts(self, layer: LayerInputs) -> list[Part]:
        max_tokens_of = layer.q_layout.max_tokens_by_modality
        return [
            p for q in self.modality_groups if q is None or max_tokens_of[q] for p in self._parts(layer, q)
        ]

    def _parts(self, layer: LayerInputs, q: int | None) -> list[Part]:
        """The parts of one group of queries."""
        # Parts in the order of the queries are one part: their spans share its softmax.
        parts: list[Part] = []
        spans: list[KeySpan] = []
        number, region = 0, None
        for k, pattern in self.modality_groups[q].items():
            if pattern is None or (k is not None and not layer.k_layout.max_tokens_by_modality[k]):
                continue
            region = layer.region(q, k)
            made = pattern.cached_plan_parts(region)
            apart = [p for p in made if p.q_row is not region.q_row]
            parts += [replace(p, merge_group=number + p.merge_group) for p in apart]
            number += max([0, *(p.merge_group + 1 for p in apart)])
            spans += [s for p in made if p.q_row is region.q_row for s in p.spans]
        return parts if region is None or not spans else [*parts, region.plan_part(spans, number)]

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        of_keys = list(next(iter(self.modality_groups.values())))
        # Blocks of groups, each of which may end in a part of one.
        rows = ceil_block_count(n_query, self.block) + len(self.modality_groups) - 1
        keys = ceil_block_count(n_key, self.block) + len(of_keys) - 1
        total = 0
        for k in of_keys:
            most = [(0, 0)]
            for q, patterns in self.modality_groups.items():
                if (pattern := patterns[k]) is not None:
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
        (queries, keys), share, total = layouts, mean_causal_share(n_query, n_key), 0.0
        layer = LayerInputs.from_layouts(queries, keys, self.block)
        for q, patterns in self.modality_groups.items():
            rows = n_query if q is None else queries.max_tokens_by_modality[q]
            for k, pattern in patterns.items():
                among = n_key if k is None else keys.max_tokens_by_modality[k]
                if pattern is not None and rows and among:
                    total += pattern.estimate_blocks(rows, among, share, layer.region(q, k))
        return total

    def head_pattern_names(self, heads: int) -> tuple[str, ...]:
        """Return one name `heads` times, as "boundary_2d(grid)": with the pattern of video, else of text, else of image."""
        for m in (VIDEO, TEXT, IMAGE):
            patterns = self.modality_groups[m if m in self.modality_groups else None]
            pattern = patterns[m if m in patterns else None]
            if pattern is not None:
                return (f"{self.name}({pattern.name})",) * heads
        return (self.name,) * heads


@dataclass(frozen=True, kw_only=True)
class OneSidedModalityBoundary(ModalityBoundary):
    """Base of boundaries that split only queries or only keys by modality: a pattern per modality; None leaves it out."""

    text: Inner = "a_shape"
    image: Inner = "a_shape"
    video: Inner = "a_shape"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in MODALITIES.values():
            object.__setattr__(
                self, name, _inner_pattern(getattr(self, name), f"{self.name}: {name}", self.block)
            )
        if not any(getattr(self, name) for name in MODALITIES.values()):
            raise RecipeError(f"{self.name}: text, image and video are all null; give one of them a pattern.")

    @property
    def modality_patterns(self) -> Mapping[int | None, IntraPattern | None]:
        """The sparse pattern of each modality (text, image, video); None: its queries (or keys) take no part."""
        return {m: getattr(self, name) for m, name in MODALITIES.items()}


@register("sparse", "boundary_2d")
@dataclass(frozen=True, kw_only=True)
class Boundary2D(ModalityBoundary):
    """The queries of each modality attend to the keys of each modality by a pattern for that pair of modalities.

    Rows and columns are permuted (MMInference, Algorithm 3): windows, columns and lines count only keys of the pair's key
    modality, so that they continue across segments of other modalities (section 2.4). The distance of a query and a key of
    one modality is the number of tokens of it between them; a query of another modality counts as at the last key before it.

    `default` holds the pattern of every pair ("a_shape", "dense", "grid", "vertical_slash", ...), by name, as a mapping such
    as ``{"name": "a_shape", "window": 1024}``, or as an object; `pairs` that of some, as ``{"video>text": "grid"}``, the
    queries' modality first. null leaves a pair out. They all have the boundary's block size.
    """

    words: ClassVar[Mapping[str, str]] = {
        "no_boundary": "is what a search calls a pattern by itself, without a boundary; give that pattern, such as 'grid', "
        "'a_shape' or 'vertical_slash'"
    }

    default: Inner = "a_shape"
    pairs: Mapping[str, Inner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "default", _inner_pattern(self.default, f"{self.name}: default", self.block))
        if not isinstance(self.pairs, Mapping):
            raise RecipeError(
                f"{self.name}: pairs is {quoted(self.pairs)}; give a mapping such as {{video>text: grid}}."
            )
        pairs = {}
        for pair, value in self.pairs.items():
            if pair not in PAIRS:
                raise UnknownName(f"pair of {self.name}", str(pair), PAIRS)
            pairs[pair] = _inner_pattern(value, f"{self.name}: pairs[{quoted(pair)}]", self.block)
        object.__setattr__(self, "pairs", pairs)
        if not any(pattern for patterns in self.modality_groups.values() for pattern in patterns.values()):
            raise RecipeError(f"{self.name}: every pair is left out; give one of them a pattern.")

    @property
    def modality_groups(self) -> Groups:
        pairs: Mapping[str, Any] = self.pairs
        return {
            q: {k: pairs.get(f"{query}>{key}", self.default) for k, key in MODALITIES.items()}
            for q, query in MODALITIES.items()
        }
