"""The vision tower, some patches at a time, so that a long video needs no room for what the tower holds of all its frames.

At a million tokens Qwen2.5-VL's tower has four million patches, of which it holds 10 GB for each value of its width, and
LLaVA-OneVision's projector alone holds 28 GB before it pools. Frames do not look at each other there: what is cut between
two steps of time is computed alike. Rows of another number may go through another kernel, so that it is the same up to
rounding: in float32 to 1e-5, in bfloat16 as near to float32 as one call comes.

Not cut are a step of time and an image with its tiles; nor where one call is needed: gradients are wanted, the caller asks
for states, attention or a tuple, or brings lengths and places of all patches with him. What is cut gives `pooler_output`
alone, which is all that a model takes of it; the states of a million tokens' patches would stay until its answer.

Within a call, cut or not, a tower with windows attends to those of one length at once (`windows.py`), and its rows go
through fewer kernels (`tower.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmaccel.core.layout import IMAGE, VIDEO
from mmaccel.models.attaching import lent, put
from mmaccel.models.tower import lighter
from mmaccel.models.windows import by_length

if TYPE_CHECKING:
    from mmaccel.models.family import Family

PATCHES = 1 << 14
"""Patches of a call, unless one step of time or one image has more. At the published shapes a patch of Qwen2.5-VL holds some
44 kB where queries and keys are turned in float32, and one of LLaVA-OneVision some 87 kB in releases of transformers that
keep the states of all layers: 0.7 and 1.4 GB. Of fewer a host launches the layers more slowly than an H200 computes them."""

METHODS = {IMAGE: "get_image_features", VIDEO: "get_video_features"}

WHOLE = ("cu_seqlens", "cu_window_seqlens", "max_seqlen", "max_window_seqlen", "position_ids", "window_index")
"""What a caller may have computed of all patches; with or without the modality in front."""


@contextmanager
def in_parts(family: Family, model: nn.Module) -> Iterator[None]:
    """While inside, the model's tower runs as `by_parts` lets it."""
    with lent(family.multimodal(model), "in_parts", lambda undo: by_parts(undo, family, model)):
        yield


def by_parts(undo: ExitStack, family: Family, model: nn.Module) -> None:
    """Let the model's tower see at most `PATCHES` patches a call, windows of one length at once, and run in fewer kernels;
    `undo` puts it back as it was. A tower that does so already is left as it is."""
    multimodal = family.multimodal(model)
    # Here, not where it is written: what compiles is imported by that, when a model is there.
    joined = torch.compiler.disable(_joined, recursive=False)
    for kind, name in METHODS.items():
        encode = getattr(multimodal, name)
        if getattr(encode, "by_parts", False):
            continue
        ours = functools.wraps(encode)(
            functools.partial(_encode, family, model, kind, encode, _names(encode), joined)
        )
        ours.by_parts = True  # type: ignore[attr-defined]
        put(undo, multimodal, name, ours)
    by_length(undo, family, model)
    lighter(undo, family, model)


def _names(encode: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(encode).parameters)


def _encode(
    family: Family,
    model: nn.Module,
    kind: int,
    encode: Callable[..., Any],
    names: list[str],
    joined: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    told = {**dict(zip(names, args, strict=False)), **kwargs}
    pixels = told.get(names[0])
    if not isinstance(pixels, Tensor) or family.patches(model, pixels) <= PATCHES or _asks_for_one(told):
        return encode(*args, **kwargs)
    if torch.is_grad_enabled() and any(p.requires_grad for p in _outside(family, model)):
        return encode(*args, **kwargs)
    return joined(family, model, kind, encode, names[0], told)


def _asks_for_one(told: Mapping[str, Any]) -> bool:
    given = {name.removeprefix("image_").removeprefix("video_") for name, x in told.items() if x is not None}
    states = told.get("output_hidden_states") or told.get("output_attentions")
    return bool(states) or told.get("return_dict") is False or not given.isdisjoint(WHOLE)


def _outside(family: Family, model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of what is not the language model."""
    text = family.text(model)
    for child in family.multimodal(model).children():
        if child is not text:
            yield from child.parameters()


def _joined(
    family: Family,
    model: nn.Module,
    kind: int,
    encode: Callable[..., Any],
    pixels: str,
    told: Mapping[str, Any],
) -> Any:
    """What `encode` gives of all, from what it gives of parts."""
    made: list[type] = []

    def features(piece: Tensor, **changed: Any) -> Any:
        out = encode(**{**told, pixels: piece, **changed, "return_dict": True})
        made.append(type(out))
        return out.pooler_output

    told = dict(told)
    found = family.encoded(model, kind, told.pop(pixels), told, PATCHES, features)
    return made[0](pooler_output=found)


class Rows:
    """Rows that come in parts, put in one tensor as they come: nothing is held twice."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0
        self.whole: Tensor | None = None

    def add(self, part: Tensor) -> None:
        if self.whole is None:
            self.whole = part.new_empty(self.count, *part.shape[1:])
        self.whole[self.at : self.at + len(part)] = part
        self.at += len(part)
