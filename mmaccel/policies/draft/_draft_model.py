"""Base classes of drafts by a second model: they find the model, check that its vocabulary fits the target's, and read the
prompts of a conversation, so that the draft of a later turn continues from its own KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.attach import StreamModel, adapter_for
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Prompt
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.decoding.watching import DraftStream, DraftStreamSettings
from mmaccel.core.errors import DraftError, ModelError, RecipeError, quoted
from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.registry import policy, registry, with_base_dir
from mmaccel.core.report import time_after_device_work
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.policies.sparse.a_shape import AShape

PADDING = 1024
"""Rows by which the embeddings of one vocabulary may differ."""
BESIDE = "beside"
"""In the place of a draft's folder: the one beside the target's own that has its name and ``-draft``."""
MODEL = "draft.model"
"""The field of a recipe with which an error of the draft model begins."""
IDS = "mmaccel_ids"
"""Beside a prompt's inputs, in a later turn: the ids [1, S] of the whole conversation, of which these have the last ones."""


def draft_folder(name: str, target: ModelView, model: str) -> str:
    """Return the draft model's folder or name ("beside": the target's with ``-draft``); raises `DraftError` if missing."""
    if model != BESIDE:
        return model
    if target.model_folder is None:
        where = "the target was loaded from no folder"
    else:
        # Whole: "." has no name.
        beside = Path(f"{os.path.abspath(target.model_folder)}-draft")
        if beside.is_dir():
            return str(beside)
        where = f"there is no folder {beside}"
    raise DraftError(
        f"{name}: model is 'beside', as it is when none is given, and {where}; give the draft model's folder "
        "(--draft on the command line)."
    )


def model_devices(model: nn.Module) -> list[torch.device]:
    """Return the devices that hold a model's weights."""
    return list(dict.fromkeys(p.device for p in model.parameters()))


def free_device(taken: Sequence[torch.device]) -> str:
    """Return the device for a draft in another process: a CUDA device not `taken` by the target, or else the target's."""
    first = taken[0]
    if first.type != "cuda":
        return str(first)
    count, numbers = torch.cuda.device_count(), {device.index or 0 for device in taken}
    after = [(n + (first.index or 0)) % count for n in range(count)]
    return next((f"cuda:{n}" for n in after if n not in numbers), str(first))


def check_vocabulary(ours: int, theirs: int) -> None:
    """Raise `DraftError` unless a draft with `theirs` token embeddings can serve a target with `ours`: both may be padded
    forms of one vocabulary.

    Models of one family pad the same tokenizer to different multiples (151 936 and 152 064 rows, say). The rule: the counts
    differ by less than `PADDING` rows and by at most one in a hundred. Equal counts do not prove an equal tokenizer; a draft
    with another one costs speed, never correctness, as no token is committed that the target did not accept.
    """
    gap = abs(ours - theirs)
    if gap >= PADDING or gap * 100 > max(ours, theirs):
        raise DraftError(
            f"{MODEL}: the draft has {theirs} token embeddings and the target {ours}, so that their tokens differ; "
            "give a draft with the target's tokenizer."
        )


def draft_stream(model: nn.Module, told: DraftStreamSettings, keeper: ModelView) -> LocalDraftStream:
    """Open a video stream for the draft `model` in this process, by the settings `told`; `keeper` holds what prompts share.
    A stored video is encoded in a few long passes, whose frames see as much as live frames do."""
    family, prompt = adapter_for(model), told.prompt
    made = None if prompt is None else prompt[0](model, family, prompt[1], keeper)
    adapter: StreamModel = made or family.stream_adapter(model, told.processor)
    return LocalDraftStream(adapter, told.kv, told.chunk, told.prune, lambda tokens: AShape(window=tokens))


