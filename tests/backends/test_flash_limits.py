"""What a tested tile of the backend `flash` compares, over random layouts: runs of keys, bands, and what needs no test."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.backends.flash import attend
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.plan import FAR, AttentionPlan, Part, pad_rows, span_by_range
from mmaccel.policies.sparse import AShape

from .flash_cases import check, recorded


@given(
    seed=st.integers(0, 2**16),
    blocks=st.sampled_from([(16, 16), (64, 64), (128, 32), (32, 256)]),
    counts=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    cuts=st.lists(st.integers(-40, 330), min_size=2, max_size=5, unique=True),
    shuffled=st.booleans(),
)
def test_runs_of_keys(
    seed: int, blocks: tuple[int, int], counts: tuple[int, int], cuts: list[int], shuffled: bool
) -> None:
    """Ranges side by side over the first keys, as many as each span has; queries of any places and rows."""
    rng = torch.Generator().manual_seed(seed)
    n, n_key = counts
    row = torch.randperm(n, generator=rng, dtype=torch.int32) if shuffled else torch.arange(n).int()
    q_row = pad_rows(row[None, None], blocks[0])
    q_pos = torch.randint(-1, n_key, q_row.shape, generator=rng, dtype=torch.int32)
    width = n_key + -n_key % blocks[1]
    k_pos = torch.arange(width, dtype=torch.int32)[None, None]
    spans = []
    edges = sorted(cuts)
    for i, (lo, hi) in enumerate(zip(edges, [*edges[1:-1], FAR], strict=False)):
        some = int(torch.randint(1, n_key + 1, (), generator=rng)) if i else n_key
        room = some + -some % blocks[1]
        mine, rank = torch.where(k_pos < some, k_pos, -1)[..., :room], k_pos[..., :room]
        spans.append(span_by_range(q_row, mine, q_pos, rank, lo, hi, *blocks, ordered=some, ranks=True))
    plan = AttentionPlan((Part(q_row, tuple(spans)),), *blocks, 1, 4, n, n_key)
    tensors = tuple(
        torch.randn(1, h, m, 16, generator=rng).half() for h, m in ((4, n), (2, n_key), (2, n_key))
    )
    with recorded(16) as (told, _):
        check(plan, tensors)
        unknown = tuple(replace(span, ranks=False) for span in spans)
        check(replace(plan, parts=(Part(q_row, unknown),)), tensors)
    assert [args[6] for args in told] == [True, False]


@given(
    seed=st.integers(0, 2**16),
    blocks=st.sampled_from([(16, 16), (64, 64), (128, 32), (32, 256)]),
    counts=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    first=st.integers(-150, 300),
    cuts=st.lists(st.integers(-40, 330), min_size=2, max_size=5, unique=True),
    batch=st.sampled_from([1, 2]),
)
def test_bands_of_keys(
    seed: int,
    blocks: tuple[int, int],
    counts: tuple[int, int],
    first: int,
    cuts: list[int],
    batch: int,
) -> None:
    """Queries whose places follow each other need no tensor, whatever the first: also before all keys, and past them. What
    lists are not known to hold all of is told as runs, and what is listed is as ever what counts."""
    rng = torch.Generator().manual_seed(seed)
    n, n_key = counts
    queries, k_pos = (
        torch.arange(m + -m % block, dtype=torch.int32).expand(batch, 1, -1)
        for m, block in zip(counts, blocks, strict=True)
    )
    q_row, q_pos = (torch.where(queries < n, queries + more, -1) for more in (0, first))
    spans, edges = [], sorted(cuts)
    for i, (lo, hi) in enumerate(zip(edges, [*edges[1:-1], FAR], strict=False)):
        some = int(torch.randint(1, n_key + 1, (), generator=rng)) if i else n_key
        wide = some + -some % blocks[1]
        mine, rank = torch.where(k_pos < some, k_pos, -1)[..., :wide], k_pos[..., :wide]
        known = dict(ordered=some, ranks=True, q_first=first)
        spans.append(span_by_range(q_row, mine, q_pos, rank, lo, hi, *blocks, **known))
    part = Part(q_row, tuple(spans), ordered=n, all_rows=n)
    plan = AttentionPlan((part,), *blocks, batch, 4, n, n_key)
    tensors = tuple(
        torch.randn(batch, h, m, 16, generator=rng).half() for h, m in ((4, n), (2, n_key), (2, n_key))
    )
    # Lists of the same span that begin a block late, where their kinds are not told.
    row = spans[0].lists.row.clone()
    row[..., 0] += row[..., 1].clamp(max=1)
    row[..., 1:4] = (row[..., 1:4] - 1).clamp(min=0)
    late = replace(spans[0], lists=replace(spans[0].lists, row=row), complete=False)
    with recorded(16) as (told, _):
        check(plan, tensors)
        check(plan.first(max(n - 20, 1)), tensors)
        check(replace(plan, parts=(replace(part, spans=(late, *spans[1:])),)), tensors)
    assert [args[8] is None for args in told] == [False, False, True]


@given(
    seed=st.integers(0, 2**16),
    block=st.sampled_from([16, 64, 128, 256]),
    n=st.integers(1, 400),
    start=st.one_of(st.sampled_from([0, 126, 127, 128, 254]), st.integers(0, 400)),
    sink=st.sampled_from([100, 128, 200, 256, 384]),
    window=st.one_of(st.sampled_from([128, 255, 256, 257, 384]), st.integers(1, 500)),
)
def test_first_keys_need_no_test(seed: int, block: int, n: int, start: int, sink: int, window: int) -> None:
    """Whole tiles of them are FULL where the window leaves them, or none of theirs is seen but by it."""
    n_key = start + n
    rng = torch.Generator().manual_seed(seed)
    tensors = tuple(
        torch.randn(1, h, m, 16, generator=rng).half() for h, m in ((2, n), (1, n_key), (1, n_key))
    )
    layout = TokenLayout.text(1, n_key)
    pattern = AShape(sink=sink, window=window, block=block)
    plan = pattern.plan(*tensors[:2], layout.take(slice(start, None)), layout)
    assert plan is not None
    with recorded(16) as (told, patch):
        check(plan, tensors)
        patch.setattr(attend, "key_bounds", lambda *args: None)
        check(plan, tensors)
    alone = window >= 256 and min(sink, n_key) % 128 == 0
    assert len(told[0][8]) == (3 if alone else 6) and told[1][8] is None
