"""The memory `mosaic`: exact where it can be, the same answer however it fetches, and all that it says it does happens."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.policies.kv import _retrieval
from mmaccel.policies.kv.mosaic import Mosaic
from tests.policies.kv.mosaic.driven import GROUPS, HEAD, LAYERS, SIZE, TOKENS, WHEEL, Driven
from tests.policies.kv.mosaic.scenes import audit, partition


def watched(count: int = 60, step: int = 4, **fields: Any) -> Driven:
    driven = Driven(**fields)
    driven.watch(count, step)
    return driven


ALL = dict(frames=90, window=90, positions="original")


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"window": 5}])
def test_with_room_for_all_a_question_sees_all(axes: int, fields: dict[str, Any]) -> None:
    everything = Driven(axes=axes, **{**ALL, "local": 90})
    some = Driven(axes=axes, **{**ALL, **fields})
    for one in (everything, some):
        one.watch(30)
    a, b = (one.ask(3) for one in (everything, some))
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    columns = 3 + 30 * TOKENS + 4
    assert [view.key.shape[2] for view in some.seen] == [columns] * LAYERS


@pytest.mark.parametrize("encode_frames", [0, 8])
def test_much_happens_in_a_long_stream(encode_frames: int) -> None:
    driven = watched(80, encode_frames=encode_frames)
    assert (driven.state.counters()["deferred_splits"] > 0) == (encode_frames > 0)
    for name in range(6):
        driven.ask(name)
    found = driven.counters
    splits = ("eager_splits", "deferred_splits", "visual_splits")
    named = (*splits, "deferred", "singletons", "flushed", "resolved")
    assert min(found[name] for name in named) > 0, {name: found[name] for name in named}
    assert found["recalled"] == 6 * LAYERS * 8 and found["questions"] == 6
    assert found["fetch_cached"] > 0 and found["fetch_covered"] > 0 and found["host_copies_in"] > 0
    assert 0 < found["prefetch_coverage"] < 1
    assert found["host_units"] == LAYERS * 75 and found["window"] == 5
    audit(driven.index.tree, 1e-9)


def test_it_pauses_for_answers_while_it_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause is that of the last pass of frames, also where a question has the clusters made."""
    driven, at_work, paused, caller = watched(40), list[str](), set[tuple[str, str]](), "pass"
    begin, tree = driven.state.begin_pass, driven.index.tree
    pause = lambda: paused.update((caller, name) for name in at_work)  # noqa: E731
    monkeypatch.setattr(driven.state, "begin_pass", lambda one: begin(replace(one, pause=pause)))
    for name in ("assign_units", "_split"):
        plain = getattr(tree, name)

        def named(*given: Any, name: str = name, plain: Any = plain, **how: Any) -> Any:
            at_work.append(name)
            try:
                return plain(*given, **how)
            finally:
                at_work.pop()

        monkeypatch.setattr(tree, name, named)
    driven.watch(20, 1)
    assert paused == {("pass", "assign_units"), ("pass", "_split")}
    caller = "question"
    driven.ask()
    assert ("question", "assign_units") in paused


@pytest.mark.numeric(by="torch")
@pytest.mark.parametrize(
    "fields",
    [
        {"prefetch": "off"},
        {"prefetch": "query"},
        {"cache": 0},
        {"cache": 40},
        {"encode_by": "frame", "encode_frames": 0},
    ],
    ids=str,
)
def test_how_it_is_done_changes_no_answer(fields: dict[str, Any]) -> None:
    # How many units go in one pass is a matter of how it is done where passes retrieve nothing.
    plain, other = watched(encode_frames=fields.get("encode_frames", 8)), watched(**fields)
    for name in (0, 1, 0, 5):
        assert torch.equal(plain.ask(name), other.ask(name))
        assert plain.evidence == other.evidence
        # What a question left in the cache is nothing to the passes after it.
        a, b = (torch.cat(one.watch(5), 2) for one in (plain, other))
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert (other.counters["fetch_guessed"] > 0) == (fields.get("prefetch") != "off")
    assert partition(plain.index.tree) == partition(other.index.tree)


def test_a_guess_by_this_layer_s_query_is_right_where_layers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retrieval, "AHEAD", 1.0)
    driven = Driven(cache=0, prefetch="query")
    driven.kinds[:, 1:] = driven.kinds[:, :1]
    driven.watch(80)
    driven.ask(0)
    told = driven.counters
    assert told["fetch_covered"] == told["fetch_in_time"] > told["fetch_missing"] / 2
    assert 0.5 < told["prefetch_coverage"] <= 1 and told["fetch_slack_seconds"] > 0


def test_single_precision_is_near_double_s() -> None:
    whole = watched(40, 8, dtype=torch.float32, **ALL)
    cut = watched(40, 3, dtype=torch.float32, **ALL)
    torch.testing.assert_close(whole.ask(1), cut.ask(1), atol=1e-5, rtol=0)