@dataclass(frozen=True, kw_only=True)
class DraftModelStrategy(DraftStrategy):
    """The base of drafts by a second model.

    model  folder, hub or shipped name of the draft model, or the loaded module; "beside" is the folder beside the target's
           with its name and ``-draft``, the shipped draft of a shipped model; in a YAML file a folder is relative to the
           file's folder if it exists there or begins with a dot, and anything else is a name

    reads_text  the draft reads only text, and may be a causal language model without vision
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rollback", "model"})
    reads_text: ClassVar[bool] = False

    model: str | nn.Module = BESIDE

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        model = fields.get("model")
        if not isinstance(model, str) or model in ("", BESIDE):
            return fields
        there = model.startswith(".") or (folder / model).is_dir()
        # Whole, so that a folder is not taken for the shipped model of its name.
        return with_base_dir(fields, folder.absolute(), "model") if there else fields

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model or not isinstance(self.model, str | nn.Module):
            raise RecipeError(
                f"{self.name}: model is {quoted(self.model)}; give the draft model's folder, "
                "a shipped name, 'beside' for the folder next to the target's, or the loaded model."
            )

    def unused(self, prompt: Prompt) -> list[str]:
        """Return one sentence, for the call's report, on each field of this draft that has no effect on `prompt`."""
        return []

    def check_target(self, target: ModelView) -> None:
        self.peer(target)

    def peer(self, target: ModelView) -> ModelView:
        """Return a view of the draft model in this process; `DraftError` if it is missing or does not fit the target."""
        model = draft_folder(self.name, target, self.model) if isinstance(self.model, str) else self.model
        try:
            reader = target.causal_lm(model) if self.reads_text else None
            peer = reader or target.other_model_view(model)
        except ModelError as error:
            raise DraftError(f"{MODEL}: {error}") from error
        if reader is None and peer.adapter.name != target.adapter.name:
            raise DraftError(
                f"{MODEL}: the draft is a {peer.adapter.name} and the target a {target.adapter.name}, which read "
                "other inputs; give a draft of the target's family."
            )
        check_vocabulary(target.geometry.vocab, peer.geometry.vocab)
        return peer


@dataclass(frozen=True, kw_only=True)
class VideoDraftStrategy(DraftModelStrategy):
    """The base of drafts by a model of the target's family that reads the video, whole or pruned.

    prune  a pruner of stage "draft": the draft reads only what the target's early layers find worth keeping; how many tokens
           it left out is the counter `pruned` of a report
    kv     the memory of the draft's own stream, used only if the target runs on a stream; None: one like the target's
    """

    needs: ClassVar[frozenset[str]] = DraftModelStrategy.needs | {"video"}

    prune: TokenPruner | None = None
    kv: StreamPolicy | None = None  # type: ignore[misc]

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        kv = fields.get("kv")
        if isinstance(kv, Mapping) and isinstance(kv.get("name"), str) and kv["name"] in registry("kv"):
            fields = {**fields, "kv": registry("kv")[kv["name"]].with_base_dir(kv, folder)}
        return super().with_base_dir(fields, folder)

    def __post_init__(self) -> None:
        super().__post_init__()
        prune = None if self.prune is None else policy("prune", self.prune, "draft.prune")
        if prune is not None and not isinstance(prune, TokenPruner):
            raise RecipeError(
                f"draft.prune is {quoted(self.prune)}; give a pruner's name, a mapping with a name, or null."
            )
        if prune is not None and prune.stage != "draft":
            drafts = registry("prune").matching_names_text(lambda cls: cls.stage == "draft")
            raise RecipeError(
                f"draft {self.name!r} has prune {prune.name!r}, which acts on the target and changes its answers; give the "
                f"draft {drafts}."
            )
        object.__setattr__(self, "prune", prune)
        kv = None if self.kv is None else policy("kv", self.kv, "draft.kv")
        if kv is not None and not isinstance(kv, StreamPolicy):
            raise RecipeError(
                f"draft.kv is {quoted(self.kv)}; give a memory of streams, or null for one like the target's."
            )
        object.__setattr__(self, "kv", kv)

    @property
    def pruner(self) -> TokenPruner | None:
        return self.prune

    def unused(self, prompt: Prompt) -> list[str]:
        if self.kv is None or prompt.stream is not None:
            return []
        return [
            f"its kv {self.kv.name!r} did nothing: it is of the stream that a draft has beside one of the target"
        ]

    def open_stream(self, target: ModelView, session: DraftStreamSettings) -> DraftStream:
        model, told = self.peer(target).model, replace(session, kv=self.kv or session.kv, prune=self.prune)
        return draft_stream(model, told, target)


