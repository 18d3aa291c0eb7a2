"""The `parallel` draft (ParallelVLM): drafts the next window while the target verifies the last one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.draft import DraftState, Prompt, Proposal
from mmaccel.core.decoding.watching import DraftStream, DraftStreamSettings
from mmaccel.core.decoding.worker import DRAFT_GPU, READY, Worker
from mmaccel.core.errors import DraftError, RecipeError
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.draft._draft_decoder import LocalDrafter, TokenDistribution
from mmaccel.policies.draft._draft_model import (
    IDS,
    MODEL,
    VideoDraftStrategy,
    check_text,
    check_vocabulary,
    draft_folder,
    free_device,
    model_devices,
)
from mmaccel.policies.draft._remote_drafter import MICRO, SERVICE, RemoteDrafter
from mmaccel.policies.draft._remote_stream import RemoteDraftStream
from mmaccel.policies.draft._window_model import (
    PipelineStats,
    PipelineTimes,
    ReadingChoice,
    ReadingStats,
    best_window,
)

FIRST_WINDOW = 4
"""Tokens of the start-up window, and of windows until both times are known."""
QUIET_S = 2.0
"""Seconds without a word, when an answer ends, after which that is told: the target has gone on by itself meanwhile."""


@register("draft", "parallel")
@dataclass(frozen=True, kw_only=True)
class Parallel(VideoDraftStrategy):
    """ParallelVLM's pipeline: a draft generates window i while the target verifies window i - 1.

    Pre-verify: the target runs the last committed token alone, which verifies the first token of the window being drafted.
    If it is accepted, post-verify: the target runs the rest of that window, which verifies it and the first token of the
    next one. A rejection returns the pipeline to pre-verify. The draft reads the prompt while the target does, and has a
    window ready when the target's first token comes. After ParallelVLM (arXiv 2603.19610, Algorithm 1) and PEARL
    (2408.11850).

    In greedy decoding only ids and counts are exchanged. With sampling the draft draws each token from its own distribution,
    cut to the 1,024 likeliest, which is sent with it, and the target keeps it with probability min(1, p / q), which is exact
    (Leviathan et al., arXiv 2211.17192). Serves one beam, and on `past_key_values` of an earlier turn one sequence.

    In a session the draft watches the frames that the target watches; its process is at most one clip behind.

    The sequences of a batch go through the pipeline each in its own mode, a round of each in turn. One process drafts for
    all of them; while the target verifies one it drafts for the others.

    model     the draft's folder or shipped name, or "beside": the folder beside the target's with its name and ``-draft``;
              a loaded module, the target itself too, with `process` off
    window    tokens a round; None: the ratio of a target step to a draft step, measured as the context grows, rounded the
              way that gains more. A measured window depends on the clock, and with it the random numbers that tokens are
              drawn with; so does a second process, which may be ready in time or not. For reproducible text with a seed,
              give a window and set `process` to false
    most      the longest measured window
    prune     a pruner of stage "draft": the draft reads only what the target's early layers find worth keeping
    prune_when  "always"; or "measured": answer by answer the draft reads the whole video or what `prune` keeps of it,
              whichever is expected to be faster by the measured steps and acceptance rate; in a session always what `prune`
              keeps of the frames that the draft's memory shows
    kv        in a session, the memory of the draft's own stream; null: one like the target's
    process   True: a second process, which loads the model by itself; False: this one, on a CUDA device on a second CUDA
              stream, except in a session
    device    of the second process; None: the CUDA device after the target's if there is one, else the target's. Where
              MMACCEL_DRAFT_GPU names a GPU, the second process sees that one alone, as cuda:0, which None then means
    threads   of the second process on a CPU; None: as many as here
    start_s, timeout_s  the longest wait for the second process to be ready, and for a message from it later
    """

    service: ClassVar[str] = SERVICE
    no_tensor_parallel: ClassVar[str | None] = "drafts by a clock, not by that of all processes"

    window: int | None = limited(None, at_least(1, ", or null to have it measured"))
    most: int = limited(16, at_least(1))
    prune_when: Literal["always", "measured"] = "always"
    process: bool = True
    device: str | None = None
    threads: int | None = limited(None, at_least(1))
    start_s: float = 120.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune_when == "measured" and self.prune is None:
            raise RecipeError("parallel: prune_when is 'measured' and prune is null; give a pruner.")
        if self.start_s <= 0 or self.timeout_s <= 0:
            raise RecipeError("parallel: start_s and timeout_s are seconds; give more than 0.")
        if self.process and not isinstance(self.model, str):
            raise RecipeError(
                "parallel: model is loaded already and a second process loads its own; give its folder, or set process to "
                "false."
            )

    @property
    def max_rollback(self) -> int:
        return (self.window or self.most) + 1

    def check_target(self, target: ModelView) -> None:
        if self.process and not target.config_only:
            self._worker(target)
        else:
            super().check_target(target)

    def open_stream(self, target: ModelView, session: DraftStreamSettings) -> DraftStream:
        if not self.process:
            return super().open_stream(target, session)
        return RemoteDraftStream(
            self._worker(target), replace(session, kv=self.kv or session.kv, prune=self.prune)
        )

    def open(self, target: ModelView) -> DraftState:
        vocab = target.geometry.vocab
        engine: LocalDrafter | RemoteDrafter
        bare_s: float | None = None
        if self.process:
            worker = self._worker(target)
            engine = RemoteDrafter(worker, vocab)
            bare_s = worker.ready[1] * MICRO if len(worker.ready) > 1 else None
        else:
            engine = LocalDrafter(self.peer(target), vocab, target.device)
        measured = self.prune_when == "measured"
        shares = target.get_or_create("parallel shares", lambda: ReadingChoice(bare_s)) if measured else None
        return ParallelDraftState(engine, self, model_devices(target.model), vocab, shares)

    def _worker(self, target: ModelView) -> Worker:
        first, gpu = next(target.model.parameters()), os.environ.get(DRAFT_GPU)
        free = "cuda:0" if gpu else free_device(model_devices(target.model))
        options = {
            "model": draft_folder(self.name, target, str(self.model)),
            "family": target.adapter.name,
            "dtype": str(first.dtype).removeprefix("torch."),
            "device": self.device or free,
            "vocab": target.geometry.vocab,
            "threads": self.threads or torch.get_num_threads(),
            "bare": self.prune_when == "measured",
            "env": {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {},
        }

        def begin() -> Worker:
            worker = Worker(self.service, options, silence_s=self.timeout_s)
            try:
                (vocab, *_) = worker.wait(READY, self.start_s).numbers
                check_vocabulary(target.geometry.vocab, vocab)
            except DraftError as error:
                worker.close()
                raise DraftError(f"{'' if str(error).startswith(MODEL) else 'parallel: '}{error}") from error
            return worker

        worker: Worker = target.get_or_create(f"parallel {options}", begin, lambda worker: worker.alive)
        worker.wire.silence_s = self.timeout_s
        return worker


@dataclass(frozen=True)
class _Turn:
    """What a turn leaves: what the engine has `read`, and whether that was `pruned`."""

    read: Any
    pruned: bool


class ParallelDraftState(DraftState):
    """The draft's side of the pipeline (ParallelVLM, Algorithm 1): requests windows of drafted tokens, and proposes them.

    _said     committed tokens after the prompt
    _line     the draft's tokens: the committed ones, then those drafted ahead. It does not change while a window is being
              drafted (`_busy`)
    _due      whether to wait for the window being drafted; False once it is late
    _judged   number of drafted tokens that this round verifies: those ahead, and the next window's first if in time
    _odds     for each index of `_line`, the distribution that a sampled token was drawn from
    devices   the target's devices

    A draft that cannot save time pauses, and does not read prompts meanwhile; in a session a pause lasts across answers.
    """

    def __init__(
        self,
        engine: LocalDrafter | RemoteDrafter,
        choice: Parallel,
        devices: Sequence[torch.device],
        vocab: int,
        shares: ReadingChoice | None = None,
    ) -> None:
        self._engine, self._choice = engine, choice
        self._shares = shares
        self._pruner: TokenPruner | None = choice.pruner
        self._way: ReadingStats | None = (
            None  # whose figures those of this answer are, where they are measured
        )
        self._read, self._unused = "", list[str]()
        self._waited = [device for device in devices if device.type == "cuda" and choice.process]
        self._said: list[int] = []
        self._line: list[int] = []
        self._odds: dict[int, TokenDistribution] = {}
        self._last, self._vocab = devices[-1], vocab
        self._ahead = self._judged = 0
        self._busy = self._due = False
        self._pace = PipelineTimes()
        self._window = choice.window or min(FIRST_WINDOW, choice.most)
        self._tally = PipelineStats()
        self._resume, self._asked = 0, 0.0
        self._unsent: Any = None
        self._deadline: Any = None

    def begin(self, prompt: Prompt) -> None:
        self._remaining, self._unused = prompt.max_new_tokens or sys.maxsize, self._choice.unused(prompt)
        self._prompt, inputs, self._deadline = prompt.ids[0], prompt.inputs, prompt.deadline
        before = self._taken_up(prompt) if prompt.past is not None else None
        if prompt.past is not None:
            inputs = {**inputs, IDS: prompt.ids}
        if prompt.stream is not None:
            self._pruner = None  # which acts on what the draft's stream recalls
        if before is not None:
            self._pruner = self._pruner if before.pruned else None
        elif self._shares is not None and self._pruner is not None:
            given = self._pruner, prompt.ids.shape[1], self._choice.window, self._choice.most
            self._way, self._pruner, self._read = self._shares.reading(*given, prompt.warp is not None)
        pruner, seed, generator = self._pruner, 0, prompt.generator
        if prompt.warp is not None:
            # The draft's draws follow from the target's random numbers.
            device = "cpu" if generator is None else generator.device
            seed = int(torch.randint(1 << 62, (1,), generator=generator, device=device))
        pruned, compact = pruner is not None, pruner is not None and pruner.compact
        self._unsent = inputs, prompt.warp, pruned, compact, seed, prompt.stream, prompt.lasts
        if prompt.stream is not None:
            self._pace = prompt.stream.pace = prompt.stream.pace or PipelineTimes()
            self._pace.begin_answer()
            self._resume = self._pace.rest
        if not self._resume:
            self._send()
        if pruner is None:
            self._ask()

    def _send(self) -> None:
        """Give the engine the prompt, if it has not got it."""
        if self._unsent is not None:
            self._engine.begin(*self._unsent)
        self._unsent = None

    def _taken_up(self, prompt: Prompt) -> _Turn | None:
        """The turn before, from which the engine goes on; None: it reads all anew, which is text."""
        assert prompt.past is not None
        before, past = prompt.previous_state, prompt.past.layout
        if isinstance(before, _Turn) and self._engine.continues_from(before.read, prompt.ids[0], past):
            return before
        check_text("parallel", past)
        return None

    def state_for_next_turn(self) -> _Turn:
        self._send()
        return _Turn(self._engine.state_for_next_turn(self._prompt), self._pruner is not None)

    def prompt_pruner(self, given: TokenPruner | None) -> TokenPruner | None:
        return self._pruner

    def keep_columns(self, columns: Tensor) -> None:
        self._engine.keep(columns)
        self._ask()

    def propose(self) -> Proposal:
        most = max(self._remaining - len(self._said) - 1, 0)
        ahead = self._line[len(self._said) :][:most] if self._agrees() else []
        self._ahead = len(ahead)
        self._began = time.perf_counter()
        return self._proposal(len(self._said), ahead)

    def _proposal(self, place: int, tokens: list[int]) -> Proposal:
        """`tokens`, which stand in the line from `place` on, with what they were drawn from."""
        odds = [self._odds[place + n] for n in range(len(tokens)) if place + n in self._odds]
        q = TokenDistribution.dense(odds, self._vocab, self._last) if odds else None
        return Proposal(torch.tensor(tokens, dtype=torch.long), q=q)

    def tail_token(self) -> Proposal:
        if self._busy:
            # What judges a step is launched behind it: the host waits for the step only where a window may come meanwhile.
            for device in self._waited:
                torch.cuda.current_stream(device).synchronize()
            self._pace.record_target_step(time.perf_counter() - self._began)
            # A window is waited for twice as long as a round takes; not at all while the draft reads, or is late already.
            round_s = max(self._pace.step_s, self._window * self._pace.draft_s)
            self._collect(0.05 + 2 * round_s if self._due else 0.0)
        place = len(self._said) + self._ahead
        tail = self._line[place : place + 1] if self._agrees() else []
        self._judged = self._ahead + len(tail)
        return self._proposal(place, tail)

    def observe_committed(self, committed: Tensor, kept: int) -> None:
        tokens = committed.tolist()
        first = not self._said
        if first and self._busy:
            self._collect(0.0)
            self._tally.ready = len(self._line)
            kept = int(self._line[:1] == tokens[:1])
        elif not first:
            mode = "post_verify" if self._ahead else "pre_verify" if self._judged else "alone"
            self._tally.figures[mode] += 1
            if self._judged:
                self._pace.record_verification(kept, kept < self._judged)
        self._said += tokens
        self._odds = {place: odds for place, odds in self._odds.items() if place >= len(self._said)}
        self._tally.record_round(kept, len(tokens) > kept)
        if not self._busy:
            self._ask()

    def _agrees(self) -> bool:
        return self._line[: len(self._said)] == self._said

    def _ask(self) -> None:
        """Have the next window written, after what is committed or, as long as it agrees, after what is ahead of that."""
        pace, choice, said = self._pace, self._choice, len(self._said)
        if said < self._resume:
            return
        self._send()
        if choice.window is None and pace.is_measured:
            self._window, gain = best_window(pace.step_s, pace.draft_s, pace.keep, choice.most)
            self._tally.gain = gain
            if len(self._line) <= said and (rest := pace.pause_length(gain)):
                self._tally.figures["pauses"] += 1
                self._resume, self._due = said + rest, False
                return
        length, fix = len(self._line), []
        if not self._agrees():
            both = zip(self._line, self._said, strict=False)
            length = next((n for n, (one, other) in enumerate(both) if one != other), length)
            fix, self._line = self._said[length:], list(self._said)
        count = min(self._window, self._remaining - len(self._line))
        if count < 1:
            return
        self._engine.request_tokens(length, fix, count)
        self._busy, self._asked = True, time.perf_counter()
        self._tally.windows.append(count)

    def _collect(self, limit_s: float) -> None:
        written = self._engine.collect_tokens(limit_s)
        if written is None:
            self._tally.figures["late"] += self._due
            self._due = False
            return
        self._busy, self._due = False, True
        self._odds |= dict(enumerate(written.odds, len(self._line)))
        self._line += written.ids
        self._tally.figures["drafted"] += len(written.ids)
        self._tally.prompt_s, self._tally.pruned = written.prompt_s, written.pruned
        self._pace.record_draft_steps(written.seconds, len(written.ids))

    def close(self) -> None:
        """Close the draft. Raises `DraftError` if its process has not answered a request for `QUIET_S` seconds or more."""
        late = self._busy and not self._due and self._tally.figures["drafted"]
        silent = time.perf_counter() - self._asked if late else 0.0
        self._busy = False
        self._pace.rest = max(0, self._resume - len(self._said))
        if self._way is not None:
            self._way.add(self._pace)
            self._way = None
        if self._unsent is None:
            self._engine.close(self._deadline)
        if silent >= QUIET_S:
            raise DraftError(
                f"the second process had said nothing for {silent:.1f} s when the answer ended; it is given up after "
                f"timeout_s, {self._choice.timeout_s:g} s."
            )

    def report_notes(self) -> list[str]:
        return [*self._unused, *filter(None, [self._read]), *self._tally.report_notes(self._pace)]

    def counters(self) -> dict[str, float]:
        waited = self._tally.prompt_s if isinstance(self._engine, LocalDrafter) else 0.0
        return {**self._tally.counters(self._pace, self._window), "draft_wait_seconds": waited}
