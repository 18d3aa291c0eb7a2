"""Compile the Triton kernels for GPUs that need not be there: ``python -m tests.backends.compiled [sm_90 ...]``.

The package's own launches are made on tensors of the CPU, and each stops at what it compiled. Prints a JSON object for each
kernel of each way. `--only GROUP ...` takes some groups, `--once` each kernel in its first way, `--list` names them all.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mmaccel.backends.ops import clusters
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import BlockLists, KeySpan, Part
from mmaccel.backends.ops.block_lists import FIELDS
from mmaccel.backends.ops.layer_ops import SeparateKVCaches
from mmaccel.backends.ops.operator import ARCHITECTURES, Architecture, DeviceLimits
from mmaccel.backends.triton import decode, delta, experts, pointwise, stream
from mmaccel.backends.triton.prefill import attend, estimate, hopper_launch, lists
from mmaccel.backends.triton.prefill import lines as line_kernels
from mmaccel.backends.triton.prefill.kernel import SplitListPieces

PROCESSORS, MEMORY = 132, 140 << 30
S, FAR, N, C, E, WIDE = 512, 2**31 - 1, 4096, 196, 3584, 18944
BF16, INT = torch.bfloat16, torch.int32


class Elsewhere:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, row: Architecture) -> None:
        nvidia = row.name.startswith("sm_")
        self.name = row.name
        self.target = GPUTarget("cuda", int(row.name[3:]), 32) if nvidia else GPUTarget("hip", row.name, 64)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str = "") -> int:
        return 0


@contextmanager
def as_on(row: Architecture, memory: int = MEMORY) -> Iterator[None]:
    """Within, tensors of the CPU are launched on as on a device of this architecture, with so many bytes of memory."""
    there = DeviceLimits(row.shared, row.resident, row.columns, PROCESSORS, memory)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", Elsewhere(row)))
        stack.enter_context(mock.patch.object(operators, "find_device_limits", lambda device: there))
        stack.enter_context(
            mock.patch.object(hopper_launch, "_there", lambda device: "hopper" not in row.lacks)
        )
        stack.enter_context(mock.patch.object(operators, "why_triton_unusable", lambda device: None))
        yield


@contextmanager
def stopped(compiles: bool, known: Container[str] = ()) -> Iterator[list[tuple[str, Any]]]:
    """Within, a launch only compiles its kernel, if that is not `known`: (module.kernel, what was compiled) of each."""
    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def stop(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        name = f"{self.fn.__module__.rsplit('.', 1)[1]}.{self.fn.__name__}"
        if name not in known:
            found.append((name, run(self, *args, grid=grid, warmup=True, **named) if compiles else None))

    with mock.patch.object(JITFunction, "run", stop):
        yield found


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes in one way; stack, registers and instructions as its machine code has them.

    products  instructions of the matrix units
    copies    instructions that copy to shared memory beside the computation
    wide      loads and stores of 16 bytes from and to memory, of `stores`
    stack     bytes a thread spills to memory
    """

    architecture: str
    way: str
    kernel: str
    shared: int
    warps: int
    products: int
    copies: int
    wide: tuple[int, int]
    stores: int
    stack: int
    registers: int

    @classmethod
    def of(cls, architecture: str, way: str, name: str, kernel: Any) -> Compiled:
        first = architecture, way, name, kernel.metadata.shared, kernel.metadata.num_warps
        if "ptx" not in kernel.asm:
            text = kernel.asm["amdgcn"]
            stack, registers = (
                max(map(int, re.findall(rf"\.{field}:\s*(\d+)", text)))
                for field in ("private_segment_fixed_size", "vgpr_count")
            )
            stores = len(re.findall(r"\b(?:global|buffer)_store_", text))
            return cls(*first, text.count("v_mfma"), 0, (0, 0), stores, stack, registers)
        ptx = kernel.asm["ptx"]
        products = len(re.findall(r"\b(?:(?:wgmma\.mma_async|mma)\.sync|tcgen05\.mma)\b", ptx))
        asynchronous = r"cp\.async\.c\S*\s+\[[^\]]*\], \[[^\]]*\], 0x10|cp\.async\.bulk\.tensor"
        copies = len(re.findall(asynchronous, ptx))
        loads, stores = (re.findall(rf"{kind}\.global\S*", ptx) for kind in ("ld", "st"))
        wide = tuple(sum("v2.b64" in one for one in some) for some in (loads, stores))
        return cls(*first, products, copies, wide, len(stores), *_used(kernel.asm["cubin"]))


