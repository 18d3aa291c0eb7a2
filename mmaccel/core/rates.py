"""Sizes of a model and rates of a device (counted, measured once, or known), from which `costs.py` predicts cost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmaccel.backends import measure, select
from mmaccel.backends.measure import AttentionShape, Bench, Costs, LinearCost, measure_costs, measure_seconds
from mmaccel.backends.select import CostFile
from mmaccel.core.memory.buffers import total_host_bytes
from mmaccel.core.prefill.sparse import planning_benchmark

STEP_LAYERS = 4, 12
"""Layers of two small models whose steps are timed. On CUDA a layer's seconds follow from the difference of the two steps:
what a step takes beside its layers cancels out."""
STEPS = 8
"""Steps timed together: on CUDA the first after a wait starts late."""
PINNED = 1 << 24
"""Bytes pinned at a time, as many as a store's slab has (16 MiB took 13.9 ms on one host, 64 MiB 22.5 on another)."""
WARM_S = 0.3
"""Seconds of products before one is timed: a device is slower once it is warm."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a model, from which costs are predicted.

    layers, heads, kv_heads, head_dim, hidden, inner  of the language model; `inner`: the MLP's size
    weights, layer_weights, head_weights, tower_weights  parameters: all, of the decoder layers, the LM head, the tower
    tower_layers, tower_width, tower_inner  of the vision tower; `patch_row`: most elements that a patch takes in it
    patches, tokens, pixels  of a unit, which is `frames_per_unit` frames
    limit  positions that the model has; `dtype`: of weights and KV cache
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    weights: int
    layer_weights: int
    head_weights: int
    tower_weights: int
    tower_layers: int
    tower_width: int
    tower_inner: int
    patch_row: int
    patches: int
    tokens: int
    pixels: int
    frames_per_unit: int
    limit: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


Plane = tuple[float, float, float, float, float, float]
"""Coefficients of 1, units and units squared, and of the same times layers."""


@dataclass(frozen=True, kw_only=True)
class MeasuredOverhead:
    """Corrections to predicted costs: measured minus predicted seconds of short sessions with a few layers of the model.

    There is one for reading the video, one for a question up to its first token, and one per step of an answer; each is a
    function of the numbers of layers and units (frames), as `fit_cost_plane` returns it. `first` is (fixed, per layer): the
    seconds that each of the first questions takes beyond later ones.
    """

    read: Plane
    question: Plane
    step: Plane
    first: tuple[tuple[float, float], ...]

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> MeasuredOverhead:
        """Recreate a `MeasuredOverhead` from its `dataclasses.asdict` form."""
        planes = [tuple(map(float, found[name])) for name in ("read", "question", "step")]
        first = tuple((float(base), float(each)) for base, each in found["first"])
        if any(len(plane) != 6 for plane in planes):
            raise ValueError("a plane has six coefficients")
        return cls(read=planes[0], question=planes[1], step=planes[2], first=first)  # type: ignore[arg-type]


class OverheadFile:
    """A file of `MeasuredOverhead`s of models of `sizes` on one device, by kind of run (`costs.overhead_key`). `label` says
    how the measured sessions were run; entries of another label are not found."""

    def __init__(
        self,
        device: torch.device,
        sizes: ModelSizes,
        label: str,
        store: CostFile[MeasuredOverhead] | None = None,
    ) -> None:
        self._store = CostFile("sessions.json", MeasuredOverhead.from_dict) if store is None else store
        shape = AttentionShape(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.dtype)
        told = ", ".join(f"{name} {value}" for name, value in vars(sizes).items())
        self._key = select.cost_key(device, shape, (select.default_backend(device),), f"{label} | {told}")

    def get(self, way: str) -> MeasuredOverhead | None:
        """Return the `MeasuredOverhead` stored under the key `way` (`costs.overhead_key`), or None."""
        return self._store.get(f"{self._key} | {way}")

    def put(self, way: str, made: MeasuredOverhead) -> None:
        """Store the `MeasuredOverhead` `made` under the key `way` (`costs.overhead_key`)."""
        self._store.put(f"{self._key} | {way}", made)


def fit_cost_plane(
    seconds: Mapping[tuple[int, int], float], grows: bool = True, least: int = 0, pairs: bool = False
) -> Plane:
    """Fit seconds as a function of the numbers of layers and of units (frames); return it for `predict_plane_seconds`.

    seconds  (layers, units) -> measured seconds, at two numbers of layers times two numbers of units
    grows    whether the seconds grow with the number of units; if not, the fit is a line in layers alone
    least    number of units at which the fit must not be below zero
    pairs    where a line in units is below zero at `least`, fit a parabola, as if the cost came from query-key pairs
    """
    (few, many), (short, long) = (sorted({at[side] for at in seconds}) for side in (0, 1))
    if not grows:
        base, layer = _line(few, many, *((seconds[n, short] + seconds[n, long]) / 2 for n in (few, many)))
        return base, 0.0, 0.0, layer, 0.0, 0.0
    begins, slopes, squares = list[float](), list[float](), list[float]()
    for n in (few, many):
        low, high, square = seconds[n, short], seconds[n, long], 0.0
        begin = high - (high - low) / (long - short) * (long - least)
        if begin < 0 and pairs:
            square = (high / long - low / short) / (long - short)
        begins.append(max(0.0, begin))
        slopes.append((high - begins[-1]) / (long - least) - square * long)
        squares.append(square)
    begins = begins if begins[0] <= begins[1] else [sum(begins) / 2] * 2
    sides = (_line(few, many, *some) for some in (begins, slopes, squares))
    own, more = ((base - unit * least, unit, square) for base, unit, square in zip(*sides, strict=True))
    return *own, *more


def _line(begin: int, end: int, low: float, high: float) -> tuple[float, float]:
    """Base and slope of the line from `low` at `begin` to `high` at `end`."""
    slope = (high - low) / (end - begin)
    return low - slope * begin, slope


def predict_plane_seconds(plane: Plane, layers: int, units: int) -> float:
    """Return the seconds of `plane` (from `fit_cost_plane`) at these numbers of layers and units, at least 0."""
    base, unit, square = (plane[n] + plane[n + 3] * layers for n in range(3))
    found = base + unit * units + square * units**2
    return max(found, 0.0) if base < 0 < unit else found


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of a device, from which costs are predicted.

    products  hidden size of a layer -> FLOP/s of its matrix products; `attend`: predicts the seconds of attention (`Costs`)
    copy      bytes/s of copies on the device, read plus written; `wire`: bytes/s from the host to the device
    layer     seconds to launch a decoder layer's operators; `few`: the same with all but attention in CUDA graphs
    memory    bytes of memory; `pin`: bytes/s at which host memory is pinned
    sessions  key of a kind of run (`costs.overhead_key`) -> its corrections measured in short sessions
    """

    name: str
    products: dict[int, float]
    attend: Costs
    copy: float
    wire: float
    layer: float
    few: float
    memory: int
    pin: float
    sessions: Mapping[str, MeasuredOverhead] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.name != "cpu"

    def matmul_flops_per_s(self, width: int) -> float:
        """Return the FLOP/s of the matrix products of layers of hidden size `width`, interpolated between measured sizes."""
        (low, slow), (high, fast) = sorted(self.products.items())
        share = (math.log(width) - math.log(low)) / (math.log(high) - math.log(low))
        return float(slow * (fast / slow) ** min(share, 1.0)) if share > 0 else slow * min(1.0, width / low)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> DeviceRates:
        """Recreate a `DeviceRates` from its `dataclasses.asdict` form."""
        products = {int(width): float(rate) for width, rate in found["products"].items()}
        rates = {name: float(found[name]) for name in ("copy", "wire", "layer", "few", "pin")}
        told = {way: MeasuredOverhead.from_dict(one) for way, one in found.get("sessions", {}).items()}
        parts = {"products": products, "attend": Costs.from_dict(found["attend"]), "sessions": told}
        return cls(**{**found, **rates, **parts})


