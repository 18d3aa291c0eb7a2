"""What goes wrong in a draft, which fails, is slow or killed, costs the draft, never the answer; STD as in its paper."""

import os
import signal
import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.cli import answer
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.layout import VIDEO
from mmaccel.core.prefill.prune import observation_columns
from mmaccel.core.streams import stream_runner
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.draft import Parallel, PromptLookup, Sequential, SparseToDense, parallel
from mmaccel.policies.draft.parallel import ParallelDraftState
from mmaccel.policies.draft.prompt_lookup import _Finder
from mmaccel.policies.draft.sparse_to_dense import _Memory, view_key_columns, visible_columns_mask
from mmaccel.policies.kv.full import FullState
from mmaccel.policies.kv.window import WindowKVState
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.eval.cases import Film
from tests.models.streams import FPS, QUESTION, every_stream, film, open_session, pair
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.prune import by_hand
from tests.spies import broken, crossed, heard, nth, returned


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A model, a prompt, and what the plain model says to it."""
    model = BUILD[request.param](layers=3)
    inputs = prompt(request.param, PROMPTS["video"])
    return model, inputs, model.generate(**inputs, max_new_tokens=12, do_sample=False)


class Uncounted(_Finder):
    def counters(self) -> dict[str, float]:
        raise RuntimeError("out of cheese")


@dataclass(frozen=True, kw_only=True)
class Lookup(PromptLookup):
    """A draft of somebody else's, whose counters fail."""

    def open(self, target: Any) -> Uncounted:
        return Uncounted(self.window, self.ngram)


def test_counters_that_fail_lose_no_answer(family) -> None:
    model, inputs, plain = family
    with mmaccel.accelerate(model, draft=Lookup()) as fast:
        with pytest.warns(MmaccelWarning, match="report lacks its counters.*out of cheese"):
            assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
        report = fast.report()
    assert report.draft["failed"] is None and report.draft["counters"] == {}
    assert report.draft["target_steps"] > 0 and "out of cheese" in str(report)


def test_columns_that_cannot_be_taken_lose_no_answer(family, monkeypatch) -> None:
    """The memory runs out in the second layer that the sparse draft copies its columns from."""
    model, inputs, plain = family
    third, full = nth(3), torch.OutOfMemoryError("out of memory")

    def taken(self: Any, dim: Any, index: Any) -> bool:
        return self.ndim == 4 and dim == 2 and third()

    broken(monkeypatch, torch.Tensor, "gather", full, taken)
    with mmaccel.accelerate(model, draft=SparseToDense(window=4)) as fast:
        with pytest.warns(MmaccelWarning, match="dropped.*out of memory"):
            assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
        assert "out of memory" in fast.report().draft["failed"]


BETWEEN = [("text", 4), ("video", 5), ("text", 6), ("video", 5)]


