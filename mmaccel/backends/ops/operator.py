"""What an operator is made of: its plain PyTorch form, the shapes of its results, and the name of its Triton kernel.

A file of this package defines an operator, or a few of one kind, by decorating the plain form:

    @operator("decode.attention.decode_attend", fake=lambda query: torch.empty_like(query))
    def decode_attend(query: Tensor, key: Tensor, ...) -> Tensor: ...

The plain form is the meaning of the operator; its signature is the schema.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from mmaccel.backends import architectures

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def usable(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on `device`; None when they can. Triton itself is not imported to tell."""
    return architectures.why_not("triton", device) or (None if find_spec("triton") else "it needs triton")


def runs_triton(first: Tensor, *rest: Any) -> bool:
    """Whether kernels can run where the first argument of a call lies."""
    return usable(first.device) is None


def runs_triton_in_float32(first: Tensor, *rest: Any) -> bool:
    """The same of kernels that compute in float32, which float64 is not to be rounded to."""
    return first.dtype != torch.float64 and runs_triton(first)


def traced() -> bool:
    """Whether torch is to see a call as one operator: it compiles, a dispatch mode (of fake tensors, say) looks on, or
    gradients are on, of which torch.library says that there are none."""
    return (
        torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0
    )


def imported(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module that is imported when it is first called."""
    return lambda *args, **named: getattr(import_module(module), name)(*args, **named)


class Operator(Generic[P, R]):
    """A function on tensors with a Triton kernel beside its plain form, and, with a fake, an operator of torch.library.

    A call that is `traced` is one of the operator ``mmaccel::<name>``. Any other call goes straight to the kernel or the
    plain form: torch.library takes the host 40 us more.
    """

    plain: Callable[P, R]
    """The plain form, which runs on every device."""
    op: torch.library.CustomOpDef | None
    """The operator of torch.library; None without a fake."""

    def __init__(
        self,
        plain: Callable[P, R],
        kernel: str | None,
        serves: Callable[..., bool],
        fake: Callable[..., Any] | None,
        mutates: tuple[str, ...],
    ) -> None:
        functools.update_wrapper(self, plain)
        self.plain, self.op = plain, None
        self._module, _, self._kernel = (kernel or "").rpartition(".")
        self._serves = serves
        if fake is not None:
            schema = torch.library.infer_schema(plain, mutates_args=mutates)
            self.op = torch.library.custom_op(
                f"mmaccel::{plain.__name__}", self.direct, mutates_args=mutates, schema=schema
            )
            self.op.register_fake(_of_some(fake, inspect.signature(plain)))

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        if self.op is not None and traced():
            result: R = self.op(*args, **named)
            return result
        return self.direct(*args, **named)

    def direct(self, *args: P.args, **named: P.kwargs) -> R:
        """The result by the kernel, where it serves the arguments, or else the plain form. Kernels are launched with
        the device of the first argument as the current one: layers of a model may lie on several."""
        if not (self._kernel and self._serves(*args)):
            return self.plain(*args, **named)
        launch = imported(f"mmaccel.backends.triton.{self._module}", self._kernel)
        first: Any = args[0]
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):  # type: ignore[no-untyped-call]
            result: R = launch(*args, **named)
        return result


def operator(
    kernel: str | None,
    *,
    serves: Callable[..., bool] = runs_triton,
    fake: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an operator of its plain form.

    kernel   the function in `mmaccel.backends.triton` that launches the kernel, as "room.file.function"; it takes what the
             plain form takes, and is imported when it first serves; None for an operator without one
    serves   of the arguments, whether the kernel takes them; by default, whether Triton runs where the first one lies
    fake     empty results of the right shapes, of those arguments whose names it has; None for what nobody traces
    mutates  the names of the arguments that are written to
    """
    return lambda plain: Operator(plain, kernel, serves, fake, mutates)


def _of_some(fake: Callable[..., R], signature: inspect.Signature) -> Callable[..., R]:
    """`fake` as a function of all arguments of `signature`."""
    wanted = inspect.signature(fake).parameters

    def shapes(*args: Any, **named: Any) -> R:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        return fake(**{name: given.arguments[name] for name in wanted})

    return shapes
