"""What a save writes after some frames more, and how long it takes: the store and the window of a `mosaic` stream.

    OMP_NUM_THREADS=1 python bench/saves.py --folder /dev/shm --out bench/results/saves_cpu_202611.jsonl

Keys and values of the shape of LLaVA-OneVision-7B (28 layers, 196 tokens a frame), of random numbers, on the CPU; the
index's means are not among them. The first save writes the whole window. `held_s` is the part of `save_s` that holds the
model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, documented_parser, told

from mmaccel.core.files import checkpoint_io
from mmaccel.policies.kv.store import HostStore, UnitShape, Window


def main() -> None:
    parser = documented_parser(__doc__)
    for name, default in (
        ("--saves", 10),
        ("--frames", 8),
        ("--window", 16),
        ("--layers", 28),
        ("--tokens", 196),
    ):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--folder", help="where to save; default: the system's folder for temporary files")
    parser.add_argument("--out", default="runs/saves.jsonl")
    args = parser.parse_args()
    log, shape = Log(args.out), UnitShape(args.layers, 4, args.tokens, 128, torch.bfloat16)

    def frames(count: int) -> list[Any]:
        size = 1, shape.groups, count * shape.tokens, shape.size
        return [tuple(torch.randn(size).to(shape.dtype) for _ in "kv") for _ in range(shape.layers)]

    store, pairs, first = HostStore(shape, "cpu"), frames(args.window), 0
    with tempfile.TemporaryDirectory(dir=args.folder) as top:
        for number in range(args.saves):
            folder, begin = Path(top) / str(number), time.perf_counter()
            with checkpoint_io.defer_writes():
                store.save(folder, Window(first, pairs))
                held = time.perf_counter() - begin
            for one in folder.iterdir():
                checkpoint_io.sync_to_disk(one)
            took, files = time.perf_counter() - begin, [one.stat() for one in folder.iterdir()]
            new = sum(one.st_size for one in files if one.st_nlink == 1)
            row = {"new_mb": new / 1e6, "files": len(files), "save_s": took, "held_s": held}
            case = {"case": "save", "number": number, "window": args.window, "frames": args.frames, **row}
            log.row(**case)
            print(told(case), flush=True)
            more, cut = frames(args.frames), args.frames * shape.tokens
            for layer, (key, value) in enumerate(pairs):
                store.put_layer(layer, range(first, first + args.frames), key[:, :, :cut], value[:, :, :cut])
            both = zip(pairs, more, strict=True)
            pairs = [
                tuple(torch.cat([a[:, :, cut:], b], 2) for a, b in zip(*two, strict=True)) for two in both
            ]
            first += args.frames


if __name__ == "__main__":
    main()
