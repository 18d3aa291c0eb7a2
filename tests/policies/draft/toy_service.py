"""A draft's process for tests: it writes by a toy rule, and goes wrong when it is told to.

The scenario stands in the place of the model's folder: "seed", or "seed:fault:n" with a fault from the n-th window on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.core.decoding import worker as worker_module
from mmaccel.core.decoding.worker import _HEAD, _MAGIC, BEAT, READY, MessageSocket, Worker
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.policies.draft import _remote_drafter
from mmaccel.policies.draft._draft_decoder import DraftDecoder, DraftedTokens, TokenDistribution
from tests.core.toy import ToyRunner, bigram_rule

VOCAB = 6
VOCAB_FAULT = 9999
"""Another model's vocabulary."""


def table(seed: int) -> torch.Tensor:
    return torch.randint(0, 6, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)).float()


class Softmax:
    """Sampling that another process can have."""

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits, -1)


class Faulty(DraftDecoder):
    """Does its work until its hour has come."""

    def __init__(self, seed: int, fault: str, hour: int, wire: MessageSocket) -> None:
        super().__init__(ToyRunner(bigram_rule(table(seed))), "cpu", VOCAB)
        self.fault, self.hour, self.wire, self.windows = fault, hour, wire, 0

    def read_prompt(self, *given: Any, **named: Any) -> None:
        if self.fault == "prompt":
            os.kill(os.getpid(), signal.SIGKILL)
        super().read_prompt(*given, **named)

    def draft_tokens(self, length: int, fix: Sequence[int], count: int) -> DraftedTokens:
        self.windows += 1
        written = super().draft_tokens(length, fix, count)
        if self.windows < self.hour:
            return written
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stalled":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "floods":
            # More than the wire holds, less than it holds twice.
            for _ in range(400):
                self.wire.send(BEAT)
        if self.fault == "slow":
            time.sleep(0.2)
        if self.fault == "raises":
            raise ValueError("out of cheese")
        if self.fault == "foreign":
            return DraftedTokens([token + 1000 for token in written.ids], written.seconds)
        if self.fault == "odds":
            # The token that was drawn is not among those it was drawn from.
            one = written.odds[0]
            rest = TokenDistribution((one.ids[:1] + 1) % VOCAB, one.weights[:1] / one.weights[:1])
            rest = TokenDistribution(
                rest.ids.where(rest.ids != written.ids[0], (rest.ids + 1) % VOCAB), rest.weights
            )
            return DraftedTokens(written.ids, written.seconds, odds=(rest, *written.odds[1:]))
        if self.fault == "half":
            # A message of sixty thousand numbers, of which the beats are all that ever comes.
            with self.wire._lock:
                self.wire._end.sendall(_HEAD.pack(_MAGIC, _remote_drafter.WROTE, 60_000, 0) + b"half")
            time.sleep(600)
        if self.fault == "talks":
            self.wire._end.sendall(b"what is a message?" * 9)
        return written


def serve(wire: MessageSocket, options: dict[str, Any]) -> None:
    """The service."""
    seed, _, rest = options["model"].partition(":")
    fault, _, hour = rest.partition(":")
    wire.send(READY, VOCAB_FAULT if fault == "vocabulary" else VOCAB)
    _remote_drafter.serve_decoder(wire, lambda: Faulty(int(seed), fault, int(hour or 0), wire))


def serve_slowly(wire: MessageSocket, options: dict[str, Any]) -> None:
    """The draft's own service, in which each pass over frames takes a tenth of a second longer."""
    encode = StreamRunner.encode_frames

    def slowly(self: StreamRunner, frames: torch.Tensor) -> None:
        time.sleep(0.1)
        encode(self, frames)

    StreamRunner.encode_frames = slowly  # type: ignore[method-assign]
    _remote_drafter.serve(wire, options)


def started(silence_s: float) -> Worker:
    """A process that writes by the toy rule."""
    return Worker("tests.policies.draft.toy_service:serve", {"model": "1"}, silence_s=silence_s)


def fork(words: list[str], *, pass_fds: list[int], **how: Any) -> subprocess.Popen[bytes]:
    """As `Popen` of a worker, but it never becomes another program: what it needs is imported already."""

    def begin() -> None:
        os.closerange(3, pass_fds[0])
        os.closerange(pass_fds[0] + 1, 1 << 16)
        torch.set_num_threads(1)
        sys.argv, sys.stdin = words[2:], os.fdopen(0)
        # What it does not tell by the wire is not told: the traceback of a real one comes too late.
        with suppress(BaseException):
            worker_module.main()
        os._exit(1)

    return subprocess.Popen(words, pass_fds=pass_fds, preexec_fn=begin, **how)


@contextmanager
def forking() -> Iterator[None]:
    """Workers that are started inside fork from this process: a start takes two seconds otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": fork}))
        yield
