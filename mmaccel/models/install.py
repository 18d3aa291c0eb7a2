"""Installs our hooks on a model, and takes them back: the only code that changes a model's instances.

What is changed: a method of one instance, the config that modules hold, and forward hooks. Classes stay as they are.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mmaccel.core.errors import ModelError

_ABSENT = object()


class Hooks(ExitStack):
    """Changes of a model that `close` takes back, the last one first.

    As a context manager it takes them back at the end of the block, also after an error in the middle; `pop_all` keeps them
    beyond it. A change that a user made on top of ours stays when ours is taken back.
    """

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of the instance; taken back unless it was set again since."""
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
        """Replace the instance's method `name` by `ours`, called with `given`, the method as it was, and what the method was
        called with; returns the wrapper."""
        plain: Callable[..., Any] = getattr(module, name)
        # A partial, which copy and pickle look into.
        wrapper: Callable[..., Any] = functools.wraps(plain)(functools.partial(ours, *given, plain))
        self.put(module, name, wrapper)
        return wrapper

    def attention(self, modules: Iterable[nn.Module], shared: Any, name: str, **facts: Any) -> None:
        """Give those of `modules` that hold the config `shared` one copy that names attention `name` and has `facts`."""
        own = copy.copy(shared)
        own._attn_implementation = name
        for fact, value in facts.items():
            setattr(own, fact, value)
        for module in modules:
            if getattr(module, "config", None) is shared:
                self.put(module, "config", own)

    def before(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Register a forward pre-hook that gets keyword arguments."""
        self.callback(_unregister, hook, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        module.register_forward_pre_hook(hook, with_kwargs=True, **options)

    def after(self, module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> None:
        """Register a forward hook."""
        self.callback(_unregister, hook, module._forward_hooks, module._forward_hooks_with_kwargs)
        module.register_forward_hook(hook, with_kwargs=with_kwargs)

    def refuse_copies(self, modules: Iterable[nn.Module], owner: Uncopied) -> None:
        """Let copies and pickles of `modules` raise as those of `owner` do."""
        for module in modules:
            # Copy and pickle ask the instance, before they look at what is in it.
            self.put(module, "__reduce_ex__", owner.__reduce_ex__)


def _unregister(hook: Callable[..., Any], hooks: dict[int, Any], with_kwargs: dict[int, bool]) -> None:
    """Remove `hook` from a module's `hooks`, also where an error came before its handle was returned."""
    for key, one in list(hooks.items()):
        if one is hook:
            del hooks[key]
            with_kwargs.pop(key, None)


class Uncopied:
    """What is installed on a model; a wrapper that is a partial of one of its methods cannot be copied either."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `ModelError` when a copy or pickle is made: hooks cannot be copied with the model."""
        raise ModelError(
            "a model with a recipe can neither be copied nor pickled; detach the recipe, and attach it to the copy."
        )


_shared: WeakKeyDictionary[nn.Module, dict[str, tuple[Hooks, list[int]]]] = WeakKeyDictionary()
_lock = threading.Lock()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@contextmanager
def shared_hooks(module: nn.Module, name: str, install: Callable[[Hooks], None]) -> Iterator[None]:
    """`install` while any thread is inside: the first thread to enter installs, the last one to leave takes it back."""
    me = threading.get_ident()
    with _lock:
        known = _shared.setdefault(module, {})
        if name not in known:
            with Hooks() as hooks:
                install(hooks)
                known[name] = hooks.pop_all(), []
        hooks, users = known[name]
        users.append(me)
    try:
        yield
    finally:
        with _lock:
            users.remove(me)
            if not users:
                del known[name]
                hooks.close()
