"""A draft's own stream in the draft's process: both ends. Frames go over the wire; marks, memory and files stay there."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from mmaccel.core.decoding.watching import DraftStream, Heard, Watching
from mmaccel.core.decoding.worker import OWN, Message, Wire, Worker, beating
from mmaccel.core.errors import DraftError
from mmaccel.core.streams.draft_stream import LocalDraftStream

BEGIN, KEEP, WRITE, WROTE, END, GREEDY, WATCH, TAKE, CALL, DONE = range(OWN, OWN + 10)
WAIT_S = 1.0
"""Seconds between two looks at the process while it is waited for."""

_NUMBERS = itertools.count(1)
_OPEN: WeakKeyDictionary[Worker, WeakValueDictionary[int, WireEnd]] = WeakKeyDictionary()
"""For each process its sequences and streams, by number: whoever reads the wire hands on what is another's."""


class WireEnd:
    """The end on the target's side, of one sequence or stream of a process that several share; it has a number there."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.number = next(_NUMBERS)
        self._answers: deque[Message] = deque()
        self._open = _OPEN.setdefault(worker, WeakValueDictionary())

    def _hand_on(self, message: Message) -> None:
        """To whom it is for; an answer for one that was given up before is for nobody, nonsense is for us."""
        known = message.kind in (WROTE, DONE) and message.numbers
        owner = self._open.get(message.numbers[0] if known else self.number)
        if owner is not None:
            owner._answers.append(message)


class RemoteDraftStream(DraftStream, WireEnd):
    """The end on the target's side. The process reads a clip while the target goes on, and is at most one clip behind."""

    def __init__(self, worker: Worker, session: Watching) -> None:
        super().__init__(worker)
        self._open[self.number] = self
        self._out = 0  # messages not answered yet
        given = pickle.dumps((session.processor, session.kv, session.chunk, session.prune))
        worker.send(WATCH, self.number, blob=[given])
        self._out += 1

    def take(self, frames: Tensor, times: Sequence[float], fps: float | None, timed: bool) -> None:
        self.settle()
        head = json.dumps([list(times), None if fps is None else float(fps), timed]).encode()
        own = frames.to("cpu", copy=True).contiguous()  # the caller's may change as soon as this returns
        self._out += 1
        self._worker.post(
            TAKE,
            *(self.number, len(head), *frames.shape),
            blob=lambda: [head, own.view(-1).numpy().data],
        )

    def mark(self) -> bool:
        self._call("mark")
        return True

    def back(self, mark: Any) -> None:
        self._call("back")

    def ask(self, question: str, room: int, heard: Heard | None = None) -> None:
        more = b""
        if heard is not None:
            more = pickle.dumps(replace(heard, tokens=heard.tokens.cpu(), paid=heard.paid.cpu()))
        self._call("ask", question, room, more=more)

    def done(self) -> None:
        self._call("done")

    def idle(self) -> None:
        self._call("idle")

    def save(self, folder: Path) -> None:
        self._call("save", str(folder.resolve()))
        self.settle()

    def load(self, folder: Path) -> None:
        self._call("load", str(folder.resolve()))
        self.settle()

    def close(self) -> None:
        if self._open.pop(self.number, None) is not None and self._worker.alive:
            self._call("close")

    def _call(self, name: str, *given: Any, more: bytes = b"") -> None:
        self._out += 1
        call = json.dumps([name, *given]).encode()
        self._worker.send(CALL, self.number, len(call), blob=[call, more] if more else [call])

    def settle(self) -> None:
        """Wait until the process has done all that it was asked for."""
        while self._out:
            message = None if self._answers else self._worker.receive(WAIT_S)
            if message is not None:
                self._hand_on(message)
            while self._answers:
                if self._answers.popleft().kind != DONE:
                    self._worker.close()
                    raise DraftError("the draft's process sent a malformed message.")
                self._out -= 1


class ServedStreams:
    """The end in the process: `streams` by number, each made by `watch` of a processor, a memory, a chunk and a pruner."""

    def __init__(self, wire: Wire, watch: Callable[..., LocalDraftStream] | None) -> None:
        self._wire, self._watch = wire, watch
        self.streams: dict[int, LocalDraftStream] = {}
        self._marks: dict[int, Any] = {}

    def hear(self, message: Message) -> None:
        """Do what a message for a stream asks for, and say that it is done."""
        number = message.numbers[0]
        with beating(self._wire):
            if message.kind == WATCH:
                assert self._watch is not None
                self.streams[number] = self._watch(*pickle.loads(message.blob))
            elif message.kind == TAKE:
                _, size, *shape = message.numbers
                times, fps, timed = json.loads(message.blob[:size])
                frames = torch.frombuffer(message.blob, dtype=torch.uint8, offset=size).view(shape)
                self.streams[number].take(frames, times, fps, timed)
            else:
                size = message.numbers[1]
                more = message.blob[size:]
                self._call(number, *json.loads(message.blob[:size]), *([pickle.loads(more)] if more else []))
        self._wire.send(DONE, number)

    def _call(self, number: int, name: str, *given: Any) -> None:
        stream = self.streams[number]
        if name == "mark":
            self._marks[number] = stream.mark()
        elif name == "back":
            stream.back(self._marks[number])
        elif name in ("save", "load"):
            (stream.save if name == "save" else stream.load)(Path(given[0]))
        elif name == "ask":
            stream.ask(*given)
        elif name == "idle":
            stream.idle()
        elif name == "done":
            stream.done()
        else:
            self.streams.pop(number).close()
            self._marks.pop(number, None)
