"""What lies between two layers' attention as one launch (`fused.chain_rows`): four products, and the merge of attention's
pieces before them, each beginning while the one before it ends.

Programs are dealt to the products in order, and one of a later product waits until all of the product before have said
that they are done. It waits for programs of smaller numbers alone, which a device starts first, so some program can always
go on, whatever else is at work. Meanwhile its first weights are fetched to the cache of the device.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.backends.fused import PHASES
from mmaccel.backends.triton.decode import LEAST, MERGED, merged, pieces_of, tile
from mmaccel.backends.triton.enter import enter_kernel
from mmaccel.backends.triton.homes import lines
from mmaccel.backends.triton.rows import blocks_of, parts_of, project_kernel

FETCHED = 2048
"""Bytes of each line of weights that are fetched by a program that waits."""

LANES = 8
"""Rows that are merged at a time, each by programs of its own."""

SECTOR = 32
"""Bytes that the device's cache is sure to fetch at a time."""


@triton.jit
def _fetch(weight, o, K: tl.constexpr, AHEAD: tl.constexpr, SECTOR: tl.constexpr):
    """Ask for the first AHEAD elements of lines `o`."""
    at = weight + o.to(tl.int64)[:, None] * K + (tl.arange(0, AHEAD // SECTOR) * SECTOR)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def _wait(count, all_of):
    """Until `all_of` programs have counted themselves."""
    while tl.atomic_add(count, 0, sem="acquire") < all_of:
        pass


@triton.jit
def _done(count):
    """Count this program, all of which has been written; gives how many were counted before."""
    tl.debug_barrier()
    return tl.atomic_add(count, 1, sem="acq_rel")


@triton.jit(do_not_specialize=["rows", "n", "eps_mid", "eps_next"])
def chain_kernel(
    part,
    lse,
    attended,
    x,
    weight_o,
    gain_mid,
    weight_gate,
    weight_up,
    weight_down,
    gain_next,
    weight_q,
    weight_k,
    weight_v,
    bias_q,
    bias_k,
    bias_v,
    turn,
    columns,
    mid,
    mid_gained,
    mid_squares,
    wide,
    out,
    gained,
    squares,
    query,
    key,
    value,
    counts,
    rows,
    n,
    eps_mid,
    eps_next,
    key_b,
    key_g,
    key_s,
    value_b,
    value_g,
    value_s,
    E: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST: tl.constexpr,
    MERGES: tl.constexpr,
    LANES: tl.constexpr,
    LINES: tl.constexpr,
    GATES: tl.constexpr,
    ENTERS: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    EVEN_E: tl.constexpr,
    EVEN_WIDE: tl.constexpr,
    EVEN_GATE: tl.constexpr,
    FETCHED: tl.constexpr,
    SECTOR: tl.constexpr,
    PHASES: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """MERGES programs (0: that is done) merge attention's pieces, LINES make its output, GATES what is gated, LINES what
    leaves the layer, ENTERS (0: no layer follows) what enters the next. Nothing of an EVEN product's weights is masked."""
    OUTPUT: tl.constexpr = MERGES + LINES
    GATED: tl.constexpr = OUTPUT + GATES
    LEAVES: tl.constexpr = GATED + LINES
    block, o = tl.program_id(0), tl.arange(0, BLOCK_O)
    if block < MERGES:
        BLOCKS: tl.constexpr = (SIZE + BLOCK_D - 1) // BLOCK_D
        piece = block // LANES
        head, d = piece // BLOCKS, piece % BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
        for r in range(block % LANES, rows, LANES):
            _, _, used = pieces_of(columns, r // n, n, SPLITS, BLOCK_N, LEAST)
            place = ((r // n * (INNER // SIZE) + head) * n + r % n).to(tl.int64) * SPLITS
            answer = merged(part, lse, place, d, used, SIZE, SPLITS, BLOCK_S)
            tl.store(
                attended + r * INNER + head * SIZE + d, answer.to(attended.dtype.element_ty), mask=d < SIZE
            )
        _done(counts + 4)
    elif block < OUTPUT:
        if MERGES:
            if FETCHED:
                _fetch(weight_o, tl.minimum((block - MERGES) * BLOCK_O + o, E - 1), INNER, FETCHED, SECTOR)
            _wait(counts + 4, MERGES)
        project_kernel(
            attended, weight_o, weight_o, weight_o, x, x, x, x, x, gain_mid, mid, mid_gained, mid_squares,
            rows, 0.0, INNER, E, 0, 0, E, False, False, True, True, 0, 1, MERGES, LINES, EVEN_INNER,
            BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES,
        )  # fmt: skip
        _done(counts)
    elif block < GATED:
        if FETCHED:
            own = tl.minimum((block - OUTPUT) * BLOCK_O + o, WIDE - 1)
            _fetch(weight_gate, own, E, FETCHED, SECTOR)
            _fetch(weight_up, own, E, FETCHED, SECTOR)
        _wait(counts, LINES)
        project_kernel(
            mid_gained, weight_gate, weight_up, weight_up, x, x, x, x, mid_squares, x, wide, wide, wide,
            rows, eps_mid, E, WIDE, WIDE, 0, WIDE, False, True, False, False, LINES, CHUNK, OUTPUT, GATES, EVEN_GATE,
            BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES,
        )  # fmt: skip
        _done(counts + 1)
    elif block < LEAVES:
        if FETCHED:
            own = tl.minimum((block - GATED) * BLOCK_O + o, E - 1)
            _fetch(weight_down, own, WIDE, FETCHED, SECTOR)
        _wait(counts + 1, GATES)
        project_kernel(
            wide, weight_down, weight_down, weight_down, x, x, x, mid, x, gain_next, out, gained, squares,
            rows, 0.0, WIDE, E, 0, 0, E, False, False, True, True, 0, 1, GATED, LINES, EVEN_WIDE,
            BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES,
        )  # fmt: skip
        before = _done(counts + 2)
        if ENTERS == 0:  # noqa: SIM102 - what is constant leaves no trace
            # Nobody waits any more: the next launch counts from nothing.
            if before == LINES - 1:
                tl.store(counts + tl.arange(0, PHASES), tl.zeros([PHASES], tl.int32))
    if ENTERS:  # noqa: SIM102 - what is constant leaves no trace
        if block >= LEAVES:
            if FETCHED:
                # Those of some program of this product: which one is all the same.
                at, weight = (block - LEAVES) * BLOCK_O, weight_q
                if at >= (HEADS + GROUPS) * D:
                    weight, at = weight_v, at - (HEADS + GROUPS) * D
                elif at >= HEADS * D:
                    weight, at = weight_k, at - HEADS * D
                _fetch(weight, at + o, E, FETCHED, SECTOR)
            _wait(counts + 2, LINES)
            enter_kernel(
                gained, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v, squares, turn, columns, query, key, value,
                rows, n, eps_next, key_b, key_g, key_s, value_b, value_g, value_s,
                E, HEADS, GROUPS, D, BIAS, LINES, CHUNK, LEAVES, EVEN_E,
                BLOCK_O, BLOCK_K, BLOCK_R, PRECISION, STAGES,
            )  # fmt: skip
            if _done(counts + 3) == ENTERS - 1:
                tl.store(counts + tl.arange(0, PHASES), tl.zeros([PHASES], tl.int32))


def chain_rows(
    attended: Tensor,
    x: Tensor,
    weight: Sequence[Tensor],
    gain: Tensor,
    eps: float,
    gain_next: Tensor,
    eps_next: float,
    counts: Tensor,
    entered: Sequence[Tensor],
    bias: Sequence[Tensor],
    turn: Tensor | None,
    columns: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    lse: Tensor | None = None,
    *,
    block_n: int | None = None,
    block_o: int | None = None,
    block_k: int | None = None,
    warps: int = 2,
    stages: int = 4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mmaccel.backends.fused.chain_rows`."""
    attended, x, gain, gain_next, *weight = (t.contiguous() for t in (attended, x, gain, gain_next, *weight))
    rows, inner = len(x), weight[0].shape[1]
    part, size, splits = attended, inner, 1
    if lse is not None:
        size, splits = part.shape[-1], lse.shape[-1]
        attended = x.new_empty(rows, inner)
    E, wide_of = x.shape[1], weight[1].shape[0]
    block_o, block_k, block_r = blocks_of(rows, min(inner, E, wide_of), block_o, block_k)
    count = triton.cdiv(E, block_o)
    gates = triton.cdiv(wide_of, block_o)
    mid, mid_gained, out, gained = (torch.empty_like(x) for _ in range(4))
    mid_squares, squares = (x.new_empty(rows, count, dtype=torch.float32) for _ in range(2))
    wide = x.new_empty(rows, wide_of)
    enters, heads, G, D, n, query, strides = 0, 0, 0, block_o, 1, x.new_empty(0), (0,) * 6
    lanes = min(rows, LANES)
    merges = 0 if lse is None else inner // size * triton.cdiv(size, MERGED) * lanes
    if columns is not None:
        n, columns = columns.shape[1], columns.contiguous()
    if key is not None:
        B = rows // n
        G, D = key.shape[1], key.shape[-1]
        heads = entered[0].shape[0] // D
        query = torch.empty(B, n, heads, D, dtype=x.dtype, device=x.device)
        enters = (heads + 2 * G) * triton.cdiv(D, block_o)
        turn, *entered = (t.contiguous() for t in (turn, *entered))
        bias = [t.contiguous() for t in bias]
        strides = (*lines(key), *lines(value))
    with torch.cuda.device_of(x):
        chain_kernel[(merges + 2 * count + gates + enters,)](
            part,
            x if lse is None else lse,
            attended,
            x,
            weight[0],
            gain,
            *weight[1:],
            gain_next,
            *(entered if enters else [x] * 3),
            *(bias or [x] * 3),
            turn if enters else x,
            counts if columns is None else columns,
            mid,
            mid_gained,
            mid_squares,
            wide,
            out,
            gained,
            squares,
            query,
            key if enters else x,
            value if enters else x,
            counts,
            rows,
            n,
            eps,
            eps_next,
            *strides,
            E=E,
            INNER=inner,
            WIDE=wide_of,
            HEADS=heads,
            GROUPS=G,
            D=D,
            BIAS=bool(bias),
            CHUNK=parts_of(squares, block_r)[1],
            SIZE=size,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_N=block_n or tile(x),
            BLOCK_D=MERGED,
            LEAST=LEAST,
            MERGES=merges,
            LANES=lanes,
            LINES=count,
            GATES=gates,
            ENTERS=enters,
            EVEN_INNER=inner % block_k == 0 and E % block_o == 0,
            EVEN_E=E % block_k == 0,
            EVEN_WIDE=wide_of % block_k == 0 and E % block_o == 0,
            EVEN_GATE=E % block_k == 0 and wide_of % block_o == 0,
            FETCHED=0 if D % block_o else _fetched(x, min(E, wide_of)),
            SECTOR=SECTOR // x.element_size(),
            PHASES=PHASES,
            BLOCK_O=block_o,
            BLOCK_K=block_k,
            BLOCK_R=block_r,
            PRECISION="ieee",
            STAGES=stages,
            num_warps=warps,
        )
    return out, gained, squares, query.transpose(1, 2) if enters else query


def _fetched(x: Tensor, K: int) -> int:
    """Elements of a line that are fetched: none by the interpreter, by a device of another make, or of a short line."""
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return 0
    ahead = FETCHED // x.element_size()
    return ahead if ahead <= K else 0
