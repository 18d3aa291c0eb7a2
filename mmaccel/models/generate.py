"""`generate` of an accelerated model: unsupported arguments, the time limit, the choice of a decoding loop, the metrics.

Arguments that are not refused act as in transformers; `tests/models/test_arguments.py` checks every argument of the
installed version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mmaccel.core.adapter import tensor_parallel_size
from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.errors import DraftError, MmaccelError, ModelError, warn
from mmaccel.core.report import Meter
from mmaccel.models import step
from mmaccel.models.attention import KVCache
from mmaccel.models.hf import ModelAttachment
from mmaccel.models.next_turn import check_prompt_extends_cache
from mmaccel.models.prompt_layout import bind_args, padded_length

MARGIN = 1.1
"""How many times faster than plain steps of the batch a draft must be: with one each sequence takes its own target steps,
one sequence after the other, and a plain step serves the whole batch."""
STEPS = 4
"""A call with fewer steps is not measured."""
TIMED = 2
"""Plain calls of a batch's size that are timed before a draft may act there: the first step may be compiled or captured."""

NEUTRAL: dict[str, Any] = {
    **dict(num_beams=1, num_return_sequences=1, guidance_scale=1.0, use_cache=True),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions"), False),
    **dict.fromkeys(("output_hidden_states", "use_mtp"), False),
}
"""The value of an argument that, like None, changes nothing."""

LOOPS = (
    *("num_beams", "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"),
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "custom_generate"),
)
"""Arguments of `generate` that choose a decoding loop."""

_LOOP = "{part} has a decoding loop of its own; leave one of the two out."
_ROWS = "{part} gives tokens, scores and logits only; leave it out, or detach the recipe."
DRAFT = {
    **dict.fromkeys(LOOPS, _LOOP),
    "num_beams": "{part} decodes each sequence with one beam; set num_beams to 1.",
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _ROWS),
    "inputs_embeds": "{part} reads token ids; give input_ids.",
    "guidance_scale": "it keeps state from earlier tokens, and {part} scores tokens that may be rejected; "
    "leave one of the two out.",
}
"""Arguments of `generate` that a draft does not take. It also refuses processors that remember (`sequences.STATEFUL`)."""
STREAM = {
    **DRAFT,
    "guidance_scale": "it runs the model beside {part}, which has one stream; leave it out, or set kv to 'full'.",
    "past_key_values": "{part} goes on with what its own `generate` returned; leave it out.",
    "position_ids": "{part} gives a stream positions of its own; leave them out.",
    **dict.fromkeys(
        ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"),
        "{part} takes a tower's features as the model's config says; leave it out.",
    ),
    "mm_encoder_outputs": "{part} reads videos by their pixels; give pixel_values_videos.",
}
"""The same of a memory of streams."""

OUTPUTS = ("num_return_sequences", "output_scores", "output_logits", "use_cache")
"""Arguments of `generate` that ask for more than the loop without a draft gives, beside those of `DRAFT`."""


