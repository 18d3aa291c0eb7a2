"""Decode steps and the pipeline at published shapes, random weights, on CUDA devices.

    python bench/decode_gpu.py steps --shapes qwen2.5-vl-7b qwen2.5-vl-32b --out bench/results/steps_h200_202601.jsonl
    python bench/decode_gpu.py pipeline --draft qwen2.5-vl-7b --target qwen2.5-vl-32b --keep 0.81

`steps`: the median time of a captured step of one and of several rows after so many columns, beside the time in which the
device reads the weights and the cache once at the rate measured here.

`pipeline`: replayed acceptance. Every step of both models is real; only the verdict is drawn: the draft says the number
after the last, and the target says the same with probability `keep`. The draft runs in a second process, on the second
device where there is one. Beside it: drafting in turns, decoding alone, and what the simulator says of the measured steps.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, environment, measure

from mmaccel.core.attach import adapter_for
from mmaccel.core.draft import DraftState, Prompt
from mmaccel.core.generate import speculate
from mmaccel.core.worker import READY, Wire
from mmaccel.eval import acceptance, simulate
from mmaccel.models import shapes
from mmaccel.models.decode import StaticRunner
from mmaccel.policies.draft import Off, Parallel, _remote
from mmaccel.policies.draft._writer import Writer
from mmaccel.policies.draft.parallel import Pipeline
from mmaccel.policies.draft.sequential import Drafter

VOCAB = 150_000


class Counting(StaticRunner):
    """A model at work whose answers are written over: the number after the last, or, with chance, another."""

    def __init__(self, *given: Any, keep: float = 1.0, seed: int = 0, **choices: Any) -> None:
        super().__init__(*given, **choices)
        self.keep, self.dice = keep, torch.Generator().manual_seed(seed)

    def step(self, ids: Tensor, branches: Any = None) -> Tensor:
        real = super().step(ids, branches)
        right = torch.rand(ids.shape[1], generator=self.dice) < self.keep
        said = (ids[0] + torch.where(right, 1, 2).to(ids.device)) % VOCAB
        # The real logits are read, so that nothing of the step can be left out.
        return real[..., :1] * 0 + torch.nn.functional.one_hot(said, VOCAB).to(real)[None]


def build(
    shape: str, given: argparse.Namespace, context: int, rows: tuple[int, ...], device: str, keep: float = 1.0
) -> Counting:
    """A model of a shape at work after `context` columns, its cache filled with small numbers."""
    model = shapes.build(
        shape, layers=given.layers, vision_layers=1, dtype=torch.bfloat16, device=device
    ).eval()
    family, cache = adapter_for(model), DynamicCache()
    for layer, size in enumerate(sizes(family, model, context)):
        cache.update(
            *(torch.empty(size, dtype=model.dtype, device=device).normal_(0, 0.02) for _ in range(2)), layer
        )
    runner = Counting(model, family, cache, rows, keep=keep, seed=given.seed)
    return runner


def sizes(family: Any, model: Any, context: int) -> list[tuple[int, ...]]:
    """The keys of each layer, as many as its values."""
    shape = family.geometry(model)
    return [(1, shape.kv_heads, context, shape.head_dim)] * shape.layers


def steps(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each shape, context and number of rows."""
    found = []
    rate = acceptance.read_rate(given.device, 1 << given.read_log2)
    for shape in given.shapes:
        for context in given.contexts:
            runner = build(shape, given, context, tuple(given.rows), given.device)
            for rows in given.rows:
                ids = torch.ones(1, rows, dtype=torch.long, device=given.device)

                def run(runner: Counting = runner, ids: Tensor = ids, context: int = context) -> None:
                    StaticRunner.step(runner, ids)
                    runner.truncate(context)

                times = measure(run, warmup=3, repeats=given.repeats, device=given.device)
                keys = sizes(runner.family, runner.model, context)
                cache = 2 * sum(math.prod(size) for size in keys) * runner.model.dtype.itemsize
                floor = acceptance.floor_s(runner.model, cache, rate)
                row = {"case": "step", "shape": shape, "context": context, "rows": rows, "floor_s": floor}
                found.append({**row, "read_rate": rate, **times.row(), "of_floor": times.median / floor})
            del runner
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found


def serve(wire: Wire, options: dict[str, Any]) -> None:
    """The second process: a draft of a shape that counts."""
    given = argparse.Namespace(**json.loads(options["model"]))
    runner = build(given.draft, given, given.draft_context, (1, 2, 4), options["device"])
    warm(runner, (1, 2, 4))
    wire.send(READY, options["vocab"])

    class Ready(Writer):
        def read(self, inputs: Any, *rest: Any, **more: Any) -> None:
            self._prompt, self._warp = inputs["input_ids"][0].cpu(), None
            self._after_prompt = torch.nn.functional.one_hot((self._prompt[-1] + 1) % VOCAB, VOCAB)
            runner.truncate(given.draft_context)
            self._origin = runner.length()

    _remote.serve_writer(wire, lambda: Ready(runner, options["device"], VOCAB))


def warm(runner: Counting, rows: tuple[int, ...]) -> None:
    """Compile and capture every step: the first of a width is run as it is written, the second captured."""
    length = runner.length()
    for count in [count for count in rows for _ in range(2)]:
        runner.step(torch.ones(1, count, dtype=torch.long, device=runner.model.device))
        runner.truncate(length)


