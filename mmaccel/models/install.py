"""Installs our hooks on a model and removes them, all or none and never during a call: the only code that changes instances.

Changed are methods of one instance, the config that modules hold, and forward hooks; classes are not. Each text model has a
`ModelReadWriteLock`, which calls enter and leave. Attaching and detaching wait until no call is inside, and new calls wait
until they are done. Calls that began before a recipe was attached hold no lock: they are found on the stacks of their
threads, so a plain model needs no hook.

A running call may itself wait for a new call of a helper thread, so blocking new calls for good could deadlock. Therefore,
while a change waits for older calls, a new call waits at most `FIRST_S` seconds and then runs. If the older calls have ended
but such newer ones run, the change waits for these too, and new calls then wait up to `LONGER` times as long.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from mmaccel.core.errors import ModelError, warn

POLL_S = 0.002
"""Seconds between two checks of the stacks of other threads."""
FIRST_S, LONGER = 0.2, 8
"""Seconds that a new call waits at first for a change that waits for older calls, and the factor by which they grow."""
LONG_S = 60.0
"""Seconds after which a change that waits says for which call."""

_CALLS = {"_call_impl", "_wrapped_call_impl", "generate", "_call"}
"""Names of the functions that run a module: of `nn.Module`, of generation in transformers, and of `AttachmentBase`."""
_ABSENT = object()

_Calls = dict[object, int]
"""Calls under way -> their threads."""


class Hooks(ExitStack):
    """Changes of a model that `close` undoes in reverse order.

    As a context manager it undoes them at the end of the block, also after an error; `pop_all` keeps them beyond it. If a
    user changed the same attribute later, the user's change stays.
    """

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of the module instance. `close` restores it, unless somebody has set it since."""
        before = module.__dict__.get(name, _ABSENT)

        def back() -> None:
            if module.__dict__.get(name) is not value:
                return
            if before is _ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before

        self.callback(back)
        module.__dict__[name] = value

    def wrap(self, module: nn.Module, name: str, ours: Callable[..., Any], *given: Any) -> Callable[..., Any]:
        """Replace the method `name` of the instance and return the wrapper. A call then runs `ours(*given, original, *args,
        **kwargs)`, where `original` is the previous method."""
        plain: Callable[..., Any] = getattr(module, name)
        # A partial, which copy and pickle look into.
        wrapper: Callable[..., Any] = functools.wraps(plain)(functools.partial(ours, *given, plain))
        self.set_attribute(module, name, wrapper)
        return wrapper

    def set_attention(self, modules: Iterable[nn.Module], shared: Any, name: str, **facts: Any) -> None:
        """Make `modules` use the attention implementation `name`: all whose config is the object `shared` get the same copy
        of it, with that implementation and the additional fields `facts`."""
        own = copy.copy(shared)
        own._attn_implementation = name
        for fact, value in facts.items():
            setattr(own, fact, value)
        for module in modules:
            if getattr(module, "config", None) is shared:
                self.set_attribute(module, "config", own)

    def add_pre_hook(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Register a forward pre-hook, which also gets keyword arguments; `close` removes it."""
        self.callback(_unregister, hook, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        module.register_forward_pre_hook(hook, with_kwargs=True, **options)

    def add_hook(self, module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> None:
        """Register a forward hook; `close` removes it."""
        self.callback(_unregister, hook, module._forward_hooks, module._forward_hooks_with_kwargs)
        module.register_forward_hook(hook, with_kwargs=with_kwargs)


class PrefillHook:
    """Base of our forward hooks that matter in a prefill only, so that a fused decode step may skip them."""


def _unregister(hook: Callable[..., Any], hooks: dict[int, Any], with_kwargs: dict[int, bool]) -> None:
    """Remove `hook` from a module's `hooks`, also where an error came before its handle was returned."""
    for key, one in list(hooks.items()):
        if one is hook:
            del hooks[key]
            with_kwargs.pop(key, None)


@contextmanager
def shared_hooks(module: nn.Module, name: str, install: Callable[[Hooks], None]) -> Iterator[None]:
    """Context in which `module` has the hooks `name`; the first thread to enter installs, the last to leave removes."""
    with hooks_lock:
        known = _shared.setdefault(module, {})
        if name not in known:
            with Hooks() as hooks:
                install(hooks)
                known[name] = [hooks.pop_all(), 0]
        known[name][1] += 1
    try:
        yield
    finally:
        with hooks_lock:
            known[name][1] -= 1
            if not known[name][1]:
                known.pop(name)[0].close()


def current_stack_frames() -> dict[int, FrameType]:
    """Return the innermost Python stack frame of every thread, by thread id. Garbage collection is off meanwhile: before
    Python 3.12.4 a collection inside `sys._current_frames` can deadlock (CPython issue 106883)."""
    with hooks_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


class ModelReadWriteLock:
    """Readers-writer lock of a text model: calls are readers, attaching and detaching are writers. A nested call of the same
    thread enters at once."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._inside: dict[int, tuple[object, int]] = {}  # thread -> its outermost call, and how many within
        self._waiting: dict[int, AttachmentBase | None] = {}
        self._let_in: set[int] = set()
        self._alone: int | None = None  # the thread that changes the model
        self._ends: Collection[nn.Module] = ()  # whose calls without the gate it waits for
        self.last: Callable[[], AttachmentBase | None] = lambda: None
        # Here and not as decorators, which load the compiler, and Triton with it, when the package is imported.
        self.enter: Callable[..., bool] = torch.compiler.disable(self._enter)
        self.leave: Callable[[], None] = torch.compiler.disable(self._leave)

    def _enter(self, attaching: AttachmentBase | None = None) -> bool:
        """Begin a call; waits while the model is changed. False: the call runs plain and must not call `leave`, because
        `attaching` is over, or because it belongs to a generation that began before, or may be what such a one waits for."""
        me = threading.get_ident()
        with self._state:
            while me not in self._inside and (attaching is None or not attaching.is_detached):
                if self._alone is None:
                    break
                if self._alone == me or (self._ends and _call_of(sys._getframe(), self._ends, {"generate"})):
                    return False
                self._waiting[me] = attaching
                try:
                    self._state.wait()
                finally:
                    let_in = me in self._let_in
                    del self._waiting[me]
                    self._let_in.discard(me)
                if let_in and self._ends:
                    return False
                if let_in:
                    break
            if attaching is not None and attaching.is_detached and me not in self._inside:
                return False
            call, depth = self._inside.get(me, (object(), 0))
            self._inside[me] = call, depth + 1
        return True

    def _leave(self) -> None:
        me = threading.get_ident()
        with self._state:
            call, depth = self._inside[me]
            self._inside[me] = call, depth - 1
            if depth == 1:
                del self._inside[me]
                self._state.notify_all()

    @contextmanager
    def call_without_recipe(self) -> Iterator[None]:
        """Context of a call that runs without the recipe, such as a stream's forward pass; it holds the lock as a reader."""
        entered = self.enter()
        try:
            yield
        finally:
            if entered:
                self.leave()

    @contextmanager
    def hold_write_lock(self, what: str) -> Iterator[None]:
        """Context that holds the lock as a writer: running calls end first, new ones wait. Raises `ModelError`, which names
        the operation `what`, if this thread is inside a call."""
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

    def wait_for_running_calls(self, what: str, modules: Collection[nn.Module]) -> None:
        """Inside `hold_write_lock(what)`: wait until running calls of `modules` that hold no lock have ended: they began
        before any hook was installed. Raises `ModelError` if one of them is in this thread."""
        if _call_of(sys._getframe(), modules):
            raise _within(what)
        with self._state:
            self._ends = modules
            # Passes of these generations may wait already, since before it was known that they are to end.
            self._state.notify_all()
            self._settle(what, self._at_work, POLL_S)

    def _settle(self, what: str, under_way: Callable[[], tuple[_Calls, bool]], pause: float) -> None:
        """Wait until no call is under way, and let new ones in that wait too long. `under_way()` gives the thread of each
        call that is known to be, and whether there may be others."""
        older, patience, began = under_way()[0], FIRST_S, time.monotonic()
        until, warned = began + patience, False
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
            if now and not warned and time.monotonic() > began + LONG_S:
                warned = True
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
        for thread, frame in current_stack_frames().items():
            attaching = self._waiting.get(thread)
            # Whether it waits to enter, and goes on waiting if it is woken now.
            waits = thread in self._waiting and not (attaching and attaching.is_detached)
            waits = waits and thread not in self._let_in and not _call_of(frame, self._ends, {"generate"})
            if thread == threading.get_ident() or waits:
                continue
            if call := _call_of(frame, self._ends):
                found[call] = thread
            # A frame that has returned meanwhile no longer knows who called it: then the look says nothing.
            unsure |= current_stack_frames().get(thread) is not frame
        return found, unsure

    def reset_after_fork(self) -> None:
        """Reset the lock in a forked process, which has only the forking thread: forget what other threads hold."""
        me = threading.get_ident()
        self._state = threading.Condition()
        self._inside = {thread: calls for thread, calls in self._inside.items() if thread == me}
        self._waiting, self._let_in = {}, set()
        if self._alone != me:
            self._alone, self._ends = None, ()

    @property
    def attachment_in_force(self) -> AttachmentBase | None:
        """The `AttachmentBase` (the attached recipe) of the model, or None."""
        attaching = self.last()
        return None if attaching is None or attaching.is_detached else attaching


_shared: WeakKeyDictionary[nn.Module, dict[str, list[Any]]] = WeakKeyDictionary()
_gates: WeakKeyDictionary[nn.Module, ModelReadWriteLock] = WeakKeyDictionary()
hooks_lock = threading.RLock()
"""Of both. Reentrant: a garbage collection under it may run a finalizer that removes hooks (`close_hooks_in_finalizer`)."""


def _forked() -> None:
    global hooks_lock
    hooks_lock = threading.RLock()
    for gate in list(_gates.values()):
        gate.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def model_lock(text: nn.Module) -> ModelReadWriteLock:
    """Return the readers-writer lock of a text model, which several multimodal models may share."""
    with hooks_lock:
        return _gates.setdefault(text, ModelReadWriteLock())


class AttachmentBase:
    """A recipe installed on a model, from `attach` to `remove`; wrapped methods of the model are partials of this object's.

    is_detached  whether `remove` has run; a wrapped method that a user's wrapper still calls then runs the plain method
    """

    def __init__(self, model: nn.Module, gate: ModelReadWriteLock) -> None:
        self.model, self.gate = model, gate
        self.is_detached = False
        self.hooks = Hooks()

    def attach(self, change: Callable[[], None]) -> None:
        """Call `change`, which changes the model through `hooks`; undo all its changes if it raises."""
        with self.gate.hold_write_lock("accelerate"):
            if (other := self.gate.attachment_in_force) is not None:
                raise ModelError(
                    "the model is accelerated already; call detach() on what accelerate returned, then attach anew."
                    if other.model is self.model
                    else "the model shares its language model with one that is accelerated; detach the recipe there first."
                )
            self.gate.last = ref(self)
            try:
                change()
            except BaseException:
                self.is_detached = True
                self.hooks.close()
                raise

    def remove(self) -> None:
        """Restore the model once running calls have ended; a second call does nothing."""
        with self.gate.hold_write_lock("detach"):
            self.is_detached = True
            self.hooks.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `ModelError` when a copy or pickle is made: hooks cannot be copied with the model."""
        raise ModelError(
            "a model with a recipe can neither be copied nor pickled; detach the recipe, and attach it to the copy."
        )

    def forbid_copying(self, *modules: nn.Module) -> None:
        """Make copying and pickling of `modules` raise `ModelError`, since hooks cannot be copied with them."""
        for module in modules:
            # Copy and pickle ask the instance, before they look at what is in it.
            self.hooks.set_attribute(module, "__reduce_ex__", self.__reduce_ex__)

    def _call(self, ours: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the model that is replaced by `ours`, with the same signature."""
        if not self.gate.enter(self):
            return plain(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
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
            who = who.model if isinstance(who, AttachmentBase) else who
            if any(who is one for one in modules):
                found = frame
        frame = frame.f_back
    return found
