"""The file that says which pattern each head of a model follows, as `mmaccel search` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmaccel.core import outside
from mmaccel.core.errors import RecipeError, shown

KIND, SCHEMA = "mmaccel heads", 1
"""What the file says it is, and the version of what it holds."""
FIX = "give a file that `mmaccel search` wrote"


def read_table(path: str | Path) -> dict[str, Any]:
    """The table in a file: `model` (fingerprint), `weights` (their digest), `context` (tokens that its budgets are for),
    `block`, `layers` (for each layer, for each head, a mapping with the `pattern` and what was measured), and whatever else
    the search wrote. Raises `RecipeError` in one sentence.
    """
    where = f"table {shown(str(path), outside.PATH)}"
    table = outside.read_json(path, where, RecipeError, fix=FIX)
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise RecipeError(f"{where} holds no head patterns; {FIX}.")
    if table.get("schema") != SCHEMA:
        raise RecipeError(
            f"{where} has schema {shown(table.get('schema'))} and this version reads {SCHEMA}; search again."
        )
    layers = table.get("layers")
    whole = isinstance(table.get("model"), dict) and isinstance(table.get("block"), int)
    # Tables of before name no weights and, made by hand, no length.
    whole = (
        whole and isinstance(table.get("context", 1), int) and isinstance(table.get("weights"), str | None)
    )
    if (
        not whole
        or not _nested(layers)
        or not all(_pattern(head) for layer in layers or () for head in layer)
    ):
        raise RecipeError(f"{where} is not whole; search again.")
    return table


def choices(table: Mapping[str, Any]) -> dict[int, dict[int, Any]]:
    """Layer -> head -> pattern, as `per_head` takes them."""
    return {
        number: {h: head["pattern"] for h, head in enumerate(layer)}
        for number, layer in enumerate(table["layers"])
    }


def difference(table: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """How the model a table was searched on differs from `model` (a fingerprint), in a few words; None if it does not."""
    theirs = table["model"]
    for name in dict.fromkeys((*model, *theirs)):
        if theirs.get(name) != model.get(name):
            return f"{name} {shown(theirs.get(name))} there, {shown(model.get(name))} here"
    return None


def _nested(layers: Any) -> bool:
    return isinstance(layers, list) and bool(layers) and all(isinstance(one, list) and one for one in layers)


def _pattern(head: Any) -> bool:
    pattern = head.get("pattern") if isinstance(head, dict) else None
    return isinstance(pattern, dict) and isinstance(pattern.get("name"), str)
