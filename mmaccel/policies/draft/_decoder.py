"""A draft model that generates for `parallel`: one sequence, which can go back to any token and go on from there.

`Local` runs it in this process, `_remote_drafter.Remote` in another; to the pipeline they are alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.draft import Warp
from mmaccel.core.verify import draw
from mmaccel.policies.draft._draft_model import moved

SUPPORT = 1024
"""A token is sampled from at most this many of the likeliest tokens. Their probabilities are sent with it."""


@dataclass(frozen=True)
class TokenDistribution:
    """The distribution of a sampled token, on the host: token ids [k] int32, and probabilities [k] float32 that sum to 1."""

    ids: Tensor
    weights: Tensor

    def packed(self) -> bytes:
        """How many tokens there are (uint32), their ids, and their probabilities."""
        pieces = self.ids.numpy().tobytes(), self.weights.numpy().tobytes()
        return len(self.ids).to_bytes(4, "little") + b"".join(pieces)

    @staticmethod
    def dense(rows: Sequence[TokenDistribution], vocab: int, device: torch.device) -> Tensor:
        """[n, vocab] float32: the distributions of n tokens, zero for tokens that could not be sampled."""
        out = torch.zeros(len(rows), vocab, device=device)
        row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(one.ids) for one in rows]))
        column, weight = (torch.cat([getattr(one, name) for one in rows]) for name in ("ids", "weights"))
        out[row.to(device), column.long().to(device)] = weight.to(device)
        return out


@dataclass(frozen=True)
class DraftedTokens:
    """The draft's new `ids`, the seconds they took, the seconds of its prompt, and the distribution of each token; `odds` is
    empty for greedy tokens."""

    ids: list[int]
    seconds: float
    prompt_s: float = 0.0
    odds: tuple[TokenDistribution, ...] = ()


class DraftDecoder:
    """Writes after a prompt. `line` are the tokens after the prompt, of which the first `_run` have been run.

    Under sampling a token is drawn from the draft's own distribution, as the target's sampling shapes it, cut to its
    `SUPPORT` likeliest tokens; otherwise it is the likeliest one.
    """

    def __init__(self, runner: Runner, device: torch.device | str, vocab: int) -> None:
        self._runner, self._device, self._vocab = runner, torch.device(device), vocab
        self.line: list[int] = []
        self._run = 0
        self.prompt_s = 0.0

    def read(
        self,
        inputs: Mapping[str, Any],
        keep: Tensor | None = None,
        compact: bool = False,
        warp: Warp | None = None,
        seed: int = 0,
    ) -> None:
        """Run the prompt, or the columns `keep` of it. `warp` is the target's sampling, `seed` the draft's."""
        began = time.perf_counter()
        self._prompt = inputs["input_ids"][0].cpu()
        self._warp, self._random = warp, torch.Generator().manual_seed(seed)
        inputs = moved(inputs, self._device)
        self._after_prompt = self._runner.prefill(inputs, *(() if keep is None else (keep, compact)))[0]
        self._origin = self._runner.length()
        self.prompt_s = time.perf_counter() - began

    def write(self, length: int, fix: Sequence[int], count: int) -> DraftedTokens:
        """Go back to the first `length` tokens, take `fix` as the next ones, and write `count` more."""
        began = time.perf_counter()
        self.line[length:] = fix
        # At least one token is run, for the logits after it.
        run = min(self._run, length, max(len(self.line) - 1, 0))
        if run < self._run:
            self._runner.truncate(self._origin + run)
        self._run = run
        start, odds = len(self.line), []
        for _ in range(count):
            logits = self._after_prompt
            if self.line:
                feed = torch.tensor([self.line[self._run :]], device=self._device)
                self._run = len(self.line)
                logits = self._runner.step(feed)[0, -1]
            logits = logits[: self._vocab]
            if self._warp is None:
                self.line.append(int(logits.argmax()))
                continue
            before = torch.cat([self._prompt, torch.tensor(self.line, dtype=torch.long)])
            odds.append(_likeliest(self._warp(before.to(logits.device), logits)))
            self.line.append(int(odds[-1].ids[draw(odds[-1].weights, self._random)]))
        return DraftedTokens(self.line[start:], time.perf_counter() - began, self.prompt_s, tuple(odds))


def _likeliest(q: Tensor) -> TokenDistribution:
    """The `SUPPORT` likeliest tokens of a distribution q [V], and their probabilities among themselves."""
    top = q.float().topk(min(SUPPORT, q.shape[-1]))
    weights = top.values.cpu()
    there = int((weights > 0).sum())
    weights = weights[:there] / weights[:there].double().sum()
    return TokenDistribution(top.indices[:there].to("cpu", torch.int32), weights.float())


@torch.no_grad()
def bare_step_s(runner: Runner, device: torch.device | str) -> float:
    """Seconds of a step after a very short prompt: no pruner makes steps faster than this."""
    ids = torch.zeros(1, 4, dtype=torch.long, device=device)
    runner.prefill({"input_ids": ids})
    times = []
    for _ in range(7):
        began = time.perf_counter()
        int(runner.step(ids[:, :1])[0, -1].argmax())
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])  # the first ones may be compiled and captured


class Local:
    """A draft in this process. On a CPU it works when its window is collected; on CUDA on a stream of its own."""

    def __init__(self, peer: ModelView, vocab: int, device: torch.device) -> None:
        self._writer = DraftDecoder(peer.runner(), peer.device, vocab)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._asked: tuple[int, list[int], int] | None = None

    def begin(
        self, inputs: Mapping[str, Any], warp: Warp | None, pruned: bool, compact: bool, seed: int
    ) -> None:
        """As that of `Remote`; the prompt is read with the first window."""
        warp = None if warp is None else _at(warp, inputs["input_ids"].device)
        self._unread: dict[str, Any] | None = dict(inputs=inputs, compact=compact, warp=warp, seed=seed)
        self._ready: list[torch.cuda.Event] = []
        self._mark()

    def keep(self, columns: Tensor) -> None:
        assert self._unread is not None
        self._unread["keep"] = columns
        self._mark()

    def _mark(self) -> None:
        """The columns may still be on their way on the target's stream; later work there is not waited for."""
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._stream.device))
            self._ready.append(event)

    def ask(self, length: int, fix: list[int], count: int) -> None:
        self._asked = length, fix, count

    def collect(self, limit_s: float) -> DraftedTokens | None:
        assert self._asked is not None
        with torch.cuda.stream(self._stream):
            if self._unread is not None:
                for event in self._ready:
                    event.wait(self._stream)
                self._writer.read(**self._unread)
                self._unread = None
            return self._writer.write(*self._asked)

    def close(self) -> None:
        """Nothing is to be freed."""


def _at(warp: Warp, device: torch.device) -> Warp:
    """Runs `warp` on the device of its own tensors, for a draft on another device."""
    return lambda ids, logits: warp(ids.to(device), logits.to(device))