def _hopper(name: str, copy: float, memory: int) -> DeviceRates:
    pairs = Costs(LinearCost(2e-4, 9.1e-13), {"triton": LinearCost(5e-4, 1.0e-12)}, LinearCost(1e-3, 9e-9))
    return DeviceRates(
        name=name, products={1280: 4.5e14, 3584: 6.4e14}, attend=pairs, copy=copy, wire=48e9, layer=4e-4, few=4e-4,
        memory=memory, pin=1.2e9,
    )  # fmt: skip


DEVICES = {"h200": _hopper("h200", 4.3e12, 150109880320), "h100": _hopper("h100", 3.0e12, 85017493504)}
"""Known ones, from bench/results: products and pairs of prefill_h200 (128k tokens in 8.8 s, 6.1 of them attention),
tower_h200 and sweep_h200 at heads of 128, the copy and the layer of steps_h200 and latency_7b_h200, the wire of
transfer_h200, the pinning of lab/LOG.md (13.9 ms for 16 MiB). `few` is taken for a plain layer's. An H100 computes alike,
and its memory has 3.35/4.8 of the rate."""


def measure_device(
    device: torch.device,
    sizes: ModelSizes,
    step: Callable[[int], Any],
    few: Callable[[int], Any],
    pattern: Any,
    store: CostFile[DeviceRates] | None = None,
    bench: Bench = measure_seconds,
) -> DeviceRates:
    """Return the rates of `device` for attention heads like the model's (`sizes`). They are read from the file `store`, or
    else measured in a few seconds and stored there. ``step(n)`` runs n small decoder layers on one row, by which the launch
    of a layer is timed; ``few(n)`` does so as a session does, with all but attention in CUDA graphs. `few`, and how long
    `pattern` takes to plan, are measured on CUDA only."""
    shape = AttentionShape(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.dtype)
    store = CostFile("rates.json", DeviceRates.from_dict) if store is None else store
    cuda = device.type == "cuda"
    backend = select.default_backend(device)
    key = select.cost_key(device, shape, (backend,), "rates by layers and slabs")
    found = store.get(key)
    if found is None:
        kernels = {backend: select.get_op(backend, device)}
        lengths = measure.LENGTHS if cuda else (1024, 2048)
        plan = planning_benchmark(pattern, shape, device) if cuda else None
        attend = measure_costs(device, shape, kernels, plan, lengths=lengths, bench=bench)
        found = DeviceRates(
            name=torch.cuda.get_device_name(device) if cuda else "cpu",
            products={
                w: _product(w, device, sizes.dtype, bench) for w in ((1024, 4096) if cuda else (256, 1024))
            },
            attend=attend,
            copy=_copy(device, device, bench),
            wire=(wire := _copy(torch.device("cpu"), device, bench)),
            layer=(layer := _layer(step, device, bench)),
            few=_layer(few, device, bench) if cuda else layer,
            memory=_memory(device),
            pin=_pin() if cuda else wire,
        )
        store.put(key, found)
    # What memory there is may have changed since: a container has another limit.
    return replace(found, memory=_memory(device))


