"""Token pruners: which visual tokens to keep, one per file; a new one needs a file and an import line here."""

from mmaccel.policies.prune.attention import AttentionPrune as AttentionPrune
from mmaccel.policies.prune.dycoke import DyCoke as DyCoke
from mmaccel.policies.prune.fastv import FastV as FastV
from mmaccel.policies.prune.pyramid_drop import PyramidDrop as PyramidDrop
from mmaccel.policies.prune.random import RandomPrune as RandomPrune
from mmaccel.policies.prune.sparsevlm import SparseVLM as SparseVLM
from mmaccel.policies.prune.uniform import UniformPrune as UniformPrune
from mmaccel.policies.prune.uv import UVPrune as UVPrune
from mmaccel.policies.prune.visionzip import VisionZip as VisionZip
