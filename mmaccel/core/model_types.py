"""What a class must be to be registered as a model family."""

from __future__ import annotations

from collections.abc import Mapping

from mmaccel.core.adapter import ModelAdapter
from mmaccel.core.errors import RecipeError


def check_family_class(name: str, cls: type, known: Mapping[str, type]) -> None:
    """Raise `RecipeError` if `cls` is no family, or serves no model type, or one that a family of `known` (name -> class)
    serves."""
    if not issubclass(cls, ModelAdapter):
        raise RecipeError(f"model {name!r}: {cls.__name__} is not a Family; derive it from that.")
    types = getattr(cls, "model_types", ())
    if not isinstance(types, tuple) or not types:
        raise RecipeError(
            f"model {name!r}: {cls.__name__} has no model_types; set it to a tuple of model types."
        )
    for other, family in known.items():
        if other != name and (taken := {*types} & {*getattr(family, "model_types", ())}):
            raise RecipeError(
                f"model {name!r}: family {other!r} serves model type {min(taken)!r} already; set model_types to others."
            )
