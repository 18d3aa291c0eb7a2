"""The warp of `hopper` that loads: it takes tile after tile, and brings their keys and values."""

# What follows is Gluon's language, not Python's: constant conditions are told from the rest by their nesting.
# mypy: ignore-errors
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mmaccel.backends.triton.prefill.block_iter import (
    TILES,
    WIDTH,
    bring,
    list_of,
    pair_of,
    together,
    told,
    where_of,
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
def produce(
    keys,
    values,
    words,
    barriers,
    table,
    n_spans,
    work,
    strides,
    shape: gl.constexpr,
    CHUNKS: gl.constexpr,
    PER: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Keys and values of every step of tile after tile into the ring. Values stand one place further on: a tile's begin with
    those that were there, whose weights are zero."""
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
            b, h, g, m = where_of(now, of_now, M, shape)
            at_own, column = (b * own_b + g * own_g).to(gl.int32), (g * column_g).to(gl.int32)
            begun = gl.to_tensor(0)
            for s in range(n_spans):
                span = table + s * WIDTH
                begin, count, head, tail, shift, low, high, steps = list_of(
                    span, b, h, m, begun, first, last, PER
                )
                begun += count
                if steps > 0:
                    index = told(span, 3)
                    homes = told(span, 16).to(gl.pointer_type(gl.int32))
                    homes += b * told(span, 17) + h * told(span, 18) + g * told(span, 19)
                    for j in range(steps):
                        left, right = pair_of(index, begin, low + j * PER, high, shift, PER)
                        if PER == 1:
                            left, right = 2 * left, 2 * left + 1
                        left, right = gl.load(homes + left), gl.load(homes + right)
                        stage = step % STAGES
                        mbarrier.wait(k_free.index(stage), ((step // STAGES) & 1) ^ 1)
                        mbarrier.expect(k_full.index(stage), BYTES)
                        box, full = stage * CHUNKS * 2, k_full.index(stage)
                        bring(k_own, k_copies, left, at_own, column, k_boxes, full, box, CHUNKS, 2)
                        bring(k_own, k_copies, right, at_own, column, k_boxes, full, box + 1, CHUNKS, 2)
                        step += 1
                        stage = step % STAGES
                        mbarrier.wait(v_free.index(stage), ((step // STAGES) & 1) ^ 1)
                        mbarrier.expect(v_full.index(stage), BYTES)
                        box, full = stage * CHUNKS * 2, v_full.index(stage)
                        bring(v_own, v_copies, left, at_own, column, v_boxes, full, box, CHUNKS, 2)
                        bring(v_own, v_copies, right, at_own, column, v_boxes, full, box + 1, CHUNKS, 2)
    _tell(words, barriers, turn, -1, 0, 0)
