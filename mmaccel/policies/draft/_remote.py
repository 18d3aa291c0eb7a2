"""A draft in a process of its own: the two ends of what it is told and what it answers."""

from __future__ import annotations

import io
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from mmaccel.core.draft import Warp
from mmaccel.core.errors import DraftError, warn
from mmaccel.core.registry import registry
from mmaccel.core.verify import UNIT_SLACK
from mmaccel.core.worker import OWN, READY, Message, Wire, Worker, beating, inbox
from mmaccel.policies.draft._parcel import packing, unpack
from mmaccel.policies.draft._writer import SUPPORT, Odds, Writer, Written, bare_step_s

BEGIN, KEEP, WRITE, WROTE, END, GREEDY = range(OWN, OWN + 6)
SERVICE = "mmaccel.policies.draft._remote:serve"
MICRO = 1e-6


_NUMBERS = itertools.count(1)
_OPEN: WeakKeyDictionary[Worker, WeakValueDictionary[int, Remote]] = WeakKeyDictionary()
"""For each process its sequences, by number: whoever reads the wire hands on what is another's."""


class Remote:
    """The end on the target's side, of one sequence: at most one `ask` is out at a time; what it wrote is `collect`ed.

    Several sequences may share the process, which serves what they ask for in the order in which it comes.
    """

    def __init__(self, worker: Worker, vocab: int) -> None:
        self._worker, self._vocab = worker, vocab
        self._number = next(_NUMBERS)
        self._asked = 0
        self._answers: deque[Message] = deque()
        self._open = _OPEN.setdefault(worker, WeakValueDictionary())

    def begin(
        self, inputs: Mapping[str, Any], warp: Warp | None, pruned: bool, compact: bool, seed: int
    ) -> None:
        """Send the prompt, while the caller goes on; with `pruned` it is run when `keep` has told which columns."""
        # Lists too, which some processors give for seconds of frames; what is neither is no input of a model.
        told = {name: x for name, x in inputs.items() if _travels(x)}
        for message in self._worker.drain():
            self._hand_on(message)
        self._open[self._number] = self
        about = int(pruned), int(compact), seed
        self._worker.post(BEGIN, self._number, *about, blob=packing(told, _packed(warp)))

    def keep(self, columns: Tensor) -> None:
        self._worker.send(KEEP, self._number, *columns.tolist()) if columns.numel() < 1 << 15 else (
            self._worker.send(KEEP, self._number, blob=[columns.cpu().long().numpy().tobytes()])
        )

    def ask(self, length: int, fix: Sequence[int], count: int) -> None:
        """Go back to `length` tokens, take `fix`, write `count` more."""
        self._asked = count
        self._worker.send(WRITE, self._number, length, count, *fix)

    def collect(self, limit_s: float) -> Written | None:
        """What was asked for, or None when it is not there within `limit_s`."""
        until = time.monotonic() + limit_s
        while not self._answers:
            message = self._worker.receive(max(0.0, until - time.monotonic()))
            if message is None:
                return None
            self._hand_on(message)
        return self._checked(self._answers.popleft())

    def _hand_on(self, message: Message) -> None:
        """To the sequence it is for; an answer for one that was given up before is for nobody, nonsense is for us."""
        if message.kind == GREEDY:
            _tell_greedy(message.blob.decode(errors="replace"))
            return
        number = message.numbers[0] if message.kind == WROTE and message.numbers else self._number
        owner = self._open.get(number)
        if owner is not None:
            owner._answers.append(message)

    def _checked(self, message: Message) -> Written:
        _, micros, prompt, *ids = message.numbers if len(message.numbers) >= 3 else (0, 0, 0)
        wrong = message.kind != WROTE or len(ids) != self._asked or micros < 0
        if wrong or any(not 0 <= token < self._vocab for token in ids):
            self._nonsense()
        return Written(ids, micros * MICRO, prompt * MICRO, self._odds(message.blob, ids))

    def _odds(self, blob: bytearray, ids: list[int]) -> tuple[Odds, ...]:
        """What each of `ids` was drawn from; nothing where they are the likeliest ones."""
        found: list[Odds] = []
        at = 0
        while at < len(blob) and len(found) < len(ids):
            count = int.from_bytes(blob[at : at + 4], "little")
            at, end = at + 4, at + 4 + 8 * count
            if not 0 < count <= SUPPORT or end > len(blob):
                self._nonsense()
            tokens = torch.frombuffer(blob, dtype=torch.int32, count=count, offset=at)
            weights = torch.frombuffer(blob, dtype=torch.float32, count=count, offset=at + 4 * count)
            fits = (tokens >= 0).all() & (tokens < self._vocab).all() & (tokens == ids[len(found)]).any()
            if not fits & (weights > 0).all() & ((weights.sum() - 1).abs() <= UNIT_SLACK):
                self._nonsense()
            found.append(Odds(tokens, weights))
            at = end
        if at != len(blob) or (found and len(found) != len(ids)):
            self._nonsense()
        return tuple(found)

    def _nonsense(self) -> NoReturn:
        self._worker.close()
        raise DraftError("the draft's process sent a malformed message.")

    def close(self) -> None:
        """The sequence is over; the process frees what it holds of it, and stays for others."""
        if self._open.pop(self._number, None) is not None and self._worker.alive:
            try:
                self._worker.send(END, self._number)
                # From here on the prompt's owner may write over it.
                self._worker.posted()
            except DraftError as error:
                # A process that cannot be told has ended, and what it held with it: what is said is whole without it.
                warn(
                    f"the draft's process was ended when its prompt was over; the next one starts another ({error})."
                )


