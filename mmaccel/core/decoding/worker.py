"""`Worker`: a second process that runs a function of ours, connected by one socket, and always killed at the end.

A message is a kind, whole numbers, and bytes. In steady work only ids and counts travel. The socket is a pair made before
the start: no port is opened, and no process group is joined, so a program that has one of its own is not disturbed. A round
trip takes half of what it takes through gloo. NCCL would add a kernel on each side, and a read back.
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from mmaccel.core.errors import DraftError, MmaccelError

Blob = bytes | bytearray | memoryview

READY, FAILED, BEAT, OWN = 1, 2, 3, 16
"""Kinds of message that every worker may send; a service counts its own from `OWN` on."""
DRAFT_GPU = "MMACCEL_DRAFT_GPU"
"""The variable of the environment that names the one GPU of drafts' processes, as their `CUDA_VISIBLE_DEVICES`."""
BEAT_S, END_S, STILL_S = 0.5, 5.0, 0.5
_HEAD = struct.Struct("<IHHQ")
_MAGIC = 0x6D6D6163
_MOST, _PART = 1 << 34, 1 << 20


class Message(NamedTuple):
    """One message between two processes: its kind, numbers and bytes."""

    kind: int
    numbers: tuple[int, ...]
    blob: bytearray


class MessageSocket:
    """One end of the socket between two processes. Raises `DraftError` if the other is gone or sends a malformed message.

    silence_s  longest time that sending may block on the other end; None: no limit
    begun      when the first bytes of a message came that is still incomplete, by `time.monotonic`; None: there is none
    offered    when the bytes now being sent were offered to the other end; infinite while nothing is sent
    """

    def __init__(self, end: socket.socket, silence_s: float | None = None) -> None:
        self.silence_s = silence_s
        self._end, self._lock = end, threading.Lock()
        # Of a message on its way in: kind and count of numbers, once known; and the part of which `_at` bytes are there.
        self._head: tuple[int, int] | None = None
        self._part, self._at = bytearray(_HEAD.size), 0
        self.begun: float | None = None
        self.offered, self.busy = math.inf, False
        self.pulse: threading.Thread | None = None

    def send(self, kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
        """Send a message; `blob` is its bytes in pieces. Blocks until the socket has taken it, not until it is read."""
        size = sum(memoryview(piece).nbytes for piece in blob)
        head = _HEAD.pack(_MAGIC, kind, len(numbers), size) + struct.pack(f"<{len(numbers)}q", *numbers)
        try:
            with self._lock:
                self._end.settimeout(self.silence_s)
                for piece in [memoryview(one) for one in (head, *blob)]:
                    for at in range(0, piece.nbytes, _PART):
                        self.offered = time.monotonic()
                        self._end.sendall(piece[at : at + _PART])
                self.offered = math.inf
        except OSError as error:
            raise DraftError(f"the second process cannot be reached ({error}).") from error

    def receive_message(self, limit_s: float | None) -> Message | None:
        """Return the next message, or None if it is not complete within `limit_s` (None: no limit); what has come of it by
        then is kept for the next call."""
        until = None if limit_s is None else time.monotonic() + limit_s
        try:
            poll = select.poll()  # `select.select` would refuse the files of a program that has many open
            poll.register(self._end, select.POLLIN)
            while True:
                while self._at < len(self._part):
                    if not poll.poll(None if until is None else 1e3 * max(0.0, until - time.monotonic())):
                        return None
                    count = self._end.recv_into(memoryview(self._part)[self._at :])
                    if not count:
                        raise DraftError("the second process has ended.")
                    self._at += count
                    self.begun = self.begun or time.monotonic()
                part, self._at = self._part, 0
                if self._head is None:
                    magic, kind, count, size = _HEAD.unpack(part)
                    if magic != _MAGIC or size > _MOST:
                        raise DraftError("the second process sent a malformed message.")
                    self._head, self._part = (kind, count), bytearray(8 * count + size)
                    continue
                (kind, count), self._head, self.begun = self._head, None, None
                self._part = bytearray(_HEAD.size)
                numbers = struct.unpack_from(f"<{count}q", part)
                del part[: 8 * count]
                return Message(kind, numbers, part)
        except (OSError, ValueError) as error:
            raise DraftError(f"the second process cannot be reached ({error}).") from error


def _reason(error: BaseException) -> str:
    """An error on one line; one that is not ours with its class."""
    text = str(error) if isinstance(error, MmaccelError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


class AsyncSender:
    """Sends messages in order from a background thread, which lives only while a message is pending.

    send   a function of a message's kind, numbers and `blob`, its bytes in pieces; see `MessageSocket.send`
    error  why a message was not sent; those after it are dropped
    left   when the last one was sent, by `time.monotonic`
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._queue: deque[tuple[int, tuple[int, ...], Callable[[], Sequence[Blob]]]] = deque()
        self._thread: threading.Thread | None = None
        self.error: DraftError | None = None
        self.left = 0.0

    @property
    def is_sending(self) -> bool:
        """Whether a message is being sent or waits to be sent."""
        return self._thread is not None

    def put(self, kind: int, numbers: tuple[int, ...], blob: Callable[[], Sequence[Blob]]) -> None:
        """Queue a message for sending in the background; `blob` makes its bytes when it is sent."""
        with self._lock:
            if self.error is None:
                self._queue.append((kind, numbers, blob))
            if self._thread is None:
                thread = threading.Thread(target=self._work, daemon=True)
                try:
                    thread.start()
                except BaseException:  # there is room for no more threads, or the program is ending
                    self._queue.clear()
                    raise
                self._thread = thread

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until all queued messages are sent, at most `limit_s` seconds; return whether they are."""
        thread = self._thread
        # The thread itself may be asked: the collector of garbage, which ends a process that nobody has, runs in any.
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(limit_s)
        return not thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                kind, numbers, blob = self._queue.popleft()
            try:
                self._send(kind, *numbers, blob=blob())
            except BaseException as error:  # raised in the caller's thread, by the next call of its worker
                with self._lock:
                    # Another one: the frames that this one has been through hold the prompt.
                    self.error = DraftError(_reason(error))
                    self._queue.clear()
            del blob  # nor is a prompt kept that has left
            self.left = time.monotonic()


class Worker:
    """A process that runs `service` ("module:function") with `options`; it is killed when this object is deleted.

    The function gets a `MessageSocket` and the options, and serves until the socket breaks; `env` among the options is added
    to its environment. An error in it is reported and ends it. It sends a heartbeat twice a second while it is busy, and is
    ended if it sends nothing or leaves a message unread for `wire.silence_s`. `ready`: numbers of `READY`; `close` ends it.
    """

    def __init__(self, service: str, options: Mapping[str, Any], *, silence_s: float = 30.0) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        code = "import mmaccel; from mmaccel.core.decoding.worker import main; main()"
        # The kernel can end a child with its parent, but means the thread that started it: only the main one lasts.
        lasting = str(int(threading.current_thread() is threading.main_thread()))
        given = [str(theirs.fileno()), lasting, service, json.dumps(dict(options))]
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *given],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": path, **options.get("env", {})},
            )
        finally:
            theirs.close()
        self.wire = MessageSocket(ours, silence_s)
        self.ready: tuple[int, ...] = ()
        self._outbox = AsyncSender(self.wire.send)
        self._heard = time.monotonic()
        self.close = weakref.finalize(self, _end, os.getpid(), self.process, ours, self._errors, self._outbox)

    @property
    def alive(self) -> bool:
        return self.close.alive and self.process.poll() is None

    def send(self, kind: int, *numbers: int, blob: Sequence[Blob] = ()) -> None:
        """Send a message to the worker, as `MessageSocket.send` does; from now on it must answer or send heartbeats."""
        self._heard = time.monotonic()
        busy = self._outbox.is_sending  # asked first: what was busy and broke meanwhile takes nothing more
        self._got_through()
        if busy:
            return self._outbox.put(kind, numbers, lambda: blob)
        try:
            self.wire.send(kind, *numbers, blob=blob)
        except DraftError as error:
            self._broken(error)

    def send_in_background(self, kind: int, *numbers: int, blob: Callable[[], Sequence[Blob]]) -> None:
        """Send a large message in the background; `blob` makes its bytes. Messages sent later arrive later.

        Tensors behind these bytes must not change until `wait_until_sent` returns. The next call raises an error in sending.
        """
        self._heard = time.monotonic()
        self._got_through()
        self._outbox.put(kind, numbers, blob)

    def wait_until_sent(self, limit_s: float | None = None) -> None:
        """Wait until all messages of `send_in_background` are sent. Once `limit_s` seconds are over and the worker has taken
        no bytes for `STILL_S` seconds, end it and raise `DraftError`."""
        sent = self._outbox.wait(limit_s)  # another's message may be on its way by now
        while not sent and time.monotonic() - self.wire.offered < STILL_S:
            sent = self._outbox.wait(STILL_S)
        self._got_through()
        if not sent:
            self._broken(DraftError("the second process did not take its prompt by the call's deadline."))

    def _got_through(self) -> None:
        if (error := self._outbox.error) is not None:
            self._broken(error)

    def _broken(self, error: DraftError) -> NoReturn:
        """End the process, for half a message may be on its way and what follows would be nonsense, and say why it broke."""
        why = ""
        if self.close.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)
            code = self.process.poll()
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace").strip()
            lines = [line for line in text.splitlines() if "%|" not in line]  # a bar of progress is no reason
            why = "" if code is None else f" (exit status {code})"
            why += f" {lines[-1]}" if lines and code else ""
        self.close()
        raise DraftError(f"{error}{why}") from error

    def receive_all(self) -> list[Message]:
        """Return all messages that have arrived. Call it before a new task: a worker blocks if its messages are not read."""
        self._heard = time.monotonic()
        return list(iter(lambda: self.receive_message(0.0), None))

    def receive_message(self, limit_s: float, silence_s: float | None = None) -> Message | None:
        """Return the next message other than a heartbeat, or None after `limit_s`. Raises `DraftError` if the worker has
        failed or ended, or has sent nothing for `silence_s` (None: the wire's)."""
        silence_s = silence_s or self.wire.silence_s or math.inf
        until = time.monotonic() + limit_s
        while True:
            self._got_through()
            try:
                message = self.wire.receive_message(max(0.0, until - time.monotonic()))
            except DraftError as error:
                self._broken(error)
            # It cannot answer what it has not heard; the wire has a limit of its own.
            self._heard = time.monotonic() if self._outbox.is_sending else max(self._heard, self._outbox.left)
            if message is None:
                half = self.wire.begun
                if time.monotonic() - min(self._heard, half or math.inf) > silence_s:
                    self.close()
                    fault = "said nothing" if half is None else "sent half a message and no more"
                    wait = f"for {silence_s:g} s; raise timeout_s if it is only slow"
                    raise DraftError(f"the second process {fault} {wait}.")
                return None
            self._heard = time.monotonic()
            if message.kind == FAILED:
                self.close()
                raise DraftError(message.blob.decode(errors="replace"))
            if message.kind != BEAT:
                return message

    def wait(self, kind: int, limit_s: float) -> Message:
        """Return the next message, which must be of `kind`; raises `DraftError` otherwise, or after `limit_s`."""
        message = self.receive_message(limit_s, math.inf)
        if message is None or message.kind != kind:
            self.close()
            late = f"was not ready within {limit_s:g} s; raise start_s"
            raise DraftError(f"the second process {late if message is None else 'answered out of turn'}.")
        if kind == READY:
            self.ready = message.numbers
        return message


