"""A stream that keeps and sees everything is the plain model's prompt, however it is cut, saved or asked."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill import attention
from mmaccel.core.streams.asking import run_question as asked_of
from tests.models.streams import (
    FPS,
    QUESTION,
    every_stream,
    film,
    inputs_of,
    logits,
    open_session,
    pair,
    plain,
    resumed,
    said,
)
from tests.models.test_ingest import ALL, EQUAL, FEW, ROOMY, by_mask
from tests.spies import crossed, heard, product

pytestmark = pytest.mark.numeric(by="torch")


WHOLE = every_stream()
TIGHT = every_stream(frames=6, window=8)
TOLERANCE = 1e-4
MIXED = [("tiny-ov", "rekv"), ("tiny-ov", "mosaic"), ("tiny-qwen", "rekv"), ("tiny-qwen", "mosaic")]
BOTH = product(("random-ov", "random-qwen"), WHOLE)


@pytest.mark.parametrize(("name", "kv"), [*BOTH, *MIXED])
def test_with_room_for_all_it_is_the_plain_model(name: str, kv: str) -> None:
    with open_session(name, every_stream(positions="original")[kv], 13) as session:
        assert (logits(session) - plain(name, 13)).abs().max() <= TOLERANCE
        assert session.ask(QUESTION, 4).text == said(name, 13, 4)


@pytest.mark.parametrize(("name", "kv"), [*(("random-qwen", kv) for kv in TIGHT), ("random-ov", "mosaic")])
def test_saved_and_loaded_it_goes_on(tmp_path: Path, name: str, kv: str) -> None:
    frames = film(25)
    with open_session(name, TIGHT[kv]) as session:
        session.watch(frames[:19], fps=FPS)
        before = logits(session)
        with resumed(session, tmp_path / "stream") as other:
            assert other.recipe == session.recipe and other.frames == 19 and other.seconds == session.seconds
            assert other.ask(QUESTION, 4).evidence == session.ask(QUESTION, 4).evidence
            for one in (session, other):
                one.watch(frames[19:], fps=FPS)
            assert torch.allclose(logits(other), logits(session), atol=EQUAL)
            assert not torch.equal(logits(other), before)


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, _ = pair(name)
    frames = film(9)
    plain(name, 9)  # what the model itself makes at its first run
    state = copy.deepcopy(model.state_dict())
    before = {path: _outline(module) for path, module in model.named_modules()}
    with open_session(name, TIGHT["rekv"]) as session:
        session.watch(frames, fps=FPS)
        assert {path: _outline(module) for path, module in model.named_modules()} == before
        session.ask(QUESTION, 3)
    assert {path: _outline(module) for path, module in model.named_modules()} == before
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))


def _outline(module: Any) -> Any:
    tables = {k: v for k, v in module.__dict__.items() if k.startswith("_") and isinstance(v, dict)}
    hooks = tuple((k, len(v)) for k, v in tables.items())
    return {k: id(v) for k, v in module.__dict__.items() if not k.startswith("_")}, hooks


def test_seconds_of_a_unit_move_the_positions_as_in_the_plain_model() -> None:
    frames = film(12)
    found = []
    for fps in (0.75, 3.0):
        with open_session("random-qwen", "full") as session:
            session.watch(frames, fps=fps)
            assert (logits(session) - plain("random-qwen", 12, fps=fps)).abs().max() <= TOLERANCE
            found.append(logits(session))
    assert (found[0] - found[1]).abs().max() > 10 * TOLERANCE


@crossed(kv=WHOLE, count=[1, 2, 3, 7])
def test_a_unit_that_is_not_complete_is_seen_as_the_processor_fills_it(kv: str, count: int) -> None:
    frames = film(count)
    with open_session("random-qwen", WHOLE[kv]) as session:
        for frame in frames:
            session.watch(frame[None], fps=FPS)
        assert (logits(session) - plain("random-qwen", count)).abs().max() <= TOLERANCE


FRAMES = 22
LONG = " ".join([QUESTION] * 20)
HOW: dict[str, Any] = {"backend": "reference", "dense_tail": 16}


def watched(name: str, kv: str, frames: int = FRAMES, **how: Any) -> mmaccel.VideoSession:
    """A session that was shown live frames, which no pattern plans."""
    return open_session(name, TIGHT[kv], frames, **how)


@crossed(kv=TIGHT, name=["random-ov", "random-qwen"])
def test_a_pattern_that_lists_everything_is_dense(name: str, kv: str) -> None:
    # Of an odd number of frames the last begins a unit of the Qwen, which is pending.
    with watched(name, kv, 21, sparse=ALL, **HOW) as sparse, watched(name, kv, 21) as dense:
        assert (logits(sparse, LONG) - logits(dense, LONG)).abs().max() <= EQUAL
        assert sparse.ask(LONG, 3).text == dense.ask(LONG, 3).text
        report = sparse.report()
    assert report.kept is not None and report.kept >= 0.99
    # What no_cache runs at a question may end in a piece too short to plan.
    assert all("a_shape" in name.split("+") for layer in report.patterns for name in layer)


@crossed(pattern=FEW, kv=["mosaic", "full", "streammem"])
def test_a_pattern_that_lists_less_is_its_mask(
    pattern: str, kv: str, monkeypatch: pytest.MonkeyPatch, name: str = "random-ov"
) -> None:
    with watched(name, kv) as session:
        dense = logits(session, LONG)
    with watched(name, kv, sparse=FEW[pattern], **HOW) as session:
        found = logits(session, LONG)
        answer = session.ask(LONG, 2)
        report = session.report()
        assert report.kept is not None and report.kept < 1
        assert {one for layer in report.patterns for one in layer} == {pattern}
        assert (found - dense).abs().max() > 100 * EQUAL, "the pattern did not act"
        assert answer.evidence
        monkeypatch.setattr(attention, "attend_plan", by_mask)
        assert (logits(session, LONG) - found).abs().max() <= EQUAL


def test_the_report_tells_of_the_last_question_and_of_what_was_ingested() -> None:
    how: dict[str, Any] = {"sparse": FEW["a_shape"], **HOW}
    with watched("random-ov", "mosaic", **how) as session:
        session.ask(LONG, 2)
        kept = session.report().kept
        assert kept is not None and session.report().kept == kept and kept < 1
        session.ask(LONG, 2)
        assert session.report().kept == kept, "what an earlier question listed is not counted again"
        session.ask(QUESTION, 2)
        assert session.report().kept is None and session.report().patterns == (), "a short one is dense"
        assert "on questions of 64 tokens and of more than dense_tail" in session.report().notes[0]
    with open_session("random-ov", TIGHT["mosaic"], **how) as session:
        session.ingest(film(FRAMES), fps=FPS)
        alone = session.report().kept
        session.ask(QUESTION, 2)
        assert session.report().kept == alone
        session.ask(LONG, 2)
        assert session.report().kept != alone


@pytest.mark.parametrize("kv", ["mosaic", "rekv", "streammem"])
def test_evidence_weighs_the_rows_that_saw_everything(kv: str, name: str = "random-ov") -> None:
    """Rows before the first word stand for no words: where these alone are the pattern's, evidence is that of a dense
    question. Where all rows are, what reached the answer is not known, and what was looked at is."""
    with watched(name, kv) as dense:
        told = dense.ask(LONG, 2).evidence
        asked = dense._stream_adapter.make_question(LONG)
    tail = len(asked.ids) - asked.words[0]
    for pattern, rest in ((ALL, tail), (FEW["a_shape"], tail), (ALL, 0)):
        with watched(name, kv, sparse=pattern, backend="reference", dense_tail=rest) as session:
            found = session.ask(LONG, 2).evidence
            kept = session.report().kept
        assert kept is not None and (kept < 1) == (pattern is not ALL)
        if pattern is ALL:
            some = {one.frames: one for one in found}
            both = [one for one in told if one.frames in some]
            assert len(both) == len(found) > 0
            for one in both:
                assert (one.share, one.recalled) == (some[one.frames].share, some[one.frames].recalled)
                score = some[one.frames].score
                assert score is None if rest == 0 else score == pytest.approx(one.score, abs=1e-5)
        else:
            assert sum(one.score or 0.0 for one in found) == pytest.approx(1, abs=0.6) and found


def test_a_view_s_layout_names_head_summaries_units_and_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = heard(monkeypatch, attention.ForwardPass, "_over", lambda self, layout, rows: layout)
    with watched("random-qwen", "mosaic", 21, sparse=ALL, **HOW) as session:
        live = session._live
        with asked_of(live, LONG, 2) as asked:
            state: Any = asked.state
            few = [state.count_summary_columns(layer) for layer in range(2)]
            shown = [len(state.seen_tokens(layer)) for layer in range(2)]
    head, unit = live.stream.head, live.stream.tokens_per_unit
    words, marks = len(asked.ids), live.info.marks.shape[0]
    assert len(seen) == 2 and max(few) > 0
    for layout, summaries, tokens in zip(seen, few, shown, strict=True):
        counts = head, summaries, tokens + unit, marks, words
        assert layout.length == sum(counts) and layout.position[0].tolist() == list(range(sum(counts)))
        kinds = (TEXT, VIDEO, VIDEO, VIDEO, TEXT)
        assert layout.modality[0].tolist() == [
            kind for kind, n in zip(kinds, counts, strict=True) for _ in range(n)
        ]
        frames = layout.frame[0, head + summaries :][: tokens + unit]
        assert frames.tolist() == [n for n in range((tokens + unit) // unit) for _ in range(unit)]
        assert (layout.frame[0, : head + summaries] == -1).all()
        assert (layout.frame[0, -(marks + words) :] == -1).all()


@pytest.mark.parametrize("question", [QUESTION, LONG], ids=["short", "long"])
@pytest.mark.parametrize("kv", ["mosaic", "no_cache"])
def test_a_call_plans_what_it_ingests_and_a_long_question(kv: str, question: str, monkeypatch) -> None:
    model, processor = pair("random-ov")
    inputs = inputs_of("random-ov", FRAMES, question)
    ids = inputs["input_ids"][0]
    behind = len(ids) - 1 - int((ids == processor.video_token_id).nonzero()[-1])
    planned = heard(monkeypatch, attention, "attend_plan", lambda plan, *_: plan.n_query)
    memory, said = (TIGHT if question is LONG else ROOMY)[kv], []
    for sparse in ("dense", ALL, FEW["a_shape"]):
        planned.clear()
        with mmaccel.accelerate(model, kv=memory, sparse=sparse, **HOW) as fast:
            how = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
            out = fast.generate(**inputs, **how, output_logits=True)
            said.append(torch.stack(out.logits))
            report = fast.report()
        assert report.ttft_s is not None and report.prompt_tokens == len(ids)
        if sparse == "dense":
            assert not planned
            assert report.kept is None
        else:
            # A mark of the video may go before.
            assert question is QUESTION or any(behind <= rows <= behind + 1 for rows in planned)
            assert report.kept is not None and (report.kept < 1) == (sparse is not ALL)
    assert (said[0] - said[1]).abs().max() <= EQUAL
    assert (said[0][0] - said[2][0]).abs().max() > 100 * EQUAL
