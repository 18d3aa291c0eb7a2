"""Compile the kernels of a decode step for a device that need not be there: ``python -m tests.backends.decode_compile 90``.

Prints a row for each way they are used: name, bytes of shared memory, instructions of the matrix units, copies of 16 bytes
that go on beside the computation, whether it waits for the kernel before it and lets the next one begin (`overlapping`),
fetches into the L2 cache, bytes of stack a thread, registers a thread, warps.
"""

from __future__ import annotations

import re
import sys
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from mmaccel.backends.triton import decode, overlap, rows

from .triton_compile import Compiled, Elsewhere, used


def blank(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that is never read: its memory is not touched."""
    return torch.empty(size, dtype=dtype)


def attended(
    n: int, dtype: torch.dtype = torch.bfloat16, size: int = 128, merged: bool = False, **choices: Any
) -> Any:
    """The kernel of the pieces, for the shape of a 7B model, or that which merges them."""
    pieces, merge = Compiled(decode.piece_kernel), Compiled(decode.merge_kernel)
    query = blank(1, n, 28, size, dtype=dtype).transpose(1, 2)
    cache = blank(1, 4, 4096, size, dtype=dtype)
    sees = torch.zeros(n, dtype=torch.long) if choices.pop("tree", False) else None
    with (
        mock.patch.object(decode, "piece_kernel", pieces),
        mock.patch.object(decode, "merge_kernel", merge),
        mock.patch.object(decode, "_multiprocessors", lambda _: 132),
    ):
        decode.decode_attend(query, cache, cache, torch.zeros(1, n, dtype=torch.long), 0.1, sees, **choices)
    return (merge if merged else pieces).found[0]


def projected(count: int, kind: str, normed: bool = False, **choices: Any) -> Any:
    """The product of one of the weights of a 7B model's layer, or the norm before it."""
    kernel = Compiled(rows.project_kernel)
    E = 3584
    weight = {"qkv": [E, 512, 512], "o": [E], "up": [18944] * 2, "down": [E]}[kind]
    K = 18944 if kind == "down" else E
    gain = blank(K) if kind in ("qkv", "up") else None
    bias = [blank(w) for w in weight] if kind == "qkv" else []
    residual = blank(count, E) if kind in ("o", "down") else None
    norm = Compiled(rows.norm_kernel)
    with mock.patch.object(rows, "project_kernel", kernel), mock.patch.object(rows, "norm_kernel", norm):
        rows.project_rows(
            blank(count, K),
            [blank(w, K) for w in weight],
            bias,
            gain,
            1e-6,
            residual,
            kind == "up",
            **choices,
        )
    return (norm if normed else kernel).found[0]


def turned() -> Any:
    kernel = Compiled(rows.turn_kernel)
    angles, cache = blank(1, 4096, 128), blank(1, 4, 4096, 128)
    with mock.patch.object(rows, "turn_kernel", kernel):
        columns = torch.zeros(1, 2, dtype=torch.long)
        rows.turn_rows(blank(1, 2, 36 * 128), angles, angles, columns, columns, cache, cache)
    return kernel.found[0]


WAYS = {
    "attend 1": lambda: attended(1),
    "attend 10": lambda: attended(10),
    "attend fp32": lambda: attended(1, torch.float32),
    "attend 80": lambda: attended(1, size=80),
    "attend tree": lambda: attended(6, tree=True),
    **{
        f"{kind} {count}": (lambda kind=kind, count=count: projected(count, kind))
        for kind in ("qkv", "o", "up", "down")
        for count in (1, 10, 64)
    },
    "turn": turned,
    "merge": lambda: attended(1, merged=True),
    "norm": lambda: projected(1, "qkv", normed=True),
}


def overlapping(kernel: Any) -> bool:
    """Whether a kernel is launched before the last one ends, lets the next one begin, and waits for the last one before it
    reads or writes anything, and before it ends anywhere."""
    ptx = kernel.asm["ptx"]
    waits = [found.start() for found in re.finditer(r"^\s*griddepcontrol\.wait;", ptx, re.MULTILINE)]
    touching = re.search(r"\b(?:ld|st|red|atom)\.global|\bcp\.async\.c[ag]|^\s*ret;", ptx, re.MULTILINE)
    assert touching is not None
    lets = "griddepcontrol.launch_dependents;" in ptx
    return kernel.metadata.launch_pdl and lets and len(waits) == 1 and waits[0] < touching.start()


def told(name: str, kernel: Any) -> str:
    ptx = kernel.asm["ptx"]
    products = len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx))
    copies = len(re.findall(r"cp\.async\.c\S*\s+\[[^\]]*\], \[[^\]]*\], 0x10", ptx))
    figures = (
        kernel.metadata.shared,
        products,
        copies,
        int(overlapping(kernel)),
        ptx.count("bulk.prefetch.L2"),
        *used(kernel),
        kernel.metadata.num_warps,
    )
    return ",".join(map(str, (name, *figures)))


def main(capability: int) -> None:
    driver.set_active(Elsewhere(capability))
    with mock.patch.object(overlap, "overlaps", lambda _: capability >= 90):
        for name, way in WAYS.items():
            print(told(name, way()))


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False
    main(int(sys.argv[1]))
