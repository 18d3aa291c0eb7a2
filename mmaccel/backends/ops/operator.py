"""What an operator consists of: a plain PyTorch form, the shapes of its results, and the module of its Triton kernel; and
which kernels each GPU architecture runs: one table, used by kernels, backends, `mmaccel doctor` and the docs.

A file of this package defines an operator, or a few related ones, by decorating the plain form:

    @operator("decode", fake=lambda query: torch.empty_like(query))
    def decode_attend(query: Tensor, key: Tensor, ...) -> Tensor: ...

The plain form defines the operator's result; its signature is the schema.

Each of our kernels was compiled for every row of the table; `python -m tests.backends.compiled` repeats that without a GPU.
For third-party kernels the table holds what their projects state: docs/architectures.md names the sources.
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

REPLAYED_ON: dict[int, int] = {}
"""CUDA streams on which graphs are captured -> the stream on which each of these is replayed."""

_WARPGROUPS = "it needs a Hopper GPU, whose asynchronous warpgroup products it computes by"
_HOPPER = "it needs a Hopper GPU"
_FOUR = "it needs a Hopper or a datacenter Blackwell GPU"
_NVIDIA = "it needs an NVIDIA GPU"


@dataclass(frozen=True)
class Architecture:
    """One GPU architecture, and which kernels and backends run on it.

    name      as compilers write it
    devices   well-known GPUs
    shared    bytes of shared memory available to one thread block
    resident  bytes of shared memory of one multiprocessor
    has_run   whether our kernels have run on it; if not, they were compiled for it only
    cudnn     whether cuDNN is faster than flash-attn 2 if there are as many queries as keys
    columns   smallest N dimension of a tensor-core product
    lacks     each of `KERNELS` that does not run on it -> why, to follow "cannot run on this device: "
    """

    name: str
    devices: str
    shared: int
    resident: int
    has_run: bool = False
    cudnn: bool = False
    columns: int = 8
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceLimits:
    """Resources of one device for kernel launches.

    shared      bytes of shared memory available to one thread block
    resident    bytes of shared memory of one multiprocessor
    columns     smallest N dimension of a tensor-core product
    processors  number of multiprocessors
    memory      bytes of device memory
    """

    shared: int
    resident: int
    columns: int
    processors: int
    memory: int

    def max_pipeline_stages(self, most: int, each: int, rest: int = 0) -> int:
        """Number of pipeline stages, at most `most`, that fit into shared memory: each but one takes `each` bytes, and the
        rest of the program takes `rest` bytes."""
        return max(1, min(most, 1 + (self.shared - rest) // each))


INTERPRETED = DeviceLimits(shared=256 << 10, resident=228 << 10, columns=8, processors=4, memory=1 << 40)
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
    Architecture("sm_90", "H100, H200", 227 << 10, 228 << 10, has_run=True, cudnn=True),
    Architecture("sm_100", "B200, GB200", 227 << 10, 228 << 10, cudnn=True, lacks=_BLACKWELL),
    Architecture("sm_120", "RTX 5090, RTX PRO 6000", 99 << 10, 100 << 10, cudnn=True, lacks=_SMALL_BLACKWELL),
    Architecture("gfx942", "MI300X, MI325X", 64 << 10, 64 << 10, columns=16, lacks=_AMD),
)


def find_architecture(name: str) -> Architecture:
    """Return the entry of the architecture `name` in the table. An unknown newer NVIDIA architecture gets the entry of the
    last older one; any other unknown one lacks all kernels."""
    rows = {row.name: row for row in ARCHITECTURES}
    if name in rows:
        return rows[name]
    if name.startswith("sm_"):
        nvidia = {int(one[3:]): row for one, row in rows.items() if one.startswith("sm_")}
        last = max((number for number in nvidia if number < int(name[3:])), default=None)
        if last is not None:
            return replace(nvidia[last], name=name, devices="", has_run=False)
        why = "it needs compute capability 8.0"
    else:
        amd = ", ".join(row.name for row in ARCHITECTURES if row.name.startswith("gfx"))
        why = f"it is compiled for {amd}, not for {name}"
    return Architecture(name, "", 48 << 10, 48 << 10, lacks=dict.fromkeys(KERNELS, why))


@functools.cache
def architecture_of(device: torch.device) -> Architecture:
    """Return the table's entry for a CUDA or ROCm device of this machine."""
    if torch.version.hip is not None:
        return find_architecture(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return find_architecture(f"sm_{major}{minor}")


def why_kernels_unusable(kernels: str, device: torch.device) -> str | None:
    """Why `kernels` (one of `KERNELS`) cannot run on `device`, as a phrase; None if they can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return architecture_of(device).lacks.get(kernels)


@functools.cache
def find_device_limits(device: torch.device) -> DeviceLimits:
    """Resources of `device`, as PyTorch reports them, else from the table."""
    if device.type != "cuda":
        return INTERPRETED
    here, row = torch.cuda.get_device_properties(device), architecture_of(device)
    return DeviceLimits(
        getattr(here, "shared_memory_per_block_optin", row.shared),
        getattr(here, "shared_memory_per_multiprocessor", row.resident),
        row.columns,
        here.multi_processor_count,
        here.total_memory,
    )


def _cached_constant(make: Callable[P, R]) -> Callable[P, R]:
    """Decorator that caches the last 256 results of a function of hashable arguments, and lets torch.compile treat them as
    constants.

    With `functools.cache` torch.compile would trace into the function, with a warning, and device queries cannot be part of
    a graph. `cache_clear` empties the cache.
    """
    kept: Any = functools.lru_cache(256)(make)

    @functools.wraps(make)
    def known(*args: P.args, **named: P.kwargs) -> R:
        made: R = kept(*args, **named)
        return made

    vars(known).update(cache_clear=kept.cache_clear, _dynamo_marked_constant=True)
    return known


@_cached_constant
def why_triton_unusable(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on `device`, or None if they can; does not import Triton."""
    return why_kernels_unusable("triton", device) or (None if find_spec("triton") else "it needs triton")


def runs_triton(first: Tensor | Sequence[Tensor], *rest: Any) -> bool:
    """Whether Triton kernels can run on the device of the first argument."""
    return why_triton_unusable((first if isinstance(first, Tensor) else first[0]).device) is None


def runs_triton_in_float32(first: Tensor, *rest: Any) -> bool:
    """Whether Triton kernels that compute in float32 can run on the first argument: on its device, and not for float64."""
    return first.dtype != torch.float64 and runs_triton(first)


def needs_torch_library() -> bool:
    """Whether a call must go through torch.library: under torch.compile, a dispatch mode (such as fake tensors), or enabled
    gradients, which torch.library rejects for these operators."""
    return (
        torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0
    )


def import_on_first_call(module: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of `module`, which is imported only when the function is first called."""
    return lambda *args, **named: getattr(import_module(module), name)(*args, **named)


class Operator(Generic[P, R]):
    """A tensor function with a plain PyTorch form and a Triton kernel, and, with a fake, a torch.library operator.

    A `needs_torch_library` call uses the operator ``mmaccel::<name>``. Any other goes directly to the kernel or the plain
    form, since torch.library costs 40 us of host time."""

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
                f"mmaccel::{plain.__name__}", self.call_directly, mutates_args=mutates, schema=schema
            )
            self.op.register_fake(_of_some(fake, inspect.signature(plain)))

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        if self.op is not None and needs_torch_library():
            result: R = self.op(*args, **named)
            return result
        return self.call_directly(*args, **named)

    def call_directly(self, *args: P.args, **named: P.kwargs) -> R:
        """Call the kernel if it serves the arguments, else the plain form, without torch.library. Sets the current device to
        that of the first argument, since layers of a model may be on several."""
        if not (self._kernel and self._serves(*args)):
            return self.plain(*args, **named)
        launch = import_on_first_call(f"mmaccel.backends.triton.{self._kernel}", self.plain.__name__)
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
    """Decorator that makes a plain PyTorch function an `Operator`.

    kernel   module of `mmaccel.backends.triton` with a function of the same name and arguments that launches the kernel;
             imported at first use; None for an operator without kernel
    serves   whether the kernel supports given arguments; by default, whether Triton runs on the first one's device
    fake     allocates results, from those arguments that its parameters name; None for an operator that is never traced
    mutates  names of arguments that are written to
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
