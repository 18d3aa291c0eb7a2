"""What the parts cost on a CPU, each beside its dense or naive twin in the same run: `make bench`, in CI.

A case is a pair of functions, timed in CPU seconds, so that a machine's speed and its other work cancel. A twin is made of
the same kind of work as its case, of calls as small and of tensors as large, for what else runs on a machine slows memory
by more than arithmetic: one product of dense attention was no twin of a plan. The two run in strict turns, and in each
turn a function is called until `STRETCH` seconds are over, so that its own caches are warm for most of its time. What
counts is the median over all turns of time / twin's time: a burst of other work moves few turns, and up as often as down.
The turns end when the median is surely below `LIMIT` times this processor's ratio in `ratios.json` (of a planted slowdown:
surely above it, too), or after `MOST` seconds. A median above that limit is measured again, `TRIES` times in all: other work
slows large tensors more than small ones for seconds on end. A case that is above it each time fails and is named.

    make bench BENCH='-k clustering --write "splits look at fewer units"'    # commit a new ratio, and why
    make bench BENCH='--plant 1.5'                                           # is a slowdown of each case caught?
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from committed import commit, ratio_of
from torch import Tensor

import mmaccel
from mmaccel.backends import select
from mmaccel.backends.ops.block_lists import list_band
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.contract import memory as contract
from mmaccel.core.decoding.draft import Proposal, accept
from mmaccel.core.decoding.trees import accept_tree
from mmaccel.core.layout import VIDEO, PositionIds, TokenLayout
from mmaccel.core.memory.kv import Stream, StreamPass, StreamPolicy
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.core.recipe import Recipe

LIMIT, SURE, TRIES = 1.25, 4.0, 3
"""Limit, deviations by which most turns must lie below it in the sign test, and medians above it to fail."""
STRETCH, LEAST, MOST = 0.01, 3.0, 6.0
"""CPU seconds of one function's calls in a turn, and of all turns of a case, at least and at most."""
Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""What is measured, and its twin."""

TOKENS, PER_FRAME, HEADS, GROUPS, SIZE = 2048, 16, 2, 1, 64
PATTERNS: dict[str, dict[str, Any]] = {
    "a_shape": {"name": "a_shape", "sink": 128, "window": 512},
    "vertical_slash": {"name": "vertical_slash", "vertical": 64, "slash": 16},
    "grid": {"name": "grid", "stride": "frame"},
}


def video() -> TokenLayout:
    """A layout of frames alone."""
    column = torch.arange(TOKENS)[None]
    return TokenLayout.build(torch.full_like(column, VIDEO), frame=column // PER_FRAME)


@functools.cache
def layer() -> tuple[Tensor, Tensor, Tensor, TokenLayout]:
    """Queries [1, H, N, D], keys and values [1, G, N, D] of a layer over a video."""
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, TOKENS, SIZE)
    key, value = torch.randn(2, 1, GROUPS, TOKENS, SIZE)
    return query, key, value, video()


def lines_by_hand() -> None:
    """What a pattern of content estimates, written plainly: the strongest columns and diagonals of the last queries."""
    query, key, _, _ = layer()
    last, at = 64, torch.arange(TOKENS)
    asked, key = query[:, :, -last:], key.repeat_interleave(HEADS // GROUPS, 1)
    scores = asked @ key.transpose(-1, -2) * SIZE**-0.5
    weight = scores.masked_fill(at > at[-last:, None], -torch.inf).softmax(-1)
    weight.sum(2).topk(64)
    diagonal = (at[-last:, None] - at).clamp(min=0).expand_as(weight)
    weight.new_zeros(1, HEADS, TOKENS).scatter_add_(2, diagonal.flatten(2), weight.flatten(2)).topk(16)


def rows_by_rows() -> None:
    """Dense attention of one head, written plainly: scores, mask and weights of some rows after the others."""
    query, key, value, _ = layer()
    at = torch.arange(TOKENS)
    for mine in at.split(64):
        scores = query[0, 0, mine] @ key[0, 0].T * SIZE**-0.5
        scores.masked_fill(at > mine[:, None], -torch.inf).softmax(-1) @ value[0, 0]


def planning(name: str) -> Pair:
    """A pattern's plan: a static one beside lists found row by row, one of content beside its estimate written plainly."""
    query, key, _, _ = layer()
    pattern = Recipe.load(sparse=PATTERNS[name]).sparse

    def plans() -> None:
        for _ in range(4):
            layout = video()  # a layout keeps what was planned for it
            pattern.plan(query, key, layout, layout)

    def by_hand() -> None:
        for _ in range(4):
            video(), lists_by_row() if name == "a_shape" else lines_by_hand()

    return plans, by_hand


