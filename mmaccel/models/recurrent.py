"""Cache entries of layers with a recurrent state (Gated DeltaNet) that can be rolled back as attention's can.

A recurrent state cannot be truncated. So a layer keeps a checkpoint of its state and the inputs since; to roll back it
restores the checkpoint and runs the remaining inputs again. It keeps two checkpoints, at least `REACH` tokens apart. A draft
token tree is run path by path from the state before the tree; the state takes in one path, once it is accepted.

In captured decode steps (`layer_step.FusedDeltaNetStep`) a sequence has a slot: a ring buffer ("journal") of its last rows,
and a state that lags behind them (`ops.delta.deltanet_rows`). A short rollback only changes the length; a longer one
restores a copy of the state. Any other use of the layer, such as the model's forward, first applies the journal and frees
the slot.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from mmaccel.backends.ops.delta import deltanet_rows
from mmaccel.backends.ops.layer_ops import WINDOW
from mmaccel.core.adapter import TokenTree
from mmaccel.core.errors import ModelError
from mmaccel.models import install
from mmaccel.models.install import Hooks, shared_hooks
from mmaccel.models.tree_paths import TreePaths, gather_tree_outputs_hook

LAG = 16
"""Rows that a state in a slot lags behind at most, once its sequence goes back by more than the last step."""

REACH = 128
"""Rows that a sequence can be rolled back at least, once its prompt has been read."""


Mark = tuple[int, tuple[Tensor, Tensor] | None]
"""A layer's state after so many columns: of its convolution and the recurrent one; None: of no columns."""

Copies = list[tuple[Tensor, Tensor]]
"""(To, from) of copies that are to be made together, by `copy_tensors`."""


def copy_tensors(copies: Copies) -> None:
    """Make `copies`, pairs (to, from), with one kernel launch for each dtype and device."""
    some: dict[tuple[torch.dtype, torch.device], Copies] = {}
    for pair in copies:
        some.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
    for pairs in some.values():
        torch._foreach_copy_([to for to, _ in pairs], [x for _, x in pairs])


@dataclass
class _Mark:
    """The state after `length` columns, None for none; and the rows [B, n, E] since."""

    length: int
    state: tuple[Tensor, Tensor] | None
    rows: list[Tensor] = field(default_factory=list)


