"""`DraftLength`: chooses the number of tokens to draft for sequences that are decoded together, from measured round
times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from statistics import median_low

WINDOWS = (0, 1, 3, 7, 15)
"""Tokens drafted a round; with the token before them as many rows as steps are captured for."""
TRIED, KEPT = 3, 9
"""Rounds after which a window is known, and how many are kept."""
AGAIN = 512
"""Rounds of as many sequences after which other windows are tried anew: memories grow, and loads change."""
FORGET = 0.99
"""What of the share of kept tokens a round leaves to the next."""


class DraftLength:
    """Chooses the draft length (window) with the most tokens per second, per number of sequences in a batch (rounded up to a
    power of two).

    A window's rate is the tokens its rounds are expected to commit, by the acceptance rate so far, over their median
    seconds. Windows are tried in ascending order from 0 while the rate rises; so where many sequences make verification cost
    more than it gains, nothing is drafted.
    """

    def __init__(self) -> None:
        self._judged, self._kept = 4.0, 3.2  # a few tokens are assumed
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._seconds: defaultdict[tuple[int, int], deque[float]] = defaultdict(partial(deque, maxlen=KEPT))
        self._longest = dict[tuple[int, int], int]()

    def most(self, count: int, drafting: int) -> int:
        """Return the draft length for a round of `count` sequences, `drafting` of which have a draft; 0: no drafting."""
        size, best, chosen = _size(count), 0.0, 0
        keep = self._kept / self._judged
        for window in WINDOWS:
            seconds = self._seconds[size, window]
            if len(seconds) < TRIED:
                return window
            said = count - drafting + drafting * sum(keep**n for n in range(window + 1))
            worth = said / median_low(seconds)
            if worth <= best:
                break
            best, chosen = worth, window
            if window and self._longest.get((size, window), 0) < window:
                break  # the draft proposes no more
        return chosen

    def took(self, count: int, window: int, seconds: float, judged: Iterable[tuple[int, int]]) -> None:
        """Record the `seconds` of a round of `count` sequences with draft length `window`, without one-off work such as
        graph capture; `judged`: (proposed, accepted) tokens of each sequence that drafted."""
        size = _size(count)
        self._seconds[size, window].append(seconds)
        self._rounds[size] += 1
        if self._rounds[size] % AGAIN == 0:
            for other in WINDOWS:
                if other != window:
                    self._seconds[size, other].clear()
        self._judged, self._kept = self._judged * FORGET, self._kept * FORGET
        for proposed, kept in judged:
            self._longest[size, window] = max(proposed, self._longest.get((size, window), 0))
            self._judged += kept + (kept < proposed)
            self._kept += kept

    def times(self, count: int) -> dict[int, float]:
        """Return the median milliseconds of a round of `count` sequences, for each window that was tried."""
        size = _size(count)
        tried = [window for window in WINDOWS if self._seconds.get((size, window))]
        return {window: 1e3 * median_low(self._seconds[size, window]) for window in tried}


def _size(count: int) -> int:
    return 1 << (count - 1).bit_length()
