"""Interleaved documents: layout, share of text, notes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mmaccel.core.errors import WorldError
from mmaccel_lab.world import DOCUMENT_KINDS, KINDS, OBJECTS, Document, vocabulary

CASES = [(8, 1, 16), (16, 4, 15), (64, 8, 16), (256, 4, 49), (1024, 16, 4)]


def documents(count: int = 25) -> list[tuple[Document, int, int]]:
    return [(Document.generate(s, f, n, tpf), n, tpf) for f, n, tpf in CASES for s in range(count)]


def text_of(document: Document) -> str:
    return " ".join(str(piece[1]) for piece in document.pieces if piece[0] == "text")


def video_of(document: Document) -> list[tuple[int, int]]:
    return [(piece[1], piece[2]) for piece in document.pieces if len(piece) == 3]


def test_text_is_a_quarter() -> None:
    for document, _, tokens_per_frame in documents():
        words = len(text_of(document).split())
        share = words / (words + document.world.frames * tokens_per_frame)
        assert 0.22 <= share <= 0.28, (document.world.seed, document.world.frames, share)


def test_video_pieces_are_equal_and_complete() -> None:
    for document, segments, _ in documents():
        video = video_of(document)
        assert len(video) == segments
        assert video[0][0] == 0 and video[-1][1] == document.world.frames
        assert all(a[1] == b[0] for a, b in pairwise(video))
        assert {stop - start for start, stop in video} == {document.world.frames // segments}


def test_text_comes_first_and_last_and_in_between() -> None:
    made = [Document.generate(seed, 64, 4) for seed in range(40)]
    ends = {(d.pieces[0][0], d.pieces[-1][0]) for d in made}
    assert ends == {("text", "text"), ("text", "video"), ("video", "text"), ("video", "video")}
    assert all(a[0] != b[0] for d in made for a, b in pairwise(d.pieces))


def test_every_note_is_told_once_and_asked() -> None:
    for document, _, _ in documents():
        sentences = text_of(document).split(" .")
        told = [s.split() for s in sentences if s.strip().startswith("the note says")]
        facts = {words[-3]: words[-1] for words in told}
        assert len(facts) == len(told)
        assert facts == dict(document.notes)
        assert 1 <= len(facts) <= 6
        asked = {q.text.split()[4]: q.answer for q in document.questions("note")}
        assert asked == facts
        # Prose never speaks of a household object, so no sentence contradicts a note.
        assert sum(word in OBJECTS for word in text_of(document).split()) == len(facts)


def test_visual_questions_are_those_of_the_world() -> None:
    document = Document.generate(5, 64, 4)
    asked = document.questions()
    assert [q for q in asked if q.kind in KINDS] == document.world.questions()
    assert {q.kind for q in asked} <= set(DOCUMENT_KINDS)
    assert document.questions("needle") == document.world.questions("needle")


def test_deterministic_and_within_the_vocabulary() -> None:
    words = set(vocabulary())
    for document, segments, tokens_per_frame in documents(5):
        seed, frames = document.world.seed, document.world.frames
        assert Document.generate(seed, frames, segments, tokens_per_frame) == document
        assert words.issuperset(text_of(document).split())
        assert words.issuperset(" ".join(q.text + " " + q.answer for q in document.questions()).split())


def test_the_shortest_document_holds_a_note() -> None:
    document = Document.generate(0, 1, 1, 1)
    assert len(document.questions("note")) == 1
    assert sorted(piece[0] for piece in document.pieces) == ["text", "video"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0, 10, 4), "frames (10) must be a multiple of segments (4)."),
        ((0, 8, 0), "segments must be 1 or more, not 0."),
        ((0, 8, 2, 0), "tokens_per_frame must be 1 or more, not 0."),
        ((-1, 8, 2), "seed must be 0 or more, not -1."),
        ((0, 0, 2), "frames must be 1 or more, not 0."),
    ],
)
def test_bad_request(arguments: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(WorldError) as caught:
        Document.generate(*arguments)
    assert str(caught.value) == sentence


def test_unknown_kind() -> None:
    with pytest.raises(WorldError) as caught:
        Document.generate(0, 8, 2).questions("weather")
    assert str(caught.value) == f"unknown question kind 'weather'; choose from {', '.join(DOCUMENT_KINDS)}."
