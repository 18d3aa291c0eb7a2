"""A training step's worth of samples: render tables, token ids, positions and labels, as NumPy arrays.

Nothing here draws a pixel or touches a model. A batch follows from (seed, step, progress) alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from torch import Tensor

from mmaccel.models.shipped import CAPTION_REQUEST
from mmaccel_lab import world
from mmaccel_lab.tiny import CAPTION_REQUESTS
from mmaccel_lab.tiny.delta import Chunks, chunked
from mmaccel_lab.train.dialect import INTERVALS, Dialect, Ids, Span
from mmaccel_lab.train.plan import Plan
from mmaccel_lab.world.table import COLOUR, SCENE, SHAPE
from mmaccel_lab.world.words import NOTE, OBJECTS

FIRST_SEED, LAST_SEED = 2**32, 2**40  # of training; evaluation stays below 2**31
KINDS: tuple[str, ...] = (*world.DOCUMENT_KINDS, "caption", "end")
_FACT = re.compile(r"the note says (the \w+ is \w+ \.)")
_KIND = {kind: place for place, kind in enumerate(KINDS)}
# Share of the steps whose frames are drawn at the size of the video files, where they may suffer a codec; the others
# are drawn at the model's own size, at a fraction of the cost.
NATIVE_SHARE = 0.25
# What a label counts in the loss. The end of an answer is soon known and must not drown the answer itself.
_WEIGHT = {"count": 2.0, "order": 1.5, "note": 3.0, "scene": 0.5, "after": 0.7, "end": 0.1}
# Nor must a caption of dozens of words, told beside the questions, drown their answers of one word.
_BESIDE = 0.1


@dataclass
class Batch:
    """Arrays of one step, or tensors (`mmaccel_lab.train.step.upload`).

    `ids` [B, P + N]; `positions` [B, P + N] or [3, B, P + N]; `branch` [B, N] (-1 is padding); `length` [B] true
    prefix lengths; `prefix` is P. `rows`, `columns`, `labels`, `kinds`, `weights` [L]: the label at [row, P + column]
    is what the token there must predict. `answers` numbers the answer or caption that each label belongs to.
    `table`: render table of all frames in reading order; `codec` [F]: strength of the codec loss, 0 is none.
    `recall` [C, tokens of a frame]: where, in the flattened ids, the tokens of frames that have a past to remember are,
    and `past` [C, 4]: what that past is (see `mmaccel_lab.train.probe.Recall`). `notes` [M]: where the colours in notes are,
    and `owners` [M]: whose they are, by place in `OBJECTS`. `chunks`: of models with layers that carry a state. `seen`: who
    sees whom (`mmaccel_lab.tiny.forward.see`), once it is on a device.
    """

    plan: Plan
    ids: Any
    positions: Any
    branch: Any
    length: Any
    rows: Any
    columns: Any
    labels: Any
    kinds: Any
    weights: Any
    answers: Any
    table: dict[str, Any]
    codec: Any
    recall: Any
    past: Any
    notes: Any
    owners: Any
    videos: int
    chunks: Chunks | None = None
    seen: Tensor | None = None

    @property
    def prefix(self) -> int:
        return self.ids.shape[1] - self.branch.shape[1]


Turn = tuple[str, str, str]  # kind, question, answer


@dataclass
class _Row:
    """One row under construction: the prompt's spans and its branches, each a list of turns."""

    spans: list[Span]
    branches: list[list[Turn]] = field(default_factory=list)


def make_batch(plan: Plan, dialect: Dialect, rng: Random, *, training: bool = True) -> Batch:
    """The batch of a plan. `rng` decides everything; for evaluation there is no codec loss and the step is one."""
    interval = 1.0
    if training:
        interval = rng.choices([one for one, _ in INTERVALS], [share for _, share in INTERVALS])[0]
    rows, worlds = [], []
    for _ in range(plan.rows):
        seed = rng.randrange(FIRST_SEED, LAST_SEED) if training else rng.randrange(2**31)
        make = _document if plan.kind == "document" else _video
        row, one = make(plan, dialect, seed, rng, training)
        rows.append(row)
        worlds.append(one)
    codec = np.zeros(plan.rows * plan.frames, dtype=np.float32)
    if training:
        lossy = 0.6 if rng.random() < NATIVE_SHARE else 0.0
        strength = np.array(
            [rng.uniform(0.2, 1.0) if rng.random() < lossy else 0.0 for _ in rows], dtype=np.float32
        )
        codec = strength.repeat(plan.frames)
    return _assemble(plan, dialect, rows, worlds, interval, codec)


