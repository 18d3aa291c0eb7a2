"""Runs the draft model of the `parallel` draft. `LocalDrafter` runs it in this process; `_remote_drafter.RemoteDrafter` has
the same interface and runs it in a second process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.decoding.draft import Warp, sample_index
from mmaccel.core.decoding.watching import DraftStream
from mmaccel.core.layout import TokenLayout
from mmaccel.core.report import time_after_device_work
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.draft._draft_model import IDS, Conversation

SUPPORT = 1024
"""A token is sampled from at most this many of the likeliest tokens. Their probabilities are sent with it."""


@dataclass(frozen=True)
class TokenDistribution:
    """The distribution that a token was sampled from, on the host: ids [k] int32, probabilities [k] float32 with sum 1."""

    ids: Tensor
    weights: Tensor

    def packed(self) -> bytes:
        """Return the distribution as bytes: the number of tokens (uint32), their ids, and their probabilities."""
        pieces = self.ids.numpy().tobytes(), self.weights.numpy().tobytes()
        return len(self.ids).to_bytes(4, "little") + b"".join(pieces)

    @staticmethod
    def dense(rows: Sequence[TokenDistribution], vocab: int, device: torch.device) -> Tensor:
        """Return the distributions of n tokens as a tensor [n, vocab] float32, zero for tokens not in them."""
        out = torch.zeros(len(rows), vocab, device=device)
        row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(one.ids) for one in rows]))
        column, weight = (torch.cat([getattr(one, name) for one in rows]) for name in ("ids", "weights"))
        out[row.to(device), column.long().to(device)] = weight.to(device)
        return out


@dataclass(frozen=True)
class DraftedTokens:
    """The result of a drafting request: the new `ids`, the `seconds` they took, the seconds `prompt_s` in which the draft
    read the prompt, the number of `pruned` prompt tokens, and each token's distribution (`odds`; empty if greedy)."""

    ids: list[int]
    seconds: float
    prompt_s: float = 0.0
    pruned: int = 0
    odds: tuple[TokenDistribution, ...] = ()


class DraftDecoder:
    """Decodes with a draft model on the host's request. `line` holds the token ids after the prompt; the model has run the
    first `_run` of them.

    When the target samples, a token is drawn from the draft's own distribution under the target's sampling settings, cut to
    its `SUPPORT` likeliest tokens. In greedy decoding it is the likeliest token.
    """

    def __init__(self, runner: Runner, device: torch.device | str, vocab: int) -> None:
        self._runner, self._device, self._vocab = runner, torch.device(device), vocab
        self.talk = Conversation(runner, device)
        self.line: list[int] = []
        self._run = 0
        self.prompt_s, self.pruned = 0.0, 0

    def announce_prompt(self, inputs: Mapping[str, Any]) -> None:
        """End the last turn; register the next prompt, `inputs`, without running it. Its ids hold all earlier turns."""
        inputs = dict(inputs)
        ids = inputs.pop(IDS, inputs["input_ids"])[0]
        self.talk.end_turn(torch.tensor(self.line[: self._run], dtype=torch.long))
        self.line, self._run, self._prompt = [], 0, ids.cpu()
        self.talk.announce_prompt(inputs, ids)

    def read_prompt(
        self,
        inputs: Mapping[str, Any],
        keep: Tensor | None,
        compact: bool,
        warp: Warp | None,
        seed: int,
        stream: LocalDraftStream | None = None,
    ) -> None:
        """Run the prompt `inputs`, only its columns `keep` if given (renumbered if `compact`), or `stream`'s question
        instead. `warp` makes the target's sampling probabilities of logits (None: greedy); `seed` starts the draws."""
        began = time_after_device_work(self._device)
        self._warp, self._random = warp, torch.Generator().manual_seed(seed)
        if stream is not None:
            self._prompt = inputs["input_ids"][0].cpu()
            self._runner = runner = stream.read_question()
            self._after_prompt, self.pruned = runner.logits[0], stream.pruned_tokens
        else:
            self.announce_prompt(inputs)
            self._after_prompt, self.pruned = self.talk.read(keep, compact)[0], self.talk.pruned
        self._origin = self._runner.length()
        self.prompt_s = time_after_device_work(self._device) - began

    def draft_tokens(self, length: int, fix: Sequence[int], count: int) -> DraftedTokens:
        """Cut `line` to its first `length` tokens, append the ids `fix`, then generate and return `count` more tokens."""
        began = time.perf_counter()
        self.line[length:] = fix
        # At least one token is run, for the logits after it.
        run = min(self._run, length, max(len(self.line) - 1, 0))
        if run < self._run:
            self._runner.truncate(self._origin + run)
        self._run = run
        start, odds, drafted = len(self.line), [], list[Tensor]()
        for _ in range(count):
            logits = self._after_prompt
            if self.line or drafted:
                feed = (
                    torch.tensor(self.line[self._run :], device=self._device) if not drafted else drafted[-1]
                )
                self._run += len(feed)
                logits = self._runner.step(feed[None])[0, -1]
            logits = logits[: self._vocab]
            if self._warp is None:
                drafted.append(logits.argmax(-1, keepdim=True))  # the host goes on without it
                continue
            before = torch.cat([self._prompt, torch.tensor(self.line, dtype=torch.long)])
            odds.append(_likeliest(self._warp(before.to(logits.device), logits)))
            self.line.append(int(odds[-1].ids[sample_index(odds[-1].weights, self._random)]))
        self.line += torch.cat(drafted).tolist() if drafted else []
        seconds = time.perf_counter() - began
        return DraftedTokens(self.line[start:], seconds, self.prompt_s, self.pruned, tuple(odds))


