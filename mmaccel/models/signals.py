"""Reads, during a prefill, what token pruners score tokens by: hidden states between layers, the text's attention to visual
tokens, and attention in the vision tower."""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmaccel.backends.ops.dense_attend import mean_attention_weights
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.core.prefill.attention import PASS, ForwardPass
from mmaccel.core.prefill.prune import (
    ForwardProbe,
    PrefillPass,
    Signals,
    TokenPruner,
    check_kept_columns,
    kept_layout,
    observation_columns,
)
from mmaccel.core.prefill.recalled import warn_idle_pruner
from mmaccel.models.install import Hooks, PrefillHook
from mmaccel.models.modules import METHODS
from mmaccel.models.prompt_layout import PIXELS, bind_args

if TYPE_CHECKING:
    from mmaccel.core.attach import Accelerated


SCORES = 1 << 24
"""Attention scores of a vision tower that are held at a time, unless one frame has more."""


@dataclass(eq=False)
class HiddenStateHook(PrefillHook):
    """Forward hook of a decoder layer with attention that passes hidden states to the probes of the current prefill.

    index  number of the layer whose input is passed on; the number of all layers stands for the last layer's output
    """

    index: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *out: Any) -> None:
        run = kwargs.get(PASS)
        if not isinstance(run, ForwardPass) or not run.probes:
            return
        hidden = out[0] if out else args[0] if args else kwargs["hidden_states"]
        for probe in run.probes:
            probe.read_layer_input(run, self.index, hidden if isinstance(hidden, Tensor) else hidden[0])


def hook_hidden_states(hooks: Hooks, layers: Sequence[nn.Module], *pruners: TokenPruner) -> None:
    """Install a `HiddenStateHook` for each layer whose hidden states the draft's `pruners` read."""
    wanted = {
        index for pruner in pruners for stage in pruner.pruning_stages(len(layers)) for index in stage.hidden
    }
    for index in sorted(wanted):
        if index < len(layers):
            hooks.add_pre_hook(layers[index], HiddenStateHook(index))
        else:
            hooks.add_hook(layers[-1], HiddenStateHook(index), with_kwargs=True)


