"""Decoding on two CPU cores: a trained pair, long captions, every way of drafting in one table.

    OMP_NUM_THREADS=1 python bench/decode_cpu.py --out bench/results/decode_cpu_202601.jsonl
    OMP_NUM_THREADS=1 taskset -c 2,3 python bench/decode_cpu.py --only "parallel 4" --out one.jsonl
    python bench/decode_cpu.py --rows one.jsonl other.jsonl --out bench/results/decode_cpu_202601.jsonl

    python bench/decode_cpu.py --temperature 0.7 --windows 1 --only "sequential 1" "parallel 1" --out kept.jsonl
    python bench/decode_cpu.py --rows one.jsonl other.jsonl --table

`--rows` puts rows together that were measured apart, of one case each for example, and tells the verdict over all of them;
`--table` prints them as the tables of docs/speed.md. With a temperature every way draws its tokens, each caption with a seed
of its own, the same for every way, and each caption is decoded plainly by drawing too.

The target runs in this process and, for `parallel`, its draft in a second one, each on one thread: so that the overlap is
real. Acceptance and times are measured, nothing is replayed. Every way generates the captions of the same videos, greedily;
windows of `sequential` and `parallel` are swept, and the best of each is held against the simulator at the measured share
kept and the measured steps. A way keeps its draft's process over all captions. Needs two idle cores: what else runs on
them is measured too.

Rows: `window` (a number or null), `a_step` (tokens a target step, the target's own counted), `kept` (drafted ones alone, a
round), `streak`, `tokens_per_s`, `speedup` over plain decoding and `against_sequential`, `same` (the tokens are the plain
ones). The row `memory` has the most bytes that the pipeline and drafting in turns hold. The last line tells what was to
be reached: `parallel` at 0.9 of the simulator's ratio over `sequential`, and at 1.15. Under sampling `same` is null,
for two ways draw different texts. The row `kept` holds the share of drafted tokens that `parallel 1` keeps against that of
`sequential 1`, to be within 0.02 of each other, with the standard error of the difference, and the difference that is
expected by the distributions of target and draft (`expected_gap`, of the row `expected`; see expected.py).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from expected import as_often, chances, shares
from held import Held
from timing import Log, environment, read_rows, write_rows

from mmaccel import load_model, load_processor
from mmaccel.cli import answer
from mmaccel.core.attach import accelerate
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval import simulate
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.eval.cases import Film

WINDOWS = (2, 3, 4, 5, 6, 8)
CONCLUSIONS = ("verdict", "kept")
UV = {"name": "uv", "retention": 0.1}
SPEC = {"name": "attention", "retention": 0.1, "compact": True}


def ways(windows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Name -> draft."""
    one = {"model": "beside"}
    found: dict[str, dict[str, Any]] = {}
    for window in windows:
        found[f"sequential {window}"] = {"name": "sequential", "window": window, **one}
    for window in windows:
        found[f"parallel {window}"] = {"name": "parallel", "window": window, "threads": 1, **one}
    return {
        **found,
        "parallel measured": {"name": "parallel", "threads": 1, **one},
        "parallel uv": {"name": "parallel", "threads": 1, "prune": UV, **one},
        "parallel uv chosen": {
            "name": "parallel",
            "threads": 1,
            "prune": UV,
            "prune_when": "measured",
            **one,
        },
        "parallel inline": {"name": "parallel", "window": 4, "process": False, **one},
        "sequential uv": {"name": "sequential", "window": 5, "prune": UV, **one},
        "tree": {"name": "tree", **one},
        "tree dynamic": {"name": "tree", "shape": "dynamic", **one},
        "specvlm": {"name": "tree", "prune": SPEC, **one},
        "text_only": {"name": "text_only", "window": 5, **one},
        "sparse_to_dense": {"name": "sparse_to_dense"},
        "prompt_lookup": {"name": "prompt_lookup"},
    }


