"""Sequences decoded together: tokens a second in all, beside one sequence at a time. A part of `decode_gpu.py`:

python bench/decode_gpu.py together --target qwen2.5-vl-7b --device cuda:0 --tokens 256 --out ...
python bench/decode_gpu.py together --target llava-onevision-0.5b --device cpu --layers 2 --shrink 64 --out ...
python bench/decode_gpu.py verified --target llava-onevision-7b --draft llava-onevision-0.5b --keep 0.8 --out ...

The second part has a draft for each sequence, with replayed acceptance, beside plain steps of the same batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle

import torch
from pair import Bench, InTurns, seeds, spread, tell
from replayed import VOCAB, Counting, CountingTogether, after, assumed, cache_bytes, wait
from steps import Step
from timing import Log, measure

from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.batch import LENGTHS, TRIED, Batch, DraftLengthTuner
from mmaccel.core.decoding.draft import DraftState
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.report import Meter
from mmaccel.models.decode import ROWS
from mmaccel.models.runner import HFRunner
from mmaccel.models.together import BatchedDecodeSteps
from mmaccel.policies.draft import Sequential

COUNTS = (1, 2, 4, 8)
"""Sequences at once."""


def together_part(bench: Bench) -> Iterator[Step]:
    """The loop without a draft, random weights, each sequence after columns of its own: one after the other by the captured
    step of one, and together. Both say the same where rounding leaves them the same choice."""

    def run(options: argparse.Namespace, log: Log) -> None:
        model, columns = bench.target, bench.columns
        family, rows = adapter_for(model), ROWS if bench.device.type == "cuda" else ()
        runners = [HFRunner(model, family, after(model, columns).cache, rows) for _ in range(max(COUNTS))]
        alone, said = [], []
        for runner in runners:
            paces = [pace([runner], columns, bench.tokens) for _ in range(2)]  # captured in the first
            alone.append(paces[-1][0])
            said += paces[-1][1]
        one = statistics.median(alone)
        for runner in runners:
            runner.together = runners[0].together or BatchedDecodeSteps.find_or_create(runner)
        for count in COUNTS:
            some = runners[:count]
            taken = [pace(some, columns, bench.tokens) for _ in range(1 + min(options.repeats, 3))][1:]
            ids = [torch.ones(1, 1, dtype=torch.long, device=model.device)] * count

            def step(some: Sequence[HFRunner] = some, ids: Sequence[torch.Tensor] = ids) -> None:
                some[0].together(some, ids)
                for runner in some:
                    runner.truncate(columns)

            for runner in some:
                runner.truncate(columns)
            times = measure(step, warmup=3, repeats=max(options.repeats, 2), device=model.device)
            floor = answer.min_decode_step_s(model, count * cache_bytes(model, columns), bench.rate)
            paces = [one for one, _ in taken]
            pairs = zip(taken[-1][1], said, strict=False)
            same = [int((a == b).long().cumprod(0).sum()) for a, b in pairs]
            told = {"shape": options.target, "columns": columns, "sequences": count, "tokens": bench.tokens}
            told |= {"tokens_per_s": max(paces), "each_per_s": paces, "alone_per_s": one}
            told |= {"over_alone": max(paces) / one, "floor_s": floor, "of_floor": times.median / floor}
            tell(log, case="together", **told, **times.row("step_"), agreed_tokens=same)

    yield Step("together", 60.0, run)


SEQUENCES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 4), (32, 4))
"""Sequences at once, and by what the columns of each are divided."""
WINDOW, WARMUPS = 15, 2
"""Tokens that a draft proposes at most, as often as that pays; and generations of each way before those that count."""


class EachWindow(DraftLengthTuner):
    """Takes each window for as many rounds as it is tried, so that what it needs is compiled and captured."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = cycle([one for window in LENGTHS for one in (window, 0) for _ in range(TRIED)])

    def best_length(self, count: int, drafting: int) -> int:
        return next(self._turns)


class Watched(DraftLengthTuner):
    """Counts rounds by their window, and what targets kept."""

    def __init__(self) -> None:
        super().__init__()
        self.windows, self.kept, self.tried = Counter[int](), 0, 0

    def add_round(self, count: int, length: int, seconds: float, judged: Sequence[tuple[int, int]]) -> None:
        self.windows[length] += 1
        self.kept += sum(kept for _, kept in judged)
        self.tried += sum(kept + (kept < proposed) for proposed, kept in judged)
        super().add_round(count, length, seconds, judged)


