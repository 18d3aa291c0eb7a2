"""Host-memory store of a stream's keys and values, and copies between host and device."""

from mmaccel.policies.kv.store.host import HostStore, Spill
from mmaccel.policies.kv.store.saved import Rows, Window
from mmaccel.policies.kv.store.slabs import UnitShape

__all__ = ["HostStore", "Rows", "Spill", "UnitShape", "Window"]
