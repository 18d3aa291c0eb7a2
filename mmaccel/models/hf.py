"""`ModelAttachment`: the forward methods of an accelerated model, wrapped on the instance.

Nothing global is patched. One attention name is registered with transformers for the process; it serves only models whose
text modules hold our copy of their config. An accelerated model has: that copy, and instance wrappers of `generate`, of
`forward` of the multimodal and of the text model, and of the methods that encode images and videos (modules.py). install.py
installs either all of it or nothing, and removes all of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache

from mmaccel.core.attach import Accelerated
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.attention import PASS, ForwardPass
from mmaccel.core.prefill.prune import NOTE, ForwardPassInfo
from mmaccel.models import modules
from mmaccel.models.attention import (
    ATTENTION,
    Columns,
    KVCache,
    MaxPositionCriteria,
    PackedForwardPass,
    check_forward_arguments,
    packed_sequence_ids,
    register_pass,
    token_chunk_ranges,
    wrap_kv_cache,
)
from mmaccel.models.deltanet import hook_deltanet
from mmaccel.models.install import AttachmentBase, model_lock
from mmaccel.models.outputs import drop_past_key_values, join_chunk_outputs
from mmaccel.models.prompt_layout import bind_args, inputs_after_past, max_positions, slice_inputs
from mmaccel.models.pruning import PrefillTokenPruning
from mmaccel.models.signals import hook_hidden_states


class ModelAttachment(AttachmentBase):
    """A recipe installed on one model: its wrapped `forward` and `generate` methods.

    sequences  token layouts of the transformers caches (`DynamicCache`) in use
    running    per thread, for the current `generate`: the prompt's `layout` with its ids, the `chunk` size, the `deadline`
    """

    def __init__(self, owner: Accelerated, generate: Callable[..., Any], draft_times: Any) -> None:
        """`generate` is given this and the arguments of the model's own; `draft_times` are its `DecodeTimings`."""
        model, family = owner.model, owner.adapter
        self.multimodal, self.text = family.multimodal(model), family.text_model(model)
        super().__init__(model, model_lock(self.text))
        self.family: Any = family
        self.owner, self._generate = owner, generate
        self.depth = owner.view.geometry.layers
        self.sequences: WeakKeyDictionary[Cache, Columns] = WeakKeyDictionary()
        self.running = threading.local()
        self.draft_times = draft_times
        self.opened: Any = torch.compiler.disable(owner.track_kv_state)
        _untraced()
        self.pruning: PrefillTokenPruning | None = None
        self.attach(self._lay)

    def _lay(self) -> None:
        model, family, recipe, hooks = self.model, self.family, self.owner.recipe, self.hooks
        # First what keeps calls waiting, then, once the others have ended, all that these would meet. The plain methods are
        # noted before the wrappers are there, so that another thread finds them.
        self.generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
        self.multimodal_forward = self.multimodal.forward
        hooks.wrap(model, "generate", self._call, functools.partial(self._generate, self))
        hooks.wrap(self.multimodal, "forward", self._call, self._multimodal_forward)
        self.forbid_copying(model, self.multimodal, self.text)
        self.gate.wait_for_running_calls("accelerate", (model, self.multimodal, self.text))
        hooks.callback(self._rope_back, self.multimodal.__dict__.get("rope_deltas"))
        self.shared: Any = self.text.config
        hooks.set_attention(
            self.text.modules(), self.shared, ATTENTION, **family.attention_layer_indices(model)
        )
        self.states = family.recurrent_layers(model)
        if self.states:
            hook_deltanet(hooks, self.states.values())
        # Inside a pruner that listens to the tower: it hears of all frames at once.
        modules.install_batched_tower(hooks, family, model, True, self.owner.context, self.generate_time_left)
        if recipe.prune is not None and recipe.kv.sequences:
            self.pruning = PrefillTokenPruning(hooks, model, family, recipe.prune, self.depth)
            self._pruned: Any = torch.compiler.disable(self.pruning.forward)
        if recipe.draft.pruner is not None:
            hook_hidden_states(hooks, family.attended_layers(model), recipe.draft.pruner)
        modules.process_in_token_chunks(hooks, modules.pointwise_modules(model, family), family)
        turn = family.rotate_function, modules.apply_rope_in_place
        modules.rebind_function(hooks, family.attentions(model), *turn)
        self.forward = self.text.forward
        if self.owner.context is not None:
            self.forward = self.owner.context.wrap_forward(self.forward, slice_inputs, self.states)
        hooks.wrap(self.text, "forward", self._call, self._text_forward)
        hooks.callback(self.owner.mark_detached)
        self.owner.mark_attached()

    def _rope_back(self, before: Any) -> None:
        if "rope_deltas" in self.multimodal.__dict__:
            self.multimodal.__dict__["rope_deltas"] = before

    def open_kv_cache(self) -> KVCache:
        """Open a new KV cache with the recipe's KV policy."""
        cache: KVCache = wrap_kv_cache(self.model, self.family, self.owner.open_kv_state())
        self.opened(cache.state, cache)
        return cache

    def _multimodal_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The multimodal model's forward: see `_noted`."""
        return self.multimodal_forward(**self._noted(args, kwargs))

    def _noted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the multimodal model's forward by name: with layout of the new columns, positions, cache."""
        kwargs = bind_args(type(self.multimodal).forward.__get__(self.multimodal), args, kwargs)
        note: ForwardPassInfo = kwargs.pop(NOTE, None) or ForwardPassInfo()
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if cache is None and self._caches(kwargs):
            cache = kwargs["past_key_values"] = self.open_kv_cache()
        if ids is not None:
            past = cache.get_seq_length() if cache is not None else 0
            layout = self._promised(ids, past) or self.family.layout(self.model, kwargs)
            known = self.cached_columns(cache)
            if kwargs.get("position_ids") is None and past == 0:
                kwargs["position_ids"] = self.family.positions(self.model, kwargs)
            elif kwargs.get("position_ids") is None and known is not None:
                kwargs["position_ids"] = self._continued(known, past, layout, kwargs)
            note = replace(note, layout=layout)
        return {NOTE: self.family.with_pass_info(self.model, kwargs, note), **kwargs}

    def _caches(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a forward pass keeps a cache: as `use_cache` says, else as the model's config says."""
        asked = kwargs.get("use_cache")
        return (asked if asked is not None else getattr(self.text.config, "use_cache", None)) is not False

    def cached_columns(self, cache: Cache | None) -> Columns | None:
        """Return layout and positions of the tokens in `cache`; None without a cache, or if its tokens are unknown."""
        if isinstance(cache, KVCache):
            return cache.sequence
        return self.sequences.get(cache) if cache is not None else None

    def get_generate_option(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        """Return `generate`'s argument `name`: of `kwargs`, else its generation config, else the model's; or None."""
        if name in kwargs:
            return kwargs[name]
        given = getattr(kwargs.get("generation_config"), name, None)
        return given if given is not None else getattr(self.model.generation_config, name, None)

    def prepare_layout(self, inputs: Mapping[str, Any], past: int = 0) -> None:
        """Compute and store the prompt's token layout for the coming `generate` call, after `past` cached tokens."""
        new = inputs_after_past(inputs, past) if past else inputs
        self.running.layout = past, new["input_ids"], self.family.layout(self.model, new)

    def _promised(self, ids: Tensor, past: int) -> TokenLayout | None:
        """The layout read when `generate` was called, for each beam or sample, and with guesses behind it: by now pixels and
        grids may be gone."""
        promised: tuple[int, Tensor, TokenLayout] | None = getattr(self.running, "layout", None)
        if promised is None or promised[0] != past:
            return None
        _, prompt, layout = promised
        times, more = ids.shape[0] // layout.batch, ids.shape[1] - layout.length
        if more < 0 or ids.shape[0] % layout.batch:
            return None
        same = torch.equal(prompt.repeat_interleave(times, 0), ids[:, : layout.length])
        return layout.repeat(times).extend(more) if same else None

    def _continued(self, known: Columns, past: int, layout: TokenLayout, kwargs: Mapping[str, Any]) -> Tensor:
        """The positions of new columns of `layout`, after `past` known ones."""
        held = known.layout.select_tokens(slice(0, past))
        start = held.position.amax(1, keepdim=True) + held.valid.any(1, keepdim=True).long() + known.delta
        if bool((layout.modality != 0).any()):
            fresh = {k: v for k, v in kwargs.items() if k != "attention_mask"}
            return self.family.positions(self.model, fresh) + start
        new = layout.position
        return (new.expand(3, -1, -1) if self.family.mrope else new) + start

    def limit_to_max_positions(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add to the arguments of `generate` a stopping criterion at the model's last position, if it can be reached. Raises
        `ModelError` for a prompt that leaves no position."""
        ids, most = kwargs.get("input_ids"), max_positions(self.text.config)
        cache = kwargs.get("past_key_values")
        past, known = 0 if cache is None else cache.get_seq_length(), self.cached_columns(cache)
        if not isinstance(ids, Tensor) or most is None:
            return kwargs
        if not past:
            positions = self.family.positions(self.model, kwargs)
        elif known is None or known.layout.batch != ids.shape[0] or ids.shape[1] <= past:
            return kwargs
        else:
            new = inputs_after_past(kwargs, past)
            positions = self._continued(known, past, self.family.layout(self.model, new), new)
            if self.family.mrope and kwargs.get("position_ids") is None:
                # transformers goes on from the last prompt that it read, which may have been another.
                kwargs = {**kwargs, "position_ids": positions}
        # An answer goes on from the last column, which after a long video is not the largest position.
        last = positions[..., -1] if positions.ndim == 2 else positions[..., -1].amax(0)
        top, taken = int(last.max()), int(positions.max()) + 1
        if top + 1 >= most or taken > most:
            raise ModelError(
                f"input_ids: the prompt takes {taken} positions of the model's {most} (max_position_embeddings), which "
                "leaves none for an answer; give fewer frames or a shorter text."
            )
        config = kwargs.get("generation_config") or self.model.generation_config
        count = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
        if count is not None and top + count < most:
            return dict(kwargs)
        padded = any(
            kwargs.get(name) is not None or getattr(config, name, None) is not None
            for name in ("pad_token_id", "eos_token_id")
        )
        end = MaxPositionCriteria(ids.shape[1] + most - 1 - last.cpu(), most, padded)
        given = list(kwargs.get("stopping_criteria") or [])
        return {**kwargs, "stopping_criteria": StoppingCriteriaList([*given, end])}

    def _text_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The text model's forward: builds the pass, and goes over long prompts in chunks when the recipe says so."""
        run, kwargs, lent = self._begun(args, kwargs)
        if isinstance(run, PackedForwardPass):
            return self._pass(run, kwargs)
        out = self._go(run, kwargs) if self.pruning is None else self._pruned(run, kwargs, self._go)
        return drop_past_key_values(out) if lent else out

    def _begun(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ForwardPass | PackedForwardPass, dict[str, Any], bool]:
        """The pass of a call of the text model, its arguments by name, and whether its memory is not to be returned."""
        kwargs = bind_args(self.forward, args, kwargs)
        recipe, mask = self.owner.recipe, kwargs.pop("attention_mask", None)
        note: ForwardPassInfo = kwargs.pop(NOTE, None) or ForwardPassInfo()
        if isinstance(mask, dict) and all(one is None for one in mask.values()):
            mask = note.mask
        if getattr(self.text.config, "_attn_implementation", None) != ATTENTION:
            raise ModelError(
                "attn_implementation: it was set while a recipe is attached; detach the recipe, set it, and attach again."
            )
        if getattr(self.shared, "output_attentions", False):
            kwargs.setdefault("output_attentions", True)
        check_forward_arguments(recipe, kwargs, self.family.layers(self.model))
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim != 2):
            raise ModelError(
                "attention_mask: an accelerated model takes a mask of shape [batch, length]; static caches and 4-D masks "
                "lose the padding, leave cache_implementation out."
            )
        entry = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        (batch, count), device = entry.shape[:2], entry.device
        cache = kwargs.get("past_key_values")
        start = cache.get_seq_length() if cache is not None else 0

        def text(columns: int, valid: Tensor | None) -> TokenLayout:
            rows = torch.zeros(batch, columns, dtype=torch.long, device=device)
            return TokenLayout.build(rows, valid=valid)

        new = note.layout
        if new is None or new.length != count:
            new = text(count, None if mask is None else mask[:, -count:])
        lent = cache is None
        packed = packed_sequence_ids(kwargs, mask, self.family.mrope) if lent else None
        if not recipe.kv.exact or self.pruning is not None or self.owner.context is not None:
            cache = self._own(cache, kwargs, new, packed)
        known = self.cached_columns(cache) if start else None
        if start and known is None:
            if isinstance(cache, KVCache):
                raise ModelError(
                    "past_key_values: this cache was filled by another accelerated model; start from a new one."
                )
            valid = None if mask is None or mask.shape[1] < start + count else mask[:, :start]
            known = Columns(text(start, valid), torch.zeros(batch, 1, dtype=torch.long, device=device))
        layout = new if known is None else known.layout.select_tokens(slice(0, start)).append(new)
        if cache is not None:
            positions = kwargs.get("position_ids")
            # After a video text goes on elsewhere than before.
            moves = known is None or (positions is not None and bool((new.modality != 0).any()))
            delta = self._delta(positions, layout) if known is None or moves else known.delta
            if isinstance(cache, KVCache):
                cache.sequence = Columns(layout, delta)
            else:
                self.sequences[cache] = Columns(layout, delta)
        run = ForwardPass(
            self.owner.attention,
            state=cache.state if isinstance(cache, KVCache) else None,
            layout=layout,
            start=start,
            later=start > 0,
            prefill=(reads := not note.verify and (count > 1 or start == 0)),
            check=self.owner.seat.check if reads and self.owner.seat is not None else None,
            branches=note.branches,
            probes=note.probes,
            images=note.images,
            last_only=note.last_only,
        )
        if start == 0 or self.owner.attention.meter.awaits_first_pass:
            self.owner.attention.meter.begin_pass(int(new.valid.sum()), start, new.video())
        if self.states and mask is not None:
            kwargs["attention_mask"] = mask
        if packed is not None:
            return PackedForwardPass.split_by_sequence(run, packed), kwargs, False
        return run, kwargs, lent and not self._caches(kwargs)

    def _own(self, cache: Any, kwargs: dict[str, Any], new: TokenLayout, packed: Tensor | None) -> KVCache:
        """A memory that forgets, or whose layers hold less than the prompt, takes in every pass; it needs its own cache."""
        prune, kv = self.owner.recipe.prune, self.owner.recipe.kv
        name = f"kv {kv.name!r}" if prune is None else f"prune {prune.name!r}"
        if cache is None:
            cache = kwargs["past_key_values"] = self.open_kv_cache()
        if not isinstance(cache, KVCache):
            raise ModelError(f"past_key_values: {name} keeps a cache of its own; leave past_key_values out.")
        if packed is not None:
            raise ModelError(
                f"position_ids: they restart, and {name} does not support packed sequences; give them one by one."
            )
        if new.has_padding:
            raise ModelError(
                f"attention_mask: {name} counts columns, so padding would take the place of tokens; "
                "give prompts of one length, or one prompt at a time."
            )
        return cache

    @staticmethod
    def _delta(positions: Tensor | None, layout: TokenLayout) -> Tensor:
        """[B, 1]: what to add to a text column's rank to get its rotary position, once the prompt has been read."""
        end = layout.position.amax(1, keepdim=True) + 1
        if positions is None:
            return torch.zeros_like(end)
        positions = (positions[-3:].amax(0) if positions.ndim == 3 else positions).to(end.device)
        if positions.shape[1] == layout.length:  # a first prompt: as transformers has it
            return positions.amax(1, keepdim=True) + 1 - end
        last = layout.valid[:, -positions.shape[1] :].long().cumsum(1).argmax(1, keepdim=True)
        return positions.gather(1, last.to(end.device)) + 1 - end

    def _pass(self, run: ForwardPass | PackedForwardPass, kwargs: dict[str, Any]) -> Any:
        fed = self._fed(run, kwargs)
        try:
            return self.forward(**{PASS: run}, **kwargs)
        finally:
            self._left(fed)

    def _fed(self, run: ForwardPass | PackedForwardPass, kwargs: dict[str, Any]) -> KVCache | None:
        """The memory of a pass, if it is ours, whose layers may be fed until `_left`."""
        cache, ticket = kwargs.get("past_key_values"), register_pass(run)
        if not isinstance(cache, KVCache):
            return None
        cache.door.open, cache.door.ticket = True, ticket
        return cache

    def _left(self, cache: KVCache | None) -> None:
        if cache is not None:
            cache.door.open, cache.door.ticket = False, None

    def _go(self, run: ForwardPass, kwargs: dict[str, Any]) -> Any:
        """Run the text model over the new columns of `run`, in chunks where they are many."""
        count = run.layout.length - run.start
        chunk = getattr(self.running, "chunk", None) or self.owner.recipe.chunk
        if chunk is None or not run.prefill or count <= chunk or kwargs.get("output_attentions"):
            return self._pass(run, kwargs)
        if own := kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = self.open_kv_cache()
            run = replace(run, state=kwargs["past_key_values"].state)
        outputs = (self._pass(*self._piece(run, kwargs, *part)) for part in token_chunk_ranges(run, chunk))
        hidden = kwargs.get("output_hidden_states", getattr(self.shared, "output_hidden_states", False))
        last_only = run.last_only and not hidden and self.pruning is None  # which puts rows into their places
        whole = join_chunk_outputs(outputs, chunk, last_only)
        return drop_past_key_values(whole) if own else whole

    def _piece(
        self, run: ForwardPass, kwargs: dict[str, Any], begin: int, end: int
    ) -> tuple[ForwardPass, dict[str, Any]]:
        """The pass over new columns ``begin .. end`` of `run`, and its arguments; raises `CallEnded` out of time."""
        self.generate_time_left()
        return run.slice_new_columns(begin, end), slice_inputs(kwargs, slice(begin, end), run.start)

    def generate_time_left(self) -> float | None:
        """Return the seconds left of this thread's `generate` call, None without a limit; raises `CallEnded` after the
        limit."""
        deadline: Deadline | None = getattr(self.running, "deadline", None)
        if deadline is None:
            return None
        deadline.check()
        return deadline.seconds_left()


@functools.cache
def _untraced() -> None:
    """Keep torch.compile out of our own frames: it goes on in the plain methods that they call, so that a pass of the text
    model is one graph."""
    from torch._dynamo.decorators import skip  # here, for it loads the compiler, and Triton with it

    ours = (vars(ModelAttachment)[name] for name in ("_multimodal_forward", "_text_forward", "_go", "_pass"))
    for one in (AttachmentBase._call, modules._encode, *ours):
        skip(one)
    for name in ("_noted", "_begun", "_piece", "_fed", "_left"):
        setattr(ModelAttachment, name, torch.compiler.disable(vars(ModelAttachment)[name]))
