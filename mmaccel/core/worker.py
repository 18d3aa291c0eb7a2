"""A second process of one's own: started from a module's function, spoken to through one socket, never left behind.

A message is a kind, whole numbers, and bytes. In steady work only ids and counts travel. The socket is a pair made before
the start: no port is opened, and no process group is entered, so that a program which has one of its own is not disturbed.
A round trip takes half of what it takes through gloo (`bench/wire.py`). NCCL moves what is on devices, and ids are wanted on
the host: it would add a kernel on each side, and a read back.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mmaccel.core.errors import DraftError
from mmaccel.core.outbox import Blob, Outbox

READY, FAILED, BEAT = 1, 2, 3
"""Kinds of message that every worker may send; a service counts its own from `OWN` on."""
OWN = 16
BEAT_S = 0.5
END_S = 5.0
_HEAD = struct.Struct("<IHHQ")
_MAGIC = 0x6D6D6163
_MOST = 1 << 34


@dataclass(frozen=True)
class Message:
    """One message."""

    kind: int
    numbers: tuple[int, ...] = ()
    blob: bytearray = field(default_factory=bytearray)


class Wire:
    """One end of the socket. Raises `DraftError` when the other end is gone or says what is no message."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        # A message on its way in: its parts that are whole, and the one that is coming, of which `_at` bytes are there.
        self._parts: list[bytearray] = []
        self._part, self._at = bytearray(_HEAD.size), 0
        self.begun: float | None = None
        """Since when half a message has been there, by `time.monotonic`; None: none is."""
        self.busy = False
        self.pulse: threading.Thread | None = None

    def limit(self, seconds: float) -> None:
        """The longest a message may take to leave, however little the other end takes."""
        self._end.settimeout(seconds)

    def send(self, kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
        """Hand a message over, whose bytes may be in pieces; returns as soon as it is on its way."""
        size = sum(memoryview(piece).nbytes for piece in blob)
        head = _HEAD.pack(_MAGIC, kind, len(numbers), size) + struct.pack(f"<{len(numbers)}q", *numbers)
        try:
            with self._lock:
                self._end.sendall(head)
                for piece in blob:
                    self._end.sendall(piece)
        except OSError as error:
            raise DraftError(f"the second process cannot be reached ({error}).") from error

    def receive(self, limit_s: float | None) -> Message | None:
        """The next message, or None when it is not whole within `limit_s` (None: however long it takes).

        What has come of a message stays for the next call.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        try:
            while True:
                if self._at == len(self._part):
                    if (message := self._next_part()) is not None:
                        return message
                elif self._waits(None if until is None else max(0.0, until - time.monotonic())):
                    self._take()
                else:
                    return None
        except (OSError, ValueError) as error:
            raise DraftError(f"the second process cannot be reached ({error}).") from error

    def _take(self) -> None:
        """Some bytes of the part that is coming; there are some by now."""
        got = self._end.recv_into(memoryview(self._part)[self._at :])
        if not got:
            raise DraftError("the second process has ended.")
        self._at += got
        self.begun = self.begun or time.monotonic()

    def _next_part(self) -> Message | None:
        """A part is whole: head, numbers, bytes. The message, where it was the last one."""
        self._parts.append(self._part)
        magic, kind, count, size = _HEAD.unpack(self._parts[0])
        if magic != _MAGIC or size > _MOST:
            raise DraftError("the second process sent a malformed message.")
        coming = {1: 8 * count, 2: size, 3: _HEAD.size}[len(self._parts)]
        self._part, self._at = bytearray(coming), 0
        if len(self._parts) < 3:
            return None
        (_, numbers, blob), self._parts, self.begun = self._parts, [], None
        return Message(kind, struct.unpack(f"<{count}q", numbers), blob)

    def _waits(self, limit_s: float | None) -> bool:
        """Whether something arrives within `limit_s`; `select` would refuse the files of a program that has many open."""
        asked = select.poll()
        asked.register(self._end, select.POLLIN)
        return bool(asked.poll(None if limit_s is None else 1e3 * limit_s))

    def close(self) -> None:
        self._end.close()


class Worker:
    """A process that runs `service` ("module:function") with `options`, and is killed when this object goes.

    The function gets a `Wire` and the options, and serves until the wire breaks. What it raises is told and ends it.
    `silence_s` is the longest a worker at work may say nothing: it beats twice a second while it is busy. It is also the
    longest it may leave a message unread.
    """

    def __init__(self, service: str, options: Mapping[str, Any], *, silence_s: float = 30.0) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        code = "import mmaccel; from mmaccel.core.worker import main; main()"
        # The kernel can end a child with its parent, but means the thread that started it: only the main one lasts.
        lasting = str(int(threading.current_thread() is threading.main_thread()))
        command = [
            sys.executable,
            "-c",
            code,
            str(theirs.fileno()),
            lasting,
            service,
            json.dumps(dict(options)),
        ]
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": path},
            )
        finally:
            theirs.close()
        self.wire = Wire(ours)
        self.ready: tuple[int, ...] = ()
        """The numbers that came with `READY`."""
        self._outbox = Outbox(self.wire.send)
        self.silence_s = silence_s
        self._heard = time.monotonic()
        self._close = weakref.finalize(
            self, _end, os.getpid(), self.process, ours, self._errors, self._outbox
        )

    @property
    def silence_s(self) -> float:
        return self._silence_s

    @silence_s.setter
    def silence_s(self, seconds: float) -> None:
        self._silence_s = seconds
        self.wire.limit(seconds)

    @property
    def alive(self) -> bool:
        return self._close.alive and self.process.poll() is None

    def send(self, kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
        """See `Wire.send`; the worker is expected to say something from now on."""
        self._heard = time.monotonic()
        busy = self._outbox.busy
        self._got_through()
        if busy:
            self._outbox.put(kind, numbers, lambda: blob)
            return
        try:
            self.wire.send(kind, *numbers, blob=blob)
        except DraftError as error:
            self._broken(error)

    def post(self, kind: int, *numbers: int, blob: Callable[[], Sequence[Blob]]) -> None:
        """Send a message whose bytes are many, and made by `blob`, while the caller goes on; what is sent later comes later.

        They may be those of tensors, which stay as they are until `posted` has returned. A message that does not get through
        is told by the next call.
        """
        self._heard = time.monotonic()
        self._got_through()
        self._outbox.put(kind, numbers, blob)

    def posted(self) -> None:
        """Wait until all that was posted has left."""
        self._outbox.wait()
        self._got_through()

    def _got_through(self) -> None:
        if (error := self._outbox.error) is not None:
            self._broken(error)

    def _broken(self, error: Exception) -> NoReturn:
        """Half a message may be on its way: what follows would be nonsense."""
        reason = self._reason()
        self.close()
        raise DraftError(f"{error}{reason}") from error

    def drain(self) -> list[Message]:
        """What is on the wire by now, before a new task is sent: a worker that nobody reads stops working in the end."""
        self._heard = time.monotonic()
        found = []
        while (message := self.receive(0.0)) is not None:
            found.append(message)
        return found

    def receive(self, limit_s: float, silence_s: float | None = None) -> Message | None:
        """The next message that is no beat, or None after `limit_s`. Raises `DraftError` when there is none to come: after
        `silence_s` without a word, the worker's own if None."""
        silence_s = self.silence_s if silence_s is None else silence_s
        until = time.monotonic() + limit_s
        while True:
            self._got_through()
            try:
                message = self.wire.receive(max(0.0, until - time.monotonic()))
            except DraftError as error:
                self._broken(error)
            # It cannot answer what it has not heard; the wire has a limit of its own.
            self._heard = time.monotonic() if self._outbox.busy else max(self._heard, self._outbox.left)
            if message is None:
                half = self.wire.begun
                if time.monotonic() - min(self._heard, half or math.inf) > silence_s:
                    self.close()
                    said = "said nothing" if half is None else "sent half a message and no more"
                    raise DraftError(
                        f"the second process {said} for {silence_s:g} s; raise timeout_s if it is only slow."
                    )
                return None
            self._heard = time.monotonic()
            if message.kind == FAILED:
                self.close()
                raise DraftError(message.blob.decode(errors="replace"))
            if message.kind != BEAT:
                return message

    def wait(self, kind: int, limit_s: float) -> Message:
        """The next message, which must be of `kind`; raises `DraftError` otherwise, or after `limit_s`."""
        message = self.receive(limit_s, math.inf)
        if message is None:
            self.close()
            raise DraftError(f"the second process was not ready within {limit_s:g} s; raise start_s.")
        if message.kind != kind:
            self.close()
            raise DraftError("the second process answered out of turn.")
        if kind == READY:
            self.ready = message.numbers
        return message

    def _reason(self) -> str:
        if not self._close.alive:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        code = self.process.poll()
        self._errors.seek(0)
        # A bar of progress is no reason.
        told_of = self._errors.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in told_of if "%|" not in line]
        told = f" (exit status {code})" if code is not None else ""
        return f"{told} {lines[-1]}" if lines and code not in (None, 0) else told

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self._close()


