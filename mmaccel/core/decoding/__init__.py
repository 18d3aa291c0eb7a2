"""Decoding: the speculative decoding loop, draft interfaces, verification, CUDA-graph replay, a draft's own process."""
