"""Compile a question's kernels for CUDA devices that need not be there: ``python -m tests.backends.clusters_compile 90``.

Prints a row for each kernel, at the shape of a 7B model: name, registers a thread, bytes of stack a thread.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from unittest import mock

import torch
from triton.runtime import driver

from mmaccel.backends.clusters import Late, Lists, Own
from mmaccel.backends.triton.stream import clusters, words

from .triton_compile import Compiled, Elsewhere, used

KERNELS = [
    (clusters, "scored_kernel"),
    (clusters, "outside_kernel"),
    (clusters, "ordered_kernel"),
    (clusters, "selected_kernel"),
    (clusters, "stand_ins_kernel"),
    (words, "folded_kernel"),
    (words, "moved_kernel"),
    (words, "foretold_kernel"),
]


def main(capability: int) -> None:
    driver.set_active(Elsewhere(capability))
    kernels = {name: Compiled(getattr(module, name)) for module, name in KERNELS}
    kind, layers, count, entries = torch.bfloat16, 2, 600, 2250
    key, query = torch.empty(layers, count, 512, dtype=kind), torch.empty(layers, 512)
    long = torch.zeros(layers, entries, dtype=torch.long)
    size, score, one = long[:, :count], torch.empty(layers, count), long[0, :1]
    lists = Lists(long, long, long, size, size, 32)
    own = Own(key.transpose(0, 1), 1, lambda at: query, query[0], False)
    with ExitStack() as stack:
        for module, name in KERNELS:
            stack.enter_context(mock.patch.object(module, name, kernels[name]))
        clusters.scored(key, query, False)
        clusters.outside(score, size[0], 256, 2)
        clusters.ordered(score, size, size, score > 0)
        clusters.selected(size, lists, 64, 80, own, Late(one, 1, 8))
        out = torch.empty(2, 4, 512, 128, dtype=kind)
        clusters.stand_ins(score[0], score[0] > 0, size[0], (key[0], key[1]), score[0], out, 14, one, 0)
        words.folded(torch.empty(28, 16, 128, dtype=kind), one, 4)
        words.moved(torch.empty(16, 3584, dtype=kind), one, *torch.empty(3, 3584))
        words.foretold(long[0], long[0, :80], one, one)
    for name, kernel in kernels.items():
        held, registers = used(kernel.found[-1])
        print(name, registers, held, sep=",")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        main(int(given))
