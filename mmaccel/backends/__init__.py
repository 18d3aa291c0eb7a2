"""Attention operators and the kernels that implement them; tensors in, tensors out. Knows no policy and no model."""
