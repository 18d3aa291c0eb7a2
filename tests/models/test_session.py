"""What a session says of itself: times, progress, evidence, counters, answers token by token, threads."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.media import Video
from mmaccel.models.attention import PLAIN
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, open_session, pair, plain
from tests.spies import beside, finish, heard

TIGHT = every_stream(frames=4, window=6)


def test_times_run_on_from_clip_to_clip() -> None:
    frames = film(9)
    with open_session("random-ov", TIGHT["rekv"]) as session:
        assert (len(session), session.seconds, session.counters()) == (0, 0.0, {}) and session
        assert session.watch(frames[:2], fps=2.0) == 2
        assert session.seconds == 0.5
        session.watch(frames[2:4], times=[10.0, 12.5])
        assert session.seconds == 12.5
        clip = Video(frames[4:6], torch.tensor([0.0, 4.0], dtype=torch.float64), 0.25, 25.0, 8.0)
        session.watch(clip)
        assert session.seconds == 12.5 + 4.0 + 4.0
        session.watch(frames[6:], times=torch.tensor([30.0, 31.0, 32.0]))
        evidence = session.ask(QUESTION, 2).evidence
        assert len(session) == 9 and evidence[-1].frames == (8, 8) and evidence[-1].seconds == 32.0
        assert [one.seconds for one in evidence] == sorted(one.seconds for one in evidence)


def test_progress_counts_frames(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    with open_session("random-qwen", TIGHT["rekv"], chunk=64) as session:
        session.watch(film(9), fps=2.0, progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (9, 9) and [done for done, _ in told] == sorted({done for done, _ in told})
        told.clear()
        session.watch(film(3), fps=2.0, progress=lambda done, total: told.append((done, total)))
        assert told == [(3, 3)]


def test_evidence_tells_what_layers_looked_at() -> None:
    fields = {"name": "rekv", "frames": 4, "window": 6, "local": 2}
    with open_session("random-ov", fields, 20) as session:
        answer = session.ask(QUESTION, 2)
        recalled = sum(one.recalled for one in answer.evidence)
        assert recalled == pytest.approx(4.0), "each layer recalls its budget"
        local = [one for one in answer.evidence if one.frames[0] >= 18]
        assert [one.share for one in local] == [1.0, 1.0] and all(one.recalled == 0 for one in local)
        assert all(0 <= one.score <= 1 and 0 < one.share <= 1 for one in answer.evidence)
        scores = [one.score for one in answer.top(len(answer.evidence))]
        assert scores == sorted(scores, reverse=True) and sum(scores) == pytest.approx(1)
        told = answer.counters
        assert told["units"] == 20 and told["window"] == 6 and told["host_puts"] > 0
        assert told["host_bytes_in"] > 0
    with open_session("random-qwen", fields, 9) as session:
        assert {one.frames[1] - one.frames[0] for one in session.ask(QUESTION, 1).evidence} == {1}


def test_a_report_says_what_is_in_use_and_what_the_last_answer_took() -> None:
    with open_session("tiny-ov", TIGHT["rekv"], draft="prompt_lookup") as session:
        empty = session.report()
        assert (empty.prompt_tokens, empty.ttft_s, empty.kv) == (0, None, {})
        assert empty.recipe["kv"]["name"] == "rekv"
        session.watch(film(14), fps=FPS)
        answer = session.ask("describe the video .", 12)
        told = session.report()
        assert told.recipe == session.recipe.to_dict() and told.kept is None and told.patterns == ()
        assert (told.ttft_s, told.tokens_per_s) == (answer.ttft_s, answer.tokens_per_s)
        assert told.new_tokens >= len(answer.ids) and told.peak_bytes > 0
        assert (told.video_tokens, told.video_units) == (14 * 16, 14)
        assert told.prompt_tokens > 14 * 16, "the columns of the stream, and the question's"
        assert told.kv == session.counters() and told.kv["units"] == 14
        assert told.draft["proposed"] == answer.counters["drafted"] > 0
        assert told.draft["accepted"] == sum(told.draft["lengths"]) == answer.counters["accepted"]
        text = " ".join(str(told).split())
        assert f"first token after {answer.ttft_s:.3f} s" in text and "no pattern" in text
        size, host = told.kv["host_bytes"] / 2**20, text.split(" host: ")[1]
        assert f", bytes {size:.2f} MiB" in host and f"held {told.kv['held']:g} tokens" in text
        short = {name: name.removeprefix("host_").removeprefix("fetch_") for name in told.kv}
        printed = [name for name in told.kv if f" {short[name]} " in text]
        assert printed == [name for name, value in told.kv.items() if value] and len(printed) < len(told.kv)
    assert session.report().new_tokens == told.new_tokens, "it can be read when the session is closed"


@pytest.mark.parametrize("kv", TIGHT)
def test_an_answer_comes_token_by_token(kv: str) -> None:
    with open_session("tiny-ov", TIGHT[kv], 14) as session:
        whole = session.ask("describe the video .", 12)
        reply = session.ask("describe the video .", 12, stream=True)
        pieces = list(reply)
        assert reply.answer is not None and "".join(pieces).strip() == whole.text == reply.answer.text
        assert reply.answer.ids == whole.ids and reply.answer.evidence == whole.evidence
        assert len(whole.ids) == 12 and len(pieces) > 2 and whole.ttft_s > 0
        assert whole.tokens_per_s is not None


def test_an_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session("random-ov", TIGHT["rekv"], 14) as session:
        before = logits(session)
        steps = heard(monkeypatch, session._stream_adapter, "logits", lambda hidden: 1)
        assert len(session.ask(QUESTION, 240).ids) == 240, "by itself it would go on"
        for ending in ("closed", "lost"):
            steps.clear()
            reply = session.ask(QUESTION, 240, stream=True)
            assert next(reply)
            if ending == "closed":
                reply.close()
                assert list(reply) == [] and reply.answer is None
            else:
                thread = reply._thread
                del reply
                thread.join(20)
                assert not thread.is_alive()
            assert 0 < len(steps) < 180
        assert torch.equal(logits(session), before)


@pytest.mark.parametrize("own", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_a_plain_run_in_the_middle_of_a_pass_gives_what_it_gives_alone(
    name: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding included, which only the mask of the model's own attention knows of; and the stream does not notice. A session
    gives no rotation to its own thread alone. Flash attention, a stand-in here, is asked for the model's own variant; what a
    user's function sets on a layer is there."""
    model, processor = pair(name)
    asked = []

    def flash(query: torch.Tensor, *_: object, attn_implementation: str, **__: object) -> torch.Tensor:
        asked.append(attn_implementation)
        return query

    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.noted = threading.get_ident()
        return sdpa(module, *args, **kwargs)

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", noting)
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash)
    monkeypatch.setattr(model.model.language_model.config, "_attn_implementation", own)
    tokens = processor.tokenizer(
        ["a star", "what was the colour of the star ?"], padding=True, return_tensors="pt"
    )
    inputs = {key: tokens[key] for key in ("input_ids", "attention_mask")}
    assert not bool(inputs["attention_mask"].all())
    with torch.no_grad():
        alone = model(**inputs).logits[:, -1]
    want = asked * 2
    assert bool(want) == (own == "flash_attention_2") and set(want) <= {own}
    me, found = threading.get_ident(), []

    def plainly() -> None:
        with torch.no_grad():
            found.append(model(**inputs).logits[:, -1])

    def meanwhile(*_: object) -> None:
        if threading.get_ident() == me:
            finish(beside(plainly))

    with open_session(name, TIGHT["mosaic"]) as session, open_session(name, TIGHT["mosaic"]) as twin:
        for one in (session, twin):
            one.watch(film(14), fps=FPS)
        hook = session._stream_adapter.view.adapter.layers(model)[1].register_forward_pre_hook(meanwhile)
        try:
            ours = logits(session)
        finally:
            hook.remove()
        assert len(found) == 1 and torch.equal(found[0], alone) and torch.equal(ours, logits(twin))
        assert asked == want
    text = model.model.language_model
    assert own != "sdpa" or text.layers[1].self_attn.noted != me
    assert all(layer.self_attn.config is text.config for layer in text.layers)
    assert not hasattr(text.config, PLAIN) and text.config._attn_implementation == own


