"""The kernels of a decode step against their plain forms, interpreted or compiled; `test_triton.py` runs them."""

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops.layer_ops import (
    WINDOW,
    SeparateKVCaches,
    decode_attend,
    decode_attend_each,
    project_rows,
    qkv_rope_rows,
    qkv_rope_rows_each,
    rope_rows,
    rope_rows_each,
)
from mmaccel.backends.triton import decode

from .oracle import budget
from .triton_cases import DEVICE, DTYPES, INTERPRETED, some


@pytest.fixture(autouse=True)
def plain_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the plain form of `qkv_rope_rows` would rotate by the kernel."""
    monkeypatch.setattr(rope_rows, "call_directly", rope_rows.plain)


def drawn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def words(sees: Tensor) -> Tensor:
    """[n] long: the rows of `sees` [n, m], of the last m columns, as bits; they see all before those."""
    whole = torch.ones(sees.shape[0], WINDOW, dtype=torch.bool)
    whole[:, WINDOW - sees.shape[1] :] = sees
    return (whole.long() << torch.arange(WINDOW)).sum(1)


def mask_of(columns: Tensor, capacity: int, sees: Tensor | None) -> Tensor:
    """[B, 1, n, capacity]: what each row sees, pair by pair."""
    mask = torch.zeros(*columns.shape, capacity, dtype=torch.bool)
    for b, row in enumerate(columns.tolist()):
        for i, column in enumerate(row):
            for at in range(row[-1] + 1):
                late = at - (row[-1] + 1 - (0 if sees is None else sees.shape[1]))
                mask[b, i, at] = at <= column if sees is None else late < 0 or bool(sees[i, late])
    return mask[:, None].to(DEVICE)


def check(
    columns: Tensor,
    capacity: int,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    sees: Tensor | None = None,
    **choices: int,
) -> None:
    B, n = columns.shape
    query = drawn(B, n, heads[0], size, dtype=dtype).transpose(1, 2)
    key, value = (drawn(B, heads[1], capacity, size, dtype=dtype, seed=i) for i in (1, 2))
    for b, last in enumerate(columns[:, -1].tolist()):  # what lies behind may be anything
        key[b, :, last + 1 :], value[b, :, last + 1 :] = torch.nan, torch.nan
    told = None if sees is None else words(sees).to(DEVICE)
    mask = mask_of(columns, capacity, sees)
    clean = key.nan_to_num(), value.nan_to_num()
    exact, allowed = budget(query, *clean, mask, size**-0.5)
    own = columns.to(DEVICE)
    out = decode.decode_attend(query, key, value, own, size**-0.5, told, **choices)
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    assert float((out.double() - exact).abs().max()) <= allowed
    said = decode_attend.plain(query, key, value, own, size**-0.5, told)
    assert said.transpose(1, 2).is_contiguous() and float((said.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize(("size", "dtype"), some([64, 80, 96, 128], DTYPES), ids=str)
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    check(torch.tensor([[150, 151, 152]]), 200, size=size, dtype=dtype, splits=3, block_n=32)


@pytest.mark.parametrize(("last", "splits"), some([0, 1, 31, 32, 63, 64, 65, 129, 199], [1, 2, 7]))
def test_pieces_of_every_length(last: int, splits: int) -> None:
    """One column, whole tiles, a tile and a bit, fewer tiles than pieces, the whole cache."""
    check(torch.tensor([[last]]), 200, splits=splits, block_n=16)


@pytest.mark.parametrize(("n", "heads"), [(1, (7, 1)), (2, (14, 2)), (5, (6, 6)), (10, (7, 1)), (33, (4, 2))])
def test_rows_and_groups(n: int, heads: tuple[int, int]) -> None:
    """Rows that fill no tile, and more than one; heads in groups of odd size, and without groups."""
    check(torch.arange(70, 70 + n)[None], 140, heads, 16, splits=3, block_n=16)


def test_sequences_of_their_own_lengths() -> None:
    columns = torch.tensor([[2, 3], [120, 121], [0, 1], [64, 65]])
    check(columns, 130, splits=4, block_n=16)


def apart(lengths: list[int], groups: int, size: int, dtype: torch.dtype) -> SeparateKVCaches:
    """A cache for each sequence: of unlike capacities, and wherever they come to lie; what lies behind is NaN."""
    pairs, home = [], torch.zeros(1, groups, 1, size, device=DEVICE, dtype=dtype)
    for b, length in enumerate(lengths):
        pair = (drawn(1, groups, length + 16 * b + 8, size, dtype=dtype, seed=9 * b + i) for i in range(2))
        pairs.append(tuple(x.clone() for x in pair))
        for x in pairs[-1]:
            x[:, :, length:] = torch.nan
    table = [
        [n for x in pair for n in ((x.data_ptr() - home.data_ptr()) // x.element_size(), x.stride(1))]
        for pair in pairs
    ]
    return SeparateKVCaches(pairs, home, torch.tensor(table, device=DEVICE))


@pytest.mark.parametrize(("size", "dtype"), some([16, *[64] * (not INTERPRETED), 80], DTYPES), ids=str)
def test_each_sequence_over_a_cache_of_its_own(size: int, dtype: torch.dtype) -> None:
    """Bit for bit what the kernel gives of each by itself, cut into as many pieces, and what the plain form is near to."""
    columns = torch.tensor([[2, 3], [120, 121], [0, 1], [64, 65]], device=DEVICE)
    query = drawn(4, 2, 4 if INTERPRETED else 14, size, dtype=dtype).transpose(1, 2)
    caches = apart([4, 122, 2, 66], 2, size, dtype)
    given = query, caches.home, caches.home, columns, size**-0.5
    biases = [drawn(4, 5, seed=3), None]
    for bias in biases:
        out = decode.decode_attend(*given, bias=bias, splits=4, each=caches)
        for b, pair in enumerate(caches.pairs):
            own = query[b : b + 1], *pair, columns[b : b + 1], size**-0.5
            alone = decode.decode_attend(*own, bias=None if bias is None else bias[b], splits=4)
            assert torch.equal(out[b : b + 1], alone)
    found = (
        form(query, caches, columns, size**-0.5, biases[0])
        for form in (decode.decode_attend_each, decode_attend_each.plain)
    )
    torch.testing.assert_close(
        *found, atol=2e-2 if dtype.itemsize == 2 else 1e-5, rtol=1e-2 if dtype.itemsize == 2 else 1e-5
    )
    exact, allowed = budget_of_each(query, caches, columns, size)
    for found in (decode.decode_attend_each(query, caches, columns, size**-0.5), out):
        assert float((found.double() - exact).abs().max()) <= allowed
    said = decode_attend_each.plain(query, caches, columns, size**-0.5)
    assert float((said.double() - exact).abs().max()) <= allowed


def budget_of_each(
    query: Tensor, caches: SeparateKVCaches, columns: Tensor, size: int
) -> tuple[Tensor, float]:
    found = [
        budget(
            query[b : b + 1],
            *(x.nan_to_num() for x in pair),
            mask_of(columns[b : b + 1], pair[0].shape[2], None),
            size**-0.5,
        )
        for b, pair in enumerate(caches.pairs)
    ]
    return torch.cat([exact for exact, _ in found]), max(allowed for _, allowed in found)


@pytest.mark.parametrize("size", [16, 80])
def test_each_writes_to_a_cache_of_its_own(size: int) -> None:
    """By the kernel that turns rows, and by the one that makes them too, as the plain forms do."""
    lengths, heads, K = [4, 122, 2], (4, 2), 96
    columns = torch.tensor([[length - 2, length - 1] for length in lengths], device=DEVICE)
    turn, x = drawn(2, 3, 2, size), drawn(6, K, seed=1)
    weight = [drawn(h * size, K, seed=i) / 10 for i, h in enumerate((heads[0], heads[1], heads[1]))]
    rows, positions = project_rows.plain(x, weight, []).view(3, 2, -1), torch.arange(2).expand(3, -1)
    want, ours = (apart(lengths, heads[1], size, torch.float32) for _ in range(2))
    said = rope_rows_each.plain(rows, *turn, positions.to(DEVICE), columns, want)
    found = decode.rope_rows_each(rows, *turn, positions.to(DEVICE), columns, ours)
    for b, pair in enumerate(want.pairs):
        alone = [torch.full_like(one, torch.nan) for one in pair]
        own = rows[b : b + 1], turn[0, b : b + 1], turn[1, b : b + 1], positions[b : b + 1].to(DEVICE)
        torch.testing.assert_close(
            said[b : b + 1], rope_rows.plain(*own, columns[b : b + 1], *alone), rtol=0, atol=0
        )
    torch.testing.assert_close(found, said)
    made = apart(lengths, heads[1], size, torch.float32)
    entered = decode.qkv_rope_rows_each(x, weight, [], None, None, 0.0, turn, columns, made)
    torch.testing.assert_close(entered, said, rtol=1e-4, atol=1e-4)
    for caches in (ours, made):
        for own, right in zip(caches.pairs, want.pairs, strict=True):
            for a, b in zip(own, right, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
    plain = apart(lengths, heads[1], size, torch.float32)
    again = qkv_rope_rows_each.plain(x, weight, [], None, None, 0.0, turn, columns, plain)
    torch.testing.assert_close(again, said, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [4, 6, 40, 64])
def test_trees(m: int) -> None:
    """Rows beside each other do not see each other; m beyond n are rows of the tree that were run before."""
    sees = torch.rand(4, m, generator=torch.Generator().manual_seed(m)) < 0.5
    sees[torch.arange(4), torch.arange(m - 4, m)] = True
    columns = torch.tensor([[77, 78, 79, 80], [44, 45, 46, 47]])
    check(columns, 100, sees=sees, splits=3, block_n=16)


KINDS = ["three with a bias", "gated", "gated with a bias", "residual", "one"]


@pytest.mark.parametrize(("kind", "count", "dtype"), some(KINDS, [1, 3, 17], DTYPES), ids=str)
def test_project(kind: str, count: int, dtype: torch.dtype) -> None:
    """Widths that fill no block; inputs that fill no step.

    A row may be off twice what plain PyTorch is off, one rounding of the largest value, and what the float32 sums of K
    products are off in another order: sqrt(K) roundings of the sum of their sizes (Higham and Mary 2019).
    """
    K = 96
    x, gain = drawn(count, K, dtype=dtype), drawn(K, dtype=dtype, seed=1)
    widths = {"three with a bias": (40, 8, 24), "residual": (40,), "one": (33,)}.get(kind, (40, 40))
    gated = kind.startswith("gated")
    weight = [drawn(w, K, dtype=dtype, seed=i) / 10 for i, w in enumerate(widths)]
    bias = [drawn(w, dtype=dtype, seed=i + 9) for i, w in enumerate(widths)] if "bias" in kind else []
    residual = drawn(count, 40, dtype=dtype, seed=5) if kind == "residual" else None
    norm = None if residual is not None else gain
    told = (bias, norm, 1e-6, residual, gated)
    out = decode.project_rows(x, weight, *told, block_k=64)
    said = project_rows.plain(x, weight, *told)
    entered = x.double() if norm is None else normed(x, norm, 1e-6)
    exact, sizes = exactly(entered, weight, bias, gated, residual)
    assert out.dtype == dtype
    closer(out, said, exact, sizes, K)


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x.double() * (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt() * gain.double()


def exactly(
    x: Tensor, weight: list[Tensor], bias: list[Tensor], gated: bool, residual: Tensor | None = None
) -> tuple[Tensor, float]:
    """The product in float64, and the largest sum of the sizes of what is added in it."""
    made = (
        project_rows.plain(
            turn(x), [turn(w.double()) for w in weight], [turn(b.double()) for b in bias], None, 0.0, more, gated
        )
        for turn, more in (
            (torch.positive, None if residual is None else residual.double()),
            (torch.abs, None),
        )
    )  # fmt: skip
    exact, sizes = made
    return exact, float(sizes.max())


def closer(got: Tensor, said: Tensor, exact: Tensor, sizes: float, K: int) -> None:
    """`got` is off `exact` no more than twice what `said` is, and the roundings that `test_project` allows."""
    dtype = got.dtype
    off = float((said.double() - exact).abs().max()) + float(exact.abs().max()) * torch.finfo(dtype).eps / 2
    order = K**0.5 * torch.finfo(torch.float32).eps / 2 * sizes
    assert got.shape == exact.shape
    assert float((got.double() - exact).abs().max()) <= 2 * off + order


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    some(
        [(1, 96), (3, 90), (17, 96), (64, 200 if INTERPRETED else 2100)],
        ["three with a bias", "gated"],
        DTYPES,
    ),
    ids=str,
)
def test_a_norm_between_two_products(
    shape: tuple[int, int], kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between one product and the next is the norm: of widths that fill no block, of more parts than are held at once."""
    (count, wide), K, eps = shape, 48, 1e-5
    if INTERPRETED:
        monkeypatch.setattr(decode, "HELD", 256)
    x, residual = drawn(count, K, dtype=dtype), drawn(count, wide, dtype=dtype, seed=1)
    weight, gain = drawn(wide, K, dtype=dtype, seed=2) / 7, drawn(wide, dtype=dtype, seed=3)
    out, gained, squares = decode.residual_linear(x, weight, [], residual, gain, block_k=16)
    assert torch.equal(out, decode.project_rows(x, [weight], residual=residual, block_k=16))
    assert torch.equal(gained, (out.float() * gain.float()).to(dtype))
    torch.testing.assert_close(squares.sum(-1), out.float().pow(2).sum(-1))
    widths = (40, 8, 24) if "bias" in kind else (40, 40)
    then = [drawn(w, wide, dtype=dtype, seed=i) / 10 for i, w in enumerate(widths)]
    bias = [drawn(w, dtype=dtype, seed=i + 9) for i, w in enumerate(widths)] if "bias" in kind else []
    got = decode.project_rows(gained, then, bias, None, eps, None, kind == "gated", squares, block_k=64)
    said = project_rows.plain(out, then, bias, gain, eps, None, kind == "gated")
    told = project_rows.plain(gained, then, bias, None, eps, None, kind == "gated", squares)
    exact, sizes = exactly(normed(out, gain, eps), then, bias, kind == "gated")
    for one in (got, told):
        closer(one, said, exact, sizes, wide)


