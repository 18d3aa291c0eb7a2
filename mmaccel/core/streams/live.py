"""`AsyncVideoSession`: a `VideoSession` for asyncio, which takes in frames while it answers questions."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, Answer, CallEnded, Deadline
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report
from mmaccel.core.streams.fair_lock import WAIT_S
from mmaccel.core.streams.intake import How
from mmaccel.core.streams.parts import Messages
from mmaccel.core.streams.session import VideoSession
from mmaccel.core.streams.sources import Tell
from mmaccel.core.streams.standing import AnswerChange, StandingQuestion

SWITCH_S = 2e-4
"""Seconds for which a Python thread that others wait for goes on; Python's own default is 5 ms."""

Done = TypeVar("Done")


@contextmanager
def tune_python_for_streams() -> Iterator[None]:
    """Context for commands, which own their process: settings of Python by which several streams run in time. The garbage
    collector skips all present objects, the model above all: a full collection would delay a token by a third of a second.
    Threads take turns after `SWITCH_S`, or one that launches kernels waits for the others at each launch."""
    gc.collect()
    gc.freeze()
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


class AsyncReply(AsyncIterator[str]):
    """An answer being generated: ``async for piece in reply`` gives its text in pieces, ``await reply`` the whole `Answer`.

    `answer` is None until it is complete. Cancelling the waiting task, `aclose`, or dropping the object, as a `break` out of
    the loop does, ends the answer after the current token.
    """

    def __init__(self, work: Callable[[Callable[[str], None]], Answer], deadline: Deadline) -> None:
        self.answer: Answer | None = None
        self._deadline = deadline
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        # Neither holds `self`, so that an answer nobody reads is collected, and ends.
        def put(piece: str) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def over(task: asyncio.Future[Answer]) -> None:
            pieces.put_nowait(None)
            if not task.cancelled():
                task.exception()  # nobody need ask for it

        self._pieces, self._task = pieces, run_in_thread(lambda: work(put))
        self._task.add_done_callback(over)

    def __del__(self) -> None:
        self._deadline.cancel()

    async def __anext__(self) -> str:
        task = self._task
        try:
            piece = None if task.done() and self._pieces.empty() else await self._pieces.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if piece is not None:
            return piece
        self.answer = await task
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._whole().__await__()

    async def _whole(self) -> Answer:
        self.answer = await await_or_cancel(self._task, self._deadline)
        return self.answer

    async def aclose(self) -> None:
        """End the answer, and wait until the model is free."""
        self._deadline.cancel()
        with suppress(Exception):
            await asyncio.shield(self._task)


