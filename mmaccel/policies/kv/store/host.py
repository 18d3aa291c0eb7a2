"""The memory of a stream on the host: keys and values by layer and unit, written as they leave the device, read again.

Saved, it is safetensors files of bounded size and a JSON file that tells what is in them; all of it is checked before any is
believed: version, shape, sizes, and a checksum of every file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmaccel.core import checkpoint_io, outside
from mmaccel.core.errors import RecipeError, StoreError, check_choice, check_least, shown
from mmaccel.core.kv import StreamPolicy
from mmaccel.core.registry import with_base_dir
from mmaccel.policies.kv.store.pinned_slabs import SLAB_BYTES, Shape, Slabs, SlotTable
from mmaccel.policies.kv.store.transfer import CudaLanes, Lanes, Mark, Wire, in_units

if TYPE_CHECKING:
    from mmaccel.core.adapter import Geometry
    from mmaccel.core.kv import Stream

Spill = Literal["refuse", "disk", "drop_oldest"]
"""When the host may hold no more: refuse, write to files, or forget the oldest units."""
VERSIONS = 1, 2
"""Of saved stores: those that can be read, the last is written. The first named groups of units that lay together."""
INDEX = "store.json"
FILE_BYTES = 256 * 2**20
MOST = 1 << 31
"""Units are numbers below this."""


@dataclass(frozen=True, kw_only=True)
class HostPolicy(StreamPolicy):
    """The fields of a memory that keeps units on the host.

    host_bytes  host memory at most; None: as much as the host can spare
    spill       what happens when it is used up: "refuse", "disk", or "drop_oldest", which forgets the oldest frames for
                good as new ones come, also where the `watch` that brings these fails later
    folder      where files go with spill "disk", in a YAML file counted from its folder; None: a temporary folder
    """

    spills: ClassVar[tuple[Spill, ...]] = get_args(Spill)

    host_bytes: int | None = None
    spill: Spill = "refuse"
    folder: str | None = None

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        return with_base_dir(fields, folder, "folder")

    def __post_init__(self) -> None:
        check_least(self, 0, "host_bytes")
        why = "" if "drop_oldest" in self.spills else ", for it keeps everything"
        check_choice(self.name, "spill", self.spill, self.spills, why)

    def store(self, stream: Stream, geometry: Geometry, device: torch.device) -> HostStore:
        """An empty store of a stream's units."""
        shape = Shape(geometry.layers, geometry.kv_heads, stream.unit, geometry.head_dim, stream.dtype)
        return HostStore(shape, device, cap=self.host_bytes, spill=self.spill, folder=self.folder)


