"""Drafting methods for speculative decoding, one per file. A new one needs a file here and an import line in this module."""

from mmaccel.policies.draft.off import Off as Off
from mmaccel.policies.draft.parallel import Parallel as Parallel
from mmaccel.policies.draft.prompt_lookup import PromptLookup as PromptLookup
from mmaccel.policies.draft.sequential import Sequential as Sequential
from mmaccel.policies.draft.sparse_to_dense import SparseToDense as SparseToDense
from mmaccel.policies.draft.text_only import TextOnly as TextOnly
from mmaccel.policies.draft.tree import Tree as Tree
