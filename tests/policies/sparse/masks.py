"""The element masks of the papers, pair by pair in plain Python, with no eye on how plans are made.

Each function takes one sequence of tokens, unpadded, and gives ``mask[i][j]``, whether token i may see token j. Those of
adaptive patterns take the softmax weights of the last queries of one head too: rows (position of the query, weights).
"""

import math
from collections.abc import Sequence

import numpy as np

from mmaccel.core.layout import TEXT

from .scenes import Token

Rows = Sequence[tuple[int, np.ndarray]]


def causal(tokens: Sequence[Token]) -> np.ndarray:
    n = len(tokens)
    return np.tril(np.ones((n, n), bool))


def a_shape(tokens: Sequence[Token], *, sink: int, window: int) -> np.ndarray:
    every = range(len(tokens))
    return a_shape_among(len(tokens), every, every, sink=sink, window=window)


def last_rows(query: np.ndarray, key: np.ndarray, first: int) -> Rows:
    """Causal softmax weights of the queries [n, D] at positions first, first + 1, ..."""
    rows = []
    for i in range(len(query)):
        position = first + i
        score = key[: position + 1] @ query[i] / math.sqrt(query.shape[1])
        weight = np.exp(score - score.max())
        rows.append((position, weight / weight.sum()))
    return rows


