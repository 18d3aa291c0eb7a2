"""Planted heads at a model's shape: what each method recalls of dense attention, and how far its output is, at equal FLOPs.

    python bench/recall.py --device cuda --out bench/results/recall_h200_202611.jsonl
    python bench/recall.py --rows grid.jsonl local.jsonl --out all.jsonl   # heads that several processes judged, as one file

A head is planted in its queries and keys: lines at multiples of a frame, lines that follow the place in the frame through
a change of resolution, columns, a neighbourhood, and kinds of these that hold for one modality or one pair of modalities
only; a sink and noise lie over every head. The pattern of "searched" is found by the search (Algorithm 4) on one draw of a
head at the first length; every method then meets other draws, at every length, shortest first. Rivals get the share of
pairs that the searched pattern lists there; the strided pattern has no budget and lists what it lists.

recall   the softmax weight that falls on the pairs a method computes, mean over sampled rows: exp(lse - dense lse)
error    norm of (out - dense) over the norm of dense, over the sampled rows
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, environment

from mmaccel.backends import select
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.lower import attend_plan
from mmaccel.core.recipe import Recipe
from mmaccel.core.sparse import SparsePattern
from mmaccel.eval.rivals import PRUNERS, RIVALS, level
from mmaccel.policies.sparse.block_topk import BlockTopK
from mmaccel.policies.sparse.per_head import LayerHeads
from mmaccel.search.algorithm import decided, kinds_of, levelled, scored
from mmaccel.search.kinds import KINDS
from mmaccel.search.measure import Bench
from mmaccel.search.sample import Inside, frame_tokens, present
from mmaccel.search.space import Scale, built
from mmaccel.search.table import Ledger

SIZE = 128
HEADS = 2
"""Draws of a head side by side, each with keys of its own."""
SAMPLED = 1024
"""Rows on which recall and error are taken."""
ISLANDS = 32
USUAL = 1 << 14
"""Gains are for this many tokens. In longer prompts what does not recur stands out by so much more as there is more
background, so that the parts of a head weigh against one another as they do here."""
TOLERANCE = 0.05


def normal(shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> Tensor:
    """Normal draws on the device, by the device where it is no CPU: a million tokens have hundreds of millions of them."""
    if device.type != "cpu":
        rng = torch.Generator(device).manual_seed(int(torch.randint(1 << 62, (), generator=rng)))
    return torch.randn(shape, generator=rng, device=device)


@dataclass
class Canvas:
    """Query and key features of one head, written dimension by dimension; a product of two features adds to the score."""

    n: int
    rng: torch.Generator
    device: torch.device

    def __post_init__(self) -> None:
        self.query = torch.zeros(self.n, SIZE, device=self.device)
        self.key = torch.zeros(self.n, SIZE, device=self.device)
        self.used = 0

    def draw(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.rng).to(self.device)

    def once(self, gain: float) -> float:
        """The gain of what is there once, however long the prompt."""
        return gain + max(0.0, math.log(self.n / USUAL))

    def add(self, query: Tensor, key: Tensor) -> None:
        """One dimension."""
        self.query[:, self.used], self.key[:, self.used] = query, key
        self.used += 1

    def line(
        self, place: Tensor, waves: Tensor, gain: float, shift: float, rows: Tensor, columns: Tensor
    ) -> None:
        """`gain` where the places of query and key differ by `shift` up to what the waves (radians a place) cannot tell
        apart; only for `rows` over `columns` (weights 0 or 1)."""
        # Waves of a large place lose their phase in single precision.
        turns = (place.double()[:, None] * waves / (2 * math.pi)) % 1
        late = (turns + shift * waves / (2 * math.pi)) % 1
        each = math.sqrt(gain / waves.numel())
        for f in (torch.cos, torch.sin):
            q = (each * f(2 * math.pi * turns)).float() * rows[:, None]
            k = (each * f(2 * math.pi * late)).float() * columns[:, None]
            for d in range(waves.numel()):
                self.add(q[:, d], k[:, d])

    def finish(self, noise: float = 1.0) -> tuple[Tensor, Tensor]:
        """Noise in the dimensions that are left; query and key, so that scores come out after the usual scale."""
        left = SIZE - self.used
        for x in (self.query, self.key):
            x[:, self.used :] = normal((self.n, left), self.rng, self.device) * (noise / left**0.5) ** 0.5
        return self.query * SIZE**0.25, self.key * SIZE**0.25


def periods(count: int, period: int, c: Canvas) -> Tensor:
    """Waves of one period, of random harmonics: together a line of one token, and noise beside it."""
    chosen = torch.randperm(period // 2, generator=c.rng)[:count] + 1
    return 2 * math.pi * chosen.double().to(c.device) / period


def nearby(count: int, width: float, c: Canvas) -> Tensor:
    """Waves that agree within about `width` places only."""
    return torch.randn(count, generator=c.rng).abs().double().to(c.device) / width


@dataclass(frozen=True)
class Place:
    """Where the tokens of a prompt are, for planting."""

    layout: TokenLayout
    at: Tensor
    cell: Tensor
    text: Tensor
    video: Tensor
    rank: Tensor
    frame: int


def placed(layout: TokenLayout, frame: int) -> Place:
    text = (layout.modality[0] == TEXT).float()
    video = 1 - text
    rank = torch.where(text.bool(), text.cumsum(0), video.cumsum(0)) - 1
    at = torch.arange(layout.length, device=layout.device).float()
    return Place(layout, at, layout.cell[0].float(), text, video, rank, frame)


def common(c: Canvas, p: Place, local: float, width: float) -> None:
    """A sink, and a neighbourhood."""
    c.add(torch.ones_like(p.at), c.once(5.0) * (p.at < 4))
    c.line(p.at, nearby(6, width, c), c.once(local), 0.0, torch.ones_like(p.at), torch.ones_like(p.at))


def lines(c: Canvas, p: Place) -> None:
    """Slash, vertical and horizontal lines of the frame's stride: rows of one class are flat, and need every key."""
    common(c, p, 4.0, 16.0)
    column, row = (int(x * p.frame) for x in c.draw(2))
    flat = (p.at % p.frame == row).float()
    c.query *= (1 - flat)[:, None]
    c.line(p.at, periods(40, p.frame, c), 9.0, float(column), 1 - flat, torch.ones_like(p.at))
    c.add(1 - flat, 7.0 * (p.at % p.frame == column))


