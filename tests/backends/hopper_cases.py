"""Where the copy engine finds keys, and what else is made before the kernel for Hopper runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import BlockLists, KeySpan
from mmaccel.backends.triton.prefill.hopper import FIELDS
from mmaccel.backends.triton.prefill.hopper_launch import (
    BOX,
    FAR,
    KeyLocations,
    as_tma_matrix,
    build_span_table_row,
    write_device_integers,
)

from .triton_cases import DEVICE, INTERPRETED

B, G, HEADS, S, D = 2, 2, 4, 300, 64


def orders() -> list[Tensor]:
    """Of all heads in their order, of each head in its own, and of all with a gap inside a block."""
    rng = torch.Generator().manual_seed(0)
    natural = torch.arange(320).where(torch.arange(320) < S, -1)
    own = torch.rand(B, HEADS, S, generator=rng).argsort(-1)
    cut = torch.cat([torch.arange(7, 100), torch.arange(110, S)])
    padded = [torch.nn.functional.pad(t, (0, 320 - t.shape[-1]), value=-1) for t in (natural, own, cut)]
    return [t.int().view(-1, 1 if t.dim() == 1 else HEADS, 320) for t in padded]


def span(k_row: Tensor, k_pos: Tensor, ordered: int | None = None) -> KeySpan:
    """A span of these keys; of its lists nothing is asked."""
    row = torch.zeros(1, 1, 2, 5, dtype=torch.int32, device=DEVICE)
    lists = BlockLists(row, torch.arange(2, device=DEVICE), row[..., 0].char())
    return KeySpan(k_row, k_pos, k_pos, 0, FAR, lists, ordered)


def made(most: int) -> tuple[Tensor, Tensor, list[Tensor], KeyLocations]:
    rng = torch.Generator().manual_seed(1)
    key, value = (torch.randn(B, G, S, D, generator=rng).to(DEVICE) for _ in range(2))
    k_row = [t.to(DEVICE) for t in orders()]
    k_pos = torch.arange(320, dtype=torch.int32, device=DEVICE).view(1, 1, 320)
    return key, value, k_row, KeyLocations.find(key, value, [span(row, k_pos) for row in k_row], HEADS, most)


def check(key: Tensor, value: Tensor, k_row: list[Tensor], homes: KeyLocations) -> None:
    """Every key is where its home says."""
    assert homes.short is None
    for row, home, place in zip(k_row, homes.home, homes.k_pos, strict=True):
        for b, x, n in torch.cartesian_prod(*(torch.arange(size) for size in home.shape)).tolist():
            told, shared = int(home[b, x, n]), row.shape[1] == 1
            rows = row[b % len(row), 0 if shared else x, n * BOX : n * BOX + BOX].long()
            there = rows >= 0
            g = x if shared else x // (HEADS // G)
            if told >= 0:
                assert torch.equal((told + torch.arange(BOX, device=DEVICE))[there], rows[there])
            else:
                assert torch.equal(homes.keys[-2 - told][there], key[b, g, rows[there]])
                assert torch.equal(homes.values[-2 - told][there], value[b, g, rows[there]])
                assert not homes.keys[-2 - told][~there].any()
        absent = (row < 0).expand_as(place)
        assert (place[absent] == FAR).all() and not (place[~absent] == FAR).any()


def test_every_key_is_where_its_home_says() -> None:
    key, value, k_row, homes = made(1 << 30)
    check(key, value, k_row, homes)
    # What lies side by side stays where it is: all but the last block, which ends behind the last key, and the one with the
    # gap.
    natural, own, cut = homes.home
    assert (natural[..., :-1] >= 0).all() and (natural[..., -1] < -1).all() and (own[..., :-1] < -1).all()
    assert (cut < -1).sum(-1).eq(2).all()


def test_layers_share_what_follows_from_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are copied each time, also behind a layer whose copies found too little room."""
    key, value, k_row, _ = made(1 << 30)
    k_pos = torch.arange(320, dtype=torch.int32, device=DEVICE).view(1, 1, 320)
    spans = [span(row, k_pos) for row in k_row]
    few = KeyLocations.find(key, value, spans, HEADS, 10 * 2 * BOX * D * 4)
    assert few.short is not None and int(few.short) > 0
    monkeypatch.setattr("mmaccel.backends.triton.prefill.hopper_launch.find_adjacent_rows_kernel", None)
    for layer in range(3):
        own = key + layer, value - layer
        check(*own, k_row, KeyLocations.find(*own, spans, HEADS, 1 << 30))
        few = KeyLocations.find(*own, spans, HEADS, 10 * 2 * BOX * D * 4)
        assert few.short is not None and int(few.short) > 0


