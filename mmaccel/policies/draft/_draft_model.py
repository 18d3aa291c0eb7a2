"""A draft model beside its target: finding it, checking that both have one vocabulary, and reading the prompt."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.draft import DraftStrategy
from mmaccel.core.errors import DraftError, ModelError, RecipeError, shown
from mmaccel.core.layout import TEXT
from mmaccel.core.prune import TokenPruner
from mmaccel.core.registry import policy, with_base_dir

PADDING = 1024


BESIDE = "beside"
"""In the place of a draft's folder: the one beside the target's own that has its name and ``-draft``."""


def folder_of(name: str, target: ModelView, model: str) -> str:
    """The draft's folder; raises `DraftError` where none stands beside the target's."""
    if model != BESIDE:
        return model
    # Whole: "." has no name.
    own = os.path.abspath(target.folder) if target.folder is not None else None
    beside = Path(f"{own}-draft") if own is not None else None
    if beside is None or not beside.is_dir():
        where = (
            f"there is no folder {beside}" if beside is not None else "the target was loaded from no folder"
        )
        raise DraftError(
            f"{name}: model is 'beside', as it is when none is given, and {where}; give the draft model's folder "
            "(--draft on the command line)."
        )
    return str(beside)


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


def check_model(name: str, model: object) -> None:
    """Raise `RecipeError` unless `model` is a folder's path or a module; `name` is the strategy's."""
    if not model or not isinstance(model, str | nn.Module):
        raise RecipeError(
            f"{name}: model is {shown(model)}; give the draft model's folder, "
            "a shipped name, 'beside' for the folder next to the target's, or the loaded model."
        )


def same_vocabulary(a: int, b: int) -> bool:
    """Whether embeddings of `a` and `b` rows may be paddings of one vocabulary.

    Models of one family pad the same tokenizer to different multiples (151 936 and 152 064 rows, say). The rule: the counts
    differ by less than `PADDING` rows and by at most one in a hundred. Equal counts do not prove an equal tokenizer; a draft
    with another one costs speed, never correctness, since no token is committed that the target did not agree to.
    """
    gap = abs(a - b)
    return gap < PADDING and gap * 100 <= max(a, b)


def open_peer(name: str, target: ModelView, model: str | nn.Module, text: bool = False) -> ModelView:
    """The draft model's view; raises `DraftError` for a missing model, another family and another vocabulary.

    text  the draft reads text alone, and a causal language model without vision will do too
    """
    given = folder_of(name, target, model) if isinstance(model, str) else model
    try:
        reader = target.reader(given) if text else None
        peer = reader or target.peer(given)
    except ModelError as error:
        raise DraftError(f"{name}: model: {error}") from error
    if reader is None and peer.adapter.name != target.adapter.name:
        raise DraftError(
            f"{name}: model: the draft is a {peer.adapter.name} and the target a {target.adapter.name}, which read other "
            "inputs; give a draft of the target's family."
        )
    check_vocabulary(name, target.geometry.vocab, peer.geometry.vocab)
    return peer


def check_vocabulary(name: str, ours: int, theirs: int) -> None:
    """Raise `DraftError` unless a draft of `theirs` token embeddings can serve a target of `ours`."""
    if not same_vocabulary(ours, theirs):
        raise DraftError(
            f"{name}: model: the draft has {theirs} token embeddings and the target {ours}, so that their tokens differ; "
            "give a draft with the target's tokenizer."
        )


def draft_pruner(name: str, prune: Any) -> TokenPruner | None:
    """The pruner of a draft, from a name, a mapping or an instance; raises `RecipeError` for one of another stage."""
    if prune is None:
        return None
    chosen = policy("prune", prune, f"{name}: prune")
    if not isinstance(chosen, TokenPruner):
        raise RecipeError(
            f"{name}: prune is {shown(prune)}; give a pruner's name, a mapping with a name, or null."
        )
    if chosen.stage != "draft":
        raise RecipeError(
            f"{name}: prune {chosen.name!r} acts on the target and changes its answers; give one for drafts, such as uv."
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class PeerStrategy(DraftStrategy):
    """The base of drafts by a model of the target's family, whose prompt a pruner may thin.

    model  folder, hub or shipped name of the draft model, or the loaded module; "beside" is the folder beside the target's
           with its name and ``-draft``, the shipped draft of a shipped model; in a YAML file a folder counts from the file's
           where it is there, or begins with a dot, and anything else is a name
    prune  a pruner of stage "draft": the draft reads only what the target's early layers find worth keeping
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rollback", "prompt"})

    model: str | nn.Module = BESIDE
    prune: TokenPruner | None = None

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
        check_model(self.name, self.model)
        object.__setattr__(self, "prune", draft_pruner(self.name, self.prune))

    @property
    def pruner(self) -> TokenPruner | None:
        return self.prune

    def check(self, target: ModelView) -> None:
        if self.prune is not None:
            self.prune.stages(target.geometry.layers)
        self.peer(target)

    def peer(self, target: ModelView) -> ModelView:
        """The draft model's view, in this process; raises `DraftError`."""
        return open_peer(self.name, target, self.model)


def moved(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors of `inputs` on `device`."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


class Reader:
    """Reads the whole prompt when the first window is asked for: the target's first token is out by then."""

    def __init__(self) -> None:
        self._waiting: tuple[Runner, Mapping[str, Any]] | None = None

    def begin(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        self._waiting = runner, inputs

    def keep(self, columns: Tensor) -> None:
        raise DraftError("this draft reads the whole prompt; leave prune out.")

    def read(self) -> None:
        """The prompt must be read by now."""
        if self._waiting is not None:
            (runner, inputs), self._waiting = self._waiting, None
            self._prefill(runner, inputs)

    def _prefill(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        runner.prefill(inputs)


class PrunedReader(Reader):
    """Reads what the pruner leaves, which the target has told by the time that the first window is asked for."""

    def __init__(self, pruner: TokenPruner) -> None:
        super().__init__()
        self._pruner = pruner
        self._columns: Tensor | None = None

    def keep(self, columns: Tensor) -> None:
        self._columns = columns

    def _prefill(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        if self._columns is None:
            raise DraftError(f"prune {self._pruner.name!r} received nothing from the target's prefill.")
        runner.prefill(inputs, self._columns.to(inputs["input_ids"].device), self._pruner.compact)


class TextReader(Reader):
    """Reads the text alone, as if there were neither video nor picture."""

    def __init__(self, target: ModelView) -> None:
        super().__init__()
        self._target = target

    def _prefill(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        ids = inputs["input_ids"]
        layout = self._target.adapter.layout(self._target.model, inputs)
        runner.prefill({"input_ids": ids[:, layout.modality[0].to(ids.device) == TEXT]})
