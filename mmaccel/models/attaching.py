"""Attaches a recipe to a model and detaches it: all changes or none, and never during a call.

Each text model has a `Gate`. Calls enter and leave it; attaching and detaching wait until no call is inside, and new calls
wait until they are done. Calls that began before anything was attached entered no gate: they are found on the stacks of
their threads, so that a plain model needs no hook.

A call under way may itself wait for a new call, of a helper thread. So a new call waits at most `FIRST_S` for a change that
waits for older calls, and then runs. When all calls have ended that were under way when the wait began, it begins anew with
those under way now, and new calls wait `LONGER` times as long: sooner or later longer than any call lasts.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from mmaccel.core.errors import ModelError, warn
from mmaccel.models.install import Hooks, Uncopied

POLL_S = 0.002
"""Seconds between two checks of the stacks of other threads."""
FIRST_S, LONGER = 0.2, 8
"""Seconds that a new call waits at first for a change that waits for older calls, and the factor by which they grow."""
LONG_S = 60.0
"""Seconds after which a change that waits says for which call."""

_CALLS = {"_call_impl", "_wrapped_call_impl", "generate", "_call"}
"""Names of the functions that run a module: of `nn.Module`, of generation in transformers, and of `Attaching`."""

_looking = threading.Lock()


def stacks() -> dict[int, FrameType]:
    """The innermost frame of each thread, by its identifier.

    The garbage collector is off meanwhile: before Python 3.12.4, one that runs within the call can block the process for
    ever (CPython issue 106883).
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


_Calls = dict[object, int]
"""Calls under way -> their threads."""


class Gate:
    """Any number of calls of a model may be inside; a change of the model waits until it is alone. A call within a call of
    the same thread enters at once."""

    def __init__(self) -> None:
        self.turns = threading.RLock()
        """The lock under which passes of streams take turns."""
        self._state = threading.Condition()
        self._inside: dict[int, tuple[object, int]] = {}  # thread -> its outermost call, and how many within
        self._waiting: dict[int, Attaching | None] = {}
        self._let_in: set[int] = set()
        self._alone: int | None = None
        self._ends: Collection[nn.Module] = ()
        self._taken: Callable[[], Attaching | None] = lambda: None
        # Here and not as decorators, which load the compiler, and Triton with it, when the package is imported.
        self.enter: Callable[..., bool] = torch.compiler.disable(self._enter)
        self.leave: Callable[[], None] = torch.compiler.disable(self._leave)

    def _enter(self, attaching: Attaching | None = None) -> bool:
        """Begin a call; waits while the model is changed. False: the call runs plain and must not call `leave`, because
        `attaching` is over, or because it belongs to a generation that began before, or may be what such a one waits for."""
        me = threading.get_ident()
        with self._state:
            while me not in self._inside and (attaching is None or not attaching.over):
                if self._alone is None:
                    break
                if self._alone == me or (self._ends and _generates(sys._getframe(), self._ends)):
                    return False
                self._waiting[me] = attaching
                try:
                    self._state.wait()
                finally:
                    let_in = me in self._let_in
                    del self._waiting[me]
                    self._let_in.discard(me)
                if let_in:
                    if self._ends:
                        return False
                    break
            if attaching is not None and attaching.over and me not in self._inside:
                return False
            call, depth = self._inside.get(me, (object(), 0))
            self._inside[me] = call, depth + 1
        return True

    def _leave(self) -> None:
        """End a call that `enter` let in."""
        me = threading.get_ident()
        with self._state:
            call, depth = self._inside[me]
            self._inside[me] = call, depth - 1
            if depth == 1:
                del self._inside[me]
                self._state.notify_all()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that runs plain, such as a pass of a stream."""
        entered = self.enter()
        try:
            yield
        finally:
            if entered:
                self.leave()

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Run the code inside while no call runs; new calls wait. Raises `ModelError` inside a call of this thread."""
        me = threading.get_ident()
        with self._state:
            if me in self._inside or self._alone == me:
                raise _within(what)
            while self._alone is not None:
                self._state.wait()
            self._alone = me
        try:
            with self._state:
                self._settle(what, self._entered, FIRST_S)
            yield
        finally:
            with self._state:
                self._alone, self._ends = None, ()
                self._let_in.clear()
                self._state.notify_all()

    def drain(self, what: str, modules: Collection[nn.Module]) -> None:
        """Wait until no other thread is inside a call of `modules` that entered no gate. Only inside `alone`."""
        if _call_of(sys._getframe(), modules) is not None:
            raise _within(what)
        with self._state:
            self._ends = modules
            # Passes of these generations may wait already, since before it was known that they are to end.
            self._state.notify_all()
            self._settle(what, self._at_work, POLL_S)

    def _settle(self, what: str, under_way: Callable[[], tuple[_Calls, bool]], pause: float) -> None:
        """Wait until no call is under way, and let new ones in that wait too long. `under_way()` gives each call that is
        known to be, with its thread, and whether there may be others."""
        older, patience, began = under_way()[0], FIRST_S, time.monotonic()
        until, told = began + patience, False
        while any(found := under_way()):
            now = found[0]
            if now and not now.keys() & older.keys():
                if older:
                    patience *= LONGER
                    until = time.monotonic() + patience
                older = now
            if time.monotonic() >= until:
                until = time.monotonic() + patience
                self._let_in |= self._waiting.keys()
                self._state.notify_all()
            if now and not told and time.monotonic() > began + LONG_S:
                told = True
                names = {one.ident: one.name for one in threading.enumerate()}
                where = ", ".join(sorted({repr(names.get(thread, str(thread))) for thread in now.values()}))
                warn(
                    f"{what} has waited {LONG_S:g} s for a call of the model to end, in thread {where}; it waits on."
                )
            self._state.wait(pause)

    def _entered(self) -> tuple[_Calls, bool]:
        """The calls inside, and whether others were let in that have not entered yet."""
        return {call: thread for thread, (call, _) in self._inside.items()}, bool(self._let_in)

    def _at_work(self) -> tuple[_Calls, bool]:
        """The calls of other threads that entered no gate, by their outermost frames, and whether there may be others."""
        found: _Calls = {}
        unsure = False
        for thread, frame in stacks().items():
            if thread == threading.get_ident() or self._stays(thread, frame):
                continue
            call = _call_of(frame, self._ends)
            if call is not None:
                found[call] = thread
            # A frame that has returned meanwhile no longer knows who called it: then the look says nothing.
            unsure |= stacks().get(thread) is not frame
        return found, unsure

    def _stays(self, thread: int, frame: FrameType) -> bool:
        """Whether a thread waits to enter, and goes on waiting if it is woken now."""
        attaching = self._waiting.get(thread)
        waits = thread in self._waiting and (attaching is None or not attaching.over)
        return waits and thread not in self._let_in and not _generates(frame, self._ends)

    def take(self, attaching: Attaching) -> None:
        """Note that a recipe is attached; raises `ModelError` where one is. Only inside `alone`."""
        other = self._taken()
        if other is not None and not other.over:
            raise ModelError(
                "the model is accelerated already; call detach() on what accelerate returned, then attach anew."
                if other.model is attaching.model
                else "the model shares its language model with one that is accelerated; detach the recipe there first."
            )
        self._taken = ref(attaching)

    def forked(self) -> None:
        """In a forked process only the thread that forked goes on: nobody else is inside, waits, or holds a lock."""
        me = threading.get_ident()
        self.turns, self._state = threading.RLock(), threading.Condition()
        self._inside = {thread: calls for thread, calls in self._inside.items() if thread == me}
        self._waiting, self._let_in = {}, set()
        if self._alone != me:
            self._alone, self._ends = None, ()

    @property
    def taken(self) -> bool:
        """Whether a recipe is attached."""
        attaching = self._taken()
        return attaching is not None and not attaching.over


