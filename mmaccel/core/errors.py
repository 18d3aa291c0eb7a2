"""The errors of this package. Each message is one sentence that names the field and the fix."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from numbers import Real
from typing import Any

SHOWN = 60
"""Characters of a user's value that an error shows."""


def shown(value: Any, most: int = SHOWN) -> str:
    """The repr of a value, cut to about `most` characters; reads only the part that it shows."""
    if most < 4:
        return "..."
    if isinstance(value, str | bytes):
        text = repr(value[: most + 1])
    elif isinstance(value, int) and value.bit_length() > 3 * most:
        text = f"a whole number of {value.bit_length()} bits"
    elif isinstance(value, dict | list | tuple | set | frozenset) and value:
        text = _listed(value, most)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        text = f"{type(value).__name__}(...)"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= most + 2 else text[: most - 3] + "..."


def _listed(values: Collection[Any], most: int) -> str:
    begin, end = "[]" if isinstance(values, list) else "()" if isinstance(values, tuple) else "{}"
    text = begin
    for value in values:
        left = most - len(text) - 1
        piece = shown(value, left)
        if isinstance(values, dict):
            piece += f": {shown(values[value], left - len(piece))}"
        text += piece + ", "
        if len(text) > most:
            return text  # the caller cuts it; the values to come are not read
    return text.removesuffix(" " if end == ")" and len(values) == 1 else ", ") + end


def nearest(name: str, known: Iterable[str]) -> str:
    """The words on the nearest of `known`, before more; none where all are far."""
    near = difflib.get_close_matches(str(name)[:SHOWN], list(known), n=1, cutoff=0.4)
    return f"the nearest that is, is {near[0]!r}; " if near else ""


class Field:
    """Arguments of a call as a sentence names them: ``fps=8`` with a value, ``fps=, frames= or size=`` without.

    within  the words around them, ``{}`` in their place; they go where no name is left
    sign    what stands behind a name
    """

    def __init__(self, *names: str, value: object = None, within: str = "{}", sign: str = "=") -> None:
        self.names, self.value, self.within, self.sign = names, value, within, sign

    def said(self, options: Mapping[str, str] | None = None) -> str:
        """The words, or those with the `options` of a command in place of the names; one without an option is left out."""
        names = [f"{one}{self.sign}" for one in self.names]
        if options is not None:
            names = [options[one] for one in self.names if one in options]
        text = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
        if self.value is not None:
            text += f"{' ' if options is not None else ''}{self.value}"
        return self.within.format(text) if names else ""

    def __repr__(self) -> str:
        return self.said()


class Sentence:
    """An error or a warning whose `args` are its words: texts, and a `Field` where it names arguments of a call."""

    args: tuple[Any, ...]

    def said(self, options: Mapping[str, str] | None = None) -> str:
        """The sentence, as `Field.said` has its fields."""
        return "".join(one.said(options) if isinstance(one, Field) else str(one) for one in self.args)

    def __str__(self) -> str:
        return self.said()


class MmaccelError(Sentence, Exception):
    """Root of every error this package raises on purpose."""


class RecipeError(MmaccelError, ValueError):
    """A field of a recipe or of a policy is wrong, or two choices exclude each other."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a field of a policy may be: whether a value `fits`, and in words what to `give` in the place of another."""

    fits: Callable[[Any], bool]
    give: str

    def check(self, who: str, field: str, value: Any) -> None:
        """Raise `RecipeError` for a value that does not fit."""
        if not self.fits(value):
            raise RecipeError(f"{who}: {field} is {shown(value)}; give {self.give}.")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def at_least(least: float, of: str = "") -> Limit:
    """A number from `least` on; `of`: words behind that."""
    return Limit(lambda value: _is_number(value) and value >= least, f"at least {least}{of}")


def one_of(*choices: object, why: str = "") -> Limit:
    """One of `choices`; `why` ends the sentence."""
    *most, last = map(repr, choices)
    return Limit(choices.__contains__, f"{', '.join(most)} or {last}{why}")


def between(least: float, most: float, give: str) -> Limit:
    """A number from `least` to `most`; `give` are the words for it."""
    return Limit(
        lambda value: _is_number(value) and not isinstance(value, bool) and least <= value <= most, give
    )


SHARE = between(0, 1, "a share from 0 to 1")


