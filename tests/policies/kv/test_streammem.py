"""StreamMem: what the template's words keep, the prototypes of frames, and frames that are merged, spelled out in loops."""

import pytest
import torch
from torch import Tensor

from mmaccel.core.memory.kv import StreamPass
from mmaccel.policies.kv import StreamMem

from .token_streams import (
    GROUPS,
    HEAD,
    LAYERS,
    SIZE,
    TOKENS,
    draw,
    opened,
    placed,
    position_ids,
    raw,
    run,
    share,
    turned,
    watched,
    words,
)

SMALL = StreamMem(frames=3)
CLIP = 8

Token = tuple[int, Tensor, Tensor]
"""Column, raw key and value [G, D]."""


def history(policy: StreamMem, units: int, layer: int) -> list[Token]:
    """What a layer holds after `units` units that came a clip at a time, by the words of the paper."""
    held: list[Token] = []
    whole = 0
    for clip in range(0, units, CLIP):
        end = min(clip + CLIP, units)
        for unit in range(clip, end):
            _, key, value = raw(layer, unit)
            held += [(unit * TOKENS + c, key[0, :, c], value[0, :, c]) for c in range(TOKENS)]
        budget = policy.frames * TOKENS
        if end % CLIP or len(held) <= budget:
            continue
        made = position_ids()
        query, key, _ = words(layer, 2, end)
        tail = made.text_positions(end, 0, 2)
        head = turned(draw((1, layer, -1), 1, GROUPS, HEAD, SIZE), made.prompt_head_positions())
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
def test_what_stays_after_clips(frames: int, prototypes: bool) -> None:
    state = watched(opened(StreamMem(frames=frames, prototypes=prototypes)), 3 * CLIP + 3, CLIP, proxy=True)
    for layer in range(LAYERS):
        held, expected = (
            state._held[layer],
            history(StreamMem(frames=frames, prototypes=prototypes), 27, layer),
        )
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
    state = watched(opened(SMALL), 5)
    before = state.length(), state.held_columns(), [one.key.clone() for one in state._held if one is not None]
    views = run(state, StreamPass(kind="proxy", rows=2), lambda layer: words(layer, 2, 0))
    assert all(view.key.shape[2] == HEAD + 5 * TOKENS + 2 for view in views)
    assert (state.length(), state.held_columns()) == before[:2]
    assert all(torch.equal(a, b.key) for a, b in zip(before[2], state._held, strict=True) if b is not None)


@pytest.mark.parametrize(("axes", "limit"), [(1, 10**6), (1, 100), (3, 40)])
def test_a_question_sees_all_that_is_held(axes: int, limit: int) -> None:
    state, made = (
        watched(opened(SMALL, axes=axes, limit=limit), 19, CLIP, proxy=True),
        position_ids(axes, limit),
    )
    views = run(state, StreamPass(kind="question", rows=4), lambda layer: words(layer, 4, 1))
    long = made.largest(19) >= limit
    assert long == (limit < 1000)
    for layer, view in enumerate(views):
        held = state._held[layer]
        assert held is not None
        count = held.column.shape[0]
        at = placed(held.column, torch.arange(count), axes, long)
        tail = made.text_positions(count // TOKENS if long else 19, 0, 4)
        head = turned(draw((1, layer, -1), 1, GROUPS, HEAD, SIZE), made.prompt_head_positions())
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
