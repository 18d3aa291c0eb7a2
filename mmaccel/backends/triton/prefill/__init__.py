"""Prefill kernels: attention of a plan's parts, and the making of its indices and lists."""
