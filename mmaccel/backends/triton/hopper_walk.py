"""What the warps of the kernel for Hopper do (`hopper`): one brings keys and values, two groups of four compute.

Each group holds 64 of a tile's 128 rows, and runs by itself. Its product of queries and keys is issued before the product
of weights and values of the step before, so that the softmax of one hides behind the other. What is known of a span is read
from a table on the device: one compiled kernel serves plans of any number of spans.
"""

# What follows is Gluon's language, not Python's: constant conditions are told from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: RUF059, SIM102

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

FAR = gl.constexpr(2**31 - 1)

FIELDS = (
    *("list", "list_b", "list_h", "index", "unsure", "unsure_b", "unsure_h", "form"),
    *("q_place", "q_place_b", "q_place_h", "k_place", "k_place_b", "k_place_h"),
    *("lo", "hi", "home", "home_b", "home_h", "home_g"),
)
"""What the table says of a span: addresses, strides of the sequence and the head (or the group), and the range. An index of
0 is none: entry e is block e. unsure: how many are not FULL before each of what `form` says, and after the last. The place
of an absent key is beyond every range."""

ENTRIES, BLOCKS, WHOLE = (gl.constexpr(form) for form in range(3))
"""What is counted as unsure: entries of the lists, blocks in their order, or all blocks at once."""

WIDTH = gl.constexpr(len(FIELDS))


@gluon.jit
def told(span, field: gl.constexpr):
    return gl.load(span + field)


