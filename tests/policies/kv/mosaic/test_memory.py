"""The memory `mosaic`: exact where it can be, the same answer however it fetches, and all that it says it does happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.core.errors import ModelError, RecipeError, StoreError
from mmaccel.policies.kv.mosaic import Mosaic
from tests.policies.kv.mosaic.driven import GEOMETRY, GROUPS, HEAD, LAYERS, SIZE, TOKENS, WHEEL, Driven
from tests.policies.kv.mosaic.scenes import audit, partition


def watched(count: int = 60, step: int = 4, **fields: Any) -> Driven:
    driven = Driven(**fields)
    driven.watch(count, step)
    return driven


ALL = dict(frames=90, window=90, positions="original")


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize(
    "fields", [{}, {"granularity": "tile", "tile": 3}, {"granularity": "token"}, {"window": 5}]
)
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
    named = (
        "eager_splits",
        "deferred_splits",
        "visual_splits",
        "deferred",
        "singletons",
        "flushed",
        "resolved",
    )
    assert min(found[name] for name in named) > 0, {name: found[name] for name in named}
    assert found["recalled"] == 6 * LAYERS * 8 and found["questions"] == 6
    assert found["fetch_cached"] > 0 and found["fetch_covered"] > 0 and found["host_copies_in"] > 0
    assert 0 < found["prefetch_coverage"] < 1
    assert found["host_units"] == LAYERS * 75 and found["window"] == 5
    audit(driven.state.tree, 1e-9)


@pytest.mark.numeric(by="torch")
@pytest.mark.parametrize(
    "fields",
    [
        {"prefetch": False},
        {"predictor": "query"},
        {"predictor": "frames"},
        {"slack": 2.0},
        {"cache": 0},
        {"cache": 40},
        {"batch_layers": False, "clip": 1, "encode_frames": 0},
        {"batch_match": False},
        {"batch_attention": False},
        {"host_bytes": 0, "spill": "disk"},
    ],
    ids=str,
)
def test_how_it_is_done_changes_no_answer(fields: dict[str, Any], tmp_path: Path) -> None:
    disk = {"folder": str(tmp_path)} if "spill" in fields else {}
    # How many units go in one pass is a matter of how it is done where passes retrieve nothing.
    plain, other = watched(encode_frames=fields.get("encode_frames", 8)), watched(**fields, **disk)
    for name in (0, 1, 0, 5):
        assert torch.equal(plain.ask(name), other.ask(name))
        assert plain.evidence == other.evidence
        # What a question left in the cache is nothing to the passes after it.
        a, b = (torch.cat(one.watch(5), 2) for one in (plain, other))
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    guesses = fields.get("prefetch") is not False and not disk
    assert (other.counters["fetch_guessed"] > 0) == guesses
    assert partition(plain.state.tree) == partition(other.state.tree)


def test_a_guess_by_this_layer_s_query_is_right_where_layers_agree() -> None:
    driven = Driven(cache=0, predictor="query", slack=1.0)
    driven.kinds[:, 1:] = driven.kinds[:, :1]
    driven.watch(80)
    driven.ask(0)
    told = driven.counters
    assert told["fetch_covered"] == told["fetch_in_time"] > told["fetch_missing"] / 2
    assert 0.5 < told["prefetch_coverage"] <= 1 and told["fetch_slack_s"] > 0


@pytest.mark.parametrize("step", [1, 3, 11])
def test_chunks_change_neither_clusters_nor_outputs(step: int) -> None:
    whole, cut = Driven(encode_frames=0), Driven(encode_frames=0)
    a, b = torch.cat(whole.watch(80, 80), 2), torch.cat(cut.watch(80, step), 2)
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    torch.testing.assert_close(whole.ask(2), cut.ask(2), atol=1e-12, rtol=0)
    assert partition(whole.state.tree) == partition(cut.state.tree)


def test_single_precision_is_near_double_s() -> None:
    whole = watched(40, 8, dtype=torch.float32, **ALL)
    cut = watched(40, 3, dtype=torch.float32, **ALL)
    torch.testing.assert_close(whole.ask(1), cut.ask(1), atol=1e-5, rtol=0)


def test_questions_see_head_representatives_retrieved_and_local_units() -> None:
    driven = watched(60)
    driven.ask(4)
    tree = driven.state.tree
    bare = watched(60, reps=0)
    bare.ask(4)
    for layer, (view, less) in enumerate(zip(driven.seen, bare.seen, strict=True)):
        units = [number for number, seen in bare.evidence.items()]
        assert less.key.shape[2] == 3 + (8 + 2) * TOKENS + 4
        extra = view.key.shape[2] - less.key.shape[2]
        assert 0 < extra < int(tree.semantic.count()[layer])
        assert len(units) >= 10
        # All else is as without them.
        torch.testing.assert_close(view.key[:, :, 3 + extra :], less.key[:, :, 3:])
    few = watched(60, reps=2)
    few.ask(4)
    assert few.seen[1].key.shape[2] == bare.seen[1].key.shape[2] + 2


def test_a_representative_may_weigh_as_much_as_what_it_stands_for() -> None:
    biased = watched(40, rep_bias="log_size", frames=6)
    plain = watched(40, frames=6)
    biased.ask(4)
    plain.ask(4)
    with_log, without = biased.seen[0], plain.seen[0]
    assert without.bias is None and with_log.bias is not None
    assert torch.equal(with_log.key, without.key)
    added, head = with_log.bias.exp(), 3
    assert torch.equal(added[:head], torch.ones(head)) and bool((added[head:] != 1).all())
    # 40 units less the local ones less those retrieved (whose clusters may have members left over), in tokens.
    told = float(added[head:].sum()) / TOKENS
    assert told == pytest.approx(round(told)) and 20 <= round(told) <= 40 - 2 - 6


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


@pytest.mark.parametrize("encode_frames", [0, 8])
def test_a_question_leaves_the_stream_as_it_was(encode_frames: int) -> None:
    asked, silent = Driven(encode_frames=encode_frames), Driven(encode_frames=encode_frames)
    for _ in range(4):
        outputs = []
        for one in (asked, silent):
            outputs.append(torch.cat(one.watch(16), 2))
            one.state.idle()
        assert torch.equal(*outputs) and asked.state.length() == silent.state.length()
        for name in (2, 0, 5):
            asked.ask(name)
    # Questions make the splits that are owed where passes make none.
    assert (partition(asked.state.tree) == partition(silent.state.tree)) == (encode_frames > 0)
    if encode_frames:
        assert torch.equal(asked.ask(1), silent.ask(1))
    audit(asked.state.tree)


@pytest.mark.parametrize("fields", [{}, {"granularity": "tile", "tile": 2}])
@pytest.mark.parametrize("units", [8, 45])
def test_saved_and_loaded_it_answers_the_same(tmp_path: Path, units: int, fields: dict[str, Any]) -> None:
    driven = watched(units, **fields)
    driven.state.save(tmp_path)
    again = Driven(**fields)
    again.state.load(tmp_path)
    assert torch.equal(driven.ask(3), again.ask(3))
    a, b = (torch.cat(one.watch(15), 2) for one in (driven, again))
    assert torch.equal(a, b)
    assert torch.equal(driven.ask(5), again.ask(5))
    assert partition(driven.state.tree) == partition(again.state.tree)


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


@pytest.mark.parametrize("tile", [1, 2, 6])
def test_tiles_keep_the_budget_of_frames(tile: int) -> None:
    driven = watched(40, granularity="tile", tile=tile, reps=0)
    driven.ask(2)
    assert [view.key.shape[2] for view in driven.seen] == [3 + (8 + 2) * TOKENS + 4] * LAYERS
    assert driven.counters["recalled"] == 8 * LAYERS


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"granularity": "tile", "tile": 2}])
@pytest.mark.parametrize("limit", [10**6, 150])
def test_passes_see_units_that_have_left_the_window(limit: int, axes: int, fields: dict[str, Any]) -> None:
    """In their order, at their own places, or, where these pass the model's limit, one after the other before the window."""
    driven = watched(60, 4, encode_frames=3, axes=axes, limit=limit, **fields)
    state, seen = driven.state, list[Any]()
    first, base = state._first, state.bases.of(60)
    assert (base > 0) == (limit == 150 and axes == 1)
    run, recall = driven.run, state.fetcher.recall
    retrieved: list[list[int]] = []

    def told(layer: int, entries: torch.Tensor) -> Any:
        retrieved.append(entries.tolist())
        return recall(layer, entries)

    def kept(*given: Any) -> Any:
        seen.extend(run(*given))
        return seen

    driven.run, state.fetcher.recall = kept, told  # type: ignore[method-assign]
    driven.watch(1)
    assert len(seen) == len(retrieved) == LAYERS
    p, parts = TOKENS // state.parts, state.parts
    for layer, (view, entries) in enumerate(zip(seen, retrieved, strict=True)):
        assert len(entries) == 3 * parts and max(entries) < first * parts and entries == sorted(set(entries))
        assert view.sinks == HEAD + 3 * TOKENS and view.key.shape[2] == view.sinks + 6 * TOKENS
        units = sorted({entry // parts for entry in entries})
        numbers = {unit: max(unit - base, rank) for rank, unit in enumerate(units)}
        assert len(set(numbers.values())) == len(units) and max(numbers.values()) < first - base
        for at, entry in enumerate(entries):
            unit, rows = entry // parts, slice(entry % parts * p, (entry % parts + 1) * p)
            columns = slice(HEAD + at * p, HEAD + (at + 1) * p)
            _, key, value = driven.unit(layer, unit)
            angles = WHEEL.angles(state.stream.places.units(numbers[unit], 1), driven.dtype)
            assert torch.equal(view.key[:, :, columns], WHEEL.turn(key, angles)[:, :, rows])
            assert torch.equal(view.value[:, :, columns], value[:, :, rows])


@pytest.mark.parametrize("end", [57, 59])
def test_parts_of_more_units_than_have_places_stand_before_the_window_too(end: int) -> None:
    """Just after the base has grown there are places for as many units as passes retrieve frames; tiles are of more."""
    driven, told = watched(end - 1, 1, encode_frames=3, limit=150, granularity="tile", tile=2), list[Any]()
    standing = driven.state.chooser.standing
    tokens = standing.tokens

    def seen(entries: torch.Tensor, numbers: torch.Tensor, most: int, own: bool) -> torch.Tensor:
        told.append((entries // driven.state.parts, numbers))
        return tokens(entries, numbers, most, own)

    standing.tokens = seen  # type: ignore[method-assign]
    room = driven.state._first - driven.state.bases.of(end - 1)
    driven.watch(1)
    assert len(told) == LAYERS and max(len(units.unique()) for units, _ in told) > room
    for units, numbers in told:
        steps = numbers.diff()
        assert int(numbers[0]) >= 0 and int(numbers[-1]) < room and bool((steps >= 0).all())
        assert not steps[units.diff() == 0].any()
        assert len(numbers.unique()) == min(room, len(units.unique()))


def test_passes_retrieve_nothing_while_all_is_in_the_window() -> None:
    a, b = (torch.cat(Driven(encode_frames=frames).watch(30), 2) for frames in (3, 0))
    rows = 5 * TOKENS
    assert torch.equal(a[:, :, :rows], b[:, :, :rows])
    assert not torch.allclose(a[:, :, -rows:], b[:, :, -rows:])


def test_the_host_s_cap_is_told_and_nothing_is_lost() -> None:
    unit = LAYERS * 2 * 2 * TOKENS * 8 * 8
    driven = Driven(host_bytes=unit * 24, spill="refuse")
    with pytest.raises(StoreError):
        driven.watch(90)
    driven.ask(1)


def test_the_oldest_may_be_forgotten() -> None:
    unit = LAYERS * 2 * 2 * TOKENS * 8 * 8
    driven = Driven(host_bytes=unit * 24, spill="drop_oldest")
    driven.watch(80)
    driven.ask(driven.scenes[0])
    assert driven.counters["host_dropped"] > 0
    assert [view.key.shape[2] >= 3 + (8 + 2) * TOKENS + 4 for view in driven.seen] == [True] * LAYERS


def test_an_endless_stream_may_pass_the_model_s_limit() -> None:
    """As it was stored, when passes see the window alone: it is all under the limit then."""
    closed = watched(60, positions="compact", encode_frames=0)
    # Compact places do not depend on how far the stream has gone, and true ones are closed up where they pass the limit.
    for positions in ("compact", "original"):
        driven = watched(60, limit=150, positions=positions, encode_frames=0)
        assert torch.equal(driven.ask(2), closed.ask(2))
    assert not torch.equal(watched(60, encode_frames=0).ask(2), closed.ask(2))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"granularity": "patch"}, "granularity"),
        ({"predictor": "luck"}, "predictor"),
        ({"threshold": "loose"}, "threshold"),
        ({"levels": "some"}, "levels"),
        ({"rep_bias": "size"}, "rep_bias"),
        ({"semantic": 0}, "semantic"),
        ({"init": 1}, "init"),
        ({"slack": 0.5}, "slack"),
        ({"tau_small": 0.0}, "tau_small"),
        ({"gain": 1.0}, "gain"),
        ({"clip": 0}, "clip"),
        ({"largest": 2, "smallest": 4}, "largest"),
        ({"frames": 0}, "frames"),
        ({"local": 99}, "local"),
    ],
)
def test_a_field_out_of_range_is_told_at_birth(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=f"mosaic: {told} is "):
        Mosaic(**fields)


def test_a_tile_that_does_not_divide_a_unit_is_told() -> None:
    with pytest.raises(RecipeError, match="tile is 4"):
        Driven(granularity="tile", tile=4)
    assert GEOMETRY.layers == LAYERS


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
    assert driven.counters["fetch_guessed"] > 0 and not state.fetcher._ahead


def test_what_is_held_counts_the_head_as_it_was_turned() -> None:
    driven = Driven(window=9)
    state = driven.state
    kept = state.nbytes()
    driven.watch(3)
    rows = LAYERS * GROUPS * SIZE * 8
    more = state.nbytes() - kept
    assert more == rows * (HEAD + 3 * 3 * TOKENS)
    state.reset()
    assert state.nbytes() == kept - 2 * rows * HEAD


def test_a_stream_begun_anew_knows_nothing_of_the_old_one() -> None:
    driven = watched()
    driven.ask(1)
    (state := driven.state).reset()
    assert not state.chooser.drift._known.any() and not state.tree.started and not state.units()