def entered(
    dtype: torch.dtype, B: int, n: int, size: int, biased: bool
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Weights and biases of 4 heads in 2 groups, [2, B, n, D] angles, columns, and the cache of one layer of several."""
    weight = [drawn(h * size, 48, dtype=dtype, seed=i) / 7 for i, h in enumerate((4, 2, 2))]
    bias = [drawn(h * size, dtype=dtype, seed=i + 5) for i, h in enumerate((4, 2, 2))] if biased else []
    turn = drawn(2, B, n, size, dtype=dtype, seed=3)
    columns = torch.arange(n, device=DEVICE) + torch.tensor([[3], [9]], device=DEVICE)[:B]
    cache = [drawn(B, 2, 2, 30, size, dtype=dtype, seed=i) for i in (3, 4)]
    return weight, bias, turn, columns, cache


@pytest.mark.parametrize(
    ("size", "rows", "dtype"), some([64, 72], [(1, 1, True), (2, 3, True), (2, 9, False)], DTYPES), ids=str
)
def test_enter(size: int, rows: tuple[int, int, bool], dtype: torch.dtype) -> None:
    """A product that turns and writes what it makes: the product, and what turns it after.

    On a device both kernels sum in one order, and the values are the same to the bit. A CPU's library sums in an order of
    its own for each shape, so there the error against float64 counts, as in `test_project`.
    """
    B, n, biased = rows
    weight, bias, turn, columns, whole = entered(dtype, B, n, size, biased)
    x, gain = drawn(B * n, 48, dtype=dtype), drawn(48, dtype=dtype, seed=8)
    mine, theirs, said = ([w.clone()[:, :, 1] for w in whole] for _ in range(3))
    got = decode.qkv_rope_rows(x, weight, bias, gain, None, 1e-5, turn, columns, *mine, block_k=16)
    made = decode.project_rows(x, weight, bias, gain, 1e-5, block_k=16).view(B, n, -1)
    line = torch.arange(n, device=DEVICE).expand(B, n)
    want = decode.rope_rows(made, turn[0], turn[1], line, columns, *theirs)
    plainly = qkv_rope_rows.plain(x, weight, bias, gain, None, 1e-5, turn, columns, *said)
    wide = [w.double()[:, :, 1] for w in whole]
    ready = normed(x, gain, 1e-5)
    weights, biases = ([t.double() for t in given] for given in (weight, bias))
    exact = qkv_rope_rows.plain(ready, weights, biases, None, None, 0.0, turn.double(), columns, *wide)
    _, sizes = exactly(ready, weight, bias, False)
    turned = sizes * float(turn.double().abs().sum(0).max())
    for query, (key, value) in ((got, mine), (want, theirs)):
        closer(query, plainly, exact, turned, 48)
        closer(key, said[0], wide[0], turned, 48)
        closer(value, said[1], wide[1], sizes, 48)
    assert got.stride() == want.stride()
    for one, before in zip(mine, whole, strict=True):
        assert int((one != before[:, :, 1]).any(-1).sum()) == B * 2 * n
    if not INTERPRETED:
        assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("parts", [1, 5, 700])
def test_enter_after_a_product(parts: int) -> None:
    """Rows that are ready for their norm, and normed ones."""
    weight, bias, turn, columns, whole = entered(torch.float32, 2, 3, 64, True)
    x, gain = drawn(6, 48), drawn(48, seed=8)
    share = drawn(6, parts, seed=9).softmax(-1)
    squares = x.pow(2).sum(-1, keepdim=True) * share
    mine, theirs = ([w.clone()[:, :, 1] for w in whole] for _ in range(2))
    got = decode.qkv_rope_rows(x * gain, weight, bias, None, squares, 1e-5, turn, columns, *mine)
    want = qkv_rope_rows.plain(x, weight, bias, gain, None, 1e-5, turn, columns, *theirs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, theirs)
    told = qkv_rope_rows.plain(x * gain, weight, bias, None, squares, 1e-5, turn, columns, *theirs)
    torch.testing.assert_close(told, want)


@pytest.mark.parametrize(("size", "dtype"), some([64, 80], DTYPES), ids=str)
def test_turn(size: int, dtype: torch.dtype) -> None:
    B, n, H, G, capacity = 2, 3, 4, 2, 20
    new = drawn(B, n, (H + 2 * G) * size, dtype=dtype)
    cos, sin = (drawn(B, capacity, size, dtype=dtype, seed=i) for i in (1, 2))
    columns = torch.tensor([[3, 4, 5], [17, 18, 19]], device=DEVICE)
    # The cache of one layer of several, as a view.
    whole = [drawn(B, G, 2, capacity, size, dtype=dtype, seed=i) for i in (3, 4)]
    mine, theirs = ([w.clone()[:, :, 1] for w in whole] for _ in range(2))
    positions = torch.tensor([[3, 4, 4], [0, 18, 19]], device=DEVICE)
    got = decode.rope_rows(new, cos, sin, positions, columns, *mine)
    want = rope_rows.plain(new, cos, sin, positions, columns, *theirs)
    close = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(got, want, **close)
    assert got.stride() == want.stride()
    for one, other, before in zip(mine, theirs, whole, strict=True):
        torch.testing.assert_close(one, other, **close)
        assert int((one != before[:, :, 1]).any(-1).sum()) == B * G * n
    assert torch.equal(mine[1], theirs[1])


def test_tensors_that_are_views() -> None:
    """Weights, residuals and angles whose rows do not follow each other."""
    x, residual = drawn(3, 32), drawn(40, 3).T
    weight, bias = drawn(32, 40).T, drawn(40, 2)[:, 0]
    told = (x, [weight], [bias], drawn(32, 2)[:, 0], 1e-6, residual)
    torch.testing.assert_close(decode.project_rows(*told), project_rows.plain(*told))
    new, positions = drawn(1, 2, 4 * 16), torch.tensor([[3, 4]], device=DEVICE)
    cos, sin = drawn(1, 16, 9).mT, drawn(1, 9, 32, seed=1)[..., ::2]
    mine, theirs = ([torch.zeros(1, 1, 9, 16, device=DEVICE) for _ in range(2)] for _ in range(2))
    got = decode.rope_rows(new, cos, sin, positions, positions, *mine)
    torch.testing.assert_close(got, rope_rows.plain(new, cos, sin, positions, positions, *theirs))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("n", "biased"), some([1, 5], [1, 31, 64, 100]))
def test_a_bias_on_the_first_columns(n: int, biased: int) -> None:
    """As if keys and queries had one more coordinate whose product it is."""
    query, scale = drawn(1, n, 4, 64).transpose(1, 2), 0.125
    key, value = (drawn(1, 2, 160, 64, seed=i) for i in (1, 2))
    columns, bias = (torch.arange(150, 150 + n)[None]).to(DEVICE), 3 * drawn(biased, seed=3)
    mask = mask_of(columns, 160, None)
    more = torch.nn.functional.pad(bias / scale, (0, 160 - biased)).expand(1, 2, -1)[..., None]
    wider = torch.cat([query, torch.ones_like(query[..., :1])], -1), torch.cat([key, more], -1)
    exact, allowed = budget(*wider, value, mask, scale)
    for attend in (lambda *given: decode.decode_attend(*given, splits=3, block_n=32), decode_attend.plain):
        out = attend(query, key, value, columns, scale, None, bias)
        assert float((out.double() - exact).abs().max()) <= allowed
