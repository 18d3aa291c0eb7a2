"""Attaches a recipe to a model and detaches it: all changes or none, and never during a call.

Each text model has a `Gate`. Calls enter and leave it; attaching and detaching wait until no call is inside, and new calls
wait until they are done. Calls that began before anything was attached entered no gate: they are found on the stacks of
their threads, so that a plain model needs no hook.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from mmaccel.core.errors import ModelError

POLL_S = 0.002
"""Seconds between two checks of the stacks of other threads."""

_ABSENT = object()
_CALLS = {"_call_impl", "_wrapped_call_impl", "generate", "_call"}
"""Names of the functions that run a module: of `nn.Module`, of generation in transformers, and of `Attaching`."""


def put(undo: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute on the instance; `undo` restores the old value, unless the attribute was set again since."""
    before = module.__dict__.get(name, _ABSENT)

    def back() -> None:
        if module.__dict__.get(name) is not value:
            return
        if before is _ABSENT:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before

    undo.callback(back)
    module.__dict__[name] = value


class Gate:
    """Any number of calls of a model may be inside; a change of the model waits until it is alone. A call within a call of
    the same thread enters at once."""

    def __init__(self) -> None:
        self.turns = threading.RLock()
        """The lock under which passes of streams take turns."""
        self._state = threading.Condition()
        self._inside: dict[int, int] = {}
        self._waiting: dict[int, Attaching | None] = {}
        self._alone: int | None = None
        self._ends: Collection[nn.Module] = ()
        self._taken: Callable[[], Attaching | None] = lambda: None
        # Here and not as decorators, which load the compiler, and Triton with it, when the package is imported.
        self.enter: Callable[..., bool] = torch.compiler.disable(self._enter)
        self.leave: Callable[[], None] = torch.compiler.disable(self._leave)

    def _enter(self, attaching: Attaching | None = None) -> bool:
        """Begin a call; waits while the model is changed. False: the call runs plain and must not call `leave`, because
        `attaching` is over, or because it belongs to a generation that began before."""
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
                    del self._waiting[me]
            if attaching is not None and attaching.over and me not in self._inside:
                return False
            self._inside[me] = self._inside.get(me, 0) + 1
        return True

    def _leave(self) -> None:
        """End a call that `enter` let in."""
        me = threading.get_ident()
        with self._state:
            self._inside[me] -= 1
            if not self._inside[me]:
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
                while self._inside:
                    self._state.wait()
            yield
        finally:
            with self._state:
                self._alone, self._ends = None, ()
                self._state.notify_all()

    def drain(self, what: str, modules: Collection[nn.Module]) -> None:
        """Wait until no other thread is inside a call of `modules` that entered no gate. Only inside `alone`."""
        if _works(sys._getframe(), modules):
            raise _within(what)
        me = threading.get_ident()
        with self._state:
            self._ends = modules
            # Passes of these generations may wait already, since before it was known that they are to end.
            self._state.notify_all()
            while any(
                # A frame that has returned meanwhile no longer knows who called it: then the look says nothing.
                _works(frame, modules) or sys._current_frames().get(thread) is not frame
                for thread, frame in sys._current_frames().items()
                if thread != me and not self._stays(thread, frame)
            ):
                self._state.wait(POLL_S)

    def _stays(self, thread: int, frame: FrameType) -> bool:
        """Whether a thread waits to enter, and goes on waiting if it is woken now."""
        attaching = self._waiting.get(thread)
        waits = thread in self._waiting and (attaching is None or not attaching.over)
        return waits and not _generates(frame, self._ends)

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
        self._waiting = {}
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
    global _guard
    _guard = threading.Lock()
    for gate in list(_gates.values()):
        gate.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def gate_of(text: nn.Module) -> Gate:
    """The gate of a text model, which whole models may share."""
    with _guard:
        return _gates.setdefault(text, Gate())


class Attaching:
    """A recipe on a model, from `lay` to `remove`. Methods are replaced on the instances by `wrap`.

    over  whether it was removed: what is left of it, inside wrappers of others, then calls the plain methods
    """

    def __init__(self, model: nn.Module, gate: Gate) -> None:
        self.model, self.gate = model, gate
        self.over = False
        self.undo = ExitStack()
        self.plain: dict[str, Callable[..., Any]] = {}
        self.ours: dict[str, Callable[..., Any]] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `ModelError` when a copy or pickle is made: a recipe cannot be copied with its model."""
        raise ModelError(
            "a model with a recipe can neither be copied nor pickled; detach the recipe, and attach it to the copy."
        )

    def attach(self, lay: Callable[[], None]) -> None:
        """Call `lay`, which changes the model and leaves with `undo` how to take it back; after an error nothing is left."""
        with self.gate.alone("accelerate"):
            self.gate.take(self)
            try:
                lay()
            except BaseException:
                self.over = True
                self.undo.close()
                raise

    def remove(self) -> None:
        """Restore the model once the running calls have ended; a second call does nothing."""
        with self.gate.alone("detach"):
            self.over = True
            self.undo.close()

    def wrap(self, module: nn.Module, name: str, key: str, ours: Callable[..., Any]) -> None:
        """Replace the instance's method `name` by `ours`, with the same signature; the class stays as it is."""
        plain: Callable[..., Any] = getattr(module, name)
        self.plain[key], self.ours[key] = plain, ours
        # A partial of a method, not a closure: so a copy of the model meets `__reduce_ex__`.
        put(self.undo, module, name, functools.wraps(plain)(functools.partial(self._call, key)))

    def _call(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if not self.gate.enter(self):
            return self.plain[key](*args, **kwargs)
        try:
            return self.ours[key](*args, **kwargs)
        finally:
            self.gate.leave()


def _within(what: str) -> ModelError:
    return ModelError(
        f"{what}: a call of the model is under way in this thread; {what} after it has returned."
    )


def _works(frame: FrameType | None, modules: Collection[nn.Module], names: Collection[str] = _CALLS) -> bool:
    """Whether `frame`, or a frame that called it, runs one of `modules` in a function of `names`."""
    while frame is not None:
        if frame.f_code.co_name in names:
            who = frame.f_locals.get("self")
            who = who.model if isinstance(who, Attaching) else who
            if any(who is one for one in modules):
                return True
        frame = frame.f_back
    return False


def _generates(frame: FrameType | None, modules: Collection[nn.Module]) -> bool:
    return _works(frame, modules, {"generate"})


_lent: WeakKeyDictionary[nn.Module, dict[str, tuple[ExitStack, list[int]]]] = WeakKeyDictionary()


@contextmanager
def lent(module: nn.Module, name: str, change: Callable[[ExitStack], None]) -> Iterator[None]:
    """Make `change` while any thread is inside: the first to enter makes it, the last to leave undoes it."""
    me = threading.get_ident()
    with _guard:
        known = _lent.setdefault(module, {})
        if name not in known:
            with ExitStack() as made:
                change(made)
                known[name] = made.pop_all(), []
        undo, users = known[name]
        users.append(me)
    try:
        yield
    finally:
        with _guard:
            users.remove(me)
            if not users:
                del known[name]
                undo.close()
