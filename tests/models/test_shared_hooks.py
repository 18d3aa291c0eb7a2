"""Hooks that calls share, where others come and go: threads, and finalizers, which a garbage collection runs anywhere."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmaccel.core.attach import adapter_for
from mmaccel.models.install import Hooks, shared_hooks
from mmaccel.models.modules import in_parts
from mmaccel.models.recurrent import hook_inputs, unhook
from tests.models.tiny_random import BUILD


def noted(module: nn.Module, install: Any) -> Any:
    """Shared hooks as a cache has them, and the call of its finalizer."""
    heard = ExitStack()
    heard.enter_context(shared_hooks(module, "noted", install))
    return functools.partial(unhook, heard.close)


def test_a_finalizer_in_an_import_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread imports what another imports in the middle of its change; a collection there lets hooks go."""
    (tmp_path / "slowly_imported.py").write_text("import tests.models.test_shared_hooks as t; t.during()")
    monkeypatch.syspath_prepend(tmp_path)
    old, new = nn.Identity(), nn.Identity()
    collect = noted(old, lambda hooks: hooks.put(old, "told", True))
    begun, inside = threading.Event(), threading.Event()

    def during() -> None:
        begun.set()
        inside.wait(5.0)
        collect()

    def install(hooks: Hooks) -> None:
        inside.set()
        importlib.import_module("slowly_imported")

    def enter() -> None:
        begun.wait(5.0)
        with shared_hooks(new, "one", install):
            pass

    monkeypatch.setattr(sys.modules[__name__], "during", during, raising=False)
    threads = [
        threading.Thread(target=run, daemon=True)
        for run in (enter, lambda: importlib.import_module("slowly_imported"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in threads)
    until = time.monotonic() + 10.0
    while "told" in vars(old) and time.monotonic() < until:
        time.sleep(0.01)
    assert "told" not in vars(old)


def test_a_hook_that_goes_while_the_hooks_of_its_module_run_records_nothing() -> None:
    """torch calls it all the same, and without what it was registered for: the arguments by keyword."""
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: collect())
    collect = noted(module, lambda hooks: hook_inputs(hooks, [module]))
    assert module(torch.ones(1)) == 1 and len(module._forward_pre_hooks) == 1


@pytest.mark.parametrize("first", [False, True])
def test_a_tower_runs_in_parts_until_the_last_has_left(first: bool) -> None:
    """Of a stream and of a prompt; only the latter fuses kernels."""
    model = BUILD["qwen"]()
    family: Any = adapter_for(model)
    one, other = (ExitStack() for _ in range(2))
    one.enter_context(in_parts(family, model, fewer=first))
    other.enter_context(in_parts(family, model, fewer=not first))
    one.close()
    assert getattr(family.multimodal(model).get_video_features, "by_parts", False)
    other.close()
    assert not getattr(family.multimodal(model).get_video_features, "by_parts", False)
