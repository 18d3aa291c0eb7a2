"""The transformers side of our attention and cache: the attention function that accelerated layers call, checks of the
arguments of `forward`, `KVCache` (a `KVState` as a transformers cache), and the limit on an answer's length.

Under torch.compile a layer's attention and its cache write are custom operators, since planning is Python code that should
not be traced and a `ForwardPass` is not a tensor. Each pass therefore has a ticket, a tensor that holds its number, by which
the operators find it at run time. The text model's forward pass is then one graph, for any number of layers and any length.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, StoppingCriteria
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmaccel.core.adapter import Columns as Columns
from mmaccel.core.errors import ModelError, warn
from mmaccel.core.memory.kv import KVState, KVView
from mmaccel.core.prefill.attention import PASS, ForwardPass
from mmaccel.core.recipe import Recipe
from mmaccel.models.packed import PackedForwardPass
from mmaccel.models.prompt_layout import LAYERS

ATTENTION = "mmaccel"
"""The name of `accelerated_attention` among transformers' attention functions."""

PLAIN = "mmaccel_plain_attention"
"""The attribute of a config under which it keeps the model's own config, for calls beside a pass of a stream."""

_HOST = (torch.Tag.cudagraph_unsafe,)  # a CUDA graph would replay what they decide on the host
_passes: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()


def accelerated_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function registered with transformers: computes a layer by the `ForwardPass` in the keyword `PASS`.

    Shapes are as in `ForwardPass.attend`, but the output is [B, n, H, D]; weights follow if `output_attentions` is set.
    Without `PASS` (another thread's call during a stream's pass) the attention named by the model's config runs.
    """
    run: ForwardPass | PackedForwardPass | None = kwargs.pop(PASS, None)
    if run is None:
        return _plain(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    gives = kwargs.get("output_attentions") and not getattr(run, "stream", False)
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    layer: Any = module.layer_idx
    layer = getattr(module.config, LAYERS, {}).get(layer, layer)  # type: ignore[union-attr]
    asks = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if torch.compiler.is_compiling() and run.ticket is not None and not gives and not asks:
        return attend_layer(run.ticket, layer, query, key, value, scale), None
    # Whoever plans and attends chooses the types: under autocast they come mixed, and are not to be changed on the way.
    mixed = torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if mixed else nullcontext():
        if asks:
            out = ForwardOnlyAttention.apply(run, layer, query, key, value, scale)  # type: ignore[no-untyped-call]
        else:
            out = run.attend(layer, query, key, value, scale)
        # Of a question to a stream: what follows in the layer takes as long.
        if isinstance(run, ForwardPass) and run.stream and run.later and run.check is not None:
            run.check()
        weights = attention_weights(run, layer, query, key, value, scale) if gives else None
    return out.transpose(1, 2).contiguous(), weights


AttentionInterface.register(ATTENTION, accelerated_attention)


@torch.library.custom_op("mmaccel::layer_attend", mutates_args=(), tags=_HOST)
def attend_layer(
    ticket: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Custom operator for torch.compile: compute the attention [B, n, H, D] of one layer by the pass that holds `ticket`."""
    out = _passes[int(ticket)].attend(layer, query, key, value, scale)
    return out.transpose(1, 2).contiguous()


