"""The time of mosaic's clustering on the host, at a 7B shape: looks matched together or not, splits put off or made at once.

    python bench/clustering.py --out bench/results/clustering_cpu_202611.jsonl
    python bench/clustering.py --out ... --threads 2 --beside 2

28 layers, mean keys of 512 numbers, looks of 3 584, passes of 16 frames, nobody asks. Two streams: `scenes`, planted as
`bench/scenes.py` plants them (48 scenes that stay, cut and return), and `again`, 64 frames that have nothing in common,
watched over and over, as step `encode` of `bench/stream.py` has them. All ways see the same frames, take turns of five
passes, and the first turns do not count. `--beside` keeps so many processes busy meanwhile: a stream's host also launches
kernels, reads video and pins memory. A row holds what was made, and `same`: whether the clusters are those of the first way
with the same splits.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from scenes import FRAME, VISIT, timeline
from timing import Log, Times

from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy
from mmaccel.policies.kv.mosaic.policy import Mosaic
from mmaccel.policies.kv.mosaic.summaries import Summaries

LAYERS, WIDTH, LOOK = 28, 512, 3584
WINDOW, PASS, TURN, KINDS, AGAIN = 76, 16, 80, 48, 64
"""Frames on the device, of one pass, and of one turn; scenes; frames that are watched again and again."""
WARM = 160
"""Frames that do not count: the first clusters are made of 64 of them."""
WAYS = {
    f"{matched}, {splits}": (matched == "together", splits == "put off")
    for splits in ("put off", "at once")
    for matched in ("together", "one by one")
}


def planted(stream: str, frames: int) -> tuple[Tensor, Tensor]:
    """Looks [frames, LOOK], and mean keys [frames, LAYERS, WIDTH] in bfloat16, of the stream of that name."""
    own = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=own)

    if stream == "again":
        turn = torch.arange(frames) % AGAIN
        return (noise(1, LOOK) + noise(AGAIN, LOOK))[turn], noise(AGAIN, LAYERS, WIDTH)[turn].bfloat16()
    scene, visit = timeline(frames, KINDS, own)
    look = noise(KINDS, LOOK)[scene] + 0.3 * noise(frames, LOOK)
    key = noise(LAYERS, WIDTH) + noise(KINDS, LAYERS, WIDTH)[scene]
    key += VISIT * noise(int(visit[-1]) + 1, LAYERS, WIDTH)[visit] + FRAME * noise(frames, LAYERS, WIDTH)
    return look, key.bfloat16()


class Clustered:
    """A stream on its way into clusters; a call takes in the next turn's frames."""

    def __init__(self, look: Tensor, key: Tensor, together: bool, deferred: bool) -> None:
        self._look, self._key, self._together = look, key, together
        policy = Mosaic(deferred=deferred)
        summaries = Summaries(LAYERS, LOOK, WIDTH, 1, key.dtype, policy.lift)
        self.tree = Hierarchy(policy.rules(policy.init), summaries, LAYERS, LOOK, WIDTH)

    def take(self, until: int) -> float:
        """Seconds a frame of the frames up to number `until`."""
        have, began = self.tree.units, time.perf_counter()
        for first in range(have, until, PASS):
            now = slice(first, min(first + PASS, until))
            self.tree.summaries.append(self._look[now], self._key[now], self._key[now])
            self.tree.insert(WINDOW, None, self._together)
        return (time.perf_counter() - began) / (until - have)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute beside what is timed."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def clustered(stream: str, frames: int) -> Iterator[dict[str, Any]]:
    """Rows of one stream, a way each."""
    ways = {way: Clustered(*planted(stream, frames), *told) for way, told in WAYS.items()}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for until in [WARM, *range(WARM + TURN, frames + 1, TURN)]:
        for way, one in ways.items():
            spent = one.take(until)
            if until > WARM:
                taken[way].append(spent)
    for way, one in ways.items():
        like = next(other for other in ways if WAYS[other][1] == WAYS[way][1])
        pairs = zip(one.tree.owners().values(), ways[like].tree.owners().values(), strict=True)
        yield {
            "case": stream,
            "way": way,
            "frames": frames,
            **Times(tuple(taken[way])).row(),
            "visual_clusters": int(one.tree.visual.count()),
            "clusters": float(one.tree.semantic.count().float().mean()),
            "same": all(torch.equal(mine, theirs) for mine, theirs in pairs),
            **one.tree.counters,
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--frames", type=int, default=1800)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch on the host")
    parser.add_argument("--beside", type=int, default=0, help="processes that compute meanwhile")
    options = parser.parse_args(argv)
    if options.frames < WARM + 2 * TURN:
        parser.error(f"--frames: {options.frames}; give at least {WARM + 2 * TURN}.")
    torch.set_num_threads(options.threads)
    log = Log(options.out)
    with busy(options.beside):
        for stream in ("scenes", "again"):
            for row in clustered(stream, options.frames):
                log.row(beside=options.beside, **row)
                print(
                    f"{row['case']:7} {row['way']:20} {row['median_s'] * 1e3:6.2f} ms a frame "
                    f"({row['low_s'] * 1e3:.2f} to {row['high_s'] * 1e3:.2f}), {row['visual_clusters']} visual clusters, "
                    f"{row['clusters']:.0f} a layer, the same: {row['same']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