def _video(plan: Plan, dialect: Dialect, seed: int, rng: Random, training: bool) -> tuple[_Row, world.World]:
    told = plan.kind == "caption" and (plan.phase != "look" or rng.random() < 0.5)
    style = "caption" if told else "needle"
    one = world.World.generate(seed, plan.frames, style=style, max_words=plan.max_words)
    row = _Row(dialect.spans([("video", 0, plan.frames)]))
    if plan.kind == "caption" or rng.random() < plan.captions:
        request = CAPTION_REQUEST if rng.random() < 0.7 else rng.choice(CAPTION_REQUESTS)
        row.branches.append([("caption", request, one.caption())])
    if plan.kind != "caption":
        row.branches += _conversations(one.questions(plan.kinds), plan, rng)
    return row, one


def _document(
    plan: Plan, dialect: Dialect, seed: int, rng: Random, training: bool
) -> tuple[_Row, world.World]:
    document = world.Document.generate(seed, plan.frames, plan.segments, dialect.spec.tokens_per_frame)
    row = _Row(dialect.spans(document.pieces))
    if training and rng.random() < 0.6:
        # As captions do for the eye: copying all notes in order teaches to look one up.
        text = " ".join(str(piece[1]) for piece in document.pieces if piece[0] == "text")
        row.branches.append([("note", "what is in the notes ?", " ".join(_FACT.findall(text)))])
    row.branches += _conversations(document.questions(plan.kinds), plan, rng)
    return row, document.world


def _past(one: world.World) -> Ids:
    """[C, 5]: frame, and what is remembered there (-1 is nothing): the card before's shape and colour, how many cards
    came before (at most 7), the scene before a cut."""
    rows = {}
    before = (-1, -1)
    for place, card in enumerate(one.cards):
        rows[card.frame] = [*before, min(place, 7), -1]
        before = (SHAPE[card.shape], COLOUR[card.colour])
    for last, segment in pairwise(one.segments):
        rows.setdefault(segment.start, [-1, -1, -1, -1])[3] = SCENE[last.scene]
    return np.array([[frame, *past] for frame, past in sorted(rows.items())], dtype=np.int64).reshape(-1, 5)


def _conversations(questions: list[world.Question], plan: Plan, rng: Random) -> list[list[Turn]]:
    """Up to `plan.questions` questions, kinds taken in turn, most of them alone, some as a conversation."""
    by_kind: dict[str, list[Turn]] = {}
    for question in questions:
        by_kind.setdefault(question.kind, []).append((question.kind, question.text, question.answer))
    for turns in by_kind.values():
        rng.shuffle(turns)
    chosen: list[Turn] = []
    while by_kind and len(chosen) < plan.questions:
        kinds = list(by_kind)
        rng.shuffle(kinds)
        for kind in kinds:
            if len(chosen) < plan.questions:
                chosen.append(by_kind[kind].pop())
            if not by_kind[kind]:
                del by_kind[kind]
    rng.shuffle(chosen)
    branches = []
    while chosen:
        count = rng.randint(2, 4) if rng.random() < plan.chats else 1
        branches.append(chosen[:count])
        del chosen[:count]
    return branches


