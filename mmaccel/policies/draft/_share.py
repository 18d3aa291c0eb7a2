"""Decides how much of the video a draft reads: all of it or what its pruner keeps, whichever is measured to be faster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mmaccel.core.prune import TokenPruner
from mmaccel.policies.draft._gain import ASSUMED, TOKENS_KNOWN, Pace, best_window, tokens_per_round

KNOWN = 24
"""Drafted tokens that the target must have verified before the acceptance rate counts as known."""
WORTH = 1.05
"""How many times faster a part must be at best before it is tried."""
ANSWERS = 2
"""Answers after which a way counts as measured in any case: a draft that is never ready in time gains nothing."""


@dataclass
class Way:
    """Measurements of a draft that reads all of the video, or of one that reads a part."""

    judged: float = 0.0
    kept: float = 0.0
    step_s: float = 0.0
    draft_s: float = 0.0
    answers: int = 0

    def add(self, pace: Pace) -> None:
        """Add the figures of an answer that has ended."""
        self.answers += 1
        self.judged += pace.judged - TOKENS_KNOWN
        self.kept += pace.kept - TOKENS_KNOWN * ASSUMED
        if pace.known:
            self.step_s, self.draft_s = pace.step_s, pace.draft_s

    @property
    def known(self) -> bool:
        return self.judged >= KNOWN or self.answers >= ANSWERS

    def gain(self, window: int | None, most: int) -> float:
        """The expected speed-up over decoding alone, at `window` or, where that is None, at the best one up to `most`."""
        if not self.step_s or not self.draft_s or self.judged < 1:
            return 0.0
        keep = self.kept / self.judged
        if window is None:
            return best_window(self.step_s, self.draft_s, keep, most)[1]
        return tokens_per_round(keep, window) * self.step_s / max(window * self.draft_s, self.step_s)


@dataclass
class Reading:
    """What the draft reads for one answer: what `pruner` keeps, or everything (None); `why` is for the report."""

    way: Way
    pruner: TokenPruner | None
    why: str
    ended: bool = False

    def end(self, pace: Pace) -> None:
        """Take the figures of the answer, which has ended; a second call does nothing."""
        if not self.ended:
            self.way.add(pace)
        self.ended = True

    def note(self) -> str:
        """A sentence for the report."""
        return f"it read {part(self.pruner)}: {self.why}"


@dataclass
class Shares:
    """The two ways of one accelerated model, measured apart by power of two of the prompt's length.

    bare_s  seconds of a draft step after hardly any prompt, or None where that was not measured
    """

    bare_s: float | None = None
    ways: dict[int, tuple[Way, Way]] = field(default_factory=dict)

    def reading(
        self, pruner: TokenPruner, length: int, window: int | None, most: int, sampled: bool
    ) -> Reading:
        """How to read a prompt of `length` tokens: the whole video first, once pruned to measure that, then the faster.

        A part is not tried where even steps with nothing to read, with as many tokens accepted, would not gain `WORTH`.
        With `sampled` tokens and a given window it is always the whole: times must not change which tokens are sampled.
        """
        whole, less = self.ways.setdefault(length.bit_length(), (Way(), Way()))
        if sampled and window is not None:
            return Reading(whole, None, "tokens are sampled, and measured times must not change them")
        if not whole.known:
            return Reading(whole, None, f"it is measured first, before {part(pruner)}")
        if not less.known and self.bare_s and whole.draft_s:
            most_of_all = replace(whole, draft_s=min(self.bare_s, whole.draft_s)).gain(window, most)
            gain = whole.gain(window, most)
            if most_of_all < WORTH * gain:
                told = f"expected {gain:.2f} x, and {most_of_all:.2f} x at most with {part(pruner)}"
                return Reading(whole, None, told)
        if not less.known:
            return Reading(less, pruner, "to measure it")
        gains = whole.gain(window, most), less.gain(window, most)
        told = f"expected {gains[0]:.2f} x with the whole video, {gains[1]:.2f} x with {part(pruner)}"
        return Reading(less, pruner, told) if gains[1] > gains[0] else Reading(whole, None, told)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def part(pruner: Any) -> str:
    """The share of the video that `pruner` leaves, in words."""
    if pruner is None:
        return "the whole video"
    share = getattr(pruner, "retention", None)
    return "a part of the video" if share is None else f"{share:g} of the video"
