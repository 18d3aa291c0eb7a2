"""Block-sparse attention (as in `kernel`) for Hopper: keys and values are loaded by TMA, products are asynchronous (WGMMA).

Persistent programs, one per multiprocessor, take tile after tile: one warp loads, and already fetches keys of the next tile
while the last one is finished; two groups of four warps compute, each the running softmax of 64 of a tile's 128 rows. A
group issues the QK product of a step before the PV product of the previous one, so that one softmax overlaps the other
product.

Each group keeps two counts in one number, `step`, which saves a register: four times the program's steps so far, over all
tiles, plus, in the lowest two bits, whether this is the first step of its tile (`FRESH`), the second (1) or a later one (0).

What a span consists of (`FIELDS`: addresses, strides, range) is read from a table on the device, so that one compiled kernel
serves any number of spans. The reading of the table, TMA loads, row indices and stores are shared with `hopper_joint`.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FAR = gl.constexpr(2**31 - 1)

TILES = gl.constexpr(2)
"""Tiles of which is told what they are: the one that is computed, and the next."""

together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of the warps that call it have come so far; its name has changed."""

FIELDS = (
    *("list", "list_b", "list_h", "index", "unsure", "unsure_b", "unsure_h", "form"),
    *("q_pos", "q_pos_b", "q_pos_h", "k_pos", "k_pos_b", "k_pos_h"),
    *("lo", "hi", "home", "home_b", "home_h", "home_g"),
)
"""What the table says of a span: addresses, strides of the sequence and the head (or the group), and the range. An index of
0 is none: entry e is block e. unsure: how many are not FULL before each of what `form` says, and after the last. An absent
key's position is beyond every range."""

BLOCKS, WHOLE = (gl.constexpr(form) for form in range(2))
"""What is counted as unsure: blocks in their order, or all blocks at once."""

WIDTH = gl.constexpr(len(FIELDS))

FRESH = gl.constexpr(2)


@gluon.jit
def fact(span, field: gl.constexpr):
    """Load `field` (its index in `FIELDS`) of a span, whose table row starts at the address `span`."""
    return gl.load(span + field)


