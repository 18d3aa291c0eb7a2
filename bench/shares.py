"""What is told of a pattern before it is planned, and what it then lists: the cases of `bench/attend.py`.

    python bench/shares.py --out bench/results/shares_cpu_202611.jsonl

Shares of causal attention: `bound` (the most blocks from host numbers alone), `expected` (what the choice of dense or sparse
goes by), `listed` (of a plan for random queries and keys), and the bytes of the plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from attend import CASES, FRAME, drawn, layout_of, pattern_of, shortened
from timing import Log, environment

from mmaccel.core.plan import AttentionPlan


def nbytes(plan: AttentionPlan) -> int:
    """Bytes of all tensors that a plan holds, each counted once."""
    held: dict[int, int] = {}

    def look(x: object) -> None:
        if isinstance(x, Tensor):
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, tuple | list):
            for one in x:
                look(one)
        elif hasattr(x, "__dataclass_fields__"):
            for name in x.__dataclass_fields__:
                look(getattr(x, name))

    look(plan)
    return sum(held.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="file of result rows; rows are added to it (default: only printed)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--heads", nargs=2, type=int, default=(2, 1), metavar=("HEADS", "GROUPS"))
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--tokens", type=int, help="this length for every case: a smoke test")
    options = parser.parse_args(argv)
    device = torch.device("cpu")
    log = Log(options.out, device) if options.out else None
    print(environment(device))
    for name in options.cases:
        case = shortened(CASES[name], options.tokens) if options.tokens else CASES[name]
        n, frame = case.tokens, min(FRAME, max(8, case.tokens // 16))
        pattern, layout = pattern_of(case, frame), layout_of(case, frame, device)
        query, key, _ = drawn(n, tuple(options.heads), options.size, torch.float32, device)
        plan = pattern.plan(query, key, layout, layout)
        causal, area = n * (n + 1) / 2, pattern.block**2
        row = {
            "case": name,
            "tokens": n,
            "bound": pattern.bound(n, n) * area / causal,
            "expected": pattern.expected(n, n, (layout, layout)) * area / causal,
            "listed": 1.0 if plan is None else float(plan.listed_pairs().mean()) / causal,
            "bytes": 0 if plan is None else nbytes(plan),
        }
        if log is not None:
            log.row(**row)
        print(
            " ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
