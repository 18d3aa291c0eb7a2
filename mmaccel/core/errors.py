"""Exceptions and warnings of this package. Each message is one sentence that names the field and how to fix it."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

SHOWN = 60
"""Characters of a user's value that an error shows."""
MOST_NAMES = 5
"""Unknown names that one error tells."""


def quoted(value: Any, most: int = SHOWN) -> str:
    """Return the repr of a value for an error message, cut to about `most` characters; reads only what it shows."""
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
        piece = quoted(value, left)
        if isinstance(values, dict):
            piece += f": {quoted(values[value], left - len(piece))}"
        text += piece + ", "
        if len(text) > most:
            return text  # the caller cuts it; the values to come are not read
    return text.removesuffix(" " if end == ")" and len(values) == 1 else ", ") + end


def one_line_error(error: Exception) -> str:
    """Return an error's message as one line of at most 200 characters, cut behind a word."""
    return textwrap.shorten(str(error), 200, placeholder=" ...")


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Return a piece of an error message, "the nearest that is, is 'X'; ", for the most similar X in `known`, else ""."""
    near = difflib.get_close_matches(str(name)[:SHOWN], list(known), n=1, cutoff=0.4)
    return f"the nearest that is, is {near[0]!r}; " if near else ""


class ArgumentNames:
    """Formats names of a call's arguments for an error message: ``fps=8`` with a value, ``fps=, frames= or size=`` without.

    within  the message's words around the names, ``{}`` where the names go; omitted altogether if no name remains
    sign    the text that follows each name, such as "="
    """

    def __init__(self, *names: str, value: object = None, within: str = "{}", sign: str = "=") -> None:
        self.names, self.value, self.within, self.sign = names, value, within, sign

    def to_text(self, options: Mapping[str, str] | None = None) -> str:
        """Return the names as text. With `options` (argument -> command-line option) the options are named instead;
        arguments that have none are omitted."""
        names = [f"{one}{self.sign}" for one in self.names]
        if options is not None:
            names = [options[one] for one in self.names if one in options]
        text = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
        if self.value is not None:
            text += f"{' ' if options is not None else ''}{self.value}"
        return self.within.format(text) if names else ""

    def __repr__(self) -> str:
        return self.to_text()


class MessageWithFields:
    """Base of errors and warnings whose `args` are the message's pieces: strings, and `ArgumentNames` of a call."""

    args: tuple[Any, ...]

    def to_text(self, options: Mapping[str, str] | None = None) -> str:
        """Return the message; `options` (argument -> command-line option) replaces names, see `ArgumentNames.to_text`."""
        return "".join(
            one.to_text(options) if isinstance(one, ArgumentNames) else str(one) for one in self.args
        )

    def __str__(self) -> str:
        return self.to_text()


class MmaccelError(MessageWithFields, Exception):
    """Base class of every error that this package raises on purpose."""


class RecipeError(MmaccelError, ValueError):
    """A field of a recipe or a policy has a wrong value, or two choices of a recipe exclude each other."""


OWN = "for a policy of your own give its file, `mmaccel --import FILE`, or import it in Python"
"""What is added where the name could be that of a policy outside the package."""


class UnknownName(RecipeError):
    """A name is in no registry; the message suggests the nearest known name and lists the known ones.

    name   one name, or several of one kind, of which each gets its nearest
    kinds  known name -> its kind, where known names are of several kinds; the message lists only the kind of the nearest
           name. None: it lists all known names
    own    whether the message adds that a file of the user could register the name
    others  further names that may be suggested as the nearest: former names, and fields of parts (an index, a store)
    meant  what the name means elsewhere and what to use instead (`Policy.words`); the message then says only this
    owner  for the name of a part (`kind`) of a policy, that policy in words ("kv 'mosaic'"); None for other names
    """

    def __init__(
        self,
        kind: str,
        name: str | Sequence[str],
        known: Iterable[str],
        kinds: Mapping[str, str] | None = None,
        own: bool = False,
        meant: str | None = None,
        others: Iterable[str] = (),
        owner: str | None = None,
    ) -> None:
        if meant is not None:
            super().__init__(f"{kind} {name!r} {meant}.")
            return
        names = sorted(known)
        given = [name] if isinstance(name, str) else [*name[:MOST_NAMES]]
        near = []
        for one in given:  # cut: a text of megabytes is like no name, and comparing it takes hours
            near += difflib.get_close_matches(one[:SHOWN], [*names, *others], n=1, cutoff=0.55)
        text = f"there are {', '.join(names) or 'none'}."
        if kinds is not None:
            text = "`mmaccel list` has them all."
            if near:
                same = ", ".join(one for one in names if kinds[one] == kinds[near[0]])
                text = f"of kind {kinds[near[0]]} there are {same}; `mmaccel list` has the others."
        of = ", of its index or store, or of an earlier version" if {*near} - {*names} else ""
        hint = (
            f"did you mean {' and '.join(map(repr, near))}{of}? {text[0].upper()}{text[1:]}" if near else text
        )
        hint = f"{hint[:-1]}; {OWN}." if own else hint
        what = f"unknown {kind}" if owner is None else f"{owner} has no {kind}"
        super().__init__(f"{what}{'s' * (len(given) > 1)} {' and '.join(map(quoted, given))}: {hint}")


