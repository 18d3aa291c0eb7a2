"""`StandingQuestion`: a question that a session asks repeatedly while frames come, to report when its answer changes."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any
from weakref import ref

from mmaccel.core.decoding.generate import Answer
from mmaccel.core.errors import ModelError, quoted, warn

CUT = ("timeout", "cancelled")
"""What ended an answer that is not whole."""
EXIT_S = 10.0
"""Seconds that `close`, or the end of a program, waits for the reports of changes, at most."""


@dataclass(frozen=True)
class AnswerChange:
    """A changed answer to a repeated question: `answer` (with evidence), which saw the stream up to `seconds`; `before` is
    the previous text, None the first time."""

    question: str
    answer: Answer
    before: str | None
    seconds: float


class StandingQuestion:
    """A question that a session asks every few seconds of its stream; see `VideoSession.on`.

    asked    the last second of the stream that its last answer saw; None: not yet
    skipped  how many times it was due while the answer before was still being worked out
    failed   the error that ended it, or None
    """

    def __init__(
        self,
        session: Any,
        question: str,
        call: Callable[[AnswerChange], object],
        *,
        every: float,
        last: float | None,
        says: str | None,
        most: int,
        fails: Callable[[Exception], object] | None,
    ) -> None:
        for name, seconds in (("every", every), ("last", last)):
            if seconds is not None and not seconds > 0:
                raise ModelError(f"{name}: {seconds!r}; give a positive number of seconds.")
        if not callable(call):
            raise ModelError(f"call: {quoted(call)}; give a function that takes an AnswerChange.")
        self.asked: float | None = None
        self.skipped = 0
        self.failed: Exception | None = None
        self._question, self._call, self._fails = question, call, fails
        self._every, self._last, self._says, self._most = every, last, says, most
        self._before: str | None = None
        self._now: float | None = None  # the last second that the running answer sees
        self._due: float | None = None  # while an answer is worked out: when the question was last due
        self._over, self._deadline = False, session._deadline(None)
        session._answering(question, most, self._deadline)  # refuses an impossible `most`
        # A garbage collection may put into it at any moment; the lock of an Event could then wait for itself.
        self._came = SimpleQueue[Any]()
        self._session: Callable[[], Any] = ref(session, self._came.put)
        asks = ref(self, self._came.put)
        given = asks, self._came
        self._thread = threading.Thread(target=_run, args=given, name="mmaccel-standing", daemon=True)
        session._standing.append(self)
        _running[self._thread] = asks
        if session._closed:  # it was closed meanwhile
            self.stop()
        self._thread.start()

    def notify_frames(self) -> None:
        """Tell the question's thread that new frames came; it asks again if `every` seconds have passed. Does not wait."""
        if self._due is not None and (now := self._session().seconds) - self._due >= self._every:
            self._due, self.skipped = now, self.skipped + 1
        self._came.put(True)

    def stop(self) -> None:
        """Stop asking, and cut off the running answer. A change that was already found is still reported."""
        self._over = True
        self._deadline.cancel()
        self._came.put(True)

    def cancel(self) -> None:
        """Stop asking, and cut off the running answer; nothing more is reported."""
        self._call = lambda change: None
        self.stop()

    def _turn(self) -> bool:
        """Ask if it is time; return whether the question goes on."""
        if (session := self._session()) is None:
            return False
        try:
            now = session.seconds
            if session.frames and (self.asked is None or now - self.asked >= self._every):
                self._due = now
                if self._ask(session):
                    self.asked = self._now
                self._due = None
        except Exception as error:
            if not self._over:
                self._over, self.failed = True, error
                if self._fails is not None:
                    self._fails(error)
                else:
                    warn(f"the standing question {quoted(self._question)} ended: {error}")
        except BaseException:  # as `call` raised it, to end the thread
            self._over = True
            raise
        finally:
            if over := self._over:
                session._standing.remove(self)
        return not over

    def _ask(self, session: Any) -> bool:
        """Ask, and report a change; return whether there was a whole answer."""
        self._deadline = deadline = session._deadline(None)
        if self._over:
            return False
        ask = session._answering(self._question, self._most, deadline, between=self._stretch)
        try:
            answer = ask(None)
        except ModelError:
            if session.frames:
                raise
            return False  # the first frames were taken back
        if answer.finish_reason in CUT:
            return False
        before, self._before = self._before, answer.text
        if self._turned(before, answer.text):
            self._call(AnswerChange(self._question, answer, before, self._now or 0.0))
        return True

    def _stretch(self, now: float) -> tuple[float, float] | None:
        """What the question asks about when its turn has come at the second `now`."""
        self._now = now
        return None if self._last is None else (now - self._last, now)

    def _turned(self, before: str | None, now: str) -> bool:
        if self._says is None:
            return before != now
        said = self._says.casefold()
        return said in now.casefold() and (before is None or said not in before.casefold())


_running = dict[threading.Thread, Callable[[], StandingQuestion | None]]()


def _run(asks: Callable[[], StandingQuestion | None], came: SimpleQueue[Any]) -> None:
    """What a question's thread runs. While it waits it holds neither the question nor the session: both can be dropped."""
    try:
        while came.get() and (one := asks()) and one._turn():
            del one
    finally:
        _running.pop(threading.current_thread())


def end_questions(some: Iterable[StandingQuestion]) -> None:
    """Stop `some`, and wait, at most `EXIT_S` seconds, until the changes that they have found are reported. Within a report
    of any question it does not wait: two that end each other would wait for ever."""
    some, until = list(some), monotonic() + EXIT_S
    for one in some:
        one.stop()
    if threading.current_thread() in _running:
        return
    for one in some:
        one._thread.join(max(0.0, until - monotonic()))
    if any(one._thread.is_alive() for one in some):
        warn(f"close: `call` of a standing question has not returned within {EXIT_S:g} s, and goes on.")


# Python aborts where it finalizes while a thread of its own is within the model.
atexit.register(lambda: end_questions([one for asks in list(_running.values()) if (one := asks())]))
