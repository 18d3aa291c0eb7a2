"""`Batch`: sequences of several calls decoded together, each round as one step of the model (continuous batching, Orca, OSDI
2022, section 3.1)."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from mmaccel.backends.ops.layer_ops import MOST
from mmaccel.core.adapter import Runner
from mmaccel.core.decoding.draft import DraftStep, resume_draft_steps
from mmaccel.core.decoding.generate import Deadline, Offer, Speculation
from mmaccel.core.prefill.attention import ForwardPass

Wanted = tuple[Speculation, Runner, Tensor, Any]
"""A step of a sequence's target or draft: the runner, ids [1, n], and its `Runner.together`."""

KEPT = 4
"""Models whose steps are shared, at most."""
LENGTHS = (0, 1, 3, 7, 15)
"""Tokens drafted a round; with the token before them as many rows as steps are captured for."""
TRIED, TIMED = 3, 9
"""Rounds after which a draft length is known (one, if with all tokens kept it is half as fast), and how many are kept."""
AGAIN, RARELY = 1024, 8192
"""Rounds of as many sequences after which other lengths are tried anew, as memories grow, and loads change: the first, and
while drafting does not pay twice as many each time, up to the second."""
FORGET = 0.99
"""What of the share of kept tokens a round leaves to the next."""


