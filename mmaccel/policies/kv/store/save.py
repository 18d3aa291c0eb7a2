"""What a store holds, in a folder: safetensors files of bounded size, and a JSON file that tells what is in them.

Everything is checked before any of it is believed: version, shape, sizes, and a checksum of every piece.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmaccel.core import checkpoint_io, outside
from mmaccel.core.errors import StoreError, shown
from mmaccel.policies.kv.store.pinned_slabs import Shape

VERSION = 1
INDEX = "store.json"
FILE_BYTES = 256 * 2**20
MOST = 1 << 31
"""Units, and groups of them, are numbers below this."""


class Units(Protocol):
    """What is saved and loaded: a store of units (`HostStore`)."""

    shape: Shape
    device: torch.device

    def units(self, layer: int) -> list[int]: ...

    def group_of(self, layer: int, unit: int) -> int | None: ...

    def entry(self, layer: int, unit: int) -> Tensor: ...

    def put(
        self, layer: int, units: list[int], key: Tensor, value: Tensor, group: int | None, /
    ) -> list[int]: ...


def save(store: Units, folder: Path) -> None:
    """Write the units of `store` to `folder`; raises `StoreError` where that cannot be done."""
    pieces: list[dict[str, Any]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, piece in enumerate(_pieces(store)):
            layer, units = piece
            name = f"store-{number:05d}.safetensors"
            kept = torch.cat([store.entry(layer, unit) for unit in units])
            checkpoint_io.write_tensors(folder / name, {"units": kept})
            groups = [store.group_of(layer, unit) for unit in units]
            told = {"file": name, "layer": layer, "units": units, "groups": groups, "crc": _crc(kept)}
            pieces.append(told)
        index = {"version": VERSION, "shape": _shape(store), "pieces": pieces}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"host store: cannot write to {folder} ({error.strerror}); give another folder."
        ) from error


def load(store: Units, folder: Path, end: int) -> None:
    """Put what `save` wrote into `store`, which is empty; raises `StoreError` for anything that is not as it was written.

    Units are numbers below `end`.
    """
    try:
        index = outside.read_json(folder / INDEX, INDEX, StoreError, fix="save it again")
        if index["version"] != VERSION:
            raise StoreError(
                f"host store: {folder} is of version {shown(index['version'])} and this is version {VERSION}; save it again."
            )
        if index["shape"] != _shape(store):
            raise StoreError(
                f"host store: {folder} holds units of {shown(index['shape'], 120)} and the store is for {_shape(store)}; "
                "load it with the model and frame size it was saved with."
            )
        for piece in index["pieces"]:
            _check(store, piece, end)
            kept = _read(store, folder / piece["file"], piece)
            for unit, group, one in zip(piece["units"], piece["groups"], kept, strict=True):
                key, value = one.to(store.device)
                if store.put(piece["layer"], [unit], key, value, group):
                    # Whoever saved it does not know that some are no more.
                    raise StoreError(
                        f"host store: {folder} holds more than this host has room for; free memory, or load it on a host "
                        "with as much as the one it was saved on."
                    )
    except (OSError, KeyError, TypeError, ValueError, IndexError, SafetensorError) as error:
        raise StoreError(
            f"host store: {folder} is damaged or incomplete ({str(error)[:200]}); save it again."
        ) from error


def _pieces(store: Units) -> Iterator[tuple[int, list[int]]]:
    most = max(1, FILE_BYTES // store.shape.nbytes)
    for layer in range(store.shape.layers):
        units = store.units(layer)
        yield from ((layer, units[i : i + most]) for i in range(0, len(units), most))


def _check(store: Units, piece: dict[str, Any], end: int) -> None:
    """Raise `StoreError` where a number of a piece is of nothing."""
    groups = [group for group in piece["groups"] if group is not None]
    for name, value, most in (
        ("layer", [piece["layer"]], store.shape.layers),
        ("units", piece["units"], end),
        ("groups", groups, MOST),
    ):
        checkpoint_io.numbers(value, f"{INDEX}: {name}", most, StoreError)


def _read(store: Units, path: Path, piece: dict[str, Any]) -> Tensor:
    if path.name != piece["file"]:
        raise ValueError(f"{shown(piece['file'])} is not a file of a store")
    outside.regular(path, shown(path.name), StoreError, fix="save it again")
    with safe_open(path, framework="pt") as file:
        kept: Tensor = file.get_tensor("units")
    wanted = len(piece["units"]), *store.shape.unit
    if tuple(kept.shape) != wanted or kept.dtype != store.shape.dtype:
        raise ValueError(f"{path.name} holds {kept.dtype} {list(kept.shape)}")
    if _crc(kept) != piece["crc"]:
        raise ValueError(f"{path.name} is not what was written")
    return kept


def _shape(store: Units) -> dict[str, Any]:
    shape = store.shape
    return {
        "layers": shape.layers,
        "groups": shape.groups,
        "tokens": shape.tokens,
        "size": shape.size,
        "dtype": str(shape.dtype).removeprefix("torch."),
    }


def _crc(kept: Tensor) -> int:
    raw: Any = kept.contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw)
