"""The recurrent states (Gated DeltaNet) that a stream keeps beside its KV memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.streams.parts import RunningStates
from mmaccel.models.recurrent import RecurrentCacheLayer, copy_tensors

NAMES = "running conv", "running state"
"""Of the two parts of a state, where it is saved."""


class StreamRecurrentStates(RunningStates):
    """The recurrent states of one stream, by layer index; `passes` are the `StreamForwardPasses` that run its model."""

    def __init__(self, passes: Any, modules: Mapping[int, nn.Module]) -> None:
        self.states = {number: RecurrentCacheLayer(module) for number, module in modules.items()}
        self._passes = passes
        self.cache: Any = None  # of the last pass: rows that are run once more go through it

    def fork(self) -> StreamRecurrentStates:
        other = StreamRecurrentStates(
            self._passes, {number: one.module for number, one in self.states.items()}
        )
        made = (one.prepare_copy(other.states[number]) for number, one in self.states.items())
        copy_tensors([pair for some in made for pair in some])
        return other

    def restore(self, fork: StreamRecurrentStates) -> None:
        made = (
            one.prepare_restore(fork.states[number].checkpoint_without_copy())
            for number, one in self.states.items()
        )
        copy_tensors([pair for some in made for pair in some])

    def undo_rows(self, count: int) -> None:
        with self._passes.hold_model():
            for state in self.states.values():
                state.crop(count)

    def accept(self, path: Tensor) -> None:
        with self._passes.hold_model():
            for state in self.states.values():
                state.accept(path)

    def named_tensors(self) -> dict[str, Tensor]:
        held = ((number, *state.checkpoint()) for number, state in self.states.items())
        both = ((number, state) for number, _, state in held if state is not None)
        return {f"{name} {number}": x for number, state in both for name, x in zip(NAMES, state, strict=True)}

    def load(self, read: Callable[..., dict[str, Tensor]]) -> None:
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for number, state in self.states.items():
            one = state.module
            shapes = (
                (1, one.conv_dim, one.conv_kernel_size),
                (1, one.num_v_heads, one.head_k_dim, one.head_v_dim),
            )
            types = one.conv1d.weight.dtype, torch.float32
            wanted |= {
                f"{name} {number}": pair
                for name, pair in zip(NAMES, zip(shapes, types, strict=True), strict=True)
            }
        found = read(wanted)
        for number, state in self.states.items():
            home = state.module.conv1d.weight.device
            conv, recurrent = (found[f"{name} {number}"].to(home) for name in NAMES)
            state.restore((0, (conv, recurrent)))
