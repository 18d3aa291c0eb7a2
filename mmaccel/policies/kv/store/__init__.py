"""Where streams keep what leaves the device: host memory, and the ways across the wire."""

from mmaccel.policies.kv.store.host import HostStore, Spill
from mmaccel.policies.kv.store.slabs import Shape

__all__ = ["HostStore", "Shape", "Spill"]
