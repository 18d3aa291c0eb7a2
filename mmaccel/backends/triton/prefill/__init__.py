"""Kernels of a prompt: attention of a plan's parts, and what makes its indices and lists."""
