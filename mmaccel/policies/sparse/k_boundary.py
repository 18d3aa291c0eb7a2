"""The `k_boundary` pattern: keys sorted by modality, with one pattern per key modality for all queries."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.core.registry import register
from mmaccel.policies.sparse.boundary_2d import Groups, OneSidedModalityBoundary


@register("sparse", "k_boundary")
@dataclass(frozen=True, kw_only=True)
class KBoundary(OneSidedModalityBoundary):
    """All queries, of whatever modality, attend to the keys of each modality by that modality's own pattern.

    Only keys are split by modality; queries stay in order, and the last ones of the prompt are used for estimates
    (MMInference, section 2.3 and Figure 6a). Windows, columns and lines count only keys of their modality. `text`, `image`
    and `video` each hold a pattern ("a_shape", "dense", "grid", "vertical_slash", ...), by name, as a mapping such as
    ``{"name": "grid", "stride": "free"}``, or as an object; null leaves a modality's keys out. All have its block size.
    """

    @property
    def modality_groups(self) -> Groups:
        return {None: self.modality_patterns}
