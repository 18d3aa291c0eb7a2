"""Chooses the attention backend for a device: which are usable, why others are not, and which is fastest by measured costs.

On CUDA "auto" is the backend whose blocks cost least on this device at the model's shape, measured when a recipe is attached
(about ten seconds, then cached on disk): dense attention, blocks of each backend, planning. A cost is linear, fixed seconds
plus seconds per unit of work, fitted to a short and a long prompt. Bounds known on the host before planning
(`SparsePattern.max_blocks_total`, the length) then decide whether a pattern beats dense attention, without a device
synchronization. On CPU the first usable backend of `PREFERENCE` is taken, and nothing is measured unless asked.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mmaccel.backends.measure import BLOCK, AttentionShape, Costs, LinearCost, measure_costs
from mmaccel.core.errors import RecipeError, UnknownName

BlockAttend = Callable[..., tuple[Tensor, Tensor]]

BACKENDS = {
    "reference": "mmaccel.backends.reference",
    "flex": "mmaccel.backends.flex",
    "triton": "mmaccel.backends.triton",
    "flash": "mmaccel.backends.flash",
}
"""Name to module; each has ``op``, a custom operator of the flat schema, and ``why_unusable(device) -> str | None`` unless
it runs everywhere."""

# Order in which "auto" looks where nothing is measured, and in which it measures; fastest first.
PREFERENCE = {"cuda": ("triton", "flash", "flex", "reference"), "cpu": ("reference", "flex")}
# Whose versions costs depend on.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "mmaccel")

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class BackendChoice:
    """The backend chosen for a recipe, why, and its measured costs (None: not measured)."""

    backend: str
    why: str
    costs: Costs | None = None

    def beats_dense(self, listed: float, causal: float, tokens: float) -> bool:
        """Whether a pattern that lists at most `listed` pairs is faster than dense attention over `causal` pairs of a layer.

        Both count pairs over all heads and sequences; planning for `tokens` tokens is included. Dense wins ties. True if
        nothing was measured.
        """
        if self.costs is None:
            return True
        sparse = self.costs.predict_sparse_layer_s(self.costs.sparse[self.backend](listed), tokens)
        return sparse < self.costs.dense(causal)

    def describe(self) -> str:
        """The chosen backend and the reason for it, in one sentence."""
        return f"{self.backend} ({self.why})"


def why_unusable(device: torch.device | str) -> dict[str, str | None]:
    """Return for each backend name None if it can run on `device`, else the reason as a phrase."""
    return {name: _why_not(name, torch.device(device)) for name in BACKENDS}


def default_backend(device: torch.device | str) -> str:
    """Return the name of the backend that "auto" means on `device` without measurements."""
    return next(_candidates(torch.device(device)))


def resolve_backend(
    name: str,
    device: torch.device | str,
    shape: AttentionShape,
    *,
    plan: Callable[[int], Callable[[], Any]] | None = None,
    label: str = "",
    block: int = BLOCK,
    measure: bool | None = None,
    store: CostFile[Costs] | None = None,
    **how: Any,
) -> BackendChoice:
    """Choose the backend for `name` ("auto", or a backend's name) on `device`, for layers of `shape`.

    plan     tokens -> a function that plans a layer of that length, to be timed; `label` identifies it
    block    block size of the pattern: backends that do not support it are not chosen
    measure  whether "auto" measures; by default only on CUDA
    store    cache of measured costs; by default a file in the user's cache folder
    how      further arguments of `measure_costs`

    Raises as `get_op` does.
    """
    device = torch.device(device)
    if name != "auto":
        get_op(name, device)
        return BackendChoice(name, "asked for by name")
    if not (device.type == "cuda" if measure is None else measure):
        return BackendChoice(
            default_backend(device), f"the first that runs on {device.type}; nothing was measured"
        )
    if shape.dtype == torch.float64:
        return BackendChoice("reference", "no other computes in float64")
    names = tuple(_candidates(device))
    kept: CostFile[Costs] = store if store is not None else CostFile()
    tried = tuple(n for n in names if n != "reference") or names
    key = cost_key(device, shape, tried, f"{label} in blocks of {block}")
    costs = kept.get(key)
    again = costs is not None
    if costs is None or not costs.sparse:
        costs = measure_costs(device, shape, {n: get_op(n, device) for n in tried}, plan, block=block, **how)
        kept.put(key, costs)
    if not costs.sparse:
        return BackendChoice(
            "reference", ", ".join(f"{n}: {reason}" for n, reason in costs.untried.items()), None
        )
    # What matters is the rate of long lists; the fixed part is paid by every backend.
    best = min(costs.sparse, key=lambda n: costs.sparse[n].each)
    return BackendChoice(best, _reason(costs, best, shape, again), costs)


def get_op(name: str, device: torch.device | str) -> BlockAttend:
    """Return the `block_attend` operator of the backend `name`; "auto": of `default_backend(device)`.

    Raises `UnknownName` for an unknown name, and `RecipeError` for a backend that cannot run on `device`.
    """
    device = torch.device(device)
    if name == "auto":
        name = default_backend(device)
    if name not in BACKENDS:
        raise UnknownName("backend", name, ("auto", *BACKENDS))
    reason = _why_not(name, device)
    if reason is not None:
        others = ", ".join(repr(n) for n, why in why_unusable(device).items() if why is None)
        raise RecipeError(
            f"backend {name!r} cannot run on {device}: {reason}; choose 'auto' or one of {others}."
        )
    op: BlockAttend = import_module(BACKENDS[name]).op
    return op


def with_extended_support(kernel: BlockAttend, device: torch.device) -> BlockAttend:
    """Return `kernel` if it supports `Part.needs_extensions`, else the kernel of the first backend on `device` that does."""
    if getattr(kernel, "extra", True):
        return kernel
    return next(op for name in _candidates(device) if getattr(op := get_op(name, device), "extra", True))


def _candidates(device: torch.device) -> Iterator[str]:
    return (n for n in PREFERENCE.get(device.type, ("reference",)) if _why_not(n, device) is None)


def _reason(costs: Costs, best: str, shape: AttentionShape, again: bool) -> str:
    def rate(line: LinearCost) -> str:
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
    if BACKENDS[name] == BACKENDS["reference"]:  # runs everywhere
        return None
    return module.why_unusable(device)  # type: ignore[no-any-return]


class CostFile(Generic[Kept]):
    """A JSON file that caches measurements, so that a device is measured once: keyed by device, shape, versions and label.
    `path` is the file, or its name in the user's cache folder; `of` rebuilds an entry from its JSON mapping (default:
    `Costs`)."""

    def __init__(self, path: Path | str = "costs.json", of: Callable[[Any], Any] = Costs.from_dict) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = path if isinstance(path, Path) else Path(home) / "mmaccel" / path
        self._of = of

    def __len__(self) -> int:
        return len(self._all())

    def get(self, key: str) -> Kept | None:
        """The measured costs stored under `key`; None if there are none or they cannot be read."""
        try:
            found: Kept = self._of(self._all()[key])
            return found
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def put(self, key: str, costs: Kept) -> None:
        """Store measured costs under `key`; does nothing if the file cannot be written."""
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


def cost_key(device: torch.device, shape: AttentionShape, backends: tuple[str, ...], label: str) -> str:
    """Cache key of all that measured costs depend on: device (and threads of a CPU), shape, versions, backends, `label`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if device.type == "cpu":
        name += f" {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    sizes = f"{shape.heads} heads, {shape.groups} groups, size {shape.size}, {str(shape.dtype).removeprefix('torch.')}"
    versions = " ".join(f"{package} {package_version(package)}" for package in PACKAGES)
    return " | ".join((name, sizes, versions, "+".join(backends), label))


def package_version(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
