"""Splits a `generate` call into single sequences: from a batch, without padding, and continuing a given cache.

A returned cache holds the earlier turns. In the next call `input_ids` are the whole conversation, and pixels those of new
images and videos; the draft's state stays with the cache (`CachedDraftState`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import TemperatureLogitsWarper
from transformers.cache_utils import Cache

from mmaccel.core.adapter import Columns
from mmaccel.core.decoding.draft import DraftStrategy
from mmaccel.core.errors import DraftError, ModelError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.report import counter_increases_since
from mmaccel.models.hf import ModelAttachment
from mmaccel.models.prompt_layout import A_TOKEN, PIXELS, is_nonempty, remove_padding

TURN = "mmaccel_turn"
"""The attribute of a cache that holds its `CachedDraftState`."""

STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
"""Processors of transformers that remember what they were asked, token by token, and the arguments that they are made of: a
draft asks about tokens that are refused, too, and about the same place twice."""

COLDEST = 1e-30
"""The lowest temperature that scores are divided by: the likeliest token has all probability, as by any lower one."""


class CachedDraftState:
    """The state of a draft between two turns, stored with the conversation's cache; and the target's hidden states that the
    draft's pruner read (`heard`). Copies of the cache share it: each turn rolls the draft back to the prefix that it shares
    with the last turn, so that one draft serves all copies."""

    def __init__(
        self,
        choice: DraftStrategy | None = None,
        state: Any = None,
        heard: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.choice, self.state, self.heard = choice, state, heard

    def __deepcopy__(self, memo: Any) -> CachedDraftState:
        return self

    def __reduce__(self) -> Any:
        return CachedDraftState, ()  # a draft's memory is not saved

    @staticmethod
    def from_cache(cache: Any, choice: DraftStrategy) -> CachedDraftState:
        """Return the `CachedDraftState` stored with `cache`, or an empty one if there is none or it is another draft's."""
        held = getattr(cache, TURN, None)
        if isinstance(held, CachedDraftState) and held.choice == choice:
            return held
        return CachedDraftState(choice)

    def pop_state(self) -> Any:
        """Return the draft's stored state and clear it here, so that a concurrent call cannot use it too."""
        state, self.state = self.state, None
        return state

    def store_state(self, cache: Any, state: Any, heard: Mapping[int, Tensor] | None) -> None:
        """Store the draft's `state` and what its pruner read (`heard`) with `cache`, at the end of a turn, for the next
        one."""
        self.state, self.heard = state, heard or self.heard
        setattr(cache, TURN, self)


