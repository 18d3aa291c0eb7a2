"""The pipelined draft in a process of its own: the same tokens, also when that process dies, hangs or talks nonsense."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock
from weakref import WeakSet

import pytest
import torch

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding import worker as worker_module
from mmaccel.core.decoding.generate import Speculation, decode_round_robin, decode_speculatively
from mmaccel.core.decoding.worker import OWN, READY, MessageSocket, Worker
from mmaccel.core.errors import DraftError, MmaccelWarning
from mmaccel.core.registry import registry
from mmaccel.policies.draft import _remote_drafter, _remote_stream
from mmaccel.policies.draft._draft_decoder import DraftDecoder
from mmaccel.policies.draft._packed import pack
from mmaccel.policies.draft.parallel import Parallel, ParallelDraftState
from tests.core.test_generate import limit
from tests.core.toy import Meter, ToyRunner, bigram_rule, decode_greedily, toy_prompt, toy_view
from tests.policies.draft.toy_service import VOCAB, Softmax, table
from tests.spies import heard, until

SERVICE = "tests.policies.draft.toy_service:serve"
TARGET = bigram_rule(table(1))
STOP = limit(60)


@dataclass(frozen=True, kw_only=True)
class Toy(Parallel):
    service: ClassVar[str] = SERVICE


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[ModelView]:
    """The toy target; processes are started once a choice, and gone afterwards. One starts as users' do, others fork."""
    seen = toy_view(TARGET, VOCAB)
    Toy(model="1")._worker(seen)
    request.getfixturevalue("forked")
    yield seen
    held = [worker.process for worker in seen._held.values()]
    seen.close_cached_objects()
    assert all(process.poll() is not None for process in held)


def decode(target: ModelView, choice: Parallel, **said: Any) -> tuple[list[int], ParallelDraftState, Meter]:
    told = toy_prompt([1, 0], max_new_tokens=58, **said)
    state, runner, meter = choice.open(target), ToyRunner(TARGET), Meter()
    assert isinstance(state, ParallelDraftState)
    state.begin(told)
    if choice.prune is not None:
        state.keep_columns(torch.tensor([1]))
    ids = decode_speculatively(runner, state, told, runner.prefill(told.inputs), stop=STOP, meter=meter)
    return ids[0].tolist(), state, meter


def held(target: ModelView, scenario: str) -> Worker:
    return next(worker for name, worker in target._held.items() if f"'model': '{scenario}'" in name)


def test_two_processes_say_what_one_says(target: ModelView) -> None:
    """Sequence after sequence in one process, with a draft that is always right and one that is often wrong."""
    for seed in ("1", "32"):
        choice = Toy(model=seed, window=3)
        process = None
        for _ in range(2):
            ids, state, meter = slowly(target, choice)
            assert ids == decode_greedily(TARGET, [1, 0], STOP) and not meter.failures
            worker = held(target, seed)
            assert process in (None, worker.process.pid), "the process is kept for the next sequence"
            process = worker.process.pid
        told = state.counters()
        assert told["drafted"] > 0 and told["target_step_s"] > 0 and told["draft_step_s"] > 0
        # A right draft saves steps; late windows cost rounds, never tokens.
        assert seed != "1" or (sum(kept for _, kept in meter.rounds) > 30 and len(meter.rounds) < 40)


def test_a_process_that_is_slow_to_begin_is_not_told_of_as_silent() -> None:
    """It is waited for as long as it was given to begin, however short a silence may be later."""
    worker = Worker(SERVICE, {"model": "1"}, silence_s=0.01)
    os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DraftError, match=r"was not ready within 0\.2 s; raise start_s"):
            worker.wait(READY, 0.2)
    finally:
        worker.close()


class Likeliest:
    """A warp of the program's own file, which another process does not have."""

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()


@pytest.mark.parametrize(("pruned", "warp"), [(True, None), (False, Likeliest()), (True, Likeliest())])
def test_pruned_columns_that_are_told_and_a_processor_that_the_process_cannot_have_cost_no_draft(
    target: ModelView, pruned: bool, warp: Likeliest | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Likeliest, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Likeliest", Likeliest, raising=False)
    prune = registry("prune").build("uniform") if pruned else None
    with pytest.warns(MmaccelWarning, match="can be imported") if warp else contextlib.nullcontext():
        ids, state, meter = slowly(target, Toy(model="1", window=3, prune=prune), warp=warp)
    assert ids == decode_greedily(TARGET, [1, 0], STOP) and not meter.failures
    assert state.counters()["drafted"] > 10 and (state._choice.prune is None) != pruned
    assert (state.counters()["pruned"] > 0) == pruned
    assert held(target, "1").alive, "the process is there for the next sequence"


DEAD = {
    "killed": "ended",
    "prompt": "ended|reached",
    "raises": "out of cheese",
    "foreign": "malformed",
    "talks": "malformed",
    "stalled": "said nothing for",
    "half": "half a message",
    "odds": "malformed",  # the distribution of a drawn token is without it
}


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=pytest.mark.slow if one in ("prompt", "talks") else ()) for one in DEAD]
)
def test_a_process_that_fails_loses_no_token(target: ModelView, fault: str) -> None:
    choice = Toy(model=f"1:{fault}:3", window=3, timeout_s=0.6)
    with pytest.warns(MmaccelWarning, match=DEAD[fault]):
        ids, _, meter = slowly(target, choice, warp=Softmax() if fault == "odds" else None)
    assert fault == "odds" or ids == decode_greedily(TARGET, [1, 0], STOP)
    assert len(meter.failures) == 1
    worker = held(target, f"1:{fault}:3")
    assert not worker.alive and worker.process.poll() is not None, "a broken process is not left behind"
    if fault == "killed":
        with pytest.warns(MmaccelWarning):
            ids, _, meter = slowly(target, choice)
        assert ids == decode_greedily(TARGET, [1, 0], STOP) and sum(kept for _, kept in meter.rounds) > 0
        assert held(target, "1:killed:3").process.pid != worker.process.pid, "the next sequence has a new one"