@pytest.mark.parametrize("pieces", [PROMPTS["long"], BETWEEN], ids=["after the video", "between two"])
def test_sparse_to_dense_keeps_the_video_that_the_question_attends_to(family, monkeypatch, pieces) -> None:
    """Against eager attention of the rows that see all of the video: the text after it, or the last row."""
    model, _, _ = family
    inputs = prompt("qwen" if "Qwen" in type(model).__name__ else "llava", pieces)
    kept = heard(monkeypatch, _Memory, "take", lambda self, dense, chosen, length: [*chosen])
    with mmaccel.accelerate(model, draft=SparseToDense(window=4, retention=0.5)) as fast:
        model.generate(**inputs, max_new_tokens=6, do_sample=False)
        layout = fast.adapter.layout(model, inputs)
    with torch.no_grad():
        attention = by_hand.eager(model)(**inputs, output_attentions=True).attentions
    asked, video = observation_columns(layout), (layout.modality[0] == VIDEO).nonzero()[:, 0]
    taken = [one for some in kept for one in some]
    assert len(taken) == len(attention) == 3
    for columns, weights in zip(taken, attention, strict=True):
        paid = weights[0].unflatten(0, (2, -1))[:, :, asked].mean((1, 2))[:, video]
        for mine, score in zip(columns, paid, strict=True):
            least = score.topk(len(video) // 2).values[-1]
            left = torch.isin(video, mine)
            # Scores that rounding alone tells apart may change places.
            assert int(left.sum()) == len(video) // 2 and score[left].min() >= least - 1e-7


def test_a_drafted_row_is_written_where_it_is_seen() -> None:
    """A step copies its own row, and not what is shown of the video; what follows a verification takes its place."""
    dense, memory, columns = FullState(1), _Memory(1), torch.arange(0, 40, 2)
    whole, drafted = torch.randn(2, 1, 2, 42, 4), torch.randn(3, 2, 1, 2, 1, 4)
    dense.append(0, *whole[..., :40, :])
    memory.take(dense, [columns.expand(2, -1)], 40)
    seen = []
    for row in drafted:
        memory.append(0, *row)
        seen.append(memory.view(0, row[0]))
    assert len({view.value.data_ptr() for view in seen}) == 1 and memory.held_columns() == 23
    want = torch.cat([whole[..., columns, :], *drafted], 3)
    assert torch.equal(torch.stack([seen[-1].key, seen[-1].value]), want)
    dense.append(0, *whole[..., 40:, :])
    memory.follow(dense, dense.length())
    now = memory.view(0, drafted[0, 0])
    assert torch.equal(torch.stack([now.key, now.value]), whole[..., [*columns, 40, 41], :])


@crossed(
    kv=["full", {"window": 512, "margin": 8}, {"window": 14, "margin": 4}],
    prune=[None, "visionzip", "fastv", "pyramid_drop", "sparsevlm", {"name": "dycoke", "forget": 0}],
    name=sorted(BUILD),
    together=2,
)
def test_each_layer_chooses_among_what_it_holds(name: str, prune: Any, kv: Any) -> None:
    """Of a pruned prompt, and of a window. Where nothing goes the draft is the target: every token is kept."""
    narrow, kv = kv != "full" and kv["window"] == 14, kv if kv == "full" else {"name": "window", **kv}
    count, model = 24 if narrow else 12, BUILD[name](layers=6)
    for weight in (w for n, w in model.named_parameters() if "language_model.layers" in n and w.ndim == 2):
        weight.data *= 6  # what it says hangs on what it sees
    inputs = prompt(name, [("text", 6), ("video", 40), ("text", 10)])
    with mmaccel.accelerate(model, prune=prune, kv=kv):
        plain = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    held = []
    for share in (0.3, 1.0):
        draft = SparseToDense(window=3, retention=share)
        with mmaccel.accelerate(model, prune=prune, draft=draft, kv=kv) as fast:
            assert torch.equal(model.generate(**inputs, max_new_tokens=count, do_sample=False), plain)
            told = fast.report().draft
        assert told["failed"] is None and told["proposed"] > 0
        assert share < 1 or narrow or told["accepted"] == told["proposed"]
        held.append(told["counters"]["draft_held"])
    assert 0 < held[0] < held[1], "what was said is remembered too"


def test_of_a_window_the_draft_takes_what_is_in_reach() -> None:
    """The sinks and the last columns; behind the prompt those of the answer that the window has left."""
    dense, memory = WindowKVState(1, 2, 10, 4), _Memory(1)
    whole = torch.randn(2, 1, 2, 60, 4)
    dense.append(0, *whole[..., :30, :])
    dense.append(0, *whole[..., 30:31, :])
    view = dense.view(0, whole[0, ..., :1, :])
    columns = view_key_columns(view)
    assert columns.tolist() == [0, 1, *range(16, 31)]
    seen = visible_columns_mask(view, columns, 30)
    assert columns[seen].tolist() == [0, 1, *range(21, 31)]
    rows = torch.tensor([[29], [1]])
    assert [columns[one].tolist() for one in visible_columns_mask(view, columns, rows)] == [
        [0, 1, *range(20, 30)],
        [0, 1],
    ]
    chosen = torch.tensor([[0, 1, 8], [0, 1, 9]])  # columns 22 and 23
    memory.take(dense, [chosen], 30)
    for end in (31, 60):
        dense.append(0, *whole[..., dense.length() : end, :])
        dense.append(0, *whole[..., :0, :])
        memory.follow(dense, end)
        left = [n for n in view_key_columns(dense.view(0, whole[0, ..., :1, :])).tolist() if n >= 30]
        now = memory.view(0, whole[0, ..., :1, :])
        assert memory.length() == end
        for head, last in enumerate((22, 23)):
            want = whole[:, 0, head, [0, 1, last, *left]]
            assert torch.equal(torch.stack([now.key[0, head], now.value[0, head]]), want)
    assert left[0] > 30, "the window has let go of some"


NAME, TOKENS = "random-ov", 14
MOSAIC = every_stream(frames=6, window=8)["mosaic"]


def opened(draft: Any) -> Any:
    return open_session(NAME, MOSAIC, draft=draft, chunk=64)


def agreeing() -> Sequential:
    return Sequential(model=pair(NAME)[0], window=3)


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    heard(monkeypatch, LocalDraftStream, "add_frames", lambda *_: time.sleep(seconds))


def test_a_draft_that_holds_up_the_stream_is_put_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("off") as quiet:
        for part in film(18).split((2, 16)):
            quiet.watch(part, fps=FPS)
        want = quiet.ask(QUESTION, TOKENS)
    slowed(monkeypatch, 0.4)
    # What is slow for a moment keeps its draft.
    with opened(agreeing()) as session, warnings.catch_warnings(action="error", category=MmaccelWarning):
        session.watch(film(18)[:2], fps=FPS)
        monkeypatch.setattr(stream_runner, "SLOW_S", 1.0)
        with pytest.warns(MmaccelWarning, match=r"go on without it .*held up the stream.*cheaper kv"):
            session.watch(film(18)[2:], fps=FPS)
        answer = session.ask(QUESTION, TOKENS)
        assert answer.ids == want.ids and "drafted" not in answer.counters and len(session) == 18
        assert "held up the stream" in session.report().draft["failed"]


@pytest.mark.parametrize("slow", ["the target", "the device"])
def test_a_draft_is_kept_where_something_else_is_as_slow(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not charged for what the device did before it: the target's pass may still run when the draft's begins."""
    if slow == "the target":
        monkeypatch.setattr(stream_runner, "SLOW", 1e6)
        slowed(monkeypatch, 0.05)
    else:
        monkeypatch.setattr(LocalDraftStream, "wait_for_device", lambda self: time.sleep(0.4))
    monkeypatch.setattr(stream_runner, "SLOW_S", 0.0 if slow == "the target" else 1.0)
    with opened(agreeing()) as session, warnings.catch_warnings(action="error", category=MmaccelWarning):
        session.watch(film(18), fps=FPS)
        assert session.ask(QUESTION, TOKENS).counters["drafted"] > 0


def test_watching_ends_at_its_timeout_with_a_slow_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, 0.2)
    with opened(agreeing()) as session:
        began = time.monotonic()
        with pytest.warns(MmaccelWarning, match="reached its timeout"):
            taken = session.watch(film(25), fps=FPS, timeout=1.0)
        assert time.monotonic() - began < 3.0  # of five seconds that the draft would take
        assert 0 < taken == len(session) < 25
        live = session._live
        assert live.draft_stream.stream._live.info.times == live.info.times


def test_a_draft_reads_no_longer_than_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(agreeing()) as session, warnings.catch_warnings(action="error", category=MmaccelWarning):
        session.watch(film(18), fps=FPS)
        whole = session.ask(QUESTION, TOKENS)
        with monkeypatch.context() as patch:
            heard(patch, LocalDraftStream, "read_question", lambda *_: session.cancel())
            answer = session.ask(QUESTION, TOKENS)
        assert answer.finish_reason == "cancelled" and answer.ids == whole.ids[:2]
        assert session.report().draft["failed"] is None
        again = session.ask(QUESTION, TOKENS)
        assert again.ids == whole.ids and again.counters["drafted"] == whole.counters["drafted"] > 0


def test_a_draft_that_does_not_pay_rests_on_a_stream_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "best_window", lambda *given: (1, 0.9))
    with opened("off") as quiet, opened(Parallel(model=pair(NAME)[0], process=False)) as session:
        for one in (quiet, session):
            one.watch(film(18), fps=FPS)
        assert session.ask(QUESTION, 60).ids == quiet.ask(QUESTION, 60).ids
        report = session.report()
        assert report.draft["counters"]["pauses"] > 0 and "draft: paused" in str(report)


SAID = 48


@pytest.fixture(scope="module", params=["tiny-ov", "tiny-qwen"])
def spoken(request, shipped):
    """A trained target, a video's inputs, and what it says of them."""
    name = shipped(request.param)
    model, processor = mmaccel.load_model(name, dtype=torch.float32), mmaccel.load_processor(name)
    (case,) = caption_cases(24, 1, 7)
    with Film() as film:
        video = film.watch(case.world)
    inputs = answer.prompt_inputs(processor, case.content(video), model)
    return model, inputs, model.generate(**inputs, max_new_tokens=SAID, do_sample=False)


@pytest.mark.slow
def test_a_caption_is_the_plain_one_and_a_killed_draft_loses_none(spoken, monkeypatch):
    """Of a trained model; several of one process, and one that is killed in mid-window, are in `test_remote`."""
    model, inputs, want = spoken

    def say() -> torch.Tensor:
        return model.generate(**inputs, max_new_tokens=SAID, do_sample=False)

    choice = Parallel(model="beside", window=4, threads=1, prune={"name": "uniform", "retention": 0.5})
    with mmaccel.accelerate(model, draft=choice) as fast:
        assert torch.equal(say(), want)
        told = fast.report().draft
        assert told["failed"] is None and told["accepted"] > 0 and told["counters"]["drafted"] > 0
        assert told["counters"]["streak_max"] >= 2

        # In the prompt's pass: killed as soon as it has been told what to read.

        def kill(*_: Any) -> None:
            os.kill(next(iter(fast.view._held.values())).process.pid, signal.SIGKILL)

        with monkeypatch.context() as patch, pytest.warns(MmaccelWarning, match="went|ended|reached"):
            returned(patch, ParallelDraftState, "keep_columns", kill)
            assert torch.equal(say(), want)
        assert "DraftError" in fast.report().draft["failed"]
        assert fast.report().new_tokens == want.shape[1] - inputs["input_ids"].shape[1]
        assert fast.report().draft["accepted"] == 0
        last = next(iter(fast.view._held.values()), None)
    assert last is None or last.process.poll() is not None, "off with the recipe, gone is the process"
