"""Helper to define several methods of a class that only call another object's methods of the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Relay:
    """A descriptor that puts a method in its own place, by the name that it is given."""

    def __init__(self, to: Callable[..., Any]) -> None:
        self._to = to

    def __set_name__(self, owner: type, name: str) -> None:
        to = self._to

        def method(self: Any, *given: Any, **named: Any) -> Any:
            return to(self, name, *given, **named)

        method.__name__, method.__qualname__ = name, f"{owner.__qualname__}.{name}"
        setattr(owner, name, method)


def make_delegate(to: Callable[..., Any]) -> Any:
    """Define delegating methods in a class body: ``append = view = make_delegate(to)`` defines methods `append` and `view`,
    each of which returns ``to(self, name, *args, **kwargs)``. The base class documents them."""
    return _Relay(to)
