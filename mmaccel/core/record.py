"""A session on disk: a folder of `session.json` and, under ``data-N/``, `film.safetensors` and the memory's own files.

`session.json` says the version, what model and memory it is of, and the size and the checksum of each file, which are
checked before anything is read, as its own checksum is; a store of units checks its own pieces while it reads them. How a
session gives way to another, whole or not at all, is in `folder.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core import folder, outside, saving
from mmaccel.core.errors import MmaccelError, ModelError, shown
from mmaccel.core.folder import FACTS, FILM, FORMAT, MEMORY, UNSEALED, VERSION, writable
from mmaccel.core.kv import StreamPolicy
from mmaccel.core.live import Film, Live
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.core.stream_adapter import StreamAdapter

CHECKSUM = "checksum"
STORE = "store"
"""Folders of a memory that check themselves."""
READ_BYTES = 1 << 24
READS = 5
"""How often a session is read at most, while another process saves to its folder."""
PIXELS = 1 << 25
"""Most pixels of a frame: 8K."""


def save(path: Path, seam: StreamAdapter, recipe: Recipe, live: Live) -> None:
    """Write a session into the folder `path`; raises `ModelError` where that cannot be."""
    writable(path)
    # Where a link leads to: the link stays, and what it led to is what is written anew.
    place = path.resolve()

    def write(part: Path) -> dict[str, Any]:
        (part / MEMORY).mkdir()
        live.state.save(part / MEMORY)
        saving.write_tensors(part / FILM, _tensors(live.film))
        names = [p.relative_to(place) for p in sorted(part.rglob("*")) if p.is_file()]
        files = {str(name): _print_of(place, name) for name in names}
        return sealed({**_facts(seam, recipe), **_sizes(live.film), "data": part.name, "files": files})

    try:
        folder.replace(place, write)
    except OSError as error:
        raise ModelError(
            f"save: {path} cannot be written ({outside.reason(error)}); give a path with room."
        ) from error


@dataclass(frozen=True)
class Facts:
    """A saved session that fits: where its tensors are, and what a stream is opened with."""

    data: Path
    told: dict[str, Any]
    opening: tuple[tuple[int, int], float | None, int, Tensor]


def recipe_of(path: Path) -> dict[str, Any]:
    """The recipe a session was saved with."""
    recipe: dict[str, Any] = _read(path)["recipe"]
    return recipe


def _read(where: Path) -> dict[str, Any]:
    told = folder.read(where)
    if told["version"] != UNSEALED or CHECKSUM in told:
        if CHECKSUM not in told:
            raise ModelError(f"{where}: {FACTS} has no {CHECKSUM}; the session is damaged, save it again.")
        if told != sealed(told):
            raise ModelError(
                f"{where}: {FACTS} is not what was written; the session is damaged, save it again."
            )
    return told


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-ready facts with the CRC-32 over all of them."""
    bare = {name: value for name, value in facts.items() if name != CHECKSUM}
    return {**bare, CHECKSUM: zlib.crc32(json.dumps(bare, sort_keys=True).encode())}


def load(where: Path, seam: StreamAdapter, recipe: Recipe, kv: StreamPolicy) -> Live:
    """The stream of a saved session, whose memory is `kv`; raises an `MmaccelError` when it does not fit.

    It is read again where another process saves to the folder meanwhile, which removes the files that were to be read.
    """
    for left in reversed(range(READS)):
        before = _mark(where)
        try:
            facts = _check(where, seam, recipe)
            live = Live.open(seam, kv, recipe.chunk, *facts.opening, facts.told.get("timed") is True)
            try:
                _fill(facts, live)
            except BaseException:
                live.state.close()
                raise
            return live
        except (MmaccelError, OSError) as error:
            if left and _mark(where) != before:
                continue
            if isinstance(error, MmaccelError):
                raise
            raise ModelError(
                f"{where} cannot be read ({outside.reason(error)}); save the session again."
            ) from error
    raise AssertionError("the last try returns or raises")


def _mark(where: Path) -> tuple[int, int, int] | None:
    """What another `session.json` has another of; None where there is none."""
    try:
        found = (where / FACTS).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _check(where: Path, seam: StreamAdapter, recipe: Recipe) -> Facts:
    """The facts of a saved session, its files there in full; raises `ModelError` when it does not fit."""
    told = _read(where)
    mine = _facts(seam, recipe)
    if told["model"] != mine["model"]:
        raise ModelError(f"{where} was saved from another model; load it with the model it was saved with.")
    if told["dtype"] != mine["dtype"]:
        kind = shown(told["dtype"])[1:-1]
        raise ModelError(
            f"{where} was saved from a model in {kind} and this one is in {mine['dtype']}; load the model in {kind}."
        )
    if _kept(told["recipe"].get("kv")) != _kept(recipe.kv):
        raise ModelError(
            f"{where} was saved with kv {shown(told['recipe'].get('kv'), 200)}; open the session with the same kv and "
            "fields."
        )
    # Before version 4 the files were in the folder itself.
    data = where / told.get("data", "")
    there = {str(p.relative_to(where)) for p in (data / MEMORY).rglob("*") if p.is_file()}
    if not {str((data / FILM).relative_to(where)), *there} <= set(told["files"]):
        raise ModelError(f"{where}: the list of files in {FACTS} is damaged; save the session again.")
    for name, known in told["files"].items():
        _check_file(where, name, known)
    for name, fits in SIZES.items():
        if name not in told or not fits(told[name]):
            raise ModelError(f"{where}: {name} in {FACTS} is damaged; save the session again.")
    hidden = seam.view.geometry.hidden
    marks = saving.read_tensors(data / FILM, {"marks": ((told["marks"], hidden), seam.dtype)}, seam.device)[
        "marks"
    ]
    height, width = told["size"]
    return Facts(data, told, ((height, width), told["fps"], told["unit"], marks))


