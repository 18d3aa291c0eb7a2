"""`max_time` of `generate`, checked also between the pieces of a prompt, and for a batch as a whole."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.core.deadline import Deadline, Ended
from mmaccel.core.errors import ModelError, warn
from mmaccel.models.arguments import asked
from mmaccel.models.cache import KVCache

if TYPE_CHECKING:
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
        return attachment.generated(**kwargs)
    cache = kwargs.get("past_key_values")
    before = None
    if isinstance(cache, KVCache) and cache.state is not None:
        before = cache.sequence, cache.state.length()
    outer = getattr(attachment.promised, "deadline", None)
    attachment.promised.deadline = Deadline(seconds)
    try:
        return attachment.generated(**kwargs)
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


def check(attachment: Attachment) -> None:
    """Raise `Ended` when the `generate` of this thread has used up its time."""
    deadline: Deadline | None = getattr(attachment.promised, "deadline", None)
    if deadline is not None:
        deadline.check()


def left(attachment: Attachment, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` for one sequence of a call, with the seconds left of the call; raises `Ended` for none."""
    deadline: Deadline | None = getattr(attachment.promised, "deadline", None)
    check(attachment)
    return kwargs if deadline is None else {**kwargs, "max_time": deadline.left()}


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
