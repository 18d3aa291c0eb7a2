"""Mixture of experts for the few new rows of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmaccel.backends.ops.layer_ops import has_linear_kernels
from mmaccel.backends.ops.operator import operator


@operator("experts", serves=has_linear_kernels, fake=lambda x: torch.empty_like(x))
def expert_mlp(x: Tensor, chosen: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Mixture-of-experts MLP on rows x [R, E], result [R, E]; no host synchronization for the choice of experts.

    chosen [R, k] long: expert indices; share [R, k]: weights of their outputs; gate_up [N, 2 I, E], gate outputs first; down
    [N, E, I].
    """
    gate, up = torch.einsum("re,rkie->rki", x, gate_up[chosen]).chunk(2, -1)
    made = torch.einsum("rki,rkei->rke", functional.silu(gate) * up, down[chosen])
    return (made * share[..., None]).sum(1).to(x.dtype)