def _end(
    owner: int, process: subprocess.Popen[bytes], end: socket.socket, errors: Any, outbox: AsyncSender
) -> None:
    if os.getpid() != owner:
        end.close()
        return  # a fork of the parent has a copy of this; the process is not its own to end
    with process, errors:
        process.kill()
        # What it sends fails by now; its number may be another file's as soon as the socket is closed.
        outbox.wait(END_S)
        end.close()


@contextlib.contextmanager
def send_heartbeats(wire: MessageSocket) -> Iterator[None]:
    """Context in which a thread sends a heartbeat over `wire` twice a second."""

    def beat() -> None:
        with contextlib.suppress(DraftError):
            while True:
                time.sleep(BEAT_S)
                if wire.busy:
                    wire.send(BEAT)

    wire.busy = True
    if wire.pulse is None:
        wire.pulse = threading.Thread(target=beat, daemon=True)
        wire.pulse.start()
    try:
        yield
    finally:
        wire.busy = False


def incoming_messages(wire: MessageSocket, on_arrival: Callable[[Message], None]) -> Iterator[Message]:
    """Yield incoming messages until the socket breaks, then raise its error. A thread reads ahead while a message is being
    handled, so that the sender of a large one need not wait, and calls `on_arrival` for each."""
    messages: queue.SimpleQueue[Message | DraftError] = queue.SimpleQueue()

    def take() -> None:
        try:
            while (message := wire.receive_message(None)) is not None:
                on_arrival(message)
                messages.put(message)
        except DraftError as error:
            messages.put(error)

    threading.Thread(target=take, daemon=True).start()
    while isinstance(message := messages.get(), Message):
        yield message
    raise message


def main() -> None:
    """Main function of the second process: import its service, run it, and exit when the parent exits."""
    fd, lasting, service, options = sys.argv[1:5]
    parent = os.getppid()
    if lasting == "1":
        # PR_SET_PDEATHSIG, of Linux; the threads below serve elsewhere.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)

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
    wire = MessageSocket(socket.socket(fileno=int(fd)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is the parent's to handle
    try:
        module, _, name = service.partition(":")
        serve: Callable[..., None] = getattr(importlib.import_module(module), name)
        serve(wire, json.loads(options))
    except BaseException as error:
        with contextlib.suppress(DraftError):
            wire.send(FAILED, blob=[_reason(error)[:400].encode()])
        raise
