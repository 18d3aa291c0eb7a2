"""One attention layer at a model's shape: dense by the best kernels at hand, and patterns through the backends.

    python bench/attend.py --device cuda --out bench/results/attend_h200_202601.jsonl

Each row is one way of one case: the median of runs timed by CUDA events (by the clock on a CPU), the making of the plan
apart, the pairs in listed blocks, useful TFLOP/s (4 * head size for each of those pairs; of causal pairs for dense), and the
part of FlashAttention-2's dense rate that they are (`of_fa2`). Ways of a case see the same tensors. What cannot run is a row
too, with the reason. `--tokens` makes every case that long and its budgets shorter alike: a smoke test, no result.

`--beside FILE` times ways of others in the same run: FILE has a function ``ways(query, key, value, facts)`` that yields
(name, run), with facts of the case: its `name`, `tokens`, fields of the pattern as `sparse`, its `plan`, and where lines
are kept the `columns` and `diagonals` [B, H, K] that ours computes. Such a way says itself what it counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, Times, documented_parser, measurement_conditions

from mmaccel.backends import select
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import SparsePattern, attend_plan
from mmaccel.core.recipe import Recipe
from mmaccel.policies.sparse import VerticalSlash

FRAME = 196
EFFICIENT = 1 << 15
"""Tokens up to which the memory-efficient kernel is timed beside the others; it is the slowest of them by far."""

FA2 = ("dense_flash", "dense_flash_attn_2")  # PyTorch's, and the package's

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A pattern on a prompt.

    sparse   the pattern, budgets in tokens of the full length
    islands  runs of text between which the video is cut; a quarter of the tokens, or one token each
    lines    which diagonals are kept: "near", "frames" (at multiples of a frame), or those that the estimate finds
    like     the case whose time for the same pairs this one is held against
    """

    tokens: int
    sparse: dict[str, Any]
    islands: int = 0
    single: bool = False
    lines: str = ""
    like: str = ""


NEAR = {"name": "a_shape", "sink": 128, "window": 4096}
CASES = {
    "a_shape": Case(1 << 17, NEAR),
    "a_shape_128": Case(1 << 17, {**NEAR, "block": 128}),
    "vertical_slash_near": Case(
        1 << 17, {"name": "vertical_slash", "vertical": 1000, "slash": 6096}, lines="near"
    ),
    "vertical_slash_frames": Case(
        1 << 17, {"name": "vertical_slash", "vertical": 1000, "slash": 1024}, lines="frames"
    ),
    "vertical_slash_near_128": Case(
        1 << 17, {"name": "vertical_slash", "vertical": 1000, "slash": 6096, "block": 128}, lines="near"
    ),
    "grid": Case(1 << 20, {"name": "grid", "stride": "frame"}),
    "grid_128k": Case(1 << 17, {"name": "grid", "stride": "frame"}),
    **{
        f"{name}{'_single' if single else ''}": Case(
            1 << 17, {"name": name, **fields}, islands=32, single=single, like="a_shape"
        )
        for name, fields in (
            ("q_boundary", {"text": NEAR, "video": NEAR}),
            ("boundary_2d", {"default": NEAR}),
        )
        for single in (False, True)
    },
}
BUDGETS = ("sink", "window", "vertical", "slash")


