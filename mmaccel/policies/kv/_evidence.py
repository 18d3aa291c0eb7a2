"""What a question is searched by, and what its answer rests on."""

from __future__ import annotations

from torch import Tensor

from mmaccel.core.kv import Piece, Seen

Look = tuple[Tensor, int, Tensor | None]
"""What a layer looked at: the units [k] that it recalled, the first local one, and scores of all units before that."""


def words_of(piece: Piece) -> tuple[int, int]:
    """The rows of a question by which memories are searched."""
    return piece.words if piece.words[1] > piece.words[0] else (piece.pending, piece.rows)


def mean_query(query: Tensor, piece: Piece) -> Tensor:
    """[H, D] float32: the mean of the raw queries [1, H, n, D] of the question's words, or of all its rows."""
    begin, end = words_of(piece)
    return query[0, :, begin:end].float().mean(1)


def weigh(looks: dict[int, Look], count: int) -> dict[int, Seen]:
    """Evidence from what each layer looked at: recalled units, the first local one, and scores of all before it."""
    layers = len(looks)
    recalled: dict[int, int] = {}
    local: dict[int, int] = {}
    scores: dict[int, list[float]] = {}
    for chosen, begin, scored in looks.values():
        numbers = chosen.tolist()
        for number in numbers:
            recalled[number] = recalled.get(number, 0) + 1
        for number in range(begin, count):
            local[number] = local.get(number, 0) + 1
        if scored is not None and scored.numel():
            low, high = scored.min(), scored.max()
            level = ((scored - low) / (high - low).clamp(min=1e-12)).tolist()
            for number in numbers:
                scores.setdefault(number, []).append(level[number])
    found = {}
    for number in sorted({*recalled, *local}):
        told, near = recalled.get(number, 0), local.get(number, 0)
        mean = scores.get(number, [])
        found[number] = Seen((told + near) / layers, told / layers, sum(mean) / len(mean) if mean else 0.0)
    return found
