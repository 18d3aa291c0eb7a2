"""What an operator is made of: its plain PyTorch form, the shapes of its results, the module of its Triton kernel; and what
each GPU architecture runs: one table, which kernels, backends, `mmaccel doctor` and the docs read.

A file of this package defines an operator, or a few of one kind, by decorating the plain form:

    @operator("decode", fake=lambda query: torch.empty_like(query))
    def decode_attend(query: Tensor, key: Tensor, ...) -> Tensor: ...

The plain form is the meaning of the operator; its signature is the schema.

Every kernel of ours was compiled for every row of the table, which `python -m tests.backends.compiled` repeats without a
device. What other people's kernels serve is what they say: docs/architectures.md names the sources.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

KERNELS = {
    "triton": "our portable Triton kernels",
    "hopper": "our kernels for Hopper",
    "flash": "block lists by flash-attn 4",
    "flash_4": "dense attention by flash-attn 4",
    "flash_3": "dense attention by flash-attn 3",
    "flash_2": "dense attention by flash-attn 2",
    "captured": "captured decode steps",
}
"""The sets of kernels that an architecture runs or lacks, and what they are."""

_WARPGROUPS = "it needs a Hopper GPU, whose asynchronous warpgroup products it computes by"
_HOPPER = "it needs a Hopper GPU"
_FOUR = "it needs a Hopper or a datacenter Blackwell GPU"
_NVIDIA = "it needs an NVIDIA GPU"


@dataclass(frozen=True)
class Architecture:
    """One GPU architecture: which kernels and backends run on it.

    name      as compilers write it
    devices   well-known GPUs of it
    shared    bytes of shared memory that one program may take
    resident  bytes of it that all programs of a multiprocessor share
    run       whether our kernels have run on it; for any other row they are compiled, and no more is known
    cudnn     whether cuDNN's kernel computes a square of attention faster than flash-attn 2
    columns   fewest columns of a product that go to the matrix units
    lacks     which of `KERNELS` do not run on it -> why, in words that follow "cannot run on this device: "
    """

    name: str
    devices: str
    shared: int
    resident: int
    run: bool = False
    cudnn: bool = False
    columns: int = 8
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """Resources of a device for the programs of a launch.

    shared, resident  as `Architecture` has them, but of the device itself
    columns           as `Architecture` has them
    processors        how many multiprocessors there are
    memory            bytes of the device's memory
    """

    shared: int
    resident: int
    columns: int
    processors: int
    memory: int

    def stages(self, most: int, each: int, beside: int = 0) -> int:
        """Number of pipeline stages, at most `most`, that fit shared memory: one is in registers, every other takes `each`
        bytes, and the rest of the program takes `beside` bytes."""
        return max(1, min(most, 1 + (self.shared - beside) // each))


INTERPRETED = Resources(shared=256 << 10, resident=228 << 10, columns=8, processors=4, memory=1 << 40)
"""What Triton's interpreter has on a CPU."""

_BEFORE_HOPPER = {
    "hopper": _WARPGROUPS,
    "flash": "before Hopper flash-attn 4 computes all blocks, whatever it lists",
    "flash_4": _FOUR,
    "flash_3": _HOPPER,
}
_BLACKWELL = {
    "hopper": _WARPGROUPS,
    "flash": "on Blackwell flash-attn 4 takes block lists of 256 queries alone",
    "flash_3": _HOPPER,
}
_SMALL_BLACKWELL = _BLACKWELL | {"flash": "flash-attn 4 takes no block lists on it", "flash_4": _FOUR}
_AMD = dict.fromkeys(("hopper", "flash", "flash_4", "flash_3", "flash_2"), _NVIDIA)

