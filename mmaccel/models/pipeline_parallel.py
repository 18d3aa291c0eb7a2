"""A model over several devices, layer by layer: where one device does not hold all of it.

The decoder layers lie in runs, one a device, in the order of the devices; all else (vision tower, embeddings, last norm,
head) is on the first, where a prompt comes in and logits come out. From run to run goes the hidden state: `MoveInputs` moves
it, and what all layers are given beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import adapter_for
from mmaccel.core.attention import ForwardPass
from mmaccel.core.errors import ModelError
from mmaccel.models.install import Hooks, PromptHook


@dataclass(eq=False)
class MoveInputs(PromptHook):
    """A pre-hook of a module: its arguments come to `device`; named ones, which all layers are given, once for all there.

    memo  for each device and argument what came last, and the same moved; shared by all layers of a model
    ends  whether no layer comes after this module: nothing is kept then
    """

    device: torch.device
    memo: dict[tuple[torch.device, str], tuple[Any, Any]]
    ends: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positional, named = tuple(self._moved(x) for x in args), {}
        for name, x in kwargs.items():
            source, named[name] = self.memo.get((self.device, name), (None, None))
            if source is not x or x is None:
                named[name] = self._moved(x)
                self.memo[self.device, name] = x, named[name]
        if self.ends:
            self.memo.clear()
        return positional, named

    def _moved(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            # Into host memory it is waited for: who reads there does not know of the device's stream.
            return x.to(self.device, non_blocking=self.device.type != "cpu")
        if isinstance(x, tuple):
            return tuple(self._moved(one) for one in x)
        if isinstance(x, ForwardPass) and x.layout.device != self.device:
            layout = x.layout.to(self.device)
            # Known of the one it comes from: nothing is read of a device that has yet to get there.
            layout.__dict__["padded"] = x.layout.padded
            return replace(x, layout=layout)
        return x


def shares(sizes: Sequence[int], ends: int, count: int) -> list[int]:
    """For each layer, of `sizes` bytes, which of `count` devices it lies on; the first also holds `ends` bytes.

    In order, each device with at least one layer, and as even as whole layers allow.
    """
    whole, before = ends + sum(sizes), ends
    chosen: list[int] = []
    for number, size in enumerate(sizes):
        middle = before + size / 2
        device = min(int(middle * count / whole), count - 1)
        least, last = count - (len(sizes) - number), chosen[-1] if chosen else 0
        chosen.append(min(max(device, least, last), last + 1 if chosen else 0))
        before += size
    return chosen


def runs(places: Sequence[torch.device], home: torch.device) -> list[tuple[torch.device, list[int]]]:
    """The layers that lie on `places`, by their numbers, in runs of one device; the first and the last run are at `home`,
    without layers where these begin or end elsewhere."""
    found: list[tuple[torch.device, list[int]]] = [(home, [])]
    for number, place in enumerate(places):
        if place != found[-1][0]:
            found.append((place, []))
        found[-1][1].append(number)
    if found[-1][0] != home:
        found.append((home, []))
    return found


def spread_layers(model: nn.Module, devices: Sequence[torch.device | str]) -> Callable[[], None]:
    """Move the layers of `model` over `devices`, and all else to the first. The returned call takes the hooks up again, and
    leaves the weights where they are. Raises `ModelError` for fewer layers than devices."""
    family: Any = adapter_for(model)
    layers = family.layers(model)
    places = [torch.device(device) for device in devices]
    if not 1 <= len(places) <= len(layers):
        raise ModelError(
            f"devices: {len(places)} for a model of {len(layers)} layers; give one or more, at most one a layer."
        )
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    ends = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    chosen = [places[which] for which in shares(sizes, ends, len(places))]
    # One layer after the other, so that no device ever holds more than its own.
    for layer, place in zip(layers, chosen, strict=True):
        layer.to(place)
    inside = {id(module) for module in layers.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.to(places[0])
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(places[0]))
    return hand_over(model, chosen, places[0])


def hand_over(model: nn.Module, chosen: Sequence[torch.device], first: torch.device) -> Callable[[], None]:
    """Lay the hooks for layers that lie on `chosen`, the last norm on `first`."""
    family: Any = adapter_for(model)
    memo: dict[tuple[torch.device, str], tuple[Any, Any]] = {}
    if all(place == first for place in chosen):
        return lambda: None
    modules = [*zip(family.layers(model), chosen, strict=True), (family.text(model).norm, first)]
    hooks = Hooks()
    for module, place in modules:
        hooks.before(module, MoveInputs(place, memo, module is modules[-1][0]), prepend=True)
    return hooks.close
