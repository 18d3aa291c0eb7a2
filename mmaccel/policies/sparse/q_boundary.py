"""The `q_boundary` pattern: queries sorted by modality, with one pattern per query modality over all keys."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.core.registry import register
from mmaccel.policies.sparse.boundary_2d import Groups, OneSidedModalityBoundary


@register("sparse", "q_boundary")
@dataclass(frozen=True, kw_only=True)
class QBoundary(OneSidedModalityBoundary):
    """The queries of each modality attend to all keys, of whatever modality, by that modality's own pattern.

    Rows are permuted, so that the lines and windows of a modality that other segments interrupt are contiguous in its
    queries (MMInference, Algorithm 2). Positions are those of the whole sequence. `text`, `image` and `video` each hold a
    pattern ("a_shape", "dense", "grid", "vertical_slash", ...), by name, as a mapping such as ``{"name": "grid", "stride":
    "free"}``, or as an object; null leaves a modality's queries without keys. All have the boundary's block size.

    For one pattern for all queries, the paper's no-boundary head, use that pattern itself.
    """

    @property
    def modality_groups(self) -> Groups:
        return {m: {None: pattern} for m, pattern in self.modality_patterns.items()}
