"""From a recipe to a running model and back: `accelerate`, the handle it returns, and what it asks of a model's family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn

from mmaccel.backends import select
from mmaccel.core.adapter import Branches, ConfigOnlyModel, ModelAdapter, ModelView, Runner, unwrapped
from mmaccel.core.errors import ModelError, RecipeError, nearest, shown
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.kv import KVState, StreamState
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.core.prefill.attention import AttentionConfig, ForwardPass
from mmaccel.core.prefill.prune import checked_stages
from mmaccel.core.prefill.sparse import choose_backend
from mmaccel.core.recipe import Recipe, check_sequences
from mmaccel.core.registry import registry
from mmaccel.core.report import Meter, Report
from mmaccel.core.streams.parts import Choosing, Clip, Moment, Question, RunningStates, Turns

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mmaccel.core.decoding.batch import Seat
    from mmaccel.core.prefill.context import Context

# Weak on both sides: what is attached is kept alive by the model it is laid through.
_attached: WeakKeyDictionary[nn.Module, ref[Accelerated]] = WeakKeyDictionary()


class StreamModel(ABC):
    """The model's side of a stream: pixels to features, features through the layers.

    Nothing stays on the model between two calls. Several streams may share a model, whose `turns` their passes take. A unit
    has `pace` frames. Layer n is on ``layer_devices[n]``. P tokens a unit, E hidden size, V words.
    """

    view: ModelView
    pace: int
    dtype: torch.dtype
    device: torch.device
    layer_devices: list[torch.device]
    turns: Turns
    shares: bool = False  # whether it has `run_each`
    words_beside: tuple[int, int] = (0, 0)
    """Tokens that `unit_embeds` puts before and behind the visual tokens of a unit."""
    ready: Callable[[StreamState, RunningStates | None], Any] = staticmethod(lambda state, running: None)
    """Before the first token of an answer on a memory: what a step of it does when it comes for the first time."""
    left_out: int | None = None
    """Tokens of each unit that `features` and `places` leave out, for a pruner of frames took them; None: there is none."""

    @cached_property
    def attention(self) -> AttentionConfig:
        """The attention configuration of the layers; dense where the model does not set one."""
        return AttentionConfig(Recipe(), "auto", None)

    def fits(self, frames: Tensor, size: tuple[int, int]) -> bool:
        """Whether frames [T, 3, H, W] come to the vision tower in the size in which frames of `size` (height, width) do."""
        return True

    @abstractmethod
    def features(self, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Of frames [n * pace, 3, H, W], which are resized to `size` where they do not fit it: features [n, P, E] of the
        units, and [m, E] of the marks that end any video."""

    def resized(self, frames: Tensor, size: tuple[int, int]) -> Tensor:
        """`frames` [T, 3, H, W] at (height, width)."""
        return frames

    def unit_embeds(self, features: Tensor, moments: Sequence[Moment]) -> Tensor:
        """[n, P, E] units as they enter the layers: `features` [n, ., E] of each, and what is written beside it of the
        moment it shows. Wider than E where layers add to them (`run`)."""
        return features

    @abstractmethod
    def head(self) -> Tensor:
        """[h] ids of the prompt before the video."""

    def head_embeds(self) -> Tensor:
        """[h, E] their input embeddings."""
        return self.words(self.head())

    @abstractmethod
    def question(self, text: Any) -> Question:
        """The question `text`, asked after the video; of a model that reads one prompt the prompt's own, whatever `text`."""

    @abstractmethod
    def position_ids(self, size: tuple[int, int], fps: float | None) -> PositionIds:
        """The positions of a stream of frames of `size`, `fps` of them a second (None: not known)."""

    @abstractmethod
    def words(self, ids: Tensor) -> Tensor:
        """[n, E] input embeddings of text `ids` [n]."""

    @abstractmethod
    def run(
        self,
        state: StreamState,
        embeds: Tensor,
        hidden: bool = False,
        few: bool = False,
        check: Callable[[], None] | None = None,
        branches: Branches | None = None,
        meter: Meter | None = None,
        input_hooks: Mapping[int, Callable[[Tensor], None]] | None = None,
        running: RunningStates | None = None,
    ) -> Tensor:
        """[n, E] final hidden states of new columns `embeds` [n, E], through all layers, with `state` as memory. Keys and
        queries reach it before rotation; with `hidden` it is told what enters each layer. `few`: the columns are of a
        question or answer, a tree with `branches`; few kernels may compute them, rounding otherwise than modules. `check` is
        called at each layer where columns are many; its error ends the pass. `meter` counts pairs. `input_hooks`
        are called with the input [1, n, E] of the layer that each names; the number of layers names the last one's output.
        """

    def run_each(self, passes: Sequence[tuple[ForwardPass, int, bool]], embeds: Tensor) -> Any:
        """`run` of answers on several streams as one (of each pass, rows, `hidden`), and what failed, by number."""
        raise ModelError("run_each: answers of this model share no step; run them one by one.")

    def new_running_states(self) -> RunningStates | None:
        """Recurrent states of a new stream, if layers have them; `run` gets them as `running`."""
        return None

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] logits of final hidden states [n, E]."""


class StreamAdapter(StreamModel):
    """The model's and processor's side of a session: videos to frames, text to ids and back, and all of `StreamModel`."""

    @abstractmethod
    def clips(
        self, video: Any, fps: float | None, check: Callable[[], None] | None = None
    ) -> Generator[Clip, None, None]:
        """`video` (frames, a `Video`, an iterator of such, a path) as frames a session takes in; a path is read in pieces.
        `check` is called while frames of a path are awaited, and ends the wait by what it raises. Raises `VideoError`."""

    @abstractmethod
    def tail(self, question: Any) -> tuple[Tensor, tuple[int, int]]:
        """Tokens [n] that follow the video and its marks when `question`, a text or messages, is asked; ``words[0] ..
        words[1]`` of them are the user's own last ones. Raises `ModelError` for an empty question."""

    def choosing(self, ids: Tensor, most: int, settings: Mapping[str, Any], drafts: bool) -> Choosing:
        """How at most `most` tokens after `ids` [1, S] are chosen by `settings` of `generate`; `drafts`: some are proposed.
        Raises `ModelError` for what is no setting."""
        raise ModelError(f"{next(iter(settings))}: this model answers greedily alone; leave it out.")

    def question(self, text: Any) -> Question:
        """The tokens of `text` as a question after the video, with their embeddings."""
        ids, words = self.tail(text)
        return Question(ids, words, self.words(ids))

    @abstractmethod
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @abstractmethod
    def decode(self, ids: Tensor) -> str:
        """The text of ids [n], special tokens left out."""

    @abstractmethod
    def signature(self) -> str:
        """A short mark of the weights: another model, or another training of this one, has another."""


