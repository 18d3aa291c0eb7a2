"""Cache entries of layers with a recurrent state (Gated DeltaNet) that can be rolled back as attention's can.

A recurrent state cannot be truncated. So a layer keeps a checkpoint of its state and the inputs since; to roll back it
restores the checkpoint and runs the remaining inputs again. It keeps two checkpoints, at least `REACH` tokens apart. The
rows of a token tree are run path by path from the state before it, which contains none of them until one path is accepted.

In captured decode steps (`layer_step.FusedDeltaNetStep`) a sequence has a slot: a ring buffer ("journal") of its last rows,
and a state that lags behind them (`ops.delta.delta_rows`). A short rollback only changes a number; a longer one restores a
copy of the state. Any other use of the layer, such as the model's forward, first applies the journal and frees the slot.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from mmaccel.backends.ops.delta import delta_rows
from mmaccel.backends.ops.layer_ops import WINDOW
from mmaccel.core.adapter import Branches
from mmaccel.core.errors import ModelError
from mmaccel.core.streams.parts import RunningStates
from mmaccel.models import install
from mmaccel.models.install import Hooks, shared_hooks
from mmaccel.models.tree_paths import TreePaths, gather_tree

NAMES = "running conv", "running state"
"""Of the two parts of a state, where it is saved."""

LAG = 16
"""Rows that a state in a slot lags behind at most, once its sequence goes back by more than the last step."""

REACH = 128
"""Rows that a sequence can be rolled back at least, once its prompt has been read."""


@dataclass
class _Mark:
    """The state after `length` columns, None for none; and the rows [B, n, E] since."""

    length: int
    state: tuple[Tensor, Tensor] | None
    rows: list[Tensor] = field(default_factory=list)


class RecurrentCacheLayer(LinearAttentionLayer):
    """A transformers cache layer: the recurrent state of one Gated DeltaNet, `module`, which can be rolled back."""

    is_sliding, is_croppable = False, True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module
        self.length = 0
        self.cache: Callable[[], Any] = lambda: None
        self._marks: list[_Mark] = []
        self._tree: list[Tensor] = []  # rows [1, n, E] of a tree, which the state does not contain
        self._again = False
        self.slots: StateSlots | None = None
        self._slot, self._entered, self._base, self._lag = (0, 0), 0, 0, 0
        self._copies: list[tuple[int, Tensor]] = []  # of the state in the slot, after so many columns

    def move_to_slot(self, slots: StateSlots, layer: int, number: int) -> None:
        """Move this layer's recurrent state into slot `number` of `slots`, where it is layer `layer`."""
        self.leave_slot()
        self.slots, self._slot, self._base = slots, (layer, number), self.length
        self._entered = self.length
        journal, state = self._room()
        journal.zero_()
        state.zero_()
        if self.has_previous_state[0]:
            conv: Tensor = self.conv_states[0][0].T  # type: ignore[index]
            journal[self._last(journal, len(conv)), : conv.shape[1]] = conv
            state.copy_(self.recurrent_states[0][0])  # type: ignore[index]
        self._copies = [(self._base, state.clone())]

    def begin_step(self, count: int) -> tuple[int, int, int, int]:
        """Begin a decode step of `count` rows; return (start, base, upto, slot), a row of `bounds` of `delta_rows`."""
        start, base, self._base = self.length, self._base, max(self._base, self.length - self._lag)
        if self._base - self._copies[-1][0] > REACH:
            self._copies = [self._copies[-1], (base, self._room()[1].clone())]
        self.length += count
        return start, base, self._base, self._slot[1]

    def undo_failed_step(self, length: int) -> None:
        """Restore the last copy of the recurrent state, after a decode step that began at `length` tokens has failed."""
        self.length = length
        if self.slots is not None:
            self._base, kept = self._copies[-1]  # made before the step ran
            self._room()[1].copy_(kept)

    def leave_slot(self) -> None:
        """Free the slot, if there is one: apply the rows that the journal still holds, and take the state back."""
        if self.slots is None:
            return
        journal, state = self._room()
        none, gate = journal[:0], journal.new_empty(0, state.shape[0] * state.shape[2])
        told = torch.tensor([[self.length, self._base, self.length, 0]], device=state.device)
        delta_rows(none, gate, *deltanet_weights(self.module), told, journal[None], state[None])
        taps = self.module.conv_kernel_size
        conv = journal[self._last(journal, taps), : self.module.conv_dim].T[None]
        self.slots, self._marks = None, []
        self.restore((self.length, (conv, state[None]) if self.length else None))

    def _room(self) -> tuple[Tensor, Tensor]:
        """The journal [R, W] and the state [H, K, V] in its slot."""
        assert self.slots is not None
        layer, number = self._slot
        return self.slots.journals[layer][number], self.slots.states[layer][number]

    def _last(self, journal: Tensor, count: int) -> Tensor:
        """The rows of `journal` of the last `count` columns."""
        return torch.arange(self.length - count, self.length, device=journal.device) % len(journal)

    def record_input_rows(self, rows: Tensor) -> None:
        """Record input `rows` [B, n, E] of the layer, from which a rollback runs it again."""
        count = rows.shape[1]
        if self._again:
            return
        self.leave_slot()
        if count > REACH:
            # A prompt: there is no way back into it.
            self._marks = []
        else:
            if not self._marks or self.length + count - self._marks[-1].length > REACH:
                self._marks = [*self._marks[-1:], _Mark(self.length, self._copied())]
            self._marks[-1].rows.append(rows.detach())
        self.length += count

    def spread_tree(self, rows: Tensor, branches: Branches) -> tuple[Tensor, TreePaths]:
        """Record the next `rows` [1, n, E] of a tree; return its paths as a batch [b, L, E], and the cache by which it
        is run from the state before the tree."""
        self.leave_slot()
        self._tree.append(rows.detach())
        self.length += rows.shape[1]
        paths = TreePaths(self, branches)
        return torch.cat(self._tree, 1)[0, paths.columns], paths

    def accept(self, path: Tensor) -> None:
        """Keep of a tree its rows at `path` [k] alone."""
        rows, self._tree = torch.cat(self._tree, 1), []
        self.length -= rows.shape[1]
        self._run(rows[:, path.to(rows.device)])

    def _run(self, rows: Tensor) -> None:
        cache = self.cache()
        cache.branches = None
        self.module(hidden_states=rows, cache_params=cache, attention_mask=None)

    def count_dropped(self, length: int) -> None:
        """Set the length to that of the whole prompt, of which a pruner left the layer fewer rows."""
        self.length, self._marks = length, []

    def _copied(self) -> tuple[Tensor, Tensor] | None:
        self.leave_slot()
        if not self.has_previous_state[0]:
            return None
        return self.conv_states[0].clone(), self.recurrent_states[0].clone()  # type: ignore[union-attr]

    def crop(self, tokens_to_remove: int) -> None:
        """Roll the recurrent state back by that many tokens; raises `ModelError` if no checkpoint is old enough."""
        length = self.length - abs(int(tokens_to_remove))
        if self._tree:
            rows, self._tree = torch.cat(self._tree, 1), []
            self.length -= rows.shape[1]
            if length > self.length:
                self._tree, self.length = [rows[:, : length - self.length]], length
        if length == self.length:
            return
        if length == 0:
            self.reset()
            return
        if self.slots is not None and length >= self._copies[0][0]:
            if length < self._base:
                self._lag = min(max(self._lag, self._base - length), LAG)
                while self._copies[-1][0] > length:
                    self._copies.pop()
                self._base, kept = self._copies[-1]
                self._room()[1].copy_(kept)
            self.length = length
            return
        marks = [one for one in self._marks if one.length <= length]
        if not marks or (self.slots is not None and length > self._entered):  # rows since then are in no mark
            raise ModelError(
                f"a recurrent state goes back at most {REACH} tokens, and not into a prompt; start from a new cache."
            )
        self.slots, self._marks, mark = None, marks, marks[-1]
        rows = torch.cat(mark.rows, 1)[:, : length - mark.length]
        mark.rows, self.length = [rows], length
        if mark.state is None:
            super().reset()
        else:
            self._put(mark.state)
        if rows.shape[1]:
            self._again = True
            try:
                self._run(rows)
            finally:
                self._again = False

    def checkpoint(self) -> tuple[int, tuple[Tensor, Tensor] | None]:
        """A copy of the recurrent state, to which `restore` can return at any later time."""
        return self.length, self._copied()

    def restore(self, mark: tuple[int, tuple[Tensor, Tensor] | None]) -> None:
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
        self.length, self._marks, self._tree, self.slots = 0, [], [], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.leave_slot()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for mark in self._marks:
            mark.rows = [rows[beam_idx.to(rows.device)] for rows in mark.rows]
            if mark.state is not None:
                conv, recurrent = (one[beam_idx.to(one.device)] for one in mark.state)
                mark.state = conv, recurrent

    def get_seq_length(self) -> int:
        return self.length


