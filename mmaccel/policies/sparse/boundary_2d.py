"""Queries and keys sorted by modality, with a pattern of its own for each pair of modalities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mmaccel.core.errors import RecipeError, UnknownName, shown
from mmaccel.core.layout import MODALITIES
from mmaccel.core.registry import register
from mmaccel.policies.sparse.boundaries import Boundary, Inner, inner
from mmaccel.policies.sparse.intra import IntraPattern

PAIRS = tuple(f"{q}>{k}" for q in MODALITIES.values() for k in MODALITIES.values())


@register("sparse", "boundary_2d")
@dataclass(frozen=True, kw_only=True)
class Boundary2D(Boundary):
    """The queries of each modality attend to the keys of each modality by a pattern of the pair's own.

    Rows and columns are permuted (MMInference, Algorithm 3): windows, columns and lines count in keys of the pair's
    modality, so that they run on across whatever stands between its segments (section 2.4). A query and a key of one
    modality are as far apart as tokens of it lie between them; a query of another modality stands at the last key not
    after it.

    `default` holds the pattern of every pair ("a_shape", "dense", "grid", "vertical_slash", ...), by name, as a mapping
    such as ``{"name": "a_shape", "window": 1024}``, or as an object; `pairs` that of some, as ``{"video>text": "grid"}``,
    the queries' modality first. null leaves a pair out. The block of the boundary is theirs too.
    """

    words: ClassVar[Mapping[str, str]] = {
        "no_boundary": "is what a search calls a pattern by itself, without a boundary; give that pattern, such as 'grid', "
        "'a_shape' or 'vertical_slash'"
    }

    default: Inner = "a_shape"
    pairs: Mapping[str, Inner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "default", inner(self.default, f"{self.name}: default", self.block))
        if not isinstance(self.pairs, Mapping):
            raise RecipeError(
                f"{self.name}: pairs is {shown(self.pairs)}; give a mapping such as {{video>text: grid}}."
            )
        found = {}
        for pair, value in self.pairs.items():
            if pair not in PAIRS:
                raise UnknownName(f"pair of {self.name}", str(pair), PAIRS)
            found[pair] = inner(value, f"{self.name}: pairs[{shown(pair)}]", self.block)
        object.__setattr__(self, "pairs", found)
        if not any(self.pair(*pair.split(">")) for pair in PAIRS):
            raise RecipeError(f"{self.name}: every pair is left out; give one of them a pattern.")

    def pair(self, query: str, key: str) -> IntraPattern | None:
        """The pattern of queries of one modality over keys of another, by name."""
        found = self.pairs.get(f"{query}>{key}", self.default)
        assert found is None or isinstance(found, IntraPattern)
        return found

    def within(self, query: int | None, key: int | None) -> IntraPattern | None:
        assert query is not None and key is not None
        return self.pair(MODALITIES[query], MODALITIES[key])

    def groups(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        return tuple(MODALITIES), tuple(MODALITIES)