def attention(name: str) -> Pair:
    """Attention of a plan that is there, beside dense attention by rows."""
    query, key, value, layout = layer()
    plan = Recipe.load(sparse=PATTERNS[name]).sparse.plan(query, key, layout, layout)
    assert plan is not None
    kernel = select.get_op("reference", "cpu")
    return lambda: attend_plan(plan, query, key, value, SIZE**-0.5, kernel), rows_by_rows


def lists_by_row() -> list[Tensor]:
    """Lists of the key blocks that each block of rows sees of a window, one block of rows after the other."""
    block, window = 64, 512
    keys = torch.arange(TOKENS, dtype=torch.int32)
    first, last = keys[::block], keys[block - 1 :: block]
    rows = zip(first, last, strict=True)
    return [((first <= end) & (last > begin - window)).nonzero()[:, 0] for begin, end in rows]


def indices() -> Pair:
    """Block lists of a window, beside those found row by row."""
    rows, block, window = torch.arange(TOKENS, dtype=torch.int32)[None, None], 64, 512

    def lists() -> None:
        for _ in range(20):
            list_band(rows, rows, rows, rows, 0, window, block, block)

    return lists, lists_by_row


def memory(name: str, **fields: Any) -> Any:
    """A memory of streams, opened as a session opens one, on made-up keys."""
    policy: Any = Recipe.load(kv={"name": name, **fields}).kv
    assert isinstance(policy, StreamPolicy)
    head, tokens = contract.HEAD, contract.TOKENS
    first, unit = torch.arange(head)[None], head + torch.arange(tokens)[None]
    at = PositionIds(first, unit, lambda n: tokens * torch.arange(n), head + tokens, tokens, 10**6)
    stream = Stream(tokens_per_unit=tokens, head=head, frames_per_unit=1, positions=at, dtype=torch.float32)
    model: Any = contract.RotaryModel()
    state = policy.open_stream(stream, contract.GEOMETRY, model, torch.device("cpu"))
    run(state, StreamPass(kind="head", rows=head))
    return state


def run(state: Any, stream_pass: StreamPass, seed: int = 0) -> None:
    """One pass through all layers."""
    generator = torch.Generator().manual_seed(seed)
    size, rows = contract.SIZE, stream_pass.rows
    state.begin_pass(stream_pass)
    for index in range(contract.LAYERS):
        query, key, value = (
            torch.randn(1, heads, rows, size, generator=generator)
            for heads in (contract.HEADS, contract.GROUPS, contract.GROUPS)
        )
        state.receive_hidden(index, query.transpose(1, 2).flatten(2))
        state.append(index, key, value)
        state.view(index, query)
    state.end_pass()