def start(service: str, options: Mapping[str, Any], timeout_s: float) -> Worker:
    """The process; it loads while the caller goes on."""
    return Worker(service, options, silence_s=timeout_s)


def serve(wire: Wire, options: dict[str, Any]) -> None:
    """In the second process: load the draft, say that it is ready, write what is asked."""
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    own = torch.device(options["device"])
    if own.type == "cuda" and own.index is not None:
        # What asks for no device must not open a context, half a gigabyte, on the target's.
        torch.cuda.set_device(own)
    family = registry("model")[options["family"]]()
    like = nn.Linear(1, 1, dtype=getattr(torch, options["dtype"]), device=options["device"])
    with beating(wire):
        model = family.load(options["model"], like)
        kind = getattr(model.config, "model_type", "")
    if kind not in family.model_types:
        raise DraftError(
            f"the draft is a {kind} and the target a {family.name}, which read other inputs; give a draft of the target's "
            "family"
        )
    place = options["device"]
    with beating(wire):
        bare = [int(bare_step_s(family.runner(model), place) / MICRO)] if options.get("bare") else []
    wire.send(READY, family.geometry(model).vocab, *bare)
    serve_writer(wire, lambda: Writer(family.runner(model), place, options["vocab"]), place)


@torch.no_grad()
def serve_writer(wire: Wire, fresh: Any, device: str = "cpu") -> None:
    """Answer until the wire breaks; `fresh` opens a `Writer` for each sequence, whose logits are on `device`."""
    # Prompts whose columns are not told yet: inputs, sampling, whether compact, seed.
    waiting: dict[int, tuple[dict[str, Any], bytes, bool, int]] = {}
    writers: dict[int, Writer] = {}
    for message in inbox(wire):
        number = message.numbers[0]
        if message.kind == BEGIN:
            inputs, warp = unpack(message.blob)
            pruned, compact, seed = message.numbers[1:]
            if pruned:
                waiting[number] = inputs, warp, bool(compact), seed
                continue
            with beating(wire):
                writers[number] = fresh()
                writers[number].read(inputs, warp=_taken(wire, warp, device), seed=seed)
        elif message.kind == KEEP and number in waiting:
            columns = torch.tensor(message.numbers[1:], dtype=torch.long)
            if message.blob:
                columns = torch.frombuffer(message.blob, dtype=torch.long)
            inputs, warp, short, seed = waiting.pop(number)
            with beating(wire):
                writers[number] = fresh()
                writers[number].read(inputs, columns, short, _taken(wire, warp, device), seed)
        elif message.kind == WRITE and number in writers:
            _, length, count, *fix = message.numbers
            with beating(wire):
                written = writers[number].write(length, fix, count)
            micros = (int(written.seconds / MICRO), int(written.prompt_s / MICRO))
            wire.send(WROTE, number, *micros, *written.ids, blob=_told(written.odds))
        elif message.kind == END:
            waiting.pop(number, None)
            writers.pop(number, None)


def _told(odds: Sequence[Odds]) -> list[bytes]:
    """For each token how many it was drawn from (uint32), these (int32), and their probabilities (float32)."""
    found: list[bytes] = []
    for one in odds:
        found += [
            len(one.ids).to_bytes(4, "little"),
            one.ids.numpy().tobytes(),
            one.weights.numpy().tobytes(),
        ]
    return found


def _travels(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return all(isinstance(one, int | float) for one in x)
    return isinstance(x, Tensor)


def _packed(warp: Warp | None) -> bytes:
    """The sampling in force, or nothing where it cannot travel: the draft then takes its raw maximum, which costs speed."""
    held = io.BytesIO()
    try:
        if warp is not None:
            torch.save(warp, held)
    except Exception as error:  # a caller's own logits processor may refuse with anything
        _tell_greedy(f"{type(error).__name__}: {error}")
        held = io.BytesIO()
    return held.getvalue()


def _tell_greedy(why: str) -> None:
    warn(
        "the draft's process cannot be told how tokens are chosen and guesses the likeliest: fewer are accepted; give "
        f"logits processors that can be pickled, of a module that can be imported ({why})."
    )


def _taken(wire: Wire, packed: bytes, device: str) -> Warp | None:
    """`_unpacked`, or None where that fails, which is told: a class of the program's own file is found there alone."""
    try:
        return _unpacked(packed, device)
    except Exception as error:  # whatever a caller's own class does here
        wire.send(GREEDY, blob=[f"{type(error).__name__}: {error}"[:400].encode()])
        return None


def _unpacked(packed: bytes, device: str) -> Warp | None:
    """The sampling, with the tensors it holds on the draft's device."""
    if not packed:
        return None
    warp: Warp = torch.load(io.BytesIO(packed), map_location=device, weights_only=False)
    return warp
