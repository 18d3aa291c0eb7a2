"""Streams of made-up keys, driven through a memory of tokens as a session drives it; and what it ought to hold, in loops.
A memory's behaviour in plain Python: every column is a serial number, and a query sees a set of them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.contract.memory import (
    CPU,
    GEOMETRY,
    GROUPS,
    HEAD,
    HEADS,
    LAYERS,
    SIZE,
    TOKENS,
    RotaryModel,
    encode_kv,
    randn,
)
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.kv import KVPolicy, KVState, KVView, Stream, StreamPass, StreamPolicy
from mmaccel.policies.kv._tokens import TokenMemory

WHEEL = RotaryModel()


def position_ids(axes: int = 1, limit: int = 10**6) -> PositionIds:
    """As LLaVA's (one axis: one column after the other), or as Qwen's (a unit stands at one time, its tokens at cells)."""
    if axes == 1:
        return PositionIds(
            torch.arange(HEAD)[None], HEAD + torch.arange(TOKENS)[None], lambda n: TOKENS * torch.arange(n),
            HEAD + TOKENS, TOKENS, limit,
        )  # fmt: skip
    cell = torch.arange(TOKENS)
    unit = torch.stack([torch.full((TOKENS,), HEAD), HEAD + cell // 3, HEAD + cell % 3])
    return PositionIds(
        torch.arange(HEAD).expand(3, -1), unit, lambda n: 2 * torch.arange(n), HEAD + 4, 2, limit
    )


def placed(own: Tensor, rank: Tensor, axes: int, long: bool) -> Tensor:
    """The positions of tokens of columns `own`: by their columns, or by their `rank` where the stream is too long."""
    at = rank if long else own
    if axes == 1:
        return HEAD + at
    cell = own % TOKENS
    return torch.stack([HEAD + 2 * (at // TOKENS), HEAD + cell // 3, HEAD + cell % 3])


def raw(layer: int, unit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, H, P, D], key and value [1, G, P, D] of a unit, before rotation."""
    return (
        randn((1, layer, unit), 1, HEADS, TOKENS, SIZE),
        randn((2, layer, unit), 1, GROUPS, TOKENS, SIZE),
        randn((3, layer, unit), 1, GROUPS, TOKENS, SIZE),
    )


def opened(policy: StreamPolicy, axes: int = 1, limit: int = 10**6, frames_per_unit: int = 1) -> TokenMemory:
    stream = Stream(
        tokens_per_unit=TOKENS,
        head=HEAD,
        frames_per_unit=frames_per_unit,
        positions=position_ids(axes, limit),
        dtype=torch.float64,
    )
    state = policy.open_stream(stream, GEOMETRY, WHEEL, CPU)  # type: ignore[arg-type]
    assert isinstance(state, TokenMemory)

    def rows(layer: int) -> list[Tensor]:
        return [randn((i, layer, -1), 1, n, HEAD, SIZE) for i, n in enumerate((HEADS, GROUPS, GROUPS))]

    run(state, StreamPass(kind="head", rows=HEAD), rows)
    return state


def run(state: Any, stream_pass: StreamPass, rows: Any, hidden: Any = None) -> list[KVView]:
    """One pass: the views of all layers."""
    state.begin_pass(stream_pass)
    views = []
    for layer in range(LAYERS):
        query, key, value = rows(layer)
        if hidden is not None:
            state.receive_hidden(layer, hidden(layer))
        state.append(layer, key, value)
        views.append(state.view(layer, query))
    state.end_pass()
    return views


def passes(state: Any, count: int, step: int, unit: Any) -> Iterator[tuple[int, int, Any]]:
    """The first unit of each pass of `count` more, at most `step` at a time, their number, and what each layer is given."""
    end = state.units() + count
    while state.units() < end:
        first = state.units()
        n = state.units_that_fit(first, min(step, end - first))

        def rows(layer: int, first: int = first, n: int = n) -> list[Tensor]:
            made = [unit(layer, number) for number in range(first, first + n)]
            return [torch.cat(side, 2) for side in zip(*made, strict=True)]

        yield first, n, rows


