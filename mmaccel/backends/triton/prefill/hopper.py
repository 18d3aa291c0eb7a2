"""The same attention as `kernel`, for Hopper: keys and values come by the tensor copy engine, products are asynchronous.

One program of each multiprocessor takes tile after tile, as they come: keys of the next tile are on their way while the
last one is finished.
"""

# What follows is Gluon's language, not Python's: constant conditions are told from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mmaccel.backends.triton.prefill.block_iter import TILES
from mmaccel.backends.triton.prefill.hopper_compute import consume
from mmaccel.backends.triton.prefill.hopper_load import produce


@gluon.jit(
    do_not_specialize=["items", "tiles", "M", "n_spans", "own_b", "own_g", "column_g", "lse_b", "lse_h"]
)
def hopper_kernel(
    k_own,
    v_own,
    k_copies,
    v_copies,
    table,
    SHORT,
    Q,
    OUT,
    LSE,
    PART_OUT,
    PART_LSE,
    ITEM,
    PIECES,
    SLOT,
    TOLD,
    q_row,
    q_row_b,
    q_row_h,
    TAKEN,
    items,
    tiles,
    q_b,
    q_h,
    q_s,
    own_b,
    own_g,
    column_g,
    out_b,
    out_h,
    out_s,
    lse_b,
    lse_h,
    M,
    n_spans,
    scale,
    GROUP: gl.constexpr,
    LISTS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
    PACK: gl.constexpr,
    D: gl.constexpr,
    PLACED: gl.constexpr,
    SPLIT: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles of 128 rows, or under SPLIT pieces of them, as `kernel.attend_kernel`; rows of D adjacent elements.

    items x tiles as the programs of that kernel; TAKEN: how many of them programs have taken, 0 at the start.
    """
    if GATED:
        # Without a home for every block, the portable kernel computes what this one would.
        if gl.load(SHORT) > 0:
            return
    dtype: gl.constexpr = k_own.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [2, 64, D], flat)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, D], flat)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, D], flat)
    # A box of the copy engine: 64 rows of 64 columns, as they lie in a tile, a column of boxes after the other.
    k_boxes = k_ring._reinterpret(dtype, [STAGES * D // 32, 64, 64], flat)
    v_boxes = v_ring._reinterpret(dtype, [STAGES * D // 32, 64, 64], flat)
    # Of the tile that is computed and of the next: list row, tile and piece, the row -1 after the last.
    words = gl.allocate_shared_memory(gl.int32, [4 * TILES, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    t_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], bar)
    t_free = gl.allocate_shared_memory(gl.int64, [TILES, 1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(TILES):
        mbarrier.init(t_full.index(i), count=1)
        mbarrier.init(t_free.index(i), count=2)
    # The values of the step before the first are never stored: what comes of them is dropped.
    fence_async_shared()
    mbarrier.arrive(v_full.index(0), count=1)

    barriers = (k_full, k_free, v_full, v_free, t_full, t_free)
    shape: gl.constexpr = (GROUP, LISTS, BLOCK_Q, ROWS, PACK)
    queries = (Q, q_b, q_h, q_s, q_row, q_row_b, q_row_h)
    stores = (OUT, LSE, PART_OUT, PART_LSE, out_b, out_h, out_s, lse_b, lse_h)
    split = (PIECES, SLOT, TOLD, tiles)
    told = (q_buf, (k_ring, v_ring), words, barriers, table, n_spans, queries, M, split, scale, stores)
    work = (ITEM, TOLD, TAKEN, items, tiles, M)
    gl.warp_specialize(
        [
            (consume, (told, 0, shape, BLOCK_K, STAGES, D, PLACED, SPLIT)),
            (consume, (told, 1, shape, BLOCK_K, STAGES, D, PLACED, SPLIT)),
            (
                produce,
                (
                    (k_own, k_copies, k_boxes),
                    (v_own, v_copies, v_boxes),
                    words,
                    barriers,
                    table,
                    n_spans,
                    work,
                    (own_b, own_g, column_g),
                    shape,
                    D // 64,
                    128 // BLOCK_K,
                    STAGES,
                    SPLIT,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
