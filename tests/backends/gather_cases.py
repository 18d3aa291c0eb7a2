"""Units gathered from host slabs by the Triton kernel, interpreted or compiled."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends.ops import clusters
from mmaccel.backends.triton.stream import gather_units

from .triton_cases import DEVICE, INTERPRETED, some

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
    expected = torch.full((2, 2, rows + 6, size), 9, dtype=dtype)
    clusters.gather_units.plain(expected[:, :, 2 : 2 + rows], slabs, base, torch.tensor(SLOT))
    assert (expected[:, :, :2] == 9).all() and (expected[:, :, 2 + rows :] == 9).all()
    assert (expected[:, :, 2 + 2 * tokens : 2 + 3 * tokens] == 0).all()
    assert torch.equal(expected[1, 1, 2 : 2 + tokens], slabs[0][3, 1, 1])
    assert torch.equal(expected[0, 1, 2 + 3 * tokens : 2 + 4 * tokens], slabs[2][1, 0, 1])
    out = torch.full((2, 2, rows + 6, size), 9, dtype=dtype, device=DEVICE)
    window = out[:, :, 2 : 2 + rows]
    slot = torch.tensor(SLOT, device=DEVICE)
    gather_units(window, slabs, base.to(DEVICE), slot, programs=programs, words=words)
    assert torch.equal(out.cpu(), expected)
    gather_units(window[:, :, :0], slabs, base.to(DEVICE), slot[:0])


def test_units_that_lie_apart_where_they_are_written() -> None:
    """As the slots of a slab lie: a unit's heads together, keys before values."""
    torch.manual_seed(1)
    slab = torch.randn(10, 2, 3, 4, 8)
    slab = slab if INTERPRETED else slab.pin_memory()
    base, slot = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.tensor(SLOT, device=DEVICE)
    place = torch.full((len(SLOT), 2, 3, 4, 8), 9.0, device=DEVICE)
    gather_units(place[:-1].permute(1, 2, 0, 3, 4), [slab], base, slot[:-1], words=8)
    held = torch.tensor(SLOT) >= 0
    expected = torch.where(held[:, None, None, None, None], slab[torch.tensor(SLOT)], 0.0)
    assert torch.equal(place[:-1].cpu(), expected[:-1]) and (place[-1] == 9).all()
    clusters.gather_units.plain(place.permute(1, 2, 0, 3, 4), [slab], base, slot)
    assert torch.equal(place.cpu(), expected)
