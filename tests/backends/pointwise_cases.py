"""The kernels of a layer's rows against what transformers computes, interpreted or compiled."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends.triton import pointwise

from .triton_cases import DEVICE

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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gate(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    gate, up = ((4 * torch.randn(3, 1500, generator=rng)).to(dtype) for _ in range(2))
    gate[0, :4] = torch.tensor([0.0, -60.0, 60.0, -8.0])
    found = gate.clone().to(DEVICE)
    pointwise.silu_times_(found, up.to(DEVICE))
    close(found, torch.nn.functional.silu(gate) * up, units=2)
    with pytest.raises(ValueError, match="contiguous"):
        pointwise.silu_times_(found[:, :7], up[:, :7].to(DEVICE))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "size", "batch"), [(7, 128, 1), (2, 80, 2), (1, 16, 2)])
def test_rotation(dtype: torch.dtype, heads: int, size: int, batch: int) -> None:
    """Heads of other sizes than powers of two, angles shared or not, and nothing else in memory is touched.

    Two products and their sum are rounded; a compiler may fuse a product and the sum, which rounds once less.
    """
    rng = torch.Generator().manual_seed(2)
    whole = torch.randn(2, 9, heads + 1, size, generator=rng).to(dtype)
    cos, sin = (torch.randn(batch, 9, size, generator=rng).to(dtype) for _ in range(2))
    x = whole[:, :, :heads].transpose(1, 2)
    turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    first, second = x.double() * cos[:, None].double(), turned.double() * sin[:, None].double()
    unit = torch.finfo(dtype).eps / 2
    products = unit * (first.abs() + second.abs()) + torch.finfo(dtype).smallest_normal * unit * 2
    room = products + unit * ((first + second).abs() + products)
    found = whole.clone().to(DEVICE)
    pointwise.rotate_(found[:, :, :heads].transpose(1, 2), cos.to(DEVICE), sin.to(DEVICE))
    got = found[:, :, :heads].transpose(1, 2).cpu()
    for said in (got, x * cos[:, None] + turned * sin[:, None]):
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
    """Also of places far beyond where a cosine is easily found."""
    pace = 1.0 / 1e6 ** (torch.arange(0, size, 2) / size)
    places = torch.cat([torch.arange(40), torch.tensor([99_999, 352_800, 8_467_200])])
    wanted = (places[:, None].float() * pace).repeat(1, 2)
    found = pointwise.angles(places.to(DEVICE), pace.to(DEVICE), 1.5, dtype)
    for one, turned in zip(found, (wanted.cos(), wanted.sin()), strict=True):
        assert one.shape == (43, size) and one.dtype == dtype
        close(one, (turned * 1.5).to(dtype), units=1)
    assert pointwise.angles(places[:0].to(DEVICE), pace.to(DEVICE), 1.0, dtype)[0].shape == (0, size)
