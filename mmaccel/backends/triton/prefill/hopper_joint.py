"""Block-sparse attention for Hopper where neighbouring query blocks have different lists: shared key blocks are loaded once.

A tile is several neighbouring blocks of 64 queries of one head, one for each group of four warps, and each group has its own
list. The loading warp merges the lists of a tile, from the last key block to the first, and tells the groups which of them
each loaded block is for. Lists that ascend or descend share the most; others give correct results too.
"""

# What follows is Gluon's language, not Python's: constant conditions are told from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: RUF059, SIM102

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mmaccel.backends.triton.prefill.hopper import (
    FAR,
    WIDTH,
    fact,
    locate_warp_group_rows,
    partial_row_sums,
    store_normalized_rows,
    tma_load,
    together,
)

MOST = gl.constexpr(4)  # lists that a tile can hold; one group more than there are registers for
# In the word of a step, bit i says that group i computes it, and bit i + TESTED that it tests it.
TESTED = gl.constexpr(4)
SPAN = gl.constexpr(8)  # above these bits stands the number of the span; a word of -1 is the end


@gluon.jit
def _entry(index, begin, e, shift, left):
    """The blocks of entries e, -1 of lists of which nothing is left."""
    block = (begin + e).to(gl.int32)
    if index != 0:
        block = gl.load(index.to(gl.pointer_type(gl.int32)) + begin + e, mask=left > 0, other=0)
    return gl.where(left > 0, block + shift, -1)