def limited(default: Any, limit: Limit) -> Any:
    """A dataclass field of a policy with a `default`, whose values `limit` says; checked when the policy is made."""
    return dataclasses.field(default=default, metadata={"limit": limit})


OWN = "one of your own file is known by `mmaccel --import FILE`, from Python when it is imported"
"""What is added where the name could be that of a policy outside the package."""


class UnknownName(RecipeError):
    """A name that no registry holds; the message has the nearest one and the list.

    kinds  name -> its kind, where names of several kinds are known: the list is then of the nearest one's kind alone
    own    whether a user's file may give the name
    others  names that are known no more, or to a part of it
    meant  what the name means elsewhere and what to give in its place (`Policy.words`); nothing else is then said
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        kinds: Mapping[str, str] | None = None,
        own: bool = False,
        meant: str | None = None,
        others: Iterable[str] = (),
    ) -> None:
        if meant is not None:
            super().__init__(f"{kind} {name!r} {meant}.")
            return
        names = sorted(known)
        given, name = name, name[:SHOWN]  # a text of megabytes is like no name, and comparing it takes hours
        near = difflib.get_close_matches(name, [*names, *others], n=1, cutoff=0.55)
        text = f"there are {', '.join(names) or 'none'}."
        if kinds is not None:
            text = "`mmaccel list` has them all."
            if near:
                same = ", ".join(one for one in names if kinds[one] == kinds[near[0]])
                text = f"of kind {kinds[near[0]]} there are {same}; `mmaccel list` has the others."
        of = ", of its index or of an earlier version" if near and near[0] not in names else ""
        hint = f"did you mean {near[0]!r}{of}? {text[0].upper()}{text[1:]}" if near else text
        hint = f"{hint[:-1]}; {OWN}." if own else hint
        super().__init__(f"unknown {kind} {shown(given)}: {hint}")


class ModelError(MmaccelError):
    """A model, a checkpoint folder or a model call that this package cannot serve."""


def check_text(text: Any, what: str) -> str:
    """The text; raises `ModelError` for what is not text that UTF-8 can encode."""
    if not isinstance(text, str):
        raise ModelError(f"{what}: {shown(text)} is not text; give a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{what}: {shown(text)} has bytes that are not UTF-8; write it in UTF-8.") from error
    return text


def check_question(text: Any) -> str:
    """The question; raises `ModelError` for one that is empty or not text."""
    if not check_text(text, "question").strip():
        raise ModelError("question: it is empty; ask something.")
    return str(text)


class DraftError(MmaccelError):
    """A draft that cannot serve its target: another vocabulary, a missing model, a wrong proposal."""


class VideoError(MmaccelError):
    """A video, image or stream that cannot be read."""


class VideoStalled(VideoError):
    """A stream that has not ended sent nothing for `seconds`, after `frames` frames. To wait longer, ask `media.clips`
    for the next clip, or call `watch` again."""

    def __init__(self, name: str, seconds: float, frames: int) -> None:
        super().__init__(
            f"{name} stalled: nothing came for {seconds:g} s after {frames} frame{'' if frames == 1 else 's'}, and it has "
            "not ended; to wait longer, ask media.clips for the next clip, or call watch again."
        )
        self.seconds, self.frames = seconds, frames


class StoreError(MmaccelError):
    """Host memory of a stream that is full, damaged, closed, or asked for what it does not hold."""


class WorldError(MmaccelError, ValueError):
    """A wrong request to the synthetic world."""


class MmaccelWarning(Sentence, UserWarning):
    """Root of the warnings of this package."""


class VideoWarning(MmaccelWarning):
    """Frames were lost; the message says how many."""


def tell_kept(error: Exception, frames: int) -> None:
    """Add to an error that the `frames` before it were kept."""
    text = f"the {frames} frames before it are kept"
    if isinstance(error, MmaccelError):
        error.args = (f"{str(error).rstrip('.')}; {text}.",)
    else:
        error.add_note(f"{text}.")


OURS = ("mmaccel", "torch", "transformers", "contextlib", "functools")
"""Packages whose lines no warning names: the user did not write them."""


QUIET: ContextVar[bool] = ContextVar("QUIET", default=False)
"""Set while something is read again whose warnings were heard the first time."""


def warn(message: str | MmaccelWarning, category: type[MmaccelWarning] = MmaccelWarning) -> None:
    """Warn at the line of the user's code: that of the innermost frame outside the packages of `OURS`."""
    if QUIET.get():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
