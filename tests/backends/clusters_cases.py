"""What a question retrieves and gathers from the host, by the Triton kernels; `test_triton.py` runs them."""

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops import clusters as plain
from mmaccel.backends.triton import stream

from .triton_cases import DEVICE, DTYPES, INTERPRETED, some

LAYERS, WIDTH = 4, 24
MANY, MOST = (40, 32) if INTERPRETED else (700, 512)
"""Clusters, more than a program compares with at a time, and how many these are."""


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the interpreter compares with fewer, so that few are more."""
    monkeypatch.setattr(stream, "OTHERS", MOST)


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def few(shape: tuple[int, ...], seed: int, kinds: int = 5) -> Tensor:
    """Scores of which many are equal."""
    return torch.randint(kinds, shape, generator=torch.Generator().manual_seed(seed)).float() - 2


def lists_of(owner: Tensor, count: int) -> plain.ClusterMembership:
    """Of `owner` [R, N], `count` or more for none."""
    size = torch.zeros(len(owner), owner.max() + count + 1, dtype=torch.long)
    size = size.scatter_add_(1, owner, torch.ones_like(owner))[:, :count]
    first, flat = size.cumsum(1) - size, owner.argsort(dim=1, stable=True)
    line = torch.empty_like(flat).scatter_(1, flat, torch.arange(owner.shape[1]).expand_as(flat))
    within = line - first.gather(1, owner.clamp(max=count - 1))
    return plain.ClusterMembership(owner, within, flat, first, size, 1 << (int(size.max()) - 1).bit_length())


def on_device(lists: plain.ClusterMembership) -> plain.ClusterMembership:
    owner, within, flat, first, size = (there(one) for one in lists[:5])
    return plain.ClusterMembership(owner, within, flat, first, size, lists.largest)


@pytest.mark.parametrize(("dtype", "cosine"), some(DTYPES, [False, True]), ids=str)
def test_scores(dtype: torch.dtype, cosine: bool) -> None:
    """Of a slice of layers; a score is the same whatever is scored beside it."""
    torch.manual_seed(0)
    key, query = torch.randn(LAYERS, 21, WIDTH).to(dtype), torch.randn(2, WIDTH)
    found = stream.score_keys(there(key)[1:3], there(query), cosine)
    torch.testing.assert_close(
        found.cpu(), plain.score_keys.plain(key[1:3], query, cosine), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(stream.score_keys(there(key)[1:2], there(query)[:1], cosine), found[:1])
    assert stream.score_keys(there(key)[1:3, :0], there(query), cosine).shape == (2, 0)


@pytest.mark.parametrize(("count", "cosine"), some([1, 5, 8], [False, True]))
def test_scores_by_words(count: int, cosine: bool) -> None:
    """Of words padded by anything, and of places without clusters; a score is the same whatever layer is beside it."""
    torch.manual_seed(0)
    key, rows = torch.randn(LAYERS, 21, WIDTH), torch.randn(2, 8, WIDTH)
    rows[:, count:] = torch.nan
    size, told = few((2, 21), 3).long().clamp_min(0), torch.tensor([count])
    words = plain.WordQueries(there(rows), there(told))
    found = stream.score_by_words(there(key)[1:3], words, there(size), cosine)
    wanted = plain.score_by_words.plain(key[1:3], plain.WordQueries(rows, told), size, cosine)
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-5, rtol=1e-4)
    one = stream.score_by_words(
        there(key)[1:2], plain.WordQueries(there(rows)[:1], there(told)), there(size)[:1], cosine
    )
    assert torch.equal(one, found[:1])
    assert stream.score_by_words(there(key)[1:3, :0], words, there(size)[:, :0], cosine).shape == (2, 0)


@pytest.mark.parametrize(("limit", "count"), some([1, 200, 7, 10**6], [1, 9, MANY]))
def test_the_first_stage(count: int, limit: int) -> None:
    score, size = few((2, count), count), few((count,), 1 + count, 4).long().clamp_min(0)
    found = stream.mark_clusters_beyond_budget(there(score), there(size), limit, 2)
    assert torch.equal(found.cpu(), plain.mark_clusters_beyond_budget.plain(score, size, limit, 2))


@pytest.mark.parametrize(("rows", "count"), some([1, 2], [5, MANY]))
def test_the_order_of_clusters(rows: int, count: int) -> None:
    """By score, then by number; in two stages and in one."""
    score, visual = few((rows, count), count), 1 + count // 3
    size = few((rows, count), 7, 6).long().clamp_min(0)
    parent = torch.randint(visual, (rows, count), generator=torch.Generator().manual_seed(2))
    parent[size == 0] = visual
    without = few((rows, visual), 3) > 0
    for told in ((parent, without), (None, None)):
        wanted = plain.mask_and_count_better.plain(score, size, *told)
        found = stream.mask_and_count_better(
            there(score), there(size), *(None if x is None else there(x) for x in told)
        )
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(("rows", "cosine"), [(1, True), (2, False)])
@pytest.mark.parametrize(
    ("count", "entries", "budget", "ahead"),
    [(12, 70, 1, 5), (12, 70, 20, 31), (12, 70, 58, 90), (40, 3000, 700, 800), (700, 900, 640, 890)],
)
def test_entries_up_to_a_budget(
    rows: int, cosine: bool, count: int, entries: int, budget: int, ahead: int
) -> None:
    """Entries that are in no cluster, clusters without entries, scores that are equal, more asked for than there is."""
    rng = torch.Generator().manual_seed(entries + budget)
    owner = torch.randint(count, (rows, entries), generator=rng)
    owner[:, torch.rand(entries, generator=rng) < 0.05] = count
    owner[owner == 3] = count + 1
    lists = lists_of(owner, count)
    before = plain.count_better_entries(few((rows, count), 5), lists.size)
    keys = few((entries + 9, LAYERS, WIDTH), 6)
    held = keys if INTERPRETED else keys.pin_memory()
    query, units = few((WIDTH,), 7), torch.tensor([entries])
    for late in (None, plain.NewestEntryRange(units, 2, 6)):
        own = plain.EntryKeys(keys, 2, lambda at: keys[at, 2], query, cosine)
        wanted = plain.select_entries.plain(before, lists, budget, ahead, own, late)
        told = None if late is None else plain.NewestEntryRange(there(units), 2, 6)
        device = plain.EntryKeys(held, 2, lambda at: keys[at, 2], there(query), cosine)
        found = stream.select_entries(there(before), on_device(lists), budget, ahead, device, told)
        assert torch.equal(found[0].cpu(), wanted[0])
        assert (wanted[0][1:budget] > wanted[0][: budget - 1]).all()
        if rows == 1:
            assert found[1] is None and wanted[1] is None
        else:
            assert torch.equal(found[1].cpu(), wanted[1])


@pytest.mark.parametrize(
    ("dtype", "left_tokens", "count_room"),
    some(DTYPES, [(None, 0), (4, 0), (0, 5), (99, 5)], [(11, 11), (11, 3), (MANY, MANY - 15)]),
    ids=str,
)
def test_what_stands_for_clusters(
    dtype: torch.dtype, left_tokens: tuple[int | None, int], count_room: tuple[int, int]
) -> None:
    (left, tokens), (count, room) = left_tokens, count_room
    torch.manual_seed(0)
    score = few((count,), 1)
    score[few((count,), 2) > 1] = -torch.inf
    size, picked = few((count,), 3).long().clamp_min(0), few((count,), 4) > 0
    rows = torch.randn(2, LAYERS, count, 24).to(dtype)
    time, whole = torch.rand(count), torch.full((2, 3, room + 7, 8), 9.0, dtype=dtype)
    told = None if left is None else torch.tensor([left])
    mine = there(whole.clone())
    given = score, picked, size, (rows[0, 1], rows[1, 1]), time
    wanted = plain.write_best_clusters.plain(*given, whole[:, :, 2 : 2 + room], 4, told, tokens)
    sides = there(rows)
    found = stream.write_best_clusters(
        *map(there, given[:3]),
        (sides[0, 1], sides[1, 1]),
        there(time),
        mine[:, :, 2 : 2 + room],
        4,
        None if told is None else there(told),
        tokens,
    )
    assert torch.equal(mine.cpu(), whole) and torch.equal(found[0].cpu(), wanted[0])
    torch.testing.assert_close(found[1].cpu(), wanted[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "rows", "words_", "size"), [(6, 24, 17, 40), (1, 8, 1, 200), (4, 1, None, 16)]
)
def test_means_of_words(dtype: torch.dtype, heads: int, rows: int, words_: int | None, size: int) -> None:
    """Rows that are none may be anything."""
    torch.manual_seed(0)
    x = torch.randn(heads, rows + 3, size).to(dtype)[:, :rows]
    count = None if words_ is None else torch.tensor([words_])
    x[:, words_ or rows :] = torch.nan
    for groups in {1, heads // 2 or 1}:
        found = stream.mean_query(there(x), None if count is None else there(count), groups)
        torch.testing.assert_close(
            found.cpu(), plain.mean_query.plain(x, count, groups), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shown", [False, True])
def test_words_are_moved(dtype: torch.dtype, shown: bool) -> None:
    torch.manual_seed(0)
    x, count = torch.randn(24, 100).to(dtype), torch.tensor([19])
    known, before, seen = torch.randn(3, 100)
    mine = [there(one.clone()) for one in (known, before, seen)]
    wanted = plain.predict_next_layer_input.plain(x, count, known, before, seen if shown else None)
    found = stream.predict_next_layer_input(there(x), there(count), *mine[:2], mine[2] if shown else None)
    assert torch.equal(found.cpu(), wanted)
    for one, other in zip(mine, (known, before, seen), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_what_comes_ahead(count: int) -> None:
    rng = torch.Generator().manual_seed(count)
    table = torch.randint(-1, 900, (1000,), generator=rng)
    table[-1] = -1
    entries = torch.randperm(999, generator=rng)[:count]
    entries[count // 2 :][::3] = -1
    mine, limits = there(table.clone()), (torch.tensor([400]), torch.tensor([5000]))
    wanted = plain.mark_host_slots.plain(table, entries, *limits)
    found = stream.mark_host_slots(mine, there(entries), *map(there, limits))
    assert torch.equal(found.cpu(), wanted) and torch.equal(mine.cpu()[:-1], table[:-1])


SLOT = [3, 0, -1, 9, 6, 3, -1, 5]


@pytest.mark.parametrize(
    ("dtype", "sizes", "programs"),
    some(
        [torch.bfloat16, torch.float32, torch.uint8],
        [(5, 4, 2048), (49, 16, 64), (3, 1, 2048), (7, 3, 4), *[(196, 128, 2048)] * (not INTERPRETED)],
        [3, 1000],
    ),
    ids=str,
)
def test_as_the_plain_way(dtype: torch.dtype, sizes: tuple[int, int, int], programs: int) -> None:
    """Heads of any number of bytes, more pieces than programs, slabs wherever they lie, a window of a larger tensor."""
    tokens, size, words = sizes
    torch.manual_seed(0)
    raw = [torch.randint(0, 255, (4 * 4 * tokens * size * 8,), dtype=torch.uint8) for _ in range(3)]
    if not INTERPRETED:
        raw = [one.pin_memory() for one in raw]
    count = 4 * 4 * tokens * size
    slabs = [
        one[: count * dtype.itemsize].view(dtype).view(4, 2, 2, tokens, size).nan_to_num_() for one in raw
    ]
    rows = len(SLOT) * tokens
    base = torch.tensor([s.data_ptr() - slabs[0].data_ptr() for s in slabs])
    grain = plain.slab_alignment(slabs)
    expected = torch.full((2, 2, rows + 6, size), 9, dtype=dtype)
    plain.copy_units.plain(expected[:, :, 2 : 2 + rows], slabs, base, torch.tensor(SLOT), grain)
    assert (expected[:, :, :2] == 9).all() and (expected[:, :, 2 + rows :] == 9).all()
    assert (expected[:, :, 2 + 2 * tokens : 2 + 3 * tokens] == 0).all()
    assert torch.equal(expected[1, 1, 2 : 2 + tokens], slabs[0][3, 1, 1])
    assert torch.equal(expected[0, 1, 2 + 3 * tokens : 2 + 4 * tokens], slabs[2][1, 0, 1])
    out = torch.full((2, 2, rows + 6, size), 9, dtype=dtype, device=DEVICE)
    window = out[:, :, 2 : 2 + rows]
    slot = torch.tensor(SLOT, device=DEVICE)
    stream.copy_units(window, slabs, base.to(DEVICE), slot, grain, programs=programs, words=words)
    assert torch.equal(out.cpu(), expected)
    stream.copy_units(window[:, :, :0], slabs, base.to(DEVICE), slot[:0], grain)


def test_units_that_lie_apart_where_they_are_written() -> None:
    """As the slots of a slab lie: a unit's heads together, keys before values."""
    torch.manual_seed(1)
    slab = torch.randn(10, 2, 3, 4, 8)
    slab = slab if INTERPRETED else slab.pin_memory()
    base, slot = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.tensor(SLOT, device=DEVICE)
    place, grain = torch.full((len(SLOT), 2, 3, 4, 8), 9.0, device=DEVICE), plain.slab_alignment([slab])
    stream.copy_units(place[:-1].permute(1, 2, 0, 3, 4), [slab], base, slot[:-1], grain, words=8)
    held = torch.tensor(SLOT) >= 0
    expected = torch.where(held[:, None, None, None, None], slab[torch.tensor(SLOT)], 0.0)
    assert torch.equal(place[:-1].cpu(), expected[:-1]) and (place[-1] == 9).all()
    plain.copy_units.plain(place.permute(1, 2, 0, 3, 4), [slab], base, slot, grain)
    assert torch.equal(place.cpu(), expected)
