"""Runs a draft model in a second process: `RemoteDrafter` is the target's side, `serve` that process's main function."""

from __future__ import annotations

import io
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.draft import UNIT_SLACK, Warp
from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.decoding.watching import DraftStream, DraftStreamSettings
from mmaccel.core.decoding.worker import (
    READY,
    Message,
    MessageSocket,
    Worker,
    incoming_messages,
    send_heartbeats,
)
from mmaccel.core.errors import DraftError, ModelError, warn
from mmaccel.core.layout import TokenLayout
from mmaccel.core.registry import registry
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.draft._draft_decoder import SUPPORT, DraftDecoder, DraftedTokens, TokenDistribution
from mmaccel.policies.draft._draft_model import MODEL, continues_tokens, draft_stream
from mmaccel.policies.draft._packed import make_packer, unpack
from mmaccel.policies.draft._remote_stream import (
    _OVER,
    BEGIN,
    CALL,
    END,
    GREEDY,
    KEEP,
    WRITE,
    WROTE,
    ProcessClient,
    RemoteDraftStream,
    ServedStreams,
)

SERVICE = "mmaccel.policies.draft._remote_drafter:serve"
MICRO = 1e-6
TURN = "mmaccel_turn"
"""Beside a prompt's inputs: whether a turn may follow, and the number of the sequence that this one goes on from, or 0."""


class RemoteTurn:
    """A conversation whose draft state stays in the second process as sequence `number`; `known` [n]: last prompt's ids."""

    def __init__(self, worker: Worker, number: int, known: Tensor) -> None:
        self.worker, self.number, self.known = worker, number, known.cpu()
        # The collector of garbage may run while something is being sent.
        self.over = weakref.finalize(self, _OVER.setdefault(worker, deque()).append, number)


