"""Sparse prefill patterns: one idea, one file, one name; importing this registers them all."""

from mmaccel.policies.sparse.a_shape import AShape
from mmaccel.policies.sparse.block_topk import BlockTopK
from mmaccel.policies.sparse.boundary_2d import Boundary2D
from mmaccel.policies.sparse.dense import Dense
from mmaccel.policies.sparse.grid import Grid
from mmaccel.policies.sparse.k_boundary import KBoundary
from mmaccel.policies.sparse.per_head import PerHead
from mmaccel.policies.sparse.q_boundary import QBoundary
from mmaccel.policies.sparse.sf_fixed import SFFixed
from mmaccel.policies.sparse.sf_strided import SFStrided
from mmaccel.policies.sparse.tri_shape import TriShape
from mmaccel.policies.sparse.vertical_slash import VerticalSlash

__all__ = [
    "AShape",
    "BlockTopK",
    "Boundary2D",
    "Dense",
    "Grid",
    "KBoundary",
    "PerHead",
    "QBoundary",
    "SFFixed",
    "SFStrided",
    "TriShape",
    "VerticalSlash",
]
