"""The recipe's pattern over what an ingestion sees: listing everything it is dense, listing less it is its own mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.core.errors import RecipeError
from mmaccel.core.prefill import attention
from mmaccel.core.recipe import Recipe
from tests.models.streams import FPS, QUESTION, film, logits, open_session
from tests.models.test_ingest import ARCHIVED, EQUAL, NAMES, ROOMY
from tests.products import product

FRAMES = 22
ALL: dict[str, Any] = {"name": "a_shape", "sink": 16, "window": 1 << 16, "block": 16}
FEW: dict[str, dict[str, Any]] = {
    "a_shape": {"name": "a_shape", "sink": 16, "window": 64, "block": 16},
    "grid": {"name": "grid", "block": 16},
    "vertical_slash": {"name": "vertical_slash", "vertical": 16, "slash": 32, "block": 16},
    "block_topk": {"name": "block_topk", "top": 3, "sink": 0, "block": 16},
}
# Clips of streammem are 60 tokens of the random Qwen: too short for any pattern.
LONG = product(NAMES, ROOMY, where=lambda *case: case != ("random-qwen", "streammem"))
KEPT = [kv for kv in ROOMY if kv != "no_cache"]
pytestmark = [pytest.mark.numeric(by="torch"), pytest.mark.in_turn("kv", 4)]


@pytest.mark.parametrize(("name", "kv"), LONG)
def test_a_pattern_that_lists_everything_is_dense(name: str, kv: str) -> None:
    how: dict[str, Any] = {"backend": "reference", "chunk": 128}
    with (
        open_session(name, ROOMY[kv], sparse=ALL, **how) as sparse,
        open_session(name, ROOMY[kv], chunk=128) as dense,
    ):
        for session in (sparse, dense):
            session.ingest(film(FRAMES), fps=FPS)
        assert (logits(sparse) - logits(dense)).abs().max() <= EQUAL
        sparse.ask(QUESTION, 2)
        ran = {name for layer in sparse.report().patterns for name in layer}
        assert ran <= {"a_shape", "a_shape+dense"} and ran, "a last pass may be too short"
        assert sparse.report().backend == "reference" and sparse.report().notes == ()
        dense.ask(QUESTION, 2)
        assert dense.report().patterns == () and dense.report().kept is None


def by_mask(plan: Any, query: Any, key: Any, value: Any, scale: float, backend: Any) -> Any:
    """What a plan lists, computed as dense attention under its mask."""
    mask, group = plan.to_mask(), query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
    scores = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return scores @ value.repeat_interleave(group, 1), None


@pytest.mark.parametrize(("pattern", "kv"), product(FEW, KEPT))
def test_a_pattern_that_lists_less_is_its_mask(
    pattern: str, kv: str, monkeypatch: pytest.MonkeyPatch, name: str = "random-ov"
) -> None:
    """What the plan lists, computed as dense attention under its mask, gives the same stream."""
    how: dict[str, Any] = {"backend": "reference", "sparse": FEW[pattern], "chunk": 128}
    with open_session(name, ROOMY[kv], chunk=128) as session:
        session.ingest(film(FRAMES), fps=FPS)
        dense = logits(session)
    with open_session(name, ROOMY[kv], **how) as session:
        session.ingest(film(FRAMES), fps=FPS)
        found = logits(session)
        session.ask(QUESTION, 2)
        report = session.report()
    assert report.kept is not None and report.kept < 1
    assert (found - dense).abs().max() > 100 * EQUAL, "the pattern did not act"
    masked = list[Any]()
    monkeypatch.setattr(attention, "attend_plan", lambda *given: masked.append(given) or by_mask(*given))
    with open_session(name, ROOMY[kv], **how) as session:
        session.ingest(film(FRAMES), fps=FPS)
        assert masked and (logits(session) - found).abs().max() <= EQUAL


def test_live_frames_stay_as_they_are_and_the_report_says_so() -> None:
    with open_session("random-ov", ROOMY["rekv"], sparse=FEW["a_shape"], backend="reference") as sparse:
        with open_session("random-ov", ROOMY["rekv"]) as dense:
            for session in (sparse, dense):
                session.watch(film(FRAMES), fps=FPS)
            assert torch.equal(logits(sparse), logits(dense))
        sparse.ask(QUESTION, 2)
        report = sparse.report()
    assert report.kept is None and "the pattern acts on those given to ingest" in report.notes[0]


def test_no_cache_runs_its_picked_frames_under_the_pattern() -> None:
    with open_session("random-ov", "no_cache", sparse=FEW["a_shape"], backend="reference") as session:
        session.watch(film(FRAMES), fps=FPS)
        session.ask(QUESTION, 2)
        report = session.report()
    assert report.kept is not None and report.kept < 1 and report.notes == ()


def test_dense_layers_stay_dense() -> None:
    how: dict[str, Any] = {"sparse": FEW["a_shape"], "backend": "reference", "dense_layers": (0,)}
    with open_session("random-ov", ROOMY["rekv"], **how) as session:
        session.ingest(film(FRAMES), fps=FPS)
        first, second = session.report().patterns
    assert set(first) == {"dense"} and set(second) == {"a_shape"}


def test_bad_layers_and_memories_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="dense_layers: there is no layer 9"):
        open_session("random-ov", "rekv", sparse=FEW["grid"], dense_layers=(9,))
    monkeypatch.setattr("mmaccel.policies.kv.rekv.ReKV.ingests", False)
    with pytest.raises(RecipeError, match="sparse 'grid' cannot stand beside kv 'rekv'"):
        Recipe.load(sparse="grid", kv={"name": "rekv", **ARCHIVED})
