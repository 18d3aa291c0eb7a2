"""How a draft in this process reads the prompt: whole and at once, or what a pruner leaves of it, once that is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.errors import DraftError
from mmaccel.core.layout import TEXT
from mmaccel.core.prune import TokenPruner


def moved(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors of `inputs` on `device`."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


class Reader:
    """Reads the whole prompt before the target does."""

    def begin(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        runner.prefill(inputs)

    def keep(self, columns: Tensor) -> None:
        raise DraftError("this draft reads the whole prompt; leave prune out.")

    def read(self) -> None:
        """The prompt must be read by now."""


class PrunedReader(Reader):
    """Reads what the pruner leaves, when the first window is asked for: by then the target has told."""

    def __init__(self, pruner: TokenPruner) -> None:
        self._pruner = pruner
        self._waiting: tuple[Runner, Mapping[str, Any]] | None = None
        self._columns: Tensor | None = None

    def begin(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        self._waiting = runner, inputs

    def keep(self, columns: Tensor) -> None:
        self._columns = columns

    def read(self) -> None:
        if self._waiting is None:
            return
        if self._columns is None:
            raise DraftError(f"prune {self._pruner.name!r} was told nothing by the target's prefill.")
        (runner, inputs), self._waiting = self._waiting, None
        runner.prefill(inputs, self._columns.to(inputs["input_ids"].device), self._pruner.compact)


class TextReader(Reader):
    """Reads the text alone, as if there were neither video nor picture."""

    def __init__(self, target: ModelView) -> None:
        self._target = target

    def begin(self, runner: Runner, inputs: Mapping[str, Any]) -> None:
        ids = inputs["input_ids"]
        layout = self._target.adapter.layout(self._target.model, inputs)
        runner.prefill({"input_ids": ids[:, layout.modality[0].to(ids.device) == TEXT]})
