"""`accelerate`: attaches a recipe to a model; `Accelerated`, the handle it returns; and the interfaces of model families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn

from mmaccel.backends import select
from mmaccel.core.adapter import ConfigOnlyModel, ModelAdapter, ModelView, Runner, TokenTree, unwrap
from mmaccel.core.errors import ModelError, RecipeError, nearest_name_hint, quoted
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.kv import KVState, StreamState
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.core.prefill.attention import AttentionConfig, ForwardPass
from mmaccel.core.prefill.prune import check_pruning_stages
from mmaccel.core.prefill.sparse import choose_backend
from mmaccel.core.recipe import Recipe, check_generate
from mmaccel.core.registry import registry
from mmaccel.core.report import Meter, Report
from mmaccel.core.streams.fair_lock import FairLock
from mmaccel.core.streams.parts import Moment, Question, RunningStates, TokenChoice
from mmaccel.core.streams.sources import Clip

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mmaccel.core.decoding.batch import BatchSlot
    from mmaccel.core.prefill.context import ContextGroup

Passes = Sequence[tuple[ForwardPass, int, bool]]
# Weak on both sides: what is attached is kept alive by the model it is laid through.
_attached: WeakKeyDictionary[nn.Module, ref[Accelerated]] = WeakKeyDictionary()


class StreamModel(ABC):
    """What a video stream needs of a model: features of frames, embeddings, rotary positions, forward passes, logits.

    It keeps nothing on the model between calls. `turns` is the lock of the streams that share a model. A unit (one step of
    time) is `frames_per_unit` frames of P tokens. Layer n is on ``layer_devices[n]``. E hidden size, V vocabulary.
    """

    view: ModelView
    frames_per_unit: int
    dtype: torch.dtype
    device: torch.device
    layer_devices: list[torch.device]
    turns: FairLock
    can_batch_answers: bool = False  # whether `run_batched_passes` runs answers
    batch_key: Hashable | None = None
    """What models have alike whose units `run_batched_passes` runs as one batch; None: it runs none."""
    text_around_unit: tuple[int, int] = (0, 0)  # tokens that `embed_units` puts before and behind a unit's
    pass_buffers: Callable[..., Any] = staticmethod(lambda *_: None)  # what replays a pass of units, if any
    warm_up_decoding: Callable[[StreamState, RunningStates | None], Any] = staticmethod(lambda *_: None)
    """Called before an answer's first token: does what its first decode step would else do once (capture CUDA graphs)."""
    pruned_per_unit: int | None = None  # tokens of a unit that the recipe's pruner drops before layer 0

    @cached_property
    def attention(self) -> AttentionConfig:
        """The `AttentionConfig` of the layers; dense attention unless a subclass sets another."""
        return AttentionConfig(Recipe(), "auto", None)

    def accepts_frames(self, frames: Tensor, size: tuple[int, int]) -> bool:
        """Return whether frames [T, 3, H, W] enter the vision tower at the same size as frames of `size` (height, width)."""
        return True

    @abstractmethod
    def features(self, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the visual features [n, P, E] of frames [T, 3, H, W], first resized to `size` unless `accepts_frames`
        is true of them, and features [m, E] of the m tokens that the model puts at the end of every video."""

    def resize_frames(self, frames: Tensor, size: tuple[int, int]) -> Tensor:
        """Return `frames` [T, 3, H, W] resized to `size` (height, width)."""
        return frames

    def embed_units(self, features: Tensor, moments: Sequence[Moment]) -> Tensor:
        """Return the first layer's input [n, P, E] for n units (frames) with visual `features` [n, F, E]: the features, and
        the embeddings of text around them, such as a time stamp. Some models need a last dimension above E: it also holds
        features for later layers."""
        return features

    @abstractmethod
    def head_ids(self) -> Tensor:
        """Return the token ids [h] of the prompt before the video."""

    def head_embeds(self) -> Tensor:
        """Return the input embeddings [h, E] of the prompt before the video."""
        return self.embed_tokens(self.head_ids())

    @abstractmethod
    def make_question(self, text: Any) -> Question:
        """Return the `Question` that asks `text` after the video. `text`: a text, messages, or ids [1, S] of a prompt."""

    @abstractmethod
    def position_ids(self, size: tuple[int, int], fps: float | None) -> PositionIds:
        """Return the rotary positions of a stream of frames of `size` (height, width) at `fps` (None: unknown)."""

    @abstractmethod
    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Return the language model's input embeddings [n, E] of text token ids [n]."""

    @abstractmethod
    def run_layers(
        self,
        state: StreamState,
        embeds: Tensor,
        hidden: bool = False,
        few: bool = False,
        check: Callable[[], None] | None = None,
        branches: TokenTree | None = None,
        meter: Meter | None = None,
        input_hooks: Mapping[int, Callable[[Tensor], None]] | None = None,
        running: RunningStates | None = None,
    ) -> Tensor:
        """Run new tokens `embeds` [n, E] through all layers, with `state` as KV memory; return final states [n, E] if `few`.

        `state` gets keys and queries before RoPE, and with `hidden` each layer's input. `few`: the tokens are of a question
        or an answer (a tree with `branches`), and fused kernels may compute them. `check` is called at each layer of a long
        pass; its error aborts the pass. `meter` counts query-key pairs. `input_hooks[layer]` gets that layer's input [1, n,
        E]; the key equal to the number of layers gets the last layer's output. `running` are recurrent states.
        """

    def run_batched_passes(self, passes: Passes, embeds: Tensor, units: bool = False) -> Any:
        """Run one pass of each of several streams as one batch: passes of answers or, with `units`, of frames. `passes` has
        for each stream its pass, number of rows, and `hidden` (see `run_layers`); `embeds` are the rows of all. Returns the
        final hidden states of all rows, and the errors of passes that failed, by index in `passes`."""
        raise ModelError("run_batched_passes: this model cannot batch several streams; run them one by one.")

    def new_running_states(self) -> RunningStates | None:
        """Return fresh recurrent states for a stream, to be passed to `run_layers`; None if no layer is recurrent."""
        return None

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, V] of final hidden states [n, E]."""


class StreamAdapter(StreamModel):
    """A `StreamModel` with its processor: also converts videos to frames, and questions and answers to ids and back."""

    @abstractmethod
    def iterate_clips(
        self, video: Any, fps: float | None, check: Callable[[], None] | None = None
    ) -> Generator[Clip, None, None]:
        """Yield `video` (frames, a `Video`, an iterator of these, or a path) as `Clip`s of frames; a path is read piece by
        piece. `check` is called while waiting for frames of a path, and may raise to end the wait. Raises `VideoError`."""

    @abstractmethod
    def question_ids(self, question: Any) -> tuple[Tensor, tuple[int, int]]:
        """Return the token ids [n] that follow the video when `question` (a text or messages) is asked, and the range
        (begin, end) of the user's own words in them. Raises `ModelError` for an empty question."""

    def token_choice(self, ids: Tensor, most: int, settings: Mapping[str, Any], drafts: bool) -> TokenChoice:
        """Return the sampling and stop rules of at most `most` new tokens after `ids` [1, S], from `settings`: keyword
        arguments of `generate`. `drafts`: whether a draft proposes tokens. Raises `ModelError` for an unknown setting."""
        raise ModelError(f"{next(iter(settings))}: this model decodes greedily only; leave it out.")

    @abstractmethod
    def text_ids(self, text: str) -> Tensor:
        """Return the token ids [n] of a text, in which special tokens count as plain text."""

    @abstractmethod
    def end_token_ids(self) -> frozenset[int]:
        """Return the token ids that end an answer."""

    @abstractmethod
    def decode(self, ids: Tensor) -> str:
        """Return the text of token ids [n], without special tokens."""

    @abstractmethod
    def weights_checksum(self) -> str:
        """Return a short checksum of the weights, which differs between models and between trainings of one model."""


