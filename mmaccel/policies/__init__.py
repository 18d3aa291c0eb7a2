"""The policies that a recipe chooses from: sparse patterns, KV memories, drafts, pruners. Importing this registers all."""

from mmaccel.policies import draft, kv, prune, sparse

__all__ = ["draft", "kv", "prune", "sparse"]