class HostStore:
    """Keys and values of units (frames, or what a stream takes at a time) of all layers in the memory of the host.

    A unit of a layer is P tokens of G kv heads of size D, keys and values side by side, so that it crosses the wire as one
    piece. Units are numbered by the caller, from 0; unit numbers may have gaps and need not be the same in every layer. All
    methods but `counters`, `settle`, `save`, `load`, `close` and whatever touches the disk return before the transfers they
    began have ended; what is returned may be used on the stream that is current.

    device      where units come from and go to; its host memory is pinned on CUDA, and plain elsewhere
    cap         bytes of host memory at most; None: as much as the host can spare
    spill       what happens then: see `Spill`
    folder      where files go with spill="disk" (a temporary folder by default); removed by `close`
    slab_bytes  host memory is taken in pieces of this size
    lanes       what device work is issued through (for tests)

    Raises `StoreError` in one sentence when the store is full, closed, or asked for what it does not hold; whatever fails,
    nothing that was stored before is lost.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device | str,
        *,
        cap: int | None = None,
        spill: Spill = "refuse",
        folder: str | Path | None = None,
        slab_bytes: int = SLAB_BYTES,
        lanes: Lanes | None = None,
    ) -> None:
        for field, number in {**vars(shape), "slab_bytes": slab_bytes}.items():
            if field != "dtype" and number < 1:
                raise RecipeError(f"host store: {field} is {number}; give at least 1.")
        if cap is not None and cap < 0:
            raise RecipeError(f"host store: cap is {cap} bytes; give at least 0, or None.")
        check_choice("host store", "spill", spill, get_args(Spill))
        self.shape, self.device, self.spill = shape, torch.device(device), spill
        self._options = dict(cap=cap, spill=spill, folder=folder, slab_bytes=slab_bytes)
        on_cuda = self.device.type == "cuda"
        self.lanes = lanes or (CudaLanes(self.device) if on_cuda else Lanes())
        place = None if folder is None else Path(folder)
        self._slabs = Slabs(shape, on_cuda, slab_bytes, cap, spill == "disk", place)
        self._wire = Wire(shape, self._slabs, self.lanes, self.device)
        self._table = SlotTable(shape.layers, self.device)
        self._closed, self._dropped = False, 0

    # Units in and out.

    def put(self, layer: int, units: Sequence[int], key: Tensor, value: Tensor) -> list[int]:
        """Store `units` of a layer; key, value [G, n * P, D] (or with a batch of 1 before), unit after unit.

        Gives the units that were forgotten to make room, in all layers: none unless spill="drop_oldest". A unit that the
        layer holds already is refused; so are tensors of another size, and whatever does not fit: nothing is stored then.
        """
        self._open()
        key, value = (self.shape.side(name, t, len(units)) for name, t in (("key", key), ("value", value)))
        if len(set(units)) < len(units) or any(unit < 0 for unit in units):
            raise StoreError("host store: units to store are different numbers from 0 on; number each once.")
        for unit in units:
            if self._table.look(layer, unit) >= 0:
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
            gone = self._make_room(len(units), len(units), keep=units)
            self._wire.write(self._table.put(layer, units), packed)
        return gone

    @torch.no_grad()
    def fetch(self, layer: int, units: Sequence[int], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values, each [G, n * P, D] on the device, of `units` in the order they are asked for; units that are not
        held are refused.

        out     [2, G, n * P, D], what to write to: keys, then values; the last two dimensions dense
        """
        self._open()
        out = self.buffer(len(units)) if out is None else out
        self.lanes.compute.wait(self._wire.read([self._slot(layer, unit) for unit in units], out))
        return out[0], out[1]

    def gather(self, slot: Tensor, out: Tensor, places: Sequence[Tensor] = ()) -> tuple[Mark, Mark]:
        """See `Wire.gather`; what it brought is to be told to `crossed`."""
        self._open()
        return self._wire.gather(slot, out, places)

    def crossed(self, units: int) -> None:
        """Of what was gathered, `units` units of one layer came from the host."""
        self._wire.count(bytes_in=units * self.shape.nbytes)

    @property
    def indexed(self) -> bool:
        """Whether `gather` serves: all units are in memory."""
        return not self._slabs.files

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
        return self._make_room(units * self.shape.layers, units)

    def drop(self, units: Iterable[int], layer: int | None = None) -> None:
        """Forget `units`, of one layer or of all; those that are not held are passed over."""
        self._open()
        wanted = list(units)
        for one in range(self.shape.layers) if layer is None else (layer,):
            self._table.drop(one, wanted)

    def cut(self, end: int) -> None:
        """Forget the units from number `end` on, in all layers."""
        self._open()
        for layer in range(self.shape.layers):
            self._table.drop(layer, self._table.units(layer, end))

    def units(self, layer: int) -> list[int]:
        """The units that a layer holds, ascending."""
        return self._table.units(layer)

    def entry(self, layer: int, unit: int) -> Tensor:
        """[1, 2, G, P, D]: a unit where it lies on the host; read it after `settle`, and before it goes."""
        slot = self._slot(layer, unit)
        return self._slabs.entry(slot, slot + 1)

    # The store as a whole.

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._table.nbytes()

    def settle(self) -> None:
        """Wait until all transfers have ended."""
        self._open()
        self.lanes.wire.sync()

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
            "units": float((self._table.slot >= 0).sum()),
            "dropped": float(self._dropped),
            "host_bytes": float(self._slabs.memory_bytes()),
            "disk_bytes": float(self._slabs.disk_bytes()),
            "index_bytes": float(self.nbytes()),
        }

    def save(self, folder: Path) -> None:
        """Write all units to `folder`; raises `StoreError` where that cannot be done."""
        self.settle()
        pieces, most = list[dict[str, Any]](), max(1, FILE_BYTES // self.shape.nbytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for layer in range(self.shape.layers):
                held = self.units(layer)
                for units in (held[i : i + most] for i in range(0, len(held), most)):
                    name = f"store-{len(pieces):05d}.safetensors"
                    kept = torch.cat([self.entry(layer, unit) for unit in units])
                    checkpoint_io.write_tensors(folder / name, {"units": kept})
                    pieces.append({"file": name, "layer": layer, "units": units, "crc": _checksum(kept)})
            index = {"version": VERSIONS[-1], "shape": self.shape.facts(), "pieces": pieces}
            (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        except OSError as error:
            raise StoreError(
                f"host store: cannot write to {folder} ({error.strerror}); give another folder."
            ) from error

    def load(self, folder: Path, end: int = MOST) -> None:
        """Hold the units below `end` saved to `folder`, nothing else; or raise `StoreError` and leave all as it is."""
        self._open()
        fresh = HostStore(self.shape, self.device, lanes=self.lanes, **self._options)  # type: ignore[arg-type]
        try:
            fresh._read(folder, end)
        except BaseException:
            fresh.close()
            raise
        self.settle()
        fresh._wire.counts, fresh._wire.seconds = self._wire.counts, self._wire.times()
        fresh._dropped = self._dropped
        self.close()
        self.__dict__.update(fresh.__dict__)

    def close(self) -> None:
        """Give back all memory and remove all files; a closed store serves nothing."""
        if not self._closed:
            self.lanes.wire.sync()
            self._wire.forget()
            self._slabs.close()
            self._table = SlotTable(self.shape.layers, self.device)
            self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise StoreError("host store: it is closed; open another.")

    def _slot(self, layer: int, unit: int) -> int:
        slot = self._table.look(layer, unit)
        if slot < 0:
            raise StoreError(
                f"host store: layer {layer} does not hold unit {unit}; ask for units that it holds."
            )
        return slot

    def _make_room(self, slots: int, units: int, keep: Sequence[int] = ()) -> list[int]:
        """See that `slots` slots are free, for a chunk of `units` units; the units that were forgotten for them, none of
        `keep`. Raises where the spill does not let any go, or such a chunk would not fit into an empty store."""
        gone: list[int] = []
        while len(self._table.free) < slots:
            if self._slabs.grow():
                self._table.grow(self._slabs.per)
                self._wire.forget()
                continue
            needed, held = units * self.shape.layers, self._table.held()
            some = map(int, held if self.spill == "drop_oldest" else ())
            old = next((unit for unit in some if unit not in keep), None)
            if old is None or self._table.size < needed:
                why = self._slabs.why_full(needed if self.spill == "drop_oldest" else None)
                raise StoreError(f"host store: full with {len(held)} frames or units held: {why}.")
            self.drop([old])
            gone.append(old)
            self._dropped += 1
        return gone

    def _read(self, folder: Path, end: int) -> None:
        """Put what `save` wrote into an empty store; raises `StoreError` for anything that is not as it was written."""
        try:
            index = outside.read_json(folder / INDEX, INDEX, StoreError, fix="save it again")
            if index["version"] not in VERSIONS:
                raise StoreError(
                    f"host store: {folder} is of version {shown(index['version'])} and this is version {VERSIONS[-1]}; save "
                    "it again."
                )
            if index["shape"] != self.shape.facts():
                raise StoreError(
                    f"host store: {folder} holds units of {shown(index['shape'], 120)} and the store is for "
                    f"{self.shape.facts()}; load it with the model and frame size it was saved with."
                )
            for piece in index["pieces"]:
                for name, some, most in (
                    ("layer", [piece["layer"]], self.shape.layers),
                    ("units", piece["units"], end),
                ):
                    checkpoint_io.numbers(some, f"{INDEX}: {name}", most, StoreError)
                kept = self._read_file(folder / piece["file"], piece)
                for unit, (key, value) in zip(piece["units"], kept, strict=True):
                    if self.put(piece["layer"], [unit], key.to(self.device), value.to(self.device)):
                        # Whoever saved it does not know that some are no more.
                        raise StoreError(
                            f"host store: {folder} holds more than this host has room for; free memory, or load it on a "
                            "host with as much as the one it was saved on."
                        )
        except (OSError, KeyError, TypeError, ValueError, IndexError, SafetensorError) as error:
            raise StoreError(
                f"host store: {folder} is damaged or incomplete ({str(error)[:200]}); save it again."
            ) from error

    def _read_file(self, path: Path, piece: Mapping[str, Any]) -> Tensor:
        if path.name != piece["file"]:
            raise ValueError(f"{shown(piece['file'])} is not a file of a store")
        outside.regular(path, shown(path.name), StoreError, fix="save it again")
        with safe_open(path, framework="pt") as file:
            kept: Tensor = file.get_tensor("units")
        if kept.shape != (len(piece["units"]), *self.shape.unit) or kept.dtype != self.shape.dtype:
            raise ValueError(f"{path.name} holds {kept.dtype} {list(kept.shape)}")
        if _checksum(kept) != piece["crc"]:
            raise ValueError(f"{path.name} is not what was written")
        return kept


def _checksum(kept: Tensor) -> int:
    raw: Any = kept.contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw)
