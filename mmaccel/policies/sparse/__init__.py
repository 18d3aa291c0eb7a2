"""Sparse prefill patterns: one idea, one file, one name; importing this registers them all."""

from mmaccel.policies.sparse.a_shape import AShape
from mmaccel.policies.sparse.boundary_2d import Boundary2D
from mmaccel.policies.sparse.dense import Dense
from mmaccel.policies.sparse.grid import Grid
from mmaccel.policies.sparse.vertical_slash import VerticalSlash

__all__ = ["AShape", "Boundary2D", "Dense", "Grid", "VerticalSlash"]
