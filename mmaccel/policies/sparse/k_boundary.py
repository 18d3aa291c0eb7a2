"""Keys sorted by modality, with a pattern for each modality that all queries follow."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.core.registry import register
from mmaccel.policies.sparse.boundary_2d import Groups, OneSided


@register("sparse", "k_boundary")
@dataclass(frozen=True, kw_only=True)
class KBoundary(OneSided):
    """All queries, whatever their modality, attend to the keys of each modality by a pattern of its own.

    The boundary lies between keys alone; queries go on across it, and the last ones of the prompt decide (MMInference,
    section 2.3 and Figure 6a). Windows, columns and lines count in keys of their modality. `text`, `image` and `video`
    each hold a pattern over orders ("a_shape", "dense", "grid", "vertical_slash", ...), by name, as a mapping such as
    ``{"name": "grid", "stride": "free"}``, or as an object; null leaves a modality's keys out. The block of the boundary
    is theirs too.
    """

    @property
    def groups(self) -> Groups:
        return {None: self.patterns}
