"""Hooks on a module are taken back, wherever an interrupt comes while they are registered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch import nn

from mmaccel.models import install
from mmaccel.models.install import Hooks

FILES = {install.__file__, nn.modules.module.__file__}


def hooks_of(module: nn.Module) -> list[list[Any]]:
    """What each table of hooks of the module has, those of the keyword arguments included."""
    return [list(value) for name, value in vars(module).items() if name.startswith("_forward_")]


@pytest.mark.parametrize("kind", ["before", "prepended", "after"])
def test_an_interrupt_at_any_instruction_leaves_no_hook(kind: str) -> None:
    """Each bytecode instruction of ours and of torch's registration is interrupted in turn; a user's hook remains."""
    module = nn.Identity()
    module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    module.register_forward_hook(lambda module, args, kwargs, out: None, with_kwargs=True)
    plain, step, registered = hooks_of(module), 0, 0

    def ours(*_: Any) -> None:
        return None

    def run(step: int) -> bool:
        """Register, with an interrupt at instruction `step`; whether there was one."""
        nonlocal registered
        left = step

        def instruction(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            nonlocal left, registered
            if event == "opcode":
                left -= 1
                if not left:
                    registered += hooks_of(module) != plain
                    raise KeyboardInterrupt
            return instruction

        def call(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            if frame.f_code.co_filename not in FILES or left <= 0:
                return None
            frame.f_trace_opcodes = True
            return instruction

        trace = sys.gettrace()
        try:
            with Hooks() as hooks:
                sys.settrace(call)
                try:
                    if kind == "after":
                        hooks.after(module, ours, with_kwargs=True)
                    else:
                        hooks.before(module, ours, prepend=kind == "prepended")
                finally:
                    sys.settrace(trace)
                assert hooks_of(module) != plain
        except KeyboardInterrupt:
            return True
        return False

    # Python 3.12 reports instructions only if this is set before settrace.
    sys._getframe().f_trace_opcodes = True
    interrupted = True
    while interrupted:
        step += 1
        interrupted = run(step)
        assert hooks_of(module) == plain, f"instruction {step}"
    assert registered > 3, "some interrupts come after the hook is in the table"
