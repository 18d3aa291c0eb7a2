"""The two groups of four warps of `hopper` that compute: the running softmax of 64 of a tile's 128 rows, each by itself.

A group's product of queries and keys is issued before the product of weights and values of the step before, so that the
softmax of one hides behind the other.

`step` is told in quarters: four for each step a program has taken, over all its tiles, and in the lowest two bits which of
its tile it is: `FRESH` the first, 1 the second, 0 any later one. Held in one number, the kernel has a register to spare.
"""

# What follows is Gluon's language, not Python's: constant conditions are told from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mmaccel.backends.triton.prefill.block_iter import (
    FAR,
    TILES,
    WHOLE,
    WIDTH,
    finish,
    list_of,
    pair_of,
    partly,
    rows_of,
    together,
    told,
    where_of,
)

FRESH = gl.constexpr(2)


@gluon.jit
def _place(step, STAGES: gl.constexpr):
    """Where in the rings a step is, and the parity of its turn there."""
    return (step >> 2) % STAGES, ((step >> 2) // STAGES) & 1


@gluon.jit
def _after(step):
    return step + 4 - ((step & 3) > 0).to(gl.int32)


@gluon.jit
def _sure(span, b, h, begin, shift, head, tail, low, high, steps, PER: gl.constexpr):
    """From which step to which nothing need be tested; past the last, twice, where that cannot be told of a whole run."""
    first, past = gl.maximum(head, low), gl.minimum(tail, high)
    counts = told(span, 4).to(gl.pointer_type(gl.int32)) + b * told(span, 5) + h * told(span, 6)
    past = gl.maximum(past, first)
    form = told(span, 7)
    if form == WHOLE:
        unsure = gl.load(counts)
    else:
        at = counts + begin + shift
        unsure = gl.load(at + past) - gl.load(at + first)
    from_step, to_step = (first - low + PER - 1) // PER, (past - low) // PER
    none = (unsure > 0) | (to_step <= from_step)
    return gl.where(none, steps, from_step), gl.where(none, steps, to_step)


@gluon.jit
def _products(q, rings, barriers, weights, nothing, acc, step, STAGES: gl.constexpr):
    """The scores of a step, and under way behind them the product of weights and values of the one before. Before the
    first step lie values of another tile, which may be no numbers: what comes of them is dropped at the second."""
    k_ring, v_ring = rings
    k_full, k_free, v_full = barriers[0], barriers[1], barriers[2]
    stage, turn = _place(step, STAGES)
    mbarrier.wait(k_full.index(stage), turn)
    score = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), turn)
    acc = warpgroup_mma(weights, v_ring.index(stage), acc, use_acc=(step & 3) != 1, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(k_free.index(stage), count=1)
    return score, acc


@gluon.jit
def _softmax(
    score,
    acc,
    peak,
    total,
    scale,
    barriers,
    step,
    dtype: gl.constexpr,
    o_layout: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Weights of a step, and what was summed before in terms of the new largest score."""
    v_free = barriers[3]
    top = gl.maximum(peak, gl.max(score, 1) * scale)
    floor = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(score * scale - gl.expand_dims(floor, 1))
    fade = gl.exp2(peak - floor)
    total = total * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, total.type.layout)), 1) + partly(
        p
    )
    p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    stage, _ = _place(step, STAGES)
    mbarrier.arrive(v_free.index(stage), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, o_layout)), 1)
    return p, acc, top, total


@gluon.jit
def _next(words, barriers, turn):
    """List row, tile and piece of the next tile, once they are told."""
    t_full, t_free = barriers[4], barriers[5]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = turn % TILES
    mbarrier.wait(t_full.index(place), (turn // TILES) & 1)
    row = gl.max(words.index(4 * place).load(line), 0)
    tile = gl.max(words.index(4 * place + 1).load(line), 0)
    piece = gl.max(words.index(4 * place + 2).load(line), 0)
    together()
    mbarrier.arrive(t_free.index(place), count=1)
    return row, tile, piece


@gluon.jit
def _rows(queries, row, tile, M, which: gl.constexpr, shape: gl.constexpr, D: gl.constexpr):
    """The 64 rows [64, D] of a group in a tile, those of list row 0 where it is none."""
    Q, q_b, q_h, q_s, q_row, q_row_b, q_row_h = queries
    b, h, g, m = where_of(gl.maximum(row, 0), tile, M, shape)
    place = (b, h, g, m, tile, q_row, q_row_b, q_row_h)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    head_of, mine, at_place, at = rows_of(place, which, gl.SliceLayout(1, loaded), shape)
    d = gl.arange(0, D, gl.SliceLayout(0, loaded))
    q_at = b * q_b + head_of * q_h + gl.maximum(at, 0).to(gl.int64) * q_s
    here = gl.expand_dims(mine & (at >= 0), 1) & gl.expand_dims(d >= 0, 0)
    q = gl.load(Q + gl.expand_dims(q_at, 1) + gl.expand_dims(d, 0), mask=here, other=0.0)
    return q


@gluon.jit
def consume(
    asked,
    which: gl.constexpr,
    shape: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    PLACED: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """The running softmax of 64 rows over every step, of tile after tile."""
    q_buf, rings, words, barriers, table, n_spans, queries, M, pieces, scale, stores = asked
    k_ring, v_ring = rings
    v_full = barriers[2]
    PIECES, SLOT, TOLD, tiles = pieces
    PER: gl.constexpr = 128 // BLOCK_K
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    line: gl.constexpr = gl.SliceLayout(1, s_layout)
    n = gl.arange(0, 128, gl.SliceLayout(0, s_layout))
    nothing = gl.full([64, 128], 0.0, gl.float32, s_layout)
    q = q_buf.index(which)
    step, turn = gl.to_tensor(FRESH), gl.to_tensor(1)
    row, tile, piece = _next(words, barriers, gl.to_tensor(0))
    own = _rows(queries, row, tile, M, which, shape, D)
    while row >= 0:
        q.store(own)
        fence_async_shared()
        together()
        first, last = gl.to_tensor(0), gl.to_tensor(2147483647)
        if SPLIT:
            chunk = gl.load(TOLD)
            first, last = piece * chunk, piece * chunk + chunk
        b, h, g, m = where_of(row, tile, M, shape)
        place = (b, h, g, m, tile, queries[4], queries[5], queries[6])
        head_of, mine, at_place, at = rows_of(place, which, line, shape)
        peak = gl.full([64], float("-inf"), gl.float32, line)
        acc = gl.full([64, D], 0.0, gl.float32, o_layout)
        total = partly(nothing)
        weights = gl.convert_layout(nothing.to(q_buf.dtype), p_layout)
        begun = gl.to_tensor(0)
        for s in range(n_spans):
            span = table + s * WIDTH
            begin, count, head, tail, shift, low, high, steps = list_of(
                span, b, h, m, begun, first, last, PER
            )
            begun += count
            if steps > 0:
                index = told(span, 3)
                places = told(span, 8).to(gl.pointer_type(gl.int32)) + b * told(span, 9) + h * told(span, 10)
                lo = told(span, 14).to(gl.int32)
                width = (told(span, 15).to(gl.int32) - lo).to(gl.uint32)
                # Counted from the lower end of the range, what is outside is above its width on either side; rows before
                # all keys stand right before the first, from where the place of an absent key is still told from one in
                # the range.
                q_place = gl.maximum(gl.load(places + at_place) - lo, -1)
                places = (
                    told(span, 11).to(gl.pointer_type(gl.int32)) + b * told(span, 12) + h * told(span, 13)
                )
                from_step, to_step = _sure(span, b, h, begin, shift, head, tail, low, high, steps, PER)
                for turn_of in range(2):
                    # Steps that are tested and then steps that are not, twice: the head of a run, and its tail.
                    tested = gl.where(turn_of == 0, from_step, steps)
                    sure = gl.where(turn_of == 0, to_step, steps)
                    begins = gl.where(turn_of == 0, 0, to_step)
                    left, right = pair_of(index, begin, low + begins * PER, high, shift, PER)
                    for j in range(begins, tested):
                        e = low + j * PER
                        second = n // BLOCK_K
                        key = gl.where(second > 0, right, left) * BLOCK_K + n % BLOCK_K
                        k_place = gl.load(places + key, mask=e + second < high, other=FAR)
                        # Blocks are looked up a step ahead: their places wait for them.
                        left, right = pair_of(index, begin, e + PER, high, shift, PER)
                        score, acc = _products(q, rings, barriers, weights, nothing, acc, step, STAGES)
                        gap = (gl.expand_dims(q_place, 1) - gl.expand_dims(k_place, 0)).to(gl.uint32)
                        score = gl.where(gap < width, score, float("-inf"))
                        weights, acc, peak, total = _softmax(
                            score, acc, peak, total, scale, barriers, step, q_buf.dtype, o_layout, STAGES
                        )
                        step = _after(step)
                    for _ in range(tested, sure):
                        score, acc = _products(q, rings, barriers, weights, nothing, acc, step, STAGES)
                        weights, acc, peak, total = _softmax(
                            score, acc, peak, total, scale, barriers, step, q_buf.dtype, o_layout, STAGES
                        )
                        step = _after(step)
        # The values of the last step stay: the next tile begins with them, and drops what comes of it.
        stage, parity = _place(step, STAGES)
        mbarrier.wait(v_full.index(stage), parity)
        acc = warpgroup_mma(weights, v_ring.index(stage), acc, use_acc=(step & 3) != 1, is_async=True)
        slot, split = gl.full([], 0, gl.int64), gl.to_tensor(0)
        if SPLIT:
            slot = ((gl.load(SLOT + row).to(gl.int64) + piece) * tiles + tile) * 128
            split = (gl.load(PIECES + row) > 1).to(gl.int32)
        # Meanwhile the rows of the next tile are asked for.
        row, tile, piece = _next(words, barriers, turn)
        own = _rows(queries, row, tile, M, which, shape, D)
        turn += 1
        step = (step & -4) + FRESH
        acc = warpgroup_mma_wait(0, deps=(acc,))
        total = gl.convert_layout(gl.sum(total, 1), line)
        finish(
            acc, peak, total, b, (head_of, mine, at_place, at), slot, split, stores, which, D, PLACED, SPLIT
        )
