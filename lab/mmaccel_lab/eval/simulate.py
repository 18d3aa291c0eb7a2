"""What drafting can gain, by three roads: an exact Markov chain, a discrete-event simulation, and the theorems of the paper.

The model: a target step takes `step` seconds and a draft step `draft`, whatever they run; each drafted token is kept with
probability `keep`, on its own. The theorems of ParallelVLM (arXiv 2603.19610) leave out rollbacks, pre-verify rounds, or
both, and the last counts a retried window as if it were free to begin. `table` sets them side by side.

Letters: c = step / draft, w the window, a = keep.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a target step, of a draft step, and of a message between them (both ways together)."""

    step: float
    draft: float
    message: float = 0.0

    @property
    def ratio(self) -> float:
        return self.step / self.draft


def chain(keep: float, window: int) -> Tensor:
    """[window + 1, window + 1] float64: from how many tokens stand written ahead of the verified ones to how many next.

    State 0 is pre-verify (nothing ahead); state n is post-verify with n tokens ahead. In the pipeline of Algorithm 1 a round
    that keeps all leads to `window` - 1 ahead, since the first token of the new window is judged with the old ones; any
    refusal leads to 0. States in between are not reached, and stand for themselves.
    """
    moves = torch.zeros(window + 1, window + 1, dtype=torch.float64)
    for ahead in range(window + 1):
        whole = keep ** (ahead + 1)
        moves[ahead, window - 1] += whole
        moves[ahead, 0] += 1 - whole
    return moves


def stationary(moves: Tensor) -> Tensor:
    """[n] the shares of rounds in each state, from the first on, in the long run."""
    n = moves.shape[0]
    system = torch.cat([(moves.T - torch.eye(n, dtype=moves.dtype)), torch.ones(1, n, dtype=moves.dtype)])
    right = torch.zeros(n + 1, 1, dtype=moves.dtype)
    right[-1] = 1
    return torch.linalg.lstsq(system, right, driver="gelsd").solution[:, 0].clamp(min=0)


def committed(keep: float, ahead: int) -> float:
    """Tokens a round commits on average that judges `ahead` tokens and one more, without a bonus: at most ahead + 1."""
    return sum(keep**n for n in range(ahead + 1))


def parallel_rate(keep: float, window: int, costs: Costs) -> float:
    """Tokens a second of the pipeline in the long run, by the chain."""
    shares = stationary(chain(keep, window))
    tokens = sum(float(share) * committed(keep, ahead) for ahead, share in enumerate(shares))
    return tokens / (max(window * costs.draft, costs.step) + costs.message)


def sequential_rate(keep: float, window: int, costs: Costs) -> float:
    """Tokens a second of drafting, then verifying: what is kept of `window`, and the target's own token.

    After a window is kept whole its last token has not been run by the draft, which then runs two rows at once.
    """
    return committed(keep, window) / (window * costs.draft + costs.step)


def speedup(keep: float, window: int, costs: Costs, *, parallel: bool) -> float:
    """Over decoding alone."""
    rate = parallel_rate if parallel else sequential_rate
    return rate(keep, window, costs) * costs.step


def best(keep: float, costs: Costs, *, parallel: bool, most: int = 24) -> tuple[int, float]:
    """The window of the largest speed-up, and that."""
    found = {w: speedup(keep, w, costs, parallel=parallel) for w in range(1, most + 1)}
    window = max(found, key=lambda w: (found[w], -w))
    return window, found[window]


@dataclass(frozen=True)
class Run:
    """One simulated generation: seconds, tokens, target steps, and the drafted tokens kept in a row before each refusal."""

    seconds: float
    tokens: int
    steps: int
    streaks: tuple[int, ...]
    drafted: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def streak(self) -> float:
        """Drafted tokens kept in a row, mean; infinite where nothing was refused, so that no streak has ended."""
        return sum(self.streaks) / len(self.streaks) if self.streaks else math.inf


