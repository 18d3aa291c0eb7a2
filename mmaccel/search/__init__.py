"""Offline search for the sparse pattern of each attention head (MMInference, section 3.3), and pictures of the result."""

from mmaccel.search.run import SearchSettings, recompute_table, search, table_agreement

__all__ = ["SearchSettings", "recompute_table", "search", "table_agreement"]
