"""A draft model beside its target: finding it, checking that both have one vocabulary, reading the prompt; and, for
`parallel`, writing after it.

`Local` writes in this process, `_remote_drafter.Remote` in another; to the pipeline they are alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Prompt, Warp, draw
from mmaccel.core.decoding.watching import DraftStream, Watching
from mmaccel.core.errors import DraftError, ModelError, RecipeError, shown
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.registry import policy, registry, with_base_dir
from mmaccel.core.streams.draft_stream import LocalDraftStream

PADDING = 1024
"""Rows by which the embeddings of one vocabulary may differ."""
BESIDE = "beside"
"""In the place of a draft's folder: the one beside the target's own that has its name and ``-draft``."""
SUPPORT = 1024
"""A token is sampled from at most this many of the likeliest tokens. Their probabilities are sent with it."""


def folder_of(name: str, target: ModelView, model: str) -> str:
    """The draft's folder; raises `DraftError` where none stands beside the target's."""
    if model != BESIDE:
        return model
    if target.folder is None:
        where = "the target was loaded from no folder"
    else:
        # Whole: "." has no name.
        beside = Path(f"{os.path.abspath(target.folder)}-draft")
        if beside.is_dir():
            return str(beside)
        where = f"there is no folder {beside}"
    raise DraftError(
        f"{name}: model is 'beside', as it is when none is given, and {where}; give the draft model's folder "
        "(--draft on the command line)."
    )


def devices_of(model: nn.Module) -> list[torch.device]:
    """Where the weights of a model lie, which may be spread over several devices."""
    return list(dict.fromkeys(p.device for p in model.parameters()))


def free_device(taken: Sequence[torch.device]) -> str:
    """The device for a second process: the first CUDA device that the target leaves free, from its own first one on."""
    first = taken[0]
    if first.type != "cuda":
        return str(first)
    count, numbers = torch.cuda.device_count(), {device.index or 0 for device in taken}
    after = [(n + (first.index or 0)) % count for n in range(count)]
    return next((f"cuda:{n}" for n in after if n not in numbers), str(first))


def check_vocabulary(name: str, ours: int, theirs: int) -> None:
    """Raise `DraftError` unless a draft of `theirs` token embeddings can serve a target of `ours`: both may be paddings of
    one vocabulary.

    Models of one family pad the same tokenizer to different multiples (151 936 and 152 064 rows, say). The rule: the counts
    differ by less than `PADDING` rows and by at most one in a hundred. Equal counts do not prove an equal tokenizer; a draft
    with another one costs speed, never correctness, since no token is committed that the target did not agree to.
    """
    gap = abs(ours - theirs)
    if gap >= PADDING or gap * 100 > max(ours, theirs):
        raise DraftError(
            f"{name}: model: the draft has {theirs} token embeddings and the target {ours}, so that their tokens differ; "
            "give a draft with the target's tokenizer."
        )


def moved(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors of `inputs` on `device`."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@dataclass(frozen=True, kw_only=True)
class PeerStrategy(DraftStrategy):
    """The base of drafts by a model of the target's family, whose prompt a pruner may thin.

    model  folder, hub or shipped name of the draft model, or the loaded module; "beside" is the folder beside the target's
           with its name and ``-draft``, the shipped draft of a shipped model; in a YAML file a folder counts from the file's
           where it is there, or begins with a dot, and anything else is a name
    prune  a pruner of stage "draft": the draft reads only what the target's early layers find worth keeping
    kv     the memory of the draft's own stream, in a session; None: one like the target's

    reads_text  the draft reads text alone, and a causal language model without vision will do too
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rollback", "video"})
    reads_text: ClassVar[bool] = False

    model: str | nn.Module = BESIDE
    prune: TokenPruner | None = None
    kv: StreamPolicy | None = None

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        model, kv = fields.get("model"), fields.get("kv")
        if isinstance(kv, Mapping) and isinstance(kv.get("name"), str) and kv["name"] in registry("kv"):
            fields = {**fields, "kv": registry("kv")[kv["name"]].with_base_dir(kv, folder)}
        if not isinstance(model, str) or model in ("", BESIDE):
            return fields
        there = model.startswith(".") or (folder / model).is_dir()
        # Whole, so that a folder is not taken for the shipped model of its name.
        return with_base_dir(fields, folder.absolute(), "model") if there else fields

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model or not isinstance(self.model, str | nn.Module):
            raise RecipeError(
                f"{self.name}: model is {shown(self.model)}; give the draft model's folder, "
                "a shipped name, 'beside' for the folder next to the target's, or the loaded model."
            )
        prune = None if self.prune is None else policy("prune", self.prune, f"{self.name}: prune")
        if prune is not None and not isinstance(prune, TokenPruner):
            raise RecipeError(
                f"{self.name}: prune is {shown(self.prune)}; give a pruner's name, a mapping with a name, or null."
            )
        if prune is not None and prune.stage != "draft":
            raise RecipeError(
                f"{self.name}: prune {prune.name!r} acts on the target and changes its answers; give one for drafts, such "
                "as uv."
            )
        object.__setattr__(self, "prune", prune)
        kv = None if self.kv is None else policy("kv", self.kv, f"{self.name}: kv")
        if kv is not None and not isinstance(kv, StreamPolicy):
            raise RecipeError(
                f"{self.name}: kv is {shown(self.kv)}; give a memory of streams, or null for one like the target's."
            )
        object.__setattr__(self, "kv", kv)

    @property
    def pruner(self) -> TokenPruner | None:
        return self.prune

    def unused(self, prompt: Prompt) -> list[str]:
        """What of the fields has no part in this prompt, for the report."""
        if self.kv is None or prompt.stream is not None:
            return []
        return [f"its kv {self.kv.name!r} did nothing: it is of the stream that a draft has in a session"]

    def check(self, target: ModelView) -> None:
        self.peer(target)

    def watch(self, target: ModelView, session: Watching) -> DraftStream:
        peer = self.peer(target)
        adapter = adapter_for(peer.model).stream_adapter(peer.model, session.processor)
        return LocalDraftStream(adapter, self.kv or session.kv, session.chunk)

    def peer(self, target: ModelView) -> ModelView:
        """The draft model's view, in this process; raises `DraftError` for a missing model, another family and another
        vocabulary."""
        model = folder_of(self.name, target, self.model) if isinstance(self.model, str) else self.model
        try:
            reader = target.reader(model) if self.reads_text else None
            peer = reader or target.peer(model)
        except ModelError as error:
            raise DraftError(f"{self.name}: model: {error}") from error
        if reader is None and peer.adapter.name != target.adapter.name:
            raise DraftError(
                f"{self.name}: model: the draft is a {peer.adapter.name} and the target a {target.adapter.name}, which read "
                "other inputs; give a draft of the target's family."
            )
        check_vocabulary(self.name, target.geometry.vocab, peer.geometry.vocab)
        return peer