@gluon.jit
def _list_of(span, b, h, m, begun, first, last, PER: gl.constexpr):
    """Load a query block's list in one span: where its entries begin, how many it has, which of them this program processes,
    and in how many steps."""
    at = fact(span, 0).to(gl.pointer_type(gl.int64)) + b * fact(span, 1) + h * fact(span, 2) + m * 5
    begin, count = gl.load(at), gl.load(at + 1).to(gl.int32)
    head, tail = gl.load(at + 2).to(gl.int32), gl.load(at + 3).to(gl.int32)
    shift = gl.load(at + 4).to(gl.int32)
    low, high = gl.maximum(first - begun, 0), gl.minimum(last - begun, count)
    steps = gl.maximum((high - low + PER - 1) // PER, 0)
    return begin, count, head, tail, shift, low, high, steps


@gluon.jit
def _block_of(index, begin, e, shift):
    """Load the number of the key block that entry e of a block list names."""
    block = (begin + e).to(gl.int32)
    if index != 0:
        block = gl.load(index.to(gl.pointer_type(gl.int32)) + begin + e)
    return block + shift


@gluon.jit
def _pair_of(index, begin, e, high, shift, PER: gl.constexpr):
    """Load the key blocks of one step, which takes PER = 1 or 2 entries of a list; past the end, the last entry again."""
    left = _block_of(index, begin, gl.minimum(e, high - 1), shift)
    right = left
    if PER == 2:
        right = _block_of(index, begin, gl.minimum(e + 1, high - 1), shift)
    return left, right


@gluon.jit
def _where_of(row, tile, M, shape):
    """Locate a tile: its sequence, the head of its lists, its key/value group, and its query block."""
    GROUP: gl.constexpr = shape[0]
    LISTS: gl.constexpr = shape[1]
    BLOCK_Q: gl.constexpr = shape[2]
    ROWS: gl.constexpr = shape[3]
    PACK: gl.constexpr = shape[4]
    b, h = (row // M // LISTS).to(gl.int64), (row // M % LISTS).to(gl.int64)
    if LISTS == 1:
        g = (tile // (BLOCK_Q // ROWS) // ((GROUP + PACK - 1) // PACK)).to(gl.int64)
    else:
        g = h // GROUP
    return b, h, g, row % M


@gluon.jit
def tma_load(
    own, copies, home, at_own, column, ring, barrier, first, CHUNKS: gl.constexpr, APART: gl.constexpr
):
    """Load 64 rows of keys or values into shared memory by TMA. `home` >= 0: rows `home` to `home` + 63 of the tensor `own`;
    else block -2 - `home` of `copies`. Box n, of 64 columns, goes to slot `first` + n * APART of `ring`."""
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
def locate_warp_group_rows(place, which: gl.constexpr, layout: gl.constexpr, shape):
    """Return, for each of the 64 rows that warp group `which` computes: its head, whether it exists, its index in the part,
    and its row in the query tensor (-1: none)."""
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
def partial_row_sums(p):
    """Sum each row of p [64, n] within a thread: [64, 4], since four threads share a row and add their sums later."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def store_normalized_rows(
    acc, peak, total, b, rows, slot, split, stores, which: gl.constexpr, D: gl.constexpr,
    PLACED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Divide the 64 accumulated rows of a warp group by their softmax sums and store them; under SPLIT, if their list was
    split, as the partial result of one piece."""
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
            part = gl.where(gl.expand_dims(share > 0, 1), acc * gl.expand_dims(share, 1), 0.0)
            gl.store(PART_OUT + gl.expand_dims(o, 1) + gl.expand_dims(d, 0), part)
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
def _taken(t, work, SPLIT: gl.constexpr):
    """The list row, tile and piece of the t-th program, or of the last; a row of -1 is none."""
    ITEM, TOLD, TAKEN, items, tiles, M = work
    t = gl.minimum(t, items * tiles - 1)
    row, tile, piece = items - 1 - t % items, t // items, gl.to_tensor(0)
    if SPLIT:
        # The pieces of split rows, of all tiles, before anything else.
        held = gl.load(TOLD + 1)
        after, rest = t - held * tiles, gl.maximum(items - held, 1)
        item = gl.where(after < 0, t // tiles, held + after % rest)
        tile = gl.where(after < 0, t % tiles, after // rest)
        row, piece = gl.load(ITEM + 2 * item), gl.load(ITEM + 2 * item + 1)
    return row, tile, piece


@gluon.jit
def _tell(words, barriers, turn, row, tile, piece):
    """What the next tile is, to the groups that compute."""
    t_full, t_free = barriers[4], barriers[5]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn % TILES
    mbarrier.wait(t_free.index(place), ((turn // TILES) & 1) ^ 1)
    none = gl.full([1], 0, gl.int32, line)
    words.index(4 * place).store(none + row)
    words.index(4 * place + 1).store(none + tile)
    words.index(4 * place + 2).store(none + piece)
    together()
    mbarrier.arrive(t_full.index(place), count=1)


@gluon.jit
def producer_warp(
    keys, values, words, barriers, table, n_spans, work, strides, shape: gl.constexpr, CHUNKS: gl.constexpr,
    PER: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The loading warp: copy keys and values of every step of every tile to ring buffers in shared memory, ahead of their
    use. Values lag one step behind keys: the values loaded in a tile's first step are left from before, and get weights of
    zero."""
    k_own, k_copies, k_boxes = keys
    v_own, v_copies, v_boxes = values
    k_full, k_free, v_full, v_free = barriers[0], barriers[1], barriers[2], barriers[3]
    own_b, own_g, column_g = strides
    TAKEN, items, tiles, M = work[2], work[3], work[4], work[5]
    BYTES: gl.constexpr = 2 * CHUNKS * 64 * 64 * 2
    chunk = gl.to_tensor(0)
    if SPLIT:
        chunk = gl.load(work[1])
    step, turn = gl.to_tensor(0), gl.to_tensor(0)
    t = gl.atomic_add(TAKEN, 1, sem="relaxed")
    row, tile, piece = _taken(t, work, SPLIT)
    while t < items * tiles:
        here = row >= 0
        if here:
            _tell(words, barriers, turn, row, tile, piece)
            turn += 1
        # The next one is taken ahead, for what it is comes late.
        t = gl.atomic_add(TAKEN, 1, sem="relaxed")
        now, of_now, part = row, tile, piece
        row, tile, piece = _taken(t, work, SPLIT)
        if here:
            first, last = gl.to_tensor(0), gl.to_tensor(2147483647)
            if SPLIT:
                first, last = part * chunk, part * chunk + chunk
            b, h, g, m = _where_of(now, of_now, M, shape)
            at_own, column = (b * own_b + g * own_g).to(gl.int32), (g * column_g).to(gl.int32)
            begun = gl.to_tensor(0)
            for s in range(n_spans):
                span = table + s * WIDTH
                begin, count, head, tail, shift, low, high, steps = _list_of(
                    span, b, h, m, begun, first, last, PER
                )
                begun += count
                if steps > 0:
                    index = fact(span, 3)
                    homes = fact(span, 16).to(gl.pointer_type(gl.int32))
                    homes += b * fact(span, 17) + h * fact(span, 18) + g * fact(span, 19)
                    for j in range(steps):
                        left, right = _pair_of(index, begin, low + j * PER, high, shift, PER)
                        if PER == 1:
                            left, right = 2 * left, 2 * left + 1
                        left, right = gl.load(homes + left), gl.load(homes + right)
                        stage = step % STAGES
                        mbarrier.wait(k_free.index(stage), ((step // STAGES) & 1) ^ 1)
                        mbarrier.expect(k_full.index(stage), BYTES)
                        box, full = stage * CHUNKS * 2, k_full.index(stage)
                        tma_load(k_own, k_copies, left, at_own, column, k_boxes, full, box, CHUNKS, 2)
                        tma_load(k_own, k_copies, right, at_own, column, k_boxes, full, box + 1, CHUNKS, 2)
                        step += 1
                        stage = step % STAGES
                        mbarrier.wait(v_free.index(stage), ((step // STAGES) & 1) ^ 1)
                        mbarrier.expect(v_full.index(stage), BYTES)
                        box, full = stage * CHUNKS * 2, v_full.index(stage)
                        tma_load(v_own, v_copies, left, at_own, column, v_boxes, full, box, CHUNKS, 2)
                        tma_load(v_own, v_copies, right, at_own, column, v_boxes, full, box + 1, CHUNKS, 2)
    _tell(words, barriers, turn, -1, 0, 0)


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
    counts = fact(span, 4).to(gl.pointer_type(gl.int32)) + b * fact(span, 5) + h * fact(span, 6)
    past = gl.maximum(past, first)
    form = fact(span, 7)
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
    score, acc, peak, total, scale, barriers, step, dtype: gl.constexpr, o_layout: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Weights of a step, and what was summed before in terms of the new largest score."""
    v_free = barriers[3]
    top = gl.maximum(peak, gl.max(score, 1) * scale)
    floor = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(score * scale - gl.expand_dims(floor, 1))
    fade = gl.exp2(peak - floor)
    total = total * gl.expand_dims(
        gl.convert_layout(fade, gl.SliceLayout(1, total.type.layout)), 1
    ) + partial_row_sums(p)
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
    b, h, g, m = _where_of(gl.maximum(row, 0), tile, M, shape)
    place = (b, h, g, m, tile, q_row, q_row_b, q_row_h)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    head_of, mine, at_place, at = locate_warp_group_rows(place, which, gl.SliceLayout(1, loaded), shape)
    d = gl.arange(0, D, gl.SliceLayout(0, loaded))
    q_at = b * q_b + head_of * q_h + gl.maximum(at, 0).to(gl.int64) * q_s
    here = gl.expand_dims(mine & (at >= 0), 1) & gl.expand_dims(d >= 0, 0)
    q = gl.load(Q + gl.expand_dims(q_at, 1) + gl.expand_dims(d, 0), mask=here, other=0.0)
    return q


@gluon.jit
def _consume(
    asked, which: gl.constexpr, shape: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr, PLACED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A computing warp group: the running softmax and the output of 64 query rows over every step, tile after tile."""
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
        b, h, g, m = _where_of(row, tile, M, shape)
        place = (b, h, g, m, tile, queries[4], queries[5], queries[6])
        head_of, mine, at_place, at = locate_warp_group_rows(place, which, line, shape)
        peak = gl.full([64], float("-inf"), gl.float32, line)
        acc = gl.full([64, D], 0.0, gl.float32, o_layout)
        total = partial_row_sums(nothing)
        weights = gl.convert_layout(nothing.to(q_buf.dtype), p_layout)
        begun = gl.to_tensor(0)
        for s in range(n_spans):
            span = table + s * WIDTH
            begin, count, head, tail, shift, low, high, steps = _list_of(
                span, b, h, m, begun, first, last, PER
            )
            begun += count
            if steps > 0:
                index = fact(span, 3)
                pos = fact(span, 8).to(gl.pointer_type(gl.int32)) + b * fact(span, 9) + h * fact(span, 10)
                lo = fact(span, 14).to(gl.int32)
                width = (fact(span, 15).to(gl.int32) - lo).to(gl.uint32)
                # Counted from the lower end of the range, what is outside is above its width on either side; rows before
                # all keys stand right before the first, from where the place of an absent key is still told from one in
                # the range.
                q_pos = gl.maximum(gl.load(pos + at_place) - lo, -1)
                pos = fact(span, 11).to(gl.pointer_type(gl.int32)) + b * fact(span, 12) + h * fact(span, 13)
                from_step, to_step = _sure(span, b, h, begin, shift, head, tail, low, high, steps, PER)
                for turn_of in range(2):
                    # Steps that are tested and then steps that are not, twice: the head of a run, and its tail.
                    tested = gl.where(turn_of == 0, from_step, steps)
                    sure = gl.where(turn_of == 0, to_step, steps)
                    begins = gl.where(turn_of == 0, 0, to_step)
                    left, right = _pair_of(index, begin, low + begins * PER, high, shift, PER)
                    for j in range(begins, tested):
                        e = low + j * PER
                        second = n // BLOCK_K
                        key = gl.where(second > 0, right, left) * BLOCK_K + n % BLOCK_K
                        k_pos = gl.load(pos + key, mask=e + second < high, other=FAR)
                        # Blocks are looked up a step ahead: their positions wait for them.
                        left, right = _pair_of(index, begin, e + PER, high, shift, PER)
                        score, acc = _products(q, rings, barriers, weights, nothing, acc, step, STAGES)
                        gap = (gl.expand_dims(q_pos, 1) - gl.expand_dims(k_pos, 0)).to(gl.uint32)
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
        store_normalized_rows(
            acc, peak, total, b, (head_of, mine, at_place, at), slot, split, stores, which, D, PLACED, SPLIT
        )


@gluon.jit(
    do_not_specialize=["items", "tiles", "M", "n_spans", "own_b", "own_g", "column_g", "lse_b", "lse_h"]
)
def hopper_kernel(
    k_own, v_own, k_copies, v_copies, table, SHORT, Q, OUT, LSE, PART_OUT, PART_LSE, ITEM, PIECES, SLOT, TOLD,
    q_row, q_row_b, q_row_h, TAKEN, items, tiles, q_b, q_h, q_s, own_b, own_g, column_g, out_b, out_h, out_s,
    lse_b, lse_h, M, n_spans, scale, GROUP: gl.constexpr, LISTS: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr, ROWS: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, PLACED: gl.constexpr,
    SPLIT: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent Hopper form of `kernel.attend_kernel`: programs take tiles of 128 query rows (under SPLIT, pieces of their
    lists) one after another. The last dimension of all tensors is contiguous.

    There are items * tiles tiles, as many as `attend_kernel` has programs; TAKEN, 0 at the start, counts the tiles taken so
    far. GATED: nothing is computed if SHORT, the number of key blocks whose copies found no room, is above 0.
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
            (_consume, (told, 0, shape, BLOCK_K, STAGES, D, PLACED, SPLIT)),
            (_consume, (told, 1, shape, BLOCK_K, STAGES, D, PLACED, SPLIT)),
            (producer_warp, (
                (k_own, k_copies, k_boxes), (v_own, v_copies, v_boxes), words, barriers, table, n_spans, work,
                (own_b, own_g, column_g), shape, D // 64, 128 // BLOCK_K, STAGES, SPLIT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
