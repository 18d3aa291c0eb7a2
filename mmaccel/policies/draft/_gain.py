"""How far to draft: the expected speed of a pipelined draft, from measured times and the share of tokens that is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

TOKENS_KNOWN = 4.0
"""Weight, in tokens, of the share that is assumed before anything was judged."""

ASSUMED = 0.8


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


def best_window(step_s: float, draft_s: float, keep: float, most: int) -> tuple[int, float]:
    """The window with the largest expected speed-up over decoding alone, and that speed-up.

    step_s is a target step, draft_s a draft step; only the two whole numbers around their ratio can be best: a longer window
    makes the target wait for more than it gains, a shorter one leaves the draft idle.
    """
    ratio = step_s / max(draft_s, 1e-9)
    low = min(max(math.floor(ratio + 1e-9), 1), most)
    found = [
        (tokens_per_round(keep, w) * step_s / max(w * draft_s, step_s), w) for w in {low, min(low + 1, most)}
    ]
    gain, window = max(found, key=lambda pair: (pair[0], -pair[1]))
    return window, gain


@dataclass
class Pace:
    """Running means of what a step takes, and of the share of drafted tokens that is kept; recent rounds count most.

    Context grows with every token, and both times with it: the means forget at `rate` a round. The first steps of a sequence
    may take several times what others take, since they are compiled and captured: a time of less than half the mean starts
    it anew, and one of more than twice the mean counts as twice.
    """

    rate: float = 0.2
    step_s: float = 0.0
    draft_s: float = 0.0
    judged: float = TOKENS_KNOWN
    kept: float = TOKENS_KNOWN * ASSUMED
    rounds: int = field(default=0)

    def step(self, seconds: float) -> None:
        """One target step."""
        self.rounds += 1
        self.step_s = self._mean(self.step_s, seconds)

    def drafted(self, seconds: float, count: int) -> None:
        """`count` draft steps took `seconds` together."""
        self.draft_s = self._mean(self.draft_s, seconds / count)

    def _mean(self, before: float, now: float) -> float:
        if now < before / 2 or not before:
            return now
        return before + self.rate * (min(now, 2 * before) - before)

    def told(self, kept: int, refused: bool) -> None:
        """Of a window `kept` tokens were kept before the first that was refused, if one was."""
        self.judged += kept + refused
        self.kept += kept

    @property
    def keep(self) -> float:
        return self.kept / self.judged

    @property
    def known(self) -> bool:
        """Whether both times were measured."""
        return self.step_s > 0 and self.draft_s > 0


def told(counters: Mapping[str, float]) -> list[str]:
    """How often the target decoded without a draft, and why the draft paused, in words, from its counters."""
    notes = []
    if alone := int(counters["alone"]):
        steps = f"{alone} target step{'' if alone == 1 else 's'}"
        notes.append(f"{steps} without it, while it read the prompt or said nothing")
    if pauses := int(counters["pauses"]):
        ratio = counters["target_step_s"] / counters["draft_step_s"]
        notes.append(
            f"paused {pauses} time{'' if pauses == 1 else 's'}: a target step takes {ratio:.2f} draft steps, with "
            f"{counters['keep_rate']:.0%} kept the best window is worth {counters['expected_gain']:.2f} x"
        )
    return notes
