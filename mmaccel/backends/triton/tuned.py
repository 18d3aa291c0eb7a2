"""The kernel with its configuration found by trial on the device; `attend.block_attend` takes it in place of the bare one.

    block_attend(*arguments, kernel=tuned)

The first call at a shape runs every configuration that fits; results are kept by shape, for the life of the process.
"""

from __future__ import annotations

from typing import Any

import triton

from mmaccel.backends.triton.kernel import attend_kernel

CONFIGS = [
    triton.Config({"BLOCK_N": keys}, num_warps=warps, num_stages=stages)
    for keys in (16, 32, 64, 128)
    for warps in (4, 8)
    for stages in (2, 3, 4)
]


def fitting(configs: list[Any], arguments: dict[str, Any], **constants: Any) -> list[Any]:
    """Those whose tiles of keys are a block, or the largest part of one that is tried, or half of that."""
    block = {**arguments, **constants}["BLOCK_K"]
    largest = min(block, 128)
    return [c for c in configs if c.kwargs["BLOCK_N"] in (largest, max(largest // 2, 16))]


tuned = triton.autotune(
    CONFIGS,
    key=["D", "DV", "ROWS", "PACK", "BLOCK_K", "SPLIT"],
    prune_configs_by={"early_config_prune": fitting},
)(attend_kernel)