class PeerState(DraftState):
    """A draft model at work on one sequence, between the target's steps.

    The prompt is read when tokens are first asked for: the target's first token is out by then, and what a pruner leaves is
    known. `_pending` are committed tokens that the model has not run.
    """

    def __init__(self, runner: Runner, device: torch.device, choice: PeerStrategy, vocab: int) -> None:
        self._runner: Runner | None = runner
        self._device, self._choice, self._vocab = device, choice, vocab
        self._columns: Tensor | None = None
        self._stream: DraftStream | None = None
        self._unused: list[str] = []
        self._unread: Mapping[str, Any] | None = None
        self._steps = 0

    def begin(self, prompt: Prompt) -> None:
        self._pending, self._stream = prompt.ids[0, :0], prompt.stream
        self._unused = self._choice.unused(prompt)
        self._unread = moved(prompt.inputs, self._device)

    def keep(self, columns: Tensor) -> None:
        self._columns = columns

    def _open(self) -> Runner:
        """The runner, which has read the prompt."""
        if self._runner is None:
            raise DraftError(f"{self._choice.name}: the draft is closed; open a new one for each sequence.")
        if self._unread is not None:
            inputs, self._unread = self._unread, None
            if isinstance(self._stream, LocalDraftStream):
                self._runner = self._stream.read()
            else:
                self._read(self._runner, inputs)
        return self._runner

    def _read(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        pruner = self._choice.prune
        if pruner is None:
            runner.prefill(inputs)
        elif self._columns is None:
            raise DraftError(f"prune {pruner.name!r} received nothing from the target's prefill.")
        else:
            runner.prefill(inputs, self._columns.to(inputs["input_ids"].device), pruner.compact)

    def notes(self) -> list[str]:
        return self._unused

    def close(self) -> None:
        self._runner = self._stream = None


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
        keep: Tensor | None,
        compact: bool,
        warp: Warp | None,
        seed: int,
        stream: LocalDraftStream | None = None,
    ) -> None:
        """Run the prompt, or the columns `keep` of it, numbered anew if `compact`; or the question that `stream` was asked.
        `warp` is the target's sampling, None for the likeliest tokens; `seed` is of the tokens that are drawn here."""
        began = time.perf_counter()
        self._prompt = inputs["input_ids"][0].cpu()
        self._warp, self._random = warp, torch.Generator().manual_seed(seed)
        if stream is not None:
            self._runner = runner = stream.read()
            self._after_prompt = runner.logits[0]
        else:
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


class Local:
    """A draft in this process, asked as `Remote` is. On a CPU it works when its window is collected; on CUDA on a stream of
    its own."""

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
    ) -> None:
        """As that of `Remote`; the prompt is read with the first window."""
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

    def ask(self, length: int, fix: list[int], count: int) -> None:
        self._asked = length, fix, count

    def collect(self, limit_s: float) -> DraftedTokens | None:
        assert self._asked is not None
        with torch.cuda.stream(self._stream):
            if self._unread is not None:
                self._writer.read(**self._unread)
                self._unread = None
            return self._writer.write(*self._asked)

    def close(self) -> None:
        """Nothing is to be freed."""


def _at(warp: Warp, device: torch.device) -> Warp:
    """Runs `warp` on the device of its own tensors, for a draft on another device."""
    return lambda ids, logits: warp(ids.to(device), logits.to(device))
