"""The offline search for the pattern of each head (MMInference, section 3.3), and pictures of what it finds."""

from mmaccel.search.run import Settings, agreement, replayed, search

__all__ = ["Settings", "agreement", "replayed", "search"]
