"""Whether modules are what they were: asked at every pass, so it takes the host a tenth of what a walk through them does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

_Tables = Callable[[Any], tuple[dict[Any, Any], ...]]
_HELD: _Tables = attrgetter("_modules", "_parameters")
_HOOKS: _Tables = attrgetter("_forward_hooks", "_forward_pre_hooks")


class Watched:
    """Modules and all in them, as they are now: which they are, of which classes, their weights, and where these lie."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._roots = list(modules)
        self._all = [one for module in self._roots for one in module.modules()]
        self._seen, self._weights = self._look()
        self.places = tuple(map(Tensor.data_ptr, self._weights))
        """The addresses of all weights."""

    def same(self, modules: Sequence[nn.Module]) -> bool:
        """Whether `modules` and all in them are those, unchanged; values of weights may have changed in place."""
        seen, weights = self._look()
        return (
            _alike(self._roots, modules)
            and _alike(self._seen, seen)
            and _alike(self._weights, weights)
            and self.places == tuple(map(Tensor.data_ptr, weights))
        )

    def heard(self) -> bool:
        """Whether a hook of a forward pass is on any of them."""
        return any(map(any, map(_HOOKS, self._all)))

    def _look(self) -> tuple[list[Any], list[Tensor]]:
        """Children and classes, and weights."""
        children, weights = zip(*map(_HELD, self._all), strict=True)
        held = chain.from_iterable(map(dict.values, weights))
        seen = [*chain.from_iterable(map(dict.values, children)), *map(type, self._all)]
        return seen, [one for one in held if one is not None]


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
