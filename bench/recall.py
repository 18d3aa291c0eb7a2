"""Planted heads at a model's shape: what each method recalls of dense attention, and how far its output is, at equal FLOPs.

    python bench/recall.py --device cuda --out bench/results/recall_h200_202611.jsonl
    python bench/recall.py --device cuda --processes 6 --limit 120 --out recall.jsonl   # heads side by side on one GPU
    python bench/recall.py --rows one.jsonl other.jsonl --out all.jsonl                 # files put together

The pattern of "searched" is found by the search (Algorithm 4) on one draw of a planted head (`heads.py`) at the first
length; every method then meets other draws, at every length, shortest first. Rivals get the share of pairs that the searched
pattern lists there; the strided pattern has no budget and lists what it lists. The same command with the same --out goes on
with the heads and lengths that it lacks.

recall   the softmax weight that falls on the pairs a method computes, mean over sampled rows: exp(lse - dense lse)
error    norm of (out - dense) over the norm of dense, over the sampled rows
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import queue
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from heads import PLANTED, draw
from stopping import ends_in_order
from timing import Log, environment

from mmaccel.backends import select
from mmaccel.core.prefill.sparse import SparsePattern, attend_plan
from mmaccel.core.recipe import Recipe
from mmaccel.policies.sparse.block_topk import BlockTopK
from mmaccel.policies.sparse.per_head import LayerHeads
from mmaccel.search.measure import Bench, Inside, decided, frame_tokens, present, scored
from mmaccel.search.space import KINDS, Ledger, Scale, built, kinds_of, levelled
from mmaccel_lab.eval.rivals import PRUNERS, RIVALS, level

SAMPLED = 1024
"""Rows on which recall and error are taken."""
TOLERANCE = 0.05
METHODS = ("searched", *(name for name in RIVALS if name not in PRUNERS))
"""There is no model here whose tokens could be dropped."""


def searched(inside: Inside, backend: str, extended: bool = False) -> LayerHeads:
    """What the search chooses for each head of one draw, all candidates at the target's listed pairs; extended, among rows
    of ours too."""
    bench, block = Bench(inside, backend), 64
    modalities = present(inside.layout)
    scale = Scale(inside.layout.length, frame_tokens(inside.layout), block, extended)
    ledger = Ledger("pairs", [], lambda pattern: bench.cost(pattern, scale.target(), 0))
    kinds = kinds_of(KINDS, modalities)
    space = levelled(scale, kinds, modalities, ledger, TOLERANCE, share=ledger.share)
    heads = scored(bench, space, modalities, block, TOLERANCE)
    chosen = {n: built(decided(space, head, block, TOLERANCE)["pattern"]) for n, head in enumerate(heads)}
    return LayerHeads(block=block, named=chosen)


def exact(inside: Inside, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Dense output [H, R, D] and log-sum-exp [H, R] of some rows, in float32, keys a stretch at a time."""
    query = inside.query[0][:, rows].float()
    top = torch.full(query.shape[:2], -math.inf, device=query.device)
    total, out = torch.zeros_like(top), torch.zeros_like(query)
    for begin in range(0, inside.key.shape[2], 1 << 15):
        some = slice(begin, begin + (1 << 15))
        score = query @ inside.key[0][:, some].float().transpose(1, 2) * inside.scale
        column = torch.arange(score.shape[2], device=score.device) + begin
        score.masked_fill_(column > rows[:, None], -math.inf)
        new = torch.maximum(top, score.amax(2))
        weight = torch.exp(score - new[..., None])
        fade = torch.exp(top - new)
        total = total * fade + weight.sum(2)
        out = out * fade[..., None] + weight @ inside.value[0][:, some].float()
        top = new
    return out / total[..., None], top + total.log()


def judged(
    pattern: SparsePattern, inside: Inside, rows: Tensor, dense: tuple[Tensor, Tensor], kernel: Any
) -> dict[str, float]:
    """Share listed, recall and error of one pattern."""
    n = inside.layout.length
    plan = pattern.plan(inside.query, inside.key, inside.layout, inside.layout)
    if plan is None:
        return {"kept": 1.0, "recall": 1.0, "error": 0.0}
    out, lse = attend_plan(plan, inside.query, inside.key, inside.value, inside.scale, kernel)
    recall = torch.exp(lse[0][:, rows].float() - dense[1]).clamp(max=1)
    if plan.dense is not None:
        # Heads that a plan leaves dense have no log-sum-exp; what is not a number elsewhere shows.
        recall[list(plan.dense.heads)] = 1.0
    wrong = (out[0][:, rows].float() - dense[0]).flatten(1).norm(dim=1)
    return {
        "kept": float(plan.listed_pairs().mean()) / (n * (n + 1) / 2),
        "recall": float(recall.mean()),
        "error": float((wrong / dense[0].flatten(1).norm(dim=1)).mean()),
    }


def listed(fields: Mapping[str, Any], inside: Inside) -> float:
    """The share of causal pairs that a rival lists."""
    pattern, n = Recipe.load(fields).sparse, inside.layout.length
    if isinstance(pattern, BlockTopK):
        # How many blocks it keeps does not hang on which; to look which takes seconds at a million tokens.
        return pattern.max_blocks_total(n, n) * pattern.block**2 / (n * (n + 1) / 2)
    plan = pattern.plan(inside.query, inside.key, inside.layout, inside.layout)
    return 1.0 if plan is None else float(plan.listed_pairs().mean()) / (n * (n + 1) / 2)


