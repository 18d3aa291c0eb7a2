"""ReKV: it recalls what its authors' formula says; positions of an endless stream, bounded, however it is cut."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mmaccel
from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import PositionIds
from mmaccel.policies.kv._index import IndexPolicy
from mmaccel.policies.kv._ingest import Bases
from mmaccel.policies.kv.rekv import EveryFrameIndex, FrameIndex
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, open_session, pair

HEADS, GROUPS, SIZE, TOKENS = 6, 2, 8, 3


def keys(units: int, seed: int = 0) -> Tensor:
    return torch.randn(1, GROUPS, units * TOKENS, SIZE, generator=torch.Generator().manual_seed(seed))


def by_the_paper(key: Tensor, query: Tensor, cosine: bool) -> Tensor:
    """[units]: mean keys with the heads of a group repeated, against the mean query, all heads as one vector."""
    mean = key[0].view(GROUPS, -1, TOKENS, SIZE).mean(2)
    one = mean.repeat_interleave(HEADS // GROUPS, 0).transpose(0, 1).flatten(1)
    asked = query.flatten()
    score = one @ asked
    return score / (one.norm(dim=1) * asked.norm()) if cosine else score


def index_of(layers: int, similarity: str = "dot") -> FrameIndex:
    geometry = Geometry(layers=layers, heads=HEADS, kv_heads=GROUPS, head_dim=SIZE, hidden=9, vocab=9)
    stream: Any = SimpleNamespace(tokens_per_unit=TOKENS, dtype=torch.float32)
    policy: Any = EveryFrameIndex(similarity=similarity)  # type: ignore[arg-type]
    return FrameIndex(policy, stream, geometry, torch.device("cpu"), 0, False)


def folded(query: Tensor) -> Tensor:
    """The heads of a group share their keys."""
    return query.view(GROUPS, -1, SIZE).sum(1).flatten()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_scores_are_those_of_the_paper(similarity: str) -> None:
    index, key = index_of(2, similarity), keys(400)
    for first, count in ((0, 5), (5, 1), (6, 394)):
        some = key[:, :, first * TOKENS : (first + count) * TOKENS]
        index.add_units(None, [(some, some), (2 * some, some)], None)
    query = torch.randn(HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    for layer in range(2):
        for end in (400, 12):
            want = by_the_paper(key[:, :, : end * TOKENS], query, similarity == "cosine")
            for budget in (1, 9):
                found = index.search(layer, folded(query), budget, end)
                assert found.entries.tolist() == sorted(want.topk(budget).indices.tolist())
        scale = 1 if similarity == "cosine" else 1 + layer
        score = found.scores[:12]
        if similarity == "cosine":  # the folded query has another length
            score = score / score.abs().max() * want.abs().max()
        torch.testing.assert_close(score, scale * want, rtol=1e-4, atol=1e-4)


def test_ties_go_to_the_older_unit_and_forgotten_ones_are_not_found() -> None:
    index, ones = index_of(1), torch.ones(1, GROUPS, 6 * TOKENS, SIZE)
    assert index.search(0, folded(torch.ones(HEADS, SIZE)), 3, 0).entries.tolist() == []
    index.add_units(None, [(ones, ones)], None)

    def best(count: int) -> list[int]:
        return index.search(0, folded(torch.ones(HEADS, SIZE)), count, 6).entries.tolist()

    assert best(2) == [0, 1] and best(9) == list(range(6))
    index.forget([0, 3])
    assert best(2) == [1, 2] and best(9) == [1, 2, 4, 5]


def test_an_index_that_opens_nothing_is_told_at_birth() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare(IndexPolicy):
        name = "bare"

    with pytest.raises(RecipeError, match="bare: the index opens nothing; set opens"):
        Bare()


def test_a_planted_frame_is_recalled() -> None:
    """A unit whose mean key is the question's own direction is found at its place."""
    fields = {"name": "rekv", "frames": 2, "window": 4}
    with open_session("random-ov", fields) as session:
        session.watch(film(20), fps=FPS)
        state: Any = session._live.state  # type: ignore[union-attr]
        asked, search = set[int](), state.index.search_ahead

        def planted(layer: int, queries: Tensor, *rest: Any) -> Any:
            asked.add(layer)
            state.index.key[layer, 3 + layer] = 100 * queries[0]
            return search(layer, queries, *rest)

        state.index.search_ahead = planted
        seen = {one.frames[0]: one for one in session.ask(QUESTION, 1).evidence}
        assert asked == {0, 1} and seen[3].recalled >= 0.5 and seen[4].recalled >= 0.5


