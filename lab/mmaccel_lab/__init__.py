"""What mmaccel is tried on: a synthetic world, tiny models trained on it, and studies of how well they answer.

Importing this package loads nothing; its rooms (`world`, `tiny`, `train`, `eval`, `cli`) are imported by name.
"""