class Rounds:
    """What the loop wrote down."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []
        self.failed: list[str] = []

    def round(self, proposed: int, accepted: int) -> None:
        self.rounds.append((proposed, accepted))

    def draft_failed(self, reason: str) -> None:
        self.failed.append(reason)


def decode(target: Counting, draft: DraftState, context: int, tokens: int) -> dict[str, Any]:
    """One generation after the assumed prompt, in seconds after its first token."""
    device = target.model.device
    target.truncate(context)
    target.dice.manual_seed(1)
    ids = torch.full((1, 4), 7, device=device)
    said = Prompt(inputs={"input_ids": ids}, ids=ids, max_new_tokens=tokens)
    draft.begin(said)
    first = torch.nn.functional.one_hot(ids[:, -1] + 1, VOCAB).float()
    time.sleep(0.5)  # the start-up window is written under a prefill that is not run here
    meter = Rounds()
    began = time.perf_counter()
    speculate(target, draft, said, first, stop=lambda out: out.shape[1] >= 4 + tokens, meter=meter)
    seconds = time.perf_counter() - began
    kept = sum(kept for _, kept in meter.rounds)
    return {
        "tokens": tokens,
        "steps": len(meter.rounds),
        "seconds": seconds,
        "tokens_per_s": (tokens - 1) / seconds,
        "kept": kept / max(len(meter.rounds), 1),
        "failed": meter.failed,
        "counters": draft.counters(),
    }


def pipeline(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Alone, in turns, at once; and the simulator."""
    context = given.contexts[0]
    given.draft_context = given.draft_context or context
    target = build(
        given.target, given, context, (1, given.window, given.window + 1), given.device, given.keep
    )
    warm(target, (1, given.window, given.window + 1))
    found = []
    alone = decode(target, Off().open(None), context, given.tokens)  # type: ignore[arg-type]
    found.append({"case": "alone", **alone})
    worker = _remote.start("decode_gpu:serve", options(given), 120.0)
    try:
        worker.wait(READY, 1200.0)
        choice = Parallel(model="shape", window=given.window)
        state = Pipeline(_remote.Remote(worker, VOCAB), choice, [target.model.device])
        once = decode(target, state, context, given.tokens)
    finally:
        worker.close()
    found.append(
        {
            "case": "parallel",
            "window": given.window,
            **once,
            "speedup": once["tokens_per_s"] / alone["tokens_per_s"],
        }
    )
    draft = build(given.draft, given, given.draft_context, (1, 2, 4), given.device)
    warm(draft, (1, 2, 4))
    own = Given(draft, given.draft_context)
    turns = decode(target, own.open(given.window), context, given.tokens)
    found.append(
        {
            "case": "sequential",
            "window": given.window,
            **turns,
            "speedup": turns["tokens_per_s"] / alone["tokens_per_s"],
        }
    )
    costs = simulate.Costs(step=1 / alone["tokens_per_s"], draft=once["counters"]["draft_step_s"])
    told = {
        kind: simulate.speedup(given.keep, given.window, costs, parallel=kind == "parallel")
        for kind in ("parallel", "sequential")
    }
    last = {"case": "verdict", "keep": given.keep, "replayed": True, "c": costs.ratio, "simulated": told}
    found.append({**last, "of_simulated": found[1]["speedup"] / told["parallel"]})
    return found


class Given:
    """A draft in turns over a runner whose prompt is assumed."""

    def __init__(self, runner: Counting, context: int) -> None:
        self.runner, self.context = runner, context

    def open(self, window: int) -> Drafter:
        runner, context = self.runner, self.context

        class Ready(Drafter):
            def begin(self, prompt: Prompt) -> None:
                runner.truncate(context)
                self._warp, self._generator = None, None
                self._ids, self._left = prompt.ids[0], prompt.max_new_tokens
                self._pending = self._ids[:0]

        return Ready(runner, runner.model.device, window, VOCAB)


def options(given: argparse.Namespace) -> dict[str, Any]:
    """What the second process is told."""
    other = given.device
    if given.device.startswith("cuda") and torch.cuda.device_count() > 1:
        other = "cuda:1"
    plain = {k: v for k, v in vars(given).items() if isinstance(v, int | float | str | bool | None)}
    return {"model": json.dumps(plain), "device": other, "vocab": VOCAB}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["steps", "pipeline"])
    parser.add_argument("--shapes", nargs="*", default=["qwen2.5-vl-7b"])
    parser.add_argument("--draft", default="qwen2.5-vl-7b")
    parser.add_argument("--target", default="qwen2.5-vl-32b")
    parser.add_argument("--contexts", type=int, nargs="*", default=[25_088])
    parser.add_argument(
        "--draft-context", type=int, default=0, help="columns the draft holds; 0: as many as the target"
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 6])
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--keep", type=float, default=0.81)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--read-log2", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    given = parser.parse_args()
    log = Log(given.out, given.device) if given.out else None
    print(json.dumps({"environment": environment(given.device)}))
    for row in (steps if given.what == "steps" else pipeline)(given):
        print(json.dumps(row), flush=True)
        if log is not None:
            log.row(**row)


if __name__ == "__main__":
    main()
