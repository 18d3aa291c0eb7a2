"""Offline search for the sparse pattern of each attention head (MMInference, section 3.3), and pictures of the result."""

from mmaccel.search.run import Settings, recompute_table, search, table_agreement

__all__ = ["Settings", "recompute_table", "search", "table_agreement"]