@attend_layer.register_fake
def _(ticket: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("mmaccel::layer_append", mutates_args=("ticket",), tags=_HOST)
def append_layer_kv(ticket: Tensor, layer: int, key: Tensor, value: Tensor) -> None:
    """Custom operator for torch.compile: append keys and values [B, G, n, D] to the memory of the pass that holds `ticket`.
    It declares that it mutates `ticket`, so the compiler neither drops it nor moves `attend_layer` before it."""
    _passes[int(ticket)].state.append(layer, key, value)


@append_layer_kv.register_fake
def _(ticket: Tensor, layer: int, key: Tensor, value: Tensor) -> None:
    return None


def register_pass(run: Any) -> Tensor:
    """Give the pass `run` a new ticket: a scalar tensor by which a compiled layer's operators find it while it is alive."""
    number = next(_numbers)
    _passes[number] = run
    ticket = torch.tensor(number, device="cpu")
    object.__setattr__(run, "ticket", ticket)
    return ticket


def _plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The attention of a layer without our hooks, for a call beside a pass of a stream.

    It is given a module that shares all that `module` has, but holds the model's own config: flash attention reads its
    variant from there.
    """
    # The pass may end between the call of the layer and here.
    shared = getattr(module.config, PLAIN, module.config)
    name = shared._attn_implementation  # type: ignore[union-attr]
    if name == ATTENTION:
        raise ModelError(
            "a layer of an accelerated model was called by itself; call the model, or detach the recipe first."
        )
    stand_in, before = object.__new__(type(module)), {**module.__dict__, "config": shared}
    stand_in.__dict__ = dict(before)
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    out = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)(stand_in, *args, **kwargs)  # type: ignore[arg-type]
    # What the function set on the module is set on the layer.
    new = {name: x for name, x in stand_in.__dict__.items() if name not in before or before[name] is not x}
    module.__dict__.update(new)
    return out


class ForwardOnlyAttention(torch.autograd.Function):
    """Autograd function for attention while gradients are enabled: forward works, backward raises `ModelError`."""

    @staticmethod
    def forward(ctx: Any, run: ForwardPass | PackedForwardPass, *given: Any) -> Tensor:
        return run.attend(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ModelError(
            "backward: the attention of an accelerated model has no gradient; detach the recipe to train."
        )


@torch.no_grad()
def attention_weights(
    run: ForwardPass | PackedForwardPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Compute the attention weights [B, H, n, N] of `layer` in the pass `run`, in the dtype of the values.

    The other arguments are as in `ForwardPass.attend`. Rows of padding are zero; transformers spreads their weight evenly.
    """
    if isinstance(run, PackedForwardPass):
        whole = value.new_zeros(*query.shape[:3], key.shape[2])
        for b, columns, one in run.runs:
            q, k, v = (x[b : b + 1, :, columns] for x in (query, key, value))
            whole[b, :, columns, columns] = attention_weights(one, layer, q, k, v, scale)[0]
        return whole
    if run.state is None:
        view = KVView(key, value, window=run.config.sliding.get(layer))
    else:
        view = run.state.view(layer, query)
    key, query = view.key, query if view.query is None else view.query
    rows = query.shape[2]
    at = torch.arange(key.shape[2], device=query.device) if view.column is None else view.column
    back = at[-rows:, None] - at
    unseen = back < 0 if view.window is None else (back < 0) | (back >= view.window)
    if run.layout.has_padding:
        valid = run.layout.valid.to(query.device)[:, at]
        unseen = (unseen | ~valid[:, None] | ~valid[:, -rows:, None])[:, None]
    if (
        run.images is not None
        and (images := run.images.find_new_images(layer, run.start, run.layout)) is not None
    ):
        unseen = images.unmask_image_pairs(unseen.expand(len(query), 1, rows, -1), at)
    heads = query.to(value.dtype).unflatten(1, (key.shape[1], -1))
    scores = (heads @ key.to(value.dtype)[:, :, None].transpose(-1, -2)).flatten(1, 2) * scale
    weights = scores.float().masked_fill(unseen, float("-inf")).softmax(-1)
    return weights.nan_to_num(0.0).to(value.dtype)


def check_forward_arguments(recipe: Recipe, kwargs: Mapping[str, Any], layers: nn.ModuleList) -> None:
    """Raise `ModelError` for an argument of `forward` that `recipe` does not support, or if gradient checkpointing is on (it
    runs layers without the cache)."""
    if any(getattr(layer, "gradient_checkpointing", False) and layer.training for layer in layers):
        raise ModelError(
            "gradient_checkpointing: an accelerated model is not trained, and its layers run without a cache under it; call "
            "model.eval(), or detach the recipe to train."
        )
    if kwargs.get("is_causal") is False:
        raise ModelError(
            "is_causal: the attention of an accelerated model is causal; leave it out, or detach the recipe."
        )
    if not kwargs.get("output_attentions"):
        return
    for kind, policy, has_weights in (
        ("sparse", recipe.sparse, recipe.sparse.dense),
        ("kv", recipe.kv, recipe.kv.exact),
        ("prune", recipe.prune, recipe.prune is None),
    ):
        if not has_weights:
            raise ModelError(
                f"output_attentions: {kind} {policy.name!r} never holds the attention weights; ask for them under the "  # type: ignore[union-attr]
                "recipe 'dense'."
            )


def packed_sequence_ids(kwargs: Mapping[str, Any], mask: Tensor | None, mrope: bool) -> Tensor | None:
    """Return the sequence number [B, S] of each token of packed sequences in a forward pass without cache; None: not packed.

    Packing is detected as in transformers: no mask, and positions that restart. Under M-RoPE the text positions come before
    the three coordinates in `position_ids` [4, B, S] of packed sequences.
    """
    positions: Tensor | None = kwargs.get("position_ids")
    if mask is not None or positions is None:
        return None
    if mrope and (positions.ndim != 3 or positions.shape[0] != 4):
        return None
    positions = positions[0] if mrope else positions
    return find_packed_sequence_indices(positions)


def token_chunk_ranges(run: ForwardPass, chunk: int) -> Iterator[tuple[int, int]]:
    """Split the new tokens of `run` into chunks (begin, end) of `chunk` tokens. A chunk that would split an image whose
    tokens attend to each other is extended to the image's end."""
    begin, count = 0, run.layout.length - run.start
    while begin < count:
        end = begin + chunk
        if run.images is not None:
            end = run.images.next_chunk_boundary(run.start + end) - run.start
        yield begin, (begin := min(end, count))


class _Door:
    """Whether the layers may be fed. Shared with the layers: one that knew its cache would keep the state's memory until
    Python looks for cycles. (A class, for compilers break off at a `SimpleNamespace`.)"""

    open = False
    ticket: Tensor | None = None


class _Layer(CacheLayerMixin):
    """One layer of a `KVState`, as transformers wants to see it."""

    is_sliding, is_croppable, is_compileable = False, True, False

    def __init__(self, state: KVState, door: _Door, index: int) -> None:
        super().__init__()
        self.state, self.door, self.index = state, door, index
        self.is_initialized = True

    # [B, G, n, D], where the layer holds all columns; else None. transformers begins by setting both to None.
    keys = property(lambda self: self._whole(0), lambda self, _: None)  # type: ignore[assignment]
    values = property(lambda self: self._whole(1), lambda self, _: None)  # type: ignore[assignment]

    def _whole(self, which: int) -> Tensor | None:
        state = self.state
        if not getattr(self, "is_initialized", False) or not 0 < state.length() == state.held_columns():
            return None
        view = state.view(self.index, torch.empty(0, 0, 2, 0))
        return (view.key, view.value)[which] if view.key.shape[2] == state.length() else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.door.open:
            raise ModelError(
                "past_key_values: this cache belongs to an accelerated model that is detached, or to another one; "
                "start from a new cache."
            )
        if torch.compiler.is_compiling() and self.door.ticket is not None:
            append_layer_kv(self.door.ticket, self.index, key_states, value_states)
        else:
            self.state.append(self.index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.state.length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.length() + int(query_length), 0

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):
    """A transformers `Cache` that stores tokens in a `KVState`; only the accelerated model that opened it can use it."""

    def __init__(self, state: KVState, layers: int, states: Mapping[int, Any] | None = None) -> None:
        """`layers` of attention; and `states`, the `recurrent.RecurrentCacheLayer` of each other layer by its number."""
        self.state, self.states = state, states or {}
        state.running = (*self.states.values(),)
        self.door, self.read_sparsely = _Door(), False  # whether a pattern ran in a call of `generate` on it
        self.sequence: Columns | None = None
        own = iter([_Layer(state, self.door, index) for index in range(layers)])
        count = layers + len(self.states)
        super().__init__(layers=[self.states.get(n) or next(own) for n in range(count)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.state.length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.state.length() + int(query_length), 0

    @contextmanager
    def allow_append(self, ticket: Tensor | None = None) -> Iterator[None]:
        """Context in which the model's layers may append to this cache; outside of it they raise `ModelError`. Compiled
        layers need the `ticket` of the pass that appends (`register_pass`)."""
        self.door.open, self.door.ticket = True, ticket
        try:
            yield
        finally:
            self.door.open, self.door.ticket = False, None

    def crop(self, max_length: int) -> None:
        """Roll back the cache: a negative `max_length` removes that many tokens, a positive one is the length to keep."""
        count = int(max_length)
        if count:
            held = self.state.length()
            length = count if count > 0 else held + count
            for one in self.states.values():
                one.crop(length - held)
            self.state.truncate(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the batch rows `beam_idx` [B'] of keys, values and token layout, for beam search."""
        self.state.select_sequences(beam_idx)
        for one in self.states.values():
            one.reorder_cache(beam_idx)
        if (known := self.sequence) is not None:
            self.sequence = Columns(known.layout.select_sequences(beam_idx), known.delta[beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if (known := self.sequence) is not None:
            rows = torch.arange(known.layout.batch, device=known.layout.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def reset(self) -> None:
        self.sequence = None
        self.state.reset()
        for one in self.states.values():
            one.reset()


def wrap_kv_cache(model: nn.Module, family: Any, state: KVState | None = None) -> Any:
    """Wrap `state` as a transformers cache for `model`; without `state`, make a plain one that can be rolled back."""
    states, layers = family.recurrent_layers(model), family.geometry(model).layers
    if not states:
        return DynamicCache() if state is None else KVCache(state, layers)
    from mmaccel.models.recurrent import RecurrentCacheLayer, make_rollback_cache

    if state is None:
        return make_rollback_cache(model, states)
    return KVCache(state, layers, {number: RecurrentCacheLayer(module) for number, module in states.items()})


class MaxPositionCriteria(StoppingCriteria):
    """Stopping criterion: ends sequence b at `ends`[b] tokens, where the model's positions run out, and warns once.

    padded  whether there is a padding token to fill ended sequences with; without one, and without an end-of-text token, an
            ended sequence goes on until the whole batch ends
    """

    def __init__(self, ends: Tensor, most: int, padded: bool) -> None:
        self._ends, self._most, self._warned = ends, most, False
        if padded:
            # By this name transformers knows a criterion after which a sequence is padded.
            self.eos_token_id = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # Beams and samples of a prompt stand next to each other.
        ends = self._ends.repeat_interleave(input_ids.shape[0] // len(self._ends))
        over = input_ids.shape[1] >= ends
        if not self._warned and bool(over.any()):
            self._warned = True
            warn(
                f"max_new_tokens: the model has {self._most} positions (max_position_embeddings), and the answer ends with "
                "them; give a shorter prompt for a longer answer."
            )
        return over.to(input_ids.device)