@gluon.jit
def _bring_all(asked, GROUPS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Keys, values and positions of the blocks that any group lists, and whose they are."""
    keys, values, notes, barriers, table, n_spans, place, window, M = asked
    k_own, k_copies, k_boxes = keys
    v_own, v_copies, v_boxes = values
    words, key_positions = notes
    full, free = barriers
    b, h, g, m, at_own, column = place
    first, last = window
    BYTES: gl.constexpr = 2 * CHUNKS * 64 * 64 * 2
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = gl.arange(0, 64, line)
    i = gl.arange(0, MOST, line)
    bit = gl.full([MOST], 1, gl.int32, line) << i
    have = (i < GROUPS) & (m * GROUPS + i < M)
    begun = gl.full([MOST], 0, gl.int32, line)
    step = gl.to_tensor(0)
    for s in range(n_spans):
        span = table + s * WIDTH
        lists = fact(span, 0).to(gl.pointer_type(gl.int64)) + b * fact(span, 1) + h * fact(span, 2)
        lists += (m * GROUPS + i) * 5
        begin = gl.load(lists, mask=have, other=0)
        count = gl.load(lists + 1, mask=have, other=0).to(gl.int32)
        head = gl.load(lists + 2, mask=have, other=0).to(gl.int32)
        tail = gl.load(lists + 3, mask=have, other=0).to(gl.int32)
        shift = gl.load(lists + 4, mask=have, other=0).to(gl.int32)
        low, high = gl.maximum(first - begun, 0), gl.minimum(last - begun, count)
        begun += count
        left = gl.maximum(high - low, 0)
        index = fact(span, 3)
        # Every list from its last block to its first: one that ascends is walked from its end.
        ascends = _entry(index, begin, low, shift, left) <= _entry(index, begin, high - 1, shift, left)
        e, way = gl.where(ascends, high - 1, low), gl.where(ascends, -1, 1)
        homes = fact(span, 16).to(gl.pointer_type(gl.int32))
        homes += b * fact(span, 17) + h * fact(span, 18) + g * fact(span, 19)
        positions = fact(span, 11).to(gl.pointer_type(gl.int32)) + b * fact(span, 12) + h * fact(span, 13)
        unsure = fact(span, 4).to(gl.pointer_type(gl.int32)) + b * fact(span, 5) + h * fact(span, 6)
        block = _entry(index, begin, e, shift, left)
        best = gl.max(block, 0)
        while best >= 0:
            home = gl.load(homes + best)
            key_position = gl.load(positions + best * 64 + n)
            counted = (best + 0 * e).to(gl.int64)
            here = gl.load(unsure + counted, mask=left > 0, other=0)
            past = gl.load(unsure + counted + 1, mask=left > 0, other=0)
            mine = block == best
            test = mine & ((e < head) | (e >= tail) | (past > here))
            # Looked up ahead: the next blocks come while this one waits for a place.
            e += gl.where(mine, way, 0)
            left -= mine.to(gl.int32)
            block = _entry(index, begin, e, shift, left)
            word = gl.sum(gl.where(mine, bit, 0) + gl.where(test, bit << TESTED, 0), 0) + (s << SPAN)
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            key_positions.index(stage).store(key_position)
            words.index(stage).store(gl.full([1], 0, gl.int32, line) + word)
            together()
            mbarrier.expect(full.index(stage), BYTES)
            box = stage * CHUNKS
            tma_load(k_own, k_copies, home, at_own, column, k_boxes, full.index(stage), box, CHUNKS, 1)
            tma_load(v_own, v_copies, home, at_own, column, v_boxes, full.index(stage), box, CHUNKS, 1)
            best = gl.max(block, 0)
            step += 1
    stage = step % STAGES
    mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
    words.index(stage).store(gl.full([1], -1, gl.int32, line))
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _word(words, full, step, STAGES: gl.constexpr):
    """What is told of a step, once it is there."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    return gl.max(words.index(stage).load(line), 0)


@gluon.jit
def _own(words, full, free, step, limit, which: gl.constexpr, STAGES: gl.constexpr):
    """From `step` on the first step that this group computes, or else `limit` or the end, and its word; what others compute
    before it is given free."""
    word = _word(words, full, step, STAGES)
    while (word >= 0) & (((word >> which) & 1) == 0) & (step < limit):
        mbarrier.arrive(free.index(step % STAGES), count=1)
        step += 1
        word = _word(words, full, step, STAGES)
    return word, step


@gluon.jit
def _compute(
    asked, which: gl.constexpr, shape: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, D: gl.constexpr,
    PLACED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The running softmax of 64 rows over the blocks of their list."""
    q_buf, rings, notes, barriers, table, place, piece, scale, stores = asked
    k_ring, v_ring = rings
    words, key_positions = notes
    full, free = barriers
    slot, split = piece
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    line: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_buf.dtype
    b, h = place[0], place[1]
    rows = locate_warp_group_rows(place, which, line, shape)
    peak = gl.full([64], float("-inf"), gl.float32, line)
    acc = gl.full([64, D], 0.0, gl.float32, o_layout)
    nothing = gl.full([64, 64], 0.0, gl.float32, s_layout)
    total = partial_row_sums(nothing)
    parted: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    none = gl.convert_layout(nothing.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    weights = none
    q = q_buf.index(which)
    q_pos, width = gl.full([64], 0, gl.int32, line), gl.full([], 0, gl.uint32)
    held, before = gl.to_tensor(-1), gl.to_tensor(-1)
    word, step = _own(words, full, free, gl.to_tensor(0), FAR, which, STAGES)
    while word >= 0:
        stage = step % STAGES
        score = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        # Before the first step weights are zero: any values that are there will do.
        values = v_ring.index(gl.where(before < 0, step, before) % STAGES)
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        s = word >> SPAN
        if s != held:
            held = s
            span = table + s * WIDTH
            lo = fact(span, 14).to(gl.int32)
            width = (fact(span, 15).to(gl.int32) - lo).to(gl.uint32)
            at = fact(span, 8).to(gl.pointer_type(gl.int32)) + b * fact(span, 9) + h * fact(span, 10)
            # Counted from the lower end of the range, what is outside is above its width on either side; rows before all
            # keys stand right before the first, from where the place of an absent key is still told from one in the range.
            q_pos = gl.maximum(gl.load(at + rows[2]) - lo, -1)
        score = warpgroup_mma_wait(1, deps=(score,))
        if (word >> (which + TESTED)) & 1:
            k_pos = key_positions.index(stage).load(gl.SliceLayout(0, s_layout))
            gap = (gl.expand_dims(q_pos, 1) - gl.expand_dims(k_pos, 0)).to(gl.uint32)
            score = gl.where(gap < width, score, float("-inf"))
        top = gl.maximum(peak, gl.max(score, 1) * scale)
        floor = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(score * scale - gl.expand_dims(floor, 1))
        fade = gl.exp2(peak - floor)
        total = total * gl.expand_dims(gl.convert_layout(fade, parted), 1) + partial_row_sums(p)
        peak = top
        weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(gl.maximum(before, 0) % STAGES), count=1, pred=before >= 0)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, o_layout)), 1)
        before = step
        word, step = _own(words, full, free, step + 1, step + LAG, which, STAGES)
        if (word >= 0) & (((word >> which) & 1) == 0):
            # Others have many blocks to themselves: the ring must not wait for values that are held for the next step.
            acc = warpgroup_mma(weights, v_ring.index(before % STAGES), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index(before % STAGES), count=1)
            weights, before = none, gl.to_tensor(-1)
            word, step = _own(words, full, free, step, FAR, which, STAGES)
    if before >= 0:
        acc = warpgroup_mma(weights, v_ring.index(before % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.convert_layout(gl.sum(total, 1), line)
    store_normalized_rows(acc, peak, total, b, rows, slot, split, stores, which, D, PLACED, SPLIT)


@gluon.jit(do_not_specialize=["M", "tiles", "n_spans", "own_b", "own_g", "column_g", "lse_b", "lse_h"])
def shared_key_blocks_kernel(
    k_own, v_own, k_copies, v_copies, table, SHORT, Q, OUT, LSE, PART_OUT, PART_LSE, ITEM, PIECES, SLOT, TOLD,
    q_row, q_row_b, q_row_h, q_b, q_h, q_s, own_b, own_g, column_g, out_b, out_h, out_s, lse_b, lse_h, M,
    tiles, n_spans, scale,
    GROUP: gl.constexpr, LISTS: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, PLACED: gl.constexpr,
    SPLIT: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Attention of one tile of GROUPS query blocks (64 rows each) of one head, which share the key blocks they load. Under
    SPLIT a program reads one range of each block's list, and writes a partial result.

    M: query blocks that have lists; tiles: tiles per head.
    """
    if GATED:
        # Without a home for every block, the portable kernel computes what this one would.
        if gl.load(SHORT) > 0:
            return
    row, piece, pieces = gl.num_programs(0) - 1 - gl.program_id(0), 0, 1
    first, last = gl.to_tensor(0), gl.to_tensor(2147483647)
    if SPLIT:
        row = gl.load(ITEM + 2 * gl.program_id(0))
        if row < 0:
            return
        piece, pieces = gl.load(ITEM + 2 * gl.program_id(0) + 1), gl.load(PIECES + row)
        chunk = gl.load(TOLD)
        first, last = piece * chunk, piece * chunk + chunk
    m = row % tiles
    b = (row // tiles // LISTS).to(gl.int64)
    h = (row // tiles % LISTS).to(gl.int64)
    g = h // GROUP
    ROWS: gl.constexpr = 64 * GROUPS
    shape: gl.constexpr = (GROUP, LISTS, ROWS, ROWS, 1)
    place = (b, h, g, m, 0, q_row, q_row_b, q_row_h)

    dtype: gl.constexpr = k_own.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [GROUPS, 64, D], flat)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, D], flat)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, D], flat)
    # A box of the copy engine: 64 rows of 64 columns, as they lie in a block, one after the other.
    k_boxes = k_ring._reinterpret(dtype, [STAGES * D // 64, 64, 64], flat)
    v_boxes = v_ring._reinterpret(dtype, [STAGES * D // 64, 64, 64], flat)
    side: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    key_positions = gl.allocate_shared_memory(gl.int32, [STAGES, 64], side)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, 1], side)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, loaded))
    for which in gl.static_range(GROUPS):
        head_of, mine, at_place, at = locate_warp_group_rows(place, which, gl.SliceLayout(1, loaded), shape)
        q_at = b * q_b + head_of * q_h + gl.maximum(at, 0).to(gl.int64) * q_s
        here = gl.expand_dims(mine & (at >= 0), 1) & gl.expand_dims(d >= 0, 0)
        q = gl.load(Q + gl.expand_dims(q_at, 1) + gl.expand_dims(d, 0), mask=here, other=0.0)
        q_buf.index(which).store(q)
    fence_async_shared()

    slot, split = gl.full([], 0, gl.int64), gl.to_tensor(0)
    if SPLIT:
        slot = (gl.load(SLOT + row).to(gl.int64) + piece) * ROWS
        split = (pieces > 1).to(gl.int32)
    stores = (OUT, LSE, PART_OUT, PART_LSE, out_b, out_h, out_s, lse_b, lse_h)
    notes, barriers = (words, key_positions), (full, free)
    asked = (q_buf, (k_ring, v_ring), notes, barriers, table, place, (slot, split), scale, stores)
    bring = (
        (k_own, k_copies, k_boxes), (v_own, v_copies, v_boxes), notes, barriers, table, n_spans,
        (b, h, g, m, (b * own_b + g * own_g).to(gl.int32), (g * column_g).to(gl.int32)), (first, last), M,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (asked, 0, shape, STAGES, LAG, D, PLACED, SPLIT)),
                (_compute, (asked, 1, shape, STAGES, LAG, D, PLACED, SPLIT)),
                (_bring_all, (bring, GROUPS, D // 64, STAGES)),
            ],
            [4, 1],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (asked, 0, shape, STAGES, LAG, D, PLACED, SPLIT)),
                (_compute, (asked, 1, shape, STAGES, LAG, D, PLACED, SPLIT)),
                (_compute, (asked, 2, shape, STAGES, LAG, D, PLACED, SPLIT)),
                (_bring_all, (bring, GROUPS, D // 64, STAGES)),
            ],
            [4, 4, 1],
            [152, 152, 56],
        )
