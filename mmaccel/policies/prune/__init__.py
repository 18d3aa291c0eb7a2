"""Token pruners: which visual tokens are worth keeping. One idea a file; a new one is a file and an import line here."""

from mmaccel.policies.prune.attention import AttentionPrune
from mmaccel.policies.prune.dycoke import DyCoke
from mmaccel.policies.prune.fastv import FastV
from mmaccel.policies.prune.pyramid_drop import PyramidDrop
from mmaccel.policies.prune.random import RandomPrune
from mmaccel.policies.prune.sparsevlm import SparseVLM
from mmaccel.policies.prune.uniform import UniformPrune
from mmaccel.policies.prune.uv import UVPrune
from mmaccel.policies.prune.visionzip import VisionZip

__all__ = [
    "AttentionPrune",
    "DyCoke",
    "FastV",
    "PyramidDrop",
    "RandomPrune",
    "SparseVLM",
    "UVPrune",
    "UniformPrune",
    "VisionZip",
]
