"""Kernels of a decode step: attention over a cache, products that read weights, rotation."""