class ModelError(MmaccelError):
    """This package cannot serve the model, the checkpoint folder or the way the model was called."""


def check_text(text: Any, what: str) -> str:
    """Return `text`; raise `ModelError`, which names it as `what`, if it is not a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise ModelError(f"{what}: {quoted(text)} is not text; give a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{what}: {quoted(text)} has bytes that are not UTF-8; write it in UTF-8."
        ) from error
    return text


def check_question(text: Any) -> str:
    """Return the question `text`; raise `ModelError` if it is empty or not a string."""
    if not check_text(text, "question").strip():
        raise ModelError("question: it is empty; ask something.")
    return str(text)


def check_not_cast(then: Any, now: Any) -> None:
    """Raise `ModelError` if the dtype `now` of a session's model is not `then`, that when the session was opened."""
    if now != then:
        raise ModelError(
            f"the model was cast from {then} to {now} since the session was opened; cast it back, or open another."
        )


class DraftError(MmaccelError):
    """A draft model cannot serve its target: another vocabulary, missing weights, or an invalid proposal."""


class VideoError(MmaccelError):
    """A video, an image or a stream cannot be read."""


class VideoStalled(VideoError):
    """A video stream that has not ended delivered nothing for `seconds`, after `frames` frames. To wait longer, ask
    `media.clips` for the next clip, or call `watch` again."""

    def __init__(self, name: str, seconds: float, frames: int) -> None:
        super().__init__(
            f"{name} stalled: nothing came for {seconds:g} s after {frames} frame{'' if frames == 1 else 's'}, and it has "
            "not ended; to wait longer, ask media.clips for the next clip, or call watch again."
        )
        self.seconds, self.frames = seconds, frames


class StoreError(MmaccelError):
    """The host-memory store of a stream's keys and values is full, damaged, closed, or lacks what was requested."""


class WorldError(MmaccelError, ValueError):
    """A request to the synthetic video generator (mmaccel-lab) is wrong."""


class MmaccelWarning(MessageWithFields, UserWarning):
    """Base class of the warnings of this package."""


class VideoWarning(MmaccelWarning):
    """Frames of a video were lost; the message says how many."""


def add_frames_kept_note(error: Exception, frames: int) -> None:
    """Add to the message of `error` that the `frames` frames before it were kept."""
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
    """Issue a warning at the innermost line of the user's own code: the first frame outside the packages in `OURS`."""
    if QUIET.get():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def check_family_class(name: str, cls: Any, base: type, known: Mapping[str, Any]) -> None:
    """Raise `RecipeError` if family `cls` is no subclass of `base`, names no model type, or one that `known` has already."""
    if not issubclass(cls, base):
        raise RecipeError(f"model {name!r}: {cls.__name__} is not a Family; derive it from that.")
    if "model_types" not in dir(cls):
        raise RecipeError(
            f"model {name!r}: {cls.__name__} has no model_types; set it to a tuple of model types."
        )
    for other, family in known.items():
        if other != name and (taken := {*cls.model_types} & {*family.model_types}):
            raise RecipeError(
                f"model {name!r}: family {other!r} serves model type {min(taken)!r} already; set model_types to others."
            )
