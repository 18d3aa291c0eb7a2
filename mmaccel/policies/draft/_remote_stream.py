"""Runs a draft's video stream in a second process, which keeps its memory and files; the target's side sends frames."""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.decoding.watching import DraftStream, DraftStreamSettings, QuestionAttention
from mmaccel.core.decoding.worker import OWN, Blob, Message, MessageSocket, Worker, send_heartbeats
from mmaccel.core.errors import DraftError
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.draft._packed import ALIGN, make_packer, unpack

BEGIN, KEEP, WRITE, WROTE, END, GREEDY, CALL, DONE = range(OWN, OWN + 8)
WAIT_S = 1.0
"""Seconds between two looks at the process while it is waited for."""

_NUMBERS = itertools.count(1)
_OPEN: WeakKeyDictionary[Worker, WeakValueDictionary[int, ProcessClient]] = WeakKeyDictionary()
"""For each process its sequences and streams, by number: whoever reads the wire hands on what is another's."""

_OVER: WeakKeyDictionary[Worker, deque[int]] = WeakKeyDictionary()
"""For each process the sequences and streams that were collected as garbage; it is told when the next one begins."""


class ProcessClient:
    """The target's side of a sequence or stream in a draft process that several share; `number` names it in messages."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.number = next(_NUMBERS)
        self._answers: deque[Message] = deque()
        self._open = _OPEN.setdefault(worker, WeakValueDictionary())

    def _end_collected(self) -> None:
        """Tell the process which sequences and streams are over."""
        over = _OVER.get(self._worker, ())
        while over:
            self._worker.send(END, over.popleft())

    def _wait_until_sent(self, deadline: Deadline | None) -> None:
        """Wait until all is sent, as the prompt's owner may write over it then; a process that takes nothing more after the
        call's deadline is ended: raises `DraftError`."""
        left = None if deadline is None else 0.0 if deadline.end_reason() else deadline.seconds_left()
        self._worker.wait_until_sent(left)

    def _hand_on(self, message: Message) -> None:
        """To whom it is for; an answer for one that was given up before is for nobody, nonsense is for us."""
        known = message.kind in (WROTE, DONE) and message.numbers
        owner = self._open.get(message.numbers[0] if known else self.number)
        if owner is not None:
            owner._answers.append(message)