class RemoteDrafter(ProcessClient):
    """The target's side of a sequence for which a second process drafts: `request_tokens`, then `collect_tokens`, in turn.

    Several sequences may share the process, which serves requests in order of arrival.
    """

    def __init__(self, worker: Worker, vocab: int) -> None:
        super().__init__(worker)
        self._vocab = vocab
        self._asked, self._kept_open = 0, False
        self._previous: RemoteTurn | None = None

    def begin(
        self,
        inputs: Mapping[str, Any],
        warp: Warp | None,
        pruned: bool,
        compact: bool,
        seed: int,
        stream: DraftStream | None = None,
        lasts: bool = False,
    ) -> None:
        """Send the prompt to the second process; returns before it has been run there.

        inputs   the prompt as arguments of a model: ids, pixels, grids
        warp     how logits become probabilities when tokens are sampled; None: greedy
        pruned   the prompt is run only when `keep` has said with which columns
        compact  whether kept columns are renumbered, without the gaps of dropped ones
        seed     of the draft's random numbers
        stream   the draft's own stream; its last question is run instead of `inputs`
        lasts    whether the sequence is kept for a later turn of the conversation
        """
        for message in self._worker.receive_all():
            self._hand_on(message)
        self._end_collected()
        previous, self._previous = self._previous, None
        if lasts or previous is not None:
            inputs = {**inputs, TURN: [int(lasts), 0 if previous is None else previous.number]}
        self._open[self.number] = self
        own = (stream.number,) if isinstance(stream, RemoteDraftStream) else ()
        numbers = self.number, int(pruned), int(compact), seed, *own
        self._worker.send_in_background(BEGIN, *numbers, blob=make_packer(dict(inputs), _packed(warp)))
        if previous is not None:
            previous.over.detach()  # only now: a turn from which nothing goes on is to be freed

    def keep(self, columns: Tensor) -> None:
        """Send to the draft's process which columns of the prompt to run."""
        self._worker.send(KEEP, self.number, blob=[columns.cpu().long().numpy().tobytes()])

    def request_tokens(self, length: int, fix: Sequence[int], count: int) -> None:
        """Request, without waiting: cut the drafted line to `length` tokens, append ids `fix`, generate `count` more."""
        self._asked = count
        self._worker.send(WRITE, self.number, length, count, *fix)

    def collect_tokens(self, limit_s: float) -> DraftedTokens | None:
        """Return the requested tokens; None if they take over `limit_s` seconds. A malformed reply raises `DraftError`."""
        until = time.monotonic() + limit_s
        while not self._answers:
            message = self._worker.receive_message(max(0.0, until - time.monotonic()))
            if message is None:
                return None
            self._hand_on(message)
        return self._checked(self._answers.popleft())

    def _hand_on(self, message: Message) -> None:
        if message.kind == GREEDY:
            _warn_greedy(message.blob.decode(errors="replace"))
        else:
            super()._hand_on(message)

    def _checked(self, message: Message) -> DraftedTokens:
        _, micros, prompt, pruned, *ids = message.numbers if len(message.numbers) >= 4 else (0, 0, 0, 0)
        wrong = message.kind != WROTE or len(ids) != self._asked or micros < 0
        wrong = wrong or any(not 0 <= token < self._vocab for token in ids)
        odds = None if wrong else self._odds(message.blob, ids)
        if odds is None:
            self._worker.close()
            raise DraftError("the draft's process sent a malformed message.")
        return DraftedTokens(ids, micros * MICRO, prompt * MICRO, pruned, odds)

    def _odds(self, blob: bytearray, ids: list[int]) -> tuple[TokenDistribution, ...] | None:
        """What each of `ids` was drawn from, nothing where they are the likeliest ones; None for a malformed `blob`."""
        odds: list[TokenDistribution] = []
        at = 0
        while at < len(blob) and len(odds) < len(ids):
            count = int.from_bytes(blob[at : at + 4], "little")
            at, end = at + 4, at + 4 + 8 * count
            if not 0 < count <= SUPPORT or end > len(blob):
                return None
            tokens = torch.frombuffer(blob, dtype=torch.int32, count=count, offset=at)
            weights = torch.frombuffer(blob, dtype=torch.float32, count=count, offset=at + 4 * count)
            fits = (tokens >= 0).all() & (tokens < self._vocab).all() & (tokens == ids[len(odds)]).any()
            if not fits & (weights > 0).all() & ((weights.sum() - 1).abs() <= UNIT_SLACK):
                return None
            odds.append(TokenDistribution(tokens, weights))
            at = end
        whole = at == len(blob) and len(odds) in (0, len(ids))
        return tuple(odds) if whole else None

    def continues_from(self, previous: Any, ids: Tensor, past: TokenLayout) -> bool:
        """Return whether the second process can continue from `previous`, its state after the last turn, with the prompt
        `ids` [S]; `past` is the layout of the columns that the target's cache holds."""
        fits = isinstance(previous, RemoteTurn) and previous.worker is self._worker
        if not fits or not continues_tokens(previous.known, ids, past):
            return False
        self._previous = previous
        return True

    def state_for_next_turn(self, ids: Tensor) -> RemoteTurn:
        self._kept_open = True
        return RemoteTurn(self._worker, self.number, ids)

    def close(self, deadline: Deadline | None = None) -> None:
        """End the sequence once its prompt is sent. The second process frees it unless a later turn may follow, and serves
        others; if it has not taken the prompt by `deadline`, the process is ended."""
        if self._open.pop(self.number, None) is not None and self._worker.alive:
            try:
                if not self._kept_open:
                    self._worker.send(END, self.number)
                self._wait_until_sent(deadline)
            except DraftError as error:
                # A process that cannot be told has ended, and what it held with it: what is said is whole without it.
                warn(
                    f"the draft's process was ended when its prompt was over; the next one starts another ({error})."
                )


def serve(wire: MessageSocket, options: dict[str, Any]) -> None:
    """Main function of the draft's process: load the draft model, report that it is ready, and serve requests."""
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    own = torch.device(options["device"])
    if own.type == "cuda" and own.index is not None:
        # What asks for no device must not open a context, half a gigabyte, on the target's.
        torch.cuda.set_device(own)
    family = registry("model")[options["family"]]()
    like = nn.Linear(1, 1, dtype=getattr(torch, options["dtype"]), device=options["device"])
    with send_heartbeats(wire):
        try:
            model = family.load(options["model"], like)
        except ModelError as error:
            raise DraftError(f"{MODEL}: {error}") from error
        kind = getattr(model.config, "model_type", "")
    if kind not in family.model_types:
        raise DraftError(
            f"{MODEL}: the draft is a {kind} and the target a {family.name}, which read other inputs; give a draft of the "
            "target's family."
        )
    with send_heartbeats(wire):
        bare = [int(_shortest_step_s(family.runner(model), own) / MICRO)] if options.get("bare") else []
    wire.send(READY, family.geometry(model).vocab, *bare)

    keeper = ModelView(model, family, adapter_for)

    def watch(told: DraftStreamSettings) -> LocalDraftStream:
        return draft_stream(model, told, keeper)

    serve_decoder(wire, lambda: DraftDecoder(family.runner(model), own, options["vocab"]), own, watch)


