"""Two trees of mmaccel timed in turns on one device: did a redesign cost speed?

    python bench/turns.py OLD NEW --out bench/results/turns_h200_202611.jsonl
    python bench/turns.py OLD NEW --device cpu --shrink 64 --out rows.jsonl     # does it run at all?

OLD and NEW are checkouts. Each stays loaded in a process of its own, and one run of each alternates: old, new, new, old.
Cases at 7B shapes with random weights: one layer of A-shape and vertical-slash at 128k tokens and of grid at 1M (planning
counted), a prefill of 512k tokens through two layers of mixed heads, twenty decode steps after 25k columns, a question on a
mosaic of 600 frames to its first token, and frames through `watch`. A row has both medians, quartiles and the ratio
new / old; `limit` is 1.03, of encode 1.05. Exits with 1 when a ratio is above its limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYERS = {"layer:a_shape": "a_shape", "layer:vertical_slash": "vertical_slash_frames", "layer:grid": "grid"}
COLUMNS, PROMPT, FRAMES = 25_088, 1 << 19, 600
LIMITS = {"encode": 1.05}


def layer_case(name: str, given: argparse.Namespace) -> Callable[[], None]:
    """Plan and attend one layer at 28 query heads over 4 key/value heads of size 128."""
    import attend
    import torch

    case = attend.CASES[LAYERS[name]]
    if given.shrink > 1:
        case = attend.shortened(case, max(256, case.tokens // given.shrink))
    device, frame = torch.device(given.device), min(attend.FRAME, max(8, case.tokens // 16))
    query, key, value = attend.drawn(case.tokens, (28, 4), 128, given.dtype, device)
    layout, pattern = attend.layout_of(case, frame, device), attend.pattern_of(case, frame)
    backend = "triton" if device.type == "cuda" else "reference"
    ((_, kernel),) = attend.kernels([backend], device)

    def run() -> None:
        plan = pattern.plan(query, key, layout, layout)
        attend.attend_plan(plan, query, key, value, 128**-0.5, kernel)

    return run


def prefill_case(name: str, given: argparse.Namespace) -> Callable[[], None]:
    """Prefill two layers of a 7B shape from embeddings; all heads mixed."""
    import prefill

    from mmaccel.core.recipe import Recipe

    told = SimpleNamespace(shrink=given.shrink, device=given.device)
    model = prefill.shape(told, 2)
    heads = prefill.adapter_for(model).geometry(model)
    one = prefill.mixed_heads(heads.heads, 64, 1 / given.shrink)
    backend = "triton" if given.device.startswith("cuda") else "reference"
    table = dict.fromkeys(range(heads.layers), one)
    recipe = Recipe.load(sparse={"name": "per_head", "table": table}, backend=backend)
    call, _ = prefill.Prompt(model, max(512, PROMPT // given.shrink)).run(recipe)
    return call


def decode_case(name: str, given: argparse.Namespace) -> Callable[[], None]:
    """Twenty captured steps of one row."""
    import replayed
    import torch

    # `Counting` counts around the runner's own step, which is what is timed.
    step = replayed.Counting.__mro__[1].step

    columns = max(64, COLUMNS // given.shrink)
    model = replayed.model_of("qwen2.5-vl-7b", given.device, 1 if given.shrink > 1 else None)
    runner = replayed.after(model, columns)
    ids = torch.ones(1, 1, dtype=torch.long, device=given.device)

    def run() -> None:
        for _ in range(20):
            step(runner, ids)
            runner.truncate(columns)

    return run


def sizes_of(given: argparse.Namespace) -> Any:
    """The sizes of `bench/stream.py`, its stream shortened."""
    import watching

    sizes = watching.Sizes(SimpleNamespace(shrink=given.shrink, device=given.device, questions=5))
    sizes.frames = max(24, FRAMES // given.shrink)
    return sizes


def question_case(name: str, given: argparse.Namespace) -> Callable[[], float]:
    """One question to its first token, the cluster cache flushed."""
    import random

    import asking
    import watching

    sizes, draws = sizes_of(given), random.Random(0)

    def run() -> float:
        session = watching.HELD.session(sizes, "mosaic")
        return float(asking.asked(*session, tuple(draws.sample(range(sizes.kinds), 2)))["ttft_s"])

    return run


def encode_case(name: str, given: argparse.Namespace) -> Callable[[], None]:
    """Frames through `watch`, vision tower included, past the window."""
    import watching
    from happened import noise

    sizes = sizes_of(given)
    frames = noise(sizes.side, 64 if given.shrink == 1 else 12, sizes.device)

    def run() -> None:
        watching.HELD.session(sizes, "mosaic")[0].watch(frames, fps=0.5)

    return run


CASES: dict[str, Callable[[str, argparse.Namespace], Callable[[], float | None]]] = {
    **dict.fromkeys(LAYERS, layer_case),
    "prefill": prefill_case,
    "decode": decode_case,
    "question": question_case,
    "encode": encode_case,
}


def work(given: argparse.Namespace) -> None:
    """Serve one tree: a line of JSON in for what to do, one out with the seconds."""
    sys.path.insert(0, str(Path("bench").resolve()))
    import torch

    given.dtype = torch.bfloat16 if given.device.startswith("cuda") else torch.float32
    out, sys.stdout = sys.stdout, sys.stderr
    run: Callable[[], float | None] | None = None

    def wait() -> None:
        if given.device.startswith("cuda"):
            torch.cuda.synchronize()

    for line in sys.stdin:
        told, answer = json.loads(line), {}
        try:
            if told["do"] == "prepare":
                run = None
                if told["case"] not in ("question", "encode") and "watching" in sys.modules:
                    sys.modules["watching"].HELD.drop("mosaic", "model")
                gc.collect()
                torch.cuda.empty_cache()
                run = CASES[told["case"]](told["case"], given)
            assert run is not None
            with torch.no_grad():
                wait()
                began = time.perf_counter()
                own = run()
                wait()
            answer["seconds"] = time.perf_counter() - began if own is None else own
        except Exception as error:
            answer["failed"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=out, flush=True)


class Tree:
    """A process with one tree's modules."""

    def __init__(self, path: Path, given: argparse.Namespace) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(path / "lab"), *given.extra))}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--work"]
        command += ["--device", given.device, "--shrink", str(given.shrink)]
        self.process = subprocess.Popen(
            command, env=env, cwd=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, **told: Any) -> float:
        """Seconds of one run; raises RuntimeError with what went wrong there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(told), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"failed": "the process ended"}
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return float(answer["seconds"])


def compare(given: argparse.Namespace) -> int:
    """All cases, a row each."""
    sys.path.insert(0, str(Path(__file__).parent))
    from timing import Log, Times

    log, slower = Log(given.out, given.device), 0
    trees = {"old": Tree(given.old, given), "new": Tree(given.new, given)}
    for case in given.cases:
        taken: dict[str, list[float]] = {side: [] for side in trees}
        try:
            for side in trees:
                trees[side].do(do="prepare", case=case)
            for turn in range(given.warmup + given.repeats):
                for side in ("old", "new") if turn % 2 else ("new", "old"):
                    seconds = trees[side].do(do="run")
                    if turn >= given.warmup:
                        taken[side].append(seconds)
        except RuntimeError as error:
            slower += 1
            log.row(case=case, way=side, failed=str(error))
            print(f"{case:22} {side} failed: {error}", flush=True)
            continue
        old, new = (Times(tuple(taken[side])) for side in trees)
        ratio, limit = new.median / old.median, LIMITS.get(case, 1.03)
        slower += ratio > limit
        log.row(case=case, ratio=ratio, limit=limit, **old.row("old_"), **new.row("new_"))
        print(
            f"{case:22} old {old.median * 1e3:9.3f} ms, new {new.median * 1e3:9.3f} ms, ratio {ratio:.3f}",
            flush=True,
        )
    for tree in trees.values():
        assert tree.process.stdin is not None
        tree.process.stdin.close()
        tree.process.wait(60)
    return 1 if slower else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths: a smoke test")
    parser.add_argument("--repeats", type=int, default=8, help="runs of each tree that count")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given)
        return 0
    if given.old is None or given.new is None or given.out is None:
        parser.error("give OLD, NEW and --out.")
    # What else the caller's path has, such as a package that is installed nowhere.
    given.extra = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    given.old, given.new = given.old.resolve(), given.new.resolve()
    return compare(given)


if __name__ == "__main__":
    sys.exit(main())