class StateSlots:
    """The recurrent states of S sequences in slots, for decode steps: for each layer `journals` [S, R, W] and `states` [S,
    H, K, V]. They are reallocated when more sequences come."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self.journals, self.states = list[Tensor](), list[Tensor]()
        self.owners = list[Callable[[], Any]]()  # of each slot the sequence's first layer, or None

    def begin_step(self, layers: Sequence[RecurrentCacheLayer], count: int) -> tuple[int, int, int, int]:
        """Begin a decode step of `count` rows of the sequence with cache layers `layers`, which gets a slot if it has none;
        return its row of `bounds` of `delta_rows`."""
        held = [one() for one in self.owners]
        number = held.index(layers[0]) if layers[0] in held else None
        if number is None or any(one.slots is not self for one in layers):
            number = next((n for n, one in enumerate(held) if one is None or one.slots is not self), None)
            number = self._grown() if number is None else number
            self.owners[number] = ref(layers[0])
            for layer, one in enumerate(layers):
                one.move_to_slot(self, layer, number)
        (told,) = {one.begin_step(count) for one in layers}
        return told

    def all_slots(self) -> list[tuple[Tensor, Tensor]]:
        """(Journals, recurrent states) of all slots, for each layer."""
        return list(zip(self.journals, self.states, strict=True))

    @torch.inference_mode(False)
    def _grown(self) -> int:
        """The first of as many free slots as there are taken ones."""
        taken = len(self.owners)
        more, rows = max(1, taken), 2 * REACH + LAG + 3 * WINDOW
        made = []
        for one in self._modules:
            like = one.conv1d.weight
            journal = like.new_zeros(more, rows, one.conv_dim + 2 * one.num_v_heads)
            state = like.new_zeros(more, one.num_v_heads, one.head_k_dim, one.head_v_dim, dtype=torch.float32)
            made.append((journal, state))
        for which, held in enumerate((self.journals, self.states)):
            held[:] = [torch.cat([*held[n : n + 1], new[which]]) for n, new in enumerate(made)]
        self.owners += [lambda: None] * more
        return taken


@contextmanager
def restore_states_on_error(layers: Iterable[RecurrentCacheLayer]) -> Iterator[None]:
    """Context of a decode step that restores the recurrent states of `layers` if the step raises."""
    before = [(one, one.length) for one in layers]
    try:
        yield
    except BaseException:
        for one, length in before:
            one.undo_failed_step(length)
        raise


def deltanet_weights(module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The weights of a Gated DeltaNet that `delta_rows` takes: convolution, decay, time-step bias, norm weight, eps."""
    own = module.conv1d.weight[:, 0], module.A_log, module.dt_bias, module.norm.weight
    return *own, module.norm.variance_epsilon


