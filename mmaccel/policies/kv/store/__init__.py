"""Where streams keep what leaves the device: host memory, the ways across the wire, double buffering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from mmaccel.core.errors import check_choice, check_least
from mmaccel.core.kv import StreamPolicy
from mmaccel.core.policy import with_base_dir
from mmaccel.policies.kv.store.gather_sources import Sources
from mmaccel.policies.kv.store.host import HostStore, Spill

if TYPE_CHECKING:
    import torch

    from mmaccel.core.adapter import Geometry
    from mmaccel.core.kv import Stream

__all__ = ["HostPolicy", "HostStore", "Sources", "Spill"]


@dataclass(frozen=True, kw_only=True)
class HostPolicy(StreamPolicy):
    """The fields of a memory that keeps units on the host.

    host_bytes  host memory at most; None: as much as the host can spare
    spill       what happens when it is used up: "refuse", "disk", or "drop_oldest", which forgets the oldest frames for
                good as new ones come, also where the `watch` that brings these fails later
    folder      where files go with spill "disk", in a YAML file counted from its folder; None: a temporary folder
    """

    spills: ClassVar[tuple[Spill, ...]] = get_args(Spill)

    host_bytes: int | None = None
    spill: Spill = "refuse"
    folder: str | None = None

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        return with_base_dir(fields, folder, "folder")

    def __post_init__(self) -> None:
        check_least(self, 0, "host_bytes")
        why = "" if "drop_oldest" in self.spills else ", for it keeps everything"
        check_choice(self.name, "spill", self.spill, self.spills, why)

    def store(self, stream: Stream, geometry: Geometry, device: torch.device) -> HostStore:
        """An empty store of a stream's units."""
        return HostStore(
            layers=geometry.layers,
            groups=geometry.kv_heads,
            tokens=stream.unit,
            size=geometry.head_dim,
            dtype=stream.dtype,
            device=device,
            cap=self.host_bytes,
            spill=self.spill,
            folder=self.folder,
        )