def _end(
    owner: int, process: subprocess.Popen[bytes], end: socket.socket, errors: Any, outbox: Outbox
) -> None:
    if os.getpid() != owner:
        end.close()
        return  # a fork of the parent has a copy of this; the process is not its own to end
    process.kill()
    outbox.wait(
        END_S
    )  # what it sends fails by now; its number may be another file's as soon as the socket is closed
    end.close()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
    errors.close()


@contextlib.contextmanager
def beating(wire: Wire) -> Iterator[None]:
    """While inside, the other end hears twice a second that this one is at work."""
    wire.busy = True
    if wire.pulse is None:
        wire.pulse = threading.Thread(target=_beat, args=(wire,), daemon=True)
        wire.pulse.start()
    try:
        yield
    finally:
        wire.busy = False


def _beat(wire: Wire) -> None:
    with contextlib.suppress(DraftError):
        while True:
            time.sleep(BEAT_S)
            if wire.busy:
                wire.send(BEAT)


def inbox(wire: Wire) -> Iterator[Message]:
    """The messages that come, until the wire breaks, which is raised.

    They are taken off the wire while the last one is worked on: who sends a prompt does not wait for the one before.
    """
    held: queue.SimpleQueue[Message | DraftError] = queue.SimpleQueue()

    def take() -> None:
        try:
            while True:
                message = wire.receive(None)
                assert message is not None
                held.put(message)
        except DraftError as error:
            held.put(error)

    threading.Thread(target=take, daemon=True).start()
    while True:
        found = held.get()
        if isinstance(found, DraftError):
            raise found
        yield found


def main() -> None:
    """What the second process does: find its service and run it, and be gone when its parent is."""
    fd, lasting, service, options = sys.argv[1:5]
    _die_with_parent(lasting == "1")
    wire = Wire(socket.socket(fileno=int(fd)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is the parent's to handle
    try:
        module, _, name = service.partition(":")
        serve: Callable[[Wire, dict[str, Any]], None] = getattr(importlib.import_module(module), name)
        serve(wire, json.loads(options))
    except BaseException as error:
        with contextlib.suppress(DraftError):
            told = " ".join(f"{type(error).__name__}: {error}".split())
            wire.send(FAILED, blob=[told[:400].encode()])
        raise


def _die_with_parent(lasting: bool) -> None:
    parent = os.getppid()
    if lasting:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(
                1, signal.SIGKILL
            )  # PR_SET_PDEATHSIG, of Linux; the threads below serve elsewhere

    def watch_input() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdin.buffer.read()
        os._exit(0)

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    for watch in (watch_input, watch_parent):
        threading.Thread(target=watch, daemon=True).start()
