"""The training loop: a clock, an optimiser, checkpoints, a log."""

from __future__ import annotations

import copy
import json
import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel_lab.tiny import halves
from mmaccel_lab.tiny.configs import Spec, build_model, spec_of
from mmaccel_lab.train import evaluate, pixels, step
from mmaccel_lab.train.data import KINDS
from mmaccel_lab.train.dialect import Dialect
from mmaccel_lab.train.feeder import Feeder, Recipe
from mmaccel_lab.train.probe import Eye, Recall

WARM_UP, DECAY_FROM = 0.02, 0.72
FRESH_STEPS = 100
# Options that say where files were, not what was trained.
NOT_TOLD = ("name", "out", "resume", "initial", "began")
# Until when the readers' losses weigh much.
EARLY = 0.6
REPORT_SECONDS, SAVE_SECONDS, QUICK_SECONDS, DRAFT_QUICK_SECONDS = 10.0, 60.0, 110.0, 25.0
# A draft is done when it knows so much of a caption: one that always agrees with its target would measure nothing.
DRAFT_ENOUGH = 0.82


@dataclass(frozen=True, kw_only=True)
class Options:
    """A training run. `seconds` of wall clock from `began`, which take the schedule from `begin_at` (None: where the
    checkpoint stopped, or 0) to `stop_at`, fractions of the whole.

    `steps`: a schedule by steps instead of the clock. `budget`: about how many frames a step shows; `longest`: the
    longest video in frames.
    """

    name: str
    out: Path
    seconds: float
    began: float
    device: str = "cpu"
    seed: int = 0
    steps: int | None = None
    resume: Path | None = None
    initial: Path | None = None
    begin_at: float | None = None
    stop_at: float = 1.0
    rate: float = 1e-3
    workers: int = 0
    budget: int = 2048
    longest: int = 4096
    quick: bool = True
    fuse: bool = False


@dataclass
class Journal:
    """What a run leaves to read: losses by kind and accuracies over time; `save` writes curve.json."""

    head: dict[str, Any]
    losses: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        text = json.dumps(
            {**self.head, "losses": self.losses, "evals": self.evals}, indent=1, allow_nan=False
        )
        (folder / "curve.json").write_text(text + "\n", encoding="utf-8")


def _initialise(model: Any, spec: Spec, seed: int) -> None:
    """Weights of the size a narrow model wants: the stock 0.02 is made for widths of thousands."""
    generator = torch.Generator().manual_seed(seed)
    into_stream = ("o_proj", "down_proj", "out_proj", "fc2", "attn.proj")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.zero_()
            elif name.endswith("dt_bias"):
                # Heads that forget within two tokens, and up to a thousand: the inverse of softplus.
                parameter.copy_(torch.logspace(-3, -0.3, len(parameter)).expm1().log())
            if parameter.ndim < 2 or "position_embedding" in name:
                continue
            scale = 0.05 if "embed_tokens" in name else parameter[0].numel() ** -0.5
            if any(part in name for part in into_stream):
                scale *= (2 * spec.layers) ** -0.5
            parameter.normal_(0.0, scale, generator=generator)


def _figure(value: float) -> float | None:
    """Four places; None for what JSON cannot say."""
    return round(value, 4) if math.isfinite(value) else None


def rate_at(progress: float, peak: float) -> float:
    """Learning rate: linear warm-up, a plateau, then a cosine to nearly zero."""
    if progress < WARM_UP:
        return peak * max(0.02, progress / WARM_UP)
    if progress < DECAY_FROM:
        return peak
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - DECAY_FROM) / (1 - DECAY_FROM))))


