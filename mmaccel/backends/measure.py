"""Measures the costs of dense and sparse attention and of planning on a device, and fits linear models to two lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import FULL, BlockLists, KeySpan, Part, prepare_part
from mmaccel.backends.ops.dense_attend import dense_attend

LIMIT = 10.0  # seconds that measuring may take
# Seconds a backend takes to compile, about; one for which there is no time is not tried.
STARTS = {"triton": 4.0, "flash": 6.0, "flex": 20.0}
LENGTHS = (4096, 16384)  # tokens of the two prompts that are timed
BLOCK = 64  # tokens of a block unless a pattern says otherwise
CYCLES = 2e9  # of a device in a second, about
AHEAD = 3.0  # times as long as a host launches a plan the device is kept busy before

Bench = Callable[..., float]
"""Runs something as often as it wants and says how many seconds one run takes."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention shape of one layer: query heads, key/value heads, head size, dtype."""

    heads: int
    groups: int
    size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LinearCost:
    """A linear cost model, in seconds for `work` units: ``fixed + each * work``."""

    fixed: float
    each: float

    def __call__(self, work: float) -> float:
        return self.fixed + self.each * work

    @classmethod
    def fit_two_points(cls, short: tuple[float, float], long: tuple[float, float]) -> LinearCost:
        """Fit a cost line through the points (work, seconds) of a short and a long run. If the short one took as long or
        longer, the line goes through 0 and the point of the long one."""
        (less, early), (more, late) = short, long
        each = (late - early) / (more - less)
        if each <= 0:
            return cls(0.0, late / more)
        return cls(max(early - each * less, 0.0), each)


@dataclass(frozen=True)
class Costs:
    """Measured attention costs on one device for one shape, in seconds per unit of work.

    dense     a unit is a causal query-key pair of one head
    sparse    backend -> cost, where a unit is a pair in a listed block, with separate lists for each head
    planning  making the plan of a layer; a unit is a token. On CUDA the device's time, as the host runs ahead
    untried   backend -> why it was not measured
    host      seconds of host time to launch a plan on CUDA, whatever its length
    """

    dense: LinearCost
    sparse: dict[str, LinearCost]
    planning: LinearCost = LinearCost(0.0, 0.0)
    untried: dict[str, str] = field(default_factory=dict)
    host: float = 0.0

    def predict_sparse_layer_s(self, attention: float, tokens: float) -> float:
        """Predict the seconds of a layer: planning for `tokens` tokens, then sparse attention of `attention` seconds."""
        return max(self.host, attention + self.planning(tokens))

    def scale_attention(self, factor: float) -> Costs:
        """Return these costs for heads `factor` times as large: attention costs in proportion, planning unchanged."""
        sparse = {name: replace(line, each=line.each * factor) for name, line in self.sparse.items()}
        return replace(self, dense=replace(self.dense, each=self.dense.each * factor), sparse=sparse)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Costs:
        """Rebuild a `Costs` from the dictionary that `asdict` makes of it."""
        sparse = {name: LinearCost(**line) for name, line in found["sparse"].items()}
        dense, planning = LinearCost(**found["dense"]), LinearCost(**found["planning"])
        return cls(dense, sparse, planning, dict(found["untried"]), float(found["host"]))


def measure_seconds(run: Callable[[], Any], device: torch.device, busy_s: float = 0.0) -> float:
    """Measure the seconds of `run`: the minimum of five runs after two warm-ups, by CUDA events on CUDA. On CUDA `device` is
    kept busy for `busy_s` seconds before each run, so that launch overhead within that time is not counted."""
    if device.type == "cuda" and device != torch.device("cuda", torch.cuda.current_device()):
        with torch.cuda.device(device):  # on whose stream events are recorded
            return measure_seconds(run, torch.device("cuda", torch.cuda.current_device()), busy_s)
    taken: list[float] = []
    for _ in range(7):
        if device.type != "cuda":
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if busy_s:
            torch.cuda._sleep(int(busy_s * CYCLES))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        taken.append(float(begin.elapsed_time(end)) / 1e3)
    return min(taken[2:])