class ModelFamily(ModelAdapter):
    """A `ModelAdapter` that can also attach a recipe to its models, and read video streams with them."""

    @abstractmethod
    def attach(self, model: nn.Module, owner: Accelerated) -> Callable[[], None]:
        """Attach the recipe of `owner` to `model`, then call `owner.mark_attached`. Return a function that calls
        `owner.mark_detached` and restores the model. Both wait for running calls; a failure leaves the model as it was."""

    @abstractmethod
    def runner(self, model: nn.Module, state: KVState | None = None) -> Runner:
        """Return a `Runner` for one sequence on `model`; `state` is its KV memory under a recipe (None: a new one)."""

    @abstractmethod
    def stream_adapter(self, model: nn.Module, processor: Any) -> StreamAdapter:
        """Return the `StreamAdapter` of `model` and `processor`; raises `ModelError` if the processor is unsuitable."""


def adapter_for(model: nn.Module) -> ModelFamily:
    """Return the `ModelFamily` that supports `model`; raises `ModelError`, which lists the supported types, if none does."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model: {model!r} is not a model; load it first, by mmaccel.load_model or from_pretrained of transformers."
        )
    model = unwrap(model)
    adapter = family_of(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    head = getattr(model, "get_output_embeddings", None)
    whole = hasattr(model, "generate") and callable(head) and head() is not None
    if not whole and not isinstance(model, ConfigOnlyModel):
        raise ModelError(
            f"{type(model).__name__} has no language head; give the whole model, not a part of it."
        )
    return adapter


def family_of(kind: str) -> ModelFamily:
    """Return the `ModelFamily` for a `model_type` of config.json; raises `ModelError` with the nearest known type."""
    known: Any = reversed([*registry("model").values()])
    families: dict[str, Any] = {t: one for one in known for t in one.model_types}
    form: Any = families.get(kind, families.pop("*", None))
    if form is None or not form().supports_model_type(kind):
        near, all_kinds = nearest_name_hint(kind, families), ", ".join(sorted(families))
        raise ModelError(f"model type {quoted(kind)} is not supported; {near}there are {all_kinds}.")
    return form()  # type: ignore[no-any-return]


class Accelerated:
    """A model with a recipe attached, and a context manager that detaches it at exit. Attributes: `model` (without a wrapper
    such as PEFT's), `recipe`, `attention` (the attention configuration), `view` (what policies may use of the model)."""

    context: ContextGroup | None = None  # the processes with which this one shares the rows of a prompt
    seat: BatchSlot | None = None  # of its next call of `generate`, in a batch of several calls

    def __init__(self, model: nn.Module, recipe: Recipe, context_mesh: DeviceMesh | None = None) -> None:
        self._outer = model
        self.model = model = unwrap(model)
        self.adapter = adapter_for(model)
        self.view = ModelView(model, self.adapter, adapter_for)
        self._state: Callable[[], KVState | None] = lambda: None
        self._counted: dict[str, float] = {}
        try:
            self.recipe = recipe = adapt_recipe_to_model(recipe, self.view)
            choice = choose_backend(recipe, self.view)
            sliding = self.adapter.sliding_layers(model)
            if context_mesh is not None:
                from mmaccel.core.prefill.context import ContextGroup

                self.context = ContextGroup(context_mesh, recipe, sliding)
                choice = self.context.agree_on_backend(choice)
            kernel = select.get_op(choice.backend, self.view.device)
            self.attention = AttentionConfig(recipe, choice.backend, kernel, choice=choice, sliding=sliding)
            self._detach: Callable[[], None] | None = None
            self._detach = self.adapter.attach(model, self)
        except BaseException:
            # What the draft holds, such as a process, is not left to whoever keeps the error.
            self.view.close_cached_objects()
            raise

    def __repr__(self) -> str:
        state = "attached" if self._detach is not None else "detached"
        return f"<Accelerated {type(self.model).__name__}, {state}, {self.recipe}>"

    def open_kv_state(self) -> KVState:
        """Return a new, empty KV memory for one batch of sequences."""
        shape = self.view.geometry

        def state(layers: int) -> KVState:
            return self.recipe.kv.open(replace(shape, layers=layers), self.view, self.view.device)

        if self.context is not None:
            return self.context.wrap_kv_state(state(shape.layers))
        prune = self.recipe.prune
        return PrunedKVState(prune, shape.layers, state) if prune else self.adapter.memory(self.view, state)

    @property
    def last_kv_state(self) -> KVState | None:
        """The KV memory of the last batch of sequences, while the object it was opened for is alive; else None."""
        return self._state()

    def track_kv_state(self, state: KVState, holder: object) -> Callable[[], object]:
        """Show the counters of `state`, the current KV memory, in reports from now on. When `holder` is garbage-collected,
        the counters of that moment are kept for reports; the returned function cancels this."""
        self._state, self._counted = ref(state), {}
        kept = finalize(holder, self._left_over, state)
        kept.atexit = False
        return kept.detach

    def _left_over(self, state: KVState) -> None:
        if self._state() is state:
            self._counted = dict(state.counters())

    def release_state(self, state: KVState, counters: Mapping[str, float]) -> None:
        """Forget the KV memory `state`; if it is the current one, reports show these `counters` for it from now on."""
        if self._state() is state:
            self._state, self._counted = lambda: None, dict(counters)

    def clear_kv_counters(self) -> None:
        """Drop the current KV memory's figures: reports have none until the next memory is opened."""
        self._state, self._counted = lambda: None, {}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate`, or that of its wrapper if it was given in one."""
        return self._outer.generate(*args, **kwargs)  # type: ignore[operator]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def report(self) -> Report:
        """Return the figures of the last `generate`, or of forward passes if the model was called directly since then."""
        state, attention = self.last_kv_state, self.attention
        kv = self._counted if state is None else state.counters()
        why = attention.choice.why if attention.choice is not None else ""
        return attention.meter.report(self.recipe.to_dict(), attention.backend, kv, self.view.device, why)

    def mark_attached(self) -> None:
        """Make the function `attached` return this object for the model; the adapter calls it at the end of attaching."""
        _attached[self.model] = ref(self)

    def mark_detached(self) -> None:
        """Make `attached` return None for the model; the adapter calls it at the start of detaching."""
        _attached.pop(self.model, None)

    def detach(self) -> None:
        """Restore the model, once running calls of other threads have ended; a second call does nothing. Raises `ModelError`
        within a call of the model in this thread, such as from a logits processor or a streamer."""
        if self._detach is not None:
            self._detach()
            self._detach = None
            self.view.close_cached_objects()

    def __enter__(self) -> Accelerated:
        if self._detach is None:
            raise ModelError("this recipe is detached; call accelerate again, and use what it returns.")
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


def accelerate(
    model: nn.Module,
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *,
    context_mesh: DeviceMesh | None = None,
    **choices: Any,
) -> Accelerated:
    """Attach a recipe to an unmodified Hugging Face model, whose `generate` is then accelerated. For a model in a PEFT
    wrapper, the recipe is attached to the inner model, and the wrapper's `generate` is accelerated too.

    recipe: a preset's or policy's name, a YAML path, a mapping, a `Recipe`, or None, which only measures the plain model;
    `choices` set its fields (``sparse=...``, ``kv=...``). context_mesh: processes with the whole model each, which share the
    rows of every prompt and make the same calls (docs/several_gpus.md). Use the result as a context manager, or `detach` it.
    Waits until calls in other threads have ended. Raises `RecipeError` or `ModelError`; the model is then as it was before.
    """
    chosen = Recipe.load(recipe, **choices)
    if attached(model) is not None:
        raise ModelError("the model is already accelerated; call detach() on what accelerate returned first.")
    return Accelerated(model, chosen, context_mesh)


def adapt_recipe_to_model(recipe: Recipe, view: ModelView) -> Recipe:
    """Return `recipe` adapted to the model of `view`, which may be a configuration only, before weights are loaded. Raises
    `RecipeError` if it cannot serve `generate` or a model of these sizes, and `DraftError` if the draft model is missing or
    does not fit."""
    check_generate(recipe)
    recipe = _bound(recipe, view)
    recipe.draft.check_target(view)
    return recipe


def _bound(recipe: Recipe, view: ModelView) -> Recipe:
    """A recipe whose parts serve a model; raises `RecipeError` for one that cannot, or for layers it lacks."""
    view.adapter.check_recipe(view.model, recipe)
    bound, depth = recipe.sparse.for_model(view), view.geometry.layers
    for pruner in filter(None, (recipe.prune, recipe.draft.pruner)):
        check_pruning_stages(pruner, depth)
    if wrong := [n for n in recipe.dense_layers if n >= depth]:
        raise RecipeError(
            f"dense_layers: there is no layer {wrong[0]}; the model has layers 0 to {depth - 1}."
        )
    return recipe if bound is recipe.sparse else replace(recipe, sparse=bound)


def stream_attention_config(recipe: Recipe, adapter: StreamModel) -> AttentionConfig:
    """Return the `AttentionConfig` of a session's layers under `recipe`; raises `RecipeError` if the model cannot run it."""
    recipe = _bound(recipe, adapter.view)
    if recipe.sparse.dense:
        choice = select.BackendChoice(
            select.default_backend(adapter.device), "a memory of streams decides what is seen"
        )
        return replace(adapter.attention, recipe=recipe, backend=choice.backend, choice=choice)
    choice, sliding_kernel = choose_backend(recipe, adapter.view), adapter.attention.kernel
    kernel = select.get_op(choice.backend, adapter.device)
    return AttentionConfig(recipe, choice.backend, kernel, choice=choice, sliding_kernel=sliding_kernel)


def attached(model: nn.Module) -> Accelerated | None:
    """Return the `Accelerated` object of `model`, or None if no recipe is attached."""
    owner = _attached.get(unwrap(model)) if isinstance(model, nn.Module) else None
    return owner() if owner is not None else None