class StreamCache(Cache):
    """The `past_key_values` of a `generate` call under a KV policy for streams: its KV memory, which has read the images and
    videos of the call's prompt. Only the accelerated model that returned it can use it.

    A later prompt is the whole conversation, with the pixels left out. It must begin with the same tokens up to the last
    image or video. What follows them is a new question, for which the memory retrieves frames again. No call changes the
    memory, so several conversations may branch from one cache. It is freed by `close`, or by garbage collection.

    prompt, live  the `PromptStreamModel` and its `StreamRunner`; None once it is closed
    ids    [1, n] of the last conversation, prompt and answer, as far as they were run
    lasts  whether the cache outlives the call that opened it
    read_sparsely  whether a sparse pattern ran while the video was read
    """

    is_compileable = False

    def __init__(self, attachment: ModelAttachment, prompt: Any, live: Any) -> None:
        super().__init__(layers=[])
        self.prompt, self.live, self.ids, self.lasts = prompt, live, prompt.ids, False
        self._attachment, self._call, self._free = (
            attachment,
            threading.Lock(),
            finalize(self, live.close, True),
        )
        self._free.atexit = False
        self._counted: Mapping[str, float] = {}
        self.read_sparsely = False

    @contextmanager
    def exclusive_call(self) -> Iterator[None]:
        """Context of a call on this cache; raises `ModelError` if another call is running."""
        if not self._call.acquire(blocking=False):
            raise ModelError("past_key_values: another call is at work on it; wait until that has ended.")
        try:
            yield
        finally:
            self._call.release()

    def close(self) -> None:
        """Free the memory; a second call does nothing. Raises `ModelError` while a call is running on it."""
        with self.exclusive_call():
            live, self.prompt, self.live = self.live, None, None
            if self._free.detach() is not None:
                live.close()

    def counters_since_last_call(self, now: Mapping[str, float]) -> dict[str, float]:
        """Return the memory's counters `now`, but events (such as questions) counted only since the last call ended."""
        before, self._counted = self._counted, now
        return counter_increases_since(before, now)

    def begin_turn(self, attachment: ModelAttachment, inputs: Mapping[str, Any]) -> None:
        """Roll back to the prefix that the prompt `inputs` shares with the last conversation. Raises `ModelError` for a
        prompt that cannot continue from this cache."""
        if self._attachment is not attachment:
            raise ModelError(
                "past_key_values: another accelerated model returned it; give it to that one, or leave it out."
            )
        if self.live is None:
            raise ModelError("past_key_values: it is closed; leave it out, and give the whole prompt.")
        for name in PIXELS.values():
            if is_nonempty(inputs.get(name)):
                raise ModelError(
                    f"{name}: past_key_values has read the images and videos of its conversation, and takes no more; leave "
                    "the pixels out, or leave past_key_values out and give all of them."
                )
        ids, begun = (
            inputs["input_ids"].to(self.ids.device),
            self.prompt.ids_through_last_video.to(self.ids.device),
        )
        if ids.shape[1] <= len(begun) or not torch.equal(ids[0, : len(begun)], begun):
            raise ModelError(
                f"input_ids: they do not begin with the {len(begun)} tokens that past_key_values has read, up to the last "
                "image or video; give the whole conversation, or leave past_key_values out."
            )
        most = min(ids.shape[1] - 1, self.ids.shape[1])
        same = int((ids[0, :most] == self.ids[0, :most]).long().cumprod(0).sum())
        shown = attachment.family.placeholders(attachment.model)
        if bool(torch.isin(ids[0, same:], ids.new_tensor(shown)).any()):
            raise ModelError(
                "input_ids: they show an image or a video that past_key_values has not read, and it takes no more; leave "
                "past_key_values out, and give all pixels."
            )
        self.record_turn(ids[:, :same])

    def record_turn(self, ids: Tensor) -> None:
        """Record that the conversation now has the tokens `ids` [1, n], from which the next call may continue."""
        layout = self.prompt.layout.select_tokens(slice(0, ids.shape[1]))
        layout = layout.extend(ids.shape[1] - layout.length)
        self.ids, self.lasts = ids, True
        self._attachment.sequences[self] = Columns(layout, torch.zeros_like(ids[:, :1]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.ids.shape[1]

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: Any) -> StreamCache:
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            "past_key_values: a memory of streams serves `generate` of the accelerated model that returned it; leave it out."
        )

    update = get_mask_sizes = crop = reorder_cache = reset = __reduce__ = _refuse  # type: ignore[assignment]


def cache_length(cache: Any) -> int:
    """Return the number of tokens in `cache`; 0 for None."""
    return 0 if cache is None else int(cache.get_seq_length())


def unpadded_cache_layout(attachment: ModelAttachment, cache: Any) -> Columns | None:
    """Return the layout of the tokens in `cache`, if it is known and holds one sequence without padding; else None."""
    found, past = attachment.cached_columns(cache), cache_length(cache)
    if found is None or found.layout.batch != 1 or found.layout.length < past:
        return None
    layout = found.layout.select_tokens(slice(0, past))
    return None if layout.has_padding else Columns(layout, found.delta)


def why_draft_skipped(attachment: ModelAttachment, kwargs: Mapping[str, Any], count: int) -> str | None:
    """Return why a call of `count` sequences runs without the draft on a cache with tokens; None if the draft runs."""
    cache, ids, mask = kwargs["past_key_values"], kwargs.get("input_ids"), kwargs.get("attention_mask")
    if count > 1:
        return "past_key_values is of several sequences, and it reads one at a time"
    if unpadded_cache_layout(attachment, cache) is None:
        return "past_key_values holds padding, or another model filled it"
    if not isinstance(ids, Tensor) or (mask is not None and mask.shape != ids.shape):
        return "input_ids are not the whole conversation"
    if (ids.shape[1] if mask is None else int(mask.sum())) <= cache_length(cache):
        return "input_ids do not begin with what past_key_values holds"
    return None