class Batch:
    """Sequences decoded together, each with its own KV memory, draft, random numbers and stop condition. Each gets the same
    tokens as it would alone, and may join and leave between rounds.

    Threads add sequences and wait; one of the threads runs the rounds for all. In a round drafts propose tokens, as many as
    are fastest for this number of sequences (`DraftLengthTuner`), then targets verify. Targets that have the same
    `Runner.together` run each step as one batch, and so do drafts. A runner without it, or with a token tree, steps alone.

    told     callback, called with the number of sequences after each target step that may be run for several as one
    holding  returns a context manager, such as a lock, that is entered for each round
    """

    def __init__(
        self,
        told: Callable[[int], object] = lambda count: None,
        holding: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._told, self._holding, self.load = told, holding, DraftLengthTuner()
        self._of: Callable[[Any, Sequence[Any]], Any] = lambda runner, known: None
        self._known, self._seen, self._warm = list[Any](), WeakSet[Any](), True
        self._live: list[Speculation] = []
        self._failed: dict[Speculation, Exception] = {}
        self._changed = threading.Condition()
        self._led = False

    def __len__(self) -> int:
        """How many sequences are being decoded."""
        return len(self._live)

    def register_shared_runner(self, runner: Any, of: Callable[[Any, Sequence[Any]], Any]) -> None:
        """Run steps of `runner`, and of the runners of drafts opened later, as one with steps of other sequences.

        ``of(runner, known)`` returns the callable to set as the runner's `together`: one of `known`, the callables already
        in use, or a new one. If it returns None, the runner's steps are run one by one.
        """
        with self._changed:
            self._of = of
            self._join(runner)

    def _join(self, runner: Any) -> Any:
        """The `Runner.together` of a runner, which is looked for once."""
        if runner.together is None and runner not in self._seen:
            self._seen.add(runner)
            runner.together = found = self._of(runner, self._known)
            if found is not None:  # the last used are kept
                self._known = [*(one for one in self._known if one is not found), found][-KEPT:]
        return runner.together

    def run(self, sequences: Sequence[Speculation]) -> None:
        """Decode `sequences`, together with all others in the batch, until they end; raise the error that ended one of them.
        An error in a sequence does not end those of other callers."""
        with self._changed:
            self._live += [one for one in sequences if not one.ended]
        try:
            while self._leads(sequences):
                try:
                    while not all(one.ended for one in sequences):
                        with self._holding():
                            self._round()
                finally:
                    with self._changed:
                        self._led = False
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._live = [one for one in self._live if one not in sequences]
                errors = [self._failed.pop(one) for one in sequences if one in self._failed]
            for one in sequences:
                one.close()
        if errors:
            raise errors[0]

    def _leads(self, sequences: Sequence[Speculation]) -> bool:
        """Wait until all of `sequences` have ended (False), or nobody does the rounds (True: the caller is to)."""

        def over() -> bool:
            # Not by `ended`, which is true before the last token is out.
            return not any(one in self._live for one in sequences)

        with self._changed:
            self._changed.wait_for(lambda: not self._led or over())
            if over():
                return False
            self._led = True
            return True

    def _round(self) -> None:
        with self._changed:
            live = list(self._live)
        began, free = time.perf_counter(), [one for one in live if one.may_adapt_draft_length]
        most = self.load.best_length(len(live), len(free)) if free else None
        # The others wait while a draft reads its prompt: one a round.
        reads = [one for one in free if one.needs_draft_prefill] if most else []
        self._warm = not reads
        lengths = {**dict.fromkeys(live), **dict.fromkeys(free, most), **dict.fromkeys(reads[1:], 0)}
        offers = self._offers({one: one.rows_to_verify(lengths[one]) for one in live})
        wanted, taken = list[Wanted](), 0
        for one, offered in offers.items():
            with self._careful(one):
                if offered is None or len(offered) > 1:
                    one.verify_logits(None if offered is None else one.target.step(*offered)[0])
                else:
                    wanted.append((one, one.target, offered[0], one.target.together))
        for one, logits in self._steps(wanted, self._told):
            with self._careful(one):
                if isinstance(logits, Exception):
                    raise logits
                one.verify_logits(logits[0])
                taken += 1
        if most is not None and taken == len(live) and self._warm:
            seconds = time.perf_counter() - began
            self.load.add_round(len(live), most, seconds, [one.judged for one in live if one.judged[0]])
        with self._changed:
            self._live = [one for one in self._live if not one.ended]
            if any(one.ended for one in live):  # though others may have come in their places
                self._changed.notify_all()

    def _offers(self, works: dict[Speculation, Any]) -> dict[Speculation, Offer | None]:
        """Return what each sequence offers in this round; the drafts' models run their steps together."""
        offers = dict[Speculation, Offer | None]()
        given = dict[Speculation, Tensor | Exception | None].fromkeys(works)
        while given:
            asked = dict[Speculation, DraftStep]()
            for one, said in given.items():
                with self._careful(one):
                    try:
                        asked[one] = resume_draft_steps(works[one], said)
                    except StopIteration as over:
                        offers[one] = over.value
            given, groups, wanted = {}, defaultdict[Any, list[Speculation]](list), list[Wanted]()
            for one, each in asked.items():
                with self._careful(one):
                    wanted.append((one, each.runner, each.ids[None], self._join(each.runner)))
            for one, logits in self._steps(wanted):
                given[one] = last = logits if isinstance(logits, Exception) else logits[0, -1:]
                if isinstance(last, Tensor):
                    groups[asked[one].batch_key, last.shape, last.device].append(one)
            for some in groups.values():
                given |= _said(asked[some[0]], {one: given[one] for one in some})  # type: ignore[misc]
        return {one: offers[one] for one in works if one in offers}

    def _steps(
        self, wanted: Sequence[Wanted], told: Callable[[int], object] = lambda count: None
    ) -> Iterator[tuple[Speculation, Tensor | Exception]]:
        """Yield each sequence with the logits [1, n, V] of its rows, or with the error of its step."""
        shared: dict[Any, list[Wanted]] = {}
        for each in wanted:
            shared.setdefault(each[3] or each[1], []).append(each)
        for some in shared.values():
            yield from self._stepped(some, told)

    def _stepped(
        self, some: Sequence[Wanted], told: Callable[[int], object]
    ) -> Iterator[tuple[Speculation, Tensor | Exception]]:
        _, first, rows, together = some[0]
        before = [runner.length() for _, runner, _, _ in some]
        try:
            if together is None:
                logits = [first.step(rows)]
            else:
                logits = together([runner for _, runner, _, _ in some], [rows for _, _, rows, _ in some])
        except Exception as error:
            if len(some) == 1:
                yield some[0][0], error
                return
            # One of them, such as a memory that finds no room to grow, is not to end the others.
            for each, length in zip(some, before, strict=True):
                try:
                    each[1].truncate(length)
                except Exception as left:
                    yield each[0], left
                else:
                    yield from self._stepped([each], told)
            return
        if together is not None:
            self._warm &= getattr(together, "warm", True)
            told(len(some))
        yield from zip((one for one, *_ in some), logits, strict=True)

    @contextmanager
    def _careful(self, one: Speculation) -> Iterator[None]:
        """Context in which an error ends this sequence alone."""
        try:
            yield
        except Exception as error:
            self._failed[one] = error
            one.ended = True
            one.close()


def _said(step: DraftStep, logits: dict[Speculation, Tensor]) -> dict[Speculation, Tensor | Exception | None]:
    """Return what each draft gets from its logits (`DraftStep.reduce_logits`); an error reaches its own draft alone."""
    try:
        return dict(zip(logits, step.reduce_logits(torch.cat(list(logits.values()))), strict=True))
    except Exception as error:
        if len(logits) == 1:
            return dict.fromkeys(logits, error)
        each = [_said(step, {one: own}) for one, own in logits.items()]
        return {one: said for own in each for one, said in own.items()}


@dataclass(frozen=True)
class BatchedAnswerSteps:
    """Callable (`Runner.together`) that runs a decoding step of answers on several streams of one model as one batch. With
    a single answer it calls that runner's own `step`. `turns` is the lock of the threads that share the model."""

    turns: Any

    def __call__(self, runners: Sequence[Any], ids: Sequence[Tensor]) -> list[Tensor | Exception]:
        adapter, counts = runners[0].adapter, [one.shape[1] for one in ids]
        if len(runners) == 1 or not adapter.can_batch_answers:
            return [_alone(one, own) for one, own in zip(runners, ids, strict=True)]
        if sum(counts) > MOST:
            half = len(runners) // 2
            return self(runners[:half], ids[:half]) + self(runners[half:], ids[half:])
        passes = [
            (ForwardPass(one.adapter.attention, False, state=one.state, stream=True), count, one.live.hidden)
            for one, count in zip(runners, counts, strict=True)
        ]
        rows, errors = adapter.run_batched_passes(passes, adapter.embed_tokens(torch.cat(list(ids), 1)[0]))
        logits = adapter.logits(rows)[None].split(counts, 1)
        return [errors.get(number, own) for number, own in enumerate(logits)]


def _alone(runner: Any, ids: Tensor) -> Tensor | Exception:
    try:
        return runner.step(ids)  # type: ignore[no-any-return]
    except Exception as error:
        return error


@dataclass(eq=False)
class BatchSlot:
    """How one call of `generate` takes part in a `Batch`.

    generator  the call's random generator for sampling
    joined     called when the call's prompt is prefilled and its sequences join the batch
    deadline   ends the call, also between the layers of its prompt; None: `max_time` does, less finely
    alone      why the call is decoded outside the batch; empty if it is not
    """

    batch: Batch
    generator: torch.Generator | None = None
    joined: Callable[[], object] = lambda: None
    deadline: Deadline | None = None
    alone: str = field(default="", init=False)

    @property
    def check(self) -> Callable[[], None] | None:
        """What raises `CallEnded` once the call must end; None without a deadline."""
        return None if self.deadline is None else self.deadline.check

    def decode(self, sequences: Sequence[Speculation]) -> None:
        """Decode the call's `sequences` together with the others in the batch: see `Batch.run`."""
        self.joined()
        self.batch.run(sequences)


class DraftLengthTuner:
    """Chooses the draft length with the most tokens per second, per number of sequences in a batch (rounded up to a
    power of two).

    A length's rate is the tokens its rounds are expected to commit, by the acceptance rate so far, over their median
    seconds. Lengths are tried in ascending order from 0 while the rate rises; so where verification costs more than it
    gains, as with many sequences, nothing is drafted. All lengths are tried again after `AGAIN` rounds. While
    drafting does not pay, this interval doubles, up to `RARELY`.
    """

    def __init__(self) -> None:
        self._judged, self._kept = 4.0, 3.2  # a few tokens are assumed
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._period: defaultdict[int, int] = defaultdict(lambda: AGAIN)
        self._rests, self._idle = set[tuple[int, int]](), defaultdict[int, int](int)
        self._seconds: defaultdict[tuple[int, int], deque[float]] = defaultdict(partial(deque, maxlen=TIMED))
        self._longest = dict[tuple[int, int], int]()

    def best_length(self, count: int, drafting: int) -> int:
        """Return the draft length for a round of `count` sequences, `drafting` of which have a draft; 0: no drafting."""
        if (count, drafting) in self._rests:
            return 0
        size, best, chosen = _size(count), 0.0, 0
        keep = self._kept / self._judged
        for length in LENGTHS:
            seconds = self._seconds[size, length]
            all_kept = count + drafting * length
            if len(seconds) < TRIED and (not seconds or 2 * all_kept > best * min(seconds)):
                return length
            said = count - drafting + drafting * sum(keep**n for n in range(length + 1))
            worth = said / median_low(seconds)
            if worth <= best:
                break
            best, chosen = worth, length
            if length and self._longest.get((size, length), 0) < length:
                break  # the draft proposes no more
        if chosen:
            self._period[size] = AGAIN
        elif self._idle[size] >= TIMED:
            self._rests.add((count, drafting))
        return chosen

    def add_round(self, count: int, length: int, seconds: float, judged: Iterable[tuple[int, int]]) -> None:
        """Record that a round of `count` sequences took `seconds`, without one-off work such as graph capture; `judged`:
        (proposed, accepted) tokens of each that drafted."""
        size = _size(count)
        self._seconds[size, length].append(seconds)
        self._rounds[size], self._idle[size] = self._rounds[size] + 1, 0 if length else self._idle[size] + 1
        if self._rounds[size] >= self._period[size]:
            self._rounds[size], self._period[size] = 0, min(2 * self._period[size], RARELY)
            self._rests.clear()
            for other in LENGTHS:
                if other != length:
                    self._seconds[size, other].clear()
        if self._judged > 1:  # of long rests something is left
            self._judged, self._kept = self._judged * FORGET, self._kept * FORGET
        for proposed, kept in judged:
            self._longest[size, length] = max(proposed, self._longest.get((size, length), 0))
            self._judged += kept + (kept < proposed)
            self._kept += kept

    def median_round_ms(self, count: int) -> dict[int, float]:
        """Return the median milliseconds of a round of `count` sequences, for each draft length that was tried."""
        size = _size(count)
        tried = [length for length in LENGTHS if self._seconds.get((size, length))]
        return {length: 1e3 * median_low(self._seconds[size, length]) for length in tried}


def _size(count: int) -> int:
    return 1 << (count - 1).bit_length()
