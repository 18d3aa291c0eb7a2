"""Memories: what a sequence or a stream keeps of its keys and values."""