def watch(state: Any, units: int) -> None:
    """So many units, eight a pass; they come in runs of one scene."""
    end = state.units() + units
    scenes = torch.randn(64, contract.GEOMETRY.hidden, generator=torch.Generator().manual_seed(1))
    while (first := state.units()) < end:
        count = state.units_that_fit(first, min(8, end - first))
        look = scenes[torch.arange(first, first + count) // 12 % 64]
        times = tuple(float(t) for t in range(first, first + count))
        rows = count * contract.TOKENS
        units_pass = StreamPass(kind="units", rows=rows, first=first, count=count, times=times, look=look)
        run(state, units_pass, seed=first)
    state.end_ingest()


def clustering() -> Pair:
    """Units taken into clusters as they come, their memory's work counted, beside all clustered anew after each pass."""
    units, width = 160, contract.GROUPS * contract.SIZE
    points = torch.randn(contract.LAYERS, units, width, generator=torch.Generator().manual_seed(2))

    def anew() -> None:
        for end in range(8, units + 1, 8):
            x = points[:, :end]
            centres = x[:, ::4].clone()
            for _ in range(20):
                owner = torch.cdist(x, centres).argmin(-1, keepdim=True).expand_as(x)
                total = torch.zeros_like(centres).scatter_add_(1, owner, x)
                count = torch.zeros_like(centres).scatter_add_(1, owner, torch.ones_like(x))
                centres = total / count.clamp_min(1)

    def as_they_come() -> None:
        state = memory("mosaic", encode_frames=0)
        watch(state, units)
        state.close()

    return as_they_come, anew


def retrieval(name: str) -> Pair:
    """The passes of a question on a memory, beside one that scores all that was watched unit by unit."""
    units, rows, frames = 480, 8, 16
    state = memory(name, frames=frames)
    watch(state, units)
    key, value = torch.randn(2, contract.LAYERS, units, contract.GROUPS, contract.TOKENS, contract.SIZE)
    query = torch.randn(contract.LAYERS, contract.HEADS, rows, contract.SIZE)

    def ask() -> None:
        with state.question_scope():
            run(state, StreamPass(kind="question", rows=rows, words=(1, rows), room=2))

    def unit_by_unit() -> None:
        for index in range(contract.LAYERS):
            asked = query[index].mean((0, 1))
            scores = torch.stack([(unit.mean((0, 1)) * asked).sum() for unit in key[index]])
            best = scores.topk(frames).indices.sort().values
            seen = (x[index, best].transpose(0, 1).flatten(1, 2)[None] for x in (key, value))
            dense_attend(query[index][None], *seen, contract.SIZE**-0.5)

    return ask, unit_by_unit


def acceptance() -> Pair:
    """A sampled proposal of eight tokens judged at once, beside the rule written token by token."""
    torch.manual_seed(0)
    n, vocab = 8, 4096
    logits = torch.randn(n + 1, vocab)
    q = logits[:n].add(0.3 * torch.randn(n, vocab)).softmax(-1)
    ids = q.multinomial(1)[:, 0]
    generator = torch.Generator()

    def warp(_: Tensor, row: Tensor) -> Tensor:
        return row.softmax(-1)

    def one_by_one() -> None:
        generator.manual_seed(0)
        for _ in range(10):
            for i in range(n):
                p = warp(ids, logits[i])
                drawn = torch.rand(1, generator=generator)
                left = (p - q[i]).clamp_min(0)
                if drawn * q[i, ids[i]] >= p[ids[i]] and left.sum() > 0:
                    left.multinomial(1, generator=generator)

    def at_once() -> None:
        generator.manual_seed(0)
        for _ in range(10):
            accept(Proposal(ids, q=q), logits, ids, warp, generator)

    return at_once, one_by_one


def acceptance_of_trees() -> Pair:
    """Greedy trees of 15 tokens, beside their branches judged one after the other."""
    torch.manual_seed(0)
    parents = torch.tensor([-1, 0, 1, 2, 3, 0, 1, 2, -1, 8, 9, -1, 11, 12, 13])
    logits = torch.randn(16, 4096)
    best = logits.argmax(-1)
    ids = torch.where(torch.arange(15) % 3 > 0, best[parents + 1], 0)
    branches = [[0, 1, 2, 3, 4], [0, 5], [0, 1, 6], [0, 1, 2, 7], [8, 9, 10], [11, 12, 13, 14]]

    def each() -> None:
        for _ in range(20):
            for branch in branches:
                chain = torch.tensor(branch)
                accept(Proposal(ids[chain]), logits[torch.cat([torch.zeros(1).long(), chain + 1])], ids)

    def tree() -> None:
        for _ in range(20):
            accept_tree(Proposal(ids, parents=parents), logits, ids)

    return tree, each


@functools.cache
def model() -> Any:
    """A trained tiny model, and a prompt of a video for it."""
    from mmaccel_lab.world import World, render

    plain = mmaccel.load_model("tiny-qwen", dtype=torch.float32)
    processor = mmaccel.load_processor("tiny-qwen")
    table = World.generate(3, 16).table()
    return plain, processor, render({name: rows[:16] for name, rows in table.items()}, 42, 70)


def generation(recipe: str | dict[str, Any]) -> Pair:
    """`generate` under a recipe, attach and detach counted, beside the plain model's."""
    plain, processor, film = model()
    text = "<|vision_start|><|video_pad|><|vision_end|> what colour was the star ?"
    inputs = processor(text, videos=film, fps=2.0)

    def generate() -> Any:
        return plain.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)

    def accelerated() -> None:
        with mmaccel.accelerate(plain, recipe):
            generate()

    return accelerated, generate