def _used(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack and registers of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", told)[-1]), int(re.findall(r"REG:(\d+)", told)[-1])


def blank(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor that is never read: its memory is not touched."""
    return torch.empty(size, dtype=dtype)


def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers that a launch may read on the host."""
    return torch.zeros(size, dtype=dtype)


def attended(
    dtype: torch.dtype = BF16,
    block: int = 64,
    heads: int = 28,
    size: int = 128,
    runs: bool = False,
    extra: bool = False,
    narrow: bool = False,
    placed: bool = False,
    chunk: int | None = None,
) -> None:
    """A part of two spans; `heads` have lists of their own, of blocks or of `runs` of them. `placed`: rows of a prompt."""
    query, key = (blank(1, S, h, size, dtype=dtype).transpose(1, 2) for h in (28, 4))
    rows, row = zeros(1, heads, S, dtype=INT), zeros(1, heads, S // block, 5)
    lists = BlockLists(row, None if runs else rows[0, 0], row[..., 0].char())
    first, second = (KeySpan(rows, rows, rows, lo, hi, lists) for lo, hi in ((0, FAR), (5, 7)))
    if extra:
        second = replace(second, bias=rows.float(), key=key[:, :, :64], value=key[:, :, :64])
    part = Part(rows, (first, second), sinks=4 * narrow, edge=-64 if narrow else None)
    attend.block_attend(query, key, key, *part.pack(), block, block, 0.1, S * placed, chunk=chunk)


def decoded(n: int, dtype: torch.dtype = BF16, size: int = 128, tree: bool = False) -> None:
    """Attention of a decode step at the shape of a 7B model."""
    query, cache = blank(1, n, 28, size, dtype=dtype).transpose(1, 2), blank(1, 4, N, size, dtype=dtype)
    decode.decode_attend(query, cache, cache, zeros(1, n), 0.1, zeros(n) if tree else None)


def each(n: int, dtype: torch.dtype = BF16) -> None:
    """The same of eight sequences with a cache each; they are entered in bfloat16, turned alone elsewhere."""
    query, home, columns = blank(8, n, 28, 128, dtype=dtype), blank(1, 4, 1, 128, dtype=dtype), zeros(8, n)
    caches = SeparateKVCaches([], home, zeros(8, 4))
    decode.decode_attend_each(query.transpose(1, 2), caches, columns, 0.1)
    weight, turn = [blank(w, E) for w in WEIGHTS["qkv"]], blank(2, 8, n, 128, dtype=dtype)
    if dtype == BF16:
        some = blank(8 * n, E), weight, [], None, squares(8 * n), 1e-6
        decode.qkv_rope_rows_each(*some, turn, columns, caches)
    decode.rope_rows_each(blank(8, n, 36 * 128, dtype=dtype), *turn, columns, columns, caches)


WEIGHTS = {"qkv": [E, 512, 512], "o": [E], "up": [WIDE] * 2, "down": [E]}


def projected(count: int, kind: str) -> None:
    """The product of one of the weights of a 7B model's layer, after its norm."""
    K = WIDE if kind == "down" else E
    gain = blank(K) if kind in ("qkv", "up") else None
    bias = [blank(w) for w in WEIGHTS[kind]] if kind == "qkv" else []
    residual = blank(count, E) if kind in ("o", "down") else None
    weight = [blank(w, K) for w in WEIGHTS[kind]], bias, gain, 1e-6, residual
    decode.project_rows(blank(count, K), *weight, kind == "up")


def squares(count: int) -> Tensor:
    """What the product before a norm leaves for it."""
    return blank(count, 224 if count <= decode.FEW else 112, dtype=torch.float32)


def passed(count: int, kind: str) -> None:
    """The same of what goes on to a norm, and of what comes to one."""
    if kind == "up":
        decode.project_rows(blank(count, E), [blank(WIDE, E)] * 2, (), None, 1e-6, None, True, squares(count))
    else:
        decode.residual_linear(blank(count, WIDE), blank(E, WIDE), [], blank(count, E), blank(E))


def entered(count: int) -> None:
    """Queries, keys and values of a 7B model's layer, turned and written."""
    weight, cache = [blank(w, E) for w in WEIGHTS["qkv"]], blank(1, 4, N, 128)
    decode.qkv_rope_rows(
        blank(count, E), weight, [blank(len(w)) for w in weight], None, squares(count), 1e-6,
        blank(2, 1, count, 128), zeros(1, count), cache, cache,
    )  # fmt: skip


def turned() -> None:
    angles, cache, columns = blank(1, N, 128), blank(1, 4, N, 128), zeros(1, 2)
    decode.rope_rows(blank(1, 2, 36 * 128), angles, angles, columns, columns, cache, cache)


def carried() -> None:
    x = blank(1, 8256), blank(1, 4096), blank(8192, 4), blank(32), blank(32), blank(128), 1e-6, zeros(1, 4)
    delta.deltanet_rows(*x, blank(1, 416, 8256), blank(1, 32, 128, 128, dtype=torch.float32))
    delta.convolve_silu(blank(1, S, 8192), blank(8192, 4))
    experts.expert_mlp(blank(1, E), zeros(1, 8), blank(1, 8), blank(128, 1536, E), blank(128, E, 768))


def indexed() -> None:
    """All that makes plans and lists."""
    query, key = (blank(1, n, h, 128).transpose(1, 2) for n, h in ((64, 28), (N, 4)))
    at, of = zeros(1, 64), zeros(1, 28, 1)
    numbers = zeros(3, 1, N, dtype=INT)
    row, begin, few = numbers[0], zeros(1, C + 1, dtype=INT), zeros(1, 64, dtype=INT)
    estimate.line_weights(query, key, None, at, None, N, False)
    order = row, begin, few, torch.zeros(1, 1024), at[0, :1]
    estimate.choose_grid_lines(query, key, None, at, None, N, False, order, "contrast", False)
    scores = torch.zeros(1, 28, N)
    line_kernels.choose_lines(scores, scores, at[:, 0], 1000, 1024)
    estimate.score_strides(torch.zeros(2, 1, 28, N), at[:, 0], 8, 1024, "contrast")
    lines, told = zeros(1, 28, 1000), zeros(1, 28, 9, 5)
    line_kernels.split_columns(row, lines, lines, N, 64)
    SplitListPieces.split([told[..., 1], told[:, :1, :, 1]], 1, 28, 9, 1, N, 264)
    lists.listed_pairs(told, begin[0, :9], zeros(1, 1, 9 * 64, dtype=INT), row[None], 64, 64)
    lists.list_band(row[None], row[None], row[None], row[None], 0, 512, 64, 64)
    lists.merge_adjacent_query_blocks(told)
    kept, nine = zeros(1, 28, N + 1, dtype=torch.bool)[..., :-1], zeros(1, 9, dtype=INT)
    line_kernels.list_slash_blocks(
        kept, (zeros(3, 3, dtype=INT), few, few, zeros(3, 1, 64, dtype=INT), nine, zeros(1, 9, 2, 2, dtype=INT), nine), 64
    )  # fmt: skip
    line_kernels.sort_by_class((numbers, begin, numbers, begin, at[0, :1]), (of, of, of), 64, False, 64, 64)


def assemble_slices() -> None:
    """Tables of a plan's pieces: one that fills, and one that comes after it."""
    table = [int(name in ("batch", "heads", "size")) for name in FIELDS]
    lists.assemble_slices([zeros(8)], table * 2, 1, [8, 8, 8])


def clustered() -> None:
    """What a question of a stream chooses, at the shape of a 7B model."""
    layers, count, entries = 2, 600, 2250
    key, query = blank(layers, count, 512), blank(layers, 512, dtype=torch.float32)
    long = zeros(layers, entries)
    size, score, one = long[:, :count], blank(layers, count, dtype=torch.float32), long[0, :1]
    own = clusters.EntryKeys(key.transpose(0, 1), 1, lambda at: query, query[0], False)
    stream.score_keys(key, query, False)
    words = clusters.WordQueries(blank(layers, 16, 512, dtype=torch.float32), one)
    stream.score_by_words(key, words, size, False)
    stream.mark_clusters_beyond_budget(score, size[0], 256, 2)
    stream.mask_and_count_better(score, size, size, score > 0)
    lists = clusters.ClusterMembership(long, long, long, size, size, 32)
    stream.select_entries(size, lists, 64, 80, own, clusters.NewestEntryRange(one, 1, 8))
    out = blank(2, 4, 512, 128)
    stream.write_best_clusters(score[0], score[0] > 0, size[0], (key[0], key[1]), score[0], out, 14, one, 0)
    stream.mean_query(blank(28, 16, 128), one, 4)
    stream.predict_next_layer_input(blank(16, E), one, *blank(3, E, dtype=torch.float32))
    stream.mark_host_slots(long[0], long[0, :80], one, one)


def gathered(tokens: int, size: int, apart: bool) -> None:
    """Units from the host, written side by side or as slots lie."""
    slab = blank(10, 2, 4, tokens, size)
    out = torch.empty_like(slab[:5]).permute(1, 2, 0, 3, 4) if apart else blank(2, 4, 5 * tokens, size)
    stream.copy_units(out, [slab], zeros(1), zeros(5), clusters.slab_alignment([slab]))


def rows_alone() -> None:
    """What is done to each row of a prompt alone."""
    x, heads = blank(S, E), blank(1, S, 28, 128).transpose(1, 2)
    for centred in (False, True):
        pointwise.rms_norm(x, x[0], 1e-6, centred)
    pointwise.silu_multiply_(x, blank(S, E))
    cos, sin = pointwise.rope_angles(zeros(S), blank(64, dtype=torch.float32), 1.0, BF16)
    pointwise.rotate_(heads, cos[None], sin[None])
    pointwise.merge_parts(blank(2, S, 28, 128), blank(2, S, 28, dtype=torch.float32))


WAYS: dict[str, Callable[[], None]] = {
    "attend bf16": attended,
    "attend placed": partial(attended, placed=True),
    "attend fp16": partial(attended, torch.float16, size=96),
    "attend fp32": partial(attended, torch.float32),
    "attend shared lists": partial(attended, heads=1),
    "attend large blocks": partial(attended, block=128),
    "attend split": partial(attended, chunk=2),
    "attend narrow": partial(attended, narrow=True),
    "attend extra": partial(attended, extra=True),
    "attend extra split": partial(attended, extra=True, chunk=2),
    "attend runs split": partial(attended, runs=True, placed=True, chunk=2),
    "large bf16": partial(attended, size=256),
    "large blocks": partial(attended, size=256, block=128),
    "large fp32": partial(attended, torch.float32, size=256),
    "large decode": partial(decoded, 10, size=256),
    "large decode fp32": partial(decoded, 10, torch.float32, size=256),
    "hopper shared lists": partial(attended, heads=1, placed=True),
    "hopper split": partial(attended, block=128, placed=True, chunk=2),
    "hopper large blocks": partial(attended, block=128),
    "hopper small heads": partial(attended, heads=1, size=64, placed=True),
    "hopper neighbours": partial(attended, placed=True),
    "hopper neighbours split": partial(attended, placed=True, chunk=2),
    "hopper neighbours small heads": partial(attended, size=64, placed=True),
    "decode 1": partial(decoded, 1),
    "decode 10": partial(decoded, 10),
    "decode fp32": partial(decoded, 1, torch.float32),
    "decode 80": partial(decoded, 1, size=80),
    "decode tree": partial(decoded, 6, tree=True),
    "decode each 1": partial(each, 1),
    "decode each 4": partial(each, 4),
    "decode each fp32": partial(each, 1, torch.float32),
    "decode turn": turned,
    "carried": carried,
    **{
        f"project {make.__name__} {kind} {count}": partial(make, count, kind)
        for make, kinds in ((projected, WEIGHTS), (passed, ("up", "down")))
        for kind in kinds
        for count in (1, 10, 64)
    },
    **{f"project entered {count}": partial(entered, count) for count in (1, 10, 16, 64)},
    "index": indexed,
    "index pieces": assemble_slices,
    "stream clusters": clustered,
    **{
        f"stream units of {tokens}{' apart' * apart}": partial(gathered, tokens, size, apart)
        for tokens, size in ((196, 128), (49, 2))
        for apart in (False, True)
    },
    "pointwise": rows_alone,
}
"""Group and name -> launches. Those of "hopper" are the ways of the kernels for Hopper; all others go past these."""


def compiled(
    row: Architecture, groups: Iterable[str] = (), compiles: bool = True, once: bool = False
) -> Iterator[Compiled | str]:
    """What is compiled for an architecture in the ways of some groups, or all; kernels by name where nothing compiles."""
    portable, known = replace(row, lacks={"hopper": ""}), set[str]()
    for name, way in WAYS.items():
        group = name.split()[0]
        if (groups and group not in groups) or (group == "hopper" and "hopper" in row.lacks):
            continue
        # Too little memory for all copies of keys: what has none is left to the portable kernel.
        memory = 1 << 12 if name.startswith("hopper") and "split" in name else MEMORY
        with as_on(row if group == "hopper" else portable, memory), stopped(compiles, known) as found:
            way()
        known |= dict(found).keys() if once else set()
        for kernel, binary in dict(found).items():
            yield Compiled.of(row.name, name, kernel, binary) if compiles else f"{row.name} {kernel}"


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--only", nargs="+", default=(), metavar="GROUP")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    for row in ARCHITECTURES:
        if not options.names or row.name in options.names:
            for found in compiled(row, options.only, not options.list, options.once):
                print(json.dumps(asdict(found)) if isinstance(found, Compiled) else found, flush=True)


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False
    main()
