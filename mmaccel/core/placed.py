"""Paths in recipes: those in a file count from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Placed:
    """A policy that a file may describe."""

    @classmethod
    def placed(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """Fields that a file in `folder` gives, with their paths counted from there."""
        return fields


def counted_from(folder: Path, fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`fields` with the path in field `name` counted from `folder`; what is no path stays."""
    path = fields.get(name)
    return {**fields, name: str(folder / path)} if isinstance(path, str) and path else fields