@gluon.jit
def _list(span, b, h, m, begun, first, last, PER: gl.constexpr):
    """A list row's run in a span, which of its entries are this program's, and in how many steps."""
    at = told(span, 0).to(gl.pointer_type(gl.int64)) + b * told(span, 1) + h * told(span, 2) + m * 5
    begin, count = gl.load(at), gl.load(at + 1).to(gl.int32)
    head, tail = gl.load(at + 2).to(gl.int32), gl.load(at + 3).to(gl.int32)
    shift = gl.load(at + 4).to(gl.int32)
    low, high = gl.maximum(first - begun, 0), gl.minimum(last - begun, count)
    steps = gl.maximum((high - low + PER - 1) // PER, 0)
    return begin, count, head, tail, shift, low, high, steps


@gluon.jit
def _block(index, begin, e, shift):
    """The block of entry e."""
    block = (begin + e).to(gl.int32)
    if index != 0:
        block = gl.load(index.to(gl.pointer_type(gl.int32)) + begin + e)
    return block + shift


@gluon.jit
def _pair(index, begin, e, high, shift, PER: gl.constexpr):
    """The blocks of a step's entries, the last ones where there are no more."""
    left = _block(index, begin, gl.minimum(e, high - 1), shift)
    right = left
    if PER == 2:
        right = _block(index, begin, gl.minimum(e + 1, high - 1), shift)
    return left, right


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
        at = counts + begin
        if form == BLOCKS:
            at += shift
        unsure = gl.load(at + past) - gl.load(at + first)
    from_step, to_step = (first - low + PER - 1) // PER, (past - low) // PER
    none = (unsure > 0) | (to_step <= from_step)
    return gl.where(none, steps, from_step), gl.where(none, steps, to_step)


@gluon.jit
def bring(own, copies, home, at_own, column, ring, barrier, first, CHUNKS: gl.constexpr, APART: gl.constexpr):
    """64 rows by the copy engine: of the tensor itself, or of the copies of what does not lie side by side there. Their
    boxes of 64 columns go to every APART-th place from `first` on."""
    for c in gl.static_range(CHUNKS):
        if home >= 0:
            tma.async_copy_global_to_shared(
                own, [at_own + home, column + c * 64], barrier, ring.index(first + APART * c)
            )
        else:
            tma.async_copy_global_to_shared(
                copies, [(-2 - home) * 64, c * 64], barrier, ring.index(first + APART * c)
            )


@gluon.jit
def produce(
    keys,
    values,
    barriers,
    table,
    n_spans,
    place,
    window,
    CHUNKS: gl.constexpr,
    PER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Keys and values of every step into the ring. Values stand one place further on: theirs begins with a step of zeros."""
    k_own, k_copies, k_boxes = keys
    v_own, v_copies, v_boxes = values
    k_full, k_free, v_full, v_free = barriers
    b, h, g, m, at_own, column = place
    first, last = window
    BYTES: gl.constexpr = 2 * CHUNKS * 64 * 64 * 2
    step, begun = 0, 0
    for s in range(n_spans):
        span = table + s * WIDTH
        begin, count, head, tail, shift, low, high, steps = _list(span, b, h, m, begun, first, last, PER)
        begun += count
        if steps > 0:
            index = told(span, 3)
            homes = told(span, 16).to(gl.pointer_type(gl.int32))
            homes += b * told(span, 17) + h * told(span, 18) + g * told(span, 19)
            for j in range(steps):
                left, right = _pair(index, begin, low + j * PER, high, shift, PER)
                if PER == 1:
                    left, right = 2 * left, 2 * left + 1
                left, right = gl.load(homes + left), gl.load(homes + right)
                stage, turn = step % STAGES, (step // STAGES) & 1
                mbarrier.wait(k_free.index(stage), turn ^ 1)
                mbarrier.expect(k_full.index(stage), BYTES)
                box, full = stage * CHUNKS * 2, k_full.index(stage)
                bring(k_own, k_copies, left, at_own, column, k_boxes, full, box, CHUNKS, 2)
                bring(k_own, k_copies, right, at_own, column, k_boxes, full, box + 1, CHUNKS, 2)
                stage, turn = (step + 1) % STAGES, ((step + 1) // STAGES) & 1
                mbarrier.wait(v_free.index(stage), turn ^ 1)
                mbarrier.expect(v_full.index(stage), BYTES)
                box, full = stage * CHUNKS * 2, v_full.index(stage)
                bring(v_own, v_copies, left, at_own, column, v_boxes, full, box, CHUNKS, 2)
                bring(v_own, v_copies, right, at_own, column, v_boxes, full, box + 1, CHUNKS, 2)
                step += 1


@gluon.jit
def rows_of(place, which: gl.constexpr, layout: gl.constexpr, shape):
    """The 64 rows of a group: head of each, whether it is one, place in the part, row of the query (or -1)."""
    b, h, g, m, tile, q_row, q_row_b, q_row_h = place
    GROUP: gl.constexpr = shape[0]
    LISTS: gl.constexpr = shape[1]
    BLOCK_Q: gl.constexpr = shape[2]
    ROWS: gl.constexpr = shape[3]
    PACK: gl.constexpr = shape[4]
    r = which * 64 + gl.arange(0, 64, layout)
    sub = tile % (BLOCK_Q // ROWS)
    if LISTS == 1:
        packs: gl.constexpr = (GROUP + PACK - 1) // PACK
        member = tile // (BLOCK_Q // ROWS) % packs * PACK + r // ROWS
        head = g * GROUP + member
        mine = member < GROUP
    else:
        head = h + 0 * r
        mine = r >= 0
    at_place = m * BLOCK_Q + sub * ROWS + r % ROWS
    at = gl.load(q_row + b * q_row_b + h * q_row_h + at_place)
    return head, mine, at_place, at


@gluon.jit
def _products(q, rings, barriers, weights, nothing, acc, step, STAGES: gl.constexpr):
    """The scores of a step, and under way behind them the product of weights and values of the one before."""
    k_ring, v_ring = rings
    k_full, k_free, v_full, v_free = barriers
    stage, turn = step % STAGES, (step // STAGES) & 1
    mbarrier.wait(k_full.index(stage), turn)
    score = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), turn)
    acc = warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(k_free.index(stage), count=1)
    return score, acc


@gluon.jit
def partly(p):
    """[64, 4]: the sums of what each of the four threads that share a row of p [64, n] holds of it."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)


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
    mbarrier.arrive(v_free.index(step % STAGES), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, o_layout)), 1)
    return p, acc, top, total


