"""flash-attn 2 and 3: when dense attention goes to them, with what, and what comes back; a stand-in computes it over all
pairs. The real ones run on a CUDA device where they are installed."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.backends import flash
from mmaccel.backends.ops import dense_attend as dense
from mmaccel.backends.ops import operator as operators

from .oracle import budget, drawn, masked

Calls = list[dict[str, Any]]
SIDES = {None: (-1, -1), 30: (29, 0), 1: (0, 0)}


def causal(n: int, start: int, window: int | None, device: str = "cpu") -> Tensor:
    """[1, 1, n, start + n] bool."""
    gap = torch.arange(start, start + n, device=device)[:, None] - torch.arange(start + n, device=device)
    return ((gap >= 0) & (gap < (window or gap.max() + 1)))[None, None]


def draw(n: int, start: int, size: int = 16, dtype: torch.dtype = torch.bfloat16, batch: int = 2) -> Any:
    return [t.to(dtype) for t in drawn(batch, (4, 2), n, start + n, size, n)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """A stand-in for flash-attn 2 on this device, of a GPU of compute capability 8; what it was called with."""
    found: Calls = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, **how: Any) -> Tensor:
        assert all(t.stride(-1) == 1 for t in (q, k, v)) and how["causal"]
        found.append({"rows": q.shape[1], "keys": k.shape[1], **how})
        window = how["window_size"][0] + 1 or None
        assert how["window_size"] == SIDES[window]
        mask = causal(q.shape[1], k.shape[1] - q.shape[1], window)
        turned = (t.transpose(1, 2).float() for t in (q, k, v))
        return masked(*turned, mask, softmax_scale).to(q.dtype).transpose(1, 2)

    monkeypatch.setattr(
        dense, "older_flash", lambda device: dense.FlashAttnRelease(2, flash_attn_func, square=True)
    )
    monkeypatch.setattr(dense, "OLDER_FROM", 8)
    yield found


@pytest.mark.parametrize("window", [None, 1, 30])
@pytest.mark.parametrize("start", [0, 50])
def test_whole_tail_and_window(start: int, window: int | None, calls: Calls) -> None:
    """Groups of heads, and queries at the end of the keys."""
    query, key, value = draw(40, start)
    out = dense.dense_attend(query, key, value, 0.3, start=start, window=window)
    assert [(call["rows"], call["keys"]) for call in calls] == [(40, start + 40)]
    exact, allowed = budget(query, key, value, causal(40, start, window), 0.3)
    assert float((out.double() - exact).abs().max()) <= allowed


def test_padding_is_left_out(calls: Calls) -> None:
    """Each run of valid columns is a call of its own."""
    query, key, value = draw(40, 0)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, :9] = False
    out = dense.dense_attend(query, key, value, 0.3, valid=valid)
    assert sorted((call["rows"], call["keys"]) for call in calls) == [(31, 31), (40, 40)]
    mask = causal(40, 0, None) & valid[:, None, None] & valid[:, None, :, None]
    exact, allowed = budget(query, key, value, mask, 0.3)
    assert float((out.double() - exact).abs().max()) <= allowed and not out[1, :, :9].any()


@pytest.mark.parametrize(
    "how",
    [
        {"window": 30, "sinks": 4},
        {"rows": 7},
        {"dtype": torch.float32},
        {"size": 12},
        {"size": 264},
        {"column": torch.arange(40)},
        {"valid": torch.arange(40)[None].expand(2, 40) % 7 != 3},
        {"over": 5},
    ],
    ids=lambda how: " ".join(how),
)
def test_what_it_does_not_compute_goes_the_way_it_went(how: dict[str, Any], calls: Calls) -> None:
    n, over = how.pop("rows", 40), how.pop("over", 0)
    query, key, value = draw(n, 0, how.pop("size", 16), how.pop("dtype", torch.bfloat16))
    dense.dense_attend(query, key[:, :, : n - over], value[:, :, : n - over], 0.3, **how)
    assert not calls


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    module.flash_attn_func = lambda *_, **__: name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    "name, there, four, release, square",
    [
        ("sm_80", ("flash_attn", "flash_attn_interface"), True, 2, True),
        ("sm_90", ("flash_attn", "flash_attn_interface"), False, 3, True),
        ("sm_90", ("flash_attn",), False, 2, False),
        ("sm_90", ("flash_attn", "flash_attn_interface"), True, None, None),
        ("sm_100", ("flash_attn",), True, None, None),
        ("sm_120", ("flash_attn",), True, 2, False),
        ("sm_75", ("flash_attn",), False, None, None),
        ("gfx942", ("flash_attn",), False, None, None),
        ("sm_80", (), False, None, None),
    ],
)
def test_which_serves_a_device(
    name: str,
    there: tuple[str, ...],
    four: bool,
    release: int | None,
    square: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an architecture by name, with flash-attn 4 installed or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(operators, "architecture_of", lambda device: operators.find_architecture(name))
    monkeypatch.setattr(flash, "installed", lambda: four)
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in there:
        stand_in(module, monkeypatch)
    dense.import_older_flash_attn.cache_clear()
    try:
        found = dense.older_flash(torch.device("cuda"))
        assert (found and found.release) == release and (found and found.square) == square
        assert dense.older_flash(torch.device("cpu")) is None
    finally:
        dense.import_older_flash_attn.cache_clear()


@pytest.mark.parametrize("square", [True, False])
def test_a_square_goes_to_what_is_faster(square: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "older_flash", lambda device: dense.FlashAttnRelease(2, print, square))
    query, key, value = draw(40, 0)
    assert bool(dense.find_flash_attn(query, key, value, None)) == square
    assert dense.find_flash_attn(query, key, value, 30) and dense.find_flash_attn(
        query[:, :, 9:], key, value, None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 30, 300])
@pytest.mark.parametrize("start", [0, 300])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("release", [2, 3])
def test_the_real_one(
    release: int, size: int, start: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = dense.import_older_flash_attn(release) if torch.cuda.is_available() else None
    if call is None or operators.why_not(f"flash_{release}", torch.device("cuda")) is not None:
        pytest.skip(f"flash-attn {release} is not installed, or does not run on this device")
    monkeypatch.setattr(
        dense, "older_flash", lambda device: dense.FlashAttnRelease(release, call, square=True)
    )
    monkeypatch.setattr(dense, "FLASH_FROM", sys.maxsize)
    for name in ("_sdpa", "_sliding"):
        monkeypatch.setattr(dense, name, None)
    query, key, value = (t.cuda() for t in draw(700, start, size))
    out = dense.dense_attend(query, key, value, 0.1, start=start, window=window)
    exact, allowed = budget(query, key, value, causal(700, start, window, "cuda"), 0.1)
    assert float((out.double() - exact).abs().max()) <= allowed