def test_questions_see_head_representatives_retrieved_and_local_units() -> None:
    driven = watched(60)
    driven.ask(4)
    tree = driven.index.tree
    bare = watched(60, reps=0)
    bare.ask(4)
    for layer, (view, less) in enumerate(zip(driven.seen, bare.seen, strict=True)):
        units = [number for number, seen in bare.evidence.items()]
        assert less.key.shape[2] == 3 + (8 + 2) * TOKENS + 4
        extra = view.key.shape[2] - less.key.shape[2]
        assert 0 < extra < int(tree.semantic.cluster_counts()[layer])
        assert len(units) >= 10
        # All else is as without them.
        torch.testing.assert_close(view.key[:, :, 3 + extra :], less.key[:, :, 3:])
    few = watched(60, reps=2)
    few.ask(4)
    assert few.seen[1].key.shape[2] == bare.seen[1].key.shape[2] + 2


def test_evidence_names_what_was_retrieved() -> None:
    driven = watched(60)
    driven.ask(driven.scenes[10])
    seen = driven.evidence
    assert all(0 < one.score <= 1 and 0 <= one.share <= 1 for one in seen.values())
    assert 0.5 < sum(one.score for one in seen.values()) < 1 + 1e-6
    assert [seen[number].share for number in (58, 59)] == [1, 1] and seen[59].retrieved == 0
    retrieved = [number for number, one in seen.items() if one.retrieved == 1]
    right = sum(driven.scenes[number] == driven.scenes[10] for number in retrieved)
    assert len(retrieved) >= 4 and right >= 0.75 * len(retrieved)


def test_a_second_question_finds_the_cache() -> None:
    driven = watched(60, cache=16)
    driven.ask(3)
    before = driven.counters["fetch_cached"]
    driven.ask(3)
    assert driven.counters["fetch_cached"] - before >= 0.8 * LAYERS * 5


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    watched(30).state.save(tmp_path)
    whole = (tmp_path / "clusters.safetensors").read_bytes()
    (tmp_path / "clusters.safetensors").write_bytes(whole[:-50])
    with pytest.raises(ModelError, match=r"clusters\.safetensors cannot be read"):
        Driven().state.load(tmp_path)
    (tmp_path / "clusters.safetensors").write_bytes(whole)
    with pytest.raises(ModelError, match="damaged"):
        other = Driven()
        (tmp_path / "clusters.json").write_text("{}")
        other.state.load(tmp_path)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"index": "frames"}])
@pytest.mark.parametrize("limit", [10**6, 150])
def test_passes_see_units_that_have_left_the_window(limit: int, axes: int, fields: dict[str, Any]) -> None:
    """In order, at their own positions, or, where these pass the model's limit, one after the other before the window."""
    driven = watched(60, 4, encode_frames=3, axes=axes, limit=limit, **fields)
    state, seen = driven.state, list[Any]()
    first, base = state._first, state.bases.base_of_unit(60)
    assert (base > 0) == (limit == 150 and axes == 1)
    view, recall = state.view, state.prefetcher.retrieve
    retrieved: list[list[int]] = []

    def told(layer: int, entries: torch.Tensor, *how: Any) -> Any:
        retrieved.append(entries.tolist())
        return recall(layer, entries, *how)

    def kept(*given: Any) -> Any:
        seen.append(view(*given))
        return seen[-1]

    state.view, state.prefetcher.retrieve = kept, told  # type: ignore[method-assign]
    driven.watch(1)
    assert len(seen) == len(retrieved) == LAYERS
    for layer, (view, units) in enumerate(zip(seen, retrieved, strict=True)):
        assert len(units) == 3 and max(units) < first and units == sorted(set(units))
        assert view.sinks == HEAD + 3 * TOKENS and view.key.shape[2] == view.sinks + 6 * TOKENS
        numbers = {unit: max(unit - base, rank) for rank, unit in enumerate(units)}
        assert len(set(numbers.values())) == len(units) and max(numbers.values()) < first - base
        for at, unit in enumerate(units):
            columns = slice(HEAD + at * TOKENS, HEAD + (at + 1) * TOKENS)
            _, key, value = driven.unit(layer, unit)
            angles = WHEEL.rope_angles(state.stream.positions.position_range(numbers[unit], 1), driven.dtype)
            assert torch.equal(view.key[:, :, columns], WHEEL.apply_rope(key, angles))
            assert torch.equal(view.value[:, :, columns], value)


def test_passes_retrieve_nothing_while_all_is_in_the_window() -> None:
    a, b = (torch.cat(Driven(encode_frames=frames).watch(30), 2) for frames in (3, 0))
    rows = 5 * TOKENS
    assert torch.equal(a[:, :, :rows], b[:, :, :rows])
    assert not torch.allclose(a[:, :, -rows:], b[:, :, -rows:])


