"""Compile the kernels of a decode step for a device that need not be there: ``python -m tests.backends.decode_compile 90``.

Prints a row for each way they are used: name, bytes of shared memory, instructions of the matrix units, copies of 16 bytes
that go on beside the computation, bytes of stack a thread, registers a thread, warps.
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

from mmaccel.backends.triton.decode import attention as decode
from mmaccel.backends.triton.decode import qkv_rope_cache as enter
from mmaccel.backends.triton.decode import rope as turn
from mmaccel.backends.triton.decode import skinny_gemm as rows

from .triton_compile import Compiled, Elsewhere, used


def blank(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that is never read: its memory is not touched."""
    return torch.empty(size, dtype=dtype)


def attended(n: int, dtype: torch.dtype = torch.bfloat16, size: int = 128, **choices: Any) -> Any:
    """The kernel of the pieces, for the shape of a 7B model."""
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
    return pieces.found[0]


def projected(count: int, kind: str) -> Any:
    """The product of one of the weights of a 7B model's layer."""
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
        )
    return kernel.found[0]


def passed(count: int, kind: str) -> Any:
    """The same of what goes on to a norm, and of what comes to one."""
    kernel = Compiled(rows.project_kernel)
    E, wide = 3584, 18944
    with mock.patch.object(rows, "project_kernel", kernel):
        if kind == "up":
            squares = blank(count, 224 if count <= rows.FEW else 112, dtype=torch.float32)
            weight = [blank(wide, E)] * 2
            rows.project_rows(blank(count, E), weight, (), None, 1e-6, None, True, squares)
        else:
            K = wide if kind == "down" else E
            rows.pass_rows(blank(count, K), blank(E, K), [], blank(count, E), blank(E))
    return kernel.found[0]


def entered(count: int) -> Any:
    """Queries, keys and values of a 7B model's layer, turned."""
    kernel, E = Compiled(enter.enter_kernel), 3584
    weight, cache = [blank(w, E) for w in (E, 512, 512)], blank(1, 4, 4096, 128)
    squares = blank(count, 224 if count <= rows.FEW else 112, dtype=torch.float32)
    with mock.patch.object(enter, "enter_kernel", kernel):
        enter.enter_rows(
            blank(count, E), weight, [blank(len(w)) for w in weight], None, squares, 1e-6,
            blank(2, 1, count, 128), torch.zeros(1, count, dtype=torch.long), cache, cache,
        )  # fmt: skip
    return kernel.found[0]


def turned() -> Any:
    kernel = Compiled(turn.turn_kernel)
    angles, cache = blank(1, 4096, 128), blank(1, 4, 4096, 128)
    with mock.patch.object(turn, "turn_kernel", kernel):
        columns = torch.zeros(1, 2, dtype=torch.long)
        turn.turn_rows(blank(1, 2, 36 * 128), angles, angles, columns, columns, cache, cache)
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
    **{
        f"passed {kind} {count}": (lambda kind=kind, count=count: passed(count, kind))
        for kind in ("up", "down")
        for count in (1, 10, 64)
    },
    **{f"entered {count}": (lambda count=count: entered(count)) for count in (1, 10, 16, 64)},
    "turn": turned,
}


def told(name: str, kernel: Any) -> str:
    ptx = kernel.asm["ptx"]
    products = len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx))
    copies = len(re.findall(r"cp\.async\.c\S*\s+\[[^\]]*\], \[[^\]]*\], 0x10", ptx))
    figures = (
        kernel.metadata.shared,
        products,
        copies,
        *used(kernel),
        kernel.metadata.num_warps,
    )
    return ",".join(map(str, (name, *figures)))


def main(capability: int) -> None:
    driver.set_active(Elsewhere(capability))
    for name, way in WAYS.items():
        print(told(name, way()))


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False
    main(int(sys.argv[1]))
