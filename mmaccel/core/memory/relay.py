"""Methods that an object hands on to the objects it is made of."""

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


def relay(to: Callable[..., Any]) -> Any:
    """In the body of a class, ``append = view = relay(to)``: methods of these names, which return ``to(self, name, ...)`` of
    what they are given. What they do stands where the class they derive from declares them."""
    return _Relay(to)
