"""Sparse prefill attention patterns, one per file; importing this registers them all."""

from mmaccel.policies.sparse.a_shape import AShape as AShape
from mmaccel.policies.sparse.block_topk import BlockTopK as BlockTopK
from mmaccel.policies.sparse.boundary_2d import Boundary2D as Boundary2D
from mmaccel.policies.sparse.dense import Dense as Dense
from mmaccel.policies.sparse.grid import Grid as Grid
from mmaccel.policies.sparse.k_boundary import KBoundary as KBoundary
from mmaccel.policies.sparse.per_head import PerHead as PerHead
from mmaccel.policies.sparse.q_boundary import QBoundary as QBoundary
from mmaccel.policies.sparse.sf_fixed import SFFixed as SFFixed
from mmaccel.policies.sparse.sf_strided import SFStrided as SFStrided
from mmaccel.policies.sparse.tri_shape import TriShape as TriShape
from mmaccel.policies.sparse.vertical_slash import VerticalSlash as VerticalSlash
