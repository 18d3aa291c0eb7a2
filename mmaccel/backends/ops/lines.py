"""Estimates for sparse patterns per head: sums of the last queries' attention over columns and diagonals (vertical-slash),
the strongest of them, the key blocks that they touch, and the orderings of strided (grid) patterns. A *line* is a column
(one key for all queries) or a diagonal (one distance between query and key). A grid pattern groups keys by their index
modulo a stride (the *residue class*); its *phase* is the class of a query minus that of the keys it sees.

Kernels for CUDA sum the attention of the last queries without storing it. Other devices use plain PyTorch: for
`rowwise_logsumexp`, `line_weights` and `choose_grid_lines` the methods of
`mmaccel.policies.sparse.estimate.LastQueryAttention`, for `score_strides` that of `mmaccel.policies.sparse.stride`. Common
arguments: query [B, H, L, D], the last queries; key [B, G, N, D], H a multiple of G; row [B, n] long, the rows of `key` that
hold the keys, None for its first `width`; at [B, L] long, ascending, the index of each query among the n = `width` keys, of
which it sees those up to it, -1 for none; total [B, H, L] float32, the log-sum-exp over all that a query sees, if the keys
are only a part of it; pooled: heads that share a key head are averaged and results have h = G heads, otherwise h = H. Scores
are scaled by D ** -0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import ABSENT, FULL
from mmaccel.backends.ops.block_lists import compact_by_mask
from mmaccel.backends.ops.operator import P, R, operator

MOST_QUERIES = 128
"""Queries that a program holds."""


def has_kernel(device: torch.device, dtype: torch.dtype, queries: int, size: int) -> bool:
    """Whether `rowwise_logsumexp`, `line_weights` and `choose_grid_lines` have kernels for `queries` queries of size
    `size`."""
    known = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return (
        known
        and 0 < queries <= MOST_QUERIES
        and size <= 256
        and operators.why_triton_unusable(device) is None
    )


def _kernel(fake: Callable[P, R]) -> operators.Operator[P, R]:
    """An operator that its kernel alone serves, made of its fake."""
    return operators.Operator(fake, "prefill.estimate", lambda *_: True, fake, ())


def _heads(query: Tensor, key: Tensor, pooled: bool) -> tuple[int, int]:
    return query.shape[0], key.shape[1] if pooled else query.shape[1]


@_kernel
def rowwise_logsumexp(query: Tensor, key: Tensor, row: Tensor | None, at: Tensor, width: int) -> Tensor:
    """Log-sum-exp of each query's attention scores, [B, H, L] float32; -inf for a query that sees nothing."""
    return query.new_empty(query.shape[:3], dtype=torch.float32)


@_kernel
def line_weights(
    query: Tensor, key: Tensor, row: Tensor | None, at: Tensor, total: Tensor | None, width: int, pooled: bool
) -> tuple[Tensor, Tensor]:
    """Attention weight of each column (key) and diagonal (query minus key position), two tensors [B, h, n] float32."""
    columns = query.new_empty(*_heads(query, key, pooled), width, dtype=torch.float32)
    return columns, torch.empty_like(columns)


