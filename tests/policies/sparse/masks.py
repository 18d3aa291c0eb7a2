"""The element masks of the papers, pair by pair in plain Python, with no eye on how plans are made.

Each function takes one sequence of tokens, unpadded, and gives ``mask[i][j]``, whether token i may see token j. Those of
adaptive patterns take the softmax weights of the last queries of one head too: rows (position of the query, weights).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mmaccel.core.layout import MODALITIES

from .scenes import Token

Rows = Sequence[tuple[int, np.ndarray]]


def causal(tokens: Sequence[Token]) -> np.ndarray:
    n = len(tokens)
    return np.tril(np.ones((n, n), bool))


def a_shape(tokens: Sequence[Token], *, sink: int, window: int) -> np.ndarray:
    n = len(tokens)
    mask = np.zeros((n, n), bool)
    for i in range(n):
        for j in range(i + 1):
            mask[i, j] = j < sink or i - j < window
    return mask


def last_rows(query: np.ndarray, key: np.ndarray, first: int, count: int) -> Rows:
    """Causal softmax weights of the last `count` of the queries [n, D] at positions first, first + 1, ..."""
    rows = []
    for i in range(max(0, len(query) - count), len(query)):
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


def vertical_slash(
    tokens: Sequence[Token], rows: Rows, *, vertical: int, slash: int, first: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """The element mask, and its closure: slashes rounded to the blocks they touch, of queries from `first` on."""
    n = len(tokens)
    last = rows[-1][0] if rows else -1
    columns, diagonals = columns_and_diagonals(rows, n)
    columns = columns[: last + 1] if len(columns) > last + 1 else columns
    kept_columns = strongest(np.concatenate([columns, np.zeros(n - len(columns))]), vertical)
    diagonals = diagonals[: last + 1].copy()
    diagonals[:1] = np.inf
    kept_diagonals = strongest(diagonals, slash)
    # A block of queries counts as whole, also the last one, of which some rows may be missing.
    end = first + math.ceil((n - first) / block) * block
    touched = {
        ((i - first) // block, (i - d) // block)
        for i in range(first, end)
        for d in kept_diagonals
        if i - d >= 0
    }
    element, closure = np.zeros((n, n), bool), np.zeros((n, n), bool)
    for i in range(first, n):
        for j in range(i + 1):
            element[i, j] = j in kept_columns or i - j in kept_diagonals
            closure[i, j] = j in kept_columns or ((i - first) // block, j // block) in touched
    return element, closure


def mean_without_largest(values: list[float]) -> float:
    return (sum(values) - max(values)) / (len(values) - 1) if len(values) > 1 else 0.0


def class_weights(score: np.ndarray, number: Sequence[int], stride: int) -> list[float]:
    members: list[list[float]] = [[] for _ in range(stride)]
    for weight, c in zip(score, number, strict=False):
        members[c].append(float(weight))
    return [mean_without_largest(m) for m in members]


def free_stride(
    columns: np.ndarray | None, diagonals: np.ndarray | None, last: int, low: int, high: int, slack: float
) -> int:
    """The smallest stride whose heaviest lines weigh within `slack` of the best."""
    scores = {}
    for stride in range(low, high + 1):
        scores[stride] = 0.0
        if 3 * stride > last + 1:
            continue
        if columns is not None:
            number = [(last - j) % stride for j in range(last + 1)]
            scores[stride] += max(class_weights(columns[: last + 1], number, stride))
        if diagonals is not None:
            number = [d % stride for d in range(last + 1)]
            scores[stride] += max(class_weights(diagonals[: last + 1], number, stride))
    best = max(scores.values())
    return min(s for s, score in scores.items() if score >= (1 - slack) * best)


def free_grid(rows: Rows, n: int, *, low: int, high: int, slack: float, lines: bool, slash: bool):
    """(class of each token, stride, line, shift) of a head whose stride is searched."""
    last = rows[-1][0] if rows else -1
    columns, diagonals = (per_query(score, rows) for score in columns_and_diagonals(rows, n))
    stride = free_stride(columns if lines else None, diagonals if slash else None, last, low, high, slack)
    number = [i % stride for i in range(n)]
    line = int(np.argmax(class_weights(columns, number, stride)))
    shift = int(np.argmax(class_weights(diagonals[: last + 1], number, stride)))
    return number, stride, line, shift


def frame_grid(tokens: Sequence[Token], rows: Rows, *, low: int, high: int):
    """(class of each token, stride, line, shift) of a head whose lines follow the frames."""
    longest = max((t.cell + 1 for t in tokens), default=0)
    stride = min(max(longest, low), high)
    number, begin = [], 0
    for i, token in enumerate(tokens):
        if token.cell == 0:
            begin = i
        number.append((token.cell if token.frame >= 0 else i - begin) % stride)
    columns = per_query(columns_and_diagonals(rows, len(tokens))[0], rows)
    line = int(np.argmax(class_weights(columns, number, stride)))
    given, members = np.zeros(stride), np.zeros(stride)
    for position, weights in rows:
        for j in range(position):
            phase = (number[position] - number[j]) % stride
            given[phase] += weights[j]
            members[phase] += 1
    shift = int(np.argmax(given / np.maximum(members, 1)))
    return number, stride, line, shift


def grid(
    number: Sequence[int],
    stride: int,
    line: int,
    shift: int,
    *,
    horizontal: bool,
    vertical: bool,
    slash: bool,
) -> np.ndarray:
    n = len(number)
    mask = np.zeros((n, n), bool)
    for i in range(n):
        for j in range(i + 1):
            mask[i, j] = (
                (horizontal and number[i] == line)
                or (vertical and number[j] == line)
                or (slash and (number[i] - number[j]) % stride == shift)
            )
    return mask


def boundary_2d(tokens: Sequence[Token], *, extent) -> np.ndarray:
    """Sinks and windows counted in tokens of the key's modality; extent(query modality, key modality)."""
    n = len(tokens)
    mask = np.zeros((n, n), bool)
    for i, query in enumerate(tokens):
        for other, name in MODALITIES.items():
            sink, window = extent(MODALITIES[query.modality], name)
            before = [j for j in range(i + 1) if tokens[j].modality == other]
            for j in set(before[:sink]) | set(before[max(0, len(before) - window) :] if window else []):
                mask[i, j] = True
    return mask
