"""One idea, one file, one name: what a recipe chooses from. Importing this registers every policy."""

from mmaccel.policies import draft, kv, prune, sparse

__all__ = ["draft", "kv", "prune", "sparse"]
