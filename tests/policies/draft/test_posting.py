"""A prompt on its way to the draft's process: the target goes on, what follows comes after it, what breaks is told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from mmaccel.core.decoding.worker import OWN, READY, Blob, Worker
from mmaccel.core.errors import DraftError, MmaccelWarning
from mmaccel.policies.draft import _remote_drafter
from mmaccel.policies.draft._remote_drafter import SLAB, packing, unpack
from tests.core.test_generate import limit
from tests.core.toy import alone, bigram
from tests.policies.draft.toy_service import VOCAB, table

TARGET = bigram(table(1))


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A process that writes by the toy rule."""
    started = Worker("tests.policies.draft.toy_service:serve", {"model": "1"})
    started.wait(READY, 60)
    yield started
    started.close()


def stop(worker: Worker) -> None:
    """From here on the process takes nothing."""
    os.kill(worker.process.pid, signal.SIGSTOP)


def test_the_target_goes_on_while_its_prompt_is_on_the_way(worker: Worker) -> None:
    """A process that takes nothing for now, and pixels that are more than the wire holds: all comes in order afterwards,
    and the end of the sequence is the first to wait for it, since from then on the pixels may be written over."""
    first, second = _remote_drafter.Remote(worker, VOCAB), _remote_drafter.Remote(worker, VOCAB)
    given = {"input_ids": torch.tensor([[1, 0]]), "pixel_values": torch.zeros(1 << 21)}
    stop(worker)
    first.begin(given, None, True, False, 0)
    first.keep(torch.tensor([1]))
    first.ask(0, [], 3)
    assert first.collect(0.1) is None
    os.kill(worker.process.pid, signal.SIGCONT)
    written = first.collect(10.0)
    assert written is not None and [1, 0, *written.ids] == alone(TARGET, [1, 0], limit(5))
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


def test_a_process_that_is_ended_after_the_last_token_is_told_of(worker: Worker) -> None:
    """It took nothing of its prompt, for which the end of the sequence waits, and no token was asked of it."""
    worker.wire.silence_s = 0.3
    engine = _remote_drafter.Remote(worker, VOCAB)
    stop(worker)
    engine.begin(
        {"input_ids": torch.tensor([[1, 0]]), "pixel_values": torch.zeros(1 << 21)}, None, True, False, 0
    )
    with pytest.warns(MmaccelWarning, match="ended when its prompt was over.*cannot be reached"):
        engine.close()
    assert not worker.alive and worker.process.poll() is not None
    engine.close()


def test_a_prompt_that_cannot_be_made_is_told_by_the_next_call(worker: Worker) -> None:
    def unmade() -> list[Blob]:
        raise RuntimeError("no room for the prompt")

    worker.post(OWN, 1, 0, 0, blob=unmade)
    with pytest.raises(DraftError, match="no room"):
        worker.posted()
    assert not worker.alive and worker.process.poll() is not None


def test_a_prompt_that_is_not_taken_is_told_by_the_next_call(worker: Worker) -> None:
    worker.wire.silence_s = 0.3
    stop(worker)
    worker.post(OWN, 1, 0, 0, blob=lambda: [bytes(1 << 23)])
    with pytest.raises(DraftError, match="cannot be reached"):
        while worker.receive(0.05) is None:
            pass
    assert not worker.alive and worker.process.poll() is not None


def test_a_process_may_be_ended_while_its_prompt_is_on_the_way(worker: Worker) -> None:
    stop(worker)
    worker.post(OWN, 1, 0, 0, blob=lambda: [bytes(1 << 23)])
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 10 and not worker._outbox.busy
    assert worker.process.poll() is not None


def test_a_process_is_not_blamed_for_what_took_long_to_reach_it(worker: Worker) -> None:
    """The longest silence counts from when the last message had left, not from when it was posted."""
    worker.wire.silence_s = 0.5

    def slow() -> list[Blob]:
        time.sleep(0.7)
        return []

    worker.post(OWN + 4, 1, blob=slow)
    worker.posted()
    assert worker.receive(0.0) is None and worker.alive


def test_a_prompt_that_is_not_taken_does_not_hide_why_a_sequence_ended(worker: Worker) -> None:
    """Whoever closes a sequence because of another error tells that one; the next sequence gets another process."""
    worker.wire.silence_s = 0.3
    one = _remote_drafter.Remote(worker, VOCAB)
    stop(worker)
    one.begin({"input_ids": torch.zeros(1, 1 << 20, dtype=torch.long)}, None, True, False, 0)
    with pytest.raises(MemoryError):
        try:
            raise MemoryError
        except MemoryError:
            one.close()
            raise
    assert not worker.alive and worker.process.poll() is not None


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
    made = packing(whole, b"more")
    told, blob = torch.cuda.Event(), []
    thread = threading.Thread(target=lambda: blob.extend(made()))
    told.record()
    thread.start()
    thread.join(60)
    inputs, more = unpack(bytearray(b"".join(blob)))
    assert more == b"more" and told.query()
    for name, x in whole.items():
        assert torch.equal(inputs[name], x.cpu())
