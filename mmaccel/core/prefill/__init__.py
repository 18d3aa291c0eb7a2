"""Sparse prefill: patterns, their plans, the attention of a layer, and the pruning of tokens."""
