"""Every combination of policies is refused before weights move, or runs, and each part acts; with room it is exact."""

import functools
import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.cli import catalog
from mmaccel.cli.choices import policy_has_field
from mmaccel.core.attach import family_of
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.policies.draft import PromptLookup, Sequential, SparseToDense
from mmaccel_lab.tiny.configs import SPECS
from tests.models import matrix
from tests.models.matrix import Cell
from tests.models.streams import FPS, asked_of_film, every_stream

pytestmark = pytest.mark.numeric(by="torch")


PAGE = Path(__file__).parent.parent.parent / "docs" / "compose.md"
MOST_REFUSED = 0.08
PARTS = 16
KINDS = ("sparse", "kv", "draft", "own", "prune")
ONE = matrix.AXES["family"][:1]
"""What is refused hangs on no family."""
BASE = matrix.Cell("", "generate", "dense", "full", "off", "none", "none")


def test_every_policy_is_an_axis_s_choice() -> None:
    assert set(matrix.SPARSE) == set(matrix.AXES["sparse"]) and set(matrix.KV) == set(matrix.AXES["kv"])
    assert set(matrix.DRAFT) == set(registry("draft")) and set(matrix.ACTS) == set(registry("kv"))
    assert set(matrix.MODELS) == {
        name for name in registry("draft") if policy_has_field("draft", name, "prune")
    }
    assert {*matrix.AXES["own"], *matrix.AXES["prune"]} == {"none", *registry("prune")}


def test_few_cells_are_refused() -> None:
    counts = Counter(matrix.refusal(cell) is None for cell in matrix.cells())
    total = sum(counts.values())
    share = counts[False] / total
    told = f"{counts[False]:,} of {total:,} combinations are refused, {share:.1%}"
    print(told)
    assert 0 < share <= MOST_REFUSED
    assert told in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_each_family_with_streams_has_its_arrays_and_its_count() -> None:
    kinds = [name.replace("random", "tiny") for name in matrix.AXES["family"]]
    models = [*(SPECS[kind].model_type for kind in kinds), *matrix.OTHERS]
    able = {name for name, family in registry("model").items() if "streams" not in family.unable}
    assert {family_of(kind).name for kind in models} == able
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for kind in matrix.OTHERS:
        count = sum(matrix.refusal(cell) is not None for cell in matrix.cells([kind]))
        told = f"`{kind}` {count / sum(1 for _ in matrix.cells([kind])):.1%}"
        print(told)
        assert told in page


def test_a_cell_is_refused_where_two_of_its_choices_are() -> None:
    """The use of a recipe is one of the choices; a pruner of a draft comes with its draft."""

    def parts(cell: matrix.Cell) -> list[dict[str, str]]:
        named = [{kind: getattr(cell, kind)} for kind in ("use", "sparse", "kv", "prune")]
        return [*named, {"draft": cell.draft, "own": cell.own}]

    for cell in matrix.cells(ONE):
        two = itertools.combinations(parts(cell), 2)
        pairs = [matrix.refusal(BASE._replace(**one, **other)) for one, other in two]
        assert (matrix.refusal(cell) is None) == (not any(pairs)), cell


def test_no_policy_loses_all_partners_of_a_kind() -> None:
    met = {
        (kind, getattr(cell, kind), other)
        for cell in matrix.cells()
        if matrix.refusal(cell) is None
        for kind, other in itertools.permutations(KINDS, 2)
        if getattr(cell, other) not in ("none", "off")
    }
    every = {
        (kind, name, other) for kind, other in itertools.permutations(KINDS, 2) for name in matrix.AXES[kind]
    }
    # What has no prompt of its own that holds video has no field for a pruner of one.
    bare = sorted(set(matrix.DRAFT) - set(matrix.MODELS))
    assert every - met == {("draft", name, "own") for name in bare}


MODEL = torch.nn.Linear(1, 1)
FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("generate", {"prune": {"name": "dycoke"}, "draft": PromptLookup()}),
    ("generate", {"prune": {"name": "fastv"}, "chunk": 64}),
    ("generate", {"prune": {"name": "fastv", "compact": True}, "kv": "mosaic"}),
    ("generate", {"prune": {"name": "fastv", "compact": True}, "draft": SparseToDense()}),
    ("generate", {"kv": {"name": "window", "margin": 2}, "draft": Sequential(model=MODEL, window=7)}),
]
"""Recipes that are refused for a field."""
MEND = re.compile(r"set (?:its |the memory's |prune\.)?(\w+) to '?(\w+)'?")
VALUES = {"False": False, "null": None}


