"""Questions to an ingested film under drafts with replayed verdicts: the step "drafted" of `bench/stream.py`.

Without a draft, with one in turns, and with one in a second process on the target's device and, where there is one, on the
next; at the acceptance of the mark and at one at which no draft can gain: seconds to the first token, tokens a second. Rows
in the file are not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from asking import spread
from ingest import before, recipe_of, take_in, without_tower
from replayed import RANKS, verdicts
from scenes import QUESTION, SHAPE, build
from timing import Log
from torch import Tensor, nn
from watching import HELD, Sizes

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.watching import DraftStreamSettings
from mmaccel.core.decoding.worker import READY, MessageSocket, Worker
from mmaccel.core.streams.asking import QuestionRunner
from mmaccel.policies.draft import Parallel, Sequential
from mmaccel.policies.draft._draft_decoder import DraftDecoder
from mmaccel.policies.draft._draft_model import draft_stream
from mmaccel.policies.draft._remote_drafter import serve_decoder
from mmaccel.policies.draft._remote_stream import RemoteDraftStream

DRAFT = "llava-onevision-0.5b"
FIRST_S, GAIN, LEAST = 0.030, 1.5, 0.98
WARM_S = 120.0
"""Seconds that kernels may compile before the questions that count."""
KEEPS = (0.8, 0.05)
"""Chances that a drafted token is kept: that of the mark, and one at which no draft can gain."""


@contextmanager
def replaying(target: nn.Module | None, keep: float, seed: int = 0) -> Iterator[None]:
    """While inside, questions say the number after the last token: those to `target` with chance `keep` for each row, those
    to a draft always (see `replayed.py`). The model's own answer is computed, and written over."""
    dice, prefill, step = torch.Generator().manual_seed(seed), QuestionRunner.prefill, QuestionRunner.step

    def said(runner: Any, real: Tensor, ids: Tensor) -> Tensor:
        most = real.shape[-1] - RANKS
        after = (ids.to(real.device)[:, None] + 1 + torch.arange(RANKS, device=real.device)) % most
        out, worth = torch.zeros_like(real), torch.arange(RANKS, 0, -1, device=real.device, dtype=real.dtype)
        out.scatter_(1, after, worth.expand(len(after), RANKS))
        if runner.adapter.model is target:
            rank = verdicts(len(after), keep, dice).to(real.device)
            out.scatter_(1, after.gather(1, rank[:, None]), float(2 * RANKS))
        return out

    def read(self: Any, *given: Any, **named: Any) -> Tensor:
        self.logits = said(self, prefill(self, *given, **named), self.ids[-1:])
        return self.logits

    def go_on(self: Any, ids: Tensor, branches: Any = None) -> Tensor:
        return said(self, step(self, ids, branches)[0], ids[0])[None]

    with patch.object(QuestionRunner, "prefill", read), patch.object(QuestionRunner, "step", go_on):
        yield


def draft_model(device: str, small: bool) -> nn.Module:
    model = mmaccel.load_model("tiny-ov-draft").to(device) if small else build(device, False, DRAFT)[0]
    return model.to(torch.float32 if small else torch.bfloat16)


class ReplayedParallel(Parallel):
    """A draft of `DRAFT`'s shape in a second process on the target's device or `away` from it, that is always right."""

    service: ClassVar[str] = "drafted:serve"
    away: ClassVar[str | None] = None

    def _worker(self, target: Any) -> Worker:
        options = {
            "device": self.away or str(target.device),
            "vocab": target.geometry.vocab,
            "film": self.film,
        }

        def begin() -> Worker:
            worker = Worker(self.service, options, silence_s=120.0)
            worker.wait(READY, 240.0)
            return worker

        return target.get_or_create(f"replayed draft {self.away}", begin, lambda worker: worker.alive)  # type: ignore[no-any-return]

    film: ClassVar[list[Any]] = []
    """Frames and scenes of the film, and whether the model is the tiny one."""


class ReplayedElsewhere(ReplayedParallel):
    away = "cuda:1"


def serve(wire: MessageSocket, options: dict[str, Any]) -> None:
    """The second process."""
    frames, kinds, small = options["film"]
    device = torch.device(options["device"])
    model = draft_model(options["device"], small)
    family = adapter_for(model)
    wire.send(READY, family.geometry(model).vocab)

    keeper = ModelView(model, family, adapter_for)

    def watch(told: DraftStreamSettings) -> Any:
        return draft_stream(model, told, keeper)

    with without_tower(frames, kinds), replaying(None, 1.0):
        serve_decoder(
            wire, lambda: DraftDecoder(family.runner(model), device, options["vocab"]), device, watch
        )


