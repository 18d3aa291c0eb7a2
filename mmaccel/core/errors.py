"""What a user may do wrong, each told in one sentence that names the field and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class MmaccelError(Exception):
    """Root of every error this package raises on purpose."""


class RecipeError(MmaccelError, ValueError):
    """A field of a recipe or of a policy is wrong, or two choices exclude each other."""


OWN = "one of your own file is known by `mmaccel --import FILE`, from Python when it is imported"
"""What is added where the name could be that of a policy outside the package."""


MEANT = {
    "no_boundary": "is what a search calls a pattern by itself, without a boundary; give that pattern, such as 'grid', "
    "'a_shape' or 'vertical_slash'"
}
"""Words that are no policy's name and mean one elsewhere, and what to give in their place."""


class UnknownName(RecipeError):
    """A name that no registry holds; the message has the nearest one and the list.

    kinds  name -> its kind, where names of several kinds are known: the list is then of the nearest one's kind alone
    own    whether a user's file may give the name
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        kinds: Mapping[str, str] | None = None,
        own: bool = False,
    ) -> None:
        if name in MEANT and kind in ("sparse", "recipe"):
            super().__init__(f"{kind} {name!r} {MEANT[name]}.")
            return
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
        told = f"there are {', '.join(names) or 'none'}."
        if kinds is not None:
            of = kinds[near[0]] if near else ""
            same = [one for one in names if kinds[one] == of]
            told = "`mmaccel list` has them all."
            if near:
                told = f"of kind {of} there are {', '.join(same)}; `mmaccel list` has the others."
        hint = f"did you mean {near[0]!r}? {told[0].upper()}{told[1:]}" if near else told
        super().__init__(
            f"unknown {kind} {name!r}: {hint[:-1]}; {OWN}." if own else f"unknown {kind} {name!r}: {hint}"
        )


class ModelError(MmaccelError):
    """A model, a checkpoint folder or a model call that this package cannot serve."""


class DraftError(MmaccelError):
    """A draft that cannot serve its target: another vocabulary, a missing model, a wrong proposal."""


class VideoError(MmaccelError):
    """A video, image or stream that cannot be read."""


class StoreError(MmaccelError):
    """Host memory of a stream that is full, damaged, closed, or asked for what it does not hold."""


class WorldError(MmaccelError, ValueError):
    """A wrong request to the synthetic world."""


class MmaccelWarning(UserWarning):
    """Root of the warnings of this package."""


class VideoWarning(MmaccelWarning):
    """Frames were lost; the message says how many."""