def _kept(kv: Any) -> dict[str, Any] | None:
    """The fields of a memory that matter before a question, JSON-ready; a saved one's under their present names."""
    kv = policy("kv", kv)
    if not isinstance(kv, StreamPolicy):
        return None
    fields: dict[str, Any] = _plain(Recipe(kv=kv).to_dict()["kv"])
    return {name: value for name, value in fields.items() if name not in kv.asks}


def _print_of(where: Path, name: Path) -> list[int | None]:
    """Size and CRC-32 of a file; no checksum of what is a store's."""
    file = where / name
    if STORE in name.parts:
        return [file.stat().st_size, None]
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            total = zlib.crc32(piece, total)
    return [file.stat().st_size, total]


def _check_file(where: Path, name: str, known: Any) -> None:
    """Raise `ModelError` unless the file is the one that was written."""
    if not (isinstance(known, list) and len(known) == 2 and all(type(n) is int or n is None for n in known)):
        raise ModelError(f"{where}: the list of files in {FACTS} is damaged; save the session again.")
    file = where / name
    there = file.stat().st_size if file.is_file() else None
    state = ""
    if there != known[0]:
        state = "is missing" if there is None else f"has {there} bytes of {known[0]}"
    elif _print_of(where, Path(name)) != known:
        state = "is not what was written"
    if state:
        raise ModelError(f"{where}: {name} {state}; the session is damaged, save it again.")


def _fill(facts: Facts, live: Live) -> None:
    """Fill a stream that was just opened."""
    told, film, state = facts.told, live.film, live.state
    wanted: dict[str, Any] = {
        "spans": ((told["units"], 2), torch.long),
        "times": ((told["frames"],), torch.float64),
    }
    if told["pending"]:
        wanted["pending"] = ((told["pending"], 3, -1, -1), torch.uint8)
    found = saving.read_tensors(facts.data / FILM, wanted, torch.device("cpu"))
    film.spans = [(a, b) for a, b in found["spans"].tolist()]
    film.times = found["times"].tolist()
    ends = [0, *(first + count for first, count in film.spans)]
    unbroken = all(count > 0 and first == end for (first, count), end in zip(film.spans, ends, strict=False))
    rising = all(map(math.isfinite, film.times)) and film.times == sorted(film.times)
    if not (unbroken and ends[-1] <= len(film.times) and rising):
        raise ModelError(f"{facts.data}: spans or times in {FILM} are damaged; save the session again.")
    film.pending = found.get("pending")
    if film.timed:  # earlier versions placed every unit at the first clip's rate
        film.stream.places.told(0, [film.times[first] for first, _ in film.spans])
    film.raw = None if told["raw"] is None else (told["raw"][0], told["raw"][1])
    state.load(facts.data / MEMORY)
    if state.units() != told["units"]:
        raise ModelError(
            f"{facts.data}: the memory holds {state.units()} units of {told['units']}; it is damaged."
        )


def _is_size(told: Any) -> bool:
    """Whether it is a height and a width in pixels, of a frame that memory has room for."""
    whole = isinstance(told, list) and len(told) == 2 and all(type(n) is int and n > 0 for n in told)
    return whole and told[0] * told[1] <= PIXELS


def _is_rate(told: Any) -> bool:
    return isinstance(told, float) and 0 < told < math.inf


def _counts(least: int) -> Callable[[Any], bool]:
    return lambda told: type(told) is int and told >= least


SIZES: dict[str, Callable[[Any], bool]] = {
    "size": _is_size,
    "raw": lambda told: told is None or _is_size(told),
    "fps": lambda told: told is None or _is_rate(told),
    "unit": _counts(1),
    "frames": _counts(1),
    "units": _counts(0),
    "marks": _counts(0),
    "pending": _counts(0),
}
"""What is told of a film, and what it must be."""


def _facts(seam: StreamAdapter, recipe: Recipe) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": seam.signature(),
        "dtype": str(seam.dtype).removeprefix("torch."),
        "recipe": _plain(recipe.to_dict()),
    }


def _sizes(film: Film) -> dict[str, Any]:
    return {
        "size": list(film.size),
        "fps": None if film.fps is None else float(film.fps),
        "unit": film.unit,
        "timed": film.timed,
        "raw": None if film.raw is None else list(film.raw),
        "frames": len(film.times),
        "units": len(film.spans),
        "marks": film.marks.shape[0],
        "pending": 0 if film.pending is None else film.pending.shape[0],
    }


def _tensors(film: Film) -> dict[str, Tensor]:
    found = {
        "spans": torch.tensor(film.spans, dtype=torch.long).view(-1, 2),
        "times": torch.tensor(film.times, dtype=torch.float64),
        "marks": film.marks,
    }
    if film.pending is not None:
        found["pending"] = film.pending
    return found


def _plain(value: Any) -> Any:
    """As it is after a way through JSON."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        raise ModelError("recipe: it holds an object that cannot be saved; name its policies instead.")
    return value