class Conversation:
    """The conversation that a draft model's `runner` has read: prompts, and answers between them, pruned tokens included.

    A prompt is run only when its logits are needed (`announce_prompt`, then `read`). Only the answer after the last prompt
    can be rolled back: before it there may be a video, and the next turn does not bring its pixels again.
    """

    def __init__(self, runner: Runner, device: torch.device | str) -> None:
        self.runner, self._device = runner, torch.device(device)
        self._ids = torch.empty(0, dtype=torch.long)
        # Tokens up to the end of the last prompt, and the runner's columns of them.
        self._prompt = self._origin = 0
        self._told: list[tuple[Tensor, Mapping[str, Any]]] = []

    def announce_prompt(self, inputs: Mapping[str, Any], ids: Tensor) -> None:
        """Register the next prompt without running it: `ids` [S] of the whole conversation, `inputs` of its last columns."""
        self._told.append((ids.cpu(), inputs))

    def is_continued_by(self, ids: Tensor, past: TokenLayout) -> bool:
        """Return whether the prompt `ids` [S], of which the target holds `past`, continues this conversation; forget prompts
        that were announced, never read, and since rolled back."""
        while self._told and not continues_tokens(self._told[-1][0], ids, past):
            self._told.pop()
        return bool(self._told) or (
            self._prompt > 0 and continues_tokens(self._ids[: self._prompt], ids, past)
        )

    def read(self, keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Run the registered prompts, or columns `keep` [k] (renumbered if `compact`); return the last logits [1, V]."""
        logits = torch.empty(0)
        for number, (ids, inputs) in enumerate(self._told, 1):
            columns = keep
            if keep is not None and number < len(self._told):
                # Of a prompt that nobody asked about, what it takes to go on.
                columns = torch.tensor([ids.numel() - 1])
            inputs = self._behind(inputs, ids, whole=keep is None)
            if columns is None:
                logits = self.runner.prefill(inputs)
            else:
                logits = self.runner.prefill(inputs, columns.to(self._device), compact)
            self._ids, self._prompt, self._origin = ids, ids.numel(), self.runner.length()
        self._told = []
        return logits

    def _behind(self, inputs: Mapping[str, Any], ids: Tensor, whole: bool) -> dict[str, Any]:
        """`inputs` of the prompt `ids` from the last column on that the runner has in common with it; what it has beyond is
        taken back. Where it is not `whole`, from the last prompt on."""
        new, known = inputs["input_ids"].shape[1], self._ids
        start = self._prompt
        if whole and known.numel():
            most = min(known.numel(), ids.numel() - max(new, 1))
            same = (known[:most] == ids[:most]).long().cumprod(0)
            start = max(start, int(same.sum()))
            if start < known.numel():
                self.runner.truncate(self.runner.length() - (known.numel() - start))
        made = {name: x.to(self._device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        more = ids.numel() - start - new
        if more:
            made["input_ids"] = ids[None, start:].to(self._device)
            if isinstance(kinds := made.get("mm_token_type_ids"), Tensor):
                made["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (more, 0))
        return made

    @property
    def pruned(self) -> int:
        """Number of this conversation's tokens, up to the end of the last prompt that was run, that a pruner left out."""
        return self._prompt - self._origin

    def end_turn(self, tokens: Tensor) -> Conversation:
        """End the turn whose answer is `tokens` [m]; of these the draft model's cache keeps only what it has run."""
        if not self._told:
            run = min(self.runner.length() - self._origin, tokens.numel())
            self.runner.truncate(self._origin + run)
            self._ids = torch.cat([self._ids[: self._prompt], tokens[:run].cpu()])
        return self


def _continued_conversation(
    who: str, old: Any, fresh: Conversation, inputs: Mapping[str, Any], ids: Tensor, past: TokenLayout | None
) -> Conversation:
    """Return the conversation to which the prompt `ids` [S] was announced: `old` if the prompt continues it; else `fresh`,
    if all that the target holds (`past`) is text. `inputs` are the columns after `past`. Otherwise raises `DraftError`."""
    talk = fresh
    if past is not None:
        if isinstance(old, Conversation) and old.is_continued_by(ids, past):
            talk = old
        else:
            check_text(who, past)
    talk.announce_prompt(inputs, ids)
    return talk


def check_text(who: str, past: TokenLayout) -> None:
    """Raise `DraftError` if the target's cache (`past`) holds images or videos, which this draft has not read."""
    if bool((past.modality != TEXT).any()):
        raise DraftError(
            f"{who}: past_key_values holds images or videos that this draft did not read; give the cache that a call with "
            "this draft gave back, as it was, or the whole prompt without a cache."
        )


def continues_tokens(known: Tensor, ids: Tensor, past: TokenLayout) -> bool:
    """Return whether the prompt `ids` [S] starts with the tokens `known` [n] and the columns that the target's cache holds
    after these (layout `past`) are text only."""
    n = known.numel()
    if n > past.length or not torch.equal(known, ids[:n].cpu()):
        return False
    return not bool((past.modality[0, n:] != TEXT).any())


class DraftModelState(DraftState):
    """The state of a draft model on one sequence; the model runs between the target's steps.

    It reads the prompt when tokens are first requested. By then the target has given its first token and a pruner has chosen
    which columns the draft reads. `_pending` holds committed tokens that the model has not run.
    """

    def __init__(self, runner: Runner, device: torch.device, choice: DraftModelStrategy, vocab: int) -> None:
        self._runner: Runner | None = runner
        self._device, self._choice, self._vocab = device, choice, vocab
        self._talk = Conversation(runner, device)
        self._columns: Tensor | None = None
        self._stream: DraftStream | None = None
        self._unused: list[str] = []
        self._unread: Prompt | None = None
        self._steps, self._pruned, self._wait_s = 0, 0, 0.0
        self._counted: Callable[[], dict[str, float]] = dict  # of the memory of the draft's own stream

    def begin(self, prompt: Prompt) -> None:
        self._pending, self._stream = prompt.ids[0, :0], prompt.stream
        self._unused = self._choice.unused(prompt)
        self._unread, self._said = prompt, prompt.ids[0, :0]
        self._talk.runner.lasting = prompt.lasts

    @property
    def unread(self) -> bool:  # type: ignore[override]
        return self._unread is not None

    def keep_columns(self, columns: Tensor) -> None:
        self._columns = columns

    def _open(self) -> Runner:
        """The runner, which has read the prompt."""
        if self._runner is None:
            raise DraftError(f"{self._choice.name}: the draft is closed; open a new one for each sequence.")
        if self._unread is not None:
            deadline = self._unread.deadline or Deadline()
            deadline.check()
            began = time_after_device_work(self._device)
            if isinstance(self._stream, LocalDraftStream):
                asked = self._stream.read_question(deadline)
                self._runner, self._pruned, self._counted = asked, self._stream.pruned_tokens, asked.counted
            else:
                self._tell(self._unread)
                pruner = self._choice.pruner
                if pruner is not None and self._columns is None:
                    raise DraftError(f"prune {pruner.name!r} received nothing from the target's prefill.")
                self._talk.read(*(() if pruner is None else (self._columns, pruner.compact)))
                self._runner, self._pruned = self._talk.runner, self._talk.pruned
            self._wait_s, self._unread = time_after_device_work(self._device) - began, None
        return self._runner

    def _tell(self, prompt: Prompt) -> None:
        inputs, ids, past = self._shown(prompt)
        who, old = self._choice.name, prompt.previous_state
        self._talk = _continued_conversation(who, old, self._talk, inputs, ids, past)

    def _shown(self, prompt: Prompt) -> tuple[Mapping[str, Any], Tensor, TokenLayout | None]:
        """What the draft is to read of `prompt`: its inputs, all ids [S], and those that the target holds."""
        return prompt.inputs, prompt.ids[0], None if prompt.past is None else prompt.past.layout

    def counters(self) -> dict[str, float]:
        own = {f"kv_{name}": value for name, value in self._counted().items()}
        seen = {"pruned": float(self._pruned), "draft_wait_seconds": self._wait_s}
        return {"draft_steps": float(self._steps), **seen, **own}

    def report_notes(self) -> list[str]:
        return self._unused

    def state_for_next_turn(self) -> Any:
        if self._runner is None or self._stream is not None:
            return None
        if self._unread is not None:
            self._tell(self._unread)  # for the next turn to read
        return self._talk.end_turn(self._said)

    def close(self) -> None:
        self._runner = self._stream = None
