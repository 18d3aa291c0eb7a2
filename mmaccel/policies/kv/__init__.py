"""Memories: what a sequence keeps of its keys and values. One idea a file; a new one is a file and an import line here."""

from mmaccel.policies.kv.full import Full
from mmaccel.policies.kv.window import Window

__all__ = ["Full", "Window"]