def mended(told: str, parts: dict[str, Any]) -> dict[str, Any]:
    """`parts` with the first field that a refusal names set to the value that it names."""
    found = MEND.search(told)
    assert found is not None and told.endswith("."), told
    field, word = found.groups()
    value: Any = VALUES.get(word, int(word) if word.isdigit() else word)
    if field in ("kv", "draft", "sparse", "prune", "chunk"):
        return {**parts, field: value}
    owner = "kv" if field == "margin" else "prune"
    return {**parts, owner: {**parts[owner], field: value}}


@pytest.mark.parametrize(("use", "parts"), FIELDS, ids=str)
def test_a_field_s_refusal_names_what_runs(use: str, parts: dict[str, Any]) -> None:
    told = catalog.why_use_refused(use, **parts)
    given = [one for one in parts.values() if one != 64]
    named = [one["name"] if isinstance(one, dict) else getattr(one, "name", one) for one in given]
    assert all(f"{name!r}" in told for name in named), told
    assert catalog.why_use_refused(use, **mended(told, parts)) == catalog.YES


def test_a_refusal_names_both_parts_and_what_runs() -> None:
    for cell in matrix.cells(ONE):
        told, use = matrix.refusal(cell), matrix.SERVES[cell.use]
        if told is None:
            continue
        pairs = [(one, use) for one in cell[2:]] + list(itertools.combinations(cell[2:], 2))
        assert any(repr(a) in told and (b in told) for a, b in pairs), (cell, told)
        parts = matrix.parts_of(cell, matrix._any_draft(cell.draft, cell.own))
        for _ in range(2):  # a session may not take the draft under any memory
            parts = mended(told, parts)
            if (told := catalog.why_use_refused(use, **parts)) == catalog.YES:
                break
        assert told == catalog.YES, (cell, told)


@pytest.mark.always(every=True)
@pytest.mark.parametrize("cell", matrix.covering(2), ids="-".join)
def test_each_part_acts(cell: matrix.Cell) -> None:
    """In batches of two; of three where three are taken at a time."""
    matrix.check_acted(cell, 2)


@pytest.mark.parametrize(("kv", "counter"), [(kv, name) for kv in matrix.ACTS for name in matrix.ACTS[kv]])
def test_an_idle_memory_is_noticed(monkeypatch: pytest.MonkeyPatch, kv: str, counter: str) -> None:
    cell = BASE._replace(family="random-ov", kv=kv)
    said, report = matrix.run(cell, (0,))
    kept = {"resident": report.kv.get("units", 0.0), "held": report.kv["seen"]}
    every = {"recalled": report.kv.get("units", 0.0) * matrix.LAYERS}
    still = {"gone": kept, "passed over": every}.get(counter, {counter: 0.0})
    monkeypatch.setattr(matrix, "run", lambda *_: (said, replace(report, kv={**report.kv, **still})))
    with pytest.raises(AssertionError, match=counter):
        matrix.check_acted(cell)