@gluon.jit
def finish(
    acc,
    peak,
    total,
    b,
    rows,
    slot,
    split,
    stores,
    which: gl.constexpr,
    D: gl.constexpr,
    PLACED: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Normalise and store the 64 rows of a group, or under SPLIT a piece of them."""
    line: gl.constexpr = peak.type.layout
    o_layout: gl.constexpr = acc.type.layout
    out_line: gl.constexpr = gl.SliceLayout(1, o_layout)
    head_of, mine, at_place, at = rows
    OUT, LSE, PART_OUT, PART_LSE, out_b, out_h, out_s, lse_b, lse_h = stores
    d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    seen = total > 0
    sum_log = peak + gl.log2(gl.where(seen, total, 1.0))
    share = gl.convert_layout(gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0), out_line)
    if SPLIT:
        if split != 0:
            r = which * 64 + gl.arange(0, 64, line)
            gl.store(PART_LSE + slot + r, gl.where(seen, sum_log, float("-inf")))
            o = (slot + which * 64 + gl.arange(0, 64, out_line)) * D
            gl.store(PART_OUT + gl.expand_dims(o, 1) + gl.expand_dims(d, 0), acc * gl.expand_dims(share, 1))
    if (SPLIT == 0) | (split == 0):
        seen = seen & (at >= 0)
        row, held = at_place, mine
        if PLACED:
            row, held = gl.maximum(at, 0), mine & (at >= 0)
        row = row.to(gl.int64)
        lse = gl.where(seen, sum_log * 0.6931471805599453, float("-inf"))
        gl.store(LSE + b * lse_b + head_of * lse_h + row, lse, mask=held)
        out_at = b * out_b + head_of * out_h + row * out_s
        out_at, held = gl.convert_layout(out_at, out_line), gl.convert_layout(held, out_line)
        out = gl.where(gl.expand_dims(share > 0, 1), acc * gl.expand_dims(share, 1), 0.0)
        out = gl.where(gl.expand_dims(gl.convert_layout(at, out_line) >= 0, 1), out, 0.0)
        gl.store(
            OUT + gl.expand_dims(out_at, 1) + gl.expand_dims(d, 0),
            out.to(OUT.dtype.element_ty),
            mask=gl.expand_dims(held, 1),
        )


@gluon.jit
def consume(
    q_buf,
    rings,
    barriers,
    table,
    n_spans,
    place,
    piece,
    scale,
    stores,
    which: gl.constexpr,
    shape: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    PLACED: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """The running softmax of 64 rows over every step."""
    k_ring, v_ring = rings
    k_full, k_free, v_full, v_free = barriers
    first, last, slot, split = piece
    PER: gl.constexpr = 128 // BLOCK_K
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    line: gl.constexpr = gl.SliceLayout(1, s_layout)
    b, h = place[0], place[1]
    m = place[3]
    head_of, mine, at_place, at = rows_of(place, which, line, shape)
    n = gl.arange(0, 128, gl.SliceLayout(0, s_layout))
    peak = gl.full([64], float("-inf"), gl.float32, line)
    acc = gl.full([64, D], 0.0, gl.float32, o_layout)
    nothing = gl.full([64, 128], 0.0, gl.float32, s_layout)
    total = partly(nothing)
    weights = gl.convert_layout(nothing.to(q_buf.dtype), p_layout)
    q = q_buf.index(which)
    step, begun = 0, 0
    for s in range(n_spans):
        span = table + s * WIDTH
        begin, count, head, tail, shift, low, high, steps = _list(span, b, h, m, begun, first, last, PER)
        begun += count
        if steps > 0:
            index = told(span, 3)
            places = told(span, 8).to(gl.pointer_type(gl.int32)) + b * told(span, 9) + h * told(span, 10)
            lo = told(span, 14).to(gl.int32)
            width = (told(span, 15).to(gl.int32) - lo).to(gl.uint32)
            # Counted from the lower end of the range, what is outside is above its width on either side; rows before all
            # keys stand right before the first, from where the place of an absent key is still told from one in the range.
            q_place = gl.maximum(gl.load(places + at_place) - lo, -1)
            places = told(span, 11).to(gl.pointer_type(gl.int32)) + b * told(span, 12) + h * told(span, 13)
            from_step, to_step = _sure(span, b, h, begin, shift, head, tail, low, high, steps, PER)
            for turn_of in range(2):
                # Steps that are tested and then steps that are not, twice: the head of a run, and its tail.
                tested = gl.where(turn_of == 0, from_step, steps)
                sure = gl.where(turn_of == 0, to_step, steps)
                begins = gl.where(turn_of == 0, 0, to_step)
                left, right = _pair(index, begin, low + begins * PER, high, shift, PER)
                for j in range(begins, tested):
                    e = low + j * PER
                    second = n // BLOCK_K
                    key = gl.where(second > 0, right, left) * BLOCK_K + n % BLOCK_K
                    k_place = gl.load(places + key, mask=e + second < high, other=FAR)
                    # Blocks are looked up a step ahead: their places wait for them.
                    left, right = _pair(index, begin, e + PER, high, shift, PER)
                    score, acc = _products(q, rings, barriers, weights, nothing, acc, step, STAGES)
                    gap = (gl.expand_dims(q_place, 1) - gl.expand_dims(k_place, 0)).to(gl.uint32)
                    score = gl.where(gap < width, score, float("-inf"))
                    weights, acc, peak, total = _softmax(
                        score, acc, peak, total, scale, barriers, step, q_buf.dtype, o_layout, STAGES
                    )
                    step += 1
                for _ in range(tested, sure):
                    score, acc = _products(q, rings, barriers, weights, nothing, acc, step, STAGES)
                    weights, acc, peak, total = _softmax(
                        score, acc, peak, total, scale, barriers, step, q_buf.dtype, o_layout, STAGES
                    )
                    step += 1
    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
    acc = warpgroup_mma(weights, v_ring.index(step % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.convert_layout(gl.sum(total, 1), line)
    finish(acc, peak, total, b, (head_of, mine, at_place, at), slot, split, stores, which, D, PLACED, SPLIT)
