"""Expected speed of a pipelined draft: the best window, and how much of the video the draft reads, from measured times."""

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
    """Tokens committed in a target step of the pipeline, each drafted token kept with probability `keep` on its own.

    Two states: pre-verify commits one token; post-verify judges `window` and commits what is kept and one more, at most
    `window`: (1 - keep^w) / (1 - keep) on average. It goes on with probability keep^w, pre-verify goes over to it with
    `keep`. Weighted with the share of rounds in each state.
    """
    if keep >= 1:
        return float(window)
    whole = keep**window
    return (1 - whole) / ((1 - keep) * (1 + keep - whole))


def expected_gain(step_s: float, draft_s: float, keep: float, window: int) -> float:
    """The speed-up over decoding alone, of target steps and draft steps of so many seconds."""
    return tokens_per_round(keep, window) * step_s / max(window * draft_s, step_s)


def best_window(step_s: float, draft_s: float, keep: float, most: int) -> tuple[int, float]:
    """The window with the largest expected speed-up over decoding alone, and that speed-up.

    step_s is a target step, draft_s a draft step; only the two whole numbers around their ratio can be best: a longer window
    makes the target wait for more than it gains, a shorter one leaves the draft idle.
    """
    ratio = step_s / max(draft_s, 1e-9)
    low = min(max(math.floor(ratio + 1e-9), 1), most)
    gains = {window: expected_gain(step_s, draft_s, keep, window) for window in {low, min(low + 1, most)}}
    window = max(gains, key=lambda w: (gains[w], -w))
    return window, gains[window]


@dataclass
class Pace:
    """Running means of what a step takes, and of the share of drafted tokens that is kept; recent rounds count most.

    Context grows with every token, and both times with it: the means forget at `rate` a round. The first steps of a sequence
    may take several times what others take, since they are compiled and captured: a time of less than half the mean starts
    it anew, and one of more than twice the mean counts as twice.

    pauses  how often in a row a draft was found not to pay, and `rest` the tokens that it rests at the next answer
    """

    rate: float = 0.2
    step_s: float = 0.0
    draft_s: float = 0.0
    judged: float = TOKENS_KNOWN
    kept: float = TOKENS_KNOWN * ASSUMED
    rounds: int = 0
    pauses: int = 0
    rest: int = 0

    def go_on(self) -> None:
        """Another answer begins: of what was judged before, the last `KNOWN` tokens count."""
        share = min(1.0, KNOWN / self.judged)
        self.judged, self.kept = self.judged * share, self.kept * share

    def step(self, seconds: float) -> None:
        """Note the seconds of one target step."""
        self.step_s = self._mean(self.step_s, seconds)

    def drafted(self, seconds: float, count: int) -> None:
        """`count` draft steps took `seconds` together."""
        self.draft_s = self._mean(self.draft_s, seconds / count)

    def _mean(self, before: float, now: float) -> float:
        if now < before / 2 or not before:
            return now
        return before + self.rate * (min(now, 2 * before) - before)

    def judge(self, kept: int, refused: bool) -> None:
        """Note that `kept` tokens of a window were accepted before the first refused one, if any."""
        self.rounds += 1
        self.judged += kept + refused
        self.kept += kept

    def pause(self, gain: float) -> int:
        """How many tokens a draft of this expected gain rests, each time twice as many as the time before; 0: it works."""
        if self.rounds < SETTLED or gain > 1.0:
            self.pauses = 0 if gain > WORTH else self.pauses
            return 0
        self.rounds, self.pauses = 1, self.pauses + 1
        return PAUSE << min(self.pauses - 1, LONGEST)

    @property
    def keep(self) -> float:
        return self.kept / self.judged

    @property
    def known(self) -> bool:
        """Whether both times were measured."""
        return self.step_s > 0 and self.draft_s > 0


@dataclass
class Tally:
    """What the pipeline of one answer counted.

    figures  rounds of each mode, rounds in which the draft was late, tokens drafted, pauses
    streaks  drafted tokens kept in a row over windows, the paper's adaptive length; the last one goes on
    windows  tokens that were asked for, window by window
    ready    tokens that were there at the target's first, after `prompt_s` seconds in which the draft read the prompt
    gain     what the best window is expected to be worth
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
    gain: float | None = None

    def judged(self, kept: int, refused: bool) -> None:
        """A round kept so many tokens; `refused`: and then the target said something else."""
        self.streaks[-1] += kept
        if refused:
            self.streaks.append(0)

    def notes(self, pace: Pace) -> list[str]:
        """How often the target decoded without the draft, and why that paused, in words."""
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

    def counters(self, pace: Pace, window: int) -> dict[str, float]:
        """The figures for the report; `window` is the last one."""
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
            "keep_rate": pace.keep,
            **({} if self.gain is None else {"expected_gain": self.gain}),
        }


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
        figures = self.step_s, self.draft_s, self.kept / self.judged
        return best_window(*figures, most)[1] if window is None else expected_gain(*figures, window)


class Reading(NamedTuple):
    """What the draft reads for one answer: what `pruner` keeps, or everything (None), and a `note` of it for the report; the
    figures of the answer are of `way`."""

    way: Way
    pruner: TokenPruner | None
    note: str


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
        gain, of_part, thinned = whole.gain(window, most), less.gain(window, most), part(pruner)
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
        return Reading(way, chosen, f"it read {part(chosen)}: {why}")

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def part(pruner: Any) -> str:
    """The share of the video that `pruner` leaves, in words."""
    if pruner is None:
        return "the whole video"
    share = getattr(pruner, "retention", None)
    return "a part of the video" if share is None else f"{share:g} of the video"
