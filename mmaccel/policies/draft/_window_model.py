"""Predicts the speed of the `parallel` draft, to choose its window (tokens a round) and whether it reads a pruned prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mmaccel.core.prefill.prune import TokenPruner

TOKENS_KNOWN, ASSUMED = 4.0, 0.8
"""The share that is assumed to be kept before anything was judged, and how many judged tokens it weighs."""
KNOWN = 24
"""Drafted tokens that the target must have verified before the acceptance rate counts as known."""
WORTH = 1.05
"""How many times faster a part must be at best before it is tried."""
SETTLED = 4
"""Rounds before the measured gain is believed."""
PAUSE, LONGEST = 64, 6
"""Tokens the target decodes by itself before a draft that does not pay is tried again; how often that is doubled at most."""
ANSWERS = 2
"""Answers after which a way counts as measured in any case: a draft that is never ready in time gains nothing."""


def tokens_per_round(keep: float, window: int) -> float:
    """Return the expected number of tokens that the `parallel` draft commits per target step, if each drafted token is
    accepted with probability `keep`, independently. `window`: tokens drafted a round.

    In pre-verify a step commits one token. In post-verify it commits the accepted tokens and one more, at most `window`: (1
    - keep^w) / (1 - keep) on average. Pre-verify changes to post-verify with probability `keep`, and post-verify stays with
    probability keep^w. The result weights both with their share of steps.
    """
    if keep >= 1:
        return float(window)
    whole = keep**window
    return (1 - whole) / ((1 - keep) * (1 + keep - whole))


def expected_gain(step_s: float, draft_s: float, keep: float, window: int) -> float:
    """Return the expected speed-up over plain decoding, with target steps of `step_s` and draft steps of `draft_s`
    seconds."""
    return tokens_per_round(keep, window) * step_s / max(window * draft_s, step_s)


def best_window(step_s: float, draft_s: float, keep: float, most: int) -> tuple[int, float]:
    """Return the window from 1 to `most` with the largest `expected_gain`, and that gain.

    Only the two whole numbers around step_s / draft_s can be best: with a longer window the target waits for the draft, with
    a shorter one the draft is idle.
    """
    ratio = step_s / max(draft_s, 1e-9)
    low = min(max(math.floor(ratio + 1e-9), 1), most)
    gains = {window: expected_gain(step_s, draft_s, keep, window) for window in {low, min(low + 1, most)}}
    window = max(gains, key=lambda w: (gains[w], -w))
    return window, gains[window]


@dataclass
class PipelineTimes:
    """Running means of the seconds of a target step (`step_s`) and a draft step (`draft_s`), and the counts of verified
    (`judged`) and accepted (`kept`) tokens.

    Steps become slower as the context grows, so recent steps weigh most: each moves the mean by the share `rate`. The first
    steps may take several times as long, as they are compiled and captured: a time below half the mean replaces the mean,
    and one above twice the mean counts as twice.

    pauses  how many times in a row drafting was paused because it did not save time
    rest    tokens for which drafting is still paused when the next answer begins
    """

    rate: float = 0.2
    step_s: float = 0.0
    draft_s: float = 0.0
    judged: float = TOKENS_KNOWN
    kept: float = TOKENS_KNOWN * ASSUMED
    rounds: int = 0
    pauses: int = 0
    rest: int = 0

    def begin_answer(self) -> None:
        """Begin another answer: let the tokens verified so far weigh at most `KNOWN` tokens in the acceptance rate."""
        share = min(1.0, KNOWN / self.judged)
        self.judged, self.kept = self.judged * share, self.kept * share

    def record_target_step(self, seconds: float) -> None:
        """Record the seconds of one target step."""
        self.step_s = self._mean(self.step_s, seconds)

    def record_draft_steps(self, seconds: float, count: int) -> None:
        """Record that `count` draft steps took `seconds` together."""
        self.draft_s = self._mean(self.draft_s, seconds / count)

    def _mean(self, before: float, now: float) -> float:
        if now < before / 2 or not before:
            return now
        return before + self.rate * (min(now, 2 * before) - before)

    def record_verification(self, kept: int, refused: bool) -> None:
        """Record that `kept` drafted tokens were accepted and, if `refused`, that the token after them was rejected."""
        self.rounds += 1
        self.judged += kept + refused
        self.kept += kept

    def pause_length(self, gain: float) -> int:
        """Return for how many tokens to pause drafting, given the expected speed-up `gain`: 0 in the first rounds and above
        `WORTH` (1 and a margin for messages between processes); else `PAUSE`, doubled with each pause in a row."""
        if gain > WORTH:
            self.pauses = 0
        if self.rounds < SETTLED or gain > WORTH:
            return 0
        self.rounds, self.pauses = 1, self.pauses + 1
        return PAUSE << min(self.pauses - 1, LONGEST)

    @property
    def keep(self) -> float:
        return self.kept / self.judged

    @property
    def is_measured(self) -> bool:
        """Whether the step times of both target and draft were measured."""
        return self.step_s > 0 and self.draft_s > 0


@dataclass
class PipelineStats:
    """Statistics of the `parallel` draft during one answer.

    figures  counts of rounds in each mode, rounds in which the draft was late, tokens drafted, and pauses
    streaks  numbers of drafted tokens accepted in a row, across windows (ParallelVLM's adaptive length); the last one goes
             on
    windows  tokens requested in each window
    ready    tokens drafted when the target's first token came
    prompt_s, pruned  seconds in which the draft read the prompt, and how many prompt tokens a pruner left out
    gain     expected speed-up of the best window over plain decoding
    """

    figures: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("pre_verify", "post_verify", "alone", "late", "drafted", "pauses"), 0
        )
    )
    streaks: list[int] = field(default_factory=lambda: [0])
    windows: list[int] = field(default_factory=list)
    ready: int = 0
    prompt_s: float = 0.0
    pruned: int = 0
    gain: float | None = None

    def record_round(self, kept: int, refused: bool) -> None:
        """Record a round in which `kept` drafted tokens were accepted, and then one rejected if `refused`."""
        self.streaks[-1] += kept
        if refused:
            self.streaks.append(0)

    def report_notes(self, pace: PipelineTimes) -> list[str]:
        """Return sentences for the report: how many tokens the target decoded without the draft, and why drafting paused."""
        notes = []
        if alone := self.figures["alone"]:
            steps = f"{alone} target step{'' if alone == 1 else 's'}"
            notes.append(f"{steps} without it, while it read the prompt, paused or said nothing")
        if pauses := self.figures["pauses"]:
            ratio = pace.step_s / pace.draft_s
            notes.append(
                f"paused {pauses} time{'' if pauses == 1 else 's'}: a target step takes {ratio:.2f} draft steps, "
                f"with {pace.keep:.0%} kept the best window is worth {self.gain:.2f} x"
            )
        return notes

    def counters(self, pace: PipelineTimes, window: int) -> dict[str, float]:
        """Return the counters of this answer for the report, by name. `window`: tokens of the last window."""
        streaks, windows = [*filter(None, self.streaks)] or [0], self.windows or [0]
        return {
            **{name: float(value) for name, value in self.figures.items()},
            "streak_mean": sum(streaks) / len(streaks),
            "streak_max": float(max(streaks)),
            "window": float(window),
            "window_mean": sum(windows) / len(windows),
            "ready_at_start": float(self.ready),
            "target_step_s": pace.step_s,
            "draft_step_s": pace.draft_s,
            "draft_prompt_s": self.prompt_s,
            "pruned": float(self.pruned),
            "keep_rate": pace.keep,
            **({} if self.gain is None else {"expected_gain": self.gain}),
        }


@dataclass
class ReadingStats:
    """Measurements of answers for which a draft read its prompt in one way, whole or pruned: tokens verified, step times."""

    judged: float = 0.0
    kept: float = 0.0
    step_s: float = 0.0
    draft_s: float = 0.0
    answers: int = 0

    def add(self, pace: PipelineTimes) -> None:
        """Add the measurements `pace` of an answer that has ended."""
        self.answers += 1
        self.judged += pace.judged - TOKENS_KNOWN
        self.kept += pace.kept - TOKENS_KNOWN * ASSUMED
        if pace.is_measured:
            self.step_s, self.draft_s = pace.step_s, pace.draft_s

    @property
    def known(self) -> bool:
        return self.judged >= KNOWN or self.answers >= ANSWERS

    def gain(self, window: int | None, most: int) -> float:
        """Return the expected speed-up over plain decoding by `window`, or (None) the best one up to `most`; 0: unknown."""
        if not self.step_s or not self.draft_s or self.judged < 1:
            return 0.0
        figures = self.step_s, self.draft_s, self.kept / self.judged
        return best_window(*figures, most)[1] if window is None else expected_gain(*figures, window)


class PromptReading(NamedTuple):
    """How a draft reads the prompt of one answer: with the part of the video that `pruner` keeps, or whole (None). `note` is
    the reason, for the report; `way` collects the measurements of answers read in the same way."""

    way: ReadingStats
    pruner: TokenPruner | None
    note: str


@dataclass
class ReadingChoice:
    """Chooses whether a draft reads the whole video or a pruned one, by the speed measured with each. Prompts are compared
    with earlier ones of similar length (the same number of bits).

    bare_s  seconds of a draft step after a minimal prompt, the least that pruning can reach; None: not measured
    """

    bare_s: float | None = None
    ways: dict[int, tuple[ReadingStats, ReadingStats]] = field(default_factory=dict)

    def reading(
        self, pruner: TokenPruner, length: int, window: int | None, most: int, sampled: bool
    ) -> PromptReading:
        """Choose how to read a prompt of `length` tokens: whole, until that is measured; then once pruned; then the faster
        way.

        Pruning is not tried if even the shortest draft step (`bare_s`), at the same acceptance rate, would not be `WORTH`
        times faster. With `sampled` tokens and a given `window` the prompt is read whole: times must not change which tokens
        are drawn.
        """
        whole, less = self.ways.setdefault(length.bit_length(), (ReadingStats(), ReadingStats()))
        gain, of_part, thinned = (whole.gain(window, most), less.gain(window, most), _kept_share_text(pruner))
        at_best = math.inf
        if self.bare_s and whole.draft_s:
            at_best = replace(whole, draft_s=min(self.bare_s, whole.draft_s)).gain(window, most)
        if sampled and window is not None:
            prunes, why = False, "tokens are sampled, and measured times must not change them"
        elif not whole.known:
            prunes, why = False, f"it is measured first, before {thinned}"
        elif less.known:
            prunes = of_part > gain
            why = f"expected {gain:.2f} x with the whole video, {of_part:.2f} x with {thinned}"
        elif at_best < WORTH * gain:
            prunes, why = False, f"expected {gain:.2f} x, and {at_best:.2f} x at most with {thinned}"
        else:
            prunes, why = True, "to measure it"
        way, chosen = (less, pruner) if prunes else (whole, None)
        return PromptReading(way, chosen, f"it read {_kept_share_text(chosen)}: {why}")

    def close(self) -> None:
        """Do nothing, as there is nothing to free."""


def _kept_share_text(pruner: Any) -> str:
    """Say which share of the video `pruner` keeps; None: the whole."""
    if pruner is None:
        return "the whole video"
    share = getattr(pruner, "retention", None)
    return "a part of the video" if share is None else f"{share:g} of the video"
