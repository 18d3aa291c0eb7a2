"""Batches the frames of several streams of one model that wait at the same time, for the vision tower and the layers."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Event
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.errors import ModelError
from mmaccel.core.memory.frames import FrameMemory
from mmaccel.core.memory.kv import StreamPass
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.streams.parts import MemoryWrapper

UNITS = 16
"""Units that go through the layers together where neither recipe nor memory says otherwise, of one stream or of several."""


@dataclass(eq=False)
class QueuedUnits:
    """Whole units of a stream, frames [n * frames_per_unit, 3, H, W] shown at `moments`, that wait for their pass.

    live    the `StreamRunner` whose memory takes them in
    asked   when they began to wait (`time.monotonic`); `waited`: seconds from then until their pass began
    taken   whether the thread that has the model has claimed them for its pass
    others  seconds of that pass that the units of other streams took
    done    set when the pass is over; `error`: what it failed with, if it failed
    """

    live: Any
    frames: Tensor
    moments: list[float]
    asked: float = field(default_factory=monotonic)
    taken: bool = False
    waited: float = 0.0
    others: float = 0.0
    done: Event = field(default_factory=Event)
    error: BaseException | None = None

    @property
    def units(self) -> int:
        """Number of waiting units."""
        return len(self.frames) // int(self.live.adapter.frames_per_unit)

    @cached_property
    def batch_key(self) -> Hashable | None:
        """A key that is equal for units that may go through the layers as one batch; None: these run alone. The thread that
        waits with the units must read it first; it is then cached."""
        live = self.live
        model = None if live.ingests or live.running is not None else live.adapter.batch_key
        plain = type(live.around) is MemoryWrapper and not isinstance(live.state, FrameMemory)
        # A captured pass is one launch for the host; as part of a batch it would be launched layer by layer.
        if model is None or not plain or "proxy" in live.kv.needs or live.state.replays_pass:
            return None
        return model, live.info.size, self.frames.shape[1:], self.frames.device, live.hidden

    def forward(self) -> ForwardPass:
        """Return the `ForwardPass` of the units' rows over the stream's memory."""
        live, told = self.live, self.live.adapter.attention
        return ForwardPass(told, False, told.recipe.dense_tail, state=live.state, stream=True)

    @contextmanager
    def isolate_error(self) -> Iterator[None]:
        """Context that stores an error as this stream's own `error`; the other streams of the batch go on."""
        try:
            yield
        except Exception as error:
            self.error = error


def run_queued_units(mine: QueuedUnits, deadline: Deadline) -> QueuedUnits:
    """Run the units `mine` through the model when it is free, and return them. Of the threads that wait with units of the
    same `batch_key`, the one that gets the model first runs the units of all as one batch. Raises `CallEnded` if the
    deadline comes first, or the pass's error."""
    turns = mine.live.adapter.turns
    waiting, _ = turns.waiting_passes, mine.batch_key  # which is of this thread
    try:
        waiting.append(mine)
        with turns.hold(deadline, over=mine.done.is_set):
            if not mine.done.is_set():
                _run_turn(mine, waiting)
    except BaseException as end:
        try:
            waiting.remove(mine)
        except ValueError:
            if mine.taken:
                mine.done.wait()
        if not (mine.done.is_set() and isinstance(end, CallEnded)):
            raise
    if mine.error is not None:
        raise mine.error
    return mine


def _run_turn(first: QueuedUnits, waiting: list[QueuedUnits]) -> None:
    """Run the pass of `first`, and with it, oldest first, those of others that wait and can run with it. However it ends,
    all that it took off those that wait are done."""
    first.taken, some, left = True, [first], UNITS - first.units
    try:
        waiting.remove(first)
        for one in () if first.batch_key is None else tuple(waiting):
            if one.units <= left and one.batch_key == first.batch_key:
                one.taken = True
                some.append(one)
                try:
                    waiting.remove(one)
                    left -= one.units
                except ValueError:  # its call has ended
                    some.pop()
        _run(some)
    except BaseException as error:
        for one in some:
            one.error = one.error or (error if one is first else _own(error))
        if not isinstance(error, Exception):
            raise
    finally:
        for one in some:
            with suppress(ValueError):
                waiting.remove(one)
            one.done.set()


def _own(error: BaseException) -> Exception:
    """An error for one of several streams that `error` ended: each adds to the message of its own."""
    own: Exception = ModelError("watch: its pass was interrupted.")
    if isinstance(error, Exception):
        try:
            own = copy.copy(error)
        except Exception:  # it is not made of its arguments
            own = ModelError(f"watch: its pass failed ({error}).")
    own.__cause__ = error
    return own


def _run(some: list[QueuedUnits]) -> None:
    """Run the passes of these streams. What fails in one stream ends its pass alone; every other error is raised."""
    now = monotonic()
    try:
        for one in some:
            one.waited = now - one.asked
            one.live.info.times += one.moments
        if len(some) > 1:
            _run_batch(some)
        else:
            some[0].live.encode_frames(some[0].frames)
    finally:
        took, units = monotonic() - now, sum(one.units for one in some)
        for one in some:
            one.others = took * (1 - one.units / units)


def _run_batch(some: list[QueuedUnits]) -> None:
    lead, features = some[0].live, None
    with suppress(Exception):  # no memory has begun its pass: each runs alone, and says what fails there too
        features = lead.adapter.features(torch.cat([one.frames for one in some]), lead.info.size)[0]
    if features is None:
        for one in some:
            with one.isolate_error():
                one.live.encode_frames(one.frames)
        return
    passes, alone = list[tuple[QueuedUnits, StreamPass, Tensor]](), list[tuple[Any, ...]]()
    for one, own in zip(some, features.split([one.units for one in some]), strict=True):
        with one.isolate_error():
            own, begins = one.live.record_units(own)
            if not len(own):
                continue
            stream_pass, rows = one.live.build_next_pass(one.live.state, own, begins)
            if stream_pass.count < len(own):
                alone.append((one, own, begins))
                continue
            stream_pass.pause()
            one.live.state.begin_pass(stream_pass)
            # One launch: as long as its share of a batch.
            if one.live.adapter.pass_buffers(one.live.state, rows):
                if passes:  # its end may take from those what they have begun with
                    alone.append((one, own, begins))
                    continue
                one.live.adapter.run_layers(one.live.state, rows, lead.hidden)
                stream_pass.pause()
                one.live.state.end_pass()
                continue
            passes.append((one, stream_pass, rows))
    if passes:
        each = [(one.forward(), len(rows), lead.hidden) for one, _, rows in passes]
        _, errors = lead.adapter.run_batched_passes(
            each, torch.cat([rows for _, _, rows in passes]), units=True
        )
        for number, (one, stream_pass, _) in enumerate(passes):
            one.error = errors.get(number)
            if one.error is None:
                with one.isolate_error():
                    stream_pass.pause()
                    one.live.state.end_pass()
    for one, own, begins in alone:
        with one.isolate_error():
            one.live.run_units(one.live.state, own, begins)
