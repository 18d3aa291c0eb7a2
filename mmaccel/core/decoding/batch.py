"""Sequences of several calls decoded together: of each round the model's step is one for all of them (continuous batching,
Orca, OSDI 2022, section 3.1)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops.layer_ops import MOST
from mmaccel.core.decoding.generate import Speculation
from mmaccel.core.prefill.attention import ForwardPass


class Batch:
    """Sequences that are decoded together, each with a memory, a draft, random numbers and an end of its own: each commits
    what it would commit alone. They come and go between two rounds.

    Threads bring their sequences and wait for these; one of the threads does the rounds for all. In a round the targets that
    share a `Runner.together` take one step; a target without one, and rows of a tree, take steps of their own.

    told     called with the number of sequences of each step that several may share
    holding  gives what is held while a round lasts
    """

    def __init__(
        self,
        told: Callable[[int], object] = lambda count: None,
        holding: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._together: Any = None
        self._told, self._holding = told, holding
        self._live: list[Speculation] = []
        self._failed: dict[Speculation, Exception] = {}
        self._changed = threading.Condition()
        self._led = False

    def __len__(self) -> int:
        """How many sequences are being decoded."""
        return len(self._live)

    def shared(self, of: Callable[[Any], Any]) -> Any:
        """The `Runner.together` of a target that comes, which `of` makes of that of the last one (None: it is the first)."""
        with self._changed:
            self._together = of(self._together)
            return self._together

    def run(self, sequences: Sequence[Speculation]) -> None:
        """Decode `sequences`, with all others that are here meanwhile, until they have ended. Raises what ended one of them:
        an error in one ends none of another caller."""
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
        shared: dict[Any, list[tuple[Speculation, Tensor]]] = {}
        for one in live:
            with self._careful(one):
                offered = one.offer()
                together = one.target.together
                if offered is None or len(offered) > 1 or together is None:
                    one.take(None if offered is None else one.target.step(*offered)[0])
                else:
                    shared.setdefault(together, []).append((one, offered[0]))
        for together, some in shared.items():
            for one, logits in self._stepped(together, some):
                with self._careful(one):
                    if isinstance(logits, Exception):
                        raise logits
                    one.take(logits[0])
        with self._changed:
            self._live = [one for one in self._live if not one.ended]
            if len(self._live) < len(live):
                self._changed.notify_all()

    def _stepped(
        self, together: Any, some: list[tuple[Speculation, Tensor]]
    ) -> Iterator[tuple[Speculation, Tensor | Exception]]:
        """Each sequence with the logits [1, n, V] of its rows, or what failed in it."""
        try:
            logits = together([one.target for one, _ in some], [rows for _, rows in some])
        except Exception as error:
            if len(some) == 1:
                yield some[0][0], error
                return
            # One of them, such as a memory that finds no room to grow, is not to end the others.
            for each in some:
                each[0].rewind()
                yield from self._stepped(together, [each])
            return
        self._told(len(some))
        yield from zip((one for one, _ in some), logits, strict=True)

    @contextmanager
    def _careful(self, one: Speculation) -> Iterator[None]:
        """What fails ends this sequence."""
        try:
            yield
        except Exception as error:
            self._failed[one] = error
            one.ended = True
            one.close()


@dataclass(frozen=True)
class AnswersTogether:
    """Steps of answers on streams of one model, whose `turns` these are, as one: see `Runner.together`. An answer that is
    the only one goes by itself."""

    turns: Any

    def __call__(self, runners: Sequence[Any], ids: Sequence[Tensor]) -> list[Tensor | Exception]:
        adapter, counts = runners[0].adapter, [one.shape[1] for one in ids]
        if len(runners) == 1 or not adapter.shares:
            return [_alone(one, own) for one, own in zip(runners, ids, strict=True)]
        if sum(counts) > MOST:
            half = len(runners) // 2
            return self(runners[:half], ids[:half]) + self(runners[half:], ids[half:])
        passes = [
            (ForwardPass(one.adapter.attention, False, state=one.state, stream=True), count, one.live.hidden)
            for one, count in zip(runners, counts, strict=True)
        ]
        rows, errors = adapter.run_each(passes, adapter.words(torch.cat(list(ids), 1)[0]))
        logits = adapter.logits(rows)[None].split(counts, 1)
        return [errors.get(number, own) for number, own in enumerate(logits)]


def _alone(runner: Any, ids: Tensor) -> Tensor | Exception:
    try:
        return runner.step(ids)  # type: ignore[no-any-return]
    except Exception as error:
        return error


@dataclass(eq=False)
class Seat:
    """The place of one call of `generate` in a batch.

    generator  the call's random numbers, where tokens are sampled
    joined     called when the call's prompt has been read and its sequences come to the batch
    alone      why the call is decoded by itself; empty: it is not
    """

    batch: Batch
    generator: torch.Generator | None = None
    joined: Callable[[], object] = lambda: None
    alone: str = field(default="", init=False)

    def decode(self, sequences: Sequence[Speculation]) -> None:
        """See `Batch.run`."""
        self.joined()
        self.batch.run(sequences)