def test_an_endless_stream_may_pass_the_model_s_limit() -> None:
    """As it was stored, when passes see the window alone: it is all under the limit then."""
    closed = watched(60, positions="compact", encode_frames=0)
    # Compact positions do not depend on how far the stream has gone, and true ones are closed up where they pass the limit.
    for positions in ("compact", "original"):
        driven = watched(60, limit=150, positions=positions, encode_frames=0)
        assert torch.equal(driven.ask(2), closed.ask(2))
    assert not torch.equal(watched(60, encode_frames=0).ask(2), closed.ask(2))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prefetch": "luck"}, "mosaic: prefetch is 'luck'; give 'off', 'query' or 'projected'."),
        ({"encode_by": "token"}, "mosaic: encode_by is"),
        ({"reps": -1}, "mosaic: reps is -1; give at least 0, or null."),
        ({"index": "luck"}, "luck"),
        ({"index": 3}, "mosaic: index is 3; give a name, or a mapping with a name."),
        ({"index": {"name": "clusters", "semantic": 0}}, "clusters: semantic is 0; give at least 1."),
        ({"index": {"name": "clusters", "init": 1}}, "clusters: init is"),
        (
            {"index": {"name": "clusters", "splits": "some"}},
            "clusters: splits is 'some'; give 'passes' or 'all'.",
        ),
        ({"index": {"name": "frames", "similarity": "near"}}, "frames: similarity is"),
        ({"frames": 0}, "mosaic: frames is"),
        ({"local": 99}, "mosaic: local is"),
    ],
)
def test_a_field_out_of_range_is_told_at_birth(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(told)):
        Mosaic(**fields)


def test_a_guess_that_a_layer_does_not_need_is_given_up() -> None:
    """Where all that a layer retrieves is still in the window, nothing is brought; more layers than buffers follow."""
    driven = watched(40, cache=0)
    state = driven.state
    search, guessed = state.index.search_ahead, set()

    def near(layer: int, *rest: Any) -> Any:
        found, ahead = search(layer, *rest)
        if layer in guessed:
            end = state._end.begin
            return found._replace(entries=torch.arange(end - len(found.entries), end)), ahead
        guessed.add(layer)
        return found, ahead

    state.index.search_ahead = near  # type: ignore[method-assign]
    for name in range(4):
        guessed.clear()
        driven.ask(name)
        assert len(guessed) == LAYERS
    assert driven.counters["fetch_guessed"] > 0 and not state.prefetcher._ahead


def test_what_is_held_counts_the_head_as_it_was_turned() -> None:
    driven = Driven(window=9)
    state = driven.state
    kept = state.nbytes()
    driven.watch(3)
    rows = LAYERS * GROUPS * SIZE * 8
    more = state.nbytes() - kept
    assert more == rows * 3 * 3 * TOKENS and kept >= rows * 3 * HEAD
    state.reset()
    assert state.nbytes() == kept - 3 * rows * HEAD


def test_windows_before_an_ingestion_are_not_kept_beside_those_after_it() -> None:
    driven = watched(20)
    driven.state.begin_ingest()
    driven.watch(3)
    driven.state.end_ingest()
    assert not driven.state._stacked[1]


def test_a_stream_begun_anew_knows_nothing_of_the_old_one() -> None:
    driven = watched()
    driven.ask(1)
    (state := driven.state).reset()
    assert not state.prediction._known.any() and not driven.index.tree.has_clusters and not state.units()


def called(sizes: list[int], ask: bool, **fields: Any) -> tuple[Driven, torch.Tensor]:
    """Passes of 4 units in calls of these sizes, each as a session makes it, and what their rows got from attention."""
    driven, out = Driven(**fields), []
    for size in sizes:
        driven.state.checkpoint()
        out += driven.watch(size)
        driven.state.end_ingest()
        if ask:
            driven.ask(driven.scenes[3])
    return driven, torch.cat(out, 2)


@pytest.mark.numeric(by="torch")
@pytest.mark.parametrize(
    ("sizes", "ask"), [([4] * 15, True), ([16, 4, 28, 12], False)], ids=["often", "seldom"]
)
@pytest.mark.parametrize("fields", [{}, {"window": 2, "local": 1}], ids=str)
def test_calls_and_questions_change_nothing_of_what_is_stored(
    fields: dict[str, Any], sizes: list[int], ask: bool
) -> None:
    whole, rows = called([60], False, **fields)
    cut, others = called(sizes, ask, **fields)
    assert whole.state.counters()["deferred_splits"] > 0
    assert torch.equal(rows, others)
    assert partition(whole.index.tree) == partition(cut.index.tree)
    assert torch.equal(whole.ask(1), cut.ask(1))