def record_input(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a Gated DeltaNet module: records its input in its `RecurrentCacheLayer`, and gives it the paths of
    a tree. Without `kwargs` torch calls a hook that was removed while the module's hooks ran."""
    cache = kwargs.get("cache_params")
    layer = None if cache is None else cache.layers[module.layer_idx]
    if not isinstance(layer, RecurrentCacheLayer):
        return None
    layer.cache, rows = ref(cache), args[0] if args else kwargs["hidden_states"]
    if (branches := getattr(cache, "branches", None)) is None:
        layer.record_input_rows(rows)
        return None
    spread, paths = layer.spread_tree(rows, branches)
    return (), {**kwargs, "hidden_states": spread, "cache_params": paths, "attention_mask": None}


def hook_inputs(hooks: Hooks, modules: Iterable[nn.Module]) -> None:
    """Install the hooks `record_input` and `gather_tree` on Gated DeltaNet `modules`."""
    for module in modules:
        hooks.add_pre_hook(module, record_input)
        hooks.add_hook(module, gather_tree, with_kwargs=True)


def make_rollback_cache(model: nn.Module, states: Mapping[int, nn.Module]) -> Any:
    """A transformers `DynamicCache` for the plain `model` whose recurrent layers `states` can be rolled back."""
    cache: Any = DynamicCache(config=model.config)  # type: ignore[arg-type]
    cache.states = {number: RecurrentCacheLayer(module) for number, module in states.items()}
    for number, state in cache.states.items():
        cache.layers[number] = state
    heard = ExitStack()
    heard.enter_context(shared_hooks(model, "noted", lambda hooks: hook_inputs(hooks, states.values())))
    finalize(cache, close_hooks_in_finalizer, heard.close).atexit = False
    return cache


def close_hooks_in_finalizer(close: Callable[[], None]) -> None:
    """Close shared hooks in a finalizer. It waits for nobody, as a collection may run it in an import that the thread which
    changes hooks waits for: then a thread of its own closes them."""
    if not (lock := install.hooks_lock).acquire(blocking=False):
        start_new_thread(close, ())
        return
    try:
        close()
    finally:
        lock.release()


class StreamRecurrentStates(RunningStates):
    """The recurrent states of one stream, by layer index, on the model of `passes`."""

    def __init__(self, passes: Any, modules: Mapping[int, nn.Module]) -> None:
        self.states = {number: RecurrentCacheLayer(module) for number, module in modules.items()}
        self._passes = passes
        self.cache: Any = None  # of the last pass: rows that are run once more go through it

    def checkpoint(self) -> Any:
        return {number: state.checkpoint() for number, state in self.states.items()}

    def restore(self, mark: Any) -> None:
        for number, state in self.states.items():
            state.restore(mark[number])

    def crop(self, count: int) -> None:
        with self._passes.busy():
            for state in self.states.values():
                state.crop(count)

    def accept(self, path: Tensor) -> None:
        with self._passes.busy():
            for state in self.states.values():
                state.accept(path)

    def tensors(self) -> dict[str, Tensor]:
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