def together(
    target: ModelView, choice: Parallel, starts: list[int]
) -> tuple[list[list[int]], list[ParallelDraftState], list[Meter]]:
    """Several sequences of one process, begun one after the other and decoded in turns; each has an end of its own."""
    states, meters, sequences = [], [], []
    for start in starts:
        told = toy_prompt([1, start], max_new_tokens=58)
        state, runner, meter = choice.open(target), ToyRunner(TARGET), Meter()
        assert isinstance(state, ParallelDraftState)
        state.begin(told)
        first = runner.prefill(told.inputs)
        sequences.append(Speculation(runner, state, told, first, stop=limit(60 - 9 * start), meter=meter))
        sequences[-1].commit_next_tokens()
        states.append(state)
        meters.append(meter)
    with pytest.MonkeyPatch.context() as patch:
        dawdle(patch)
        decode_round_robin(sequences)
    return [sequence.ids[0].tolist() for sequence in sequences], states, meters


STARTS = [0, 2, 4]


def test_one_process_serves_several_sequences(target: ModelView) -> None:
    """Each gets its own answers, in its own mode: this draft is always right after 4, and half the time after 0."""
    choice = Toy(model="32", window=3)
    ids, states, meters = together(target, choice, STARTS)
    for got, start, meter, state in zip(ids, STARTS, meters, states, strict=True):
        assert got == decode_greedily(TARGET, [1, start], limit(60 - 9 * start)) and not meter.failures
        assert state.counters()["drafted"] > 10 and sum(kept for _, kept in meter.rounds) > 0
    refused = [sum(kept < proposed for proposed, kept in meter.rounds) for meter in meters]
    assert refused[0] > 0 and refused[1] > 0 and refused[2] == 0
    assert not _remote_stream._OPEN[held(target, "32")], "a sequence that has ended is still waited for"


def test_the_process_frees_what_it_holds_of_a_sequence_that_is_over() -> None:
    ours, theirs = socket.socketpair()
    held: WeakSet[DraftDecoder] = WeakSet()

    def fresh() -> DraftDecoder:
        held.add(writer := DraftDecoder(ToyRunner(TARGET), "cpu", VOCAB))
        return writer

    def serve() -> None:
        with contextlib.suppress(DraftError):
            _remote_drafter.serve_decoder(MessageSocket(theirs), fresh)

    process, wire = threading.Thread(target=serve), MessageSocket(ours)
    process.start()
    blob = pack({"input_ids": torch.tensor([[1, 0]])}, _remote_drafter._packed(None))
    for number in (1, 2):
        wire.send(_remote_drafter.BEGIN, number, 0, 0, 0, blob=blob)
        wire.send(_remote_drafter.WRITE, number, 0, 2)
        answer = wire.receive_message(10.0)
        assert answer is not None and answer.numbers[0] == number
    assert len(held) == 2
    wire.send(_remote_drafter.END, 1)
    wire.send(_remote_drafter.WRITE, 2, 2, 1)
    answer = wire.receive_message(10.0)
    assert answer is not None and answer.numbers[0] == 2 and len(held) == 1
    ours.shutdown(socket.SHUT_RDWR)
    process.join(10.0)
    assert not process.is_alive()
    ours.close()
    theirs.close()


@pytest.mark.always
def test_a_process_that_dies_loses_no_token_of_several_sequences(target: ModelView) -> None:
    with pytest.warns(MmaccelWarning, match="ended|reached"):
        ids, _, meters = together(target, Toy(model="1:killed:4", window=3), STARTS)
    for got, start, meter in zip(ids, STARTS, meters, strict=True):
        assert got == decode_greedily(TARGET, [1, start], limit(60 - 9 * start)) and len(meter.failures) == 1


