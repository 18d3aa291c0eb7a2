"""How a draft in this process reads the prompt, after the target has: whole, what a pruner leaves of it, or its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.errors import DraftError
from mmaccel.core.layout import TEXT
from mmaccel.core.prune import TokenPruner
from mmaccel.core.runner import Runner


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