class Trainer:
    """A model under training; see `run`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.spec = spec_of(options.name)
        self.device = torch.device(options.device)
        self.dialect = Dialect(self.spec)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            # cuDNN's attention builds a plan for each new length, 0.2 s a step, and nearly every step has one.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.step, self.progress, self.slowdown = 0, options.begin_at or 0.0, 1.0
        model: Any = build_model(self.spec, options.seed)
        _initialise(model, self.spec, options.seed)
        self.model = model.to(self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self.probes = torch.nn.ModuleDict(
                {"eye": Eye(self.spec.hidden), "recall": Recall(self.spec.hidden)}
            ).to(self.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.trained = [*self.model.parameters(), *self.probes.parameters()]
        decayed = [p for p in self.trained if p.ndim > 1]
        plain = [p for p in self.trained if p.ndim <= 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}],
            lr=options.rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.journal = Journal(
            {
                "model": options.name,
                "options": {k: v for k, v in asdict(options).items() if k not in NOT_TOLD},
            }
        )
        if options.initial is not None:
            loaded = type(self.model).from_pretrained(options.initial, dtype=torch.float32)
            self.model.load_state_dict(loaded.state_dict())
        if options.resume is not None:
            self._load(options.resume / "checkpoint.pt")
        if options.fuse:
            halves.compile_layers()
        self.model.train()
        self.stopped = False

    def _load(self, file: Path) -> None:
        if not file.is_file():
            raise ModelError(
                f"There is no {file} to resume from; give --resume the --out folder of an earlier run."
            )
        state = torch.load(file, map_location=self.device, weights_only=True)
        if state["name"] != self.options.name:
            raise ModelError(f"{file} holds {state['name']}, not {self.options.name}; resume the same model.")
        self.model.load_state_dict(state["model"])
        self.probes.load_state_dict(state["probes"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.slowdown = state["step"], state.get("slowdown", 1.0)
        if self.options.begin_at is None:
            self.progress = state["progress"]
        self.journal.losses, self.journal.evals = state["losses"], state["evals"]

    def save(self) -> None:
        """Write checkpoint.pt and curve.json into the out folder; a break while writing leaves the old file."""
        folder = self.options.out
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "name": self.options.name,
            "model": self.model.state_dict(),
            "probes": self.probes.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "progress": self.progress,
            "slowdown": self.slowdown,
            "head": self.journal.head,
            "losses": self.journal.losses,
            "evals": self.journal.evals,
        }
        torch.save(state, folder / "checkpoint.tmp")
        (folder / "checkpoint.tmp").replace(folder / "checkpoint.pt")
        self.journal.save(folder)

    def run(self) -> None:
        """Train until the schedule is over, the time is up or a signal comes; then save."""
        options = self.options
        recipe = Recipe(options.name, options.seed, options.budget, options.longest, options.steps)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: setattr(self, "stopped", True))
        feeder = Feeder(recipe, self.step, options.workers)
        meter = _Meter(self)
        try:
            # The first batch waits for workers to start, the first step compiles; the schedule must not pass meanwhile.
            batch = feeder.next(self.progress)
            clock: Callable[[], float] | None = None
            saved = quick = time.monotonic()
            while not self.stopped and self.progress < options.stop_at:
                try:
                    meter.add(batch, *self._train(batch))
                except torch.OutOfMemoryError:
                    print(
                        f"[{options.name}] step {self.step} skipped, out of memory: {batch.plan}", flush=True
                    )
                    self.optimiser.zero_grad(set_to_none=True)
                    torch.cuda.empty_cache()
                self.step += 1
                clock = clock or _clock(options, self.progress)
                self.progress = self.step / options.steps if options.steps else clock()
                if self.progress >= options.stop_at:
                    break
                if meter.due() and not meter.report():
                    self._recover(meter)
                now = time.monotonic()
                if options.quick and now - quick > (
                    DRAFT_QUICK_SECONDS if self.spec.target else QUICK_SECONDS
                ):
                    scores = self.measure(evaluate.DRAFT_QUICK if self.spec.target else evaluate.QUICK)
                    right, asked = scores.get("caption", {}).get("128", [0, 1])
                    if self.spec.target and right / max(1, asked) >= DRAFT_ENOUGH:
                        print(f"[{options.name}] a draft need not know more", flush=True)
                        break
                    meter.clear()
                    quick = time.monotonic()
                if now - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
                batch = feeder.next(self.progress)
            meter.report()
        finally:
            feeder.close()
            self.save()

    def _train(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        # The averages of a fresh optimiser are not to be trusted yet.
        settled = min(1.0, (self.step + 1) / FRESH_STEPS)
        for group in self.optimiser.param_groups:
            group["lr"] = rate_at(self.progress, self.options.rate) * self.slowdown * settled
        feed = step.upload(batch, self.device)
        generator = torch.Generator(self.device).manual_seed(self.options.seed * 1_000_003 + self.step)
        with torch.no_grad():
            frames = pixels.draw(feed.table, self.spec, feed.codec, generator)
        frames = frames.to(self.dtype)
        seen = step.look(self.model, self.spec, feed, frames)
        loss, sums, counts = step.losses(step.label_logits(self.model, feed, seen), feed)
        eye = self.probes["eye"](seen.features, feed.table)
        recall = self.probes["recall"](seen.halfway, feed.past, seen.noted, feed.owners)
        early = self.progress < EARLY
        (loss + (0.5 if early else 0.1) * eye + (0.3 if early else 0.1) * recall).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach(), sums, counts

    def _recover(self, meter: _Meter) -> None:
        """After a loss that is not a number: back to the last good weights, more slowly."""
        if meter.good is None:
            raise FloatingPointError("The loss was not a number from the start; lower --rate.")
        self.model.load_state_dict(meter.good[0])
        self.optimiser.load_state_dict(copy.deepcopy(meter.good[1]))
        self.slowdown *= 0.7
        print(
            f"[{self.options.name}] loss not finite: back to the last good weights, rate x{self.slowdown:.2f}",
            flush=True,
        )

    def measure(self, cases: tuple[evaluate.Case, ...], deadline: float = math.inf) -> evaluate.Scores:
        """Evaluate now (no longer than until `deadline`), print the table and keep it in the journal."""
        began = time.monotonic()
        budget = self.options.budget
        cases = tuple(case for case in cases if case.frames <= self.options.longest)
        self.model.eval()
        scores = evaluate.evaluate(
            self.model, self.spec, self.dialect, cases, budget=budget, deadline=deadline
        )
        self.model.train()
        self.journal.evals.append({"step": self.step, "progress": round(self.progress, 4), "scores": scores})
        print(f"[{self.options.name}] step {self.step}, {time.monotonic() - began:.1f} s", flush=True)
        print(evaluate.table(scores), flush=True)
        return scores


def _clock(options: Options, start: float) -> Callable[[], float]:
    """Progress by wall clock: from where it started to one at the end of the training part of the run."""
    # Kept back for saving and export, and at the end of the schedule for the evaluation.
    margin = min(42.0 if options.stop_at >= 1 else 12.0, 0.25 * options.seconds)
    begun, way = time.monotonic(), options.stop_at - start
    span = max(1e-3, options.began + options.seconds - margin - begun)
    return lambda: start + way * (time.monotonic() - begun) / span


class _Meter:
    """Losses and speed since the last report."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.good: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self.clear()

    def clear(self) -> None:
        """Begin anew, also to leave out the time that an evaluation took."""
        self.began = time.monotonic()
        self.steps = self.tokens = self.frames = 0
        self.sums: dict[str, Any] = defaultdict(float)
        self.last: Any = None

    def add(self, batch: Any, loss: Tensor, sums: Tensor, counts: Tensor) -> None:
        self.steps += 1
        self.tokens += batch.ids.size
        self.frames += batch.codec.size
        self.last = batch.plan
        self.sums["loss"] += loss
        self.sums["kinds"] += sums
        self.sums["counts"] += counts

    def due(self) -> bool:
        return time.monotonic() - self.began > REPORT_SECONDS

    def report(self) -> bool:
        """Print a line; False when the loss was not finite. A good state is kept to fall back on."""
        if not self.steps:
            return True
        trainer, took = self.trainer, time.monotonic() - self.began
        loss = float(self.sums["loss"]) / self.steps
        counts = self.sums["counts"].tolist()
        kinds = {k: s / n for k, s, n in zip(KINDS, self.sums["kinds"].tolist(), counts, strict=True) if n}
        memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0
        rate = trainer.optimiser.param_groups[0]["lr"]
        told = " ".join(f"{kind} {value:.3f}" for kind, value in kinds.items())
        print(
            f"[{trainer.options.name}] {100 * trainer.progress:5.1f}% step {trainer.step} {self.last.phase} "
            f"loss {loss:.3f} | {told} | {self.steps / took:.1f} steps/s {self.tokens / took / 1000:.0f}k tok/s "
            f"{self.frames / took:.0f} frames/s lr {rate:.1e} mem {memory:.1f} GiB",
            flush=True,
        )
        trainer.journal.losses.append(
            {
                "step": trainer.step,
                "progress": round(trainer.progress, 4),
                "phase": self.last.phase,
                "loss": _figure(loss),
                "kinds": {kind: _figure(value) for kind, value in kinds.items()},
            }
        )
        finite = math.isfinite(loss)
        if finite:
            weights = {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}
            self.good = weights, copy.deepcopy(trainer.optimiser.state_dict())
        self.clear()
        return finite
