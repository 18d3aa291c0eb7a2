"""Queries sorted by modality, with a pattern for each modality over all keys."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.core.registry import register
from mmaccel.policies.sparse.boundary_2d import Groups, OneSided


@register("sparse", "q_boundary")
@dataclass(frozen=True, kw_only=True)
class QBoundary(OneSided):
    """The queries of each modality attend to all keys, whatever their modality, by a pattern of their own.

    Rows are permuted, so that a modality's lines and windows, which its islands interrupt, run on in its queries
    (MMInference, Algorithm 2). Places are those of the whole sequence. `text`, `image` and `video` each hold a pattern over
    orders ("a_shape", "dense", "grid", "vertical_slash", ...), by name, as a mapping such as
    ``{"name": "grid", "stride": "free"}``, or as an object; null leaves a modality's queries without keys. The block of the
    boundary is theirs too.

    One pattern for all queries alike is the pattern itself: the paper's no-boundary head needs no name of its own.
    """

    @property
    def groups(self) -> Groups:
        return {m: {None: pattern} for m, pattern in self.patterns.items()}