@pytest.mark.parametrize("draft", matrix.MODELS)
def test_an_idle_pruner_of_a_draft_is_noticed(monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    cell = BASE._replace(family="random-ov", draft=draft, own="uniform")
    bare = matrix.run(cell._replace(own="none"), (0,))
    real = matrix.run
    monkeypatch.setattr(matrix, "run", lambda one, rows: bare if one == cell else real(one, rows))
    with pytest.raises(AssertionError, match="'pruned': 0"):
        matrix.check_acted(cell)


@pytest.mark.always(every=True)
@pytest.mark.parametrize("cell", matrix.covering(1, matrix.running(*matrix.OTHERS)), ids="-".join)
def test_each_part_acts_in_other_families(cell: matrix.Cell) -> None:
    matrix.check_acted(cell, 2)


def check_all(cells: list[Cell]) -> None:
    faults = {}
    for cell in cells:
        try:
            matrix.check_acted(cell)
        except Exception as error:
            faults["-".join(cell)] = f"{type(error).__name__}: {error}"
            print("-".join(cell), faults["-".join(cell)], flush=True)
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_each_part_acts_three_at_a_time(part: int) -> None:
    """Every choice of three axes together, in parts for several processes."""
    check_all(sorted(matrix.covering(3), reverse=True)[part::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("family", matrix.OTHERS)
def test_each_part_acts_two_at_a_time_in_each_family(family: str) -> None:
    check_all(matrix.covering(2, matrix.running(family)))


FRAMES, TOKENS, WIDE = 18, 8, 1 << 20
NEAR = {"name": "a_shape", "sink": 16, "window": WIDE}
SPARSE: dict[str, dict[str, Any]] = {
    "dense": {},
    "a_shape": {"window": WIDE},
    "tri_shape": {"window": WIDE},
    "sf_fixed": {"stride": 1024},
    "sf_strided": {"stride": 1024},
    "block_topk": {"budget": 1.0},
    "vertical_slash": {"vertical": 1, "slash": WIDE},
    "grid": {"window": WIDE},
    "boundary_2d": {"default": NEAR},
    **dict.fromkeys(("q_boundary", "k_boundary"), dict.fromkeys(("text", "image", "video"), NEAR)),
    "per_head": {"table": {0: {0: "dense"}}, "default": NEAR},
}
KV = every_stream(positions="original")
"""With room for everything; and those that merge frames by what they look like, which is never exact, do not."""
EXCEPTIONS: dict[str, str] = {}
"""Memories that merge or drop by design, whatever room they have, and why."""
CELLS = [
    cell
    for cell in matrix.running()
    if cell.own == cell.prune == "none" and cell.use != "batch" and cell.kv not in EXCEPTIONS
]


@functools.cache
def plain(family: str) -> list[int]:
    """The plain model's own greedy answer, without the token that ends it."""
    model, _, processor = matrix.models(family, 2)
    inputs = processor.chat(asked_of_film(FRAMES), fps=FPS)
    ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return [token for token in ids.tolist() if token != model.generation_config.eos_token_id]


def check(cell: Cell) -> None:
    model, drafter, processor = matrix.models(cell.family, 2)
    sparse = {"name": cell.sparse, "block": 16, **SPARSE[cell.sparse]} if SPARSE[cell.sparse] else "dense"
    draft = matrix.draft_of(cell, drafter)
    recipe = Recipe(sparse=sparse, kv=KV[cell.kv], draft=draft, dense_tail=0)
    (found,), report = matrix.answers(model, processor, recipe, cell.use, [asked_of_film(FRAMES)], TOKENS)
    if cell.use != "session":
        found = [token for token in found if token != model.generation_config.eos_token_id]
    assert found == plain(cell.family)
    # Frames that streammem merges come eight at a time, of the random Qwen less than a pattern takes.
    few = cell.kv == "streammem" and cell.family == "random-qwen"
    if cell.sparse != "dense" and not few:  # listed blocks hold more pairs than the causal ones
        assert report.kept >= 1 and set(report.heads()) != {"dense"}
    if cell.draft not in ("off", "prompt_lookup"):
        assert report.draft["proposed"] > 0


def cells() -> list[Any]:
    """Each choice by default, each pair of choices in the slow tests; pairs are told apart by test_matrix."""
    some = matrix.covering(1, CELLS)
    rest = [pytest.param(one, marks=pytest.mark.slow) for one in matrix.covering(2, CELLS) if one not in some]
    return [*some, *rest]


@pytest.mark.always(every=True)
@pytest.mark.parametrize("cell", cells(), ids="-".join)
def test_it_is_the_plain_model(cell: Cell) -> None:
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("kv", KV)
def test_every_draft_under_every_pattern_is_the_plain_model(kv: str) -> None:
    for cell in CELLS:
        if cell.kv == kv:
            check(cell)


def test_there_is_a_wide_pattern_and_a_roomy_memory_of_each_name() -> None:
    assert set(SPARSE) == set(registry("sparse")) and {*KV, *EXCEPTIONS} == set(registry("kv"))
    # What is said hangs on what is seen, or nothing could be told from it.
    assert all(len(set(plain(family))) > TOKENS // 2 for family in matrix.AXES["family"])
