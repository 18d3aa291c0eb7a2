"""A draft in a process of its own, as its service and its streams do what one in this process does."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.watching import DraftStream, DraftStreamSettings
from mmaccel.core.decoding.worker import OWN, Blob, Worker
from mmaccel.core.errors import DraftError, MmaccelWarning
from mmaccel.core.registry import policy
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.models.prompt_stream import PromptStreamModel
from mmaccel.policies.draft import Parallel, _remote_drafter
from mmaccel.policies.draft._draft_decoder import DraftDecoder, TokenDistribution
from mmaccel.policies.draft._packed import ALIGN, SLAB, SMALL, make_packer, pack, unpack
from mmaccel.policies.draft._remote_drafter import RemoteDrafter
from mmaccel.policies.draft._remote_stream import RemoteDraftStream
from tests.core.test_generate import limit
from tests.core.toy import ToyRunner, bigram_rule, decode_greedily
from tests.models.streams import FPS, QUESTION, asked_of_film, every_stream, film, open_session, pair
from tests.policies.draft.conftest import NAME
from tests.policies.draft.toy_service import VOCAB, Softmax, started, table
from tests.spies import broken

TARGET = bigram_rule(table(1))


@pytest.fixture
def silent() -> Iterator[Worker]:
    """One that takes nothing: it is stopped before it has begun. No test leaves it behind."""
    with closing(started(0.3)) as made:
        stop(made)
        yield made
        assert not made.alive and made.process.poll() is not None


def stop(worker: Worker) -> None:
    """From here on the process takes nothing."""
    os.kill(worker.process.pid, signal.SIGSTOP)


def test_the_target_goes_on_while_its_prompt_is_on_the_way(worker: Worker) -> None:
    """A process that takes nothing for now, and pixels that are more than the wire holds: all comes in order afterwards,
    and the end of the sequence is the first to wait for it, since from then on the pixels may be written over."""
    first, second = RemoteDrafter(worker, VOCAB), RemoteDrafter(worker, VOCAB)
    given = {"input_ids": torch.tensor([[1, 0]]), "pixel_values": torch.zeros(1 << 21)}
    stop(worker)
    first.begin(given, None, True, False, 0)
    first.keep(torch.tensor([1]))
    first.request_tokens(0, [], 3)
    assert first.collect_tokens(0.1) is None
    os.kill(worker.process.pid, signal.SIGCONT)
    written = first.collect_tokens(10.0)
    assert written is not None and [1, 0, *written.ids] == decode_greedily(TARGET, [1, 0], limit(5))
    first.close()
    stop(worker)
    second.begin(given, None, True, False, 0)
    end = threading.Thread(target=second.close)
    end.start()
    end.join(0.1)
    assert end.is_alive()
    os.kill(worker.process.pid, signal.SIGCONT)
    end.join(10.0)
    assert not end.is_alive() and worker.alive


def test_what_a_token_was_drawn_from_crosses_the_wire(worker: Worker) -> None:
    """The process draws what a writer here draws with its seed, from the same distributions."""
    here, given = DraftDecoder(ToyRunner(TARGET), "cpu", VOCAB), {"input_ids": torch.tensor([[1, 0]])}
    here.read_prompt(given, None, False, Softmax(), 9)
    with closing(RemoteDrafter(worker, VOCAB)) as engine:
        engine.begin(given, Softmax(), False, False, 9)
        for length, fix in ((0, []), (3, [5])):
            engine.request_tokens(length, fix, 4)
            there, mine = engine.collect_tokens(20.0), here.draft_tokens(length, fix, 4)
            assert there is not None and there.ids == mine.ids and len(there.odds) == 4
            for one, other in zip(there.odds, mine.odds, strict=True):
                assert torch.equal(one.ids, other.ids) and torch.equal(one.weights, other.weights)
    q = TokenDistribution.dense(mine.odds, VOCAB, torch.device("cpu"))
    rows = [table(1)[token] for token in here.line[3:7]]
    assert torch.allclose(q, torch.softmax(torch.stack(rows), -1), atol=1e-6)


def test_a_process_that_is_ended_after_the_last_token_is_told_of(silent: Worker) -> None:
    """It took nothing of its prompt, for which the end of the sequence waits, and no token was asked of it."""
    engine, pixels = RemoteDrafter(silent, VOCAB), torch.zeros(1 << 21)
    engine.begin({"input_ids": torch.tensor([[1, 0]]), "pixel_values": pixels}, None, True, False, 0)
    with pytest.warns(MmaccelWarning, match="ended when its prompt was over.*cannot be reached"):
        engine.close()
    engine.close()


def test_a_prompt_that_cannot_be_made_is_told_by_the_next_call(silent: Worker) -> None:
    silent.send_in_background(OWN, 1, 0, 0, blob=Mock(side_effect=RuntimeError("no room for the prompt")))
    with pytest.raises(DraftError, match="no room"):
        silent.wait_until_sent()


def test_a_prompt_that_is_not_taken_is_told_by_the_next_call(silent: Worker) -> None:
    silent.send_in_background(OWN, 1, 0, 0, blob=lambda: [bytes(1 << 23)])
    with pytest.raises(DraftError, match="cannot be reached"):
        while silent.receive_message(0.05) is None:
            pass


def test_a_process_may_be_ended_while_its_prompt_is_on_the_way(silent: Worker) -> None:
    silent.wire.silence_s = 30.0
    silent.send_in_background(OWN, 1, 0, 0, blob=lambda: [bytes(1 << 23)])
    began = time.monotonic()
    silent.close()
    assert time.monotonic() - began < 10 and not silent._outbox.is_sending


def test_a_process_is_not_blamed_for_what_took_long_to_reach_it(worker: Worker, monkeypatch) -> None:
    """The longest silence counts from when the last message had left, not from when it was posted."""
    monkeypatch.setattr(worker.wire, "silence_s", 0.5)

    def slow() -> list[Blob]:
        time.sleep(0.7)
        return []

    worker.send_in_background(OWN + 4, 1, blob=slow)
    worker.wait_until_sent()
    assert worker.receive_message(0.0) is None and worker.alive


def test_a_prompt_that_is_not_taken_does_not_hide_why_a_sequence_ended(silent: Worker) -> None:
    """Whoever closes a sequence because of another error tells that one; the next sequence gets another process."""
    one = RemoteDrafter(silent, VOCAB)
    one.begin({"input_ids": torch.zeros(1, 1 << 20, dtype=torch.long)}, None, True, False, 0)
    with pytest.raises(MemoryError):
        try:
            raise MemoryError
        except MemoryError:
            one.close()
            raise


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pixels_leave_a_device_as_they_were_when_the_prompt_was_told() -> None:
    """Made by a stream that has other work before, which is not waited for by the host; no whole number of slabs."""
    work = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(50):
        work = work @ work / work.norm()
    pixels = torch.empty(3, SLAB // 2 + 5, dtype=torch.bfloat16, device="cuda").fill_(7.0)
    whole = {"pixels": pixels, "view": pixels[:, 1::2], "one": torch.tensor(2, device="cuda")}
    made = make_packer(whole, b"more")
    told, blob = torch.cuda.Event(), []
    thread = threading.Thread(target=lambda: blob.extend(made()))
    told.record()
    thread.start()
    thread.join(60)
    inputs, more = unpack(bytearray(b"".join(blob)))
    assert more == b"more" and told.query()
    for name, x in whole.items():
        assert torch.equal(inputs[name], x.cpu())


def test_what_travels_with_the_prompt() -> None:
    """Seconds of frames, which some processors give as a list, place the draft's frames as the target's are."""
    worker: Any = Mock(spec=Worker, **{"receive_all.return_value": []})
    given = {"input_ids": torch.tensor([[1, 2]]), "second_per_grid_ts": [0.5, 1.0]}
    more = {"streamer": object(), "use_cache": None}

    def posted(warp: Any) -> tuple[dict[str, Any], Any]:
        RemoteDrafter(worker, VOCAB).begin({**given, **more}, warp, False, False, 0)
        return unpack(bytearray(b"".join(worker.send_in_background.call_args.kwargs["blob"]())))

    inputs, told = posted(Halved(torch.tensor([2.0])))
    assert inputs.keys() == given.keys() and inputs["second_per_grid_ts"] == [0.5, 1.0]
    warp = _remote_drafter._unpacked(worker, told, "meta")
    assert isinstance(warp, Halved) and warp.by.is_meta, "its tensors are where the draft's logits are"
    with pytest.warns(MmaccelWarning, match="give logits processors that can be pickled"):
        _, told = posted(lambda ids, logits: logits)
    assert _remote_drafter._unpacked(worker, told, "cpu") is None


def test_a_prompt_arrives_as_it_was_sent() -> None:
    """All types, views, tensors of no size and of no axes; large ones are not copied out, and begin where they should."""
    g = torch.Generator().manual_seed(0)
    large = torch.randn(2, SMALL // 2, generator=g).to(torch.bfloat16)
    given = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "mask": torch.tensor([True, False, True]),
        "large": large,
        "view": torch.randn(5, 7, generator=g).half()[:, ::2],
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "seconds": [0.1, 2],
        "also": large[:, 1:],
    }
    blob = bytearray(b"".join(pack(given, b"more")))
    inputs, more = unpack(blob)
    assert more == b"more" and list(inputs) == list(given) and inputs["seconds"] == [0.1, 2]
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            assert inputs[name].dtype == x.dtype and torch.equal(inputs[name], x)
    base = torch.frombuffer(blob, dtype=torch.uint8).data_ptr()
    for name in ("large", "also"):
        place = inputs[name].data_ptr() - base
        assert 0 < place < len(blob) and place % ALIGN == 0
    assert not 0 <= inputs["input_ids"].data_ptr() - base < len(blob), "it would hold the whole prompt"


@dataclass
class Halved:
    """A warp that holds a tensor, as some processors do."""

    by: torch.Tensor

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.by


@pytest.mark.parametrize(("device", "named"), [("cpu", []), ("cuda", []), ("cuda:1", [1])])
def test_the_process_opens_its_own_device_alone(device: str, named: list[int], monkeypatch) -> None:
    """That which has no number is the current one already, and cannot be made it by name."""
    told: list[int] = []

    monkeypatch.setattr(torch._C, "_cuda_setDevice", told.append, raising=False)
    broken(monkeypatch, _remote_drafter, "registry", ZeroDivisionError)  # before more is loaded
    wire: Any = None
    with pytest.raises(ZeroDivisionError):
        _remote_drafter.serve(wire, {"device": device})
    assert told == named


COUNT = 8
TIGHT = every_stream(frames=6, window=8)


def parallel(process: bool) -> Parallel:
    return Parallel(model=f"{NAME}-draft", window=4, process=process)


def watching(kv: str = "mosaic") -> DraftStreamSettings:
    return DraftStreamSettings(pair(NAME)[1], policy("kv", TIGHT[kv]), None)


def take(stream: DraftStream, frames: torch.Tensor, start: float) -> None:
    times = [start + i / FPS for i in range(len(frames))]
    stream.add_frames(frames, times, FPS, False)


def written(stream: DraftStream, target: ModelView, question: Any = QUESTION) -> list[int]:
    """What a draft says to a question, after its first token is fixed."""
    stream.prepare_question(question, COUNT)
    inputs: Any = {"input_ids": torch.tensor([[1, 0]])}
    if isinstance(stream, RemoteDraftStream):
        with closing(RemoteDrafter(stream._worker, target.geometry.vocab)) as remote:
            remote.begin(inputs, None, False, False, 0, stream)
            remote.request_tokens(0, [7], COUNT)
            found = remote.collect_tokens(60.0)
    else:
        assert isinstance(stream, LocalDraftStream)
        writer = DraftDecoder(target.runner(), "cpu", target.geometry.vocab)
        writer.read_prompt(inputs, None, False, None, 0, stream)
        found = writer.draft_tokens(0, [7], COUNT)
    stream.end_question()
    assert found is not None
    return found.ids


@pytest.mark.parametrize("kv", ["mosaic", "no_cache"])
@torch.no_grad()
def test_it_says_what_a_stream_here_says(target: ModelView, tmp_path: Path, kv: str) -> None:
    told = []
    for process in (False, True):
        said, folder = [], tmp_path / str(process)
        folder.mkdir()
        with closing(parallel(process).open_stream(target, watching(kv))) as stream:
            assert isinstance(stream, RemoteDraftStream) == process
            frames = film(20).clone()
            take(stream, frames[:9], 0.0)
            frames.zero_()  # what was sent may be written over
            said.append(written(stream, target))
            mark = stream.checkpoint()
            take(stream, film(20, seed=4)[:8], 4.5)
            said.append(written(stream, target))
            stream.restore(mark)
            said.append(written(stream, target))
            stream.save(folder)
            take(stream, film(20)[9:], 4.5)
            said.append(written(stream, target))
        with closing(parallel(process).open_stream(target, watching(kv))) as stream:
            stream.load(folder)
            take(stream, film(20)[9:], 4.5)
            said.append(written(stream, target))
        assert said[0] == said[2] and said[3] == said[4]
        told.append(said)
    assert told[0] == told[1]
    assert len({tuple(one) for one in told[0]}) > 1, "what is said depends on what was seen"


@pytest.mark.parametrize("kv", ["mosaic", "no_cache"])
@torch.no_grad()
def test_it_reads_a_prompt_as_a_stream_here_does(target: ModelView, kv: str) -> None:
    inputs = dict(pair(NAME)[1].chat(asked_of_film(20), fps=FPS))
    ids, told = inputs["input_ids"], []
    settings = replace(watching(kv), processor=None, prompt=(PromptStreamModel, inputs))
    for process in (False, True):
        with closing(parallel(process).open_stream(target, settings)) as stream:
            told.append([written(stream, target, ids[:, :-cut] if cut else ids) for cut in (0, 5, 0)])
    assert told[0] == told[1] and told[0][0] == told[0][2] != told[0][1]


def drafted(session: mmaccel.VideoSession) -> tuple[int, ...]:
    """An answer that the draft took part in: it may still be reading while the first ones are given."""
    until = time.monotonic() + 60
    while True:
        answer = session.ask("Describe the video.", 60)
        if answer.counters.get("accepted"):
            return answer.ids
        assert time.monotonic() < until, "the draft takes part in no answer"


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_session_drafts_in_the_process(resumed: bool, forked: None, tmp_path: Path) -> None:
    with open_session(NAME, TIGHT["mosaic"]) as quiet:
        quiet.watch(film(20), fps=FPS)
        want = quiet.ask("Describe the video.", 60)
    with ExitStack() as stack:
        session = open_session(NAME, TIGHT["mosaic"], draft=parallel(True))
        session.watch(film(20)[:9], fps=FPS)
        if resumed:
            session.save(tmp_path / "saved")
            session.close()
            session = mmaccel.VideoSession.resume(*pair(NAME), tmp_path / "saved")
        stack.callback(session.close)
        session.watch(film(20)[9:], fps=FPS)
        assert drafted(session) == want.ids
        live = session._live
        assert live is not None and isinstance(live.draft_stream.stream, RemoteDraftStream)
        live.draft_stream.stream._worker.process.kill()
        live.draft_stream.stream._worker.process.wait()
        with pytest.warns(MmaccelWarning, match="go on without it"):
            session.watch(film(20, seed=4), fps=FPS)
        assert len(session) == 40 and session.ask("Describe the video.", 9).ids


def test_what_the_process_cannot_do_ends_the_stream(target: ModelView, tmp_path: Path) -> None:
    with (
        closing(parallel(True).open_stream(target, watching())) as stream,
        pytest.raises(DraftError, match="saved without this draft's stream"),
    ):
        stream.load(tmp_path / "draft")


def test_a_processor_that_cannot_travel_costs_the_draft(forked: None) -> None:
    model, processor = pair(NAME)
    held = processor.__dict__
    held["unsent"] = lambda: None
    try:
        with mmaccel.VideoSession(
            model, processor, None, kv=TIGHT["recent"], draft=parallel(True)
        ) as session:
            with pytest.warns(MmaccelWarning, match="go on without it"):
                session.watch(film(9), fps=FPS)
            assert session.ask(QUESTION, 4).ids
    finally:
        del held["unsent"]
