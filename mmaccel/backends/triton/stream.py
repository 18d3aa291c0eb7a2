"""Triton kernels of `ops.clusters` (retrieval in a stream), and functions that launch them, with the operators' arguments.

Clusters are ranked by comparing each with all others. Units of keys and values are read by the device from pinned host
memory in one launch, by an index that the host need not know.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

CLUSTERS = 8  # clusters of a program
OTHERS = 512  # clusters that they are compared with at a time
ENTRIES = 2048  # entries that are looked at together
COLUMNS = 64  # columns of a program
WORDS = 16  # rows that are read together
FORETOLD = 256  # entries of a program

LOWEST = tl.constexpr(torch.finfo(torch.float32).min / 2)

PROGRAMS = 32
"""Programs that gather units. The wire is full with a few hundred kilobytes under way; more would take the device from the
layer that computes while the next one's units arrive: see "Host memory and streams" in lab/LOG.md."""

# Words that such a program has under way at once: of up to eight bytes, whatever the type of what is gathered.
UNDER_WAY = 4096

WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _beats(other, there, score, at):
    """[n, m]: whether others [m] come before clusters [n]."""
    other, there, score, at = other[None, :], there[None, :], score[:, None], at[:, None]
    return (other > score) | ((other == score) & (there < at))


@triton.jit(do_not_specialize=["C"])
def _cluster_scores_kernel(
    KEY, QUERY, OUT, C, key_r, key_c,
    D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Scores of BLOCK cluster keys of a layer with one query; each is summed in a fixed order."""
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    query = tl.load(QUERY + row * D + d, mask=d < D, other=0.0)
    inside = (c < C)[:, None] & (d < D)[None, :]
    at = row * key_r + c.to(tl.int64)[:, None] * key_c + d[None, :]
    key = tl.load(KEY + at, mask=inside, other=0.0).to(tl.float32)
    found = _product(key, query, COSINE)
    tl.store(OUT + row * C + c, found, mask=c < C)


@triton.jit
def _product(key, query, COSINE: tl.constexpr):
    found = tl.sum(key * query[None, :], 1)
    if COSINE:
        length = tl.sqrt(tl.sum(key * key, 1)) * tl.sqrt(tl.sum(query * query, 0))
        found = found / tl.maximum(length, 1e-12)
    return found


@triton.jit(do_not_specialize=["C", "n"])
def _word_scores_kernel(
    KEY, QUERY, OUT, C, n, key_r, key_c,
    D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Scores of BLOCK cluster keys of a layer with each of the question's n words."""
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    at = row * key_r + c.to(tl.int64)[:, None] * key_c + d[None, :]
    key = tl.load(KEY + at, mask=(c < C)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    for word in range(0, n):
        query = tl.load(QUERY + (row * n + word) * D + d, mask=d < D, other=0.0)
        tl.store(OUT + (row * n + word) * C + c, _product(key, query, COSINE), mask=c < C)


@triton.jit(do_not_specialize=["C", "n"])
def _standardize_scores_kernel(SCORE, SIZE, COUNT, OUT, C, n, BLOCK: tl.constexpr):
    """Second kernel of `score_by_words`: standardizes each word's scores over all clusters of a layer, and reduces over
    words."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    here = tl.load(SIZE + row * C + c, mask=c < C, other=0) > 0
    count, some = tl.load(COUNT), tl.maximum(tl.sum(here.to(tl.float32), 0), 1.0)
    best, total = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for word in range(0, n):
        if word < count:
            score = tl.load(SCORE + (row * n + word) * C + c, mask=c < C, other=0.0)
            score -= tl.sum(tl.where(here, score, 0.0), 0) / some
            spread = tl.sum(tl.where(here, score * score, 0.0), 0) / some
            score /= tl.sqrt(tl.maximum(spread, 1e-12))
            best, total = tl.maximum(best, score), total + score
    tl.store(OUT + row * C + c, best - total / (count + 1), mask=c < C)


@triton.jit(do_not_specialize=["V", "limit", "fewest"])
def _beyond_budget_kernel(SCORE, SIZE, OUT, V, limit, fewest, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """Kernel of `mark_clusters_beyond_budget`, for BLOCK visual clusters of a layer: whether better-scored ones fill the
    budget already."""
    row = tl.program_id(1).to(tl.int64) * V
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    score = _visual(SCORE + row, SIZE, at, V)[0]
    before, rank = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, V, OTHERS):
        there = first + tl.arange(0, OTHERS)
        other, size = _visual(SCORE + row, SIZE, there, V)
        earlier = _beats(other, there, score, at) & (there < V)[None, :]
        before += tl.sum(tl.where(earlier, size[None, :], 0), 1)
        rank += tl.sum(earlier.to(tl.int32), 1)
    tl.store(OUT + row + at, (before >= limit) & (rank >= fewest), mask=at < V)


@triton.jit
def _visual(SCORE, SIZE, at, V):
    size = tl.load(SIZE + at, mask=at < V, other=0).to(tl.int32)
    return tl.where(size > 0, tl.load(SCORE + at, mask=at < V, other=0.0), -float("inf")), size


@triton.jit(do_not_specialize=["C", "V"])
def _scores_and_preceding_kernel(
    SCORE, SIZE, PARENT, WITHOUT, OUT, BEFORE, C, V,
    STAGED: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Kernel of `mask_and_count_better`, for BLOCK clusters of a layer."""
    row = tl.program_id(1).to(tl.int64)
    visual, row = WITHOUT + row * V, row * C
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    score = _candidate(SCORE + row, SIZE + row, PARENT + row, visual, at, C, V, STAGED)[0]
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, C, OTHERS):
        there = first + tl.arange(0, OTHERS)
        other, size = _candidate(SCORE + row, SIZE + row, PARENT + row, visual, there, C, V, STAGED)
        earlier = _beats(other, there, score, at)
        before += tl.sum(tl.where(earlier, size[None, :], 0), 1)
    tl.store(OUT + row + at, score, mask=at < C)
    tl.store(BEFORE + row + at, before.to(tl.int64), mask=at < C)


@triton.jit
def _candidate(SCORE, SIZE, PARENT, WITHOUT, at, C, V, STAGED: tl.constexpr):
    """Scores, -inf of what is no candidate, and sizes, 0 past the last cluster."""
    inside = at < C
    score = tl.load(SCORE + at, mask=inside, other=0.0)
    size = tl.load(SIZE + at, mask=inside, other=0).to(tl.int32)
    if STAGED:
        parent = tl.load(PARENT + at, mask=inside, other=V)
        hidden = tl.load(WITHOUT + parent, mask=parent < V, other=1) != 0
    else:
        hidden = size == 0
    return tl.where(hidden, -float("inf"), score), size


@triton.jit(do_not_specialize=["C", "N", "budget", "ahead", "key_row", "key_at", "late", "parts"])
def _select_entries_kernel(
    BEFORE, SIZE, OWNER, WITHIN, FIRST, FLAT, KEYS, QUERY, UNITS, SCORE, KEEP, OUT, AHEAD, C, N, budget,
    ahead, key_row, key_at, late, parts,
    D: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Kernel of `select_entries`, a program a layer: the first writes OUT, the second AHEAD. SCORE, KEEP: scratch memory."""
    row = tl.program_id(0)
    if row == 0:
        last = _last(BEFORE, SIZE, C, budget, OTHERS)
        if last >= 0:
            left = budget - tl.load(BEFORE + last)
            count = tl.load(SIZE + last)
            own = FLAT + tl.load(FIRST + last)
            d = tl.arange(0, DIM)
            query = tl.load(QUERY + d, mask=d < D, other=0.0)
            for first in range(0, count, TILE):
                at = first + tl.arange(0, TILE)
                entry = tl.load(own + at, mask=at < count, other=0)
                inside = (at < count)[:, None] & (d < D)[None, :]
                key = tl.load(KEYS + (entry * key_row + key_at)[:, None] + d[None, :], mask=inside, other=0.0)
                tl.store(SCORE + at, _product(key.to(tl.float32), query, COSINE), mask=at < count)
            tl.debug_barrier()
            for first in range(0, count, TILE):
                at = first + tl.arange(0, TILE)
                score = tl.load(SCORE + at, mask=at < count, other=0.0)
                rank = tl.zeros([TILE], tl.int32)
                for begun in range(0, count, TILE):
                    there = begun + tl.arange(0, TILE)
                    other = tl.load(SCORE + there, mask=there < count, other=0.0)
                    earlier = _beats(other, there, score, at) & (there < count)[None, :]
                    rank += tl.sum(earlier.to(tl.int32), 1)
                tl.store(KEEP + at, (rank < left).to(tl.int32), mask=at < count)
            tl.debug_barrier()
        slot = tl.zeros([], tl.int32)
        for first in range(0, N, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            owner, within, line = _line(BEFORE, OWNER, WITHIN, entry, C, N)
            of_last = owner == last
            keep = tl.load(KEEP + within, mask=of_last, other=0)
            take = tl.where(of_last, keep, (line < budget).to(tl.int32))
            tl.store(OUT + slot + tl.cumsum(take, 0) - 1, entry.to(tl.int64), mask=take > 0)
            slot += tl.sum(take, 0)
        if late > 0:
            begin = tl.load(UNITS) * parts - late
            for first in range(0, late, BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(OUT + budget + at, begin + at, mask=at < late)
    else:
        total = tl.zeros([], tl.int64)
        for first in range(0, C, OTHERS):
            c = first + tl.arange(0, OTHERS)
            total += tl.sum(tl.load(SIZE + C + c, mask=c < C, other=0), 0)
        for first in range(0, N, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            owner, within, line = _line(BEFORE + C, OWNER + N, WITHIN + N, entry, C, N)
            tl.store(AHEAD + line, entry.to(tl.int64), mask=line < ahead)
        for first in range(0, ahead, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(AHEAD + at, tl.full([BLOCK], -1, tl.int64), mask=(at >= total) & (at < ahead))


@triton.jit
def _last(BEFORE, SIZE, C, budget, OTHERS: tl.constexpr):
    """The cluster of which some entries are within the budget and some are not; -1: none."""
    found = tl.full([], -1, tl.int32)
    for first in range(0, C, OTHERS):
        c = first + tl.arange(0, OTHERS)
        before = tl.load(BEFORE + c, mask=c < C, other=budget)
        size = tl.load(SIZE + c, mask=c < C, other=0)
        cut = (before < budget) & (before + size > budget)
        found = tl.maximum(found, tl.max(tl.where(cut, c, -1), 0))
    return found


@triton.jit
def _line(BEFORE, OWNER, WITHIN, entry, C, N):
    """Of entries: their cluster, their place in it, and how many entries come before each, cluster by cluster."""
    owner = tl.load(OWNER + entry, mask=entry < N, other=C)
    there = owner < C
    within = tl.load(WITHIN + entry, mask=there, other=0)
    line = tl.load(BEFORE + owner, mask=there, other=1 << 30) + within
    return owner, within, line


@triton.jit(do_not_specialize=["C", "count", "head", "tokens"])
def _summary_tokens_kernel(
    SCORE, PICKED, SIZE, KEY, VALUE, TIME, OUT, TIMES, ADDED, LEFT, C, count, head, tokens, row_c, out_s,
    out_g, out_m,
    D: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, HIDES: tl.constexpr, BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Kernel of `write_best_clusters`: rank BLOCK clusters, and copy each one's mean key and value to its rank."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    score, size, picked = _standing(SCORE, PICKED, SIZE, at, C)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, C, OTHERS):
        there = first + tl.arange(0, OTHERS)
        other, _, _ = _standing(SCORE, PICKED, SIZE, there, C)
        place += tl.sum((_beats(other, there, score, at) & (there < C)[None, :]).to(tl.int32), 1)
    some = (at < C) & (place < count)
    tl.store(TIMES + place, tl.load(TIME + at, mask=some, other=0.0), mask=some)
    added = tl.zeros([BLOCK], tl.float32)
    if tokens > 0:
        weight = tl.where(picked, 0, size) * tokens
        added = tl.log(tl.maximum(weight.to(tl.float32), 1e-30))
    if HIDES:
        added = tl.where(place >= tl.load(LEFT), -float("inf"), added)
    tl.store(ADDED + head + place, added, mask=some)
    if tl.program_id(0) == 0:
        for first in range(0, head, OTHERS):
            column = first + tl.arange(0, OTHERS)
            tl.store(ADDED + column, tl.zeros([OTHERS], tl.float32), mask=column < head)
    d = tl.arange(0, DIM)
    inside = some[:, None] & (d < WIDE)[None, :]
    source = at.to(tl.int64)[:, None] * row_c + d[None, :]
    target = ((d // D) * out_g + d % D)[None, :] + place.to(tl.int64)[:, None] * out_m
    tl.store(OUT + target, tl.load(KEY + source, mask=inside, other=0.0), mask=inside)
    tl.store(OUT + out_s + target, tl.load(VALUE + source, mask=inside, other=0.0), mask=inside)


@triton.jit
def _standing(SCORE, PICKED, SIZE, at, C):
    inside = at < C
    score = tl.maximum(tl.load(SCORE + at, mask=inside, other=0.0), LOWEST)
    picked = tl.load(PICKED + at, mask=inside, other=0) != 0
    size = tl.load(SIZE + at, mask=inside, other=0)
    score = tl.where(picked, 1.5 * LOWEST, score)
    return tl.where(size == 0, -float("inf"), score), size, picked


@triton.jit
def _total(X, row_n, d, D, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[COLUMNS] the sum of the first `count` rows."""
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        n = first + tl.arange(0, ROWS)
        inside = (n < count)[:, None] & (d < D)[None, :]
        x = tl.load(X + n.to(tl.int64)[:, None] * row_n + d[None, :], mask=inside, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    return total


@triton.jit(do_not_specialize=["n"])
def _mean_query_kernel(
    X, COUNT, OUT, n, row_h, row_n, D,
    HEADS: tl.constexpr, TOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Kernel of `mean_query`, for some columns of one group of HEADS heads."""
    group = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = n
    if TOLD:
        count = tl.load(COUNT).to(tl.int32)
    found = tl.zeros([COLUMNS], tl.float32)
    for head in range(HEADS):
        found += _total(X + (group * HEADS + head) * row_h, row_n, d, D, count, ROWS, COLUMNS) / count
    tl.store(OUT + group * D + d, found, mask=d < D)


@triton.jit(do_not_specialize=["n"])
def _predict_hidden_kernel(
    X, COUNT, KNOWN, BEFORE, SEEN, OUT, n, row_n, E,
    SHOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Kernel of `predict_next_layer_input` (predicted hidden states), for some of the E columns of all rows."""
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(COUNT).to(tl.int32)
    mean = _total(X, row_n, e, E, count, ROWS, COLUMNS) / count
    if SHOWN:
        tl.store(SEEN + e, mean - tl.load(BEFORE + e, mask=e < E, other=0.0), mask=e < E)
    tl.store(BEFORE + e, mean, mask=e < E)
    kind = OUT.dtype.element_ty
    known = tl.load(KNOWN + e, mask=e < E, other=0.0).to(kind).to(tl.float32)
    for first in range(0, n, ROWS):
        line = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (line < n)[:, None] & (e < E)[None, :]
        x = tl.load(X + line[:, None] * row_n + e[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + line[:, None] * E + e[None, :], (x + known[None, :]).to(kind), mask=inside)


@triton.jit(do_not_specialize=["n", "last"])
def _assign_prefetch_slots_kernel(TABLE, ENTRY, SLOTS, BEGIN, OUT, n, last, BLOCK: tl.constexpr):
    """Kernel of `mark_host_slots`, for some entries. Only the table's last slot, which is scratch, is shared by programs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(ENTRY + at, mask=at < n, other=-1)
    place = tl.where(entry < 0, last, entry)
    found = tl.load(TABLE + place, mask=at < n, other=-1)
    host = (found >= 0) & (found < tl.load(SLOTS)) & (entry >= 0)
    tl.store(TABLE + place, tl.load(BEGIN) + at, mask=host)
    tl.store(OUT + at, tl.where(host, found, -1), mask=at < n)


@triton.jit(do_not_specialize=["items", "slots"])
def _gather_kernel(
    out, slab, base, slot, items, slots, side, group,
    GROUPS: tl.constexpr, RUN: tl.constexpr, EACH: tl.constexpr, WORD: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernel of `copy_units`: copy blocks of BLOCK words of one head of keys or values of one unit; a head has RUN words,
    and EACH words lie between units in the output.

    With PAIRS every head starts at an even word. Unless loads are as wide as stores, sectors cross the bus twice.
    """
    PIECES: tl.constexpr = (RUN + BLOCK - 1) // BLOCK
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        piece = item % PIECES
        lane = (item // PIECES) % (2 * GROUPS)
        unit = item // (PIECES * 2 * GROUPS)
        at = piece * BLOCK + tl.arange(0, BLOCK)
        inside = at < RUN
        source = tl.load(slot + unit).to(tl.int64)
        held = source >= 0
        source = tl.maximum(source, 0)
        start = tl.load(base + source // slots) // WORD + ((source % slots) * (2 * GROUPS) + lane) * RUN
        if PAIRS:
            start = tl.multiple_of(start, 2)
        words = tl.load(slab + start + at, mask=inside & held, other=0)
        target = (lane // GROUPS) * side + (lane % GROUPS) * group + unit.to(tl.int64) * EACH
        tl.store(out + target + at, words, mask=inside)


def score_keys(key, query, cosine):
    """Launch `ops.clusters.score_keys`: dot product (or cosine) of keys [R, C, d] and queries [R, d], [R, C] float32."""
    R, C, D = key.shape
    out = torch.empty(R, C, device=key.device)
    if C:
        _cluster_scores_kernel[(triton.cdiv(C, CLUSTERS), R)](
            key, query.contiguous(), out, C, key.stride(0), key.stride(1),
            D=D, COSINE=cosine, BLOCK=CLUSTERS, DIM=triton.next_power_of_2(D), num_warps=4,
        )  # fmt: skip
    return out


def score_by_words(key, words, size, cosine):
    """Launch `ops.clusters.score_by_words`: score of each cluster by its best-matching question word, [R, C] float32."""
    (R, C, D), n = key.shape, words.rows.shape[1]
    out = torch.empty(R, C, device=key.device)
    if C:
        score = torch.empty(R, n, C, device=key.device)
        _word_scores_kernel[(triton.cdiv(C, CLUSTERS), R)](
            key, words.rows.contiguous(), score, C, n, key.stride(0), key.stride(1),
            D=D, COSINE=cosine, BLOCK=CLUSTERS, DIM=triton.next_power_of_2(D), num_warps=4,
        )  # fmt: skip
        block = triton.next_power_of_2(C)
        _standardize_scores_kernel[(R,)](
            score, size.contiguous(), words.number, out, C, n, BLOCK=block, num_warps=8
        )
    return out


def mark_clusters_beyond_budget(score, size, limit, fewest):
    """Launch `ops.clusters.mark_clusters_beyond_budget`: which visual clusters are beyond a budget of `limit`, [R, V]."""
    R, V = score.shape
    out = torch.empty(R, V, dtype=torch.bool, device=score.device)
    if V:
        _beyond_budget_kernel[(triton.cdiv(V, CLUSTERS), R)](
            score, size, out, V, limit, fewest, BLOCK=CLUSTERS, OTHERS=OTHERS, num_warps=4
        )
    return out


def mask_and_count_better(score, size, parent, without):
    """Launch `ops.clusters.mask_and_count_better`: scores [R, C], -inf if excluded, and entries of better clusters."""
    R, C = score.shape
    out, before = torch.empty_like(score), torch.empty(R, C, dtype=torch.long, device=score.device)
    staged = parent is not None and without is not None
    size, parent = size.contiguous(), parent.contiguous() if staged else size
    without = without if staged else size
    _scores_and_preceding_kernel[(triton.cdiv(C, CLUSTERS), R)](
        score, size, parent, without, out, before, C, without.shape[1],
        STAGED=staged, BLOCK=CLUSTERS, OTHERS=OTHERS, num_warps=4,
    )  # fmt: skip
    return out, before


def select_entries(before, lists, budget, ahead, own, late):
    """Launch `ops.clusters.select_entries`: the retrieved entries, ascending, and those to prefetch for the next layer."""
    R, C = before.shape
    device, D, more = before.device, own.keys.shape[2], 0 if late is None else late.entries
    out = torch.empty(budget + more, dtype=torch.long, device=device)
    coming = torch.empty(ahead, dtype=torch.long, device=device) if R > 1 else None
    score = torch.empty(lists.largest, device=device)
    keep = torch.empty(lists.largest, dtype=torch.int32, device=device)
    tables = [
        t.contiguous() for t in (before, lists.size, lists.owner, lists.within, lists.first, lists.flat)
    ]
    _select_entries_kernel[(R,)](
        *tables, own.keys, own.query.contiguous(), out if late is None else late.units, score, keep, out,
        out if coming is None else coming, C, lists.owner.shape[1], budget, ahead,
        own.keys.stride(0), own.layer * own.keys.stride(1), more, 1 if late is None else late.parts,
        D=D, DIM=triton.next_power_of_2(D), TILE=16, COSINE=own.cosine, BLOCK=ENTRIES, OTHERS=OTHERS,
        num_warps=8,
    )  # fmt: skip
    return out, coming


def write_best_clusters(score, picked, size, rows, time, out, head, left, tokens):
    """Launch `ops.clusters.write_best_clusters`: summary tokens of the best clusters, their times and biases."""
    (C,), count, D, (key, value) = score.shape, out.shape[2], out.shape[3], rows
    times = torch.empty(count, dtype=time.dtype, device=time.device)
    added = torch.empty(head + count, device=score.device)
    _summary_tokens_kernel[(triton.cdiv(C, CLUSTERS),)](
        score, picked, size, key, value, time, out, times, added, added if left is None else left,
        C, count, head, tokens, key.stride(0), *out.stride()[:3],
        D=D, WIDE=key.shape[1], DIM=triton.next_power_of_2(key.shape[1]), HIDES=left is not None,
        BLOCK=CLUSTERS, OTHERS=OTHERS, num_warps=4,
    )  # fmt: skip
    return times, added


def mean_query(rows, count, groups):
    """Launch `ops.clusters.mean_query`: mean query [G * D] over the words of rows [H, n, D], summed over a group's heads."""
    H, n, D = rows.shape
    out = torch.empty(groups * D, device=rows.device)
    _mean_query_kernel[(groups, triton.cdiv(D, COLUMNS))](
        rows, out if count is None else count, out, n, rows.stride(0), rows.stride(1), D,
        HEADS=H // groups, TOLD=count is not None, ROWS=WORDS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def predict_next_layer_input(words, count, known, before, seen):
    """Launch `ops.clusters.predict_next_layer_input`: `words` [n, E] plus `known` [E]; updates `before` and `seen`."""
    n, E = words.shape
    out = torch.empty(n, E, dtype=words.dtype, device=words.device)
    _predict_hidden_kernel[(triton.cdiv(E, COLUMNS),)](
        words, count, known, before, before if seen is None else seen, out, n, words.stride(0), E,
        SHOWN=seen is not None, ROWS=WORDS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def mark_host_slots(table, entries, slots, begin):
    """Launch `ops.clusters.mark_host_slots`: host slots [n] of `entries`, -1 for none; updates `table`."""
    out = torch.empty_like(entries)
    if len(entries):
        _assign_prefetch_slots_kernel[(triton.cdiv(len(entries), FORETOLD),)](
            table, entries, slots, begin, out, len(entries), len(table) - 1, BLOCK=FORETOLD, num_warps=4
        )
    return out


def copy_units(out, slab, base, slot, grain, *, programs=PROGRAMS, words=UNDER_WAY):
    """Launch `ops.clusters.copy_units`: copy units from host memory to `out`, by at most `programs` programs, which keep
    loads of about `words` words in flight."""
    slots, _, groups, tokens, size = slab[0].shape
    n = slot.shape[0]
    if n == 0:
        return
    run = tokens * size * out.element_size()
    side, group = (out.stride(i) * out.element_size() for i in (0, 1))
    each = out.stride(2) * out.element_size() if out.dim() == 5 else run
    # A slab that begins anywhere else than the first is told to the kernel in bytes from there, and read by the same words.
    aligned = (run, side, group, each, out.data_ptr(), grain)
    word = next(w for w in WORD_TYPES if not any(b % w for b in aligned))
    block = min(words, triton.next_power_of_2(run // word))
    items = n * 2 * groups * triton.cdiv(run // word, block)
    kind = WORD_TYPES[word]
    # The memory from the first element on; what lies between the heads is left alone.
    flat = out.as_strided((out.shape[-2] * out.shape[-1],), (1,))
    _gather_kernel[(min(programs, items),)](
        flat.view(kind), slab[0].view(-1).view(kind), base, slot, items, slots, side // word, group // word,
        GROUPS=groups, RUN=run // word, EACH=each // word, WORD=word,
        PAIRS=not any(b % (2 * word) for b in aligned), BLOCK=block, num_warps=8,
    )  # fmt: skip