class RemoteDraftStream(DraftStream, ProcessClient):
    """The target's side of a draft's stream. The second process reads a clip while the target goes on to the next one."""

    def __init__(self, worker: Worker, told: DraftStreamSettings) -> None:
        """Open the stream; that of a prompt begins to read it."""
        super().__init__(worker)
        self._open[self.number] = self
        self._out, self._deadline = 1, told.deadline  # calls not answered yet
        self._end_collected()
        adapter, inputs = told.prompt or (None, None)
        call = pickle.dumps(("open", (adapter, replace(told, prompt=None, deadline=None))))
        call += bytes(-len(call) % ALIGN)
        packed = list if inputs is None else make_packer(inputs)
        worker.send_in_background(CALL, self.number, len(call), blob=lambda: [call, *packed()])

    def add_frames(
        self, frames: Tensor, times: Sequence[float], fps: float | None, timed: bool, ingest: bool = False
    ) -> None:
        self.wait_until_done()
        own = frames.to("cpu", copy=True).contiguous()  # the caller's may change as soon as this returns
        rate = None if fps is None else float(fps)
        self._call("add_frames", own.numpy(), list(times), rate, timed, ingest, later=True)

    def checkpoint(self) -> bool:
        self._call("checkpoint")
        return True

    def restore(self, mark: Any) -> None:
        self._call("restore")

    def prepare_question(self, question: str, room: int, heard: QuestionAttention | None = None) -> None:
        if heard is not None:
            heard = replace(heard, tokens=heard.tokens.cpu(), paid=heard.paid.cpu())
        self._call("prepare_question", question, room, heard)

    def _call(self, name: str, *given: Any, later: bool = False) -> None:
        """Have the process call the method `name` of its stream; frames travel as they are, `later` by a thread."""
        arrays: list[pickle.PickleBuffer] = []
        call = pickle.dumps((name, given), protocol=5, buffer_callback=arrays.append if later else None)
        self._out += 1
        numbers, blob = (CALL, self.number, len(call)), list[Blob]([call, *(one.raw() for one in arrays)])
        if later:
            self._worker.send_in_background(*numbers, blob=lambda: blob)
        else:
            self._worker.send(*numbers, blob=blob)

    def end_question(self) -> None:
        self._call("end_question")
        self._wait_for_prompt()

    def end_ingest(self) -> None:
        self._call("end_ingest")
        self._wait_for_prompt()

    def _wait_for_prompt(self) -> None:
        """Wait until a prompt is sent, whose call may return now; later calls have deadlines of their own."""
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            self._wait_until_sent(deadline)

    def save(self, folder: Path) -> None:
        self._call("save", folder.resolve())
        self.wait_until_done()

    def load(self, folder: Path) -> None:
        self._call("load", folder.resolve())
        self.wait_until_done()

    def close(self, collected: bool = False) -> None:
        if self._open.pop(self.number, None) is None or not self._worker.alive:
            return
        if collected:
            _OVER.setdefault(self._worker, deque()).append(self.number)
            return
        self._worker.send(END, self.number)
        self._wait_for_prompt()

    def wait_until_done(self) -> None:
        """Wait until the second process has carried out all requests; raises `DraftError` for a malformed reply."""
        while self._out:
            message = None if self._answers else self._worker.receive_message(WAIT_S)
            if message is not None:
                self._hand_on(message)
            while self._answers:
                if self._answers.popleft().kind != DONE:
                    self._worker.close()
                    raise DraftError("the draft's process sent a malformed message.")
                self._out -= 1


class ServedStreams:
    """The streams that a draft process serves, by number. `watch` opens one from its settings. A stream stops reading as
    soon as the message that ends it arrives, before that message's turn."""

    def __init__(
        self, wire: MessageSocket, watch: Callable[[DraftStreamSettings], LocalDraftStream] | None
    ) -> None:
        self._wire, self._watch = wire, watch
        self.streams: dict[int, LocalDraftStream] = {}
        self._marks: dict[int, Any] = {}
        self._deadlines: dict[int, Deadline] = {}

    def on_arrival(self, message: Message) -> None:
        """If the queued `message` ends a stream, cancel what that stream is reading now."""
        if message.kind == CALL:
            self._deadlines.setdefault(message.numbers[0], Deadline())
        elif message.kind == END and (deadline := self._deadlines.get(message.numbers[0])) is not None:
            deadline.cancel()

    def end(self, number: int) -> None:
        """Close the stream `number`, if there is one."""
        if (stream := self.streams.pop(number, None)) is not None:
            stream.close()
            self._marks.pop(number, None)
            del self._deadlines[number]

    def handle_message(self, message: Message) -> None:
        """Carry out the request in `message` on a draft's stream, and report that it is done."""
        number, size = message.numbers
        name, given = pickle.loads(message.blob[:size], buffers=[memoryview(message.blob)[size:]])
        with send_heartbeats(self._wire), suppress(CallEnded):
            if name == "open":
                assert self._watch is not None
                adapter, told = given
                prompt = None if adapter is None else (adapter, unpack(memoryview(message.blob)[size:])[0])
                self.streams[number] = opened = self._watch(replace(told, prompt=prompt))
                opened.deadline = self._deadlines[number]
                opened.read_prompt()
            elif name == "checkpoint":
                self._marks[number] = self.streams[number].checkpoint()
            elif name == "restore":
                self.streams[number].restore(self._marks[number])
            else:
                given = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in given)
                getattr(self.streams[number], name)(*given)
        self._wire.send(DONE, number)