@torch.no_grad()
def _shortest_step_s(runner: Runner, device: torch.device | str) -> float:
    """Return the seconds of a decode step after a very short prompt; with any pruner a step takes at least that."""
    ids = torch.zeros(1, 4, dtype=torch.long, device=device)
    runner.prefill({"input_ids": ids})
    times = []
    for _ in range(7):
        began = time.perf_counter()
        int(runner.step(ids[:, :1])[0, -1].argmax())
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])  # the first ones may be compiled and captured


@torch.no_grad()
def serve_decoder(
    wire: MessageSocket,
    fresh: Callable[[], DraftDecoder],
    device: torch.device | str = "cpu",
    watch: Callable[[DraftStreamSettings], LocalDraftStream] | None = None,
) -> None:
    """Serve requests until the connection `wire` breaks. `fresh` makes a `DraftDecoder` for each sequence, with logits on
    `device`; `watch` opens a video stream (see `ServedStreams`), or is None if streams are not served."""
    # Prompts that are not run yet: inputs, sampling, whether compact, seed; and the stream that was asked, if one was.
    waiting: dict[int, tuple[dict[str, Any], bytes, bool, int, LocalDraftStream | None]] = {}
    served = ServedStreams(wire, watch)
    writers: dict[int, DraftDecoder] = {}

    def read(number: int, columns: Tensor | None) -> None:
        inputs, warp, compact, seed, stream = waiting.pop(number)
        lasts, after = inputs.pop(TURN, (0, 0))
        # Where a call of the stream has ended, nobody asks this sequence any more.
        with send_heartbeats(wire), suppress(CallEnded):
            writer = writers.pop(after) if after in writers else fresh()
            writer.talk.runner.lasting = bool(lasts)
            writer.read_prompt(inputs, columns, compact, _unpacked(wire, warp, device), seed, stream)
            writers[number] = writer

    for message in incoming_messages(wire, served.on_arrival):
        number = message.numbers[0]
        if message.kind == BEGIN:
            pruned, compact, seed, *own = message.numbers[1:]
            stream = served.streams[own[0]] if own else None
            waiting[number] = *unpack(message.blob), bool(compact), seed, stream
            if not pruned:
                read(number, None)
        elif message.kind == KEEP and number in waiting:
            read(number, torch.frombuffer(message.blob, dtype=torch.long))
        elif message.kind == WRITE and number in writers:
            _, length, count, *fix = message.numbers
            with send_heartbeats(wire):
                written = writers[number].draft_tokens(length, fix, count)
            told = int(written.seconds / MICRO), int(written.prompt_s / MICRO), written.pruned
            wire.send(WROTE, number, *told, *written.ids, blob=[one.packed() for one in written.odds])
        elif message.kind == END:
            waiting.pop(number, None)
            writers.pop(number, None)
            served.end(number)
        elif message.kind == CALL:
            served.handle_message(message)


def _packed(warp: Warp | None) -> bytes:
    """The sampling in force, or nothing where it cannot travel: the draft then takes its raw maximum, which costs speed."""
    if warp is None:
        return b""
    packed = io.BytesIO()
    try:
        torch.save(warp, packed)
    except Exception as error:  # a caller's own logits processor may refuse with anything
        _warn_greedy(f"{type(error).__name__}: {error}")
        return b""
    return packed.getvalue()


def _warn_greedy(why: str) -> None:
    warn(
        "the draft's process cannot be told how tokens are chosen and guesses the likeliest: fewer are accepted; give "
        f"logits processors that can be pickled, of a module that can be imported ({why})."
    )


def _unpacked(wire: MessageSocket, packed: bytes, device: torch.device | str) -> Warp | None:
    """The sampling, with the tensors it holds on the draft's device; None for nothing, and where it cannot be had, which is
    told: a class of the program's own file is found there alone."""
    try:
        warp = torch.load(io.BytesIO(packed), map_location=device, weights_only=False) if packed else None
    except Exception as error:  # whatever a caller's own class does here
        wire.send(GREEDY, blob=[f"{type(error).__name__}: {error}"[:400].encode()])
        return None
    return warp
