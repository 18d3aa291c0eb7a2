"""What policies of every kind declare about themselves."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mmaccel.core.errors import RecipeError


def refuse_former_names(cls: type, renamed: Mapping[str, str]) -> None:
    """Raise `RecipeError` for a class that defines a member by a name of an earlier version, which nothing calls now."""
    for former, name in renamed.items():
        if former in vars(cls):
            raise RecipeError(f"{cls.__name__}: {former} is called {name} now; rename it.")


class _TakesFormerFields(ABCMeta):
    upgrade: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return super().__call__(*args, **cls.upgrade(fields))


class Policy(metaclass=_TakesFormerFields):
    """A policy of any kind, as recipes see it.

    file   (ending, field): a file with this ending is a recipe by itself, of this policy, and `field` is its path
    words  names that users take for a policy of this kind and that mean something else: name -> what it means, as the end
           of a sentence that says what to give
    """

    name: ClassVar[str]
    file: ClassVar[tuple[str, str] | None] = None
    words: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_names(cls, {"placed": "with_base_dir"})

    @classmethod
    def upgrade(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields as an earlier version wrote them, under their present names; warns of those that moved.

        Raises `RecipeError` for a value that nothing has any more.
        """
        return fields

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """The fields that a file in `folder` gives, with their relative paths resolved against `folder`."""
        return fields


def with_base_dir(fields: Mapping[str, Any], folder: Path, name: str) -> Mapping[str, Any]:
    """`fields` with the path in field `name` resolved against `folder`; any other value stays."""
    path = fields.get(name)
    return {**fields, name: str(folder / path)} if isinstance(path, str) and path else fields