def cells(c: Canvas, p: Place) -> None:
    """The same cell of other frames, whatever the frames' size."""
    common(c, p, 4.0, 16.0)
    seen = p.cell.clamp(min=0)
    c.line(seen, periods(40, p.frame, c), 10.0, 0.0, p.video, p.video)


def columns(c: Canvas, p: Place) -> None:
    """Some columns anywhere, and a wide neighbourhood."""
    common(c, p, 6.0, 256.0)
    chosen = (c.draw(p.at.numel()) < 200 / p.at.numel()).float()
    c.add(torch.ones_like(p.at), c.once(8.0) * chosen)


def local(c: Canvas, p: Place) -> None:
    """A neighbourhood of a thousand tokens."""
    common(c, p, 9.0, 512.0)


def by_query(c: Canvas, p: Place) -> None:
    """Video follows its frames, text looks nearby and at columns of everything (a Q-boundary)."""
    c.add(torch.ones_like(p.at), c.once(5.0) * (p.at < 4))
    c.line(p.rank, nearby(6, 32.0, c), c.once(8.0), 0.0, p.text, torch.ones_like(p.at))
    c.line(p.cell.clamp(min=0), periods(40, p.frame, c), 10.0, 0.0, p.video, p.video)
    chosen = (c.draw(p.at.numel()) < 200 / p.at.numel()).float()
    c.add(p.text, c.once(8.0) * chosen)


def by_pair(c: Canvas, p: Place) -> None:
    """Video follows its frames in video and columns in text; text its neighbourhood in text and columns in video."""
    c.add(torch.ones_like(p.at), c.once(5.0) * (p.at < 4))
    c.line(p.rank, nearby(6, 32.0, c), c.once(9.0), 0.0, p.text, p.text)
    c.line(p.cell.clamp(min=0), periods(40, p.frame, c), 10.0, 0.0, p.video, p.video)
    chosen = (c.draw(p.at.numel()) < 200 / p.at.numel()).float()
    c.add(p.text, c.once(8.0) * chosen * p.video)
    c.add(p.video, c.once(8.0) * chosen * p.text)