class AsyncVideoSession:
    """A `VideoSession` for asyncio: ``await watch(frames)``, ``async for text in ask(question)``.

    Arguments, results and errors are those of `VideoSession`; `session` is the wrapped one, whose own calls may be used as
    well. A question sees the stream as it is when its turn comes, and frames are taken in while it is answered. Cancelling a
    task ends its forward pass: `watch` keeps the frames that the model has read.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        recipe: Recipe | str | Path | Mapping[str, Any] | None = "mosaic",
        **choices: Any,
    ) -> None:
        self.session = VideoSession(model, processor, recipe, **choices)
        self._calls = set[asyncio.Task[Any]]()  # of standing questions

    @classmethod
    async def resume(cls, model: nn.Module, processor: Any, path: str | Path) -> AsyncVideoSession:
        """Return a session with the recipe and the stream that `save` wrote to `path`."""
        live = cls.__new__(cls)
        live._calls = set()
        live.session = await run_in_thread(lambda: VideoSession.resume(model, processor, path))
        return live

    async def watch(
        self,
        video: Any,
        times: Sequence[float] | Tensor | None = None,
        fps: float | None = None,
        progress: Tell | None = None,
        *,
        timeout: float | None = None,
        reconnect: bool = False,
        subtitles: Any = None,
    ) -> int:
        """Take in frames as `VideoSession.watch` does; return their number. Another thread calls `progress`."""
        return await self._take_in("watch", video, times, fps, progress, timeout, reconnect, subtitles)

    async def ingest(
        self,
        video: Any,
        fps: float | None = None,
        progress: Tell | None = None,
        *,
        timeout: float | None = None,
        subtitles: Any = None,
    ) -> int:
        """Take in a stored video as `VideoSession.ingest` does; return the frame count. Another thread calls `progress`."""
        return await self._take_in("ingest", video, None, fps, progress, timeout, False, subtitles)

    async def _take_in(
        self, how: How, video: Any, times: Any, fps: Any, progress: Any, timeout: float | None, *more: Any
    ) -> int:
        deadline = self.session._deadline(timeout)
        with self.session._feeding(deadline):
            work = run_in_thread(
                lambda: self.session._take_in(how, video, times, fps, progress, deadline, *more)
            )
            return await await_or_cancel(work, deadline)

    def ask(
        self,
        question: str | Messages,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        timeout: float | None = None,
        evidence: bool = True,
        **how: Any,
    ) -> AsyncReply:
        """Return an `AsyncReply`: iterate over it for pieces of the text, or await it for the whole `Answer`.

        The other arguments are those of `VideoSession.ask`. Work begins at once: give the reply to ``await``, ``async for``,
        `asyncio.ensure_future` or `gather`, not to `create_task`, which takes only coroutines. If the session has
        no frames yet, the question waits for the first one, provided that a `watch` runs or is scheduled as a task.
        """
        deadline = self.session._deadline(timeout)
        ask = self.session._answering(question, max_new_tokens, deadline, evidence, **how)
        if self.session.frames:
            return AsyncReply(ask, deadline)
        begun = threading.Event()
        asyncio.get_running_loop().call_soon(begun.set)  # behind the first step of a task that watches

        def work(put: Callable[[str], None]) -> Answer:
            while not begun.wait(WAIT_S) and deadline.end_reason() is None:
                pass
            return ask(put)

        return AsyncReply(work, deadline)

    def on(
        self,
        question: str,
        call: Callable[[AnswerChange], Any],
        *,
        fails: Any = None,
        **how: Any,
    ) -> StandingQuestion:
        """Ask `question` again while frames come; run `call` (async or not) in the event loop when the answer changes, and
        `fails` likewise when an error ends it."""
        loop = asyncio.get_running_loop()

        def begin(call: Any, told: Any) -> None:
            self._calls.add(task := loop.create_task(call(told)))
            task.add_done_callback(self._calls.discard)

        def in_loop(call: Any) -> Any:
            run = partial(begin, call) if asyncio.iscoroutinefunction(call) else call
            return partial(loop.call_soon_threadsafe, run) if callable(call) else call

        return self.session.on(question, in_loop(call), fails=in_loop(fails), **how)

    async def tell(
        self, text: str | Sequence[Any], at: float | None = None, until: float | None = None
    ) -> None:
        """Add text with its time to the stream, as `VideoSession.tell` does."""
        await run_in_thread(lambda: self.session.tell(text, at, until))

    async def save(self, path: str | Path) -> None:
        """Write the stream into the folder `path` (safetensors and JSON), replacing a session saved there."""
        await run_in_thread(lambda: self.session.save(path))

    async def load(self, path: str | Path) -> None:
        """Continue from what `save` wrote, with the same model and kv; on an error the session stays as it was."""
        await run_in_thread(lambda: self.session.load(path))

    async def close(self) -> None:
        """End all calls, and release what the stream holds. Answer changes that standing questions (`on`) have found are
        reported first: it waits for their `call`, except for a `call` that itself closes the session."""
        self.session.cancel()
        await run_in_thread(self.session.close)
        self._calls.discard(asyncio.current_task())
        while self._calls:
            await asyncio.wait(self._calls)

    def cancel(self) -> None:
        """Ask all running and waiting calls of `watch` and `ask` to end, from any thread; return at once."""
        self.session.cancel()

    def report(self) -> Report:
        """Return the recipe in use and figures of the last answer, as `VideoSession.report` does."""
        return self.session.report()

    def counters(self) -> dict[str, float]:
        """Return figures of the stream's KV memory."""
        return self.session.counters()

    def usage(self) -> dict[str, float]:
        """Return bytes and questions of the stream's KV memory (`StreamState.usage`), without waiting for a forward pass."""
        live = self.session._live
        return {} if live is None else live.state.usage()

    def clusters(self) -> dict[str, Tensor]:
        """Return level name -> cluster index [L or 1, N] of N stored entries at each of L layers (1: the same at all), for a
        memory that clusters frames; else {}. Entries are in order of time, equally many for each time step of `shown`."""
        return self.session.clusters()

    def __len__(self) -> int:
        return self.session.frames

    def __bool__(self) -> bool:
        return True

    @property
    def frames(self) -> int:
        """Number of video frames watched so far."""
        return self.session.frames

    @property
    def seconds(self) -> float:
        """When the last frame was shown, in seconds from the start of the stream."""
        return self.session.seconds

    @property
    def shown(self) -> list[float]:
        """The seconds at which each step of time (a frame, or a temporal patch of frames) began."""
        return self.session.shown

    async def __aenter__(self) -> AsyncVideoSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.session)[1:]}"


def run_in_thread(work: Callable[[], Done]) -> asyncio.Future[Done]:
    """Run `work` in a new thread and return a future of its result; it runs to its end even if nobody waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Done] = loop.create_future()

    def tell(set_it: Callable[[Any], None], what: Any) -> None:
        if not future.done():
            set_it(what)

    def run() -> None:
        try:
            found: tuple[Any, Any] = future.set_result, work()
        except BaseException as error:
            found = future.set_exception, error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *found)

    threading.Thread(target=run, name="mmaccel-live", daemon=True).start()
    return future


async def await_or_cancel(work: asyncio.Future[Done], deadline: Deadline) -> Done:
    """Await `work` and return its result. If the waiting task is cancelled, cancel `deadline` too, and wait until the
    running pass has ended."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        deadline.cancel()
        with suppress(Exception, CallEnded):
            await work
        raise