def is_generate_option_set(attachment: ModelAttachment, name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a `generate` call sets the option `name`, also by a config, to other than its neutral value."""
    value = attachment.get_generate_option(name, kwargs)
    if name == "penalty_alpha":
        return bool(value)
    return isinstance(value, Tensor) or (value is not None and value != NEUTRAL.get(name))


def _check_generate(attachment: ModelAttachment, kwargs: Mapping[str, Any]) -> None:
    """Raise for an argument of `generate` that the recipe does not support: `DraftError` if its draft does not, else
    `ModelError`."""
    recipe = attachment.owner.recipe
    if is_generate_option_set(attachment, "cache_implementation", kwargs):
        raise ModelError(
            "cache_implementation: an accelerated model keeps its own cache; leave it out and choose kv in the recipe."
        )
    chunk = attachment.get_generate_option("prefill_chunk_size", kwargs)
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ModelError("prefill_chunk_size: it is a number of tokens; give at least 1, or leave it out.")
    if chunk is not None and recipe.prune is not None and recipe.prune.stage == "layer":
        raise ModelError(
            f"prefill_chunk_size: prune {recipe.prune.name!r} runs the prompt whole; leave it out."
        )
    parts: list[tuple[str, dict[str, str], type[MmaccelError]]] = []
    if not recipe.kv.sequences:
        from mmaccel.models.sequences import StreamCache

        parts.append((f"kv {recipe.kv.name!r}", STREAM, ModelError))
        if isinstance(kwargs.get("past_key_values"), StreamCache):
            kwargs = {**kwargs, "past_key_values": None}
    if recipe.draft.active:
        parts.append((f"draft {recipe.draft.name!r}", DRAFT, DraftError))
    for part, sentences, error in parts:
        for name, sentence in sentences.items():
            if is_generate_option_set(attachment, name, kwargs):
                raise error(f"{name}: {sentence.format(part=part)}")
        if kwargs.get("input_ids") is None and kwargs.get("inputs") is None:
            raise error(f"input_ids: {part} reads token ids; give them.")


def generate(attachment: ModelAttachment, *args: Any, **kwargs: Any) -> Any:
    """`generate` of an accelerated model; its `max_time` covers the prefill too.

    transformers checks the time after each token. A chunked prefill may also stop between chunks: then the result has no new
    token, a warning says so, and the caller's cache is unchanged.
    """
    kwargs = bind_args(attachment.generate, args, kwargs)
    seconds = attachment.get_generate_option("max_time", kwargs)
    deadline = getattr(attachment.owner.seat, "deadline", None)
    if deadline is None and (not seconds or seconds < 0):
        return _untimed(attachment, kwargs)
    cache = kwargs.get("past_key_values")
    before = (cache.sequence, cache.state.length()) if isinstance(cache, KVCache) else None
    outer = getattr(attachment.running, "deadline", None)
    attachment.running.deadline = deadline or Deadline(seconds)
    try:
        return _untimed(attachment, kwargs)
    except CallEnded as end:
        if isinstance(cache, KVCache) and before is not None:
            # A memory that forgets may not reach back so far; the next call then says so itself.
            with suppress(ModelError):
                cache.crop(before[1] - cache.get_seq_length())
                cache.sequence = before[0]
        if end.reason == "timeout":
            warn(
                "max_time: the time ran out before the prompt was read: no token was generated; give more seconds."
            )
        return _nothing(attachment, kwargs)
    finally:
        attachment.running.deadline = outer


def _untimed(attachment: ModelAttachment, kwargs: dict[str, Any]) -> Any:
    _check_generate(attachment, kwargs)
    caches = attachment.get_generate_option("use_cache", kwargs) is not False
    given = kwargs.get("past_key_values") is not None
    if attachment.pruning is not None and not caches:
        # Without a memory each token would have the prompt pruned anew, by a question that has grown.
        out = _untimed(attachment, {**kwargs, "use_cache": True})
        if not isinstance(out, Tensor):
            out.past_key_values = None
        return out
    if kwargs.get("input_ids") is None and isinstance(kwargs.get("inputs"), Tensor):
        kwargs["input_ids"] = kwargs.pop("inputs")
    ids, draft = kwargs.get("input_ids"), attachment.owner.recipe.draft.active
    if isinstance(ids, Tensor) and kwargs.get("attention_mask") is None:
        kwargs |= _mask_of_padding(attachment, ids, kwargs)
    streams = not attachment.owner.recipe.kv.sequences
    if given and not streams and isinstance(ids, Tensor):
        check_prompt_extends_cache(attachment, kwargs, ids)
    if not (streams or given) and (caches or draft or not isinstance(ids, Tensor)):
        kwargs["past_key_values"] = attachment.open_kv_cache()
    meter = attachment.owner.attention.meter
    meter.begin_generation(
        attachment.owner.view.device, getattr(kwargs.get("past_key_values"), "read_sparsely", False)
    )
    if streams:
        attachment.owner.clear_kv_counters()
    cache, outer = kwargs.get("past_key_values"), dict(attachment.running.__dict__)
    held = 0 if cache is None else cache.get_seq_length()
    whole = isinstance(ids, Tensor) and ids.shape[1] > held
    read = getattr(getattr(cache, "sequence", None), "ids", None)
    read = None if read is None else read[:, :held]
    if chunk := attachment.get_generate_option("prefill_chunk_size", kwargs):
        attachment.running.chunk, kwargs["prefill_chunk_size"] = chunk, None
    if not streams and whole:
        attachment.prepare_layout(kwargs, held)
    try:
        rests = draft and not streams and _draft_rests(attachment, kwargs)
        seat = attachment.owner.seat
        if seat is not None:
            seat.alone = _alone(attachment, kwargs) or ""
        shares = seat is not None and not seat.alone
        ours = streams or shares or (draft and not rests) or _captures(attachment, kwargs)
        if ours or _in_turns(attachment, kwargs):
            from mmaccel.models import drafting

            told = given or bool(attachment.get_generate_option("return_dict_in_generate", kwargs))
            lasts = caches and told
            with cache.exclusive_call() if streams and cache is not None else nullcontext():
                out = drafting.generate(attachment, kwargs, lasts and (draft or streams))
                return _noted(cache, out, whole, read)
        if not is_generate_option_set(attachment, "num_beams", kwargs):
            kwargs["streamer"] = TokenCounter(meter.count_tokens, kwargs.get("streamer"))
        out = attachment.generate(**attachment.limit_to_max_positions(kwargs))
        if rests and not held:
            attachment.draft_times.record_without_draft(
                _sequences(attachment, kwargs), padded_length(kwargs), meter
            )
        return _noted(cache, out, whole, read)
    finally:
        # A model may be its own assistant, and be asked while it is at work.
        attachment.running.__dict__.update({"layout": None, "chunk": None, **outer})
        meter.generating = False
        if isinstance(cache, KVCache):
            cache.read_sparsely |= meter.has_run_patterns()


def _noted(cache: Any, out: Any, whole: bool, read: Tensor | None) -> Any:
    """Return the result `out` of a call; note in `cache`, if it is ours, which tokens it holds, where the call's ids were of
    the `whole` conversation; else those `read` [B, n] before it."""
    ids = out if isinstance(out, Tensor) else getattr(out, "sequences", None)
    if isinstance(cache, KVCache) and cache.sequence is not None and isinstance(ids, Tensor):
        same = whole and len(ids) == cache.sequence.layout.batch
        cache.sequence = replace(cache.sequence, ids=ids[:, : cache.get_seq_length()] if same else read)
    return out


def _mask_of_padding(
    attachment: ModelAttachment, ids: Tensor, kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The `attention_mask` that transformers infers for ids [B, S] given without one: 0 at padding, if no answer ends with
    that token; empty where there is none to infer."""
    pad, ends = (attachment.get_generate_option(name, kwargs) for name in ("pad_token_id", "eos_token_id"))
    ends = ends if isinstance(ends, list | tuple) else [ends]
    padding = ids == (-1 if pad is None or pad in ends else pad)
    return {"attention_mask": (~padding).long()} if bool(padding.any()) else {}


def _sequences(attachment: ModelAttachment, kwargs: Mapping[str, Any]) -> int:
    """How many sequences a call of `generate` writes."""
    ids = kwargs.get("input_ids")
    prompts = len(ids) if isinstance(ids, Tensor) else 1
    return prompts * (attachment.get_generate_option("num_return_sequences", kwargs) or 1)


def _draft_rests(attachment: ModelAttachment, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `generate` runs without the draft; adds a note and, the first time, a warning.

    False where the recipe or the call needs our loop. True for a sampled batch: a measured time must not change which
    tokens are sampled.
    """
    owner, times = attachment.owner, attachment.draft_times
    count, choice = _sequences(attachment, kwargs), owner.recipe.draft.in_batches
    if kwargs["past_key_values"].get_seq_length():
        from mmaccel.models.sequences import why_draft_skipped

        why = why_draft_skipped(attachment, kwargs, count)
        if why is not None:
            owner.attention.meter.add_note(f"draft: it does not draft in this turn: {why}")
            warn(f"draft {owner.recipe.draft.name!r} does not draft in this turn: {why}.")
        return why is not None
    if count == 1 or choice == "always":
        return False
    # A memory that counts columns takes no padding, a pruned target no batch; the rest is refused under a draft.
    ours = not owner.recipe.kv.exact or owner.recipe.prune is not None or kwargs.get("streamer") is not None
    # Plain decoding without a cache reads the prompt anew at each step.
    if ours or attachment.get_generate_option("use_cache", kwargs) is False:
        return False
    if choice == "never":
        why = "in_batches is 'never'"
    elif attachment.get_generate_option("do_sample", kwargs):
        why = "tokens are sampled, and measured times must not change them"
    elif tensor_parallel_size(attachment.model) > 1:
        why = "under tensor parallelism processes that go by their own clocks would part"
    else:
        why = times.why_draft_is_slower(count, padded_length(kwargs))
    if why is None:
        return False
    message = f"it does not draft in a batch of {count}: {why}"
    owner.attention.meter.add_note(f"draft: {message}")
    if not times.warned and choice != "never":
        times.warned = True
        warn(f"draft {owner.recipe.draft.name!r}: {message}; set in_batches to 'always' to have it draft.")
    return True


def _in_turns(attachment: ModelAttachment, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call that does not draft decodes its sequences each by itself, in our loop: a pruned prompt is one sequence,
    and in a memory that lets columns go padding would take the place of tokens."""
    recipe, cache, mask = attachment.owner.recipe, kwargs.get("past_key_values"), kwargs.get("attention_mask")
    begun = cache is not None and (not isinstance(cache, KVCache) or cache.get_seq_length() > 0)
    if begun or _sequences(attachment, kwargs) == 1:
        return False
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all())
    apart = recipe.prune is not None or (padded and not recipe.kv.exact)
    return apart and not any(is_generate_option_set(attachment, name, kwargs) for name in DRAFT)


def _captures(attachment: ModelAttachment, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call without a draft is decoded in our loop: where steps are captured, which one row after the other gains
    most from, and nothing is asked for that the loop has not."""
    if attachment.owner.view.device.type not in step.DEVICES:
        return False
    ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    if not isinstance(ids, Tensor) or ids.shape[0] != 1 or cache is None or cache.get_seq_length():
        return False
    if any(is_generate_option_set(attachment, name, kwargs) for name in (*DRAFT, *OUTPUTS)):
        return False
    from mmaccel.models.decode import can_capture_decode

    return can_capture_decode(attachment.model, attachment.family, cache)


def _alone(attachment: ModelAttachment, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call of `generate` is decoded by itself, not in steps that it shares with other calls; None: it shares them."""
    recipe, cache, ids = attachment.owner.recipe, kwargs.get("past_key_values"), kwargs.get("input_ids")
    if "branches" in recipe.draft.needs:
        return f"draft {recipe.draft.name!r} proposes trees"
    if not recipe.kv.sequences:
        return f"kv {recipe.kv.name!r} opens a stream for each prompt"
    if not isinstance(ids, Tensor) or ids.shape[0] != 1 or cache is None or cache.get_seq_length():
        return "it is not one new prompt of tokens"
    if asked := [name for name in (*DRAFT, *OUTPUTS) if is_generate_option_set(attachment, name, kwargs)]:
        return f"{asked[0]} was asked for"
    from mmaccel.models.together import why_not_batchable

    return why_not_batchable(attachment.model, attachment.family, cache)


def _nothing(attachment: ModelAttachment, kwargs: dict[str, Any]) -> Any:
    """The result of a `generate` without a new token."""
    ids: Tensor = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs"]
    ids = ids.repeat_interleave(attachment.get_generate_option("num_return_sequences", kwargs) or 1, 0)
    if (streamer := kwargs.get("streamer")) is not None:
        streamer.end()
    if not attachment.get_generate_option("return_dict_in_generate", kwargs):
        return ids
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]


@dataclass
class DecodeTimings:
    """Measured decoding times of one accelerated model, and from them whether a draft speeds up a batch.

    Times depend on the prompt's length, so they are grouped by its number of binary digits: 1,024 to 2,047 tokens are one
    group.

    drafted_s  group -> seconds per token of one sequence with the draft, in the last drafted call (of any batch size); a
               group without a time uses its neighbour's
    plain_s    (batch size, group) -> seconds per step without draft, in the last calls; a step gives each sequence a token
    """

    drafted_s: dict[int, float] = field(default_factory=dict)
    plain_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    warned: bool = False

    def record_drafted(self, length: int, seconds: float, tokens: int) -> None:
        """Record a drafted call on prompts of `length` tokens: `seconds` for `tokens` new tokens over all its sequences."""
        if tokens >= STEPS:
            self.drafted_s[length.bit_length()] = seconds / tokens

    def record_without_draft(self, batch: int, length: int, meter: Meter) -> None:
        """Record a call without draft: `batch` sequences with prompts of `length` tokens, timed by `meter`."""
        steps, key = meter.new_tokens - 1, (batch, length.bit_length())
        if steps >= STEPS and meter.first is not None and meter.last is not None:
            self.plain_s[key] = [*self.plain_s.get(key, []), (meter.last - meter.first) / steps][-TIMED:]

    def why_draft_is_slower(self, batch: int, length: int) -> str | None:
        """Return why a draft would not speed up a batch of this size on prompts of `length` tokens; None if it would."""
        size, held = length.bit_length(), self.drafted_s
        timed = self.plain_s.get((batch, size), [])
        own = next((held[near] for near in (size, size + 1, size - 1) if near in held), None)
        if own is None:
            return f"a drafted token is timed on a prompt of about {length} tokens given alone, and none was given"
        if len(timed) < TIMED:
            alike = f"{1 << size >> 1} to {(1 << size) - 1} tokens"
            return f"plain steps of {batch} sequences, of {alike} each, must first be timed in {TIMED} calls"
        turns, step = own * batch, min(timed)
        if turns * MARGIN <= step:
            return None
        return f"a token for each takes {turns * 1e3:.3g} ms with a draft in turns, {step * 1e3:.3g} ms in plain steps"


class TokenCounter:
    """A streamer for `generate` that reports how many tokens have reached the host, by `count_tokens`, and forwards the
    tokens to `inner`."""

    def __init__(self, count_tokens: Callable[[int], None], inner: Any) -> None:
        self.count_tokens, self.inner, self.prompt = count_tokens, inner, True

    def put(self, value: Tensor) -> None:
        """Report the number of new tokens in `value` [B] or [1, n] (the first call has the prompt), and forward them."""
        if not self.prompt:
            # [B] tokens of a step, or [1, n] that were guessed and verified.
            self.count_tokens(value.shape[1] if value.ndim == 2 else 1)
        self.prompt = False
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """Tell `inner` that the last token has come."""
        if self.inner is not None:
            self.inner.end()
