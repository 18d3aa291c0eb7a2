"""Fields of earlier versions, which recipes and saved sessions still hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmaccel.core.errors import RecipeError, shown, warn


@dataclass(frozen=True)
class Former:
    """A field of earlier versions.

    default  its value that holds for everything now
    why      what took its place
    part     the index of which it is a field now
    speed    its other values, or their types, where they changed neither what is stored nor any answer: they are dropped,
             with a warning
    """

    default: Any = None
    why: str = ""
    part: str = ""
    speed: tuple[Any, ...] = ()


def _among(value: Any, choices: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `choices`, or of a type among them; true and 1 are two values."""
    same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in choices)
    return type(value) in choices or any(same)


def renamed(who: str, given: dict[str, Any], old: str, value: Any, new: str) -> None:
    """Set field `new` to the `value` that a former spelling, `old`, comes to; raises where both are given and disagree."""
    if new in given and given[new] != value:
        raise RecipeError(f"{who}: {old} means {new}: {value}, and {new} is given; leave the former out.")
    given[new] = value
    warn(f"{who}: {old} is the former spelling; write {new}: {value}.")


def upgraded(who: str, fields: Mapping[str, Any], former: Mapping[str, Former], index: Any) -> dict[str, Any]:
    """`fields` without the `former` ones, of which those of the index, by default `index`, are moved there."""
    given, moved = dict(fields), dict[str, Any]()
    for name, one in former.items():
        if name not in given:
            continue
        value = given.pop(name)
        if one.part:
            moved[name] = value
        elif not _among(value, (one.default, *one.speed)):
            told = f"the field {name} is gone, and {shown(value)} is not what it became"
            raise RecipeError(f"{who}: {told}: {one.why}; leave it out.")
        elif value != one.default:
            warn(f"{who}: the field {name} is gone, and it changed no answer: {one.why}; leave it out.")
    if not moved:
        return given
    own = given.get("index", index)
    own = {"name": own} if isinstance(own, str) else own
    if not isinstance(own, Mapping):
        raise RecipeError(f"{who}: {', '.join(moved)} are fields of the index; set them there.")
    for name, value in moved.items():
        if own.get(name, value) != value:
            raise RecipeError(
                f"{who}: {name} is {shown(value)}, and another in its index; set it there alone."
            )
    given["index"] = {**own, **moved}
    told = ", ".join(f"{name}: {value}" for name, value in given["index"].items())
    warn(f"{who}: {', '.join(moved)} moved to the index; write index: {{{told}}}.")
    return given
