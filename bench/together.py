"""Sequences decoded together: tokens a second in all, beside one sequence at a time. A part of `decode_gpu.py`:

python bench/decode_gpu.py together --target qwen2.5-vl-7b --device cuda:0 --tokens 256 --out ...
python bench/decode_gpu.py verified --target llava-onevision-7b --draft llava-onevision-0.5b --keep 0.8 --out ...

The second part has a draft for each sequence, with replayed acceptance, beside plain steps of the same batch; or with its
own, where a trained pair captions films of the world: `--target tiny-ov --draft tiny-ov-draft`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from pair import Bench, InTurns, seeds, spread, tell
from replayed import VOCAB, CountingTogether, after, assumed, cache_bytes, wait
from steps import Step
from timing import Log, measure

import mmaccel
from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.batch import LENGTHS, TRIED, Batch, DraftLengthTuner
from mmaccel.core.decoding.draft import DraftState, Prompt
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.report import Meter
from mmaccel.core.streams.live import tune_python_for_streams
from mmaccel.media import Video
from mmaccel.models.attention import wrap_kv_cache
from mmaccel.models.decode import ROWS
from mmaccel.models.runner import HFRunner
from mmaccel.models.together import BatchedDecodeSteps
from mmaccel.policies.draft import Sequential
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.world import render

COUNTS = (1, 2, 4, 8)  # sequences at once


def together_part(bench: Bench) -> Iterator[Step]:
    """The loop without a draft, random weights, each sequence after columns of its own: one after the other by the captured
    step of one, and together. Both say the same where rounding leaves them the same choice."""

    def run(options: argparse.Namespace, log: Log) -> None:
        model, columns = bench.target, bench.columns
        family, rows = adapter_for(model), ROWS if bench.device.type == "cuda" else ()
        runners = [HFRunner(model, family, after(model, columns).cache, rows) for _ in range(max(COUNTS))]
        begun = [assume(columns, bench.tokens, seat, bench.device) for seat in range(max(COUNTS))]
        alone, said = [], []
        for runner in runners:
            paces = [pace([runner], begun) for _ in range(2)]  # captured in the first
            alone.append(paces[-1][0])
            said += paces[-1][1]
        one = statistics.median(alone)
        for runner in runners:
            runner.together = runners[0].together or BatchedDecodeSteps.find_or_create(runner)
        for count in COUNTS:
            some = runners[:count]
            taken = [pace(some, begun) for _ in range(1 + min(options.repeats, 3))][1:]
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


Start = tuple[Prompt, torch.Tensor]  # that has been read, and the logits of its last token
SEQUENCES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 4), (32, 4))  # at once; divisor of their columns
WINDOW, WARMUPS = 15, 4
"""Most tokens that a draft proposes; and generations of each way before those that count."""


class EachWindow(DraftLengthTuner):
    """Takes each window, and rests of all lengths, so that what drafts need then is compiled and captured."""

    def __init__(self) -> None:
        super().__init__()
        turns = [one for window in LENGTHS for one in (window, 0) for _ in range(TRIED)]
        rests = [one for rows in ROWS for one in (*[0] * (rows - 1), 1)]
        self._turns = cycle([*turns, *rests, *[0] * max(ROWS)])

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
    seated: dict[int, list[tuple[Any, Any, Start]]] = {}
    trained = bench.given.target.startswith("tiny-")

    def seats(columns: int, count: int) -> list[tuple[Any, Any, Start]]:
        for other in seated.keys() - {columns}:
            del seated[other]
        some = seated.setdefault(columns, [])
        while len(some) < count:
            some.append((read_film if trained else assume_both)(bench, columns, len(some)))
            for number, runner in enumerate(some[-1][:2]):
                runner.memory()  # takes the columns over
                kind = BatchedDecodeSteps if trained else CountingTogether
                runner.together = some[0][number].together if len(some) > 1 else kind(runner)
        return some[:count]

    def of(count: int, share: int) -> Callable[[argparse.Namespace, Log], None]:
        def run(options: argparse.Namespace, log: Log) -> None:
            columns = max(bench.columns // share, 64)
            some, given = seats(columns, count), bench.given
            targets, begun = [target for target, *_ in some], [start for *_, start in some]
            choice = Sequential(model="shape", window=WINDOW)
            plain, drafted, load, first = list[float](), list[float](), Watched(), EachWindow()
            # In the last of the first windows are tried, in the others steps compiled and captured; these are dropped.
            with tune_python_for_streams():
                for number, seed in enumerate([*[0] * WARMUPS, *seeds(given)]):
                    if seed == 1:
                        load.windows, load.kept, load.tried = Counter[int](), 0, 0
                    for seat, target in enumerate(() if trained else targets):
                        target.dice.manual_seed(1000 * seed + seat)
                    plain.append(pace(targets, begun)[0])
                    drafts = [InTurns(draft, bench.device, choice, VOCAB) for _, draft, _ in some]
                    drafted.append(pace(targets, begun, drafts, first if number < WARMUPS - 1 else load)[0])
            (mean, error), (bare, _) = spread(drafted[WARMUPS:]), spread(plain[WARMUPS:])
            told: dict[str, Any] = {"target": given.target, "draft": given.draft, "sequences": count}
            told |= {"keep": None if trained else given.keep, "columns": begun[0][0].inputs["assumed"][0]}
            least = min(said.max_new_tokens or 0 for said, _ in begun)
            told |= {"tokens": least, "draws": given.draws, "plain_per_s": bare, "drafted_per_s": mean}
            told |= {"error_per_s": error, "over_plain": mean / bare, "plain_each": plain}
            told |= {"drafted_each": drafted, "kept_share": load.kept / max(load.tried, 1)}
            told |= {"rounds_by_window": dict(load.windows)}
            tell(log, case="verified", **told, window_ms=load.median_round_ms(count))

        return run

    for count, share in SEQUENCES:
        yield Step(f"verified:{count}", 120.0, of(count, share))


def assume(columns: int, tokens: int, seat: int, device: torch.device) -> Start:
    """A prompt that is taken to have been read, and its logits."""
    said = assumed(columns, tokens, seat, device)
    return said, torch.nn.functional.one_hot(said.ids[:, -1], VOCAB).float()


def assume_both(bench: Bench, columns: int, seat: int) -> tuple[Any, Any, Start]:
    """Target and draft that are taken to have read `columns`."""
    target, draft = after(bench.target, columns, keep=bench.given.keep), after(bench.small, columns)
    return target, draft, assume(columns, bench.tokens, seat, bench.device)


def read_film(bench: Bench, columns: int, seat: int) -> tuple[Any, Any, Start]:
    """Target and draft of ours that have read a film of the world, of some `columns`, and are to caption it, and no more."""
    processor, frames = mmaccel.load_processor(bench.given.target), max(columns // 16, 4)
    case = next(caption_cases(frames, 1, 100 + seat))
    film = render(case.world.table(), 84, 140)
    turn = case.content(Video(film, torch.arange(frames).double(), 1.0, 1.0, float(frames)))
    inputs, runners = answer.prompt_inputs(processor, turn, bench.target), list[HFRunner]()
    for model in (bench.target, bench.small):
        family: Any = adapter_for(model)
        runners.append(HFRunner(model, family, wrap_kv_cache(model, family), ROWS))
    first, _ = (one.prefill(inputs) for one in runners)
    given = {"input_ids": inputs["input_ids"], "assumed": [runners[0].length(), seat]}
    most = min(bench.tokens, len(processor.tokenizer(case.answer)["input_ids"]))
    return *runners, (Prompt(given, inputs["input_ids"], max_new_tokens=most), first)


def pace(
    runners: Sequence[HFRunner],
    begun: Sequence[Start],
    drafts: Sequence[DraftState] = (),
    load: DraftLengthTuner | None = None,
) -> tuple[float, list[torch.Tensor]]:
    """Tokens a second in all until the first sequence has its tokens, which ends the others, too: where requests come all
    the time, others take their places. And what each said; those without a shared step take turns."""
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
        said, first = begun[seat]
        runner.truncate(said.inputs["assumed"][0])
        end = said.ids.shape[1] + (said.max_new_tokens or 0)
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
