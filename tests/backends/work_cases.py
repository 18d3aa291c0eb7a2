"""What is made of lists before a launch: pairs, tests that are needed, pieces and their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.prefill import attend, lists
from mmaccel.backends.triton.prefill import kernel as working
from mmaccel.backends.triton.prefill.kernel import MOST_PIECES, WAVES, Work
from mmaccel.backends.triton.prefill.lists import paired, unsure
from mmaccel.core.prefill.plan import FULL, AttentionPlan, Part, span_by_range

from .oracle import flat
from .triton_cases import DEVICE, INTERPRETED, draw


@settings(max_examples=4 if INTERPRETED else 40)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([1, 2, 7]),
    st.integers(0, 20),
)
def test_work_fits_the_room_that_is_made_for_it(
    lengths: list[int], chunk: int, tiles: int, slack: int
) -> None:
    """Sizes come from the host alone: every piece has its program, and every piece of a split row its slot."""
    count = torch.tensor(lengths, device=DEVICE).view(1, 1, -1)
    longest = max(lengths) + slack
    given_size = Work.of([count], 1, 1, len(lengths), 1, longest, 1, chunk)
    even = Work.of([count, 0 * count], 1, 1, len(lengths), tiles, longest, chunk)
    assert even.items == len(lengths) + WAVES * chunk // tiles
    assert int(even.told[0]) == max(32, -(-sum(lengths) * tiles // (WAVES * chunk)))
    for work in (given_size, even):
        most = int(work.told[0])
        pieces = [max(1, -(-n // most)) for n in lengths]
        assert work.pieces.tolist() == pieces
        found = work.item.tolist()
        mine = [tuple(one) for one in found if one[0] >= 0]
        assert sorted(mine) == [(row, piece) for row, count in enumerate(pieces) for piece in range(count)]
        assert [row for row, _ in found[len(mine) :]] == [-1] * (work.items - len(mine))
        # The first pieces of split rows, the second ones, and so on, and then the rest: each from the last row to the first.
        split = [row for row in range(len(lengths)) if pieces[row] > 1]
        whole = [row for row in range(len(lengths)) if pieces[row] == 1]
        rounds = [(row, i) for i in range(max(pieces)) for row in split[::-1] if pieces[row] > i]
        assert mine == rounds + [(row, 0) for row in whole[::-1]]
        assert int(work.told[1]) == sum(pieces[row] for row in split)
        slots = [work.slot[row].item() + piece for row, piece in mine if pieces[row] > 1]
        assert sorted(slots) == list(range(len(slots))) and len(slots) <= work.slots


def test_a_row_has_no_more_pieces_than_there_are_programs_for() -> None:
    """One row of all there is would be cut into a piece for every place on the device."""
    count = torch.zeros(1, 1, 5, dtype=torch.int64, device=DEVICE)
    count[..., 3] = 1 << 16
    work = Work.of([count], 1, 1, 5, 1, 1 << 17, 512)
    assert int(work.told[0]) == (1 << 17) // MOST_PIECES
    assert work.pieces.tolist() == [1, 1, 1, MOST_PIECES // 2, 1]


def test_work_adds_the_lists_of_spans_that_share_them() -> None:
    """A span without heads, one without sequences, and one of all: more rows than a program holds at once."""
    generator = torch.Generator().manual_seed(0)
    counts = [
        torch.randint(0, 30, size, generator=generator, dtype=torch.int64)
        for size in ((1, 1, 900), (1, 3, 900), (2, 3, 900))
    ]
    work = Work.of([c.to(DEVICE) for c in counts], 2, 3, 900, 1, 90, 1, 40)
    length = sum(c.expand(2, 3, 900) for c in counts).flatten()
    want = (-(-length // 40)).clamp(min=1)
    assert torch.equal(work.pieces.cpu().long(), want)
    taken = work.item[work.item[:, 0] >= 0].cpu().long()
    assert len(taken) == want.sum() and torch.equal(taken[:, 0].bincount(), want)


@given(seed=st.integers(0, 2**16))
def test_a_pair_holds_what_both_hold(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, 9, (1, 2, 5), generator=rng) for _ in range(4)]
    count = draw[1]
    head = torch.minimum(draw[2], count)
    tail = torch.minimum(torch.maximum(draw[3], head), count)
    row = torch.stack([draw[0], count, head, tail, torch.zeros_like(count)], -1)
    two = paired(row.to(DEVICE))
    for h in range(2):
        for m in range(3):
            mine = [row[0, h, i].tolist() for i in (2 * m, 2 * m + 1) if i < 5]
            held = [set(range(b, b + c)) for b, c, *_ in mine]
            sure = [set(range(b + n, b + f)) for b, _, n, f, _ in mine]
            begin, length, near, end, _ = two[0, h, m].tolist()
            assert set().union(*held) <= set(range(begin, begin + length))
            everyone = len(mine) == 2 and all(held)
            wanted = sure[0] & sure[1] if everyone else set()
            assert set(range(begin + near, begin + end)) == wanted


@pytest.mark.parametrize("size", [(1,), (2100,), (2, 3, 70), (1, 2, 4097)])
def test_blocks_that_need_a_test_are_counted(size: tuple[int, ...]) -> None:
    kind = torch.randint(0, 3, size, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    want = torch.nn.functional.pad((kind != FULL).cumsum(-1, dtype=torch.int32), (1, 0))
    assert torch.equal(unsure(kind.to(DEVICE)).cpu(), want)
    if len(size) == 3:
        shared = kind[:1].expand(5, -1, -1)
        assert torch.equal(unsure(shared.to(DEVICE)).cpu(), want[:1].expand(5, -1, -1))


class Watched:
    """A kernel that notes, at every launch, which devices it is told to be on."""

    def __init__(
        self, kernel: Any, on: list[torch.device], seen: list[tuple[str, list[torch.device]]]
    ) -> None:
        self.kernel, self.on, self.seen = kernel, on, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.append((self.kernel.__name__, list(self.on)))
        return self.kernel[grid]


def test_every_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another, where the layers of a model lie on several: Triton launches there."""
    on: list[torch.device] = []
    seen: list[tuple[str, list[torch.device]]] = []
    real = torch.cuda.device_of

    @contextmanager
    def noted(tensor: torch.Tensor) -> Iterator[None]:
        on.append(tensor.device)
        with real(tensor):  # type: ignore[no-untyped-call]
            yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "device_of", noted)
    for module, name in ((lists, "merge_pairs_kernel"), (working, "work_kernel"), (attend, "merge_kernel")):
        monkeypatch.setattr(module, name, Watched(getattr(module, name), on, seen))
    place = torch.arange(96, dtype=torch.int32)[None, None]
    span = span_by_range(place, place, place, place, 0, 96, 16, 16)
    plan = AttentionPlan((Part(place, (span,)),), 16, 16, 1, 3, 96, 96).to(DEVICE)
    query, key, value = (t.to(DEVICE) for t in draw(plan, 1, 16, 0))
    here = replace(operators.INTERPRETED, shared=attend.PAIRS)
    monkeypatch.setattr(operators, "resources", lambda _: here)
    attend.block_attend(query, key, value, *flat(plan.parts[0], plan), 0.25, 96, chunk=2)
    assert [name for name, _ in seen] == ["merge_pairs_kernel", "work_kernel", "merge_kernel"]
    assert all(devices == [query.device] for _, devices in seen), seen