def shortened(case: Case, tokens: int) -> Case:
    """The case at another length, its budgets in proportion."""
    share = tokens / case.tokens

    def fields(sparse: dict[str, Any]) -> dict[str, Any]:
        scaled = {k: max(4, int(v * share)) for k, v in sparse.items() if k in BUDGETS}
        inner = {k: fields(v) for k, v in sparse.items() if isinstance(v, dict)}
        return {**sparse, **scaled, **inner}

    islands = min(case.islands, tokens // 64)
    return Case(tokens, fields(case.sparse), islands, case.single, case.lines, case.like)


def layout_of(case: Case, frame: int, device: torch.device) -> TokenLayout:
    """Video in frames of `frame` tokens, cut by islands of text at even distances."""
    n = case.tokens
    place = torch.arange(n)
    text = torch.zeros(n, dtype=torch.bool)
    if case.islands:
        length = 1 if case.single else n // 4 // case.islands
        text = place % (n // case.islands) >= n // case.islands - length
    number = (~text).long().cumsum(0) - 1
    modality = torch.where(text, TEXT, VIDEO)[None].to(device)
    return TokenLayout.build(modality, frame=torch.where(text, -1, number // frame)[None].to(device))


def drawn(
    tokens: int, heads: tuple[int, int], size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, laid out as projections leave them."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(count: int) -> Tensor:
        shape = (1, tokens, count, size)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    return noise(heads[0]), noise(heads[1]), noise(heads[1])


@dataclass(frozen=True, kw_only=True)
class GivenDiagonals(VerticalSlash):
    """Estimates as ever, and then keeps the diagonals that the case names: the nearest, or those at multiples of `pitch`.

    At multiples, that is the nearest of them and the two diagonals on either side.
    """

    pitch: int = 0
    chosen: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def _strongest(self, columns: Tensor, diagonals: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        chosen, found = super()._strongest(columns, diagonals, at)
        given = given_diagonals(self.slash, self.pitch, columns.device)[: found.shape[2]]
        self.chosen.update(columns=chosen, diagonals=given.clamp(max=columns.shape[2] - 1).expand_as(found))
        return chosen, self.chosen["diagonals"]


@lru_cache(64)
def given_diagonals(slash: int, pitch: int, device: torch.device) -> Tensor:
    """Those that a case names, made once; none before the first, for to look for what is negative waits for the device."""
    given, near = torch.arange(slash, device=device), torch.arange(-2, 3, device=device)
    return (given[:, None] * pitch + near).flatten()[2:] if pitch else given


def pattern_of(case: Case, frame: int) -> SparsePattern:
    if not case.lines:
        return Recipe.load(sparse=case.sparse).sparse
    fields = {k: v for k, v in case.sparse.items() if k != "name"}
    return GivenDiagonals(**fields, pitch=frame if case.lines == "frames" else 0)


def timed(run: Run, device: torch.device, repeats: int, warmup: int) -> Times:
    """Seconds of `repeats` runs after `warmup`; by events on CUDA, where runs are queued one after another as the layers of
    a model are: a launch is made while the run before it computes."""
    for _ in range(warmup):
        run()
    repeats = max(repeats, 2)
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize(device)
        return Times(tuple(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return Times(tuple(taken))


def dense_ways(query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[str, Run]]:
    """Dense causal attention by each kernel there may be."""
    scale, group = query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]

    def sdpa(kind: SDPBackend, grouped: bool = True) -> Run:
        def run() -> Tensor:
            k, v = (x if grouped else x.repeat_interleave(group, 1) for x in (key, value))
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(
                    query, k, v, is_causal=True, scale=scale, enable_gqa=grouped and group > 1
                )

        return run

    yield "dense_flash", sdpa(SDPBackend.FLASH_ATTENTION)
    if query.is_cuda:
        yield "dense_cudnn", sdpa(SDPBackend.CUDNN_ATTENTION)
        if query.shape[2] <= EFFICIENT:
            # It knows no groups; of heads beyond 256 it is the only kernel that PyTorch has.
            yield "dense_efficient", sdpa(SDPBackend.EFFICIENT_ATTENTION, grouped=False)
        turned = [t.transpose(1, 2).contiguous() for t in (query, key, value)]
        with suppress(ImportError):
            from flash_attn.cute import flash_attn_func

            yield "dense_flash_attn_4", lambda: flash_attn_func(*turned, softmax_scale=scale, causal=True)
        with suppress(ImportError):
            from flash_attn import flash_attn_func as flash_attn_2

            yield "dense_flash_attn_2", lambda: flash_attn_2(*turned, softmax_scale=scale, causal=True)


def blocks_of(plan: AttentionPlan) -> int:
    """How many key blocks all heads of a plan list."""
    counts = [s.lists.list_lengths for p in plan.parts for s in p.spans]
    whole = plan.batch * plan.heads
    return sum(int(c.sum()) * whole // (c.shape[0] * c.shape[1]) for c in counts)


def portable(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The Triton backend without its kernels for Hopper, as on any other GPU."""
    from mmaccel.backends.triton.prefill import hopper_launch

    with mock.patch.object(hopper_launch, "_there", lambda device: False):
        return select.get_op("triton", arguments[0].device)(*arguments)


def kernels(names: Sequence[str], device: torch.device) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Backends by name; "portable" is `portable`."""
    return ((name, portable if name == "portable" else select.get_op(name, device)) for name in names)


def failed(log: Log, told: dict[str, Any], error: Exception) -> None:
    """Write down what could not run, and why."""
    torch.cuda.empty_cache() if torch.cuda.is_available() else None
    why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    log.row(**told, failed=why)
    print(f"{told['case']:24} {told['way']:20} {why[:80]}", flush=True)


def measured(
    log: Log, told: dict[str, Any], run: Run, how: dict[str, Any], pairs: float, size: int
) -> float | None:
    """Time `run`, write its row, and give its median; what fails is written with its reason."""
    try:
        times = timed(run, **how)
    except Exception as error:
        failed(log, told, error)
        return None
    rate = 4 * size * pairs / times.median / 1e12
    beside = {"of_fa2": rate / told["fa2_tflops"]} if "fa2_tflops" in told else {}
    log.row(**told, **times.row(), pairs=pairs, tflops=rate, **beside)
    shown = f"{times.median * 1e3:10.3f} ms {rate:7.3g} TFLOP/s" + "".join(
        f" {x:.2f} of FA2" for x in beside.values()
    )
    print(f"{told['case']:24} {told['way']:20} {shown}", flush=True)
    return times.median


def ways_of(path: str) -> Callable[..., Iterator[tuple[str, Run]]]:
    """The function `ways` of a Python file."""
    spec = importlib.util.spec_from_file_location("beside", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--beside: {path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Iterator[tuple[str, Run]]] = module.ways
    return found


def bench_dense(
    told: dict[str, Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    options: argparse.Namespace,
    how: dict[str, Any],
    log: Log,
) -> dict[str, float]:
    """Seconds of each dense kernel, and a row; on the heads of one group where all would take too long, times the groups,
    which is written down."""
    query, key, value = tensors
    (many, few), tokens, found = options.heads, query.shape[2], dict[str, float]()
    part = 1 if tokens > options.dense_all and few > 1 else few
    heads = many // few * part
    for way, run in dense_ways(query[:, :heads], key[:, :part], value[:, :part]):
        row = dict(told, way=way, kept=1.0, **({"groups_timed": part} if part < few else {}))
        taken = measured(log, row, run, how, tokens * (tokens + 1) / 2 * heads, options.size)
        found |= {} if taken is None else {way: taken * few / part}
    return found


def bench_case(name: str, case: Case, options: argparse.Namespace, log: Log) -> None:
    device, size, (many, few) = torch.device(options.device), options.size, options.heads
    dtype = getattr(torch, options.dtype)
    how = dict(device=device, repeats=options.repeats, warmup=options.warmup)
    frame = min(FRAME, max(8, case.tokens // 16))
    query, key, value = drawn(case.tokens, (many, few), size, dtype, device)
    layout = layout_of(case, frame, device)
    told = dict(case=name, tokens=case.tokens, heads=many, groups=few, size=size, dtype=options.dtype)
    causal = case.tokens * (case.tokens + 1) / 2
    dense = {} if options.no_dense else bench_dense(told, (query, key, value), options, how, log)
    fa2 = min((dense[way] for way in FA2 if way in dense), default=None)
    pattern = pattern_of(case, frame)
    held: list[AttentionPlan | None] = [None]

    def index() -> None:
        held[0] = None
        held[0] = pattern.plan(query, key, layout, layout)

    index_s = measured(log, dict(told, way="index", pattern=case.sparse), index, how, 0, size)
    plan = held[0]
    if plan is None or index_s is None:
        return

    def index_first() -> None:
        # What follows from the layout alone is made in a prompt's first layer, and kept for the rest.
        fresh = replace(layout)
        pattern.plan(query, key, fresh, fresh)

    measured(log, dict(told, way="index_first"), index_first, how, 0, size)
    listed = float(plan.count_listed_pairs().sum())
    blocks = blocks_of(plan)
    first: Tensor | None = None
    for way, kernel in kernels(options.backends, device):

        def run(kernel: Callable[..., Any] = kernel) -> Tensor:
            assert held[0] is not None
            out: Tensor = attend_plan(held[0], query, key, value, size**-0.5, kernel)[0]
            return out

        row = dict(
            told, way=way, kept=listed / (many * causal), blocks=blocks, index_s=index_s, like=case.like
        )
        row |= {"against_s": min(dense.values())} if dense else {}
        row |= {"fa2_tflops": 4 * size * many * causal / fa2 / 1e12} if fa2 else {}
        try:
            out = run()
            first = out if first is None else first
            row["apart"] = float((out - first).abs().max())
            del out
        except Exception:  # `measured` meets it again, and writes it down
            pass
        measured(log, row, run, how, listed, size)

        def whole(run: Run = run) -> None:
            index()
            run()

        measured(log, {**row, "way": f"{way} and index"}, whole, how, listed, size)
    if options.ways is not None:
        facts = dict(name=name, tokens=case.tokens, sparse=case.sparse, plan=plan)
        facts |= getattr(pattern, "chosen", {})
        try:
            for way, run in options.ways(query, key, value, facts):
                measured(log, dict(told, way=way), run, how, 0, size)
        except Exception as error:
            failed(log, dict(told, way="beside"), error)


def main(argv: Sequence[str] | None = None) -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--backends", nargs="+", help="default: all that run here; portable: not by Hopper's")
    parser.add_argument("--heads", nargs=2, type=int, default=(28, 4), metavar=("HEADS", "GROUPS"))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, help="this length for every case: a smoke test")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-dense", action="store_true")
    parser.add_argument("--dense-all", type=int, default=1 << 18, help="above: on one group's heads")
    parser.add_argument("--beside", metavar="FILE", help="ways of others to time too, see above")
    options = parser.parse_args(argv)
    options.ways = ways_of(options.beside) if options.beside else None
    if options.backends is None:
        runs = [n for n, why in select.why_unusable(options.device).items() if not why and n != "reference"]
        options.backends = runs if torch.device(options.device).type == "cuda" else ["reference"]
    log = Log(options.out, options.device)
    print(measurement_conditions(options.device))
    for name in options.cases:
        case = CASES[name]
        bench_case(name, shortened(case, options.tokens) if options.tokens else case, options, log)


if __name__ == "__main__":
    main()
