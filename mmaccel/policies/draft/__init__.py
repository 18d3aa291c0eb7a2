"""Drafts: who guesses the next tokens for the target to verify. One idea a file; a new one is a file and a line here."""

from mmaccel.policies.draft.off import Off
from mmaccel.policies.draft.parallel import Parallel
from mmaccel.policies.draft.prompt_lookup import PromptLookup
from mmaccel.policies.draft.sequential import Sequential
from mmaccel.policies.draft.sparse_to_dense import SparseToDense
from mmaccel.policies.draft.text_only import TextOnly
from mmaccel.policies.draft.tree import Tree

__all__ = ["Off", "Parallel", "PromptLookup", "Sequential", "SparseToDense", "TextOnly", "Tree"]
