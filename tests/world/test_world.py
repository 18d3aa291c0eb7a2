"""What a world decides: cards, scenes, questions, captions, words, what stands still, and documents made of it."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from mmaccel.core.errors import WorldError
from mmaccel_lab.world import (
    COLOURS,
    DOCUMENT_KINDS,
    KINDS,
    NUMBERS,
    OBJECTS,
    SCENES,
    SHAPES,
    Card,
    Document,
    Question,
    Segment,
    World,
    render,
    vocabulary,
)
from tests.spies import refusal

LENGTHS = (1, 2, 3, 8, 33, 256)


def worlds(count: int = 60, style: str = "needle") -> list[World]:
    return [World.generate(seed, frames, style) for frames in LENGTHS for seed in range(count)]


def recompute(world: World, question: Question) -> str:
    """The answer read off the records, from the words of the question alone."""
    words = question.text.split()
    named = [w for w in words if w in SHAPES]
    by_shape = {card.shape: card for card in world.cards}
    colours = {card.shape: card.colour for card in world.cards}
    if question.kind == "needle":
        return colours[named[0]]
    if question.kind == "order":
        return min(named, key=lambda shape: by_shape[shape].frame)
    if question.kind == "count":
        return NUMBERS[len({card.frame for card in world.cards}) - 1]
    if question.kind == "combine":
        return " and ".join(colours[shape] for shape in named)
    if question.kind == "after":
        later = [card for card in world.cards if card.frame > by_shape[named[0]].frame]
        following = min(later, key=lambda card: card.frame)
        return f"{following.shape} in {following.colour}"
    # By frame rather than by segment: walk to the first frame that shows the named scene.
    shown = [s.scene for s in world.segments for _ in range(s.start, s.stop)]
    return shown[shown.index(words[-2]) - 1]


def test_same_seed_same_world() -> None:
    for style in ("needle", "caption"):
        first, second = World.generate(2**39, 64, style), World.generate(2**39, 64, style)
        assert first.truth() == second.truth()
        assert all(column.equal(second.table()[name]) for name, column in first.table().items())
    assert World.generate(1, 64).truth() != World.generate(2, 64).truth()


def test_cards_and_segments_are_well_formed() -> None:
    for style in ("needle", "caption"):
        for world in worlds(style=style):
            frames = [card.frame for card in world.cards]
            assert frames == sorted(set(frames))
            assert min(frames) >= 0 and max(frames) < world.frames
            assert [s.start for s in world.segments] == [0, *(s.stop for s in world.segments[:-1])]
            assert world.segments[-1].stop == world.frames
            assert all(s.start < s.stop for s in world.segments)
            assert all(a.scene != b.scene for a, b in zip(world.segments, world.segments[1:], strict=False))
            pairs = [(card.colour, card.shape) for card in world.cards]
            assert len(set(pairs)) == len(pairs)
            if style == "needle":
                assert len({card.shape for card in world.cards}) == len(world.cards) <= 8


def test_answers_agree_with_an_independent_reading() -> None:
    asked: Counter[str] = Counter()
    for style in ("needle", "caption"):
        for world in worlds(style=style):
            for question in world.questions():
                assert recompute(world, question) == question.answer, (world.seed, question)
                assert all(0 <= frame < world.frames for frame in question.frames)
                asked[question.kind] += 1
    assert set(asked) == set(KINDS)
    assert min(asked.values()) >= 100


def test_evidence_frames_hold_the_evidence() -> None:
    for world in worlds(20):
        at = {card.frame: card for card in world.cards}
        for question in world.questions(["needle", "combine", "order", "after"]):
            shown = {at[frame].shape for frame in question.frames}
            assert shown >= set(question.text.split()).intersection(SHAPES)


def test_scenes_return_in_long_videos() -> None:
    long = [World.generate(seed, 256) for seed in range(60)]
    returning = [w for w in long if len({s.scene for s in w.segments}) < len(w.segments)]
    assert len(returning) > 20


def test_answers_are_balanced() -> None:
    long = [World.generate(seed, 64) for seed in range(600)]
    combine = Counter(q.answer for w in long for q in w.questions("combine"))
    assert len(combine) == len(COLOURS) ** 2 and max(combine.values()) < 0.05 * combine.total()

    order = [q for w in long for q in w.questions("order")]
    first_named = [q.answer == next(x for x in q.text.split() if x in SHAPES) for q in order]
    assert 0.45 <= sum(first_named) / len(order) <= 0.55

    counts = Counter(w.questions("count")[0].answer for w in long)
    assert set(counts) == set(NUMBERS)
    assert min(counts.values()) > 0.6 * len(long) / len(NUMBERS)

    for kind, answers in (("needle", COLOURS), ("scene", SCENES)):
        tally = Counter(q.answer for w in long for q in w.questions(kind))
        assert set(tally) == set(answers)
        assert max(tally.values()) < 2 * min(tally.values()), kind


def test_ambiguous_questions_are_not_asked() -> None:
    cards = (Card(0, "red", "star"), Card(2, "blue", "star"), Card(3, "green", "ring"))
    world = World(0, 4, "caption", cards, (Segment(0, 4, "beach"),))
    assert [(q.kind, q.answer) for q in world.questions()] == [("needle", "green"), ("count", "three")]


def test_asking_for_fewer_kinds_changes_no_question() -> None:
    world = World.generate(11, 64)
    everything = world.questions()
    for kind in KINDS:
        assert world.questions(kind) == world.questions([kind]) == [q for q in everything if q.kind == kind]


def test_caption_tells_every_event_in_order() -> None:
    segments = (Segment(0, 2, "beach"), Segment(2, 4, "forest"))
    cards = (Card(1, "red", "star"), Card(2, "orange", "ring"))
    assert World(0, 4, "needle", cards, segments).caption() == (
        "the video opens on the beach . then a star appears in red . then the scene changes to the forest . "
        "then a ring appears in orange . the end ."
    )


@pytest.mark.parametrize("max_words", [17, 30, 100, 480, 512])
def test_caption_keeps_to_its_words(max_words: int) -> None:
    lengths = []
    for seed in range(80):
        world = World.generate(seed, 200, "caption", max_words=max_words)
        lengths.append(len(world.caption().split()))
    assert max(lengths) <= max_words
    # Long captions are the point of the style: some come within one card and one scene of the bound.
    assert max(lengths) > max_words - 14


def test_vocabulary_is_closed() -> None:
    words = set(vocabulary())
    assert len(words) == len(vocabulary()) < 256
    for style in ("needle", "caption"):
        for world in worlds(20, style):
            asked = [f"{q.text} {q.answer}" for q in world.questions()]
            assert words.issuperset(" ".join([world.caption(), *asked]).split())
    assert all(word == word.lower() and " " not in word for word in words)


def test_truth_is_plain_json() -> None:
    truth = World.generate(4, 30).truth()
    assert json.loads(json.dumps(truth)) == truth
    assert set(truth) == {"seed", "frames", "fps", "style", "cards", "scenes", "questions", "caption"}


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_so_much_of_a_world_stands_still(share: float) -> None:
    found = 0.0
    for seed in range(6):
        world = World.generate(seed, 900)
        moving, standing = world.table(), world.table(still=share)
        for name in ("scene", "shape", "colour", "place", "look"):
            assert torch.equal(moving[name], standing[name])
        held = (standing["drift"][1:] == standing["drift"][:-1]).all(1)
        found += float(held.float().mean()) / 6
        assert not (moving["drift"][1:] == moving["drift"][:-1]).all(1).any()
        cuts = [segment.start for segment in world.segments[1:]]
        assert not any(held[cut - 1] for cut in cuts), "a cut is never inside a still stretch"
        runs = [len(run) for run in "".join("x" if h else " " for h in held.tolist()).split()]
        assert max(runs) <= 40
    # Each stretch has one frame more than it has pairs of equal ones.
    assert abs(found - share * 23 / 24) < 0.08


def test_still_frames_are_the_same_picture_but_for_cards() -> None:
    world = World.generate(3, 200)
    table = world.table(still=0.6)
    frames = render(table, 42, 70)
    cards = {card.frame for card in world.cards}
    same = [t for t in range(1, 200) if torch.equal(table["drift"][t], table["drift"][t - 1])]
    assert len(same) > 60
    for t in same:
        if not {t, t - 1} & cards:
            assert torch.equal(frames[t], frames[t - 1])
    assert torch.equal(world.table(still=0.0)["ball"], world.table()["ball"])


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_that_cannot_be_is_told(share: float) -> None:
    with pytest.raises(WorldError, match="still must be from 0 to 1"):
        World.generate(0, 9).table(still=share)


def test_all_of_a_world_may_stand_still() -> None:
    world = World.generate(4, 60)
    table = world.table(still=1.0)
    assert len(torch.unique(table["drift"], dim=0)) <= 60 // 8 + len(world.segments)


CASES = [(8, 1, 16), (16, 4, 15), (64, 8, 16), (256, 4, 49), (1024, 16, 4)]


def documents(count: int = 25) -> list[tuple[Document, int, int]]:
    return [(Document.generate(s, f, n, tpf), n, tpf) for f, n, tpf in CASES for s in range(count)]


def text_of(document: Document) -> str:
    return " ".join(str(piece[1]) for piece in document.pieces if piece[0] == "text")


def test_text_is_a_quarter() -> None:
    for document, _, tokens_per_frame in documents():
        words = len(text_of(document).split())
        share = words / (words + document.world.frames * tokens_per_frame)
        assert 0.22 <= share <= 0.28, (document.world.seed, document.world.frames, share)


def test_video_pieces_are_equal_and_complete() -> None:
    for document, segments, _ in documents():
        video = [(piece[1], piece[2]) for piece in document.pieces if len(piece) == 3]
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


UNKNOWN = "unknown question kind 'weather'; choose from "


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: World.generate(-1, 8), "seed must be 0 or more, not -1."),
        (lambda: World.generate(0, 0), "frames must be 1 or more, not 0."),
        (lambda: World.generate(0, 8, "film"), "unknown style 'film'; choose from needle, caption."),
        (lambda: World.generate(0, 8, "caption", max_words=15), "max_words must be 17 or more, not 15."),
        (lambda: World.generate(0, 8).questions(["needle", "weather"]), f"{UNKNOWN}{', '.join(KINDS)}."),
        (lambda: Document.generate(0, 10, 4), "frames (10) must be a multiple of segments (4)."),
        (lambda: Document.generate(0, 8, 0), "segments must be 1 or more, not 0."),
        (lambda: Document.generate(0, 8, 2, 0), "tokens_per_frame must be 1 or more, not 0."),
        (lambda: Document.generate(-1, 8, 2), "seed must be 0 or more, not -1."),
        (lambda: Document.generate(0, 0, 2), "frames must be 1 or more, not 0."),
        (lambda: Document.generate(0, 8, 2).questions("weather"), f"{UNKNOWN}{', '.join(DOCUMENT_KINDS)}."),
    ],
)
def test_bad_request(call: Callable[[], object], sentence: str) -> None:
    assert refusal(call, WorldError) == sentence
