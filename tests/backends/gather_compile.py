"""Compile the gather kernel for a CUDA device that need not be there: ``python -m tests.backends.gather_compile 80 90``.

Prints rows for units of an even and of an odd size, written side by side and as slots lie: capability, tokens, loads of 16
bytes, stores of 16 bytes, all stores.
"""

from __future__ import annotations

import re
import sys
from unittest import mock

import torch
from triton.runtime import driver

from mmaccel.backends.triton.stream import gather

from .triton_compile import Compiled, Elsewhere


def main(capability: int) -> None:
    driver.set_active(Elsewhere(capability))
    kernel = Compiled(gather.gather_kernel)
    for tokens, size in ((196, 128), (49, 2)):
        slab = torch.empty(10, 2, 4, tokens, size, dtype=torch.bfloat16)
        out = torch.empty(2, 4, 5 * tokens, size, dtype=torch.bfloat16)
        index = torch.zeros(5, dtype=torch.long)
        for to in (out, torch.empty_like(slab[:5]).permute(1, 2, 0, 3, 4)):
            with mock.patch.object(gather, "gather_kernel", kernel):
                gather.gather_units(to, [slab], index[:1], index)
            ptx = kernel.found[-1].asm["ptx"]
            loads, stores = (re.findall(rf"{kind}\.global\S*", ptx) for kind in ("ld", "st"))
            told = [sum("v2.b64" in one for one in some) for some in (loads, stores)]
            print(capability, tokens, *told, len(stores), sep=",")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        main(int(given))
