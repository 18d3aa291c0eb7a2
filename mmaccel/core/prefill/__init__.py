"""Sparse prefill: sparse attention patterns, their block plans, the attention of a layer, and token pruning."""
