"""Units of a stream across the wire: every way of bringing frames back from the host, at a 7B model's shape.

    python bench/transfer.py --device cuda --out bench/results/transfer_h200_202601.jsonl

Of `--frames` frames kept for `--layers` layers, `--retrieve` are asked for in runs of 1, 4 and 16 neighbours, other ones at
each layer, as a question does; a row gives the seconds of the whole question, GB/s, and the copies it took. Ways: "pieces"
(a copy for the keys and one for the values of each frame, as ReKV has it), "gather" (one launch a layer, the index from the
host), "index" (the same, the index already on the device). Then layers that compute for as long as their transfer takes,
their frames fetched ahead or not, through what mosaic fetches with. Rows are printed as JSON and added to `--out`.
Without a CUDA device, sizes are small and figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, compare, measure

from mmaccel.policies.kv._prefetch import Prefetcher
from mmaccel.policies.kv.store import HostStore, UnitShape
from mmaccel.policies.kv.store.slabs import in_units

RUNS = (1, 4, 16)
WAYS = ("pieces", "gather", "index")


class CopiesEach(HostStore):
    """A store that brings keys and values of every unit by a copy of their own, as ReKV moves them."""

    indexed = False  # type: ignore[assignment]

    def fetch(
        self, layer: int, units: Sequence[int], out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.buffer(len(units)) if out is None else out
        wire = self.lanes.wire

        def work() -> None:
            for at, unit in enumerate(units):
                for side, rows in enumerate(self.entry(layer, unit)[0]):
                    in_units(out, self.shape.tokens)[side, :, at].copy_(rows, non_blocking=True)

        wire.wait(self.lanes.compute.mark())
        began = wire.mark(timed=True)
        wire.run(work)
        self.lanes.compute.wait(self._end("seconds_in", began, fetches=1, copies_in=2 * len(units)))
        self.count_copied(len(units))
        return out[0], out[1]


def filled(options: argparse.Namespace) -> tuple[HostStore, float]:
    """A store that holds the stream, and the GB/s at which it went out."""
    shape = UnitShape(
        options.layers, options.groups, options.tokens, options.size, getattr(torch, options.dtype)
    )
    store = HostStore(shape, options.device, slab_bytes=options.slab_mib * 2**20)
    rows = options.chunk * options.tokens
    key = torch.randn(options.groups, rows, options.size, device=options.device).to(store.shape.dtype)
    value = -key
    store.reserve(options.frames)
    for first in range(0, options.frames, options.chunk):
        units = range(first, min(first + options.chunk, options.frames))
        for layer in range(options.layers):
            n = len(units) * options.tokens
            store.put(layer, units, key[:, :n], value[:, :n])
    counted = store.counters()
    return store, counted["bytes_out"] / counted["seconds_out"] / 1e9


def chosen(options: argparse.Namespace, run: int) -> list[list[int]]:
    """For each layer the frames that a question takes, ascending, in runs of `run` neighbours."""
    draw = random.Random(run)
    count, places = max(1, options.retrieve // run), options.frames // run
    starts = [sorted(draw.sample(range(places), min(count, places))) for _ in range(options.layers)]
    return [[start * run + i for start in some for i in range(run)] for some in starts]


def question(store: HostStore, asked: list[list[int]], way: str) -> Callable[[], None]:
    """All layers' frames, one layer after the other, into one buffer."""
    out = store.buffer(len(asked[0]))
    index = [torch.tensor(units, device=store.device) for units in asked]
    fetch = CopiesEach.fetch if way == "pieces" else HostStore.fetch

    def run() -> None:
        for layer, units in enumerate(asked):
            if way == "index":
                store.lanes.compute.wait(store.gather(store.table.rows()[layer][index[layer]], out)[1])
                store.count_copied(len(units))
            else:
                fetch(store, layer, units, out)  # type: ignore[arg-type]

    return run