def test_the_budget_is_in_frames() -> None:
    with open_session("random-qwen", {"name": "rekv", "frames": 6, "window": 8}) as session:
        session.watch(film(20), fps=FPS)
        answer = session.ask(QUESTION, 1)
        frames = sum(one.recalled * (one.frames[1] - one.frames[0] + 1) for one in answer.evidence)
        assert frames == pytest.approx(6)
        assert session.counters()["window"] == 4


HEAD = 5


def line(unit: int, limit: int) -> PositionIds:
    """1-D positions of units of so many tokens after a head of `HEAD`."""
    first = torch.arange(HEAD, HEAD + unit)[None]
    return PositionIds(
        torch.arange(HEAD)[None], first, lambda n: torch.arange(n) * unit, HEAD + unit, unit, limit
    )


def grid(limit: int, pace: float = 1.5) -> PositionIds:
    """M-RoPE positions of units of 2 x 2 tokens, `pace` positions apart, rounded down."""
    cells = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]) + HEAD
    head = torch.arange(HEAD).expand(3, -1)
    return PositionIds(head, cells, lambda n: (torch.arange(n) * pace).long(), HEAD + 2, 0, limit)


def test_positions_are_those_of_a_prompt() -> None:
    positions = line(4, 1000)
    assert positions.positions_before_video().tolist() == list(range(HEAD)) and positions.axes == 1
    assert positions.position_range(0, 3).tolist() == list(range(HEAD, HEAD + 12))
    assert positions.position_range(300, 2).tolist() == list(range(HEAD + 1200, HEAD + 1208))
    assert torch.equal(positions.of_units(torch.tensor([2, 200]), 200)[4:], positions.position_range(200, 1))
    assert positions.text_positions(3, 2, 2).tolist() == [HEAD + 12 + 2, HEAD + 12 + 3]
    assert positions.largest_position(3) == HEAD + 12
    three = grid(1000)
    assert three.position_range(0, 3)[0].tolist() == [5] * 4 + [6] * 4 + [8] * 4
    for unit in (2, 2, 0):
        time = three.position_range(unit, 1)[0]
        assert time.tolist() == [5 + int(1.5 * unit)] * 4, "whatever was asked for before"
    assert three.position_range(2, 1)[1:].tolist() == [[5, 5, 6, 6], [5, 6, 5, 6]]
    assert three.text_positions(9, 1, 2).tolist() == [[8, 9]] * 3 and three.largest_position(100) == 5 + 148


@given(
    unit=st.integers(1, 9),
    limit=st.integers(30, 400),
    window=st.integers(1, 12),
    spare=st.integers(0, 4),
    three=st.booleans(),
    data=st.data(),
)
def test_bases_keep_positions_under_the_limit_and_windows_whole(
    unit: int, limit: int, window: int, spare: int, three: bool, data: st.DataObject
) -> None:
    positions = grid(limit) if three else line(unit, limit)
    bases = Bases(positions, window, spare)
    fits = max(n for n in range(1, 500) if n == 1 or positions.largest_position(n) < limit)
    least = max(2 * window, window + spare)
    units = range(0, 1500, 31)
    for one in units:
        base = bases.base_of_unit(one)
        assert base <= max(0, one - window - spare), (
            "all of the window can be placed, and what is spared before it"
        )
        assert one - base < bases.window + bases.every
        if one < fits:
            assert base == 0 or fits <= least, "true positions as long as they fit"
        if fits > least:
            assert positions.largest_position(one - base + 1) <= limit
        count = data.draw(st.integers(1, 40))
        same = bases.count_same_base(one, count)
        assert 1 <= same <= count and {bases.base_of_unit(one + i) for i in range(same)} == {base}
        assert same == count or bases.base_of_unit(one + same) != base


