"""What composes with what: the page is what the code says, and no rule looks at three policies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from mmaccel.cli import catalog as pairs
from mmaccel.core.errors import RecipeError
from mmaccel.core.recipe import Recipe, check_sequences, stream_policy
from mmaccel.core.registry import registry

PAGE = Path(__file__).parent.parent.parent / "docs" / "compose.md"
MARK = "<!-- mmaccel list --pairs -->\n\n"


def test_the_page_is_what_recipes_say(call: Callable[..., tuple[int, str, str]]) -> None:
    told = PAGE.read_text(encoding="utf-8").split(MARK)[1]
    status, out, err = call("list", "--pairs")
    assert (status, err) == (0, "") and out == told, "write the page anew with mmaccel list --pairs"
    assert all(f"`{name}`" in told for slot in pairs.SLOTS for name in registry(slot))


def test_a_cell_is_yes_or_the_reason_without_names() -> None:
    told = pairs.together("draft", "prune", "sparse_to_dense", "dycoke")
    assert told.startswith("prune chooses what each decoded token sees") and "'dycoke'" not in told
    assert pairs.together("draft", "prune", "sparse_to_dense", "fastv") == pairs.YES
    assert (
        pairs.together("kv", "prune", "rekv", "fastv")
        == pairs.together("kv", "prune", "window", "fastv")
        == pairs.YES
    )
    assert pairs.together("sparse", "kv", "grid", "rekv") == pairs.YES
    assert pairs.together("sparse", "kv", "grid", "window") == pairs.YES
    assert "reads the whole cache" in pairs.together("kv", "draft", "rekv", "sparse_to_dense")
    assert pairs.together("kv", "draft", "rekv", "sequential") == pairs.YES
    assert pairs.inside("sequential", "uv") == pairs.YES != pairs.inside("off", "uv")


def good(**parts: object) -> bool:
    try:
        Recipe(**parts)  # type: ignore[arg-type]
    except RecipeError:
        return False
    return True


def serves(recipe: Recipe) -> tuple[bool, bool]:
    told = pairs.verdict(lambda: check_sequences(recipe)), pairs.verdict(lambda: stream_policy(recipe))
    return told[0] == pairs.YES, told[1] == pairs.YES


def test_two_by_two_is_enough() -> None:
    """Every four policies: a recipe of them is good where all its pairs are, and serves what each of them serves."""
    built = {slot: {name: pairs.build(slot, name) for name in registry(slot)} for slot in pairs.SLOTS}
    built["prune"] |= {"none": None}
    built["sparse"] = {name: built["sparse"][name] for name in ("dense", "grid", "per_head")}
    fine = {
        (a, x, b, y): good(**{a: built[a][x], b: built[b][y]})
        for a, b in itertools.combinations(built, 2)
        for x in built[a]
        for y in built[b]
    }
    uses = {
        (slot, name): serves(Recipe(**{slot: one}))
        for slot, some in built.items()
        for name, one in some.items()
        if good(**{slot: one})
    }
    checked = 0
    for names in itertools.product(*built.values()):
        chosen = dict(zip(built, names, strict=True))
        want = all(fine[a, chosen[a], b, chosen[b]] for a, b in itertools.combinations(built, 2))
        parts = {slot: built[slot][name] for slot, name in chosen.items()}
        assert good(**parts) == want, chosen
        if want:
            each = [uses[slot, name] for slot, name in chosen.items()]
            assert serves(Recipe(**parts)) == tuple(all(use[n] for use in each) for n in (0, 1)), chosen
            checked += 1
    assert checked > 20
