"""Draft token trees in layers with a recurrent state: each path of a tree is run as a sequence, from the state before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from mmaccel.core.adapter import TokenTree


class TreePaths(Cache):
    """Cache that runs all paths of a draft tree from the state of `layer`, a `RecurrentCacheLayer`, without changing it.

    columns  [b, L] long: for each path to a leaf the indices of its rows in the tree, from the root on, filled up to L with
             other rows, whose outputs are not read
    path, place  [n] long: for each new row of the tree the number of a path that has it, and its index in that path
    """

    def __init__(self, layer: Any, branches: TokenTree) -> None:
        sees, home = branches.sees, layer.module.conv1d.weight.device
        own, places = sees[:, -len(sees) :], sees.sum(1) - 1
        leaves = own.sum(0) == 1
        columns = (~sees[leaves]).int().argsort(dim=1, stable=True)[:, : int(places.max()) + 1]
        told = columns, own[leaves].int().argmax(0), places
        self.columns, self.path, self.place = (one.to(home) for one in told)
        made = LinearAttentionLayer()
        if layer.has_previous_state[0]:
            held = layer.conv_states[0], layer.recurrent_states[0]
            conv, state = (one.expand(len(self.columns), *one.shape[1:]).clone() for one in held)
            made.lazy_initialization(conv_states=conv, recurrent_states=state)
            made.conv_states[0], made.recurrent_states[0], made.has_previous_state[0] = conv, state, True
        super().__init__(layers=[made] * (layer.module.layer_idx + 1))


def gather_tree_outputs_hook(
    module: Any, args: tuple[Any, ...], kwargs: Any, out: Tensor | None = None
) -> Tensor | None:
    """Forward hook of a Gated DeltaNet module: gather the outputs [1, n, E] of a tree's rows from those of its paths [b, L,
    E]. Does nothing without `kwargs`, which torch leaves out for a hook that was removed while the module's hooks ran."""
    paths = kwargs.get("cache_params") if isinstance(kwargs, Mapping) else None
    return out[None, paths.path, paths.place] if isinstance(paths, TreePaths) and out is not None else None