def simulate(keep: float | Sequence[bool], window: int, costs: Costs, tokens: int, seed: int = 0) -> Run:
    """The pipeline, event by event: two servers and a queue between them; no formula of the chain is used.

    keep: a probability, or the fate of each drafted token that is judged, in order (replayed; then it starts again).
    """
    dice = random.Random(seed)
    if isinstance(keep, float | int):
        fates = iter(lambda: dice.random() < keep, None)
    else:
        fates = cycle(keep)

    # Events: (time, kind); the draft delivers whole windows, the target whole verdicts, and they meet when both are done.
    events: list[tuple[float, int, str]] = []
    now, number, out, steps, drafted, streak = 0.0, 0, 0, 0, 0, 0
    streaks: list[int] = []
    ahead = 0

    def begin(at: float) -> None:
        nonlocal number
        heapq.heappush(events, (at + window * costs.draft, number, "written"))
        heapq.heappush(events, (at + costs.step, number + 1, "verified"))
        number += 2

    begin(0.0)
    waiting = {"written", "verified"}
    while out < tokens:
        now, _, kind = heapq.heappop(events)
        waiting.discard(kind)
        drafted += window * (kind == "written")
        steps += kind == "verified"
        if waiting:
            continue
        whole = True
        for _ in range(ahead + 1):
            out += 1
            if not next(fates):
                whole = False
                break
            streak += 1
        if not whole:
            streaks.append(streak)
            streak = 0
        ahead = window - 1 if whole else 0
        waiting = {"written", "verified"}
        begin(now + costs.message)
    return Run(now, out, steps, tuple(streaks), drafted)


def simulate_sequential(keep: float, window: int, costs: Costs, tokens: int, seed: int = 0) -> Run:
    """Draft, then verify, event by event."""
    dice = random.Random(seed)
    now, out, steps, drafted = 0.0, 0, 0, 0
    streaks: list[int] = []
    while out < tokens:
        now += window * costs.draft + costs.step
        steps, drafted, good = steps + 1, drafted + window, 0
        while good < window and dice.random() < keep:
            good += 1
        streaks.append(good)
        out += good + 1
    return Run(now, out, steps, tuple(streaks), drafted)


def theorems(keep: float, window: int, costs: Costs) -> dict[str, float]:
    """Speed-ups by the paper's theorems, word for word; where two forms are printed, both."""
    c, a, w = costs.ratio, keep, window
    run = sum(a**n for n in range(1, w + 1))
    busy = max(w, c)
    return {
        "theorem 1": a * c,
        "theorem 2": c * (w + 1) / (w + c),
        "theorem 3": c * w / busy,
        "theorem 4": c * (a * w + 1) / (w + c),
        "theorem 5": c * a * w / busy,
        "theorem 6": c * (1 + a**w) * run / (2 * busy),
        "theorem 6, as first printed": c * (1 + a * w) * run / (2 * busy),
    }


def table(
    keeps: Sequence[float], ratios: Sequence[float], tokens: int = 20_000, seed: int = 0
) -> list[dict[str, Any]]:
    """A row for each share kept and each ratio, at window = round(c): chain, simulation, theorems, how far these are off."""
    rows = []
    for ratio in ratios:
        for keep in keeps:
            costs = Costs(step=ratio, draft=1.0)
            window = max(1, round(ratio))
            exact = speedup(keep, window, costs, parallel=True)
            run = simulate(keep, window, costs, tokens, seed)
            told = theorems(keep, window, costs)
            rows.append(
                {
                    "c": ratio,
                    "keep": keep,
                    "window": window,
                    "chain": exact,
                    "simulated": run.rate * costs.step,
                    "sequential": speedup(keep, window, costs, parallel=False),
                    "streak": run.streak,
                    **told,
                    "off": {name: value / exact - 1 for name, value in told.items() if name[8] in "1356"},
                }
            )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown, figures to two places."""
    columns = [name for name in rows[0] if name != "off"]
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---:" for _ in columns) + " |"]
    for row in rows:
        cells = [f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def streak_mean(keep: float) -> float:
    """Drafted tokens kept in a row, on average: the paper's adaptive length, which no window bounds."""
    return keep / (1 - keep) if keep < 1 else math.inf
