"""With room for everything, and a pattern that lists everything, a recipe says what the plain model says."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from tests.models import matrix
from tests.models.matrix import Cell
from tests.models.streams import FPS, QUESTION, every_stream, film

pytestmark = pytest.mark.numeric(by="torch")
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
KV: dict[str, Any] = {
    name: fields
    | ({"positions": "original"} if "positions" in registry("kv")[name].__dataclass_fields__ else {})
    for name, fields in every_stream().items()
}
EXCEPTIONS: dict[str, str] = {}
"""Memories that merge or drop by design, whatever room they have, and why."""
CELLS = [
    cell
    for cell in matrix.cells()
    if cell.own == cell.prune == "none" and cell.use != "batch" and cell.kv not in EXCEPTIONS
    if matrix.refusal(cell) is None
]


@functools.cache
def plain(family: str) -> list[int]:
    """The plain model's own greedy answer, without the token that ends it."""
    model, _, processor = matrix.models(family, 2)
    inputs = processor.chat(
        [{"type": "video", "video": film(FRAMES)}, {"type": "text", "text": QUESTION}], fps=FPS
    )
    return said(model, inputs)


def said(model: Any, inputs: dict[str, Any]) -> list[int]:
    ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ].tolist()
    return [token for token in ids if token != model.generation_config.eos_token_id]


def check(cell: Cell) -> None:
    model, drafter, processor = matrix.models(cell.family, 2)
    sparse = {"name": cell.sparse, "block": 16, **SPARSE[cell.sparse]} if SPARSE[cell.sparse] else "dense"
    draft = matrix.draft_of(cell, drafter)
    recipe = Recipe(sparse=sparse, kv=KV[cell.kv], draft=draft, dense_tail=0)
    content = [{"type": "video", "video": film(FRAMES)}, {"type": "text", "text": QUESTION}]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MmaccelWarning)
        if cell.use == "session":
            with mmaccel.VideoSession(model, processor, recipe) as session:
                (session.watch if cell.sparse == "dense" else session.ingest)(film(FRAMES), fps=FPS)
                found, report = list(session.ask(QUESTION, TOKENS).ids), session.report()
        else:
            with mmaccel.accelerate(model, recipe) as fast:
                found, report = said(model, processor.chat(content, fps=FPS)), fast.report()
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
