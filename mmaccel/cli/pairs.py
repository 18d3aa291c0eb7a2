"""What composes with what, as Markdown: every two policies are put into a recipe, and what it says is what is told."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from mmaccel.core.errors import RecipeError
from mmaccel.core.recipe import Recipe, check_sequences, stream_policy
from mmaccel.core.registry import policy, registry

SLOTS = {"sparse": "sparse", "kv": "memory (kv)", "draft": "draft", "prune": "prune"}
YES = "yes"
Cell = Callable[[str, str], str]


def build(slot: str, name: str, **fields: Any) -> Any:
    """A policy with the fields it has by itself; a draft that wants a model gets the name of one."""
    if "model" in fields_of(slot, name):
        fields = {"model": "a-draft", **fields}
    return policy(slot, {"name": name, **fields})


def fields_of(slot: str, name: str) -> set[str]:
    """The fields of a policy."""
    return {field.name for field in dataclasses.fields(registry(slot)[name])}


def verdict(works: Callable[[], object], names: Iterable[str] = ()) -> str:
    """`YES`, or why not, without `names`: of many policies the reason is one."""
    try:
        works()
    except RecipeError as error:
        told = str(error)
        for name in names:
            told = told.replace(f" {name!r}", "")
        return told
    return YES


def together(one: str, other: str) -> Cell:
    """Whether two policies of these slots stand in one recipe, which then serves something."""

    def cell(a: str, b: str) -> str:
        def works() -> None:
            recipe = Recipe(**{one: build(one, a), other: build(other, b)})
            if YES not in (verdict(lambda: check_sequences(recipe)), verdict(lambda: stream_policy(recipe))):
                stream_policy(recipe)

        return verdict(works, (a, b))

    return cell


def inside(draft: str, prune: str) -> str:
    """Whether a draft takes a pruner for its own prompt."""
    if "prune" not in fields_of("draft", draft):
        return "the draft takes no pruner: it has no prompt of its own that holds video."
    found = verdict(lambda: build("draft", draft, prune=prune), (prune,))
    return found.removeprefix(f"{draft}: ")


def serves(slot: str) -> Cell:
    """What a recipe with one policy, and all else as it is by itself, can serve."""

    def cell(name: str, use: str) -> str:
        recipe = Recipe(**{slot: build(slot, name)})
        check: Callable[[Recipe], object] = check_sequences if use == "generate" else stream_policy
        return verdict(lambda: check(recipe), (name,))

    return cell


def markdown() -> str:
    """All tables, and under each the reasons that it numbers."""
    parts = []
    for one, other in itertools.combinations(SLOTS, 2):
        columns = [n for n in registry(other) if other != "prune" or build(other, n).seat != "draft"]
        title = f"{SLOTS[one]} beside {SLOTS[other]}"
        parts.append(_table(title, list(registry(one)), columns, together(one, other)))
    pruners = list(registry("prune"))
    parts.append(_table("prune of a draft (inside draft)", list(registry("draft")), pruners, inside))
    for slot, said in SLOTS.items():
        names = [n for n in registry(slot) if slot != "prune" or build(slot, n).seat != "draft"]
        parts.append(_table(f"what a {said} serves", names, ["generate", "VideoSession"], serves(slot)))
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: list[str], columns: list[str], cell: Cell) -> str:
    """One table; rows that are alike are one, and so are columns."""
    cells = {(a, b): cell(a, b) for a in rows for b in columns}
    across = _alike(columns, lambda b: tuple(cells[a, b] for a in rows))
    down = _alike(rows, lambda a: tuple(cells[a, b] for b in columns))
    reasons: list[str] = []
    lines = [
        f"### {title}",
        "",
        "| | " + " | ".join(map(_named, across)) + " |",
        "| --- " * (1 + len(across)) + "|",
    ]
    for group in down:
        marks = []
        for column in across:
            told = cells[group[0], column[0]]
            if told != YES and told not in reasons:
                reasons.append(told)
            marks.append(YES if told == YES else f"no ({1 + reasons.index(told)})")
        lines.append(f"| {_named(group)} | {' | '.join(marks)} |")
    notes = [f"{number}. {told}" for number, told in enumerate(reasons, 1)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _alike(names: list[str], key: Callable[[str], tuple[str, ...]]) -> list[list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())


def _named(group: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in group)
