"""What both kernels for Hopper share: the table of spans, lists and their blocks, the copy engine, rows, and what is stored.

What is known of a span is read from a table on the device: one compiled kernel serves plans of any number of spans.
"""

# What follows is Gluon's language, not Python's: constant conditions are told from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

FAR = gl.constexpr(2**31 - 1)

TILES = gl.constexpr(2)
"""Tiles of `hopper` of which is told what they are: the one that is computed, and the next."""

together = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of the warps that call it have come so far; its name has changed."""

FIELDS = (
    *("list", "list_b", "list_h", "index", "unsure", "unsure_b", "unsure_h", "form"),
    *("q_place", "q_place_b", "q_place_h", "k_place", "k_place_b", "k_place_h"),
    *("lo", "hi", "home", "home_b", "home_h", "home_g"),
)
"""What the table says of a span: addresses, strides of the sequence and the head (or the group), and the range. An index of
0 is none: entry e is block e. unsure: how many are not FULL before each of what `form` says, and after the last. The place
of an absent key is beyond every range."""

BLOCKS, WHOLE = (gl.constexpr(form) for form in range(2))
"""What is counted as unsure: blocks in their order, or all blocks at once."""

WIDTH = gl.constexpr(len(FIELDS))


@gluon.jit
def told(span, field: gl.constexpr):
    return gl.load(span + field)


@gluon.jit
def list_of(span, b, h, m, begun, first, last, PER: gl.constexpr):
    """A list row's run in a span, which of its entries are this program's, and in how many steps."""
    at = told(span, 0).to(gl.pointer_type(gl.int64)) + b * told(span, 1) + h * told(span, 2) + m * 5
    begin, count = gl.load(at), gl.load(at + 1).to(gl.int32)
    head, tail = gl.load(at + 2).to(gl.int32), gl.load(at + 3).to(gl.int32)
    shift = gl.load(at + 4).to(gl.int32)
    low, high = gl.maximum(first - begun, 0), gl.minimum(last - begun, count)
    steps = gl.maximum((high - low + PER - 1) // PER, 0)
    return begin, count, head, tail, shift, low, high, steps


@gluon.jit
def block_of(index, begin, e, shift):
    """The block of entry e."""
    block = (begin + e).to(gl.int32)
    if index != 0:
        block = gl.load(index.to(gl.pointer_type(gl.int32)) + begin + e)
    return block + shift


@gluon.jit
def pair_of(index, begin, e, high, shift, PER: gl.constexpr):
    """The blocks of a step's entries, the last ones where there are no more."""
    left = block_of(index, begin, gl.minimum(e, high - 1), shift)
    right = left
    if PER == 2:
        right = block_of(index, begin, gl.minimum(e + 1, high - 1), shift)
    return left, right


@gluon.jit
def where_of(row, tile, M, shape):
    """Sequence, list, group and block of queries of a tile."""
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
def partly(p):
    """[64, 4]: the sums of what each of the four threads that share a row of p [64, n] holds of it."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)


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
