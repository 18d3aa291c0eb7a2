"""Kernels of a stream's memory: clusters and what a question asks of them, units from host memory."""
