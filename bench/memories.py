"""Memories of streams at size: the same questions to all of them, on worlds of several lengths, at several budgets.

    python bench/memories.py --model tiny-ov --processes 12 --limit 480 --out memories.jsonl
    python bench/memories.py --plan parts --model tiny-ov --processes 12 --limit 120 --out parts.jsonl
    python bench/memories.py --plan systems --model tiny-ov --frames 500 4000 --worlds 20 10 --budgets 64 --cards 7 \
        --scenes 5 --most 20 --told 64 --processes 16 --limit 500 --out systems.jsonl --table systems.md
    python bench/memories.py --memory mosaic rekv livevlm streammem --call 1 --frames 256 --worlds 5 --out one.jsonl
    python bench/memories.py --rows one.jsonl other.jsonl --out all.jsonl --brief bench/results/memories_h200_202611.jsonl

The last puts the answers of several runs together; --brief leaves them out (they are 14 MB at the sizes of the first).
--plan systems ingests films under nothing, each of pattern, memory and draft, each two, and all three; --table writes what
`system_table.py` makes of the rows.

Processes take worlds, a memory at a time, in turns, on all visible devices with --device cuda. One watch of a world serves
all budgets that change nothing of what is kept, and the vision tower looks at a world once for memories that follow one
another. Every answer is written when it is there, so that a run that is broken off, by --limit or an interrupt too, has lost
what was not asked yet and no more. The same command with the same --out goes on with the watches that are not complete.

Rows by `what`: "answer" (see `mmaccel_lab.eval.stream.Shot`), "watch" (`Watch`: time, counters, clusters against the truth;
its questions were all asked), and at the end, over the questions that every memory was asked: "mean" (accuracy and
recall with 95% intervals, of each memory, budget, kind and length), "paired" (the first memory against each other one, and
mosaic against rekv, on the same questions), "watches", "idle" (what should have happened in a memory's streams, retrievals,
splits, nine frames in ten off the device, and did not: a memory that did not have to work shows nothing).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import jobs
import system_table
from timing import Log, documented_parser, read_rows, write_rows

from mmaccel import load_model, load_processor
from mmaccel.core.recipe import read_recipe_fields
from mmaccel.core.rows import write_atomically
from mmaccel_lab.cli.stream import memory_of
from mmaccel_lab.eval.purity import Clustering
from mmaccel_lab.eval.stream import KINDS, Entry, Shot, Watch, memories_for, shots, together
from mmaccel_lab.eval.stream_tables import paired, rows, watches, whole
from mmaccel_lab.world import World

Memory = str | dict[str, Any]
Job = tuple[int, int, str, int | None]
"""A watch of a world: its frames and seed, and what `watches_of` calls it."""


def _mosaic(label: str, **fields: Any) -> Memory:
    return {"name": "mosaic", "label": f"mosaic, {label}", **fields}


FRAMES = dict(index="frames", encode_frames=0, reps=0, local=0, positions="compact")
"""Fields of mosaic that make it ReKV: an index of frames, and nothing beside."""


def _frames(label: str, **fields: Any) -> Memory:
    # Summary tokens closed up lose their time: what has any stands at its true positions.
    true = {"positions": "original"} if fields.get("reps", 0) != 0 else {}
    return {"name": "mosaic", "label": f"frames, {label}", **FRAMES, **true, **fields}


def _clusters(label: str, **fields: Any) -> Memory:
    return _mosaic(label, index={"name": "clusters", **fields})


PAPER = {name: value for name, value in read_recipe_fields("mosaic-paper")["kv"].items() if name != "name"}
"""Fields of the preset of the paper."""
OFF = 0.9
HAPPENS = ("recalled", "host_bytes_in", "eager_splits", "deferred", "singletons", "resolved")

MEMORIES = ("mosaic", "rekv", "livevlm", "streammem", "recent", "window", "no_cache", "full", "offload")

WINDOW_ALONE = _mosaic("window alone", encode_frames=0)
"""What passes see is the window: the default, called "mosaic", of rows from before passes retrieved."""

WORDS = {"index": {"name": "clusters", "ask_by": "words"}}
SPARSE: dict[str, Any] = {"sparse": {"name": "per_head", "table": "shipped"}, "dense_layers": [0, 1, 2]}
"""Three dense layers: with layer 0 alone dense questions about order are lost in long films (lab/LOG.md)."""
DRAFT = {"draft": {"name": "sequential", "kv": {"name": "mosaic", "window": 16, "local": 8}}}


def _film(label: str, kv: str, fields: Mapping[str, Any] | None = None, **beside: Any) -> Memory:
    return {"name": kv, "label": label, "ingest": True, "beside": beside, **(fields or {})}


PLANS: Mapping[str, Sequence[Memory]] = {
    "all": ["mosaic", WINDOW_ALONE, *MEMORIES[1:]],
    # What gives what: an index by frame or by cluster, retrieval by passes, summary tokens: each with and without.
    # `FRAMES` of frames that are indexed one by one is ReKV, answer for answer (tests/test_bench_memories.py).
    "parts": [
        "mosaic",
        WINDOW_ALONE,
        _mosaic("no summary tokens", reps=0),
        _mosaic("window alone, no summary tokens", encode_frames=0, reps=0),
        _frames("passes retrieve", encode_frames=8),
        _frames("summary tokens", reps=None),
        _frames("512 summary tokens", reps=512),
        _frames("passes retrieve, summary tokens", encode_frames=8, reps=None),
        _frames("passes retrieve, 512 summary tokens", encode_frames=8, reps=512),
        _frames("8 local frames, true positions", local=8, positions="original"),
        "rekv",
        "full",
    ],
    # Retrieval while frames come, by a pass or by each frame, and without; and the paper's side of all that is open.
    "retrieval": [
        "mosaic",
        _mosaic("retrieves 32 while watching", encode_frames=32),
        _mosaic("each frame retrieves", encode_by="frame"),
        WINDOW_ALONE,
        _mosaic("paper", **PAPER),
        "rekv",
    ],
    # What a question sees beside the frames it retrieves.
    "seen": [
        "mosaic",
        _mosaic("no pseudo tokens", reps=0),
        _mosaic("no local frames", local=0),
        _mosaic("neither", reps=0, local=0),
        _mosaic("compact", positions="compact"),
        "rekv",
        {"name": "rekv", "label": "rekv, local", "local": 8},
        {"name": "rekv", "label": "rekv, positions", "positions": "original"},
    ],
    # What the paper leaves open.
    "choices": [
        "mosaic",
        _mosaic("all summary tokens", reps=None),
        _clusters("looks choose", first_stage="look"),
        _clusters("questions split", splits="all"),
        _clusters("cosine retrieval", similarity="cosine"),
        _clusters("2 a cluster", semantic=2),
        _clusters("8 a cluster", semantic=8),
        "rekv",
    ],
    # Films ingested by the three systems (lab/LOG.md says which), alone and together; and other memories.
    "systems": [
        _film("sparse + memory + draft", "mosaic", WORDS, **SPARSE, **DRAFT),
        _film("nothing", "full"),
        _film("sparse", "full", **SPARSE),
        _film("memory", "mosaic", WORDS),
        _film("draft", "full", **DRAFT),
        _film("sparse + memory", "mosaic", WORDS, **SPARSE),
        _film("sparse + draft", "full", **SPARSE, **DRAFT),
        _film("memory + draft", "mosaic", WORDS, **DRAFT),
        _film("memory: mosaic by the mean query", "mosaic"),
        *(_film(f"memory: {name}", name) for name in ("rekv", "streammem")),
    ],
    # Films ingested: what a question asks by, and patterns for all heads.
    "films": [
        *(_film("mosaic", "mosaic"), _film("nothing", "full"), _film("mosaic, by words", "mosaic", WORDS)),
        *(_film("table", "mosaic", **SPARSE), _film("table, by words", "mosaic", WORDS, **SPARSE)),
        _film("table, no summary tokens", "mosaic", {"reps": 0}, **SPARSE),
        *(_film(name, "mosaic", sparse=name) for name in ("grid", "vertical_slash", "a_shape", "block_topk")),
    ],
}
"""Memories that are compared with one another; a mapping is a policy's fields, and the `label` it is shown under."""


