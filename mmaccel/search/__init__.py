"""The offline search for the pattern of each head (MMInference, section 3.3), and pictures of what it finds."""

from mmaccel.search.run import Settings, search
from mmaccel.search.table import agreement, replayed

__all__ = ["Settings", "agreement", "replayed", "search"]
