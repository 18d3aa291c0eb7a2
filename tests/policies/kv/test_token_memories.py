"""LiveVLM and StreamMem: what stays after a clip, what a question sees, merged frames, against loops by the papers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.memory.kv import StreamPass
from mmaccel.policies.kv import LiveVLM, StreamMem
from mmaccel.policies.kv._tokens import TokenMemory, attention_shares
from mmaccel.policies.kv.livevlm import choose_tokens_across_stream

from .token_streams import (
    GROUPS,
    HEAD,
    HEADS,
    LAYERS,
    SIZE,
    TOKENS,
    opened,
    placed,
    position_ids,
    randn,
    raw,
    run,
    share,
    turned,
    watch,
    watched,
    words,
)

SMALL = LiveVLM(frames=4, recent=2, page=4)
CLIP = 32


def chosen_by_hand(score: list[float], where: list[int], budget: int, scatter: float, room: int) -> list[int]:
    order = sorted(range(len(score)), key=lambda i: (-score[i], i))
    kept = order[: int(scatter * budget)]
    full = {place: [where[i] for i in kept].count(place) for place in set(where)}
    rest = [i for i in order if i not in kept]
    for i in rest:
        if len(kept) < budget and full[where[i]] < room:
            kept.append(i)
            full[where[i]] += 1
    kept += [i for i in rest if i not in kept][: budget - len(kept)]
    return sorted(kept)


@given(
    score=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7, 0.9]), min_size=1, max_size=40),
    draws=st.randoms(use_true_random=False),
    scatter=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    room=st.integers(1, 4),
)
def test_tokens_are_spread_as_the_paper_says(score: list, draws: object, scatter: float, room: int) -> None:
    where = sorted(draws.randint(0, 6) for _ in score)  # type: ignore[attr-defined]
    budget = draws.randint(0, len(score))  # type: ignore[attr-defined]
    found = choose_tokens_across_stream(torch.tensor(score), torch.tensor(where), budget, scatter, room)
    assert found.tolist() == chosen_by_hand(score, where, budget, scatter, room)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_attention_is_shared_out_as_the_model_does(rows: int) -> None:
    query, key = (randn((rows, GROUPS), 1, HEADS, rows, SIZE), randn((rows,), 1, GROUPS, 11, SIZE))
    found = attention_shares(query, key)
    assert found.tolist() == pytest.approx(share(query, key), abs=1e-6)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)


def history(frames: int, recent: int, units: int, policy: LiveVLM, layer: int) -> tuple[list[int], int]:
    """Columns held after `units` units, and how many were cut, by the words of the paper."""
    columns: list[int] = []
    cut = 0
    for clip in range(0, units, CLIP):
        end = min(clip + CLIP, units)
        columns += range(clip * TOKENS, end * TOKENS)
        old = [c for c in columns if c < (end - recent) * TOKENS]
        if end % CLIP or len(old) <= frames * TOKENS:
            continue
        made = position_ids()
        key = torch.cat([raw(layer, c // TOKENS)[1][:, :, c % TOKENS : c % TOKENS + 1] for c in columns], 2)
        key = turned(key, HEAD + torch.tensor(columns))
        head = turned(randn((1, layer, -1), 1, GROUPS, HEAD, SIZE), made.positions_before_video())
        query = turned(raw(layer, end - 1)[0], made.position_range(end - 1, 1))
        score = share(query, torch.cat([head, key], 2))[HEAD:]
        budget = frames * TOKENS
        stretches = budget // policy.bucket
        where = [c * stretches // ((end - recent) * TOKENS) for c in old]
        kept = chosen_by_hand(score[: len(old)], where, budget, policy.scatter, policy.bucket)
        cut += len(old) - budget
        columns = [old[i] for i in kept] + columns[len(old) :]
    return columns, cut


@pytest.mark.parametrize(("bucket", "scatter"), [(1, 0.5), (3, 0.25), (2, 0.0)])
def test_what_stays_after_clips(bucket: int, scatter: float) -> None:
    policy = LiveVLM(frames=4, recent=2, page=4, bucket=bucket, scatter=scatter)
    state = watched(opened(policy), 2 * CLIP + 5)
    cuts = 0.0
    for layer in range(LAYERS):
        expected, cut = history(4, 2, 2 * CLIP + 5, policy, layer)
        held = state._held[layer]
        assert held is not None and held.column.tolist() == expected
        cuts += cut / LAYERS
        for i in (0, 7, len(expected) - 1):
            unit, cell = divmod(expected[i], TOKENS)
            assert torch.equal(held.key[0, :, i], raw(layer, unit)[1][0, :, cell])
            assert torch.equal(held.value[0, :, i], raw(layer, unit)[2][0, :, cell])
    assert state.counters()["pruned"] == cuts and cuts > 0
    assert state.units() == 2 * CLIP + 5 and state.length() == HEAD + (2 * CLIP + 5) * TOKENS
    assert state.held_columns() == HEAD + (4 + 2 + 5) * TOKENS and state.counters()["resident"] == 4 + 2 + 5
    state.reset()
    assert state.length() == state.held_columns() == state.units() == state.counters()["pruned"] == 0


def test_a_pass_sees_the_head_and_all_that_is_held_at_true_positions() -> None:
    state, made = opened(SMALL), position_ids()
    for number, views in enumerate(watch(state, 20)):
        first, last = 8 * number, min(8 * number + 8, 20)
        for layer, view in enumerate(views):
            key = torch.cat([raw(layer, unit)[1] for unit in range(last)], 2)
            query = torch.cat([raw(layer, unit)[0] for unit in range(first, last)], 2)
            head = randn((1, layer, -1), 1, GROUPS, HEAD, SIZE)
            expected = torch.cat(
                [turned(head, made.positions_before_video()), turned(key, made.position_range(0, last))], 2
            )
            torch.testing.assert_close(view.key, expected)
            assert view.query is not None and view.window is None and view.column is None
            torch.testing.assert_close(view.query, turned(query, made.position_range(first, last - first)))


def asked(state: TokenMemory, rows: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and queries of a question at each layer."""
    stream_pass = StreamPass(kind="question", rows=rows, words=(1, 4), room=2)
    views = run(state, stream_pass, lambda layer: words(layer, rows, 7))
    return [view.key for view in views], [view.query for view in views if view.query is not None]


