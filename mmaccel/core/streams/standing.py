"""`StandingQuestion`: a question that a session asks repeatedly while frames come, to report when its answer changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmaccel.core.decoding.generate import Answer
from mmaccel.core.errors import ModelError, warn

CUT = ("timeout", "cancelled")
"""What ended an answer that is not whole."""


@dataclass(frozen=True)
class AnswerChange:
    """A changed answer to a repeated question: `answer` (with evidence) at `seconds` of the stream; `before` is the previous
    text, None the first time."""

    question: str
    answer: Answer
    before: str | None
    seconds: float


class StandingQuestion:
    """A question that a session asks every few seconds of its stream; see `VideoSession.on`.

    asked   the second of the stream at which it was last asked; None: not yet
    failed  the error that ended it, or None
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
    ) -> None:
        for name, seconds in (("every", every), ("last", last)):
            if seconds is not None and not seconds > 0:
                raise ModelError(f"{name}: {seconds!r}; give a positive number of seconds.")
        self.asked: float | None = None
        self.failed: Exception | None = None
        self._session, self._question, self._call = session, question, call
        self._every, self._last, self._says, self._most = every, last, says, most
        self._before: str | None = None
        self._came, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="mmaccel-standing", daemon=True)
        self._thread.start()

    def notify_frames(self) -> None:
        """Tell the question's thread that new frames came; it asks again if `every` seconds have passed. Does not wait."""
        self._came.set()

    def stop(self) -> None:
        """Stop asking. A change that was already found is still reported."""
        self._over = True
        self._came.set()

    def cancel(self) -> None:
        """Stop asking. A running question ends with its answer, which is not reported."""
        self._call = lambda change: None
        self.stop()

    def wait_until_reported(self) -> None:
        """Wait, after `stop`, until a change that was found is reported. Called from within that report, return at once."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._came.wait()
            self._came.clear()
            if self._over:
                return
            try:
                now = self._session.seconds
                if self._session.frames and (self.asked is None or now - self.asked >= self._every):
                    self._ask(now)
                    self.asked = now
            except Exception as error:
                if not self._over:
                    self.failed = error
                    warn(f"the standing question {self._question!r} ended: {error}")
                return

    def _ask(self, now: float) -> None:
        begin = 0.0 if self._last is None else now - self._last
        stretch = None if self._last is None else (begin, now)
        # Evidence is worked out where something is told.
        answer = self._session.ask(self._question, self._most, evidence=False, between=stretch)
        if answer.finish_reason in CUT:
            return
        before, self._before = self._before, answer.text
        if not self._turned(before, answer.text) or self._over:
            return
        whole = self._session.ask(self._question, self._most, between=(begin, now))
        self._call(AnswerChange(self._question, answer if whole.finish_reason in CUT else whole, before, now))

    def _turned(self, before: str | None, now: str) -> bool:
        if self._says is None:
            return before != now
        said = self._says.casefold()
        return said in now.casefold() and (before is None or said not in before.casefold())
