"""Decides whether a draft runs for a batch. With a draft each sequence takes its own target steps, one sequence after the
other; a plain step serves the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.core.errors import warn
from mmaccel.core.report import Meter
from mmaccel.models.arguments import asked

if TYPE_CHECKING:
    from mmaccel.models.hf import Attachment

MARGIN = 1.1
"""How many times faster than plain steps of the batch a draft must be."""
STEPS = 4
"""A call with fewer steps is not measured."""
TIMED = 2
"""Plain calls of a batch's size that are timed before a draft may act there: the first step may be compiled or captured."""


@dataclass
class Turns:
    """Times measured on one accelerated model, and the decision for a batch.

    A step takes longer on a longer prompt, so that times are kept apart by the number of binary digits of the prompt's
    length: those of prompts of 1,024 to 2,047 columns are together.

    drafted_s  for each class of lengths the seconds that a token of one sequence takes with the draft, from the last call
               that drafted, of any batch; a class next to it will do, for a prompt given alone is rarely as long as a batch
    plain_s    for each size of a batch and class of lengths the seconds of its plain steps, each of which gives every
               sequence a token, by call
    """

    drafted_s: dict[int, float] = field(default_factory=dict)
    plain_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    warned: bool = False

    def drafted(self, length: int, seconds: float, tokens: int) -> None:
        """A call with a draft, on prompts of `length` columns, took `seconds` for `tokens`, over all its sequences."""
        if tokens >= STEPS:
            self.drafted_s[length.bit_length()] = seconds / tokens

    def plain(self, batch: int, length: int, meter: Meter) -> None:
        """A plain call of `batch` sequences, on prompts of `length` columns, has ended."""
        steps, key = meter.new_tokens - 1, (batch, length.bit_length())
        if steps >= STEPS and meter.first is not None and meter.last is not None:
            self.plain_s[key] = [*self.plain_s.get(key, []), (meter.last - meter.first) / steps][-TIMED:]

    def why_not(self, batch: int, length: int) -> str | None:
        """Why a draft would not be faster in a batch of this size, on prompts of `length` columns; None: it is."""
        size = length.bit_length()
        timed = self.plain_s.get((batch, size), [])
        own = next(
            (self.drafted_s[near] for near in (size, size + 1, size - 1) if near in self.drafted_s), None
        )
        if own is None:
            return f"a drafted token is timed on a prompt of about {length} tokens given alone, and none was given"
        if len(timed) < TIMED:
            alike = f"{1 << size >> 1} to {(1 << size) - 1} tokens"
            return f"plain steps of {batch} sequences, of {alike} each, must first be timed in {TIMED} calls"
        turns, step = own * batch, min(timed)
        if turns * MARGIN <= step:
            return None
        return f"a token for each takes {turns * 1e3:.3g} ms with a draft in turns, {step * 1e3:.3g} ms in plain steps"

    def rests(self, attachment: Attachment, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of `generate` runs without the draft; adds a note and, the first time, a warning.

        False where the recipe or the call needs our loop. True for a sampled batch: a measured time must not change which
        tokens are sampled.
        """
        owner, count = attachment.owner, sequences(attachment, kwargs)
        choice = owner.recipe.draft.in_batches
        if count == 1 or choice == "always":
            return False
        # A memory that counts columns takes no padding, a pruned target no batch; the rest is refused under a draft.
        ours = (
            not owner.recipe.kv.exact or owner.recipe.prune is not None or kwargs.get("streamer") is not None
        )
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
            why = self.why_not(count, columns(kwargs))
        if why is None:
            return False
        told = f"it does not draft in a batch of {count}: {why}"
        owner.road.meter.note(f"draft: {told}")
        if not self.warned and choice != "never":
            self.warned = True
            warn(f"draft {owner.recipe.draft.name!r}: {told}; set in_batches to 'always' to have it draft.")
        return True


def sequences(attachment: Attachment, kwargs: Mapping[str, Any]) -> int:
    """How many sequences a call of `generate` writes."""
    ids, default = kwargs.get("input_ids"), attachment.model.generation_config
    return (len(ids) if isinstance(ids, Tensor) else 1) * (
        asked("num_return_sequences", kwargs, default) or 1
    )


def columns(kwargs: Mapping[str, Any]) -> int:
    """The length of the prompts of a call of `generate`, with their padding."""
    ids = kwargs.get("input_ids")
    return ids.shape[1] if isinstance(ids, Tensor) else 0
