"""What the way to the draft's process takes: a round trip of ids by its socket and by torch.distributed, and a prompt.

    python bench/wire.py --out bench/results/wire_cpu_202611.jsonl

"socket" is the wire of `core/worker.py`, "gloo" a send and a receive of as many ids; "prompt" the pixels of a long video,
sent and unpacked at the other end, "prompt pickled" the same through `torch.save`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, measure

from mmaccel.core.worker import READY, Wire, Worker
from mmaccel.policies.draft._parcel import pack, unpack

IDS, PARCEL, PICKLED = 101, 102, 103


def serve(wire: Wire, options: dict[str, Any]) -> None:
    """Answers ids with ids, and a prompt with how many numbers it held."""
    wire.send(READY)
    while (message := wire.receive(None)) is not None:
        count = 0
        if message.kind == PARCEL:
            count = sum(t.numel() for t in unpack(message.blob)[0].values())
        elif message.kind == PICKLED:
            count = sum(t.numel() for t in torch.load(io.BytesIO(message.blob), weights_only=True).values())
        wire.send(message.kind, *(message.numbers if message.kind == IDS else (count,)))


def asked(worker: Worker, kind: int, *numbers: int, blob: Sequence[Any] = ()) -> tuple[int, ...]:
    worker.send(kind, *numbers, blob=blob)
    said = worker.receive(60.0)
    assert said is not None and said.kind == kind
    return tuple(said.numbers)


def echo(folder: str, ids: int, rounds: int) -> None:
    """The other end of gloo."""
    from torch import distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=1, world_size=2)
    held = torch.zeros(ids, dtype=torch.int64)
    for _ in range(rounds):
        dist.recv(held, 0)
        dist.send(held, 0)
    dist.destroy_process_group()


def by_gloo(ids: int, rounds: int, times: Callable[[Callable[[], Any]], Any]) -> Any:
    from torch import distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        other = torch.multiprocessing.get_context("spawn").Process(target=echo, args=(folder, ids, rounds))
        other.start()
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=2)
        held = torch.arange(ids)

        def run() -> None:
            dist.send(held, 1)
            dist.recv(held, 1)

        found = times(run)
        dist.destroy_process_group()
        other.join(30)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--ids", type=int, default=6, help="ids of a message")
    parser.add_argument("--pixels", type=int, default=118_000_000, help="numbers of a prompt, in bfloat16")
    parser.add_argument("--repeats", type=int, default=1000)
    options = parser.parse_args(argv)
    log, device = Log(options.out), "cpu"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    worker = Worker("wire:serve", {})
    assert worker.wait(READY, 60.0) is not None
    ids = list(range(options.ids))
    warmup = min(50, options.repeats)

    def often(run: Callable[[], Any]) -> Any:
        return measure(run, warmup=warmup, repeats=options.repeats, device=device)

    found = {"socket": often(lambda: asked(worker, IDS, *ids))}
    found["gloo"] = by_gloo(options.ids, warmup + options.repeats, often)
    prompt = {"pixels": torch.zeros(options.pixels, dtype=torch.bfloat16)}

    def pickled() -> None:
        held = io.BytesIO()
        torch.save(prompt, held)
        assert asked(worker, PICKLED, blob=[held.getvalue()]) == (options.pixels,)

    def parcel() -> None:
        assert asked(worker, PARCEL, blob=pack(prompt)) == (options.pixels,)

    for name, run in (("prompt", parcel), ("prompt pickled", pickled)):
        found[name] = measure(run, warmup=1, repeats=3, device=device)
    for name, times in found.items():
        more = {"ids": options.ids} if not name.startswith("prompt") else {"bytes": 2 * options.pixels}
        log.row(case=name, **more, **times.row())
        print(f"{name:16} {times.median * 1e6:12.0f} us")
    worker.close()


if __name__ == "__main__":
    main()