def watch(state: TokenMemory, count: int, step: int = 8, proxy: bool = False) -> Iterator[list[KVView]]:
    """Units as a session passes them on, at most `step` at a time; views of every pass."""
    for first, n, rows in passes(state, count, step, raw):
        yield run(state, StreamPass(kind="units", rows=n * TOKENS, first=first, count=n), rows)
        if proxy:
            run(state, StreamPass(kind="proxy", rows=2), lambda layer: words(layer, 2, state.units()))


def watched(state: TokenMemory, count: int, step: int = 8, proxy: bool = False) -> TokenMemory:
    for _ in watch(state, count, step, proxy):
        pass
    return state


def same(one: TokenMemory, other: TokenMemory) -> bool:
    """Whether every layer of both holds the same tokens."""
    told = [[tensor for held in state._held if held is not None for tensor in held] for state in (one, other)]
    return len(told[0]) > 0 and all(torch.equal(a, b) for a, b in zip(*told, strict=True))


def words(layer: int, rows: int, name: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of words."""
    made = [
        randn((i, layer, name, "words"), 1, n, rows, SIZE) for i, n in ((4, HEADS), (5, GROUPS), (6, GROUPS))
    ]
    return made[0], made[1], made[2]


def turned(x: Tensor, positions: Tensor) -> Tensor:
    return WHEEL.apply_rope(x, WHEEL.rope_angles(positions, x.dtype))


def share(query: Tensor, key: Tensor) -> list[float]:
    """What each key [1, G, N, D] gets of the attention of the last rows' queries [1, H, n, D], row by row, head by head."""
    rows, count = query.shape[2], key.shape[2]
    total = torch.zeros(count, dtype=torch.float64)
    for head in range(HEADS):
        for row in range(rows):
            upto = count - rows + row + 1
            score = key[0, head * GROUPS // HEADS, :upto] @ query[0, head, row] / SIZE**0.5
            total[:upto] += torch.softmax(score, 0)
    return (total / (HEADS * rows)).tolist()


def open_state(policy: KVPolicy, layers: int = LAYERS) -> KVState:
    return policy.open(replace(GEOMETRY, layers=layers), None, CPU)


def read(view: KVView, layer: int) -> list[list[int]]:
    """The serials [B][N] of a view's keys; each number of key and value is checked."""
    key = view.key
    serials = ((key[:, 0, :, 0] - 100 * layer) / 1000).round().long()
    expected = encode_kv(serials.tolist(), layer)
    assert torch.equal(key, expected[0]) and torch.equal(view.value, expected[1])
    return serials.tolist()


def seen(view: KVView, layer: int, rows: int, length: int) -> list[list[list[int]]]:
    """[B][rows]: the serials each of the last `rows` columns' queries sees, by the words of `KVView`."""
    serials = read(view, layer)
    columns = list(range(len(serials[0]))) if view.column is None else view.column.tolist()
    assert len(columns) == len(serials[0]) and columns == sorted(set(columns))

    def admits(query: int, key: int) -> bool:
        if key > query:
            return False
        return view.window is None or key < view.sinks or query - key < view.window

    return [
        [
            [s for s, key in zip(row, columns, strict=True) if admits(query, key)]
            for query in range(length - rows, length)
        ]
        for row in serials
    ]


def visible(sequence: list[int], rows: int, sinks: int = 0, window: int | None = None) -> list[list[int]]:
    """[rows]: the serials that the queries of the last `rows` columns ought to see."""
    length, out = len(sequence), []
    for query in range(length - rows, length):
        near = range(query + 1) if window is None else range(max(0, query - window + 1), query + 1)
        out.append([sequence[c] for c in sorted({*range(min(sinks, query + 1)), *near})])
    return out