def test_a_prompt_is_taken_while_the_process_reads_another(target: ModelView) -> None:
    """More than the wire holds, sent to a process at work: the target does not wait for it."""
    worker = Toy(model="1:slow:0", window=3)._worker(target)
    first, second = _remote_drafter.RemoteDrafter(worker, VOCAB), _remote_drafter.RemoteDrafter(worker, VOCAB)
    ids = torch.tensor([[1, 0]])
    first.begin({"input_ids": ids}, None, False, False, 0)
    for _ in range(10):
        first.request_tokens(0, [], 1)
    began = time.monotonic()
    second.begin({"input_ids": ids, "pixel_values": torch.zeros(1 << 21)}, None, False, False, 0)
    assert time.monotonic() - began < 1.5, "ten windows take two seconds"
    second.request_tokens(0, [], 1)
    # Read by the other of the two, the first one's answers are handed on.
    assert second.collect_tokens(10.0) is not None and len(first._answers) == 10
    first.close()
    second.close()


def slowly(target: ModelView, choice: Parallel, **said: Any) -> tuple[list[int], ParallelDraftState, Meter]:
    """A target whose steps take a while, so that a silence is long enough to be noticed."""
    with pytest.MonkeyPatch.context() as patch:
        dawdle(patch)
        return decode(target, choice, **said)


def dawdle(patch: pytest.MonkeyPatch) -> None:
    heard(patch, ToyRunner, "step", lambda *_: time.sleep(0.02))


def test_a_slow_draft_is_not_waited_for_and_not_lost(target: ModelView) -> None:
    ids, state, meter = slowly(target, Toy(model="1:slow:0", window=3))
    assert ids == decode_greedily(TARGET, [1, 0], STOP) and not meter.failures
    assert state.counters()["late"] >= 1


def test_a_draft_of_another_vocabulary_is_refused_before_anything_runs(target: ModelView) -> None:
    with pytest.raises(DraftError, match="embeddings"):
        Toy(model="1:vocabulary").check_target(target)
    assert not any("vocabulary" in name for name in target._held)


def test_a_service_that_is_not_there_is_told() -> None:
    worker = Worker("mmaccel.core.decoding.worker:nothing", {})
    with pytest.raises(DraftError, match="nothing"):
        worker.wait(1, 60)
    assert worker.process.poll() is not None


def test_the_process_sees_the_gpu_of_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module.subprocess, "Popen", begun := Mock(side_effect=ZeroDivisionError))
    monkeypatch.setenv(worker_module.DRAFT_GPU, "3")
    with pytest.raises(ZeroDivisionError):
        Toy(model="1")._worker(toy_view(TARGET, VOCAB))
    assert begun.call_args.kwargs["env"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert '"device": "cuda:0"' in begun.call_args.args[0][-1]


def test_what_an_abandoned_sequence_left_unread_does_not_block_the_next(target: ModelView) -> None:
    choice = Toy(model="1:floods:1", window=3, timeout_s=5.0)
    state = choice.open(target)
    state.begin(toy_prompt([1, 0]))
    time.sleep(0.5)
    state.close()
    state = choice.open(target)
    began = time.monotonic()
    state.begin(toy_prompt([1, 0], inputs={"pixel_values": torch.zeros(1 << 21)}))
    assert time.monotonic() - began < 4
    state.close()


def test_half_a_message_stalls_nothing(target: ModelView) -> None:
    """The target goes on, whatever the longest silence may be; it did not wait a second longer than for a late window."""
    choice = Toy(model="1:half:3", window=3, timeout_s=60.0)
    held_by = choice._worker(target)
    began = time.monotonic()
    ids, state, _ = slowly(target, choice)
    assert ids == decode_greedily(TARGET, [1, 0], STOP) and time.monotonic() - began < 10
    assert state.counters()["alone"] > 0 and held_by.alive
    held_by.close()


def test_a_message_that_comes_in_pieces_is_whole() -> None:
    ours, theirs = socket.socketpair()
    wire, other = MessageSocket(ours), MessageSocket(theirs)
    sent: list[bytes] = []

    real, other._end = other._end, Mock(sendall=lambda data: sent.append(bytes(data)))
    other.send(OWN, 3, -1, blob=[b"some ", b"bytes"])
    other.send(READY)
    whole = b"".join(sent)
    for at in range(len(whole) - 1):
        real.sendall(whole[at : at + 1])
        message = wire.receive_message(0.0)
        assert (message is not None) == (at == 16 + 16 + 10 - 1)
        if message is not None:
            assert (message.kind, message.numbers, bytes(message.blob)) == (OWN, (3, -1), b"some bytes")
    real.sendall(whole[-1:])
    assert wire.receive_message(0.0) is not None and wire.receive_message(0.0) is None
    ours.close()
    real.close()


def test_a_fork_of_the_parent_does_not_end_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(SERVICE, {"model": "1"})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(worker_module.os, "getpid", lambda: -1)
            worker.close()
        assert worker.process.poll() is None
    finally:
        worker.process.kill()
        worker.process.wait()
        assert worker.process.stdin is not None
        worker.process.stdin.close()


def test_no_process_outlives_its_parent() -> None:
    """The parent is killed while its worker is at work."""
    code = (
        "import sys, time; from mmaccel.core.decoding.worker import Worker, READY\n"
        f"w = Worker({SERVICE!r}, {{'model': '1'}}); w.wait(READY, 60)\n"
        "print(w.process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _runs(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: not _runs(child), 10)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