@pytest.mark.parametrize("n", [256, 320])
def test_what_is_known_to_stand_in_order_is_not_looked_for(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another span and alone, it is where it would be found; what reaches beyond the keys is copied as ever."""
    rng = torch.Generator().manual_seed(1)
    key, value = (torch.randn(B, G, S, D, generator=rng).to(DEVICE) for _ in range(2))
    pos = torch.arange(320, dtype=torch.int32, device=DEVICE).view(1, 1, 320)
    known = torch.where(pos < min(n, S), pos, -1)[..., :n].repeat(B, 1, 1)
    for beside in ([], [span(orders()[1].to(DEVICE), pos)]):
        told, found = (
            KeyLocations.find(key, value, [span(known, pos[..., :n], of), *beside], HEADS, 1 << 30)
            for of in (min(n, S), None)
        )
        for a, b in zip(told.home, found.home, strict=True):
            assert torch.equal(a.expand_as(b), b)
        for a, b in zip(told.k_pos, found.k_pos, strict=True):
            assert torch.equal(a.expand_as(b), b)
        copied = int((found.home[0] < -1).sum()) + sum(int((home < -1).sum()) for home in found.home[1:])
        assert torch.equal(told.keys[:copied], found.keys[:copied])
        # Room for its last block at most.
        assert len(found.keys) - len(told.keys) == B * G * (n // BOX - (n > S))
    if n < S:
        monkeypatch.setattr("mmaccel.backends.triton.prefill.hopper_launch.find_adjacent_rows_kernel", None)
        assert len(KeyLocations.find(key, value, [span(known, pos[..., :n], n)], HEADS, 1 << 30).keys) == 0


def test_fewer_keys_than_a_block_find_room_for_all() -> None:
    """No block of them is adjacent, not even one without a key, whatever is known of their order."""
    rng = torch.Generator().manual_seed(1)
    key, value = (torch.randn(B, G, 40, D, generator=rng).to(DEVICE) for _ in range(2))
    row = torch.where(torch.arange(320) < 40, torch.arange(320), -1).int()
    row = row.expand(1, HEADS, 320).contiguous().to(DEVICE)
    pos = torch.arange(320, dtype=torch.int32, device=DEVICE).view(1, 1, 320)
    one = replace(span(row, pos), scattered=BOX)
    check(key, value, [row], KeyLocations.find(key, value, [one], HEADS, 1 << 30))


def test_nothing_beyond_the_keys_is_read() -> None:
    """What lies behind the last key in a buffer with room may be anything, and zero times it need not be zero."""
    rng = torch.Generator().manual_seed(1)
    for keys in (40, 64, 130, *[S] * (not INTERPRETED)):
        whole = torch.full((B, G, S + 100, D), torch.nan)
        whole[:, :, :keys] = torch.randn(B, G, keys, D, generator=rng)
        key = whole.to(DEVICE)[:, :, :keys]
        view = as_tma_matrix(key)
        assert view is not None
        seen = key.as_strided(view.shape, (view.stride, 1))
        k_row = [t.masked_fill(t >= keys, -1).to(DEVICE) for t in orders()]
        k_row.append(torch.full_like(k_row[0], -1))
        k_row.append(k_row[0].roll(10, -1))
        place = torch.zeros(1, 1, 320, dtype=torch.int32, device=DEVICE)
        homes = KeyLocations.find(key, key, [span(row, place) for row in k_row], HEADS, 1 << 30)
        assert homes.short is None
        for row, home in zip(k_row, homes.home, strict=True):
            for b, x, n in torch.cartesian_prod(*(torch.arange(size) for size in home.shape)).tolist():
                told, g = int(home[b, x, n]), x if row.shape[1] == 1 else x // (HEADS // G)
                first = b * view.batch + g * view.group + told
                block = seen[first : first + BOX] if told >= 0 else homes.keys[-2 - told]
                assert len(block) == BOX and block.isfinite().all()


def test_what_finds_no_room_is_counted() -> None:
    enough = made(1 << 30)[3]
    wanted = sum(int((home < -1).sum()) for home in enough.home)
    homes = made(10 * 2 * BOX * D * 4)[3]
    assert homes.short is not None and int(homes.short) == wanted - 10
    assert sum(int((home == -1).sum()) for home in homes.home) == wanted - 10


def test_a_device_that_is_nearly_full_has_room_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sum(int((home < -1).sum()) for home in made(1 << 30)[3].home)
    plain = Tensor.new_empty

    def scarce(self: Tensor, *size: int, **named: Any) -> Tensor:
        if len(size) == 4 and 2 * size[1] > wanted:
            raise torch.OutOfMemoryError
        return plain(self, *size, **named)

    monkeypatch.setattr(Tensor, "new_empty", scarce)
    homes = made(1 << 30)[3]
    assert 0 < len(homes.keys) == len(homes.values) <= wanted // 2
    assert homes.short is not None and int(homes.short) == wanted - len(homes.keys)


def test_lists_of_other_types_are_told_as_the_kernel_reads_them() -> None:
    """It casts addresses: the portable kernel goes by the types of tensors, and takes any."""
    place = torch.zeros(1, 1, 128, dtype=torch.int32, device=DEVICE)
    told = build_span_table_row(span(place, place), place, torch.zeros(1, 2, 2, dtype=torch.int32))
    assert told["list"].dtype == torch.int64 and told["index"].dtype == torch.int32
    assert set(told) == set(FIELDS)


def test_numbers_arrive_whole() -> None:
    numbers = [0, 1, -1, 16, 2**31 - 1, -(2**31), 140_000_000_000_000, *range(70)]
    assert write_device_integers(numbers, torch.device(DEVICE))[: len(numbers)].tolist() == numbers


@pytest.mark.parametrize("batch", [1, 2])
def test_views_find_every_row(batch: int) -> None:
    """Tensors as caches hold them, longer than they are filled, and as projections leave them; some groups of them."""
    whole = torch.arange(batch * 4 * 40 * 64).view(batch, 4, 40, 64)
    mixed = whole.view(batch, 40, 4, 64).transpose(1, 2)
    for t in (whole, whole[:, :, :30], mixed, mixed[:, 1:3], whole[:, 2:3, :9]):
        view = as_tma_matrix(t)
        assert view is not None
        rows, columns = view.shape
        seen = t.as_strided((rows, columns), (view.stride, 1))
        for b in range(batch):
            for g in range(t.shape[1]):
                first = b * view.batch + g * view.group
                block = seen[first : first + t.shape[2], g * view.column : g * view.column + 64]
                assert torch.equal(block, t[b, g])
    assert as_tma_matrix(whole.transpose(2, 3)) is None and as_tma_matrix(whole[..., 1:]) is None
