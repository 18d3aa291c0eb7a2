"""Layers that keep a running state (Gated DeltaNet) in our cache: rolled back as the columns of attention are.

A state cannot be cut back. So a layer notes the rows that enter it since a mark, at which it kept a copy of its state; to go
back it takes the copy and runs the rows that stay once more. Two marks are kept, `REACH` rows or more apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from mmaccel.core.errors import ModelError
from mmaccel.core.streams.parts import RunningStates
from mmaccel.models.install import Hooks, shared_hooks

NAMES = "running conv", "running state"
"""Of the two parts of a state, where it is saved."""

REACH = 128
"""Rows that a sequence can be rolled back at least, once its prompt has been read."""


@dataclass
class _Mark:
    """The state after `length` columns, None for none; and the rows [B, n, E] since."""

    length: int
    state: tuple[Tensor, Tensor] | None
    rows: list[Tensor] = field(default_factory=list)


class Recurrent(LinearAttentionLayer):
    """The running state of one layer, whose module is `module`."""

    is_sliding, is_croppable = False, True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module
        self.length = 0
        self.cache: Callable[[], Any] = lambda: None
        self._marks: list[_Mark] = []
        self._again = False

    def note(self, rows: Tensor) -> None:
        """`rows` [B, n, E] are about to enter the layer."""
        count = rows.shape[1]
        if self._again:
            return
        if count > REACH:
            # A prompt: there is no way back into it.
            self._marks = []
        else:
            if not self._marks or self.length + count - self._marks[-1].length > REACH:
                self._marks = [*self._marks[-1:], _Mark(self.length, self._copied())]
            self._marks[-1].rows.append(rows.detach())
        self.length += count

    def _copied(self) -> tuple[Tensor, Tensor] | None:
        if not self.has_previous_state[0]:
            return None
        return self.conv_states[0].clone(), self.recurrent_states[0].clone()  # type: ignore[union-attr]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns; raises `ModelError` where no mark is so early."""
        length = self.length - abs(int(tokens_to_remove))
        if length == self.length:
            return
        if length == 0:
            self.reset()
            return
        while self._marks and self._marks[-1].length > length:
            self._marks.pop()
        if not self._marks:
            raise ModelError(
                f"a running state goes back at most {REACH} tokens, and not into a prompt; start from a new cache."
            )
        mark = self._marks[-1]
        rows = torch.cat(mark.rows, 1)[:, : length - mark.length]
        mark.rows, self.length = [rows], length
        if mark.state is None:
            super().reset()
        else:
            self._put(mark.state)
        if rows.shape[1]:
            self._again = True
            try:
                self.module(hidden_states=rows, cache_params=self.cache(), attention_mask=None)
            finally:
                self._again = False

    def mark(self) -> tuple[int, tuple[Tensor, Tensor] | None]:
        """State for `back` to return to, from any later moment."""
        return self.length, self._copied()

    def back(self, mark: tuple[int, tuple[Tensor, Tensor] | None]) -> None:
        self.reset()
        self.length, state = mark
        if state is not None:
            if not self.is_conv_states_initialized[0]:
                self.lazy_initialization(conv_states=state[0], recurrent_states=state[1])
            self._put(state)
            self.has_previous_state[0] = True

    def _put(self, state: tuple[Tensor, Tensor]) -> None:
        for held, kept in zip((self.conv_states, self.recurrent_states), state, strict=True):
            held[0].copy_(kept)  # type: ignore[union-attr]

    def reset(self) -> None:
        super().reset()
        self.length, self._marks = 0, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for mark in self._marks:
            mark.rows = [rows[beam_idx.to(rows.device)] for rows in mark.rows]
            if mark.state is not None:
                conv, recurrent = (one[beam_idx.to(one.device)] for one in mark.state)
                mark.state = conv, recurrent

    def get_seq_length(self) -> int:
        return self.length


def noted(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A pre-hook of a layer's module: tells its state of the rows that come."""
    cache = kwargs.get("cache_params")
    layer = None if cache is None else cache.layers[module.layer_idx]
    if isinstance(layer, Recurrent):
        layer.cache = ref(cache)  # type: ignore[arg-type]
        layer.note(args[0] if args else kwargs["hidden_states"])


def note_in(hooks: Hooks, modules: Iterable[nn.Module]) -> None:
    """Record in the states of `modules` which rows come."""
    for module in modules:
        hooks.before(module, noted)


def dynamic(model: nn.Module, states: Mapping[int, nn.Module]) -> Any:
    """A cache of transformers for the plain `model`, in which the states of these layers can be rolled back."""
    cache: Any = DynamicCache(config=model.config)  # type: ignore[arg-type]
    cache.states = {number: Recurrent(module) for number, module in states.items()}
    for number, state in cache.states.items():
        cache.layers[number] = state
    heard = ExitStack()
    heard.enter_context(shared_hooks(model, "noted", lambda hooks: note_in(hooks, states.values())))
    finalize(cache, heard.close).atexit = False
    return cache


class StreamStates(RunningStates):
    """Recurrent states of one stream on the model of `passes`, by the number of the layer."""

    def __init__(self, passes: Any, modules: Mapping[int, nn.Module]) -> None:
        self.states = {number: Recurrent(module) for number, module in modules.items()}
        self._passes = passes
        self.cache: Any = None  # of the last pass: rows that are run once more go through it

    def mark(self) -> Any:
        return {number: state.mark() for number, state in self.states.items()}

    def back(self, mark: Any) -> None:
        for number, state in self.states.items():
            state.back(mark[number])

    def crop(self, count: int) -> None:
        with self._passes.busy():
            for state in self.states.values():
                state.crop(count)

    def tensors(self) -> dict[str, Tensor]:
        held = ((number, *state.mark()) for number, state in self.states.items())
        both = ((number, state) for number, _, state in held if state is not None)
        return {f"{name} {number}": x for number, state in both for name, x in zip(NAMES, state, strict=True)}

    def put(self, read: Callable[..., dict[str, Tensor]]) -> None:
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
            state.back((0, (conv, recurrent)))
