"""Where streams keep what leaves the device: host memory, the ways across the wire, double buffering."""

from mmaccel.policies.kv.store.host import HostPolicy, HostStore, Spill
from mmaccel.policies.kv.store.pinned_slabs import Shape

__all__ = ["HostPolicy", "HostStore", "Shape", "Spill"]