_gates: WeakKeyDictionary[nn.Module, Gate] = WeakKeyDictionary()
_guard = threading.Lock()


def _forked() -> None:
    global _guard, _looking
    _guard, _looking = threading.Lock(), threading.Lock()
    for gate in list(_gates.values()):
        gate.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def gate_of(text: nn.Module) -> Gate:
    """The gate of a text model, which whole models may share."""
    with _guard:
        return _gates.setdefault(text, Gate())


class Attaching(Uncopied):
    """A recipe on a model, from `lay` to `remove`. Methods are replaced on the instances by `wrap`.

    over  whether it was removed: what is left of it, inside wrappers of others, then calls the plain methods
    """

    def __init__(self, model: nn.Module, gate: Gate) -> None:
        self.model, self.gate = model, gate
        self.over = False
        self.hooks = Hooks()
        self.plain: dict[str, Callable[..., Any]] = {}
        self.ours: dict[str, Callable[..., Any]] = {}

    def attach(self, lay: Callable[[], None]) -> None:
        """Call `lay`, which changes the model through `hooks`; after an error nothing is left."""
        with self.gate.alone("accelerate"):
            self.gate.take(self)
            try:
                lay()
            except BaseException:
                self.over = True
                self.hooks.close()
                raise

    def remove(self) -> None:
        """Restore the model once the running calls have ended; a second call does nothing."""
        with self.gate.alone("detach"):
            self.over = True
            self.hooks.close()

    def wrap(self, module: nn.Module, name: str, key: str, ours: Callable[..., Any]) -> None:
        """Replace the instance's method `name` by `ours`, with the same signature; the class stays as it is."""
        # Before the wrapper is there, so that another thread finds them.
        self.plain[key], self.ours[key] = getattr(module, name), ours
        self.hooks.wrap(module, name, self._call, key)

    def _call(self, key: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.gate.enter(self):
            return plain(*args, **kwargs)
        try:
            return self.ours[key](*args, **kwargs)
        finally:
            self.gate.leave()


def _within(what: str) -> ModelError:
    return ModelError(
        f"{what}: a call of the model is under way in this thread; {what} after it has returned."
    )


def _call_of(
    frame: FrameType | None, modules: Collection[nn.Module], names: Collection[str] = _CALLS
) -> FrameType | None:
    """The outermost of `frame` and the frames that called it which runs one of `modules` in a function of `names`."""
    found = None
    while frame is not None:
        if frame.f_code.co_name in names:
            who = frame.f_locals.get("self")
            who = who.model if isinstance(who, Attaching) else who
            if any(who is one for one in modules):
                found = frame
        frame = frame.f_back
    return found


def _generates(frame: FrameType | None, modules: Collection[nn.Module]) -> bool:
    return _call_of(frame, modules, {"generate"}) is not None
