"""Which backend serves a device: what is usable and why not, and one choice, made once, by what attention costs there.

On CUDA "auto" is the backend whose blocks cost least on this device at the model's shape, measured when a recipe is
attached (in about ten seconds; kept on disk after that): dense attention, the blocks of each backend, the making of plans.
A cost is a line, seconds of a fixed part and seconds for each unit of work, through the times of a short and a long prompt
of one sequence. What can be known of a prompt beforehand (`SparsePattern.max_blocks_total`, its length) then tells whether
a pattern beats dense attention, without a look at the device. On the CPU the order of `PREFERENCE` decides, and nothing is
measured unless asked.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mmaccel.backends.measure import BLOCK, Costs, Line, Shape, measured_costs
from mmaccel.core.errors import RecipeError, UnknownName

BlockAttend = Callable[..., tuple[Tensor, Tensor]]

BACKENDS = {
    "reference": "mmaccel.backends.reference",
    "flex": "mmaccel.backends.flex",
    "triton": "mmaccel.backends.triton",
    "flash": "mmaccel.backends.flash",
}
"""Name to module; each has ``usable(device) -> str | None`` and ``op``, a custom operator of the flat schema."""

# Order in which "auto" looks where nothing is measured, and in which it measures; fastest first.
PREFERENCE = {"cuda": ("triton", "flash", "flex", "reference"), "cpu": ("reference", "flex")}
# Whose versions costs depend on.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "mmaccel")

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Choice:
    """The backend of an attached recipe, why it is this one, and what things cost there (None: not measured)."""

    backend: str
    why: str
    costs: Costs | None = None

    def pays(self, listed: float, causal: float, tokens: float) -> bool:
        """Whether a pattern that lists at most `listed` pairs of a layer beats dense attention over `causal` pairs.

        Both count the pairs of all heads and sequences; a plan for `tokens` tokens is made first. Dense wins a tie. True
        where nothing was measured.
        """
        if self.costs is None:
            return True
        sparse = self.costs.planned(self.costs.sparse[self.backend](listed), tokens)
        return sparse < self.costs.dense(causal)

    def describe(self) -> str:
        """The choice and its reason in one sentence."""
        return f"{self.backend} ({self.why})"


def usable(device: torch.device | str) -> dict[str, str | None]:
    """For each backend None when it can run on `device`, or else the reason in a few words."""
    return {name: _why_not(name, torch.device(device)) for name in BACKENDS}


def choose(device: torch.device | str) -> str:
    """The name that "auto" stands for on `device` where nothing is measured."""
    return next(_candidates(torch.device(device)))


def decide(
    name: str,
    device: torch.device | str,
    shape: Shape,
    *,
    plan: Callable[[int], Callable[[], Any]] | None = None,
    label: str = "",
    block: int = BLOCK,
    measure: bool | None = None,
    store: Store[Costs] | None = None,
    **how: Any,
) -> Choice:
    """The backend for `name` ("auto", or one by name, which stands) on `device`, for layers of `shape`.

    plan     tokens -> something that plans a layer of that many, timed with the rest; `label` tells it from others
    block    the edge of the pattern's blocks: what a backend does not serve in such blocks is not chosen
    measure  whether "auto" measures; by default on CUDA alone
    store    where costs are kept, the user's cache folder by default
    how      for `measured_costs`

    Raises as `get` does.
    """
    device = torch.device(device)
    if name != "auto":
        get(name, device)
        return Choice(name, "asked for by name")
    names = tuple(_candidates(device))
    if not (device.type == "cuda" if measure is None else measure):
        return Choice(names[0], f"the first of {', '.join(names)} on {device.type}; nothing was measured")
    if shape.dtype == torch.float64:
        return Choice("reference", "no other computes in float64")
    kept: Store[Costs] = store if store is not None else Store()
    tried = tuple(n for n in names if n != "reference") or names
    key = key_of(device, shape, tried, f"{label} in blocks of {block}")
    costs = kept.get(key)
    again = costs is not None
    if costs is None or not costs.sparse:
        costs = measured_costs(device, shape, {n: get(n, device) for n in tried}, plan, block=block, **how)
        kept.put(key, costs)
    if not costs.sparse:
        return Choice("reference", ", ".join(f"{n}: {reason}" for n, reason in costs.untried.items()), None)
    # What matters is the rate of long lists; the fixed part is paid by every backend.
    best = min(costs.sparse, key=lambda n: costs.sparse[n].each)
    return Choice(best, _reason(costs, best, shape, again), costs)


def get(name: str, device: torch.device | str) -> BlockAttend:
    """The operator of backend `name` ("auto": the one `choose` picks), with the schema of `ops.block_attend`.

    Raises `UnknownName` for a name that is not known, and `RecipeError` for one that cannot run on `device`.
    """
    device = torch.device(device)
    if name == "auto":
        name = choose(device)
    if name not in BACKENDS:
        raise UnknownName("backend", name, ("auto", *BACKENDS))
    reason = _why_not(name, device)
    if reason is not None:
        others = ", ".join(repr(n) for n, why in usable(device).items() if why is None)
        raise RecipeError(
            f"backend {name!r} cannot run on {device}: {reason}; choose 'auto' or one of {others}."
        )
    op: BlockAttend = import_module(BACKENDS[name]).op
    return op


def serving_extra(kernel: BlockAttend, device: torch.device) -> BlockAttend:
    """`kernel`, or the first operator on `device` that serves what `Part.extra` says, if it does not."""
    if getattr(kernel, "extra", True):
        return kernel
    return next(op for name in _candidates(device) if getattr(op := get(name, device), "extra", True))


def _candidates(device: torch.device) -> Iterator[str]:
    return (n for n in PREFERENCE.get(device.type, ("reference",)) if _why_not(n, device) is None)


def _reason(costs: Costs, best: str, shape: Shape, again: bool) -> str:
    def rate(line: Line) -> str:
        return f"{4 * shape.size / line.each / 1e12:.3g} TFLOP/s"

    told = [f"{name} {rate(line)}" for name, line in costs.sparse.items()]
    told += [f"{name} not tried: {why}" for name, why in costs.untried.items()]
    when = "measured before" if again else "measured"
    return f"{when}: blocks by {', '.join(told)}; dense {rate(costs.dense)}"


def _why_not(name: str, device: torch.device) -> str | None:
    try:
        module = import_module(BACKENDS[name])
    except ImportError as error:
        return f"it needs {error.name or error}"
    reason: str | None = module.usable(device)
    return reason


class Store(Generic[Kept]):
    """What was measured, on disk, one JSON file: costs, or what `of` makes of an entry; by device, shape, versions, and a
    label for what was planned. `path` is a file, or the name of one in the user's cache folder."""

    def __init__(self, path: Path | str = "costs.json", of: Callable[[Any], Any] = Costs.of) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = path if isinstance(path, Path) else Path(home) / "mmaccel" / path
        self._of = of

    def __len__(self) -> int:
        return len(self._all())

    def get(self, key: str) -> Kept | None:
        """The entry stored under `key`; None if there is none, or it cannot be read."""
        try:
            found: Kept = self._of(self._all()[key])
            return found
        except (KeyError, TypeError, AttributeError):
            return None

    def put(self, key: str, costs: Kept) -> None:
        """Keep `costs`; where nothing can be written, they are measured again next time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = {**self._all(), key: asdict(costs)}  # type: ignore[call-overload]
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, delete=False, encoding="utf-8"
            ) as file:
                json.dump(whole, file, indent=1)
            os.replace(file.name, self.path)
        except OSError:
            return

    def _all(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def key_of(device: torch.device, shape: Shape, backends: tuple[str, ...], label: str) -> str:
    """Text that names what costs depend on: device, shape and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sizes = f"{shape.heads} heads, {shape.groups} groups, size {shape.size}, {str(shape.dtype).removeprefix('torch.')}"
    versions = " ".join(f"{package} {version(package)}" for package in PACKAGES)
    return " | ".join((name, sizes, versions, "+".join(backends), label))


def version(package: str) -> str | None:
    """The version of an installed distribution; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