def test_frames_of_another_size_are_resized_and_told_once() -> None:
    small, large = film(6), torch.nn.functional.interpolate(film(4).float(), (90, 60)).to(torch.uint8)
    with open_session("random-qwen", TIGHT["rekv"]) as session:
        session.watch(small[:3], fps=FPS)
        with pytest.warns(MmaccelWarning, match=r"frames of 60x90 are resized to 70x42, .*\.$") as told:
            session.watch(large[:2], fps=FPS)
        assert told[0].filename == __file__, "it points to the caller"
        with warnings.catch_warnings(action="error"):
            session.watch(large[2:], fps=FPS)
            session.watch(small[3:], fps=FPS)
            assert session.ask(QUESTION, 1).text is not None
        assert len(session) == 10 and session.counters()["units"] == 5
    # Its processor makes all frames alike.
    with open_session("random-ov", "full") as session, warnings.catch_warnings(action="error"):
        session.watch(small, fps=FPS)
        session.watch(large, fps=FPS)
        assert session.counters()["units"] == 10


def test_frames_that_were_kept_are_not_made_small_by_a_later_clip() -> None:
    small = torch.nn.functional.interpolate(film(4).float(), (21, 35)).to(torch.uint8)
    found = []
    for kv in ("full", "no_cache"):
        with open_session("random-qwen", kv) as session, warnings.catch_warnings():
            warnings.simplefilter("ignore", MmaccelWarning)
            session.watch(film(6), fps=FPS)
            session.watch(small, fps=FPS)
            found.append(logits(session))
    assert (found[0] - found[1]).abs().max() <= 1e-4


