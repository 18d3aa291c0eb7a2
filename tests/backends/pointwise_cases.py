"""The kernels of a layer's rows, running states and experts against plain forms; `test_triton` runs them."""

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops import layer_ops
from mmaccel.backends.ops.delta import convolve_silu, deltanet_rows, gated_rms_norm
from mmaccel.backends.ops.experts import expert_mlp
from mmaccel.backends.triton import delta, experts, pointwise

from .triton_cases import DEVICE, DTYPES, some

TYPES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor, units: int = 1) -> None:
    """As what PyTorch computes, up to `units` in the last place."""
    assert got.dtype == want.dtype
    room = units * torch.finfo(want.dtype).eps
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=room, atol=room * 1e-2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 3584])
def test_norm(dtype: torch.dtype, width: int) -> None:
    """A row of noughts stays one; rows need not lie together; the mean is over the row, not over the padded tile."""
    rng = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(2, 5, 2 * width, generator=rng)).to(dtype)[..., :width]
    x[0, 1] = 0
    weight = torch.randn(width, generator=rng).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    found = pointwise.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6)
    # The sum may end on the other side of a rounding, and the product then is one more apart.
    close(found, weight * normed.to(dtype), units=2)
    centred = pointwise.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6, True)
    close(centred, (normed * (1.0 + weight.float())).to(dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gate(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    gate, up = ((4 * torch.randn(3, 1500, generator=rng)).to(dtype) for _ in range(2))
    gate[0, :4] = torch.tensor([0.0, -60.0, 60.0, -8.0])
    found = gate.clone().to(DEVICE)
    pointwise.silu_multiply_(found, up.to(DEVICE))
    close(found, torch.nn.functional.silu(gate) * up, units=2)
    with pytest.raises(ValueError, match="contiguous"):
        pointwise.silu_multiply_(found[:, :7], up[:, :7].to(DEVICE))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [64, 80])
def test_parts_of_attention(dtype: torch.dtype, size: int) -> None:
    """Parts without a key weigh nothing, and a row without any is 0, whatever stands in it."""
    rng = torch.Generator().manual_seed(5)
    out = torch.randn(3, 50, 2, 7, size, generator=rng).to(dtype)
    lse = 4 * torch.randn(3, 50, 2, 7, generator=rng)
    lse[1, ::2], lse[:, 3] = -torch.inf, -torch.inf
    wide, weight = out.double(), lse.double().softmax(0).nan_to_num(0.0)[..., None]
    want = (wide * weight).sum(0).to(dtype)
    found = pointwise.merge_parts(out.to(DEVICE), lse.to(DEVICE))
    close(found, want, units=2)
    close(layer_ops.merge_parts(out, lse), want, units=2)
    assert not found[3].any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("heads", "size", "batch"), [(7, 128, 1), (2, 80, 2), (1, 16, 2)])
def test_rotation(dtype: torch.dtype, heads: int, size: int, batch: int, adjacent: bool) -> None:
    """Heads of other sizes than powers of two, angles shared or not, and nothing else in memory is touched.

    Two products and their sum are rounded; a compiler may fuse a product and the sum, which rounds once less.
    """
    rng = torch.Generator().manual_seed(2)
    whole = torch.randn(2, 9, heads + 1, size, generator=rng).to(dtype)
    cos, sin = (torch.randn(batch, 9, size, generator=rng).to(dtype) for _ in range(2))
    x = whole[:, :, :heads].transpose(1, 2)
    turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    if adjacent:
        turned[..., ::2], turned[..., 1::2] = -x[..., 1::2], x[..., ::2]
    first, second = x.double() * cos[:, None].double(), turned.double() * sin[:, None].double()
    unit = torch.finfo(dtype).eps / 2
    products = unit * (first.abs() + second.abs()) + torch.finfo(dtype).smallest_normal * unit * 2
    room = products + unit * ((first + second).abs() + products)
    found = whole.clone().to(DEVICE)
    pointwise.rotate_(found[:, :, :heads].transpose(1, 2), cos.to(DEVICE), sin.to(DEVICE), adjacent)
    by_torch = x.clone()
    layer_ops.rotate_.plain(by_torch, cos, sin, adjacent)
    got = found[:, :, :heads].transpose(1, 2).cpu()
    for said in (got, by_torch):
        assert bool(((said.double() - first - second).abs() <= room).all())
    assert torch.equal(found[:, :, heads].cpu(), whole[:, :, heads])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_angles_in_float32_round_once(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(1, 3, 9, 80, generator=rng).to(dtype)
    cos, sin = (torch.randn(1, 9, 80, generator=rng) for _ in range(2))
    turned = torch.cat([-x[..., 40:], x[..., :40]], -1)
    wanted = (x.float() * cos[:, None] + turned.float() * sin[:, None]).to(dtype)
    found = x.to(DEVICE)
    pointwise.rotate_(found, cos.to(DEVICE), sin.to(DEVICE))
    close(found, wanted, units=1)


def test_heads_that_lie_far_apart() -> None:
    """A head begins more than 2^31 elements after the first; no more than three rows of that memory are touched."""
    far = 1 << 30
    x = torch.empty(2 * far + 16, dtype=torch.float16, device=DEVICE).as_strided(
        (1, 3, 1, 16), (far, far, 16, 1)
    )
    x.fill_(1.0)
    cos, sin = (torch.full((1, 1, 16), value, dtype=torch.float16, device=DEVICE) for value in (0.0, 1.0))
    pointwise.rotate_(x, cos, sin)
    assert (x[..., :8] == -1).all() and (x[..., 8:] == 1).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [128, 80])
def test_angles(dtype: torch.dtype, size: int) -> None:
    """Also of positions far beyond where a cosine is easily found."""
    pace = 1.0 / 1e6 ** (torch.arange(0, size, 2) / size)
    positions = torch.cat([torch.arange(40), torch.tensor([99_999, 352_800, 8_467_200])])
    wanted = (positions[:, None].float() * pace).repeat(1, 2)
    found = pointwise.rope_angles(positions.to(DEVICE), pace.to(DEVICE), 1.5, dtype)
    for one, turned in zip(found, (wanted.cos(), wanted.sin()), strict=True):
        assert one.shape == (43, size) and one.dtype == dtype
        close(one, (turned * 1.5).to(dtype), units=1)
    assert pointwise.rope_angles(positions[:0].to(DEVICE), pace.to(DEVICE), 1.0, dtype)[0].shape == (0, size)


def drawn(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(made: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """Whether `made` is as near to `exact` as the plain form is, or a rounding more."""
    far = (plain.double() - exact).abs().max() + torch.finfo(plain.dtype).eps * exact.abs().max()
    return bool((made.double() - exact).abs().max() <= 2 * far)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "rows", "channels", "taps"), [(1, 70, 200, 4), (2, 3, 24, 4), (2, 33, 130, 2)]
)
def test_causal_convolution(dtype: torch.dtype, count: int, rows: int, channels: int, taps: int) -> None:
    """Of rows that lie one after the other, and of channels that do; before the first row there is nothing."""
    x = drawn(count, rows, channels, seed=0, dtype=dtype)
    weight = drawn(channels, taps, seed=1, dtype=dtype)
    exact = convolve_silu.plain(x.double(), weight.double())
    for lying in (x, x.mT.contiguous().mT):
        assert near(delta.convolve_silu(lying, weight), convolve_silu.plain(lying, weight), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm(dtype: torch.dtype) -> None:
    x, gate, gain = (
        drawn(*size, seed=n, dtype=dtype) for n, size in enumerate([(5, 3, 40), (5, 3, 40), (40,)])
    )
    exact = gated_rms_norm.plain(x.double(), gate.double(), gain.double(), 1e-6)
    for one in (x, x.float()):
        found = delta.gated_rms_norm(one, gate, gain, 1e-6)
        assert near(found, gated_rms_norm.plain(x, gate, gain, 1e-6), exact)


# Sequences, rows of each, key heads, value heads, K, V, taps, rows of a journal.
SIZES = [(1, 1, 2, 4, 16, 16, 4, 64), (2, 3, 1, 2, 24, 40, 3, 50), (3, 2, 2, 6, 16, 8, 4, 40)]


@pytest.mark.parametrize(
    ("size", "dtype", "lag"), some([*SIZES, (1, 0, 2, 2, 16, 16, 4, 64)], DTYPES, [0, 5]), ids=str
)
def test_rows_through_a_running_state(size: tuple[int, ...], dtype: torch.dtype, lag: int) -> None:
    """Rows of the journal beside a sequence's own, and states of others, stay as they are."""
    count, n, groups, heads, K, V, taps, ring = size
    channels = 2 * groups * K + heads * V
    width, slots = channels + 2 * heads, count + 1
    rows = drawn(count * n, width, seed=0, dtype=dtype)
    gate = drawn(count * n, heads * V, seed=1, dtype=dtype)
    weights = [
        drawn(*shape, seed=2 + at, dtype=dtype) * 0.4
        for at, shape in enumerate([(channels, taps), (heads,), (heads,), (V,)])
    ]
    start = torch.tensor([33, 111, 70][:count])
    base = start - torch.tensor([7, 0, 11][:count])
    told = torch.stack([start, base, torch.maximum(base, start - lag), torch.arange(count, 0, -1)], 1)
    told = told.to(DEVICE)
    before = drawn(slots, ring, width, seed=6, dtype=dtype), drawn(slots, heads, K, V, seed=7) * 0.3
    wide = [x.double() for x in (rows, gate, *weights)]
    # In float64 but for the state, which is float32 in all of them.
    truth = before[0].double(), before[1].clone()
    exact = deltanet_rows.plain(*wide, 1e-6, told, *truth)
    found = []
    for run in (deltanet_rows.plain, delta.deltanet_rows):
        held = before[0].clone(), before[1].clone()
        found.append((run(rows, gate, *weights, 1e-6, told, *held), *held))
    (plain, journal, state), (made, same, moved) = found
    assert torch.equal(journal, same) and torch.equal(moved[0], before[1][0])
    assert (same == before[0]).all(-1).sum() == slots * ring - count * n
    assert n == 0 or near(made, plain, exact)
    far = (state.double() - truth[1].double()).abs().max() + 1e-5
    assert (moved.double() - truth[1].double()).abs().max() <= 2 * far


@pytest.mark.parametrize("size", [(1, 64, 32, 4, 2), (5, 40, 24, 6, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_through_their_experts(size: tuple[int, ...], dtype: torch.dtype) -> None:
    count, wide, deep, number, most = size
    x, share = drawn(count, wide, seed=0, dtype=dtype), drawn(count, most, seed=1, dtype=dtype)
    chosen = torch.rand(count, number, generator=torch.Generator().manual_seed(2)).topk(most).indices
    weights = [
        drawn(*shape, seed=at, dtype=dtype) * 0.2
        for at, shape in ((3, (number, 2 * deep, wide)), (4, (number, wide, deep)))
    ]
    given = chosen.to(DEVICE), share, *weights
    exact = expert_mlp.plain(x.double(), given[0], *(one.double() for one in given[1:]))
    assert near(experts.expert_mlp(x, *given), expert_mlp.plain(x, *given), exact)