def verified_part(bench: Bench) -> Iterator[Step]:
    """Each sequence has a draft, all on the target's device: drafts propose in shared steps, as many tokens as pay at that
    load, and one step of the target judges them all; beside it the same batch without drafts, in turns."""
    seated: dict[int, list[tuple[Counting, Counting]]] = {}

    def seats(columns: int, count: int) -> list[tuple[Counting, Counting]]:
        for other in seated.keys() - {columns}:
            del seated[other]
        some = seated.setdefault(columns, [])
        while len(some) < count:
            both = (after(bench.target, columns, keep=bench.given.keep), after(bench.small, columns))
            for number, runner in enumerate(both):
                runner.memory()  # takes the columns over
                runner.together = some[0][number].together if some else CountingTogether(runner)
            some.append(both)
        return some[:count]

    def of(count: int, share: int) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            columns = max(bench.columns // share, 64)
            some, given = seats(columns, count), bench.given
            targets = [target for target, _ in some]
            choice = Sequential(model="shape", window=WINDOW)
            plain, drafted, load = list[float](), list[float](), Watched()
            # In the first, steps are compiled and captured; in the next, windows are tried; both are dropped.
            for number, seed in enumerate([*[0] * WARMUPS, *seeds(given)]):
                if seed == 1:
                    load.windows.clear()
                    load.kept = load.tried = 0
                for seat, target in enumerate(targets):
                    target.dice.manual_seed(1000 * seed + seat)
                plain.append(pace(targets, columns, bench.tokens)[0])
                drafts = [InTurns(draft, bench.device, choice, VOCAB) for _, draft in some]
                now = load if number else EachWindow()
                drafted.append(pace(targets, columns, bench.tokens, drafts, now)[0])
            mean, error = spread(drafted[WARMUPS:])
            bare, _ = spread(plain[WARMUPS:])
            told = {"target": given.target, "draft": given.draft, "keep": given.keep, "sequences": count}
            told |= {"columns": columns, "tokens": bench.tokens, "draws": given.draws, "plain_per_s": bare}
            told |= {"drafted_per_s": mean, "error_per_s": error, "over_plain": mean / bare}
            told |= {"plain_each": plain, "drafted_each": drafted}
            told |= {"kept_share": load.kept / max(load.tried, 1), "rounds_by_window": dict(load.windows)}
            tell(log, case="verified", **told, window_ms=load.median_round_ms(count))

        return run

    for count, share in SEQUENCES:
        yield Step(f"verified:{count}", 120.0, of(count, share))


def pace(
    runners: Sequence[HFRunner],
    columns: int,
    tokens: int,
    drafts: Sequence[DraftState] = (),
    load: DraftLengthTuner | None = None,
) -> tuple[float, list[torch.Tensor]]:
    """Tokens a second in all until the first sequence has `tokens`, which ends the others, too: where requests come all the
    time, others take their places. And what each said; those without a shared step take turns."""
    device, sequences = runners[0].model.device, list[Speculation]()
    made = [0, 0.0]  # tokens in all, and until when

    @contextmanager
    def watched() -> Iterator[None]:
        yield
        if not made[0] and any(one.ended for one in sequences):
            wait(device)
            made[:] = sum(one.ids.shape[1] for one in sequences) - started, time.perf_counter()

    batch = Batch(holding=watched)
    batch.load = load or batch.load
    for seat, runner in enumerate(runners):
        runner.truncate(columns)
        said = assumed(columns, tokens, seat, device)
        end = said.ids.shape[1] + tokens
        first = torch.nn.functional.one_hot(said.ids[:, -1], VOCAB).float()
        stop = lambda out, end=end: made[0] > 0 or out.shape[1] >= end  # noqa: E731
        draft = drafts[seat] if drafts else None
        if draft is not None:
            draft.begin(said)
        sequences.append(Speculation(runner, draft, said, first, stop=stop, meter=Meter().new_sequence()))
        sequences[-1].commit_next_tokens()
    wait(device)
    started, began = sum(one.ids.shape[1] for one in sequences), time.perf_counter()
    batch.run(sequences)
    return made[0] / (made[1] - began), [one.ids[0].cpu() for one in sequences]