@_kernel
def choose_grid_lines(
    query: Tensor,
    key: Tensor,
    row: Tensor | None,
    at: Tensor,
    total: Tensor | None,
    width: int,
    pooled: bool,
    pairing: Sequence[Tensor],
    score: str,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the lines of a grid pattern for each head: the class of its columns and the phase of its diagonals with the
    best `score`. Returns line (that class) and shift (that phase), [B, H, 1] long each, and spread (see `rows`).

    pairing  order [B, n] int32: positions sorted by class; start [B, C + 1] int32: where each class begins in `order`;
             own [B, L] int32: the class of the key at each query's position; members [B, C or more] float32: how many
             pairs of a query and an earlier key have each phase; stride [B] long: the number of classes and of phases
    rows     whether to also return spread [B, h, L] float32, the entropy of each query's weights; else it is empty
    """
    shape = _heads(query, key, pooled)
    line = query.new_empty(*shape, 1, dtype=torch.int64)
    spread = (*shape, query.shape[2]) if rows else (0,)
    return line, torch.empty_like(line), query.new_empty(spread, dtype=torch.float32)


@_kernel
def score_strides(value: Tensor, at: Tensor, low: int, high: int, score: str) -> Tensor:
    """Score each candidate stride of a grid pattern, from `low` to `high`: [B, H, strides].

    The score of a stride is that of its best residue class of lines, by `score`, summed over the kinds of lines. value
    [kinds, B, H, n] float32: the weight of each column or diagonal, by its distance from the newest; at [B]: the largest
    distance there is.
    """
    return value.new_empty(*value.shape[1:3], high - low + 1)


def _strongest_shapes(columns: Tensor, vertical: int, slash: int) -> tuple[Tensor, ...]:
    B, H, n = columns.shape
    return tuple(columns.new_empty(B, H, min(k, n), dtype=torch.int64) for k in (vertical, slash))


@operator("prefill.lines", fake=_strongest_shapes)
def choose_lines(
    columns: Tensor, diagonals: Tensor, last: Tensor, vertical: int, slash: int
) -> tuple[Tensor, Tensor]:
    """Return indices of the K highest-scoring columns and K highest-scoring diagonals, [B, H, K] long, ascending; scores
    `columns` and `diagonals` [B, H, n], none negative.

    K is the lesser of n and `vertical` or `slash`. last [B]: the last valid line, -1 for none; unused entries are n.
    Diagonal 0 is always included. Ties are broken arbitrarily.
    """
    n = columns.shape[2]
    place, last = torch.arange(n, device=columns.device), last[:, None, None]
    diagonals = diagonals.masked_fill((place == 0) & (last >= 0), torch.inf)

    def chosen(score: Tensor, count: int) -> Tensor:
        top = score.masked_fill(place > last, -1.0).topk(min(count, n), 2)
        return torch.where(top.values >= 0, top.indices, n).sort(2).values

    return chosen(columns, vertical), chosen(diagonals, slash)


def _line_shapes(row: Tensor, columns: Tensor, block: int) -> tuple[Tensor, ...]:
    (B, H, K), N = columns.shape, row.shape[1]
    left = row.new_empty(B, H, N)
    k_row = row.new_empty(B, H, max(K + -K % block, block))
    kind = left.new_empty(B, H, N // block, dtype=torch.int8)
    return left, kind, left.new_empty(B, H, N, dtype=torch.bool), k_row, torch.empty_like(k_row)


@operator("prefill.lines", fake=_line_shapes)
def split_columns(
    row: Tensor, columns: Tensor, diagonals: Tensor, width: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Split keys `row` [B, N], at positions below `width`, into chosen columns [B, H, K] and the rest; mark chosen diagonals
    [B, H, S].

    left [B, H, N] int32: rows of the keys that are no column, -1 for columns; kind [B, H, N / block] int8: FULL if no key of
    a block is missing, else ABSENT. kept [B, H, N] bool: the diagonals. k_row, k_pos [B, H, whole blocks, at least one]
    int32: rows and positions of the columns, padded with -1 and 0.
    """
    (B, H, K), N = columns.shape, row.shape[1]

    def marked(lines: Tensor) -> Tensor:
        # What is no line falls past the last.
        none = torch.zeros(B, H, N + 1, dtype=torch.bool, device=row.device)
        return none.scatter_(2, torch.where(lines < width, lines, N), True)[..., :-1]

    left = row[:, None].masked_fill(marked(columns), -1)
    whole = (left >= 0).view(B, H, -1, block).all(-1)
    kind = torch.where(whole, FULL, ABSENT).to(torch.int8)
    there, more = columns < width, (0, max(K + -K % block, block) - K)
    own = row[:, None].expand(B, H, N).gather(2, columns.clamp(max=N - 1))
    k_row = pad(torch.where(there, own, -1), more, value=-1)
    k_pos = pad(torch.where(there, columns, 0), more).to(torch.int32)
    return left, kind, marked(diagonals).contiguous(), k_row, k_pos


def _run_shapes(kept: Tensor, queries: Sequence[Tensor], block: int) -> tuple[Tensor, Tensor]:
    shape, member, _, _, broken, *_ = queries
    B, H, N = kept.shape
    row = kept.new_empty(B, H, member.shape[1], 5, dtype=torch.int64)
    room = shape.shape[1] * H * (N // block + 2) + broken.shape[1] * B * H * (N // block)
    return row, kept.new_empty(room, dtype=torch.int32)


@operator("prefill.lines", fake=_run_shapes)
def list_slash_blocks(kept: Tensor, queries: Sequence[Tensor], block: int) -> tuple[Tensor, Tensor]:
    """List the key blocks that chosen diagonals touch: row [B, H, M, 5] long and index int32 of a `BlockLists`.

    kept [B, H, N] bool: the diagonals; queries: the fields of `DiagonalKeyBlocks` of `policies/sparse/vertical_slash.py`.
    """
    shape, member, home, reach, broken, runs, sure = queries
    _, H, N = kept.shape
    width = N // block + 2
    sequence, offset, length = shape.long().unbind(0)
    t = torch.arange(-1, width - 1, device=kept.device)
    # Place offset + l of the block, l < length, meets key block -t on the diagonals of a run of distances.
    least = (t * block + offset[:, None] - block + 1).clamp(0, N)
    past = (t * block + (offset + length)[:, None]).clamp(0, N)
    before = pad(kept.cumsum(2, dtype=torch.int32), (1, 0))
    lead = (sequence[:, None] * H + torch.arange(H, device=kept.device))[..., None] * (N + 1)
    flat = before.flatten()
    steps = flat[lead + past[:, None]] > flat[lead + least[:, None]]
    index, upto = compact_by_mask(steps, -t)
    of_shape = upto[member.long()]  # [B, M, H, width + 1]
    first, last, head = (
        of_shape.gather(3, t.long()[:, :, None, None].expand(-1, -1, H, -1))[..., 0] for t in reach
    )
    base = (member.long()[:, :, None] * H + torch.arange(H, device=kept.device)) * width
    count = last - first
    head = torch.minimum((head - first).clamp(min=0), count)
    shift = home.long()[:, :, None].expand_as(base)
    row = torch.stack([base + first, count, head, count, shift], -1).transpose(1, 2).contiguous()
    if not broken.shape[1]:
        return row, index
    own, listed = _jumping(before, broken, runs, sure, block, index.numel())
    # The last block of queries takes what is no block.
    wide = pad(row, (0, 0, 0, 1))
    wide.scatter_(2, broken.long()[:, None, :, None].expand_as(own), own)
    return wide[:, :, :-1].contiguous(), torch.cat([index, listed])


def _jumping(
    before: Tensor, broken: Tensor, runs: Tensor, sure: Tensor, block: int, base: int
) -> tuple[Tensor, Tensor]:
    """Lists [B, H, G, 5] of the blocks whose places jump, and their entries, which begin at `base`.

    before [B, H, N + 1]: how many diagonals are kept before each.
    """
    (B, H, N), G = before.shape, broken.shape[1]
    N -= 1
    blocks = N // block
    begin = block * torch.arange(blocks, device=before.device)
    touched = torch.zeros(B, H, G, blocks, dtype=torch.bool, device=before.device)
    for least, most in (run.long()[..., None].unbind(2) for run in runs.unbind(2)):
        low = (least - begin - block + 1).clamp(0, N)[:, None].expand(-1, H, -1, -1).flatten(2)
        high = (most + 1 - begin).clamp(0, N)[:, None].expand(-1, H, -1, -1).flatten(2)
        found = (before.gather(2, high) > before.gather(2, low)).view_as(touched)
        touched |= found & ((most >= 0) & (begin <= most))[:, None]
    index, upto = compact_by_mask(touched, torch.arange(blocks, device=before.device))
    first = base + torch.arange(B * H * G, device=before.device).view(B, H, G) * blocks
    sure = sure.long().clamp(max=blocks)[:, None, :, None].expand(-1, H, -1, -1)
    none = torch.zeros_like(first)
    return torch.stack([first, upto[..., -1], none, upto.gather(3, sure)[..., 0], none], -1), index


def _class_shapes(
    order: Sequence[Tensor], phases: Sequence[Tensor], wide: bool, columns: int, rows: int
) -> list[Tensor]:
    queries, (B, H) = order[0], phases[0].shape[:2]
    kind = torch.int64 if wide else torch.int32
    P, N = (B, H, queries.shape[2]), (B, H, columns)
    out = [queries.new_empty(P), queries.new_empty(P, dtype=kind)]
    if columns:
        out += [queries.new_empty(n, dtype=d) for n, d in ((P, kind), (N, torch.int32), (N, kind))]
    return out + [queries.new_empty(B, H, rows) for _ in range(2 if rows else 0)]


@operator("prefill.lines", fake=_class_shapes)
def sort_by_class(
    order: Sequence[Tensor], phases: Sequence[Tensor], room: int, wide: bool, columns: int, rows: int
) -> list[Tensor]:
    """Sort the queries and keys of each head by (residue class, position) for its grid pattern, starting from one order that
    all heads share.

    order, of all heads: queries [3, B, P] int32: row, position and class of each query, sorted by (class, position), absent
    ones last; q_begin [B, C + 1] int32: bounds of the classes of queries; keys [3, B, N] int32 and k_begin: the same for
    keys; stride [B] long: the number of classes. phases, each [B, H, 1] long: line, shift and dense, the class of vertical
    lines, the phase of slashes, the class of horizontal lines. room: at least the keys of any class; wide: int64 positions.

    Returns [B, H, P]: rows of the queries, sorted by the class of keys that they see along slashes, -1 for those of class
    `dense`; and their positions for slashes, class * (2 * room) + rank of the last key of that class up to the query (-1 if
    none). With `columns` (at least the keys of any class) also, for vertical lines, the queries' positions [B, H, P], and
    rows and positions [B, H, columns] of the keys of class `line`; slashes then skip these keys (rank -1). With `rows` (at
    least the queries of class `dense`) also the rows and positions [B, H, rows] of these queries.
    """
    (queries, q_begin, keys, k_begin, stride), (line, shift, dense) = order, phases
    (B, P), N, H = queries.shape[1:], keys.shape[2], line.shape[1]
    kind = torch.int64 if wide else torch.int32
    base, s = N + 1, stride[:, None, None]
    code = (keys[2].long() * base + keys[1]).contiguous()
    starts = k_begin.long()[:, None].expand(B, H, -1)

    def ranks(number: Tensor, at: Tensor) -> Tensor:
        """How many keys of class `number` are not after `at`, minus one."""
        wanted = (number * base + at).flatten(1)
        end = torch.searchsorted(code, wanted, right=True).view(at.shape)
        return end - starts.gather(2, number.expand_as(at)) - 1

    i = torch.arange(P, device=keys.device)
    served = q_begin.long().gather(1, stride[:, None])[..., None]
    turn = q_begin.long()[:, None].expand(B, H, -1).gather(2, shift)
    source = torch.where(i < served, (i + turn) % served.clamp(min=1), i)
    row, at, own = (t[:, None].expand(B, H, P).gather(2, source) for t in queries)
    row = row.masked_fill(i >= served, -1)
    pair = (own.long() - shift) % s
    if rows:
        row = row.masked_fill(own == dense, -1)
    there, rank = row >= 0, ranks(pair, at)
    if columns:
        rank = rank.masked_fill(pair == line, -1)
    out = [row, torch.where(there, pair * (2 * room) + rank, -1).to(kind)]
    if columns:
        begin, end = (starts.gather(2, line + more) for more in (0, 1))
        place = torch.arange(columns, device=keys.device).expand(B, H, columns)
        mine = begin + place < end
        line_row = keys[0][:, None].expand(B, H, N).gather(2, (begin + place).clamp(max=N - 1))
        out += [torch.where(there, ranks(line, at), -1).to(kind), torch.where(mine, line_row, -1)]
        out.append(torch.where(mine, place, 0).to(kind))
    if rows:
        begin, end = (q_begin.long()[:, None].expand(B, H, -1).gather(2, dense + more) for more in (0, 1))
        source = begin + torch.arange(rows, device=keys.device)
        there, source = source < end, source.clamp(max=P - 1)
        out += [
            torch.where(there, t[:, None].expand(B, H, P).gather(2, source), -1).contiguous()
            for t in queries[:2]
        ]
    return out
