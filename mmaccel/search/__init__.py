"""The offline search for the pattern of each head (MMInference, section 3.3), and pictures of what it finds."""

from mmaccel.search.algorithm import agreement, replayed
from mmaccel.search.run import Settings, search

__all__ = ["Settings", "agreement", "replayed", "search"]
