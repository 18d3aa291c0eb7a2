"""`StandingQuestion`: a question that a session asks repeatedly while frames come, to report when its answer changes."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmaccel.core.decoding.generate import Answer
from mmaccel.core.errors import ModelError, quoted, warn

CUT = ("timeout", "cancelled")
"""What ended an answer that is not whole."""
EXIT_S = 10.0
"""Seconds that a program which ends waits for the report of a change, at most."""


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
        self._session, self._question, self._call, self._fails = session, question, call, fails
        self._every, self._last, self._says, self._most = every, last, says, most
        self._before: str | None = None
        self._now: float | None = None  # the last second that the running answer sees
        self._due: float | None = None  # while an answer is worked out: when the question was last due
        self._came, self._over, self._deadline = threading.Event(), False, session._deadline(None)
        session._answering(question, most, self._deadline)  # refuses an impossible `most`
        self._thread = threading.Thread(target=self._run, name="mmaccel-standing", daemon=True)
        session._standing.append(self)
        # Python aborts where it finalizes while a thread of its own is within the model.
        atexit.register(self._end_at_exit)
        self._thread.start()

    def notify_frames(self) -> None:
        """Tell the question's thread that new frames came; it asks again if `every` seconds have passed. Does not wait."""
        if self._due is not None and (now := self._session.seconds) - self._due >= self._every:
            self._due, self.skipped = now, self.skipped + 1
        self._came.set()

    def stop(self) -> None:
        """Stop asking, and cut off the running answer. A change that was already found is still reported."""
        self._over = True
        self._deadline.cancel()
        self._came.set()

    def cancel(self) -> None:
        """Stop asking, and cut off the running answer; nothing more is reported."""
        self._call = lambda change: None
        self.stop()

    def wait_until_reported(self, limit_s: float | None = None) -> None:
        """Wait, after `stop`, until a change that was found is reported. Returns at once within a report of the session."""
        if all(one._thread is not threading.current_thread() for one in [self, *self._session._standing]):
            self._thread.join(limit_s)

    def _end_at_exit(self) -> None:
        self.stop()
        self.wait_until_reported(EXIT_S)

    def _run(self) -> None:
        try:
            while not self._over:
                self._came.wait()
                self._came.clear()
                now = self._session.seconds
                if self._session.frames and (self.asked is None or now - self.asked >= self._every):
                    self._due = now
                    self._ask()
                    self._due, self.asked = None, self._now
        except Exception as error:
            if not self._over:
                self.failed = error
                if self._fails is not None:
                    self._fails(error)
                else:
                    warn(f"the standing question {quoted(self._question)} ended: {error}")
        finally:
            self._session._standing.remove(self)
            atexit.unregister(self._end_at_exit)

    def _ask(self) -> None:
        self._deadline = deadline = self._session._deadline(None)
        if self._over:
            return
        ask = self._session._answering(self._question, self._most, deadline, between=self._stretch)
        answer = ask(None)
        if answer.finish_reason in CUT:
            return
        before, self._before = self._before, answer.text
        if self._turned(before, answer.text):
            self._call(AnswerChange(self._question, answer, before, self._now or 0.0))

    def _stretch(self, now: float) -> tuple[float, float] | None:
        """What the question asks about when its turn has come at the second `now`."""
        self._now = now
        return None if self._last is None else (now - self._last, now)

    def _turned(self, before: str | None, now: str) -> bool:
        if self._says is None:
            return before != now
        said = self._says.casefold()
        return said in now.casefold() and (before is None or said not in before.casefold())