def session() -> Pair:
    """A session that watches and answers, beside one that keeps nothing and sees all frames at each question."""
    plain, processor, film = model()

    def stream(kv: dict[str, Any]) -> None:
        with mmaccel.VideoSession(plain, processor, None, kv=kv) as live:
            live.watch(film, fps=2.0)
            live.ask("what colour was the star ?", max_new_tokens=2)

    mosaic = {"name": "mosaic", "frames": 4, "window": 4, "local": 2}
    return lambda: stream(mosaic), lambda: stream({"name": "no_cache", "frames": 16})


CASES: dict[str, Callable[[], Pair]] = {
    **{f"planning {name}": functools.partial(planning, name) for name in PATTERNS},
    **{f"attention {name}": functools.partial(attention, name) for name in PATTERNS},
    "indices": indices,
    "clustering": clustering,
    "retrieval rekv": functools.partial(retrieval, "rekv"),
    "retrieval mosaic": functools.partial(retrieval, "mosaic"),
    "acceptance": acceptance,
    "acceptance of trees": acceptance_of_trees,
    "generate a_shape": functools.partial(generation, {"sparse": PATTERNS["a_shape"]}),
    "generate prompt_lookup": functools.partial(generation, {"draft": "prompt_lookup"}),
    "session mosaic": session,
}


def slowed(work: Callable[[], Any], times: float) -> Callable[[], None]:
    """`work`, and then a wait on the CPU until it has taken so many times its time."""

    def run() -> None:
        began = time.process_time()
        work()
        taken = time.process_time() - began
        while time.process_time() - began < times * taken:
            pass

    return run


def seconds(work: Callable[[], Any], calls: int = 1) -> float:
    """CPU seconds of one of so many calls in a row."""
    began = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - began) / calls


def median_ratio(turn: Any, limit: float, clock: Any = time.process_time, above: bool = False) -> float:
    """The median ratio of as many turns as show that it is below `limit` (`above`: or above it), or of `MOST` seconds."""
    ratios: list[float] = []
    began, below = clock(), 0
    while (spent := clock() - began) < MOST:
        more = 2 * below - len(ratios)
        if spent > LEAST and (abs(more) if above else more) > SURE * len(ratios) ** 0.5:
            break
        ratios.append(turn())
        below += ratios[-1] < limit
    return statistics.median(ratios)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.benchmark(timer=time.process_time)
def test_ratio(name: str, benchmark: Any, request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(1)
    path: Path = request.config.getoption("--ratios")
    why, plant = request.config.getoption("--write"), request.config.getoption("--plant")
    committed = json.loads(path.read_text()) if path.exists() else {}
    assert why or name in committed, f"{name} has no committed ratio; run it with --write and the reason."
    before = 0.0 if why else ratio_of(committed[name])  # nothing is below 0: a new ratio takes all the time
    with torch.no_grad():
        work, twin = CASES[name]()
        benchmark.pedantic(work := slowed(work, plant)), twin()
        calls, calls_of_twin = (1 + int(STRETCH / seconds(one)) for one in (work, twin))

        def turn() -> float:
            other = seconds(twin, calls_of_twin)
            benchmark.stats.update(taken := seconds(work, calls))
            return taken / other

        ratio = math.inf
        for _ in range(1 if why else TRIES):
            if ratio > LIMIT * before:
                ratio = min(ratio, median_ratio(turn, LIMIT * before, above=plant > 1))
    if why:
        commit(path, name, before := ratio, why)
    benchmark.extra_info.update(ratio=ratio, committed=before, turns=len(benchmark.stats.stats.data) - 1)
    slower = ratio > LIMIT * before
    said = f"{name} takes {ratio:.4f} of its twin's time; {before:.4f} is committed."
    assert slower == (plant > 1), said if slower else f"{said} A slowdown of {plant} is not caught."