def _likeliest(q: Tensor) -> TokenDistribution:
    """The `SUPPORT` likeliest tokens of a distribution q [V], and their probabilities among themselves."""
    top = q.float().topk(min(SUPPORT, q.shape[-1]))
    weights = top.values.cpu()
    there = int((weights > 0).sum())
    weights = weights[:there] / weights[:there].double().sum()
    return TokenDistribution(top.indices[:there].to("cpu", torch.int32), weights.float())


class LocalDrafter:
    """A draft model in this process, with the interface of `RemoteDrafter`. On a CPU it drafts when the tokens are
    collected; on CUDA it drafts in a CUDA stream of its own, beside the target."""

    def __init__(self, peer: ModelView, vocab: int, device: torch.device) -> None:
        self._writer = DraftDecoder(peer.runner(), peer.device, vocab)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._asked: tuple[int, list[int], int] | None = None

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
        """Start a prompt; arguments as in `RemoteDrafter.begin`. The draft runs it when it drafts the first window."""
        self._writer.talk.runner.lasting = lasts
        warp = None if warp is None else _at(warp, inputs["input_ids"].device)
        self._unread: dict[str, Any] | None
        self._unread = dict(inputs=inputs, keep=None, compact=compact, warp=warp, seed=seed)
        if isinstance(stream, LocalDraftStream):
            # What it holds is written by passes of the session, in their order on the device.
            self._unread["stream"], self._stream = stream, None
        self._wait()

    def keep(self, columns: Tensor) -> None:
        assert self._unread is not None
        self._unread["keep"] = columns
        self._wait()

    def _wait(self) -> None:
        """What is read may still be on its way on the target's stream; later work there is not waited for."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def request_tokens(self, length: int, fix: list[int], count: int) -> None:
        self._asked = length, fix, count

    def collect_tokens(self, limit_s: float) -> DraftedTokens | None:
        assert self._asked is not None
        with torch.cuda.stream(self._stream):
            if self._unread is not None:
                self._writer.read_prompt(**self._unread)
                self._unread = None
            return self._writer.draft_tokens(*self._asked)

    def continues_from(self, previous: Any, ids: Tensor, past: TokenLayout) -> bool:
        """Return whether the draft can continue from `previous`, its state after the last turn, with the prompt `ids` [S] of
        the whole conversation; `past` is the layout of the columns that the target's cache holds."""
        if not (isinstance(previous, DraftDecoder) and previous.talk.is_continued_by(ids, past)):
            return False
        self._writer = previous
        return True

    def state_for_next_turn(self, ids: Tensor) -> Any:
        """Return the draft's state, from which the turn after prompt `ids` [S] may continue."""
        if self._unread is not None:
            self._writer.announce_prompt(self._unread["inputs"])
        return self._writer

    def close(self, deadline: Any = None) -> None:
        """Do nothing, as a draft in this process has nothing to free."""


def _at(warp: Warp, device: torch.device) -> Warp:
    """Runs `warp` on the device of its own tensors, for a draft on another device."""
    return lambda ids, logits: warp(ids.to(device), logits.to(device))
