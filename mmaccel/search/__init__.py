"""Offline search for the sparse pattern of each attention head (MMInference, section 3.3), and pictures of the result."""

from mmaccel.search.run import Settings, agreement, recompute, search

__all__ = ["Settings", "agreement", "recompute", "search"]