ARCHITECTURES = (
    Architecture("sm_80", "A100, A30", 163 << 10, 164 << 10, lacks=_BEFORE_HOPPER),
    Architecture("sm_89", "L4, L40S, RTX 4090", 99 << 10, 100 << 10, lacks=_BEFORE_HOPPER),
    Architecture("sm_90", "H100, H200", 227 << 10, 228 << 10, run=True, cudnn=True),
    Architecture("sm_100", "B200, GB200", 227 << 10, 228 << 10, cudnn=True, lacks=_BLACKWELL),
    Architecture("sm_120", "RTX 5090, RTX PRO 6000", 99 << 10, 100 << 10, cudnn=True, lacks=_SMALL_BLACKWELL),
    Architecture("gfx942", "MI300X, MI325X", 64 << 10, 64 << 10, columns=16, lacks=_AMD),
)


def row_named(name: str) -> Architecture:
    """The row of an architecture. An NVIDIA architecture that has no row runs what the last one before it runs; another one
    that has none lacks everything."""
    rows = {row.name: row for row in ARCHITECTURES}
    if name in rows:
        return rows[name]
    if name.startswith("sm_"):
        nvidia = {int(one[3:]): row for one, row in rows.items() if one.startswith("sm_")}
        last = max((number for number in nvidia if number < int(name[3:])), default=None)
        if last is not None:
            return replace(nvidia[last], name=name, devices="", run=False)
        why = "it needs compute capability 8.0"
    else:
        amd = ", ".join(row.name for row in ARCHITECTURES if row.name.startswith("gfx"))
        why = f"it is compiled for {amd}, not for {name}"
    return Architecture(name, "", 48 << 10, 48 << 10, lacks=dict.fromkeys(KERNELS, why))


@functools.cache
def row_of(device: torch.device) -> Architecture:
    """The row of a CUDA or ROCm device that is there."""
    if torch.version.hip is not None:
        return row_named(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return row_named(f"sm_{major}{minor}")


def why_not(kernels: str, device: torch.device) -> str | None:
    """Why `kernels`, one of `KERNELS`, do not run on `device`, in a few words; None where they do."""
    if device.type != "cuda":
        return "it runs on cuda"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return row_of(device).lacks.get(kernels)


@functools.cache
def resources(device: torch.device) -> Resources:
    """Resources of `device`: what PyTorch reports, and what the table says where PyTorch reports nothing."""
    if device.type != "cuda":
        return INTERPRETED
    here, row = torch.cuda.get_device_properties(device), row_of(device)
    return Resources(
        getattr(here, "shared_memory_per_block_optin", row.shared),
        getattr(here, "shared_memory_per_multiprocessor", row.resident),
        row.columns,
        here.multi_processor_count,
        here.total_memory,
    )


def constant(make: Callable[P, R]) -> Callable[P, R]:
    """`make`, computed once for each of its arguments (the last 256 of them, until `cache_clear`), which can be hashed.

    What it gives is a constant of a graph that torch.compile traces: behind `functools.cache` that traces the function
    itself, with a warning, and what asks a device, or sends it numbers, cannot be a part of a graph.
    """
    kept: Any = functools.lru_cache(256)(make)

    @functools.wraps(make)
    def known(*args: P.args, **named: P.kwargs) -> R:
        made: R = kept(*args, **named)
        return made

    vars(known).update(cache_clear=kept.cache_clear, _dynamo_marked_constant=True)
    return known


@constant
def usable(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on `device`; None when they can. Triton itself is not imported to tell."""
    return why_not("triton", device) or (None if find_spec("triton") else "it needs triton")


def runs_triton(first: Tensor | Sequence[Tensor], *rest: Any) -> bool:
    """Whether kernels can run where the first argument of a call lies."""
    return usable((first if isinstance(first, Tensor) else first[0]).device) is None


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
        self._kernel = kernel
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
        launch = imported(f"mmaccel.backends.triton.{self._kernel}", self.plain.__name__)
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

    kernel   the module of `mmaccel.backends.triton` whose function of this name launches the kernel; it takes what the plain
             form takes, and is imported when it first serves; None for an operator without one
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
