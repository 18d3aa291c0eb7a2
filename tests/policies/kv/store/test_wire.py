"""Where slabs lie, as the wire tells it to the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mmaccel.policies.kv.store import host

from .lanes_sim import SimLanes
from .units import check, fill, open_store


def test_the_device_is_told_where_every_slab_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that came after it was told before, and after all were replaced."""
    told: list[tuple[list[int], list[int]]] = []
    real = host.gather_units

    def note(out: Tensor, slab: list[Tensor], base: Tensor, slot: Tensor, grain: int) -> None:
        told.append((base.tolist(), [one.data_ptr() - slab[0].data_ptr() for one in slab]))
        assert not any(one.data_ptr() % grain for one in slab)
        real(out, slab, base, slot, grain)

    monkeypatch.setattr(host, "gather_units", note)
    store = open_store(8)
    for units in ([0, 1], [2, 3, 4, 5], [6, 7, 8, 9]):
        fill(store, units)
        check(store, 2, units)
    assert len({len(base) for base, _ in told}) == 3
    assert all(base == apart for base, apart in told)


def test_where_slabs_lie_is_sent_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far behind the compute lane is: what it sends after the mark that the wire waits for may come too late."""
    lanes, issued, told = SimLanes(0, eager=0), False, list[list[int]]()
    store = open_store(8, lanes=lanes)
    for units in ([0, 1], [2, 3, 4, 5]):
        fill(store, units)
    lanes.drain()

    def send(numbers: list[int], device: torch.device) -> Tensor:
        """What the host sends goes with the lane that is at work, and with the compute lane when none is."""
        made = torch.full((len(numbers),), 77)
        copy = partial(made.copy_, torch.tensor(numbers))
        copy() if issued else lanes.compute.run(copy)  # type: ignore[arg-type]
        return made

    def note(out: Tensor, slab: list[Tensor], base: Tensor, slot: Tensor, grain: int) -> None:
        told.append(base.tolist())
        assert told[-1] == [one.data_ptr() - slab[0].data_ptr() for one in slab]

    monkeypatch.setattr(host, "on_device", send)
    monkeypatch.setattr(host, "gather_units", note)
    store.gather(torch.tensor([5, 0]), store.buffer(2))
    store.fetch(1, [3, 1])
    issued = True
    lanes.rush()
    assert len(told) == 2 and len(told[0]) > 1


@pytest.mark.parametrize("seed", range(8))
def test_what_computes_after_a_join_runs_after_the_wire(seed: int) -> None:
    lanes, order = SimLanes(seed), list[str]()
    for _ in range(3):
        lanes.wire.run(lambda: order.append("wire"))
    lanes.join()
    lanes.compute.run(lambda: order.append("compute"))
    lanes.rush()
    assert order == ["wire"] * 3 + ["compute"]
