"""Odd values for places where another was meant."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 63, 64, 10**6, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-300, 1e308,
    float("nan"), float("inf"), "", " ", "a", "\0", "\n", "grid", "off", "null", "../../x", "/dev/zero",
    "/proc/self/mem", ".", "x" * 5000, "\u202e\U0001f600", "video>text", [], {}, [[]], [None], [1, 2, 3], ["grid"],
    {"name": None}, {"name": []},
    {"name": "grid"}, {"name": "grid", "stride": -1}, {"": ""}, {"0": {"0": "grid"}}, {"name": {"name": "a"}},
    [0.5] * 400,
)  # fmt: skip


def odd(chance: random.Random) -> Any:
    """One of these, or several within each other."""
    value = copy.deepcopy(chance.choice(ODD))
    for _ in range(chance.choice((0, 0, 0, 1, 3, 80))):
        value = [value] if chance.random() < 0.5 else {chance.choice(("name", "a", "0")): value}
    return value


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a tree of lists and mappings there is something."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] * bool(path) + [place for name, value in inner for place in places(value, (*path, name))]


def changed(chance: random.Random, tree: Any) -> Any:
    """A copy with something in it replaced, left out, or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.choice((1, 1, 2, 5))):
        found = places(tree)
        if not found:
            return odd(chance)
        *way, last = chance.choice(found)
        inner = tree
        for name in way:
            inner = inner[name]
        if chance.random() < 0.2:
            del inner[last]
        elif chance.random() < 0.1 and isinstance(inner, dict):
            inner[chance.choice(("", "x" * 300, "name", "a"))] = odd(chance)
        else:
            inner[last] = odd(chance)
    return tree