class Asker:
    """The models of a process, and what it asks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        dtype = getattr(torch, options.dtype)
        self.model = load_model(options.model, device=options.device, dtype=dtype)
        self.processor = load_processor(options.model)
        self.watches = watches_of(self.processor, options)

    def __call__(self, job: Job) -> Iterator[dict[str, Any]]:
        """Rows of one watch of a world as they come."""
        frames, seed, *watch = job
        options, seen = self.options, list[Watch]()
        by = {"processes": options.processes, "place": list(self.watches).index(tuple(watch))}
        for shot in shots(
            self.model,
            self.processor,
            self.watches[tuple(watch)],
            [World.generate(seed, frames)],
            kinds=options.kinds,
            still=options.still,
            call=options.call,
            most=options.most,
            told=options.told,
            watched=seen.append,
        ):
            yield {"what": "answer", **by, **shot.to_dict()}
        yield from ({"what": "watch", **by, **one.to_dict()} for one in seen)


def watches_of(processor: Any, options: argparse.Namespace) -> dict[tuple[str, int | None], list[Entry]]:
    """What one watch of a world serves, by what its row has: the first memory's name, and the last budget."""
    found = together(memories_for(processor, chosen(options), options.budgets, options.window))
    return {(some[0].name, some[-1].budget): some for some in found}


