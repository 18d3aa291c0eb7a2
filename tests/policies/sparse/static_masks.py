"""The element masks of the static patterns and of the content baseline, pair by pair in plain Python, as in `masks`.

Each function takes one sequence of tokens, unpadded, and gives ``mask[i][j]``, whether token i may see token j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mmaccel.core.layout import TEXT

from .scenes import Token


def tri_shape(tokens: Sequence[Token], *, sink: int, window: int, bottom: int) -> np.ndarray:
    """The first tokens and the last ones; for the last `bottom` rows, everything."""
    n = len(tokens)
    mask = np.zeros((n, n), bool)
    for i in range(n):
        for j in range(i + 1):
            mask[i, j] = j < sink or i - j < window or i >= n - bottom
    return mask


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