def columns_and_diagonals(rows: Rows, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each column and of each diagonal (query minus key)."""
    columns, diagonals = np.zeros(n), np.zeros(n)
    for position, weights in rows:
        for j, weight in enumerate(weights):
            columns[j] += weight
            diagonals[position - j] += weight
    return columns, diagonals


def per_query(score: np.ndarray, rows: Rows) -> np.ndarray:
    """The weight of each line per query that reaches it: column j, like diagonal j, wants a position of at least j."""
    return np.array([w / max(1, sum(position >= j for position, _ in rows)) for j, w in enumerate(score)])


def strongest(score: np.ndarray, count: int) -> set[int]:
    return set(np.argsort(-score, kind="stable")[:count].tolist())


def among(rows: Rows, keys: Sequence[int]) -> Rows:
    """The same weights, told of the keys `keys` alone: rows (place of the query among them, weights)."""
    return [(place_of(i, keys), weights[[j for j in keys if j <= i]]) for i, weights in rows]


def place_of(position: int, keys: Sequence[int]) -> int:
    return sum(j <= position for j in keys) - 1


def dense_among(n: int, queries: Sequence[int], keys: Sequence[int]) -> np.ndarray:
    mask = np.zeros((n, n), bool)
    for i in queries:
        mask[i, [j for j in keys if j <= i]] = True
    return mask


def a_shape_among(
    n: int, queries: Sequence[int], keys: Sequence[int], *, sink: int, window: int
) -> np.ndarray:
    """The first and the last of those keys that are not after the query."""
    mask = np.zeros((n, n), bool)
    for i in queries:
        before = [j for j in keys if j <= i]
        mask[i, before[:sink] + before[max(0, len(before) - window) :]] = True
    return mask


def vertical_slash(
    n: int,
    queries: Sequence[int],
    keys: Sequence[int],
    rows: Rows,
    *,
    vertical: int,
    slash: int,
    block: int,
    sink: int = 0,
    nearest: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The element mask, and its closure: slashes rounded to the blocks they touch in these orders.

    `rows` as `among` tells them; columns and diagonals are counted in places among `keys`.
    """
    last = rows[-1][0] if rows else -1
    columns, diagonals = columns_and_diagonals(rows, len(keys))
    columns[: min(sink, vertical)] = np.inf
    kept_columns = strongest(columns[: last + 1], vertical)
    diagonals[: min(nearest, slash)] = np.inf
    kept_diagonals = strongest(diagonals[: last + 1], slash)
    place = [place_of(i, keys) for i in queries]
    touched = {
        (r // block, (p - d) // block) for r, p in enumerate(place) for d in kept_diagonals if p - d >= 0
    }
    element, closure = np.zeros((n, n), bool), np.zeros((n, n), bool)
    for r, i in enumerate(queries):
        for k in range(place[r] + 1):
            element[i, keys[k]] = k in kept_columns or place[r] - k in kept_diagonals
            closure[i, keys[k]] = k in kept_columns or (r // block, k // block) in touched
    return element, closure


def standing(score: np.ndarray, kind: str) -> np.ndarray:
    """What lines count for: weights; for contrast the standardised logarithms of weights over that of an even spread."""
    if kind != "contrast" or not len(score):
        return score
    level = np.log(score * len(score) + 0.1)
    return (level - level.mean()) / max(level.std(), 1e-6)


def class_score(values: list[float], kind: str) -> float:
    """The sum; the mean without the largest; or that mean in standard errors."""
    if kind == "sum":
        return sum(values)
    if len(values) < 2:
        return -math.inf
    mean = (sum(values) - max(values)) / (len(values) - 1)
    return mean if kind == "mean" else mean * math.sqrt(len(values) - 1)


def class_scores(score: np.ndarray, number: Sequence[int], stride: int, kind: str) -> list[float]:
    members: list[list[float]] = [[] for _ in range(stride)]
    for weight, c in zip(score, number, strict=True):
        members[c].append(float(weight))
    return [class_score(m, kind) for m in members]


def free_stride(
    columns: np.ndarray | None, diagonals: np.ndarray | None, *, low: int, high: int, slack: float, kind: str
) -> int:
    """The smallest stride whose heaviest lines weigh within `slack` of the best; 1 where three of the least do not fit."""
    n = len(columns if columns is not None else diagonals)
    if n < 3 * low:
        return 1
    scores = {}
    for stride in range(low, min(high, n // 3) + 1):
        number = [j % stride for j in range(n)]
        scores[stride] = 0.0
        for lines in (columns, diagonals):
            if lines is not None:
                scores[stride] += max(class_scores(lines, number, stride, kind))
    best = max(scores.values())
    return min(s for s, score in scores.items() if score >= best - slack * abs(best))


def seen_lines(rows: Rows, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The standing of the columns and of the diagonals that the last of the queries sees."""
    n = rows[-1][0] + 1 if rows else 0
    columns, diagonals = (per_query(score, rows) for score in columns_and_diagonals(rows, n))
    return standing(columns, kind), standing(diagonals, kind)


def free_grid(rows: Rows, n: int, *, low: int, high: int, slack: float, lines: bool, slash: bool, kind: str):
    """(class of each of n keys, stride, line, shift) of a head whose stride is searched."""
    columns, diagonals = seen_lines(rows, kind)
    stride = free_stride(
        columns if lines else None, diagonals if slash else None, low=low, high=high, slack=slack, kind=kind
    )
    number = [i % stride for i in range(n)]
    line = int(np.argmax(class_scores(columns, number[: len(columns)], stride, kind)))
    shift = int(np.argmax(class_scores(diagonals, number[: len(columns)], stride, kind)))
    return number, stride, line, shift


def frame_grid(tokens: Sequence[Token], rows: Rows, *, low: int, high: int, kind: str):
    """(class of each token, stride, line, shift) of a head whose lines follow the frames of the keys `tokens`."""
    longest = max((t.cell + 1 for t in tokens), default=0)
    stride = min(max(longest, low), high)
    number, begin = [], 0
    for i, token in enumerate(tokens):
        if token.cell == 0:
            begin = i
        number.append((token.cell if token.frame >= 0 else i - begin) % stride)
    columns = seen_lines(rows, kind)[0]
    line = int(np.argmax(class_scores(columns, number[: len(columns)], stride, kind)))
    given, members = np.zeros(stride), np.zeros(stride)
    for position, weights in rows:
        for j in range(position):
            phase = (number[position] - number[j]) % stride
            given[phase] += weights[j]
            members[phase] += 1
    shift = int(np.argmax(given if kind == "sum" else given / np.maximum(members, 1)))
    return number, stride, line, shift


def frames_serve(tokens: Sequence[Token], number: Sequence[int], low: int) -> bool:
    """Whether there are enough tokens, a frame, and no class of more than one in `low` of the tokens."""
    largest = max((list(number).count(c) for c in set(number)), default=0)
    return len(tokens) >= 3 * low and any(t.frame >= 0 for t in tokens) and largest <= -(-len(tokens) // low)


def evenest_class(rows: Rows, number: Sequence[int], stride: int) -> int:
    """Of the classes of the queries of `rows`, that whose weights have the greatest mean entropy."""
    found: list[list[float]] = [[] for _ in range(stride)]
    for place, weights in rows:
        if place >= 0:
            found[number[place]].append(float(-sum(w * math.log(w) for w in weights if w > 0)))
    return int(np.argmax([sum(f) / max(1, len(f)) for f in found]))


def grid(
    n: int,
    queries: Sequence[int],
    keys: Sequence[int],
    number: Sequence[int],
    stride: int,
    line: int,
    shift: int,
    *,
    horizontal: bool,
    vertical: bool,
    slash: bool,
    dense: int | None = None,
    window: int = 0,
    sink: int = 0,
) -> np.ndarray:
    """Lines of classes `number` of the keys; a query is of the class of the last key not after it."""
    mask = np.zeros((n, n), bool)
    for i in queries:
        place = place_of(i, keys)
        for k in range(place + 1):
            mask[i, keys[k]] = (
                (horizontal and number[place] == (line if dense is None else dense))
                or (vertical and number[k] == line)
                or (slash and (number[place] - number[k]) % stride == shift)
                or place - k < window
                or k < sink
            )
    return mask


def tri_shape(tokens: Sequence[Token], *, sink: int, window: int, bottom: int) -> np.ndarray:
    """The first tokens and the last ones; for the last `bottom` rows, everything."""
    late = np.arange(len(tokens))[:, None] >= len(tokens) - bottom
    return a_shape(tokens, sink=sink, window=window) | (late & causal(tokens))


def segments(
    tokens: Sequence[Token], *, stride: int | str, low: int, high: int
) -> tuple[list[list[int]], int]:
    """The tokens of each segment, and the stride: even cuts, or frames and as much text."""
    n = len(tokens)
    if stride != "frame":
        return [list(range(a, min(n, a + stride))) for a in range(0, n, stride)], stride
    runs: list[list[int]] = []
    newest = -1
    for i, token in enumerate(tokens):
        turned = i > 0 and (token.modality == TEXT) != (tokens[i - 1].modality == TEXT)
        if i == 0 or turned or token.frame > newest:
            runs.append([])
        newest = max(newest, token.frame)
        runs[-1].append(i)
    frames = [len(run) for run in runs if tokens[run[0]].modality != TEXT]
    step = min(max(max(frames, default=128), low), high)
    cut = [run[a : a + step] for run in runs for a in range(0, len(run), step)]
    if len(cut) > math.ceil(n / low):
        return [list(range(a, min(n, a + step))) for a in range(0, n, step)], step
    return cut, step


def sf_fixed(cut: list[list[int]], *, summary: int, side: str) -> np.ndarray:
    """A token sees its segment, and the last or the first tokens of each segment before."""
    n = sum(map(len, cut))
    mask = np.zeros((n, n), bool)
    for number, segment in enumerate(cut):
        for i in segment:
            for j in segment:
                mask[i, j] = j <= i
            for before in cut[:number]:
                for j in before[:summary] if side == "first" else before[max(0, len(before) - summary) :]:
                    mask[i, j] = True
    return mask


def sf_strided(cut: list[list[int]], step: int) -> np.ndarray:
    """A token sees the last `step` tokens, and those at its own place in their segment."""
    offset = {i: place for segment in cut for place, i in enumerate(segment)}
    n = len(offset)
    mask = np.zeros((n, n), bool)
    for i in range(n):
        for j in range(i + 1):
            mask[i, j] = i - j < step or offset[i] == offset[j]
    return mask


def block_shares(
    query: np.ndarray, key: np.ndarray, first: int, block: int, stride: int | None
) -> np.ndarray:
    """What share of the weight of each query block each key block has, by antidiagonals of `stride`, or by means (None).

    Tiles go from the first query and from the first key on; a tile of keys takes part if its first key is not after the
    first query of the other tile.
    """
    size = stride or block
    width = query.shape[1]
    rows = [list(range(a, min(len(query), a + size))) for a in range(0, len(query), size)]
    columns = [list(range(a, min(len(key), a + size))) for a in range(0, len(key), size)]
    share = np.zeros((math.ceil(len(query) / block), math.ceil(len(key) / block)))
    tiles = np.zeros(len(share))
    for row in rows:
        score = np.full(len(columns), -np.inf)
        for c, column in enumerate(columns):
            if column[0] > first + row[0]:
                continue
            if stride is None:
                score[c] = query[row].mean(0) @ key[column].mean(0) / math.sqrt(width)
            else:
                pairs = [
                    query[row[size - 1 - r]] @ key[column[r]]
                    for r in range(size)
                    if r < len(column) and size - 1 - r < len(row)
                ]
                score[c] = sum(pairs) / max(1, len(pairs)) / math.sqrt(width)
        weight = np.exp(score - score.max())
        weight /= weight.sum()
        for c, column in enumerate(columns):
            share[row[0] // block, column[0] // block] += weight[c]
        tiles[row[0] // block] += 1
    return share / tiles[:, None]


def block_topk(
    share: np.ndarray, n: int, first: int, *, block: int, sink: int, budget: float, top: int | None
) -> np.ndarray:
    """Of each block of the queries from `first` on, the pairs in the blocks it keeps."""
    mask = np.zeros((n, n), bool)
    for m, row in enumerate(share):
        queries = range(first + m * block, min(n, first + (m + 1) * block))
        seen = [b for b in range(len(row)) if b * block <= queries[-1]]
        always = [b for b in seen if b * block < sink or (b + 1) * block > queries[0]]
        rest = sorted((b for b in seen if b not in always), key=lambda b: -row[b])
        kept, held = list(always), sum(row[b] for b in always)
        for b in rest:
            if (budget < 1 and held >= budget) or (top is not None and len(kept) >= top):
                break
            kept.append(b)
            held += row[b]
        for i in queries:
            for j in range(i + 1):
                mask[i, j] = j // block in kept
    return mask
