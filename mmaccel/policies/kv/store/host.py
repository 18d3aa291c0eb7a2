"""The memory of a stream on the host: keys and values by layer and unit, written as they leave the device, read again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, StoreError, check_choice
from mmaccel.policies.kv.store import save as files
from mmaccel.policies.kv.store.pinned_slabs import SLAB_BYTES, Shape, Slabs
from mmaccel.policies.kv.store.slot_allocator import Allotment, Table
from mmaccel.policies.kv.store.streams import Lanes, Mark, lanes_of
from mmaccel.policies.kv.store.transfer import Way, Wire, check_way, in_units

Group = int | None
Spill = Literal["refuse", "disk", "drop_oldest"]
"""When the host may hold no more: refuse, write to files, or forget the oldest units."""


class HostStore:
    """Keys and values of units (frames, or what a stream takes at a time) of all layers in the memory of the host.

    A unit of a layer is P tokens of G kv heads of size D, keys and values side by side, so that it crosses the wire as one
    piece. Units that are asked for together can be given a `group`: a group lies together, in runs of `extent` units, and
    comes back in few copies. Units are numbered by the caller, from 0; unit numbers may have gaps and need not be the same
    in every layer. All methods but `counters`, `settle`, `save`, `load`, `close` and whatever touches the disk return
    before the transfers they began have ended; what is returned may be used on the stream that is current.

    layers, groups, tokens, size, dtype  the shape: L, G, P, D and the type of keys and values
    device      where units come from and go to; its host memory is pinned on CUDA, and plain elsewhere
    cap         bytes of host memory at most; None: as much as the host can spare
    spill       what happens then: see `Spill`
    folder      where files go with spill="disk" (a temporary folder by default); removed by `close`
    way         how units come back: see `Way`
    extent      units of a layer that lie together
    slab_bytes  host memory is taken in pieces of this size
    lanes       what device work is issued through (for tests)

    Raises `StoreError` in one sentence when the store is full, closed, or asked for what it does not hold; whatever fails,
    nothing that was stored before is lost.
    """

    def __init__(
        self,
        *,
        layers: int,
        groups: int,
        tokens: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        cap: int | None = None,
        spill: Spill = "refuse",
        folder: str | Path | None = None,
        way: Way = "auto",
        extent: int = 8,
        slab_bytes: int = SLAB_BYTES,
        lanes: Lanes | None = None,
    ) -> None:
        sizes = {"layers": layers, "groups": groups, "tokens": tokens, "size": size}
        for field, number in {**sizes, "extent": extent, "slab_bytes": slab_bytes}.items():
            if number < 1:
                raise RecipeError(f"host store: {field} is {number}; give at least 1.")
        if cap is not None and cap < 0:
            raise RecipeError(f"host store: cap is {cap} bytes; give at least 0, or None.")
        check_choice("host store", "spill", spill, get_args(Spill))
        check_way(way)
        self.shape = Shape(layers, groups, tokens, size, dtype)
        self.device, self.spill = torch.device(device), spill
        self._options = dict(
            cap=cap, spill=spill, folder=folder, way=way, extent=extent, slab_bytes=slab_bytes
        )
        self._default: Way = way
        self.lanes = lanes or lanes_of(self.device)
        place = None if folder is None else Path(folder)
        self._slabs = Slabs(self.shape, self.device.type == "cuda", slab_bytes, cap, spill == "disk", place)
        self._allotment = Allotment(self._slabs.align(extent))
        self._wire = Wire(self.shape, self._slabs, self.lanes, self.device)
        self._table = Table(layers, self.device)
        self._closed, self._dropped = False, 0

    def put(
        self,
        layer: int,
        units: Sequence[int],
        key: Tensor,
        value: Tensor,
        group: Group | Sequence[Group] = None,
    ) -> list[int]:
        """Store `units` of a layer; key, value [G, n * P, D] (or with a batch of 1 before), unit after unit.

        Gives the units that were forgotten to make room, in all layers: none unless spill="drop_oldest". A unit that the
        layer holds already is refused; so are tensors of another size, and whatever does not fit: nothing is stored then.

        group   a number of 0 or more, of all units or of each: units of a layer with the same one lie together
        """
        self._open()
        units = [int(unit) for unit in units]
        groups = [group] * len(units) if group is None or isinstance(group, int) else list(group)
        key, value = (self.shape.side(name, t, len(units)) for name, t in (("key", key), ("value", value)))
        if len(set(units)) < len(units) or any(unit < 0 for unit in units):
            raise StoreError("host store: units to store are different numbers from 0 on; number each once.")
        for unit, slot in zip(units, self._table.look(layer, units), strict=True):
            if slot >= 0:
                raise StoreError(f"host store: layer {layer} holds unit {unit} already; drop it first.")
        if not units:
            return []
        with torch.no_grad():
            # First what may fail on the device: nothing has been forgotten or noted yet.
            packed = torch.empty(len(units), *self.shape.unit, dtype=self.shape.dtype, device=self.device)

            def pack() -> None:
                for side, tensor in enumerate((key, value)):
                    packed[:, side] = in_units(tensor, self.shape.tokens).transpose(0, 1)

            self.lanes.compute.run(pack)
            slots, gone = self._take(layer, units, groups)
            self._table.set(layer, units, slots, groups)
            self._wire.write(slots, packed)
        return gone

    def fetch(
        self, layer: int, units: Sequence[int] | Tensor, out: Tensor | None = None, way: Way | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, each [G, n * P, D] on the device, of `units` in the order they are asked for.

        units   numbers; or a tensor [n] on the device, which the host does not wait for where a gather can serve it: then -1
                gives zeros, and so does a unit that is not held. Numbers that are not held are refused.
        out     [2, G, n * P, D], what to write to: keys, then values; the last two dimensions dense
        way     this once, instead of the store's
        """
        out = self.buffer(len(units)) if out is None else out
        ready = self.fetch_into(layer, units, out, after=self.lanes.compute.mark(), way=way)
        self.lanes.compute.wait(ready)
        return out[0], out[1]

    @torch.no_grad()
    def fetch_into(
        self,
        layer: int,
        units: Sequence[int] | Tensor,
        out: Tensor,
        after: Mark | None = None,
        way: Way | None = None,
    ) -> Mark:
        """As `fetch`, without the compute lane waiting: the units are in `out` once the mark that is given has passed.

        after   when `out` may be written
        """
        self._open()
        self.shape.check(out, len(units))
        way = self._default if way is None else way
        check_way(way)
        if isinstance(units, Tensor):
            here = units.device.type == self.device.type and (self.device.type == "cuda" or way == "gather")
            if here and way in ("auto", "gather") and self._slabs.in_memory and not self._slabs.files:
                self._wire.crossed(len(units))
                # The entry after the last, -1, stands for what is out of range.
                row = torch.nn.functional.pad(self.rows()[layer], (0, 1), value=-1)
                slot = torch.empty(len(units), dtype=torch.long, device=self.device)
                self.lanes.compute.run(partial(_look, row, units, slot))
                return self.gather(slot, out, after=after)[1]
            units = units.tolist()
        wanted = [int(unit) for unit in units]
        return self._wire.read(self._held(layer, wanted), out, way, after)

    @property
    def indexed(self) -> bool:
        """Whether `gather` serves: all units are in memory, and no other way is asked for."""
        return self._default in ("auto", "gather") and not self._slabs.files

    @property
    def slab_slots(self) -> int:
        """Slots of a slab."""
        return self._slabs.per

    @property
    def slot_count(self) -> int:
        """Slots of all slabs in memory; places beside them are numbered from here on, each from a slab's beginning."""
        return self._slabs.in_memory * self._slabs.per

    def rows(self) -> Tensor:
        """[L, units] on the device: the slot of each unit of each layer, -1 where it holds none."""
        return self._table.rows()

    def gather(
        self, slot: Tensor, out: Tensor, places: Sequence[Tensor] = (), after: Mark | None = None
    ) -> tuple[Mark, Mark]:
        """What lies at `slot` [n] on the device, made on the compute lane, into `out` [2, G, n * P, D] by one launch; -1
        gives zeros. The marks before and after it; bytes are counted by `crossed`.

        places  tensors [m, 2, G, P, D] on the device that may be read too: their slots come after the host's, each place
                beginning where a slab would
        after   when `out` may be written, if it is not the compute lane that made it
        """
        self._open()
        made = self.lanes.compute.mark(timed=True)
        if after is not None:
            self.lanes.wire.wait(after)
        return made, self._wire.read_indexed(slot, out, made, places)

    def crossed(self, units: int) -> None:
        """Of what was gathered, `units` units of one layer came from the host."""
        self._wire.crossed(units)

    def buffer(self, units: int) -> Tensor:
        """[2, G, n * P, D] on the device, room for `units` units, to be written in any mode."""
        with torch.inference_mode(False):
            shape = 2, self.shape.groups, units * self.shape.tokens, self.shape.size
            return torch.empty(shape, dtype=self.shape.dtype, device=self.device)

    def reserve(self, units: int) -> list[int]:
        """Make sure that `units` more units fit in every layer, before any is stored; gives what `put` gives.

        Raises `StoreError` when they do not fit, so that a chunk of a stream can be refused before it is computed.
        """
        self._open()
        # Blocks may be left half empty by each layer's owner; crowding uses them, so that the count of free slots decides.
        gone: list[int] = []
        while self._allotment.free < units * self.shape.layers:
            if self._grow():
                continue
            self._forget_oldest(units, gone, keep=())
        return gone

    def drop(self, units: Iterable[int], layer: int | None = None) -> None:
        """Forget `units`, of one layer or of all; those that are not held are passed over."""
        self._open()
        wanted = list(units)
        for one in range(self.shape.layers) if layer is None else (layer,):
            self._allotment.give(self._table.unset(one, wanted))

    def cut(self, end: int) -> None:
        """Forget the units from number `end` on, in all layers."""
        self._open()
        for layer in range(self.shape.layers):
            beyond = self._table.units(layer, end)
            if beyond:
                self.drop(beyond, layer)

    def units(self, layer: int) -> list[int]:
        """The units that a layer holds, ascending."""
        return self._table.units(layer)

    def group_of(self, layer: int, unit: int) -> int | None:
        """The group a unit of a layer was stored with, if any."""
        return self._table.group_of(layer, unit)

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._table.nbytes()

    def host_bytes(self) -> int:
        """Bytes of host memory taken."""
        return self._slabs.memory_bytes()

    def entry(self, layer: int, unit: int) -> Tensor:
        """[1, 2, G, P, D]: a unit where it lies on the host; read it after `settle`, and before it goes."""
        (slot,) = self._held(layer, [unit])
        return self._slabs.entry(slot, slot + 1)

    def settle(self) -> None:
        """Wait until all transfers have ended."""
        self._open()
        self._wire.settle()

    def counters(self) -> dict[str, float]:
        """Figures since the store was opened; waits for transfers under way.

        puts, fetches    calls
        copies_out, copies_in  runs of units that crossed the wire by one copy; a gather counts as one
        gathers          launches among `copies_in`
        bytes_out, bytes_in, seconds_out, seconds_in  what crossed, and how long the wire was busy
        disk_in          units that came from files
        units            units held, summed over the layers
        dropped          units forgotten to make room
        host_bytes, disk_bytes, index_bytes  memory taken on the host, in files, and on the device
        """
        return {
            **self._wire.counts,
            **self._wire.times(),
            "units": float(self._table.count()),
            "dropped": float(self._dropped),
            "host_bytes": float(self._slabs.memory_bytes()),
            "disk_bytes": float(self._slabs.disk_bytes()),
            "index_bytes": float(self.nbytes()),
        }

    def save(self, folder: str | Path) -> None:
        """Write all units to `folder`; see `mmaccel.policies.kv.store.save`."""
        self._open()
        self._wire.settle()
        files.save(self, Path(folder))

    def load(self, folder: str | Path, end: int = files.MOST) -> None:
        """Hold the units below `end` saved to `folder`, nothing else; or raise `StoreError` and leave all as it is."""
        self._open()
        shape = self.shape
        fresh = HostStore(
            layers=shape.layers, groups=shape.groups, tokens=shape.tokens, size=shape.size, dtype=shape.dtype,
            device=self.device, lanes=self.lanes, **self._options,  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            files.load(fresh, Path(folder), end)
        except BaseException:
            fresh.close()
            raise
        self._wire.settle()
        fresh._wire.settle()
        fresh._wire.counts, fresh._wire.seconds = self._wire.counts, self._wire.times()
        fresh._dropped = self._dropped
        self._wire.forget()
        self._slabs.close()
        self.__dict__.update(fresh.__dict__)

    def close(self) -> None:
        """Give back all memory and remove all files; a closed store serves nothing."""
        if not self._closed:
            self._wire.settle()
            self._wire.forget()
            self._slabs.close()
            self._table = Table(self.shape.layers, self.device)
            self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise StoreError("host store: it is closed; open another.")

    def _held(self, layer: int, units: Sequence[int]) -> list[int]:
        """Slots of units that the layer holds, all of them."""
        slots = self._table.look(layer, units)
        for unit, slot in zip(units, slots, strict=True):
            if slot < 0:
                told = f"layer {layer} does not hold unit {unit}; ask for units that it holds."
                raise StoreError(f"host store: {told}")
        return slots

    def _take(self, layer: int, units: list[int], groups: list[Group]) -> tuple[list[int], list[int]]:
        """Slots for `units`, and the units that had to go for them; when there is no room, nothing is taken."""
        slots, gone = list[int](), list[int]()
        try:
            for group, some in groupby(zip(groups, units, strict=True), key=itemgetter(0)):
                slots += self._room_for((layer, group), len(list(some)), units, gone)
        except StoreError:
            self._allotment.give(slots)
            raise
        return slots, gone

    def _room_for(self, owner: Hashable, count: int, units: list[int], gone: list[int]) -> list[int]:
        """`count` slots for an owner, who stores some of `units`; those forgotten for them are added to `gone`."""
        while True:
            full: StoreError | None = None
            slots = self._allotment.take(owner, count)
            try:
                if slots is None and self._grow():
                    continue
            except StoreError as error:
                full = error
            slots = self._allotment.take(owner, count, crowd=True) if slots is None else slots
            if slots is not None:
                return slots
            if full is not None:
                raise full
            self._forget_oldest(len(units), gone, keep=units)

    def _grow(self) -> bool:
        if not self._slabs.grow():
            return False
        self._allotment.grow(self._slabs.per)
        self._wire.forget()
        return True

    def _forget_oldest(self, units: int, gone: list[int], keep: Sequence[int]) -> None:
        """Drop the unit of the least number from all layers, for a chunk of `units`; raise where the spill does not say so,
        or such a chunk would not fit into an empty store."""
        fits = self.spill == "drop_oldest" and self._allotment.size >= units * self.shape.layers
        oldest = self._table.oldest(keep) if fits else None
        if oldest is None:
            raise self._full(units)
        self.drop([oldest])
        gone.append(oldest)
        self._dropped += 1

    def _full(self, units: int) -> StoreError:
        why = self._slabs.why_full(units * self.shape.layers if self.spill == "drop_oldest" else None)
        return StoreError(f"host store: full with {self._table.held()} frames or units held: {why}.")


def _look(row: Tensor, units: Tensor, slot: Tensor) -> None:
    slot.copy_(row[units.clamp(-1, len(row) - 1)])