def _product(width: int, device: torch.device, dtype: torch.dtype, bench: Bench) -> float:
    cuda = device.type == "cuda"
    rows = 8192 if cuda else 1024
    # Of random numbers: of ones a device takes less power, and its clock does not fall.
    x, weight = (torch.randn(n, width, device=device).to(dtype) for n in (rows, 4 * width))

    def product() -> Any:
        return torch.nn.functional.linear(x, weight)

    until = time.perf_counter() + WARM_S * cuda
    while time.perf_counter() < until:
        product()
        torch.cuda.synchronize(device)
    return 2 * rows * weight.numel() / bench(product, device)


def _layer(step: Callable[[int], Any], device: torch.device, bench: Bench) -> float:
    """Seconds to launch a decoder layer."""
    few, many = STEP_LAYERS
    if device.type != "cuda":
        return bench(lambda: step(few), device) / few
    taken = [bench(lambda n=n: [step(n) for _ in range(STEPS)], device) / STEPS for n in STEP_LAYERS]
    return max(taken[1] - taken[0], 0.1 * taken[1]) / (many - few)


def _copy(source: torch.device, device: torch.device, bench: Bench) -> float:
    """Bytes/s: of a copy on the device those read and those written, of one from the host those that cross."""
    cuda = device.type == "cuda"
    here = torch.ones(1 << (28 if cuda else 24), dtype=torch.uint8, device=source)
    here = here.pin_memory() if cuda and source.type == "cpu" else here
    there = torch.empty_like(here, device=device)
    sides = 2 if source == device else 1
    return sides * here.numel() / bench(lambda: there.copy_(here, non_blocking=True), device)


def _pin() -> float:
    """Bytes/s at which a host store's slabs are pinned; all are held, as the allocator would give one again."""
    taken, held = [], []
    for _ in range(5):
        began = time.perf_counter()
        held.append(torch.empty(PINNED, dtype=torch.uint8, pin_memory=True))
        taken.append(time.perf_counter() - began)
    return PINNED / statistics.median(taken)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_host_bytes()