class RecurrentCacheLayer(LinearAttentionLayer):
    """A transformers cache layer that holds the recurrent state of one Gated DeltaNet, `module`, and can roll it back."""

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

    def move_into_slot(self, slots: StateSlots, layer: int, number: int) -> Copies:
        """Move the state into slot `number` of `slots`, as layer `layer`; the caller must `copy_tensors` the result."""
        self.move_out_of_slot()
        self.slots, self._slot, self._base = slots, (layer, number), self.length
        self._entered = self.length
        journal, state = self._room()
        taps = self.module.conv_kernel_size
        first = (self.length - taps) % len(journal)
        ends = journal[first : first + taps], journal[: max(0, first + taps - len(journal))]
        if not self.has_previous_state[0]:
            torch._foreach_zero_([*ends, state])
            self._copies = [(self._base, state.clone())]
            return []
        conv: Tensor = self.conv_states[0][0].T  # type: ignore[index]
        both = zip(ends, conv.split([len(rows) for rows in ends]), strict=True)
        # Nothing writes to the layer's own state while it has a slot.
        self._copies = [(self._base, self.recurrent_states[0][0])]  # type: ignore[index]
        return [(state, self._copies[0][1]), *((rows[:, : conv.shape[1]], x) for rows, x in both if len(x))]

    def begin_step(self, count: int) -> tuple[int, int, int, int]:
        """Begin a decode step of `count` tokens; return its row (start, base, upto, slot) of `StepStates.bounds`."""
        start, base, self._base = self.length, self._base, max(self._base, self.length - self._lag)
        if self._base - self._copies[-1][0] > REACH:
            self._copies = [self._copies[-1], (base, self._room()[1].clone())]
        self.length += count
        return start, base, self._base, self._slot[1]

    def undo_failed_step(self, length: int) -> None:
        """Restore the last copy of the recurrent state, after a decode step that began at `length` tokens has failed."""
        self.length = length
        if self.slots is not None and length == self._entered:
            # The layer's own state has not changed since; what is in the slot may not be whole.
            self.slots = None
        elif self.slots is not None:
            self._base, kept = self._copies[-1]  # made before the step ran
            self._room()[1].copy_(kept)

    def move_out_of_slot(self) -> None:
        """Free the slot, if there is one: apply the journal's remaining rows and move the state back to this layer."""
        if self.slots is None:
            return
        journal, state = self._room()
        none, gate = journal[:0], journal.new_empty(0, state.shape[0] * state.shape[2])
        told = torch.tensor([[self.length, self._base, self.length, 0]], device=state.device)
        deltanet_rows(none, gate, *deltanet_weights(self.module), told, journal[None], state[None])
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
        """Record the layer's input `rows` [B, n, E]; a rollback runs them through the layer again."""
        count = rows.shape[1]
        if self._again:
            return
        self.move_out_of_slot()
        if count > REACH:
            # A prompt: there is no way back into it.
            self._marks = []
        else:
            if not self._marks or self.length + count - self._marks[-1].length > REACH:
                self._marks = [*self._marks[-1:], _Mark(*self.checkpoint())]
            self._marks[-1].rows.append(rows.detach())
        self.length += count

    def expand_tree_paths(self, rows: Tensor, branches: TokenTree) -> tuple[Tensor, TreePaths]:
        """Record the next input `rows` [1, n, E] of a draft tree; return the tree's paths as a batch [b, L, E], and the
        cache with which the layer runs them from the state before the tree."""
        self.move_out_of_slot()
        self._tree.append(rows.detach())
        self.length += rows.shape[1]
        paths = TreePaths(self, branches)
        return torch.cat(self._tree, 1)[0, paths.columns], paths

    def accept(self, path: Tensor) -> None:
        """Run the draft tree's accepted rows, at `path` [k], into the recurrent state, and forget the others."""
        rows, self._tree = torch.cat(self._tree, 1), []
        self.length -= rows.shape[1]
        self._run(rows[:, path.to(rows.device)])

    def _run(self, rows: Tensor) -> None:
        cache = self.cache()
        cache.branches = None
        self.module(hidden_states=rows, cache_params=cache, attention_mask=None)

    def set_prompt_length(self, length: int) -> None:
        """Set `length` to the whole prompt's, after a pruner gave the layer fewer rows; forget earlier checkpoints."""
        self.length, self._marks = length, []

    def checkpoint_without_copy(self) -> Mark:
        """Return the length and the recurrent state as `checkpoint` does, but uncopied: the next rows overwrite it."""
        self.move_out_of_slot()
        if not self.has_previous_state[0]:
            return self.length, None
        return self.length, (self.conv_states[0], self.recurrent_states[0])  # type: ignore[return-value]

    def checkpoint(self) -> Mark:
        """Return the length and a copy of the recurrent state, to which `restore` can return at any later time."""
        length, state = self.checkpoint_without_copy()
        return length, state and (state[0].clone(), state[1].clone())

    def crop(self, tokens_to_remove: int) -> None:
        """Roll the state back by `tokens_to_remove` tokens; raises `ModelError` if no checkpoint is old enough."""
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
            copy_tensors([*zip((self.conv_states[0], self.recurrent_states[0]), mark.state, strict=True)])  # type: ignore[list-item]
        if rows.shape[1]:
            self._again = True
            try:
                self._run(rows)
            finally:
                self._again = False

    def prepare_copy(self, other: RecurrentCacheLayer) -> Copies:
        """Make `other`, a new cache layer of this module, a copy but for its states. Return (target, source) of these, for
        `copy_tensors`."""
        self.move_out_of_slot()
        other.length, other.has_previous_state[0] = self.length, self.has_previous_state[0]
        if not self.has_previous_state[0]:
            return []
        other.device, other.dtype = self.device, self.dtype
        other.conv_kernel_size[0] = self.conv_kernel_size[0]
        other.is_conv_states_initialized[0] = other.is_recurrent_states_initialized[0] = True
        held: Any = self.conv_states[0], self.recurrent_states[0]
        other.conv_states[0], other.recurrent_states[0] = made = [torch.empty_like(one) for one in held]
        return [*zip(made, held, strict=True)]

    def restore(self, mark: Mark) -> None:
        copy_tensors(self.prepare_restore(mark))

    def prepare_restore(self, mark: Mark) -> Copies:
        """Set the length to that of the checkpoint `mark`; to restore the state, the caller must `copy_tensors` the result.
        A layer without tensors may take over those of `mark`."""
        self.length, state = mark
        self._marks, self._tree, self.slots = [], [], None
        if state is None:
            super().reset()
            return []
        self.has_previous_state[0] = True
        if not self.is_conv_states_initialized[0]:
            self.lazy_initialization(conv_states=state[0], recurrent_states=state[1])
        return [*zip((self.conv_states[0], self.recurrent_states[0]), state, strict=True)]  # type: ignore[list-item]

    def reset(self) -> None:
        super().reset()
        self.length, self._marks, self._tree, self.slots = 0, [], [], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.move_out_of_slot()
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        for mark in self._marks:
            mark.rows = [rows[beam_idx.to(rows.device)] for rows in mark.rows]
            if mark.state is not None:
                conv, recurrent = (one[beam_idx.to(one.device)] for one in mark.state)
                mark.state = conv, recurrent

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state as transformers does; return old and new inputs [B, C, n], each step contiguous in memory."""
        if self.record_past or not self.has_previous_state[state_idx]:
            return super().update_conv_state(conv_states, state_idx, *args, **kwargs)
        held: Tensor = self.conv_states[state_idx]  # type: ignore[assignment]
        whole = torch.cat([held.mT, conv_states.mT], 1).mT
        held.copy_(whole[..., -held.shape[-1] :])
        return whole

    def get_seq_length(self) -> int:
        return self.length


class StateSlots:
    """The recurrent states of S sequences, in a slot each, for decode steps: for each layer `journals` [S, R, W] of the R
    last rows and `states` [S, H, K, V]. They are reallocated when more sequences come."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self.journals, self.states = list[Tensor](), list[Tensor]()
        self.owners = list[Callable[[], Any]]()  # of each slot the sequence's first layer, or None

    def begin_step(self, layers: Sequence[RecurrentCacheLayer], count: int) -> tuple[int, int, int, int]:
        """Begin a decode step of `count` tokens of the sequence whose cache is `layers`; it gets a slot if it has none.
        Return the numbers that kernels need of its states: its row (start, base, upto, slot) of `StepStates.bounds`."""
        held = [one() for one in self.owners]
        number = held.index(layers[0]) if layers[0] in held else None
        if number is None or any(one.slots is not self for one in layers):
            number = next((n for n, one in enumerate(held) if one is None or one.slots is not self), None)
            number = self._grown() if number is None else number
            self.owners[number] = ref(layers[0])
            made = (one.move_into_slot(self, layer, number) for layer, one in enumerate(layers))
            copy_tensors([pair for some in made for pair in some])
        (told,) = {one.begin_step(count) for one in layers}
        return told

    def journals_and_states(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each layer its (journals, recurrent states) of all slots."""
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
    """Return the weights of a Gated DeltaNet for `deltanet_rows`: convolution, decay, time-step bias, norm weight, eps."""
    own = module.conv1d.weight[:, 0], module.A_log, module.dt_bias, module.norm.weight
    return *own, module.norm.variance_epsilon


def record_input_hook(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a Gated DeltaNet module: record its input in its `RecurrentCacheLayer`; of a draft tree run
    the paths instead. Without `kwargs` (torch omits them for a hook removed while the hooks run) it does nothing."""
    cache = kwargs.get("cache_params")
    layer = None if cache is None else cache.layers[module.layer_idx]
    if not isinstance(layer, RecurrentCacheLayer):
        return None
    layer.cache, rows = ref(cache), args[0] if args else kwargs["hidden_states"]
    if (branches := getattr(cache, "branches", None)) is None:
        layer.record_input_rows(rows)
        return None
    spread, paths = layer.expand_tree_paths(rows, branches)
    return (), {**kwargs, "hidden_states": spread, "cache_params": paths, "attention_mask": None}


def add_input_hooks(hooks: Hooks, modules: Collection[nn.Module]) -> None:
    """Install the hooks `record_input_hook` and `gather_tree_outputs_hook` on Gated DeltaNet `modules`."""
    for module in modules:
        hooks.add_pre_hook(module, record_input_hook)
        hooks.add_hook(module, gather_tree_outputs_hook, with_kwargs=True)


def make_rollback_cache(model: nn.Module, states: Mapping[int, nn.Module]) -> Any:
    """Make a transformers `DynamicCache` for the plain `model` in which the recurrent layers `states` can be rolled back."""
    cache: Any = DynamicCache(config=model.config)  # type: ignore[arg-type]
    cache.states = {number: RecurrentCacheLayer(module) for number, module in states.items()}
    for number, state in cache.states.items():
        cache.layers[number] = state
    heard = ExitStack()
    heard.enter_context(shared_hooks(model, "noted", lambda hooks: add_input_hooks(hooks, states.values())))
    finalize(cache, close_hooks_in_finalizer, heard.close).atexit = False
    return cache


def close_hooks_in_finalizer(close: Callable[[], None]) -> None:
    """Call `close`, which removes shared hooks, from a finalizer. If `hooks_lock` is taken, a new thread calls it: the
    finalizer must not wait, as the lock's holder may wait for an import in which this finalizer runs."""
    if not (lock := install.hooks_lock).acquire(blocking=False):
        start_new_thread(close, ())
        return
    try:
        close()
    finally:
        lock.release()