def chosen(options: argparse.Namespace) -> list[Memory]:
    """The memories of a run: those named, or the plan's."""
    by = {one if isinstance(one, str) else one["label"]: one for one in PLANS[options.plan]}
    found = [by.get(name) or memory_of(name) for name in options.memory or by]
    for one in found if torch.device(options.device).type == "cuda" else ():
        if isinstance(one, dict) and "sparse" in one.get("beside", ()):
            # "auto" would find that no pattern pays on models so small.
            one["beside"] = {"backend": "triton", **one["beside"]}
    return found


def worlds(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(frames, seed) of the worlds, in an order that has all lengths in proportion wherever it is broken off; each length
    has its own, the first of so many `--cards` and `--scenes`."""
    counts = options.worlds * len(options.frames) if len(options.worlds) == 1 else options.worlds
    if len(counts) != len(options.frames):
        raise SystemExit("--worlds: give one number, or one for each of --frames.")
    turns = []
    for frames, count in zip(options.frames, counts, strict=True):
        every = itertools.count(options.seed + 100_003 * frames)
        made = (World.generate(seed, frames) for seed in every)
        rich = (one for one in made if len(one.cards) >= options.cards)
        full = (one.seed for one in rich if len(one.questions("scene")) >= options.scenes)
        turns += [((n + 1) / count, frames, seed) for n, seed in enumerate(itertools.islice(full, count))]
    return [(frames, seed) for _, frames, seed in sorted(turns)]


def run(options: argparse.Namespace, left: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """Rows as they come, until all is done or the time is up."""
    end = time.monotonic() + options.limit
    with contextlib.closing(jobs.rows(Asker, options, left, options.processes)) as coming:
        for row in coming:
            if row is not None:
                yield row
            if time.monotonic() > end:
                print(f"the time is up after {options.limit} s", flush=True)
                return


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of some files that say what they are, without their conclusions."""
    found = read_rows(paths)
    return [row for row in found if row.get("what") in ("answer", "watch") or "environment" in row]


def conclusions(found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Over the questions that every memory was asked: by length, and over all lengths ("all")."""
    # A watch that was broken off was begun again: what is the same but for its time counts once. Memories in their order.
    found = sorted(found, key=lambda row: row.get("place", 0))
    by_question = {
        _key(row, "memory", "budget", "question"): row for row in found if row.get("what") == "answer"
    }
    watched = {_key(row, "memory", "budget"): row for row in found if row.get("what") == "watch"}
    answers = whole([Shot(**_fields(row)) for row in by_question.values()])
    seen = [Watch(**_watch(row)) for row in watched.values()]
    lengths = sorted({shot.frames for shot in answers})
    for length in [*lengths, *(["all"] if len(lengths) > 1 else [])]:
        some = [shot for shot in answers if length in (shot.frames, "all")]
        names = list(dict.fromkeys(shot.memory for shot in some))
        for row in rows(some):
            yield {"what": "mean", "length": length, **row}
        pairs = [(names[0], other) for other in names[1:]]
        if length == "all" or len(lengths) == 1:
            pairs += [(one, "rekv") for one in names[1:] if "rekv" in names and one != "rekv"]
        for one, other in pairs:
            for row in paired(some, one, other):
                yield {"what": "paired", "length": length, **row}
        for row in watches([one for one in seen if length in (one.frames, "all")]):
            yield {"what": "watches", "length": length, **row}
            if (absent := idle(row)) is not None:
                yield {"what": "idle", "length": length, "memory": row["memory"], "absent": absent}


def idle(row: Mapping[str, Any]) -> list[str] | None:
    """Of the means over a memory's watches: what should have happened and did not; None of memories that keep nothing
    on the host, or everything at hand."""
    told = row["counters"]
    if "recalled" not in told or "host_bytes_in" not in told:
        return None
    absent = [name for name in HAPPENS if name in told and not told[name]]
    off = 1 - told.get("resident", 0.0) / told["units"]
    return absent if off >= OFF else [*absent, f"{off:.0%} of the frames off the device, not {OFF:.0%}"]


def _key(row: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("frames", "seed", *names))


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("what", "processes", "place")}


def _watch(row: Mapping[str, Any]) -> dict[str, Any]:
    clusters = {level: Clustering(**one) for level, one in row["clusters"].items()}
    return {**_fields(row), "clusters": clusters}


def shown(row: Mapping[str, Any]) -> str | None:
    """A line of the conclusions; None for what is only written."""
    if row["what"] == "mean":
        interval = f"{row['accuracy']:6.1%} ({row['low']:.1%} to {row['high']:.1%})"
        name = f"{row['memory']:34} {row['budget'] or 'all':>4} {row['kind']:8} n {row['questions']:5}"
        seen = f"recall {row['recall']:.3f} alone {row['alone']:.3f} seen {row['seen']:.0f}"
        return f"{row['length']:>5} {name} {interval:27} {seen}"
    if row["what"] == "paired" and row["kind"] == "all":
        gain = f"{row['gain']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})"
        return f"{row['length']:>5} {row['memory']} over {row['rival']} at {row['budget']}: {gain}"
    if row["what"] == "idle" and row["absent"]:
        return f"{row['length']:>5} {row['memory']}, what did not happen: {', '.join(row['absent'])}"
    if row["what"] == "watches":
        levels = "; ".join(
            f"{level} {one['clusters']:.0f} purity {one['purity']:.3f} (chance {one['chance']:.3f}) rand {one['rand']:.3f} "
            f"cards alone {one['cards']:.2f}"
            for level, one in row["clusters"].items()
        )
        return f"{row['length']:>5} {row['memory']} {row['ms_per_frame']:.2f} ms a frame; {levels}"
    return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--model", default="tiny-ov")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", required=True, type=Path, help="file of result rows")
    parser.add_argument("--plan", choices=list(PLANS), default="all", help="memories to compare")
    parser.add_argument("--memory", nargs="+", help="of the plan, or as mmaccel-lab eval stream takes them")
    parser.add_argument("--frames", nargs="+", type=int, default=[500, 1000, 2000, 4000], help="lengths")
    parser.add_argument(
        "--worlds", nargs="+", type=int, default=[40, 24, 10, 4], help="streams of each length"
    )
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--window", type=int, default=16, help="frames of the encoding window")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--still", type=float, default=0.3, help="share of the frames in which nothing moves")
    parser.add_argument("--call", type=int, help="frames a memory is given at a time (many)")
    parser.add_argument("--most", type=int, default=4, help="questions of a kind about a world, at most")
    parser.add_argument("--cards", type=int, default=1, choices=range(1, 9), help="of a world, at least")
    parser.add_argument("--scenes", type=int, default=0, choices=range(8), help="asked about, at least")
    parser.add_argument("--told", type=int, default=0, help="tokens of a caption asked for last, at most")
    parser.add_argument("--seed", type=int, default=0, help="training has seen none below 2**31")
    parser.add_argument(
        "--processes", type=int, default=1, help="which take worlds, and visible devices, in turns"
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no answer is waited for"
    )
    parser.add_argument("--rows", nargs="+", type=Path, help="ask nothing: put rows of these files together")
    parser.add_argument(
        "--brief", type=Path, help="a second file, of what is concluded from the answers alone"
    )
    parser.add_argument("--table", type=Path, help="a Markdown file, of --plan systems")
    options = parser.parse_args(argv)
    with jobs.interruptible(options.out):
        if not options.rows:
            measured(options)
        conclude(options)


def conclude(options: argparse.Namespace) -> None:
    """Write what follows from the rows that there are, and print it."""
    found = read(options.rows or [options.out])
    concluded = list(conclusions(found))
    write_rows(options.out, [*found, *concluded])
    if options.brief is not None:
        short = [row for row in [*found, *concluded] if row.get("what") not in ("answer", "watch")]
        write_rows(options.brief, short)
    if options.table is not None:
        write_atomically(options.table, system_table.markdown(found))
    print("\n".join(line for row in concluded if (line := shown(row)) is not None))


def measured(options: argparse.Namespace) -> None:
    """Ask, and write what comes."""
    # What is wrong with a memory is better known before processes start.
    watches = watches_of(load_processor(options.model), options)
    there = read([options.out] if options.out.exists() else [])
    done = {_key(row, "memory", "budget") for row in there if row.get("what") == "watch"}
    every = [(*world, *watch) for world in worlds(options) for watch in watches]
    left = [job for job in every if job not in done]
    log, began = Log(options.out, torch.device(options.device)), time.monotonic()
    many = len(every) - len(left)
    with contextlib.closing(run(options, left)) as coming:
        for row in coming:
            log.row(**row)
            if row["what"] == "watch":
                many += 1
                told = f"{row['memory']}, {row['frames']} frames, seed {row['seed']}: {row['seconds']:.1f} s"
                print(f"{many} of {len(every)} after {time.monotonic() - began:.0f} s ({told})", flush=True)


if __name__ == "__main__":
    main()