def rows_of(store: HostStore, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for run in RUNS:
        asked = chosen(options, run)
        nbytes = sum(len(units) for units in asked) * store.shape.nbytes
        works = {way: question(store, asked, way) for way in WAYS}
        copies = {}
        for way, work in works.items():
            before = store.counters()["copies_in"]
            work()
            copies[way] = store.counters()["copies_in"] - before
        times = compare(works, warmup=options.warmup, repeats=options.repeats, device=options.device)
        for way in WAYS:
            rate = nbytes / times[way].median / 1e9
            found.append(
                dict(
                    case="question",
                    way=way,
                    run=run,
                    bytes=nbytes,
                    copies=copies[way],
                    gb_s=rate,
                    **times[way].row(),
                )
            )
    return found


def overlap(store: HostStore, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A question's layers with as much to compute as to bring, through what the memory brings them with: the next layer's
    frames fetched ahead, or each when it is needed; and the share of those fetched ahead that came before they were waited
    for."""
    asked = chosen(options, 4)
    alone = measure(question(store, asked, "gather"), warmup=1, repeats=3, device=options.device).median
    busy = torch.randn(options.work, options.work, device=options.device, dtype=torch.bfloat16)

    def product() -> None:
        torch.mm(busy, busy)

    one = measure(product, warmup=3, repeats=9, device=options.device).median
    products = max(1, round(alone / options.layers / one))
    fetcher = Prefetcher(store, options.layers, options.window, room=0)
    shape = 1, options.groups, options.window * options.tokens, options.size
    pair = tuple(torch.zeros(shape, dtype=store.shape.dtype, device=options.device) for _ in range(2))
    wanted = [torch.tensor(units, device=options.device) for units in asked]
    out = store.buffer(len(asked[0]))

    def brought(ahead: bool) -> Callable[[], None]:
        def run() -> None:
            fetcher.begin(options.frames)
            for layer, entries in enumerate(wanted):
                code = fetcher.codes(layer, entries)
                ready = fetcher.bring(layer, entries, code, len(entries), out, pair)  # type: ignore[arg-type]
                if ahead and layer + 1 < options.layers:
                    fetcher.prefetch(layer + 1, fetcher.predict_codes(layer + 1, wanted[layer + 1]))
                store.lanes.compute.wait(ready)  # type: ignore[arg-type]
                for _ in range(products):
                    product()

        return run

    def computing() -> None:
        for _ in range(products * options.layers):
            product()

    works = {"ahead": brought(True), "waiting": brought(False), "computing": computing}
    times = compare(works, warmup=options.warmup, repeats=options.repeats, device=options.device)
    counted = fetcher.counts()
    early = counted["in_time"] / max(1.0, counted["covered"])
    return [
        dict(case="overlap", way=way, against_s=alone, products=products, early=early, **times[way].row())
        for way in works
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    for name, default, told in (
        ("frames", 1800, "frames of the stream"),
        ("retrieve", 64, "frames a question takes"),
        ("layers", 28, "layers"),
        ("groups", 4, "key/value heads"),
        ("tokens", 196, "tokens of a frame"),
        ("size", 128, "head size"),
        ("chunk", 16, "frames that go out together"),
        ("slab-mib", 256, "MiB of a slab"),
        ("window", 76, "frames that each layer has on the device"),
        ("work", 2048, "side of the matrices of the computing layers"),
        ("repeats", 9, "timed runs"),
        ("warmup", 2, "runs before"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=told)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options = parser.parse_args(argv)
    log = Log(options.out, options.device)
    shape = {
        name: getattr(options, name) for name in ("frames", "retrieve", "layers", "groups", "tokens", "size")
    }
    store, out_rate = filled(options)
    rows = [dict(case="put", way="copies", gb_s=out_rate), *rows_of(store, options), *overlap(store, options)]
    for row in rows:
        log.row(**row, **shape, dtype=options.dtype)
        print(json.dumps({**row, **shape, "dtype": options.dtype}))
    store.close()


if __name__ == "__main__":
    main()
