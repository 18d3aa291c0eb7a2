"""Which choices of a recipe exclude each other, told by what each declares."""

from typing import Any

import pytest

from mmaccel.core.decoding.draft import DraftState
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.memory.kv import StreamPolicy, StreamState
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.recipe import Recipe
from mmaccel.policies.kv import Window
from tests.core.test_recipe import sentence


class LiveOnly(StreamPolicy):
    """A memory of streams that knows of no ingestion."""

    name = "live_only"

    def open_stream(self, *given: Any) -> StreamState:
        raise AssertionError("nothing is opened")


def test_an_impossible_pair_is_told_in_one_sentence() -> None:
    told = sentence(sparse="a_shape", kv=LiveOnly())
    assert "sparse 'a_shape' cannot stand beside kv 'live_only'" in told
    assert "set sparse to 'dense' or kv to 'full'" in told


@pytest.mark.parametrize("margin, fits", [(4, False), (8, False), (9, True), (10, True)])
def test_a_memory_must_roll_back_as_far_as_a_draft_asks(margin: int, fits: bool) -> None:
    choices: dict[str, Any] = {
        "kv": Window(margin=margin),
        "draft": {"name": "sequential", "model": "x", "window": 8},
    }
    if fits:
        Recipe.load(**choices)
    else:
        told = sentence(**choices)
        assert f"rolls back up to 9 tokens and kv 'window' only {margin}" in told
        assert "set the memory's margin to 9" in told


@pytest.mark.parametrize(
    ("base", "former", "name"),
    [
        (SparsePattern, "bound", "max_blocks_total"),
        (SparsePattern, "expected", "expected_blocks"),
        (SparsePattern, "plan_of", "plan_heads"),
        (SparsePattern, "placed", "with_base_dir"),
        (StreamState, "enter", "begin_pass"),
        (StreamState, "turn", "question_scope"),
        (StreamPolicy, "asks", "query_time_fields"),
        (DraftState, "notes", "report_notes"),
    ],
)
def test_a_member_that_was_renamed_is_refused_and_not_ignored(base: type, former: str, name: str) -> None:
    with pytest.raises(RecipeError, match=f"Mine: {former} is called {name} now; rename it."):
        type("Mine", (base,), {former: lambda *given: None})


def test_a_name_that_another_kind_had_is_free_and_that_of_a_pruner_is_taken() -> None:
    type("Mine", (SparsePattern,), {"asks": lambda *given: None})
    with pytest.warns(MmaccelWarning, match="Mine: seat is the former name; write stage: ClassVar = 'layer'"):
        assert type("Mine", (TokenPruner,), {"seat": "layer"}).stage == "layer"  # type: ignore[attr-defined]
