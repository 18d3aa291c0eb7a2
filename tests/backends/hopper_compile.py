"""Compile the kernel for Hopper without a device: ``python -m tests.backends.hopper_compile``.

Prints a row for each way: name, bytes of shared memory, asynchronous products, copies by the engine, bytes of stack.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from mmaccel.backends.triton.prefill.hopper import hopper_kernel
from mmaccel.backends.triton.prefill.hopper_joint import joint_kernel
from mmaccel.backends.triton.prefill.hopper_launch import JOINT, LAG, PLACES

from .triton_compile import used

SHAPE = dict(
    GROUP=7,
    LISTS=1,
    BLOCK_Q=64,
    BLOCK_K=64,
    ROWS=64,
    PACK=2,
    D=128,
    PLACED=True,
    SPLIT=False,
    GATED=False,
    STAGES=2,
)
WAYS: dict[str, dict[str, Any]] = {
    "shared lists": {},
    "split": dict(SPLIT=True, LISTS=28, BLOCK_Q=128, ROWS=128, PACK=1, GATED=True),
    "large blocks": dict(LISTS=28, BLOCK_Q=128, BLOCK_K=128, ROWS=128, PACK=1, PLACED=False),
    "small heads": dict(D=64),
}
JOINTLY = dict(
    GROUP=7,
    LISTS=28,
    GROUPS=JOINT,
    D=128,
    PLACED=True,
    SPLIT=False,
    GATED=False,
    STAGES=PLACES[JOINT],
    LAG=LAG,
)
JOINT_WAYS: dict[str, dict[str, Any]] = {
    "neighbours": {},
    "neighbours split": dict(SPLIT=True, GATED=True),
    "neighbours of small heads": dict(D=64),
}
KINDS = {
    "*i64": ("table",),
    "*i32": ("ITEM", "PIECES", "SLOT", "TOLD", "q_row", "SHORT", "TAKEN"),
    "*fp32": ("LSE", "PART_OUT", "PART_LSE"),
    "*bf16": ("Q", "OUT"),
    "fp32": ("scale",),
}


def compiled(kernel: Any, **shape: Any) -> Any:
    names = kernel.arg_names
    engine = f"tensordesc<bf16[64, 64],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"
    told = {name: kind for kind, some in KINDS.items() for name in some}
    told |= dict.fromkeys(("k_own", "v_own", "k_copies", "v_copies"), engine) | dict.fromkeys(
        shape, "constexpr"
    )
    signature = {name: told.get(name, "i32") for name in names}
    even = ("Q", "OUT", "q_b", "q_h", "q_s", "out_b", "out_h", "out_s", "PART_OUT", "table")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = GluonASTSource(kernel, signature, shape, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    ways = [(name, hopper_kernel, SHAPE | way) for name, way in WAYS.items()]
    ways += [(name, joint_kernel, JOINTLY | way) for name, way in JOINT_WAYS.items()]
    for name, of, way in ways:
        kernel = compiled(of, **way)
        ptx = kernel.asm["ptx"]
        products = len(re.findall(r"wgmma\.mma_async\.sync", ptx))
        copies = len(re.findall(r"cp\.async\.bulk\.tensor", ptx))
        print(name, kernel.metadata.shared, products, copies, used(kernel)[0], sep=",")