def _assemble(
    plan: Plan, dialect: Dialect, rows: list[_Row], worlds: list[world.World], interval: float, codec: Any
) -> Batch:
    tables, pasts = [one.table() for one in worlds], [_past(one) for one in worlds]
    laid = [dialect.lay(row.spans, interval) for row in rows]
    written = [_write(dialect, row.branches) for row in rows]
    prefix = _round(max(len(ids) for ids, *_ in laid), 8)
    count = _round(max(len(one[0]) for one in written), 8)
    count += _round(prefix + count, 16) - prefix - count

    ids = np.full((len(rows), prefix + count), dialect.pad, dtype=np.int64)
    positions = np.zeros((len(rows), 3, prefix + count), dtype=np.int64)
    branch = np.full((len(rows), count), -1, dtype=np.int64)
    length = np.zeros(len(rows), dtype=np.int64)
    marks: list[Ids] = []
    weights: list[float] = []
    answer = 0
    for r, ((seen, places, start), (tokens, offsets, owners, labels)) in enumerate(
        zip(laid, written, strict=True)
    ):
        length[r] = len(seen)
        ids[r, : len(seen)] = seen
        positions[r, :, : len(seen)] = places
        ids[r, prefix : prefix + len(tokens)] = tokens
        positions[r, :, prefix : prefix + len(tokens)] = offsets + start
        branch[r, : len(tokens)] = owners
        for column, label, kind, number in labels:
            marks.append(np.array([r, column, label, _KIND[kind], answer + number]))
            weights.append(_BESIDE if kind == "caption" != plan.kind else _WEIGHT.get(kind, 1.0))
        answer += labels[-1][3] + 1
    marked = np.stack(marks, 1)
    notes, owners = _notes(dialect, ids[:, :prefix])
    recall = [_tokens_of(dialect, plan, ids, r, past[:, 0]) for r, past in enumerate(pasts)]
    return Batch(
        plan=plan,
        ids=ids,
        positions=positions.transpose(1, 0, 2).copy() if dialect.spec.mrope else positions[:, 0].copy(),
        branch=branch,
        length=length,
        rows=marked[0],
        columns=marked[1],
        labels=marked[2],
        kinds=marked[3],
        weights=np.array(weights, dtype=np.float32),
        answers=marked[4],
        table={name: np.concatenate([t[name].numpy() for t in tables]) for name in tables[0]},
        codec=codec,
        recall=np.concatenate(recall),
        past=np.concatenate(pasts)[:, 1:],
        notes=notes[0] * ids.shape[1] + notes[1],
        owners=owners,
        videos=plan.rows * plan.segments,
        chunks=chunked(length, branch, prefix) if dialect.spec.kinds else None,
    )


def _tokens_of(dialect: Dialect, plan: Plan, ids: Ids, row: int, frames: Ids) -> Ids:
    """[C, tokens of a frame]: where the tokens of some frames of a row are in the flattened ids."""
    places = np.flatnonzero(ids[row] == dialect.video)
    size, marks = dialect.spec.tokens_per_frame, dialect.spec.newline
    first = frames * size + frames // (plan.frames // plan.segments) * marks
    found: Ids = places[first[:, None] + np.arange(size)] + row * ids.shape[1]
    return found


def _notes(dialect: Dialect, prompts: Ids) -> tuple[tuple[Ids, Ids], Ids]:
    """Rows and columns of the colours in the notes of prompts [B, P], and the objects they belong to."""
    form = NOTE.split()
    says, name, colour = form.index("says"), form.index("{0}"), form.index("{1}")
    rows, columns = np.nonzero(prompts == dialect.encode("says"))
    objects = dialect.encode(" ".join(OBJECTS))
    owners = (prompts[rows, columns + name - says][:, None] == objects).argmax(1)
    return (rows, columns + colour - says), owners


def _round(value: int, to: int) -> int:
    return -(-value // to) * to


Label = tuple[int, int, str, int]  # column, id to predict, kind, number of the answer within its row


def _write(dialect: Dialect, branches: list[list[Turn]]) -> tuple[Ids, Ids, Ids, list[Label]]:
    """Tokens of a row's branches one after another, their offsets in their branch, their branch, and the labels."""
    tokens: list[Ids] = []
    offsets, owners, labels = [], [], []
    column = number = 0
    for owner, turns in enumerate(branches):
        at = 0
        for place, (kind, question, answer) in enumerate(turns):
            asked = np.concatenate([dialect.turn] * (place > 0) + [dialect.encode(question), dialect.closing])
            said = np.append(dialect.encode(answer), dialect.end)
            first = column + len(asked) - 1
            # A caption is judged token by token; its end is as informative as its words.
            kinds = [kind] * (len(said) - 1) + ["end" if kind != "caption" else kind]
            labels += [(first + i, int(label), kinds[i], number) for i, label in enumerate(said)]
            number += 1
            for part in (asked, said):
                tokens.append(part)
                offsets.append(np.arange(at, at + len(part)))
                at, column = at + len(part), column + len(part)
        owners.append(np.full(at, owner))
    return np.concatenate(tokens), np.concatenate(offsets), np.concatenate(owners), labels