class ModelFamily(ModelAdapter):
    """An adapter whose models also take a recipe and read streams."""

    @abstractmethod
    def attach(self, model: nn.Module, owner: Accelerated) -> Callable[[], None]:
        """Attach the recipe of `owner` to `model`, then call `owner.joined`; the returned function calls `owner.left` and
        restores the model. Both wait for running calls of the model, and leave the model as it was when they fail."""

    @abstractmethod
    def runner(self, model: nn.Module, state: KVState | None = None) -> Runner:
        """A `Runner`, which takes one sequence through `model`; `state`: its memory under a recipe (None: the recipe's)."""

    @abstractmethod
    def stream_adapter(self, model: nn.Module, processor: Any) -> StreamAdapter:
        """`model` and `processor` as a stream uses them; raises `ModelError` for a processor that cannot serve."""


def adapter_for(model: nn.Module) -> ModelFamily:
    """The adapter of a model's family; raises `ModelError` with the list of families."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model: {model!r} is not a model; load it first, by mmaccel.load_model or from_pretrained of transformers."
        )
    model = unwrapped(model)
    adapter = family_of(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    head = getattr(model, "get_output_embeddings", None)
    whole = hasattr(model, "generate") and callable(head) and head() is not None
    if not whole and not isinstance(model, ConfigOnlyModel):
        raise ModelError(
            f"{type(model).__name__} has no language head; give the whole model, not a part of it."
        )
    return adapter


def family_of(kind: str) -> ModelFamily:
    """The adapter of a model type, as config.json names it; raises `ModelError` with the nearest family."""
    known: Any = reversed([*registry("model").values()])
    families: dict[str, Any] = {t: one for one in known for t in one.model_types}
    form: Any = families.get(kind, families.pop("*", None))
    if form is None or not form().serves(kind):
        raise ModelError(
            f"model type {shown(kind)} is not supported; {nearest(kind, families)}there are {', '.join(sorted(families))}."
        )
    return form()  # type: ignore[no-any-return]


class Accelerated:
    """A model with a recipe attached. Also a context manager: leaving it detaches. Attributes: `model` (inside its wrapper,
    if it came in one), `recipe`, `attention` (decided once), `view` (the handle that policies get)."""

    context: Context | None = None  # the processes with which this one shares the rows of a prompt
    seat: Seat | None = None  # of its next call of `generate`, in a batch of several calls

    def __init__(self, model: nn.Module, recipe: Recipe, context_mesh: DeviceMesh | None = None) -> None:
        self._outer = model
        self.model = model = unwrapped(model)
        self.adapter = adapter_for(model)
        self.view = ModelView(model, self.adapter, adapter_for)
        self._state: Callable[[], KVState | None] = lambda: None
        self._counted: dict[str, float] = {}
        try:
            self.recipe = recipe = fitted(recipe, self.view)
            choice = choose_backend(recipe, self.view)
            sliding = self.adapter.sliding(model)
            if context_mesh is not None:
                from mmaccel.core.prefill.context import Context

                self.context = Context(context_mesh, recipe, sliding)
                choice = self.context.agreed(choice)
            kernel = select.get(choice.backend, self.view.device)
            self.attention = AttentionConfig(recipe, choice.backend, kernel, choice=choice, sliding=sliding)
            self._detach: Callable[[], None] | None = None
            self._detach = self.adapter.attach(model, self)
        except BaseException:
            # What the draft holds, such as a process, is not left to whoever keeps the error.
            self.view.release()
            raise

    def __repr__(self) -> str:
        state = "attached" if self._detach is not None else "detached"
        return f"<Accelerated {type(self.model).__name__}, {state}, {self.recipe}>"

    def open_state(self) -> KVState:
        """A fresh memory for one batch of sequences."""
        shape = self.view.geometry

        def state(layers: int) -> KVState:
            return self.recipe.kv.open(replace(shape, layers=layers), self.view, self.view.device)

        if self.context is not None:
            return self.context.state(state(shape.layers))
        prune = self.recipe.prune
        return PrunedKVState(prune, shape.layers, state) if prune else self.adapter.memory(self.view, state)

    @property
    def last_state(self) -> KVState | None:
        """The memory of the last batch of sequences, as long as somebody holds what it was opened for: None after that."""
        return self._state()

    def opened(self, state: KVState, holder: object) -> Callable[[], object]:
        """Register `state` as the memory of the next sequences. It is released with `holder`, or earlier by the returned
        function; its counters are saved for reports."""
        self._state, self._counted = ref(state), {}
        kept = finalize(holder, self._left_over, state)
        kept.atexit = False
        return kept.detach

    def _left_over(self, state: KVState) -> None:
        if self._state() is state:
            self._counted = dict(state.counters())

    def closed(self, state: KVState, counters: Mapping[str, float]) -> None:
        """`state` is of no more use; reports have what it `counters`, if none was opened after it."""
        if self._state() is state:
            self._state, self._counted = lambda: None, dict(counters)

    def forget(self) -> None:
        """Reports have no memory's figures until the next is opened."""
        self._state, self._counted = lambda: None, {}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, or that of the wrapper it came in."""
        return self._outer.generate(*args, **kwargs)  # type: ignore[operator]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def report(self) -> Report:
        """Figures of the last `generate`, or of the forward passes since the last one."""
        state, attention = self.last_state, self.attention
        kv = self._counted if state is None else state.counters()
        why = attention.choice.why if attention.choice is not None else ""
        return attention.meter.report(self.recipe.to_dict(), attention.backend, kv, self.view.device, why)

    def joined(self) -> None:
        """The adapter calls this at the end of attaching: from now on `attached` gives this."""
        _attached[self.model] = ref(self)

    def left(self) -> None:
        """The adapter calls this at the start of detaching."""
        _attached.pop(self.model, None)

    def detach(self) -> None:
        """Leave the model as it was before, once the calls of other threads have ended; a second call does nothing.

        Raises `ModelError` inside a call of the model in this thread, such as a logits processor or a streamer.
        """
        if self._detach is not None:
            self._detach()
            self._detach = None
            self.view.release()

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
    """Attach a recipe to an unmodified Hugging Face model; `model.generate(...)` stays the user's call. For a
    model in a PEFT wrapper, the recipe goes on the inner model, and the wrapper's `generate` is accelerated too.

    recipe: a preset's or policy's name, a YAML path, a mapping or a `Recipe`; `choices` set its fields (``sparse=...``,
    ``kv=...``, ``draft=...``). context_mesh: processes with the whole model each, which share the rows of every prompt and
    make the same calls (docs/several_gpus.md). Use the result as a context manager, or call its `detach`. Waits until calls
    in other threads have ended. Raises `RecipeError` or `ModelError` in one sentence; the model is then as it was before.
    """
    chosen = Recipe.load(recipe, **choices)
    if attached(model) is not None:
        raise ModelError(
            "the model is already accelerated; call detach() on what accelerate returned, then attach again."
        )
    return Accelerated(model, chosen, context_mesh)


def fitted(recipe: Recipe, view: ModelView) -> Recipe:
    """A recipe as it serves a model, asked when it is attached, and of the model's outline before it is loaded.

    Raises `RecipeError` for one that cannot serve sequences, or a model of this depth and shape, and `DraftError` for a
    draft that is not there or does not fit.
    """
    check_sequences(recipe)
    recipe = _bound(recipe, view)
    recipe.draft.check(view)
    return recipe


def _bound(recipe: Recipe, view: ModelView) -> Recipe:
    """A recipe whose parts serve a model; raises `RecipeError` for one that cannot, or for layers it lacks."""
    bound, depth = recipe.sparse.bind(view), view.geometry.layers
    for pruner in filter(None, (recipe.prune, recipe.draft.pruner)):
        checked_stages(pruner, depth)
    view.adapter.check(view.model, recipe)
    if wrong := [n for n in recipe.dense_layers if n >= depth]:
        raise RecipeError(
            f"dense_layers: there is no layer {wrong[0]}; the model has layers 0 to {depth - 1}."
        )
    return recipe if bound is recipe.sparse else replace(recipe, sparse=bound)


def stream_attention(recipe: Recipe, adapter: StreamModel) -> AttentionConfig:
    """The attention configuration of a session's layers under `recipe`; raises `RecipeError` as `fitted` does."""
    recipe = _bound(recipe, adapter.view)
    if recipe.sparse.dense:
        choice = select.Choice(select.choose(adapter.device), "a memory of streams decides what is seen")
        return replace(adapter.attention, recipe=recipe, backend=choice.backend, choice=choice)
    choice, windows = choose_backend(recipe, adapter.view), adapter.attention.kernel
    kernel = select.get(choice.backend, adapter.device)
    return AttentionConfig(recipe, choice.backend, kernel, choice=choice, windows=windows)


def attached(model: nn.Module) -> Accelerated | None:
    """The attachment of `model`, or None."""
    owner = _attached.get(unwrapped(model)) if isinstance(model, nn.Module) else None
    return owner() if owner is not None else None