class DraftPruningProbe(ForwardProbe):
    """Reads, in the target's prefill, the hidden states and attention by which a draft's pruner cuts the draft's prompt.

    The prompt may come in several passes (chunks; video, then text). `on_kept` is called once with the kept columns [n], as
    soon as the last layer that the pruner reads has seen the last token, while later layers still run.

    If the target's own prompt is pruned during the prefill, its layers hold fewer tokens. The draft's pruner then chooses
    among tokens that all layers it reads hold, so a token dropped by the target is dropped from the draft too. The share
    to keep is still a share of all video tokens of the prompt.

    layout  token layout of the prompt, one sequence; in a later turn, of the conversation, whose last columns are `new`
    heard   hidden states that the probe of the previous turn read (its `states`)
    lasts   whether another turn may follow; `states` are kept for it
    fail    called with the error if this probe fails; the prefill then goes on without it. None: the prefill raises it
    """

    def __init__(
        self,
        owner: Accelerated,
        pruner: TokenPruner,
        layout: TokenLayout,
        on_kept: Callable[[Tensor], None],
        fail: Callable[[Exception], None] | None = None,
        new: int | None = None,
        heard: Mapping[int, Tensor] | None = None,
        lasts: bool = False,
    ) -> None:
        if layout.batch != 1:
            raise ModelError(f"prune {pruner.name!r} takes one sequence at a time; give prompts one by one.")
        self.pruner, self.layout, self.on_kept, self.fail = pruner, layout, on_kept, fail
        self.depth = owner.view.geometry.layers
        (self.stage,) = pruner.pruning_stages(self.depth)
        self.held: dict[int, Tensor | None] = {}
        """The columns of the prompt that a layer holds, for each layer that was heard; None: all."""
        self.total = pruner.candidates(layout).numel()
        if not self.total:
            warn_idle_pruner(pruner, owner.attention.meter)
        self.asked = observation_columns(layout, new)
        self.hidden: dict[int, list[Tensor]] = {index: [] for index in self.stage.hidden}
        self.states: dict[int, Tensor] = dict(heard or {})
        """What entered each layer that is read, [n, E] of the columns that it holds."""
        self._lasts = lasts
        self.heard = {index: 0 for group in self.stage.attention for index in group}
        groups = len(self.stage.attention)
        self.attention = torch.zeros(groups, self.asked.numel(), layout.length, device=layout.device)
        self.done = False
        if not self.heard and not self.hidden:
            with self._failing():
                self._tell_when_ready()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.fail is None:
                raise
            self.done, self.hidden = True, {}
            self.fail(error)

    def read_layer_input(self, run: PrefillPass, layer: int, hidden: Tensor) -> None:
        if not self.done and layer in self.hidden:
            with self._failing():
                self._note(run, layer)
                if run.start and not self.hidden[layer]:
                    self.hidden[layer] = self._before(layer, run.start, hidden)
                self.hidden[layer].append(hidden[0].detach())
                self._tell_when_ready()

    def read_attention_inputs(
        self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        if not self.done and layer in self.heard:
            with self._failing():
                self._note(run, layer)
                self._add(run, layer, query, key, scale)
                self.heard[layer] = run.start + query.shape[2]
                self._tell_when_ready()

    def _before(self, layer: int, start: int, hidden: Tensor) -> list[Tensor]:
        """What entered `layer` in turns before, of its first `start` columns; zeros of the words of answers."""
        states = self.states.get(layer)
        if states is None or len(states) > start:
            raise ModelError(
                f"prune {self.pruner.name!r} did not hear the turns before; give the whole prompt without a cache."
            )
        return [states, hidden.new_zeros(start - len(states), hidden.shape[-1])]

    def _note(self, run: PrefillPass, layer: int) -> None:
        """Which columns a pruner of the target has left `layer`."""
        held, state = None, run.state
        if isinstance(state, PrunedKVState):
            part = state.part_index_of_layer(min(layer, self.depth - 1))
            held = state.held_indices(part, self.layout.length)
        self.held[layer] = None if held is None else held.to(self.layout.device)

    def _add(self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, scale: float) -> None:
        """Add the attention of those new rows of a layer that are among the `observation_columns`."""
        start = run.start
        end, held, column = start + query.shape[2], self.held[layer], None
        if key.shape[2] < end and run.state is not None:
            column = run.state.view(layer, query).column  # a memory that forgets has the others no more
        # Text is never dropped, nor is the last column: each of these rows is among what is held.
        rows = self.asked if held is None else torch.searchsorted(held, self.asked)
        here = ((rows >= start) & (rows < end)).nonzero()[:, 0]
        if not here.numel():
            return
        # Layers of a model spread over devices are not where the layout is.
        at = rows[here].to(query.device)
        column = torch.arange(end, device=at.device) if column is None else column.to(at.device)
        place = torch.searchsorted(column, at)
        weights = mean_attention_weights(query[0, :, at - start], key[0, :, :end], place, scale).to(
            self.attention.device
        )
        seen = column.to(weights.device)
        seen = seen if held is None else held[seen]
        for k, group in enumerate(self.stage.attention):
            if layer in group:
                self.attention[k, here[:, None], seen] += weights / len(group)

    def _tell_when_ready(self) -> None:
        read = {layer: sum(map(len, pieces)) for layer, pieces in self.hidden.items()}
        for layer, count in [*read.items(), *self.heard.items()]:
            held = self.held.get(layer)
            if count < (self.layout.length if held is None else held.numel()):
                return
        if self.done:
            return
        self.done = True
        # Each cut is of what the cuts before have left: the smallest set is what all layers hold.
        left = min((held for held in self.held.values() if held is not None), key=len, default=None)
        layout = self.layout if left is None else kept_layout(self.layout, left)
        signals = Signals()
        if self.hidden:
            self.states = {index: torch.cat(pieces) for index, pieces in self.hidden.items()}
            signals["hidden"] = torch.stack([self._states(index, left) for index in self.stage.hidden])
        if self.heard:
            signals["attention"] = self.attention if left is None else self.attention[..., left]
        self.hidden, self.states = {}, self.states if self._lasts else {}
        kept = self.pruner.keep(signals, layout, self.stage, self.total)
        kept = check_kept_columns(self.pruner, kept, layout)
        self.on_kept(kept if left is None else left[kept])

    def _states(self, layer: int, left: Tensor | None) -> Tensor:
        """What entered `layer`, of the columns `left` (None: all)."""
        states, held = self.states[layer].to(self.layout.device), self.held[layer]
        if left is None:
            return states
        return states[left if held is None else torch.searchsorted(held, left)]

    def close(self) -> None:
        """End the prompt; raises `ModelError` if the pruner has not received all its signals."""
        if not self.done:
            with self._failing():
                raise ModelError(f"prune {self.pruner.name!r} received nothing from the target's prefill.")


class VisionScorer(ABC):
    """Scores visual tokens inside a family's vision tower for token pruners: the attention that each token receives there,
    and its key vector.

    attention  the attention module whose input is given to `measure_patches`
    """

    attention: nn.Module

    @abstractmethod
    def __init__(self, multimodal: Any) -> None: ...

    @abstractmethod
    def measure_patches(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Compute the attention that each patch receives, and its key: [..., patches, 1 + D], attention first. `hidden` and
        `kwargs` are the input of the module `attention`."""

    @abstractmethod
    def pool_patches_to_tokens(
        self, kind: int, caught: list[Tensor], pixels: Tensor, given: Mapping[str, Any]
    ) -> Tensor:
        """Reduce the patches of one tower call to visual tokens; return received attention and key of each token, [n, 1 +
        D]. kind: IMAGE or VIDEO; `caught` holds the results of `measure_patches`, `given` the call's arguments."""


def reads_vision_tower(pruner: TokenPruner) -> bool:
    """Return whether `pruner` scores tokens by the vision tower, which needs a `VisionAttentionProbe`."""
    return bool(pruner.needs & {"vision_attention", "vision_key"})


def vision_scorer_of(family: Any, model: Any) -> type[VisionScorer] | None:
    """Return the `VisionScorer` class that scores visual tokens inside the vision tower of `model`; None if its family
    has none."""
    found: Any = family.vision_scorer
    return found.get(model.config.model_type) if isinstance(found, Mapping) else found


def check_vision_tower(family: Any, model: Any, pruner: TokenPruner) -> None:
    """Raise `RecipeError` if `pruner` needs scores from the vision tower of `model` and its family has no `VisionScorer`."""
    if reads_vision_tower(pruner) and vision_scorer_of(family, model) is None:
        raise RecipeError(
            f"prune {pruner.name!r}: mmaccel cannot read the vision tower of {model.config.model_type}; choose a pruner "
            "that does not need it."
        )


class VisionAttentionProbe:
    """Computes, while its hooks are installed, the attention that each visual token receives in the vision tower, and its
    key.

    The tower keeps its attention kernels: queries and keys of one layer are recomputed from its input, and scores for a few
    frames at a time. Results are kept per thread until `pop_signals`.
    """

    def __init__(self, hooks: Hooks, model: nn.Module, family: Any) -> None:
        multimodal: Any = family.multimodal(model)
        self.tower: Any = vision_scorer_of(family, model)(multimodal)  # type: ignore[misc]
        self.local = threading.local()
        self._kinds = {kind: name for kind, name in METHODS.items() if hasattr(multimodal, name)}
        for kind, name in self._kinds.items():
            hooks.wrap(multimodal, name, self._encode, kind)
        hooks.add_pre_hook(self.tower.attention, self._catch)

    def _encode(self, kind: int, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Qwen3-VL encodes a video by its method of images.
        if getattr(self.local, "caught", None) is not None:
            return encode(*args, **kwargs)
        self.local.caught = []
        try:
            out = encode(*args, **kwargs)
            caught, self.local.caught = self.local.caught, None
            given = bind_args(encode, args, kwargs)
            # Releases of transformers differ in the name of a video's pixels.
            pixels = given[next(iter(inspect.signature(encode).parameters))]
            # Of images and of videos, since it was last taken.
            tokens = self.local.__dict__.setdefault("tokens", {})
            tokens[kind] = self.tower.pool_patches_to_tokens(kind, caught, pixels, given)
        finally:
            self.local.caught = None
        return out

    def _catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught = getattr(self.local, "caught", None)
        if caught is not None:
            caught.append(self.tower.measure_patches(args[0] if args else kwargs["hidden_states"], kwargs))

    def pop_signals(self, layout: TokenLayout) -> dict[str, Tensor]:
        """Return and clear the last prompt's `vision_attention` [S] and `vision_key` [S, D], read in the vision tower."""
        tokens: dict[int, Tensor] = self.local.__dict__.pop("tokens", {})
        whole: Tensor | None = None
        for kind in self._kinds:
            name, shown = PIXELS[kind], layout.modality[0]
            # Where a model has no videos, their frames are images.
            at = (shown == kind if len(self._kinds) > 1 else shown != TEXT).nonzero()[:, 0]
            if not at.numel():
                continue
            rows = tokens.get(kind)
            if rows is None or len(rows) != len(at):
                raise ModelError(
                    f"{name}: the pruner reads the vision tower as it runs; give the pixels of all images and videos."
                )
            whole = rows.new_zeros(layout.length, rows.shape[1]) if whole is None else whole
            whole = whole.index_copy(0, at, rows)
        return {} if whole is None else {"vision_attention": whole[:, 0], "vision_key": whole[:, 1:]}


def mean_received_attention(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the attention [n, P] that each of the P patches of n frames receives, averaged over heads and queries. Query
    and key are [n, H, P, D]. At most `SCORES` scores are in memory at a time (at least one frame)."""
    each = query.shape[1] * query.shape[2] ** 2
    some = max(1, SCORES // max(each, 1))
    return torch.cat(
        [
            ((q.float() @ k.float().transpose(-1, -2)) * scale).softmax(-1).mean((1, 2))
            for q, k in zip(query.split(some), key.split(some), strict=True)
        ]
    )