@pytest.mark.parametrize(("axes", "limit"), [(1, 10**6), (1, 250), (3, 10**6), (3, 100)])
def test_a_question_sees_the_best_pages_and_the_recent_frames(axes: int, limit: int) -> None:
    """At their own positions; past the model's limit as if nothing lay between the tokens that are held."""
    policy = LiveVLM(frames=6, recent=2, recall=0.5, page=5)
    state, made = watched(opened(policy, axes=axes, limit=limit), CLIP + 20), position_ids(axes, limit)
    with state.question_scope():
        keys, queries = asked(state)
        counted = state.counters()
        for layer in range(LAYERS):
            held = state._held[layer]
            assert held is not None
            columns = held.column.tolist()
            old = [i for i, c in enumerate(columns) if c < (CLIP + 18) * TOKENS]
            query = words(layer, 5, 7)[0][0, :, 1:4].mean(1).float()
            scores = []
            for page in range(len(old) // 5):
                mean = held.key[0, :, 5 * page : 5 * page + 5].float().mean(1)
                scores.append(sum(float(query[h] @ mean[h * GROUPS // HEADS]) for h in range(HEADS)))
            most = int(6 * TOKENS * 0.5) // 5
            assert len(scores) > most
            best = sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:most])
            index = [5 * page + i for page in best for i in range(5)]
            index += range(len(old) // 5 * 5, len(columns))
            ranks = torch.tensor(index)
            own = held.column[ranks]
            long = made.largest_position(CLIP + 20) >= limit
            head = randn((1, layer, -1), 1, GROUPS, HEAD, SIZE)
            after = len(columns) // TOKENS if long else CLIP + 20
            _, key, _ = words(layer, 5, 7)
            tail = made.text_positions(after, 0, 5)
            parts = [
                turned(head, made.positions_before_video()),
                turned(held.key[:, :, ranks], placed(own, ranks, axes, long)),
                turned(key, tail),
            ]
            torch.testing.assert_close(keys[layer], torch.cat(parts, 2))
            torch.testing.assert_close(queries[layer], turned(words(layer, 5, 7)[0], tail))
        assert long == (limit < 1000), "the case is what it says"
        assert counted["pages"] == LAYERS * most and counted["questions"] == 1
        seen = state.evidence()
        assert all(seen[unit].share == 1 and seen[unit].retrieved == 0 for unit in (CLIP + 18, CLIP + 19))
        told = {unit for unit, one in seen.items() if one.retrieved}
        units = [{int(c) // TOKENS for c in held.column[state_index]} for held, state_index in picks(state)]
        assert told == set.union(*units) - {CLIP + 18, CLIP + 19}
        for unit in told:
            assert seen[unit].retrieved == sum(unit in some for some in units) / LAYERS
            assert 0 <= seen[unit].score <= 1


def picks(state: TokenMemory) -> list:
    """For each layer what it holds, and the indices that the question picked."""
    found = []
    for layer, held in enumerate(state._held):
        query = words(layer, 5, 7)[0][0, :, 1:4].float().mean(1)
        index, _ = state._pick(layer, query, held)  # type: ignore[arg-type]
        found.append((held, index))
    return found


def test_every_query_of_the_pass_is_asked_of_probes_at_most() -> None:
    """The last tokens alone decide; as many as a unit has, whatever is asked for."""
    states = [watched(opened(LiveVLM(frames=4, probes=n)), CLIP) for n in (1, TOKENS, 99, None)]
    held = [state._held[0].column.tolist() for state in states]  # type: ignore[union-attr]
    assert held[1] == held[2] == held[3] != held[0]


def test_clips_and_budgets_are_counted_in_frames() -> None:
    state = opened(LiveVLM(frames=5, recent=3), frames_per_unit=2)
    assert (state.clip, state.budget, state.recent) == (16, 3 * TOKENS, 2)  # type: ignore[attr-defined]
    assert [state.units_that_fit(first, 99) for first in (0, 5, 16)] == [16, 11, 16]
    assert state.units_that_fit(3, 2) == 2


MERGING = StreamMem(frames=3)
MERGED_CLIP = 8

Token = tuple[int, Tensor, Tensor]
"""Column, raw key and value [G, D]."""


def merged_history(policy: StreamMem, units: int, layer: int) -> list[Token]:
    """What a layer holds after `units` units that came a clip at a time, by the words of the paper."""
    held: list[Token] = []
    whole = 0
    for clip in range(0, units, MERGED_CLIP):
        end = min(clip + MERGED_CLIP, units)
        for unit in range(clip, end):
            _, key, value = raw(layer, unit)
            held += [(unit * TOKENS + c, key[0, :, c], value[0, :, c]) for c in range(TOKENS)]
        budget = policy.frames * TOKENS
        if end % MERGED_CLIP or len(held) <= budget:
            continue
        made = position_ids()
        query, key, _ = words(layer, 2, end)
        tail = made.text_positions(end, 0, 2)
        head = turned(randn((1, layer, -1), 1, GROUPS, HEAD, SIZE), made.positions_before_video())
        past = turned(
            torch.stack([k for _, k, _ in held], 1)[None], HEAD + torch.tensor([c for c, _, _ in held])
        )
        score = share(turned(query, tail), torch.cat([head, past, turned(key, tail)], 2))[HEAD:-2]
        units_new = range(end - min(end - whole, budget), end) if policy.prototypes else range(0)
        prototypes: list[Token] = []
        for unit in units_new:
            mine = [i for i, one in enumerate(held) if one[0] // TOKENS == unit][-TOKENS:]
            total = sum(score[i] for i in mine)
            sides = [sum(score[i] / total * held[i][side] for i in mine) for side in (1, 2)]
            prototypes.append((unit * TOKENS + TOKENS // 2, *sides))  # type: ignore[arg-type]
        best = sorted(range(len(held)), key=lambda i: (-score[i], i))[: budget - len(prototypes)]
        held = sorted([held[i] for i in sorted(best)] + prototypes, key=lambda one: one[0])
        whole = end
    return held


@pytest.mark.parametrize("prototypes", [True, False])
@pytest.mark.parametrize("frames", [3, 9, 40])
def test_what_stays_after_merged_clips(frames: int, prototypes: bool) -> None:
    state = watched(
        opened(StreamMem(frames=frames, prototypes=prototypes)), 3 * MERGED_CLIP + 3, MERGED_CLIP, proxy=True
    )
    for layer in range(LAYERS):
        held = state._held[layer]
        expected = merged_history(StreamMem(frames=frames, prototypes=prototypes), 27, layer)
        assert held is not None and held.column.tolist() == [column for column, _, _ in expected]
        for side, found in ((1, held.key), (2, held.value)):
            torch.testing.assert_close(
                found[0], torch.stack([one[side] for one in expected], 1), atol=1e-5, rtol=1e-5
            )
    counted = state.counters()
    if frames == 40:
        assert counted["pruned"] == counted["prototypes"] == 0 and state.held_columns() == state.length()
    else:
        assert counted["pruned"] > 0 and (counted["prototypes"] > 0) == prototypes
        assert state.held_columns() == HEAD + (frames + 3) * TOKENS
    assert state.units() == 27 and state.length() == HEAD + 27 * TOKENS


def test_a_proxy_leaves_no_trace_of_its_own() -> None:
    state = watched(opened(MERGING), 5)
    before = state.length(), state.held_columns(), [one.key.clone() for one in state._held if one is not None]
    views = run(state, StreamPass(kind="proxy", rows=2), lambda layer: words(layer, 2, 0))
    assert all(view.key.shape[2] == HEAD + 5 * TOKENS + 2 for view in views)
    assert (state.length(), state.held_columns()) == before[:2]
    assert all(torch.equal(a, b.key) for a, b in zip(before[2], state._held, strict=True) if b is not None)


@pytest.mark.parametrize(("axes", "limit"), [(1, 10**6), (1, 100), (3, 40)])
def test_a_question_sees_all_that_is_held(axes: int, limit: int) -> None:
    state = watched(opened(MERGING, axes=axes, limit=limit), 19, MERGED_CLIP, proxy=True)
    made = position_ids(axes, limit)
    views = run(state, StreamPass(kind="question", rows=4), lambda layer: words(layer, 4, 1))
    long = made.largest_position(19) >= limit
    assert long == (limit < 1000)
    for layer, view in enumerate(views):
        held = state._held[layer]
        assert held is not None
        count = held.column.shape[0]
        at = placed(held.column, torch.arange(count), axes, long)
        tail = made.text_positions(count // TOKENS if long else 19, 0, 4)
        head = turned(randn((1, layer, -1), 1, GROUPS, HEAD, SIZE), made.positions_before_video())
        expected = [head, turned(held.key, at), turned(words(layer, 4, 1)[1], tail)]
        torch.testing.assert_close(view.key, torch.cat(expected, 2))
    evidence = state.evidence()
    held_units = [set((one.column // TOKENS).tolist()) for one in state._held if one is not None]
    assert set(evidence) == set.union(*held_units)
    for unit, seen in evidence.items():
        assert seen.share == seen.retrieved == sum(unit in some for some in held_units) / LAYERS


def test_frames_like_the_one_before_are_merged() -> None:
    """Within clips of eight; the last ones wait for those that may follow, however they come."""
    one, two = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    frames = torch.stack([one, 3 * one, one + 0.01, two, one, -one, -one, -one, -one, two])
    expected = [torch.stack([one, 3 * one, one + 0.01]).mean(0), two, one, -one, -one]
    for step in (1, 2, 3, 10):
        state = opened(StreamMem(similar=0.9))
        made = [state.merge_units(part) for part in frames.split(step)]
        assert [n for _, counts in made for n in counts] == [3, 1, 1, 3, 1], (
            "the ninth begins a clip of its own"
        )
        torch.testing.assert_close(torch.cat([features for features, _ in made]), torch.stack(expected))
        waiting = state.waiting_features()
        assert waiting is not None and torch.equal(waiting, two[None])
        assert state.counters()["merged"] == 4
    for other in (opened(StreamMem(similar=None)), opened(StreamMem(similar=1.0))):
        features, counts = other.merge_units(frames[:8])
        assert set(counts) <= {1, 2, 3} and len(counts) >= 7 and len(features) == len(counts)
        assert other.waiting_features() is None
    assert opened(StreamMem(similar=None)).merge_units(frames)[0] is frames
    half, _ = state.merge_units(frames.half())
    assert half.dtype == torch.float16
