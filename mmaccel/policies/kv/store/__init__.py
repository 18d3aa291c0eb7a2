"""Where streams keep what leaves the device: host memory, the ways across the wire, double buffering."""

from mmaccel.policies.kv.store.cost import Way
from mmaccel.policies.kv.store.host import HostStore, Spill
from mmaccel.policies.kv.store.sources import Sources

__all__ = ["HostStore", "Sources", "Spill", "Way"]
