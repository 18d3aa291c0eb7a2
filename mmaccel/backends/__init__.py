"""Tensors in, tensors out: the operators of attention and the kernels that serve them. Knows no policy and no model."""
