"""The same attention as `kernel`, for Hopper: keys and values come by the tensor copy engine, products are asynchronous."""

# What follows is Gluon's language, not Python's: constant conditions are told from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: RUF059, SIM102

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mmaccel.backends.triton.hopper_walk import consume, produce, rows_of


@gluon.jit(do_not_specialize=["M", "n_spans"])
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
    """One tile of 128 rows, or under SPLIT one piece of it, as `kernel.attend_kernel`; rows of D adjacent elements."""
    if GATED:
        # Without a home for every block, the portable kernel computes what this one would.
        if gl.load(SHORT) > 0:
            return
    row, piece, pieces = gl.num_programs(0) - 1 - gl.program_id(0), 0, 1
    first, last, tile = gl.to_tensor(0), gl.to_tensor(2147483647), gl.program_id(1)
    if SPLIT:
        # The pieces of split rows, of all tiles, before anything else.
        tiles, before = gl.num_programs(1), gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        chunk, held = gl.load(TOLD), gl.load(TOLD + 1)
        after, rest = before - held * tiles, gl.maximum(gl.num_programs(0) - held, 1)
        item = gl.where(after < 0, before // tiles, held + after % rest)
        tile = gl.where(after < 0, before % tiles, after // rest)
        row = gl.load(ITEM + 2 * item)
        if row < 0:
            return
        piece, pieces = gl.load(ITEM + 2 * item + 1), gl.load(PIECES + row)
        first, last = piece * chunk, piece * chunk + chunk
    m = row % M
    b = (row // M // LISTS).to(gl.int64)
    h = (row // M % LISTS).to(gl.int64)
    shape: gl.constexpr = (GROUP, LISTS, BLOCK_Q, ROWS, PACK)
    if LISTS == 1:
        g = (tile // (BLOCK_Q // ROWS) // ((GROUP + PACK - 1) // PACK)).to(gl.int64)
    else:
        g = h // GROUP
    place = (b, h, g, m, tile, q_row, q_row_b, q_row_h)

    dtype: gl.constexpr = k_own.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [2, 64, D], flat)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, D], flat)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, D], flat)
    # A box of the copy engine: 64 rows of 64 columns, as they lie in a tile, a column of boxes after the other.
    k_boxes = k_ring._reinterpret(dtype, [STAGES * D // 32, 64, 64], flat)
    v_boxes = v_ring._reinterpret(dtype, [STAGES * D // 32, 64, 64], flat)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, loaded))
    for which in gl.static_range(2):
        head_of, mine, at_place, at = rows_of(place, which, gl.SliceLayout(1, loaded), shape)
        q_at = b * q_b + head_of * q_h + gl.maximum(at, 0).to(gl.int64) * q_s
        here = gl.expand_dims(mine & (at >= 0), 1) & gl.expand_dims(d >= 0, 0)
        q = gl.load(Q + gl.expand_dims(q_at, 1) + gl.expand_dims(d, 0), mask=here, other=0.0)
        q_buf.index(which).store(q)
    # The values of the step before the first: their weights are zero as well.
    v_ring.index(0).store(gl.full([128, D], 0.0, dtype, loaded))
    fence_async_shared()
    mbarrier.arrive(v_full.index(0), count=1)

    barriers = (k_full, k_free, v_full, v_free)
    slot, split = gl.full([], 0, gl.int64), gl.to_tensor(0)
    if SPLIT:
        slot = ((gl.load(SLOT + row).to(gl.int64) + piece) * gl.num_programs(1) + tile) * 128
        split = (pieces > 1).to(gl.int32)
    stores = (OUT, LSE, PART_OUT, PART_LSE, out_b, out_h, out_s, lse_b, lse_h)
    rings, mine_of = (k_ring, v_ring), (first, last, slot, split)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    q_buf,
                    rings,
                    barriers,
                    table,
                    n_spans,
                    place,
                    mine_of,
                    scale,
                    stores,
                    0,
                    shape,
                    BLOCK_K,
                    STAGES,
                    D,
                    PLACED,
                    SPLIT,
                ),
            ),
            (
                consume,
                (
                    q_buf,
                    rings,
                    barriers,
                    table,
                    n_spans,
                    place,
                    mine_of,
                    scale,
                    stores,
                    1,
                    shape,
                    BLOCK_K,
                    STAGES,
                    D,
                    PLACED,
                    SPLIT,
                ),
            ),
            (
                produce,
                (
                    (k_own, k_copies, k_boxes),
                    (v_own, v_copies, v_boxes),
                    barriers,
                    table,
                    n_spans,
                    (b, h, g, m, (b * own_b + g * own_g).to(gl.int32), (g * column_g).to(gl.int32)),
                    (first, last),
                    D // 64,
                    128 // BLOCK_K,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