def prompts(name: str, model: Any, frames: int, captions: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """The inputs of `captions` videos, each through a file."""
    processor = load_processor(name)
    with Film() as film:
        return [
            answer.prompt(processor, case.content(film.watch(case.world)), model)
            for case in caption_cases(frames, captions, seed)
        ]


def measured(
    model: Any,
    inputs: list[Any],
    tokens: int,
    drafts: Mapping[str, dict[str, Any]],
    repeats: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """A row for each way, over all prompts and repeats; each generation has a plain one just before it.

    A way stays attached over all of them, so that its draft's process is started once; the plain ones come from a twin. With
    a `temperature` tokens are drawn; the seeds count up from `seed`, one for each caption and repeat.
    """
    beside = twin(model)
    sampling = drawing(temperature)
    for name, draft in drafts.items():
        found: list[dict[str, Any]] = []
        with accelerate(model, Recipe(draft=draft)) as fast:  # type: ignore[arg-type]
            fast.generate(**inputs[0], max_new_tokens=8, do_sample=False)
            for number, one in enumerate(inputs * repeats, seed):
                torch.manual_seed(number)
                plain = answer.generate(beside, one, max_new_tokens=tokens, **sampling)
                torch.manual_seed(number)
                found.append(
                    answer.drafted(answer.generate(fast, one, max_new_tokens=tokens, **sampling), plain)
                )
        told = row(name, draft, found) | {"temperature": temperature}
        yield told | {"same": None} if temperature else told


def expected_shares(
    model: Any, draft: Any, inputs: list[Any], tokens: int, temperature: float, seed: int
) -> dict[str, Any]:
    """The shares that should be kept at a window of 1, over the texts that plain decoding draws."""
    found = []
    for number, one in enumerate(inputs, seed):
        torch.manual_seed(number)
        plain = answer.generate(model, one, max_new_tokens=tokens, **drawing(temperature))
        found.append(chances(model, draft, one, plain[0][0], temperature))
    return shares(found)


def drawing(temperature: float) -> dict[str, Any]:
    """Arguments of `generate`: temperature alone, or none for greedy decoding."""
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}


def twin(model: nn.Module) -> nn.Module:
    """A second model of the same weights, which what is attached to `model` does not touch."""
    return copy.deepcopy(model, {id(held): held for held in (*model.parameters(), *model.buffers())})


def row(name: str, draft: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table."""

    def middle(values: list[Any]) -> float | None:
        given = [value for value in values if value is not None]
        return statistics.median(given) if given else None

    keys = ("draft_step_s", "target_step_s", "keep_rate", "late", "ready_at_start", "draft_prompt_s")
    return {
        "case": name,
        "draft": draft,
        "window": draft.get("window"),
        "captions": len(found),
        "tokens": sum(one["tokens"] for one in found),
        "rounds": sum(one["rounds"] for one in found),
        "a_step": sum(one["tokens"] - 1 for one in found) / max(sum(one["steps"] for one in found), 1),
        "kept": sum(one["kept"] * one["rounds"] for one in found)
        / max(sum(one["rounds"] for one in found), 1),
        "streak": middle([one["streak"] for one in found]),
        "share": middle([one["share"] for one in found]),
        "tokens_per_s": middle([one["tokens_per_s"] for one in found]),
        "plain_per_s": middle([one["plain_per_s"] for one in found]),
        "speedup": middle([one["speedup"] for one in found]),
        "ttft_s": middle([one["ttft_s"] for one in found]),
        "same": all(one["same"] for one in found),
        "failed": [one["failed"] for one in found if one["failed"]],
        **{key: middle([one["counters"].get(key) for one in found]) for key in keys},
    }


def memory(model: Any, draft: Any, one: Mapping[str, torch.Tensor], tokens: int) -> dict[str, Any]:
    """The most bytes of weights, caches and all other tensors in a generation by the pipeline and by drafting in turns, both
    in this process, with a tenth of the video for the draft. What a second process takes beside its tensors is not in it."""
    told = {"model": draft, "window": 4, "prune": UV}
    most = {}
    for kind, more in (("sequential", {}), ("parallel", {"process": False})):
        recipe = Recipe(draft={"name": kind, **told, **more})  # type: ignore[arg-type]
        with Held([model, draft]) as held, accelerate(model, recipe) as fast:
            answer.generate(fast, one, max_new_tokens=tokens)
        most[kind] = held.most
    over = most["parallel"] / most["sequential"]
    return {"case": "memory", **most, "parallel_over_sequential": over, "reached": over <= 1.02}


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What was to be reached, from the rows: the pipeline over drafting in turns, both at their best window; None where rows
    of one of them are missing."""
    turns = [
        r for r in rows if r["case"].startswith("sequential ") and r["window"] and "prune" not in r["draft"]
    ]
    ahead = [
        r for r in rows if r["case"].startswith("parallel ") and r["window"] and "process" not in r["draft"]
    ]
    if not turns or not ahead:
        return None
    one = max(turns, key=lambda r: r["speedup"])
    two = max(ahead, key=lambda r: r["speedup"])
    # A step by itself is what plain decoding takes; what a pass of several rows takes more is the simulator's to leave out.
    costs = simulate.Costs(step=1 / two["plain_per_s"], draft=two["draft_step_s"])
    keep = two["share"]
    predicted = {
        "parallel": simulate.speedup(keep, two["window"], costs, parallel=True),
        "sequential": simulate.speedup(keep, one["window"], costs, parallel=False),
    }
    ratio, expected = two["speedup"] / one["speedup"], predicted["parallel"] / predicted["sequential"]
    best = {kind: simulate.best(keep, costs, parallel=kind == "parallel") for kind in predicted}
    return {
        "case": "verdict",
        "sequential": one["case"],
        "parallel": two["case"],
        "keep": keep,
        "c": costs.ratio,
        "against_sequential": ratio,
        "simulated": expected,
        "simulated_speedups": predicted,
        "simulated_best": best,
        "of_simulated": ratio / expected,
        "pipeline_of_simulated": two["speedup"] / predicted["parallel"],
        "reached": ratio >= 0.9 * expected and ratio >= 1.15,
    }


def run_of(row: dict[str, Any]) -> tuple[str, float]:
    """The model and the temperature of a row."""
    return row["model"], row.get("temperature", 0.0)


def runs_of(rows: list[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """The rows of each model and temperature."""
    return {run: [row for row in rows if run_of(row) == run] for run in dict.fromkeys(map(run_of, rows))}


def conclusions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdict and the row `kept` of each model and temperature, where the rows for them are there."""
    return [
        {"model": model, **({"temperature": heat} if heat else {}), **told}
        for (model, heat), some in runs_of(rows).items()
        for told in (verdict(some), as_often(some))
        if told is not None
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each model, temperature and way, with tokens a second of plain decoding in the same turns."""
    lines = [
        "| pair | T | way | a step | kept | tokens a second | plain | over plain |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        if "speedup" not in r or r["speedup"] is None:
            continue
        cells = [f"{r['model']}", f"{r.get('temperature', 0.0):g}", f"{r['case']}", f"{r['a_step']:.2f}"]
        cells += [
            f"{r['kept']:.2f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['plain_per_s']:.0f}",
            f"{r['speedup']:.2f} x",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for r in rows:
        if r.get("case") == "kept":
            one, two = r["parallel 1"], r["sequential 1"]
            lines.append(
                f"\n{r['model']}, T = {r.get('temperature', 0.0):g}, windows of 1: `parallel` keeps {one:.3f}, `sequential` "
                f"{two:.3f} of drafted tokens; apart {r['gap']:+.3f}, standard error {r['standard_error']:.3f}"
                + (f", expected {r['expected_gap']:+.3f}." if "expected_gap" in r else ".")
            )
    return "\n".join(lines)


def together(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of some files without their conclusions, and those over all of them; what stands twice counts once.

    Raises `SystemExit` where two rows of a case differ, of which one would have to be chosen, and where the videos do.
    """
    given = [row for row in read_rows(paths) if row.get("case") not in CONCLUSIONS]
    found = list({json.dumps(row): row for row in given}.values())
    cases = [row for row in found if "case" in row]
    twice = [key for key, count in Counter((*run_of(row), row["case"]) for row in cases).items() if count > 1]
    if twice:
        raise SystemExit(
            f"--rows: {twice[0][2]} of {twice[0][0]} was measured twice; give the file of one of them."
        )
    measures = [row for row in cases if row["case"] != "memory"]
    for run, rows in runs_of(measures).items():
        for name in ("frames", "captions", "seed"):
            if len(values := {row.get(name) for row in rows}) > 1:
                raise SystemExit(f"--rows: {name} of {run[0]} are {values}; give files that have the same.")
    return found + conclusions(measures)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-ov")
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--captions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.0, help="of drawn tokens; 0: greedy decoding")
    parser.add_argument("--windows", type=int, nargs="*", default=list(WINDOWS))
    parser.add_argument("--only", nargs="*", help="cases whose name begins so")
    parser.add_argument(
        "--rows", nargs="+", type=Path, help="measure nothing: put the rows of these files together"
    )
    parser.add_argument("--table", action="store_true", help="with --rows: print the rows as Markdown tables")
    parser.add_argument("--out")
    given = parser.parse_args(argv)
    if given.temperature < 0:
        parser.error(
            f"--temperature: {given.temperature:g}; give 0 for greedy decoding, or more to draw tokens."
        )
    if given.rows:
        if not given.out and not given.table:
            parser.error("--rows: give --out too, the file that all rows are written to, or --table.")
        found = together(given.rows)
        if given.out:
            write_rows(Path(given.out), found)
        if given.table:
            print(table(found))
        else:
            print("\n".join(json.dumps(row) for row in found if row.get("case") in CONCLUSIONS))
        return
    if given.table:
        parser.error("--table: give --rows too, the files of rows to print.")
    torch.set_num_threads(1)
    model = load_model(given.model, dtype=torch.float32)
    inputs = prompts(given.model, model, given.frames, given.captions, given.seed)
    drafts = ways(tuple(given.windows))
    if given.only:
        drafts = {n: d for n, d in drafts.items() if any(n.startswith(word) for word in given.only)}
    log = Log(given.out) if given.out else None
    print(json.dumps({"environment": environment()}))
    rows = []
    sampling = given.temperature, given.seed
    if given.temperature and (not given.only or "expected" in given.only):
        run = {"frames": given.frames, "captions": given.captions * given.repeats, "seed": given.seed}
        found = {"case": "expected", "model": given.model, "temperature": given.temperature, **run}
        draft = load_model(f"{given.model}-draft", dtype=torch.float32)
        found |= expected_shares(model, draft, inputs * given.repeats, given.tokens, *sampling)
        rows.append(found)
        print(json.dumps(found), flush=True)
        if log is not None:
            log.row(**found)
    for found in measured(model, inputs, given.tokens, drafts, given.repeats, *sampling):
        found |= {"model": given.model, "frames": given.frames, "seed": given.seed}
        rows.append(found)
        print(json.dumps(found), flush=True)
        if log is not None:
            log.row(**found)
    if not given.only or "memory" in given.only:
        draft = load_model(f"{given.model}-draft", dtype=torch.float32)
        found = {"model": given.model, **memory(model, draft, inputs[0], given.tokens)}
        print(json.dumps(found), flush=True)
        if log is not None:
            log.row(**found)
    for last in conclusions(rows):
        print(json.dumps(last))
        if log is not None:
            log.row(**last)


if __name__ == "__main__":
    main()
