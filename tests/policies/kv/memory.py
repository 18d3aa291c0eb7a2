"""A memory's behaviour, spelled out in plain Python: every column is a serial number, and a query sees a set of them."""

from dataclasses import replace

import torch

from mmaccel.contract.memory import CPU, GEOMETRY, LAYERS, encode_kv
from mmaccel.core.memory.kv import KVPolicy, KVState, KVView


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