def drafted_step(options: argparse.Namespace, log: Log) -> None:
    sizes = Sizes(options)
    HELD.drop("rekv", "mosaic")
    model, _ = HELD.model(sizes)
    tokens = 12 if sizes.small else 128
    ReplayedParallel.film = [sizes.frames, sizes.kinds, sizes.small]
    drafts: dict[str, Callable[[], Any]] = {
        "off": lambda: "off",
        "sequential": lambda: Sequential(model=draft_model(str(sizes.device), sizes.small), window=5),
    }
    if sizes.device.type == "cuda" and torch.cuda.device_count() > 1:
        drafts["parallel, next device"] = ReplayedElsewhere
    drafts["parallel"] = ReplayedParallel
    config: Any = model.generation_config
    ends, config.eos_token_id = config.eos_token_id, -1  # no answer ends before its last token
    try:
        for way, made in drafts.items():
            wanted = [keep for keep in KEEPS if before(log, case="drafted", way=way, keep=keep) is None]
            if wanted:
                ask_under(way, made(), wanted, tokens, sizes, log)
    finally:
        config.eos_token_id = ends
    for way in list(drafts)[1:]:
        for keep in KEEPS:
            one, plain = (before(log, case="drafted", way=name, keep=keep) for name in (way, "off"))
            assert one is not None and plain is not None
            gain, least = (one["tokens_s"] / plain["tokens_s"], one["least_s"] / plain["tokens_s"])
            marks = {"mark": GAIN if keep == KEEPS[0] else LEAST, "mark_first_s": FIRST_S}
            log.row(
                case="drafted ratio", way=way, keep=keep, gain=gain, least=least, p50_s=one["p50_s"], **marks
            )
            print(
                f"drafted {way} at {keep}: {gain:.2f} x no draft (mark {marks['mark']}), slowest question {least:.2f} x, "
                f"first token {one['p50_s'] * 1e3:.1f} ms (mark {FIRST_S * 1e3:.0f})",
                flush=True,
            )


def warm_up(session: mmaccel.VideoSession, tokens: int, drafts: bool) -> None:
    """Ask until what compiles has: three times, and with a draft until it has drafted for three whole answers. A process
    whose kernels compile says nothing for longer than an answer lasts."""
    began, whole = time.perf_counter(), 0
    while whole < 3 and time.perf_counter() - began < WARM_S:
        session.ask(QUESTION, tokens)
        counters = session.report().draft["counters"]
        whole += not drafts or counters.get("alone", 0.0) < tokens / 8
    print(f"  warm after {time.perf_counter() - began:.1f} s", flush=True)


def ask_under(way: str, draft: Any, keeps: list[float], tokens: int, sizes: Sizes, log: Log) -> None:
    """Rows of the questions to one film under one draft."""
    model, processor = HELD.model(sizes)
    how = recipe_of("sparse", sizes, model, sizes.frames)
    with ExitStack() as stack:
        stack.enter_context(without_tower(sizes.frames, sizes.kinds))
        session = stack.enter_context(mmaccel.VideoSession(model, processor, None, **how, draft=draft))
        take_in(session, "sparse", sizes.frames, f"drafted {way}")
        live: Any = session._live
        if isinstance(live.draft_stream.stream, RemoteDraftStream):
            live.draft_stream.stream.wait_until_done()  # the draft has read the film too
        with replaying(model, KEEPS[0]):
            warm_up(session, tokens, draft != "off")
        for keep in keeps:
            with replaying(model, keep):
                answers = [session.ask(QUESTION, tokens) for _ in range(sizes.questions + 3)][3:]
            # The draft's reading is part of its price.
            both = [(a, a.counters.get("draft_wait_seconds", 0.0)) for a in answers]
            paces = [1 / (1 / (a.tokens_per_s or 1e-9) + w / max(len(a.ids) - 1, 1)) for a, w in both]
            figures = {
                **spread([one.ttft_s for one in answers]),
                "tokens_s": statistics.median(paces),
                "least_s": min(paces),
                "drafted": statistics.fmean(one.counters.get("drafted", 0.0) for one in answers),
                "accepted": statistics.fmean(one.counters.get("accepted", 0.0) for one in answers),
                "tokens": tokens,
            }
            failed = session.report().draft["failed"]
            log.row(case="drafted", way=way, keep=keep, model=SHAPE, draft=DRAFT, failed=failed, **figures)
            print(
                f"drafted {way:10} at {keep}: first token p50 {figures['p50_s'] * 1e3:6.1f} ms, "
                f"{figures['tokens_s']:7.1f} tokens/s, {figures['accepted']:.0f} of {figures['drafted']:.0f} kept, "
                f"failed: {failed}",
                flush=True,
            )
