"""What a layer will be asked, foretold from the hidden states that enter the layer before it."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops import words as of_words


class Drift:
    """What each layer adds to the hidden states of a question's words, in the mean, as the last question showed it.

    Questions go through the same template and the same layers: most of what a layer adds is alike for all. On both tiny
    models the next layer's own query of states moved so far finds 84% of what that layer retrieves, with a quarter more
    asked for, and the query of the states as they are 68%.

    All of it lies on the device, where it stays, so that `next` can be replayed: known, seen [L, E] float32.
    """

    def __init__(self, layers: int, hidden: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._known, self._seen = torch.zeros(2, layers, hidden, device=device)
            self._before = torch.zeros(hidden, device=device)
        self._reached = -1

    def clear(self) -> None:
        """Nothing was asked yet."""
        self._known.zero_()
        self._reached = -1

    def next(self, layer: int, words: Tensor, count: Tensor) -> Tensor:
        """The hidden states that will enter the next layer, about, for those [1, n, E] of rows entering this one, of which
        the first `count` [1] are a question's words; `entered` is told what this shows."""
        seen = self._seen[layer - 1] if layer else None
        return of_words.moved(words[0], count, self._known[layer], self._before, seen)[None]

    def entered(self, layer: int) -> None:
        """The states that enter a layer are given to `next`, or to what replays it."""
        self._reached = layer if layer == self._reached + 1 else -1

    def settle(self) -> None:
        """The question is over: what it showed is known to the next."""
        if self._reached > 0:
            self._known[: self._reached] = self._seen[: self._reached]
        self._reached = -1
