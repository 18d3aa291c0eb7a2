"""Attention within windows, those of one length in one call, for a vision tower that calls them one by one.

Qwen2.5-VL's tower has a window for each 64 patches in most of its layers, and one for each step of time in the others. Under
`sdpa` transformers splits queries, keys and values at `cu_seqlens`, in every layer anew, and attends to one window after
the other, so that a long video is bound by launches. Here the windows of one length are a batch. A size of frame has four
lengths at most: of whole windows, of those at its right and lower edge, and of the corner. Where windows of one length
follow each other nothing is copied.

What is relied on: an attention function with "flash" in its name is given all rows at once, with `cu_seq_lens_q`
(`is_flash_attention_requested`, in transformers 5.17 to 5.23). Where it is not, it is called for each window, and is `sdpa`.
A tower that was given another attention than `sdpa` keeps it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mmaccel.models.attaching import lent, put

if TYPE_CHECKING:
    from mmaccel.models.family import Family

WINDOWS = "mmaccel_flash_windows"
"""The name of `attention` among transformers' attention functions."""


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


_KNOWN: Any = WeakTensorKeyDictionary()
"""The batches of lengths seen: all layers of a call of the tower are given the same tensor, which goes with the call."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """[1, rows, H, D] of query, key and value [1, H, rows, D]: each row sees its window, which `cu_seq_lens_q` bounds."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if cu_seq_lens_q is None:
        return sdpa(module, query, key, value, attention_mask, **told)  # type: ignore[no-any-return]
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        told.pop(name, None)
    batches: Batches | None = _KNOWN.get(cu_seq_lens_q)
    if batches is None:
        batches = _KNOWN[cu_seq_lens_q] = Batches.of(cu_seq_lens_q.tolist(), query.device)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    if batches.order is not None:
        rows = [x.index_select(0, batches.order.to(x.device)) for x in rows]
    sizes = [count * length for count, length in batches.shapes]
    found = []
    for shape, *batch in zip(batches.shapes, *(x.split(sizes) for x in rows), strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in batch)
        found.append(sdpa(module, q, k, v, attention_mask, **told)[0].flatten(0, 1))
    out = found[0] if len(found) == 1 else torch.cat(found)
    if batches.back is not None:
        out = out.index_select(0, batches.back.to(out.device))
    return out[None], None


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface

    # Here, not where it is written: what compiles is imported by that, when a model is there.
    AttentionInterface.register(WINDOWS, torch.compiler.disable(attention))


def by_length(undo: ExitStack, family: Family, model: nn.Module) -> None:
    """Let the windows of one length go through the model's vision tower in one call; `undo` puts it back as it was.

    A tower without windows, with an attention of the user's choice, or that does so already is left as it is.
    """
    tower: Any = family.windowed(model)
    if tower is None or getattr(tower.config, "_attn_implementation", None) != "sdpa":
        return
    _register()
    # A copy, so that whoever builds another model of this config, or sends it away, does not meet the name.
    shared = tower.config
    own = copy.copy(shared)
    own._attn_implementation = WINDOWS
    for module in tower.modules():
        if getattr(module, "config", None) is shared:
            put(undo, module, "config", own)


@contextmanager
def in_batches(family: Family, model: nn.Module) -> Iterator[None]:
    """While inside, the windows of one length go through the model's vision tower in one call."""
    with lent(family.multimodal(model), "in_batches", lambda undo: by_length(undo, family, model)):
        yield
