"""What each GPU architecture runs: the one table that backends, launches of kernels, `mmaccel doctor` and the docs read.

Every kernel of ours was compiled for every row, which `python -m tests.backends.compiled` repeats without a device. What
other people's kernels serve is what they say: docs/architectures.md names the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch

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
    """One row of the table.

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
    """What a device has for the programs of a launch.

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
        """How many stages of a pipelined loop, up to `most`, a program has shared memory for: one is in registers, every
        other takes `each` bytes, and the program takes `beside` bytes all the time."""
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


def named(name: str) -> Architecture:
    """The row of an architecture. An NVIDIA architecture that has no row runs what the last one before it runs; another one
    that has none lacks everything."""
    rows = {row.name: row for row in ARCHITECTURES}
    if name in rows:
        return rows[name]
    if name.startswith("sm_"):
        before = [
            row for row in ARCHITECTURES if row.name.startswith("sm_") and _rank(row.name) < _rank(name)
        ]
        if before:
            return replace(max(before, key=lambda row: _rank(row.name)), name=name, devices="", run=False)
        why = "it needs compute capability 8.0"
    else:
        amd = ", ".join(row.name for row in ARCHITECTURES if row.name.startswith("gfx"))
        why = f"it is compiled for {amd}, not for {name}"
    return Architecture(name, "", 48 << 10, 48 << 10, lacks=dict.fromkeys(KERNELS, why))


@cache
def of(device: torch.device) -> Architecture:
    """The row of a CUDA or ROCm device that is there."""
    if torch.version.hip is not None:
        return named(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return named(f"sm_{major}{minor}")


def why_not(kernels: str, device: torch.device) -> str | None:
    """Why `kernels`, one of `KERNELS`, do not run on `device`, in a few words; None where they do."""
    if device.type != "cuda":
        return "it runs on cuda"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return of(device).lacks.get(kernels)


@cache
def resources(device: torch.device) -> Resources:
    """What `device` has: its own figures, and those of its row where PyTorch does not tell them."""
    if device.type != "cuda":
        return INTERPRETED
    here, row = torch.cuda.get_device_properties(device), of(device)
    return Resources(
        getattr(here, "shared_memory_per_block_optin", row.shared),
        getattr(here, "shared_memory_per_multiprocessor", row.resident),
        row.columns,
        here.multi_processor_count,
        here.total_memory,
    )


def _rank(name: str) -> int:
    return int(name.removeprefix("sm_"))