def split_batch(family: Any, model: nn.Module, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the inputs of a batch into those of each sequence, padding included. Each sequence gets its own rows and pixels,
    and a copy of every other argument. Raises `ModelError` if pixels cannot be assigned to sequences."""
    if is_nonempty(inputs.get("mm_encoder_outputs")):
        raise ModelError(
            "mm_encoder_outputs: a batch is split by its pixels; give these, or prompts one by one."
        )
    layout = family.layout(model, inputs)
    rows: list[dict[str, Any]] = []
    for b in range(layout.batch):
        row = dict(inputs)
        for name in (*A_TOKEN, "attention_mask"):
            if is_nonempty(inputs.get(name)):
                row[name] = inputs[name][..., b : b + 1, :]
        rows.append(row)
    for kind in (IMAGE, VIDEO):
        shown = [layout.segment[b][layout.modality[b] == kind].unique().numel() for b in range(layout.batch)]
        for name, sizes in family.pixel_rows_per_item(inputs, kind).items():
            if sum(counts := shown) != len(sizes):
                counts = _tiles(family, inputs, layout, len(sizes)) or shown
            if sum(counts) != len(sizes):
                raise ModelError(
                    f"{name} has {len(sizes)} pictures or videos and input_ids {sum(counts)}, so that it cannot be told "
                    "which sequence each is of; give prompts one by one."
                )
            item, begin = 0, 0
            for row, count in zip(rows, counts, strict=True):
                end = begin + sum(sizes[item : item + count])
                row[name] = inputs[name][begin:end]
                if not count:
                    del row[name]
                item, begin = item + count, end
    return rows


def _tiles(family: Any, inputs: Mapping[str, Any], layout: TokenLayout, count: int) -> list[int] | None:
    """How many of `count` images each sequence has, where frames, or tiles of as many tokens each, come as images."""
    if family.split_images is None or is_nonempty(inputs.get(PIXELS[VIDEO])):
        return None
    if inputs[PIXELS[IMAGE]].ndim == 5:  # an axis of sequences
        return [1] * layout.batch
    tokens = [int(one.sum()) for one in layout.modality != TEXT]
    each = sum(tokens) // count
    return [some // each for some in tokens] if each and not any(some % each for some in tokens) else None


def allowed_tokens_for_sequence(
    allowed: Callable[[int, Tensor], Any], number: int, _: int, ids: Tensor
) -> Any:
    """Adapter of `prefix_allowed_tokens_fn` for a batch decoded one sequence at a time: passes the sequence's `number` in
    the batch, where transformers passes 0."""
    return allowed(number, ids)


def drop_padding(attachment: ModelAttachment, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` for one sequence, without its left padding."""
    mask = kwargs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return kwargs
    count = int((mask[0] == 0).sum())
    kwargs = remove_padding(kwargs)
    # A padding token within the prompt is a token like others: without a mask transformers would take it for padding.
    kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
    if not cache_length(kwargs.get("past_key_values")):
        attachment.prepare_layout(kwargs)
    # Lengths that count the prompt count its padding too: it is taken off those that were given.
    config: Any = kwargs.get("generation_config")
    held = config if config is not None else attachment.model.generation_config
    for name in ("max_length", "min_length"):
        value = kwargs.get(name) or getattr(held, name, None)
        if not value or (name not in kwargs and value == getattr(type(held)(), name)):
            continue  # a default counts nothing of the prompt
        if name in kwargs or config is None:
            kwargs[name] = value - count
        else:
            kwargs["generation_config"] = config = held = copy.deepcopy(held)
            setattr(config, name, value - count)
    return kwargs


def check_single_row(field: str, verdict: Tensor) -> Tensor:
    """Return `verdict`, what the processor or criterion `field` returned; raise `DraftError` unless it has one row."""
    if verdict.shape[0] != 1:
        raise DraftError(
            f"{field}: it returned results for {verdict.shape[0]} sequences when called with one, as sequences of a batch "
            "are decoded one by one here; give prompts one by one, or leave the draft out."
        )
    return verdict


@dataclass(frozen=True)
class SamplingDistribution:
    """Maps (ids before [S], logits [V]) of one token to probabilities [V], by logits processors. It is a class, not a
    closure, so that it can be pickled."""

    processors: Any
    sample: bool

    def __post_init__(self) -> None:
        cold = lambda x: isinstance(x, TemperatureLogitsWarper) and x.temperature < COLDEST  # noqa: E731
        if any(map(cold, self.processors or ())):  # scores by less are infinite, and no probabilities
            some = [TemperatureLogitsWarper(COLDEST) if cold(one) else one for one in self.processors]
            object.__setattr__(self, "processors", type(self.processors)(some))

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        scores = check_single_row("logits_processor", self.processors(ids[None], logits[None].float()))[0]
        if self.sample:
            return torch.softmax(scores, -1)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()