def host_launch_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Measure the host's seconds to launch `run` on CUDA: the minimum of three after one warm-up; 0 on CPU."""
    if device.type != "cuda":
        return 0.0
    taken: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def measure_costs(
    device: torch.device,
    shape: AttentionShape,
    backends: Mapping[str, Callable[..., tuple[Tensor, Tensor]]],
    plan: Callable[[int], Callable[[], Any]] | None = None,
    *,
    bench: Bench = measure_seconds,
    clock: Callable[[], float] = time.perf_counter,
    limit: float = LIMIT,
    lengths: tuple[int, int] = LENGTHS,
    block: int = BLOCK,
) -> Costs:
    """Measure, within about `limit` seconds, dense attention, each backend on blocks of `block` tokens, and planning a layer
    by `plan(tokens)()`: at two prompt `lengths` in tokens, each run timed by `bench`, for layers of `shape`."""
    began = clock()
    tensors = {n: _tensors(shape, n, device) for n in lengths}
    scale = shape.size**-0.5

    def line(make: Callable[[int], tuple[float, Callable[[], Any]]]) -> LinearCost:
        (short, first), (long, second) = (make(n) for n in lengths)
        return LinearCost.fit_two_points((short, bench(first, device)), (long, bench(second, device)))

    def plans(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[LinearCost, float]:
        host = host_launch_seconds(second, device)
        more = {"busy_s": AHEAD * host} if host else {}
        early, late = (bench(one, device, **more) for one in (first, second))
        # What does not grow between two prompts does not grow beyond them.
        flat = late <= early
        ends = (lengths[0], early), (lengths[1], late)
        line = LinearCost(late, 0.0) if flat else LinearCost.fit_two_points(*ends)
        return line, host

    def dense(n: int) -> tuple[float, Callable[[], Any]]:
        return shape.heads * n * (n + 1) / 2, lambda: dense_attend(*tensors[n], scale)

    costs_dense = line(dense)
    costs_plan, host = (LinearCost(0.0, 0.0), 0.0) if plan is None else plans(*(plan(n) for n in lengths))
    found: dict[str, LinearCost] = {}
    untried: dict[str, str] = {}
    for name, kernel in backends.items():
        if found and clock() - began + STARTS.get(name, 0.0) > limit:
            untried[name] = (
                f"it takes about {STARTS[name]:.0f} s to start" if name in STARTS else "no time was left"
            )
            continue

        def blocks(n: int, kernel: Callable[..., Any] = kernel) -> tuple[float, Callable[[], Any]]:
            listed, part = build_nearest_blocks_part(n, shape.heads, device, block)
            made = prepare_part(kernel, part, *tensors[n][:2], block, block, 0)
            return listed * block**2, lambda: kernel(*tensors[n], *part.pack(), block, block, scale, 0, *made)

        try:
            found[name] = line(blocks)
        except Exception as error:  # whatever a compiler or a device may raise: another backend serves then
            untried[name] = f"it failed with {type(error).__name__}"
    return Costs(costs_dense, found, costs_plan, untried, host)


def _tensors(shape: AttentionShape, n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        drawn = torch.randn(1, n, heads, shape.size, generator=generator, device=device)
        return drawn.to(shape.dtype).transpose(1, 2)

    return draw(shape.heads), draw(shape.groups), draw(shape.groups)


def build_nearest_blocks_part(
    n: int, heads: int, device: torch.device, size: int = BLOCK
) -> tuple[int, Part]:
    """Build a plan part for benchmarks, in which each query block of `size` tokens lists the nearest eighth of the key
    blocks; return how many blocks it lists, and the part."""
    m = n // size
    block = torch.arange(m, device=device)
    count = (block + 1).clamp(max=max(1, m // 8))
    upto, none = count.cumsum(0), torch.zeros_like(count)
    index = torch.arange(int(upto[-1]), device=device) - (upto - block - 1).repeat_interleave(count)
    # Each head has lists of its own, and the last block of each is tested.
    begin = torch.arange(heads, device=device)[:, None] * len(index) + upto - count
    row = torch.stack([begin, *(t.expand_as(begin) for t in (count, none, count - 1, none))], -1)[None]
    pos = torch.arange(m * size, dtype=torch.int32, device=device).view(1, 1, -1)
    kind = torch.full((1, 1, m), FULL, dtype=torch.int8, device=device)
    lists = BlockLists(row, index.repeat(heads).to(torch.int32), kind)
    rows = pos.expand(1, heads, -1).contiguous()
    return heads * len(index), Part(rows, (KeySpan(pos, pos, pos, 0, 2**31 - 1, lists),))