@pytest.mark.parametrize("kv", ["rekv", "mosaic", "livevlm"])
def test_a_session_works_in_and_out_of_inference_mode(kv: str, tmp_path: Path) -> None:
    with open_session("random-ov", TIGHT[kv]) as session:
        with torch.inference_mode():
            session.watch(film(25)[:12], fps=FPS)
            with pytest.raises(ModelError, match="times"):
                session.watch(film(3), times=[100.0, 101.0])
        session.watch(film(25)[12:18], fps=FPS)
        first = logits(session)
        with torch.inference_mode():
            assert torch.equal(logits(session), first)
            session.save(tmp_path / "saved")
            session.load(tmp_path / "saved")
        assert not first.requires_grad
        session.watch(film(25)[18:], fps=FPS)
        second = logits(session)
    with open_session("random-ov", TIGHT[kv]) as session:
        for part in (film(25)[:12], film(25)[12:18], film(25)[18:]):
            session.watch(part, fps=FPS)
        assert torch.equal(logits(session), second)


def test_lists_of_images_are_frames() -> None:
    with open_session("random-ov", "full") as session:
        session.watch([frame.permute(1, 2, 0).numpy() for frame in film(13)], fps=FPS)
        assert (logits(session) - plain("random-ov", 13)).abs().max() <= 1e-4


def test_clusters_that_were_asked_for_are_the_caller_s_own() -> None:
    """What a stream makes of them later does not change them, nor what is done to them the stream."""
    with open_session("random-ov", TIGHT["mosaic"], 18) as session:
        before = {name: owner.clone() for name, owner in session.clusters().items()}
        for owner in session.clusters().values():
            owner.fill_(-1)
        assert len(before) == 2
        assert all(torch.equal(owner, before[name]) for name, owner in session.clusters().items())


@pytest.mark.parametrize("name", ["mosaic", "rekv", "full"])
def test_a_stream_is_the_same_under_autocast(name: str) -> None:
    said = []
    for mixed in (False, True):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed),
            open_session("random-ov", TIGHT[name]) as session,
        ):
            session.watch(film(9), fps=FPS)
            answer = session.ask(QUESTION, 3)
            said.append((answer.text, [(one.frames, one.score) for one in answer.evidence]))
    assert said[0] == said[1]
