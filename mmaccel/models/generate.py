"""`generate` of an accelerated model: its time limit, its decoding loop, and the meter around both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from mmaccel.core.deadline import Deadline, Ended
from mmaccel.core.errors import ModelError, warn
from mmaccel.models import step
from mmaccel.models.arguments import (
    LOOPS,
    OUTPUTS,
    Clock,
    asked,
    check_generate,
    columns,
    sequences,
    wants,
)
from mmaccel.models.attention import KVCache
from mmaccel.models.hf import Attachment


def generate(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
    """`generate` of an attached model, with a deadline where `max_time` is given.

    transformers looks at the time after each token. A prompt in pieces may also end between two pieces: then the result
    has no new token, a warning says so, and the caller's cache is as before.
    """
    names = list(inspect.signature(attachment.generate).parameters)
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    default = attachment.model.generation_config
    seconds = asked("max_time", kwargs, default)
    if not seconds or seconds < 0:
        return _untimed(attachment, kwargs)
    cache = kwargs.get("past_key_values")
    before = None
    if isinstance(cache, KVCache) and cache.state is not None:
        before = cache.sequence, cache.state.length()
    outer = getattr(attachment.promised, "deadline", None)
    attachment.promised.deadline = Deadline(seconds)
    try:
        return _untimed(attachment, kwargs)
    except Ended:
        if isinstance(cache, KVCache) and before is not None and cache.state is not None:
            # A memory that forgets may not reach back so far; the next call then says so itself.
            with suppress(ModelError):
                cache.state.truncate(before[1])
                cache.sequence = before[0]
        warn(
            "max_time: the time ran out before the prompt was read, so no token was generated; give more seconds."
        )
        return _nothing(kwargs, default)
    finally:
        attachment.promised.deadline = outer


def _untimed(attachment: Attachment, kwargs: dict[str, Any]) -> Any:
    """`generate`, without a deadline of its own."""
    default = attachment.model.generation_config
    check_generate(attachment.owner.recipe, kwargs, default)
    if attachment.pruning is not None and asked("use_cache", kwargs, default) is False:
        # Without a memory each token would have the prompt pruned anew, by a question that has grown.
        out = _untimed(attachment, {**kwargs, "use_cache": True})
        if not isinstance(out, Tensor):
            out.past_key_values = None
        return out
    if kwargs.get("input_ids") is None and isinstance(kwargs.get("inputs"), Tensor):
        kwargs["input_ids"] = kwargs.pop("inputs")
    ids, draft = kwargs.get("input_ids"), attachment.owner.recipe.draft.active
    keeps = asked("use_cache", kwargs, default) is not False or draft or not isinstance(ids, Tensor)
    if kwargs.get("past_key_values") is None and keeps:
        kwargs["past_key_values"] = attachment.cache()
    meter = attachment.owner.attention.meter
    meter.begin(attachment.owner.view.device)
    cache, outer = kwargs.get("past_key_values"), dict(attachment.promised.__dict__)
    if chunk := asked("prefill_chunk_size", kwargs, default):
        attachment.promised.chunk, kwargs["prefill_chunk_size"] = chunk, None
    if isinstance(ids, Tensor) and (cache is None or not cache.get_seq_length()):
        attachment.promise(kwargs)
    try:
        rests = draft and _draft_rests(attachment, kwargs)
        if (draft and not rests) or _captures(attachment, kwargs):
            from mmaccel.models import drafting

            return drafting.generate(attachment, kwargs)
        if not wants("num_beams", asked("num_beams", kwargs, default)):
            kwargs["streamer"] = Clock(meter.token, kwargs.get("streamer"))
        out = attachment.generate(**attachment.limited(kwargs))
        if rests:
            attachment.draft_times.plain(sequences(kwargs, default), columns(kwargs), meter)
        return out
    finally:
        # A model may be its own assistant, and be asked while it is at work.
        attachment.promised.__dict__.update({"held": None, "chunk": None, **outer})
        meter.end()


def _draft_rests(attachment: Attachment, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `generate` runs without the draft; adds a note and, the first time, a warning.

    False where the recipe or the call needs our loop. True for a sampled batch: a measured time must not change which
    tokens are sampled.
    """
    times = attachment.draft_times
    owner, count = attachment.owner, sequences(kwargs, attachment.model.generation_config)
    choice = owner.recipe.draft.in_batches
    if count == 1 or choice == "always":
        return False
    # A memory that counts columns takes no padding, a pruned target no batch; the rest is refused under a draft.
    ours = not owner.recipe.kv.exact or owner.recipe.prune is not None or kwargs.get("streamer") is not None
    default = attachment.model.generation_config
    # Plain decoding without a cache reads the prompt anew at each step.
    if ours or kwargs["past_key_values"].get_seq_length() or asked("use_cache", kwargs, default) is False:
        return False
    sampled = asked("do_sample", kwargs, default)
    if choice == "never":
        why: str | None = "in_batches is 'never'"
    elif sampled:
        why = "tokens are sampled, and measured times must not change them"
    else:
        why = times.why_not(count, columns(kwargs))
    if why is None:
        return False
    told = f"it does not draft in a batch of {count}: {why}"
    owner.attention.meter.note(f"draft: {told}")
    if not times.warned and choice != "never":
        times.warned = True
        warn(f"draft {owner.recipe.draft.name!r}: {told}; set in_batches to 'always' to have it draft.")
    return True


def _captures(attachment: Attachment, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call without a draft is decoded in our loop: where steps are captured, which one row after the other gains
    most from, and nothing is asked for that the loop has not."""
    if attachment.owner.view.device.type not in step.DEVICES:
        return False
    ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    if not isinstance(ids, Tensor) or ids.shape[0] != 1 or cache is None or cache.get_seq_length():
        return False
    default = attachment.model.generation_config
    ours = not any(wants(name, asked(name, kwargs, default)) for name in (*LOOPS, *OUTPUTS))
    if not ours:
        return False
    from mmaccel.models.decode import admits

    return admits(attachment.model, attachment.family, cache)


def _nothing(kwargs: dict[str, Any], default: Any) -> Any:
    """The result of a `generate` without a new token."""
    ids: Tensor = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs"]
    ids = ids.repeat_interleave(asked("num_return_sequences", kwargs, default) or 1, 0)
    if (streamer := kwargs.get("streamer")) is not None:
        streamer.end()
    if not asked("return_dict_in_generate", kwargs, default):
        return ids
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]
