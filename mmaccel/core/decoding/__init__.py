"""Decoding: the loop, drafts and their verification, captured steps, and a process of a draft."""