PLANTED: Mapping[str, tuple[Callable[[Canvas, Place], None], bool, bool]] = {
    "grid": (lines, False, False),
    "changing stride": (cells, False, True),
    "columns": (columns, False, False),
    "local": (local, False, False),
    "q boundary": (by_query, True, False),
    "2d boundary": (by_pair, True, False),
}
"""Name -> how it is planted, whether text stands between the video, whether the video's resolution changes."""


def layout_of(n: int, frame: int, text: bool, changing: bool, device: torch.device) -> TokenLayout:
    """Frames of `frame` tokens; the second half of a changing video has frames of three quarters of that."""
    place = torch.arange(n)
    words = torch.zeros(n, dtype=torch.bool)
    if text:
        pitch = n // min(ISLANDS, n // 64)
        words = place % pitch >= pitch - pitch // 4
    rank = (~words).long().cumsum(0) - 1
    sizes = torch.full((n // frame + 1,), frame)
    if changing:
        first = n // 2 // frame
        sizes = torch.cat([sizes[:first], torch.full((n // (frame * 3 // 4) + 1,), frame * 3 // 4)])
    number = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)[rank.clamp(min=0)]
    modality = torch.where(words, TEXT, VIDEO)[None].to(device)
    return TokenLayout.build(modality, frame=torch.where(words, -1, number)[None].to(device))


def draw(name: str, n: int, frame: int, seed: int, dtype: torch.dtype, device: torch.device) -> Inside:
    """Query, key and value [1, HEADS, n, SIZE] of planted heads."""
    paint, text, changing = PLANTED[name]
    layout = layout_of(n, frame, text, changing, device)
    rng = torch.Generator().manual_seed(seed)
    place = placed(layout, frame)
    made = []
    for _ in range(HEADS):
        canvas = Canvas(n, rng, device)
        paint(canvas, place)
        made.append(tuple(x.to(dtype) for x in canvas.finish()))
    query, key = (torch.stack(x)[None] for x in zip(*made, strict=True))
    value = normal((1, HEADS, n, SIZE), rng, device).to(dtype)
    return Inside(0, query, key, value, SIZE**-0.5, layout)


def searched(inside: Inside, backend: str) -> LayerHeads:
    """What the search chooses for each head of one draw, all candidates at the target's listed pairs."""
    bench, block = Bench(inside, backend), 64
    modalities = present(inside.layout)
    scale = Scale(inside.layout.length, frame_tokens(inside.layout), block)
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
    # Heads that a plan leaves dense have no log-sum-exp.
    recall = torch.exp(lse[0][:, rows].float() - dense[1]).clamp(max=1).nan_to_num(1.0)
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
        return pattern.bound(n, n) * pattern.block**2 / (n * (n + 1) / 2)
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
        if rival in PRUNERS:
            continue  # there is no model here whose tokens could be dropped
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
    rows = [row for row in found if row.get("case", "mean") != "mean"]
    return [row for row in found if "environment" in row], rows


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
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = select.choose(device) if options.backend == "auto" else options.backend
    kernel = select.get(backend, device)
    log = Log(options.out, device)
    print(environment(device))
    found: list[dict[str, Any]] = []
    ours: dict[str, LayerHeads] = {}
    for n in options.tokens:
        for name in options.heads:
            if name not in ours:
                began = time.perf_counter()
                first = draw(name, options.tokens[0], options.frame, options.seed, dtype, device)
                ours[name] = searched(first, backend)
                del first
                print(f"{name:16} searched in {time.perf_counter() - began:.1f} s", flush=True)
            inside = draw(name, n, options.frame, options.seed + 1, dtype, device)
            chosen = {str(h): repr(p) for h, p in ours[name].named.items()}
            for method, figures in methods(ours[name], inside, kernel):
                row = {"case": name, "tokens": n, "method": method, **figures}
                found.append(row)
                log.row(**row, **({"pattern": chosen} if method == "searched" else {}))
                print(shown(row), flush=True)
    for row in means(found):
        log.row(**row)
        print(shown(row), flush=True)


if __name__ == "__main__":
    main()