def test_spare_units_push_no_window_of_half_the_limit_past_it() -> None:
    positions = line(196, 32768)
    for window in range(1, 84):
        bases = Bases(positions, window, 8)
        furthest = max(one - bases.base_of_unit(one) for one in range(1000))
        assert positions.largest_position(furthest + 1) <= 32768


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
@pytest.mark.parametrize("kv", ["rekv", "recent", "window"])
def test_past_the_limit_the_cut_of_the_stream_changes_nothing(name: str, kv: str, monkeypatch) -> None:
    model, _ = pair(name)
    head = 40
    limit = head + 16 * 8 if name == "random-ov" else head + 60
    monkeypatch.setattr(model.config.get_text_config(), "max_position_embeddings", limit)
    frames, fields = film(25).repeat(3, 1, 1, 1)[:60], every_stream(frames=4, window=4)[kv]
    if kv == "window":
        fields = {**fields, "window": 32}
    used: list[int] = []
    found = []
    for cuts in ([60], [7, 13, 1, 1, 30, 8]):
        with open_session(name, fields) as session:
            for number, part in enumerate(frames.split(cuts)):
                session.watch(part[:1], fps=FPS)
                state: Any = session._live.state  # type: ignore[union-attr]
                if not number:
                    _spy(state, used)
                if len(part) > 1:
                    session.watch(part[1:], fps=FPS)
                _check_turned(state)
            assert state.bases.base_of_unit(state.units()) > 0
            found.append(logits(session))
    assert (found[0] - found[1]).abs().max() <= 1e-5
    assert max(used) < limit


def _check_turned(state: Any) -> None:
    """All keys of the window stand where the base in force puts them."""
    if not state.units():
        return
    base = state.bases.base_of_unit(state.units() - 1)
    positions = state.stream.positions.position_range(state._first - base, state.units() - state._first)
    for ring in state._rings:
        want = state.rope.apply(ring.key, state.rope.angles(positions))
        assert torch.allclose(ring.turned, want, atol=1e-5)


def _spy(state: Any, used: list[int]) -> None:
    positions = state.stream.positions
    for method in ("position_range", "of_units"):
        inner = getattr(positions, method)

        def spied(*args: Any, inner: Any = inner) -> Tensor:
            out: Tensor = inner(*args)
            used.append(int(out.max()))
            return out

        setattr(positions, method, spied)


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_true_positions_are_closed_up_when_they_pass_the_limit(kv: str, monkeypatch) -> None:
    model, _ = pair("random-ov")
    monkeypatch.setattr(model.config.get_text_config(), "max_position_embeddings", 40 + 16 * 20)
    said: dict[str, list[Tensor]] = {"original": [], "compact": []}
    for positions, found in said.items():
        fields = {**every_stream(frames=2, window=4)[kv], "local": 1, "positions": positions}
        with open_session("random-ov", fields) as session:
            for part in film(25)[:24].split([10, 14]):
                session.watch(part, fps=FPS)
                found.append(logits(session))
    near, far = (said["original"][i] - said["compact"][i] for i in (0, 1))
    assert near.abs().max() > 1e-3 and far.abs().max() == 0


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_what_is_encoded_saw_the_head_and_the_window_and_nothing_else(name: str) -> None:
    """The hidden states of a stream are those of one prompt whose every query sees sinks and a sliding window."""
    model, processor = pair(name)
    frames, window = film(14), 4
    outs: list[Tensor] = []
    with open_session(name, {"name": "rekv", "window": window, "frames": 2}) as session:
        stream_adapter: Any = session._stream_adapter
        run = stream_adapter.run_layers

        def kept(*given: Any, **more: Any) -> Tensor:
            outs.append(run(*given, **more))
            return outs[-1]

        stream_adapter.run_layers = kept
        for part in frames.split([4, 2, 8]):
            session.watch(part, fps=FPS)
        live = session._live
        assert live is not None
        head, unit = live.stream.head, live.info.tokens_per_unit
        columns = unit * live.stream.units(window)
    ours = torch.cat(outs)
    content = [{"type": "video", "video": frames}, {"type": "text", "text": QUESTION}]
    inputs = processor.chat(content, fps=FPS)
    for limit, same in ((columns, True), (columns - 1, False), (columns + 1, False)):
        memory = {"name": "window", "sinks": head, "window": limit, "margin": 4096}
        with mmaccel.accelerate(model, kv=memory), torch.no_grad():
            want = model.model(**inputs).last_hidden_state[0, : len(ours)]
        assert bool((ours - want).abs().max() <= 1e-4) is same
