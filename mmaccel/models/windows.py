"""Attention of vision towers with windows: those of one length are a batch (why: modules.py)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mmaccel.models.install import Hooks

_KNOWN: Any = WeakTensorKeyDictionary()
"""The batches of lengths seen: all layers of a call of the tower are given the same tensor, which goes with the call."""


WINDOWS = "mmaccel_flash_windows"
"""The name of `attention` among transformers' attention functions."""


def by_length(hooks: Hooks, family: Any, model: nn.Module) -> None:
    """Let the windows of one length go through the model's vision tower in one call.

    A tower without windows, with an attention of the user's choice, or that does so already is left as it is.
    """
    tower: Any = family.windowed(model)
    if tower is None or getattr(tower.config, "_attn_implementation", None) != "sdpa":
        return
    from transformers import AttentionInterface

    AttentionInterface.register(WINDOWS, attention)
    # A copy, so that whoever builds another model of this config, or sends it away, does not meet the name.
    hooks.attention(tower.modules(), tower.config, WINDOWS)


@dataclass(frozen=True)
class Batches:
    """Windows put together by length.

    shapes  (windows, rows of each) of each batch
    order   [rows] long: the rows in the order of the batches; None where that is the order they have
    back    [rows] long: where each row lies among the batches
    """

    shapes: tuple[tuple[int, int], ...]
    order: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def of(cls, ends: list[int], device: torch.device) -> Batches:
        """Of windows that begin and end at `ends`, one after the other; those of no rows are left out."""
        begins: dict[int, list[int]] = {}
        for begin, end in pairwise(ends):
            if end > begin:
                begins.setdefault(end - begin, []).append(begin)
        shapes = tuple((len(some), length) for length, some in begins.items())
        order = torch.cat(
            [(torch.tensor(some)[:, None] + torch.arange(n)).flatten() for n, some in begins.items()]
        )
        if torch.equal(order, torch.arange(len(order))):
            return cls(shapes)
        return cls(shapes, order.to(device), order.argsort().to(device))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, rows, H, D] of query, key and value [1, H, rows, D]: each row sees its window, which `cu_seq_lens_q` bounds."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if cu_seq_lens_q is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    scale, plain = kwargs.get("scaling"), attention_mask is None and not kwargs.get("dropout")
    if torch.compiler.is_compiling() and plain and scale is not None and not torch.is_grad_enabled():
        return window_attend(query, key, value, cu_seq_lens_q, scale), None
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(name, None)
    batches: Batches | None = _KNOWN.get(cu_seq_lens_q)
    if batches is None:
        batches = _KNOWN[cu_seq_lens_q] = Batches.of(cu_seq_lens_q.tolist(), query.device)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    if batches.order is not None:
        rows = [x.index_select(0, batches.order.to(x.device)) for x in rows]
    sizes = [count * length for count, length in batches.shapes]
    attended = []
    for shape, *batch in zip(batches.shapes, *(x.split(sizes) for x in rows), strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in batch)
        attended.append(sdpa(module, q, k, v, attention_mask, **kwargs)[0].flatten(0, 1))
    out = attended[0] if len(attended) == 1 else torch.cat(attended)
    if batches.back is not None:
        out = out.index_select(0, batches.back.to(out.device))
    return out[None], None


class _Whole:
    """What `sdpa` reads of a module that does not mask."""

    is_causal, training = False, False


@torch.library.custom_op("mmaccel::window_attend", mutates_args=())
def window_attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float) -> Tensor:
    """`attention` where torch.compile sees an operator: the sizes of windows are read from `ends`."""
    whole: Any = _Whole
    return attention(whole, query, key, value, None, ends, scaling=scale, is_causal=False)[0]


@window_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
