"""The dense operator against its rules, written out pair by pair."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends.ops import dense_attend as dense
from tests.products import product
from tests.spies import heard

from .oracle import budget, drawn, masked


@cache
def band(n_query: int, n_key: int, start: int, sinks: int, window: int | None) -> Tensor:
    """The rules for keys that are all there, of one sequence."""
    return rules(n_query, n_key, start, None, sinks, window, None, 1)


def rules(
    n_query: int,
    n_key: int,
    start: int,
    valid: list[list[bool]] | None,
    sinks: int,
    window: int | None,
    column: list[int] | None,
    batch: int,
) -> Tensor:
    """[B, 1, n_query, n_key] bool."""
    mask = torch.zeros(batch, 1, n_query, n_key, dtype=torch.bool)
    at = column or list(range(n_key))
    for b in range(batch):
        there = valid[b] if valid else [True] * n_key
        # Without columns of their own keys are counted by valid ones, so that padding shifts neither sinks nor windows.
        rank = at if column else [sum(there[: n + 1]) - 1 for n in range(n_key)]
        for i in range(n_query):
            own = start + i
            if any(at[n] == own and not there[n] for n in range(n_key)):
                continue
            place = rank[own] if not column and own < n_key else own
            for n in range(n_key):
                near = window is None or place - rank[n] < window or rank[n] < sinks
                mask[b, 0, i, n] = there[n] and at[n] <= own and near
    return mask


def draw(batch: int, heads: tuple[int, int], n_query: int, n_key: int, seed: int) -> list[Tensor]:
    return [t.double() for t in drawn(batch, heads, n_query, n_key, 8, seed)]


@st.composite
def paddings(draw: st.DrawFn, batch: int, n: int) -> list[list[bool]] | None:
    kind = draw(st.sampled_from(["none", "left", "right", "both", "holes", "all"]))
    if kind == "none":
        return None
    rows = []
    for _ in range(batch):
        left = draw(st.integers(0, n)) if kind in ("left", "both") else 0
        right = draw(st.integers(0, n - left)) if kind in ("right", "both") else 0
        row = [False] * left + [True] * (n - left - right) + [False] * right
        if kind == "holes":
            row = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        rows.append(row)
    return rows


@given(st.data())
def test_rules(data: st.DataObject) -> None:
    batch, n_key = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    start = data.draw(st.sampled_from([0, 0, n_key // 2, n_key - 1]))
    n_query = n_key - start
    heads = data.draw(st.sampled_from([(4, 2), (2, 2), (3, 1)]))
    valid = data.draw(paddings(batch, n_key))
    window = data.draw(st.sampled_from([None, 1, 5, 11, 60]))
    sinks = data.draw(st.sampled_from([0, 1, 4, 60]))
    column = data.draw(st.sampled_from([None, None, "shuffled", "chosen"]))
    query, key, value = draw(batch, heads, n_query, n_key, data.draw(st.integers(0, 999)))
    columns = None
    if column == "shuffled":
        columns = torch.randperm(n_key, generator=torch.Generator().manual_seed(n_key)).tolist()
    elif column == "chosen":
        columns = [3 * n for n in range(n_key)]
        start *= 3
    got = dense.dense_attend(
        query,
        key,
        value,
        0.3,
        start=start,
        valid=None if valid is None else torch.tensor(valid),
        sinks=sinks,
        window=window,
        column=None if columns is None else torch.tensor(columns),
    )
    mask = rules(n_query, n_key, start, valid, sinks, window, columns, batch)
    torch.testing.assert_close(got, masked(query, key, value, mask, 0.3), rtol=0, atol=1e-12)


ROWS = [
    dict(n_query=600, start=0),
    dict(n_query=400, start=200),
    dict(n_query=1, start=599),
    dict(n_query=600, start=0, window=100, sinks=7),
    dict(n_query=300, start=300, window=290, sinks=40),
]


@pytest.mark.parametrize(
    ("case", "dtype"), product(ROWS, [torch.float32, torch.float16, torch.bfloat16]), ids=str
)
def test_blocks_of_rows(case: dict[str, int], dtype: torch.dtype) -> None:
    """Longer than one block of rows, in the types of models."""
    case = dict(case)
    n_query = case.pop("n_query")
    query, key, value = (t.to(dtype) for t in draw(1, (4, 2), n_query, 600, 3))
    mask = band(n_query, 600, case["start"], case.get("sinks", 0), case.get("window"))
    exact, allowed = budget(query, key, value, mask, 0.3)
    got = dense.dense_attend(query, key, value, 0.3, **case)
    assert got.dtype == dtype
    assert float((got.double() - exact).abs().max()) <= allowed


def test_keys_after_the_last_query_are_not_seen() -> None:
    query, key, value = draw(1, (4, 2), 10, 30, 4)
    mask = rules(10, 30, 5, None, 0, None, None, 1)
    got = dense.dense_attend(query, key, value, 0.3, start=5)
    torch.testing.assert_close(got, masked(query, key, value, mask, 0.3), rtol=0, atol=1e-12)


def test_columns_of_each_sequence() -> None:
    query, key, value = draw(2, (4, 2), 6, 30, 5)
    columns = torch.stack([torch.arange(30), torch.arange(30).flip(0) * 2])
    got = dense.dense_attend(query, key, value, 0.3, start=20, column=columns, window=9, sinks=2)
    for b in range(2):
        mask = rules(6, 30, 20, None, 2, 9, columns[b].tolist(), 1)
        want = masked(query[b : b + 1], key[b : b + 1], value[b : b + 1], mask, 0.3)
        torch.testing.assert_close(got[b : b + 1], want, rtol=0, atol=1e-12)


def test_padding_reads_the_host_once_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = heard(monkeypatch, dense, "_extent", lambda valid: 1)
    query, key, value = draw(2, (4, 2), 20, 20, 6)
    dense.dense_attend(query, key, value, 0.3)
    assert reads == []
    dense.dense_attend(query, key, value, 0.3, valid=torch.ones(2, 20, dtype=torch.bool))
    assert reads == [1]


@pytest.mark.parametrize("keys", [3, 64, 2000])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_a_few_rows(rows: int, keys: int) -> None:
    """What a CUDA device computes for float32; `test_cuda.py` has it there."""
    query, key, value = drawn(2, (3, 3), rows, keys, 64)
    mask = band(rows, keys, keys - rows if keys > rows else 0, 0, None)[:, :, :rows]
    exact, allowed = budget(query, key, value, mask, 0.125)
    given = None if bool(mask.all()) else mask
    got = dense._by_products(query, key, value, 0.125, given)
    assert float((got.double() - exact).abs().max()) <= allowed
