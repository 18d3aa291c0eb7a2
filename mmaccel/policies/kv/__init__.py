"""KV memory policies: which keys and values a sequence or stream keeps, one per file; a new one needs an import here."""

from mmaccel.policies.kv._window import WindowedPolicy
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.full import Full
from mmaccel.policies.kv.livevlm import LiveVLM
from mmaccel.policies.kv.mosaic import Mosaic
from mmaccel.policies.kv.no_cache import NoCache
from mmaccel.policies.kv.offload import Offload
from mmaccel.policies.kv.recent import Recent
from mmaccel.policies.kv.rekv import ReKV
from mmaccel.policies.kv.streammem import StreamMem
from mmaccel.policies.kv.window import Window

__all__ = [
    "Full",
    "LiveVLM",
    "Mosaic",
    "NoCache",
    "Offload",
    "ReKV",
    "Recent",
    "StreamMem",
    "StreamMemory",
    "Window",
    "WindowedPolicy",
]