def methods(ours: SparsePattern, inside: Inside, kernel: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Ours and every rival at its share, judged on the same rows."""
    n = inside.layout.length
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(2))[:SAMPLED].sort().values
    rows = rows.to(inside.query.device)
    dense = exact(inside, rows)
    mine = judged(ours, inside, rows, dense, kernel)
    yield "searched", mine
    for rival, how in RIVALS.items():
        if rival not in METHODS:
            continue
        fields, _ = level(how, min(1.0, mine["kept"]), partial(listed, inside=inside))
        yield rival, judged(Recipe.load(fields).sparse, inside, rows, dense, kernel)


def means(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The mean over the heads that were judged, for each method and length."""
    held: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        held[row["tokens"], row["method"]].append(row)
    for (n, method), some in held.items():
        mean = {name: sum(row[name] for row in some) / len(some) for name in ("kept", "recall", "error")}
        yield {"case": "mean", "tokens": n, "method": method, "heads": [row["case"] for row in some], **mean}


def shown(row: Mapping[str, Any]) -> str:
    kept, recall, error = (f"{row[name]:.4f}" for name in ("kept", "recall", "error"))
    return "{case:16} {tokens:8} {method:12}".format(**row) + f" kept {kept} recall {recall} error {error}"


def together(paths: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The environments and the rows of several files, without their means; a line that was cut is left out."""
    found: list[dict[str, Any]] = []
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    # A head whose judgement was cut off was judged anew.
    rows = {
        (row["case"], row["tokens"], row["method"]): row for row in found if row.get("case", "mean") != "mean"
    }
    return [row for row in found if "environment" in row], list(rows.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1 << 17, 1 << 19, 1 << 20])
    parser.add_argument("--frame", type=int, default=196, help="tokens of a frame")
    parser.add_argument("--heads", nargs="+", choices=list(PLANTED), default=list(PLANTED))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extended", action="store_true", help="rows of ours are searched beside Table 3's")
    parser.add_argument("--processes", type=int, default=1, help="heads are judged side by side")
    parser.add_argument("--limit", type=float, default=7 * 86400.0, help="seconds, of several processes")
    parser.add_argument("--rows", nargs="+", help="judge nothing: put the rows of these files together")
    options = parser.parse_args(argv)
    if options.rows:
        about, rows = together(options.rows)
        with Path(options.out).open("w", encoding="utf-8") as file:
            for line in [*about, *rows, *means(rows)]:
                file.write(json.dumps(line) + "\n")
        print("\n".join(shown(row) for row in means(rows)))
        return
    device = torch.device(options.device)
    rows = together([options.out])[1] if Path(options.out).is_file() else []
    counts = Counter((row["case"], row["tokens"]) for row in rows)
    # A head was judged where every method has its row.
    judged_at = {at for at, count in counts.items() if count == len(METHODS)}
    rows = [row for row in rows if (row["case"], row["tokens"]) in judged_at]
    options.todo = [(n, name) for n in options.tokens for name in options.heads if (name, n) not in judged_at]
    log = Log(options.out, device)
    print(environment(device))
    for row in apart(options) if options.processes > 1 else judgements(options, options.todo):
        rows.append(row)
        log.row(**row)
        print(shown(row), flush=True)
    held = {(row["case"], row["tokens"], row["method"]) for row in rows}
    if any((name, n, method) not in held for n, name in options.todo for method in METHODS):
        print("not complete: the same command goes on.", file=sys.stderr)
        return
    for row in means(rows):
        log.row(**row)
        print(shown(row), flush=True)


def judgements(options: argparse.Namespace, todo: Sequence[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    """The rows of some (tokens, head)."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = select.choose(device) if options.backend == "auto" else options.backend
    kernel = select.get(backend, device)
    ours: dict[str, LayerHeads] = {}
    for n, name in todo:
        if name not in ours:
            began = time.perf_counter()
            first = draw(name, options.tokens[0], options.frame, options.seed, dtype, device)
            ours[name] = searched(first, backend, options.extended)
            del first
            print(f"{name:16} searched in {time.perf_counter() - began:.1f} s", flush=True)
        inside = draw(name, n, options.frame, options.seed + 1, dtype, device)
        chosen = {str(h): repr(p) for h, p in ours[name].named.items()}
        for method, figures in methods(ours[name], inside, kernel):
            row = {"case": name, "tokens": n, "method": method, **figures}
            yield {**row, **({"pattern": chosen} if method == "searched" else {})}


def _work(options: argparse.Namespace, todo: Sequence[tuple[int, str]], told: Any) -> None:
    try:
        for row in judgements(options, todo):
            told.put(row)
        told.put(None)
    except Exception as error:
        told.put(error)


def apart(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of `judgements` by several processes, each with heads of its own, until the time is up."""
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    ends = time.monotonic() + options.limit
    heads = list(dict.fromkeys(name for _, name in options.todo))
    processes = []
    for number in range(min(options.processes, len(heads))):
        mine = [one for one in options.todo if one[1] in heads[number :: options.processes]]
        processes.append(context.Process(target=_work, args=(options, mine, told), daemon=True))
    running = len(processes)
    with ends_in_order():
        try:
            for process in processes:
                process.start()
            while running and (left := ends - time.monotonic()) > 0:
                try:
                    row = told.get(timeout=min(5.0, left))
                except queue.Empty:
                    if not any(process.is_alive() for process in processes):
                        return
                    continue
                if isinstance(row, Exception):
                    raise row
                if row is None:
                    running -= 1
                else:
                    yield row
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()


if __name__ == "__main__":
    main()
