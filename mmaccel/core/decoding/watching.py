"""`DraftStream`: a draft model's own video stream, with the frames that its target watches and a KV memory of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.prefill.prune import Stage, TokenPruner


@dataclass(frozen=True, eq=False)
class DraftStreamSettings:
    """What a draft model needs to watch the frames that its target watches.

    processor  the session's processor
    kv, chunk  the draft's KV memory, and its tokens per forward pass
    prune      the pruner of the draft's tokens, for a draft in another process
    prompt     for a call of `generate`, which has no processor: (subclass of `PromptAdapter` that reads the prompt's
               video, model inputs of one sequence without padding); None in a session
    deadline   of the call of `generate`: if the draft runs in another process, the prompt must be sent to it by then;
               None: no limit
    """

    processor: Any
    kv: StreamPolicy
    chunk: int | None
    prune: TokenPruner | None = None
    prompt: tuple[type, Mapping[str, Any]] | None = None
    deadline: Any = None


@dataclass(frozen=True, eq=False)
class QuestionAttention:
    """The target question's attention to the visual tokens, by which a draft's pruner with this `stage` scores them.

    tokens_per_unit  P, of a unit (step of time) of the target
    tokens  [n] long, ascending: the tokens that a layer saw, as unit number * P + index in the unit; models with equally
            many frames per unit give the same frames the same unit number
    paid    [k, n] float32: the attention that the question paid to each, a mean over its rows, heads and the layers of the
            group `Stage.attention[k]`; 0 from a layer that did not see the token. For a pruner that reads hidden states, its
            score [1, n], shifted to be positive
    """

    stage: Stage
    tokens_per_unit: int
    tokens: Tensor
    paid: Tensor

    def attention_to(self, numbers: Tensor, places: Tensor, tokens_per_unit: int) -> Tensor:
        """Look up the attention [k, m] paid to single tokens: those at indices `places` [m] of units (frames) `numbers` [m],
        for a model with `tokens_per_unit` tokens per unit."""
        places = places * self.tokens_per_unit // tokens_per_unit
        wanted, tokens = numbers * self.tokens_per_unit + places, self.tokens.to(numbers.device)
        paid = self.paid.to(numbers.device)
        if not tokens.numel():
            return paid.new_zeros(len(paid), len(wanted))
        at = torch.searchsorted(tokens, wanted).clamp(max=len(tokens) - 1)
        return torch.where(tokens[at] == wanted, paid[:, at], 0.0)


class DraftStream(ABC):
    """The video stream of a draft model, in a session or for a prompt of `generate`. An error in it ends drafting, not the
    session or the call. A stream for a prompt reads the prompt's own video; it is given no frames."""

    pace: Any = None
    """What a strategy has measured of the answers so far, for the next one."""

    @abstractmethod
    def add_frames(
        self, frames: Tensor, times: Sequence[float], fps: float | None, timed: bool, ingest: bool = False
    ) -> None:
        """Add frames [T, 3, H, W] uint8, shown at `times` in seconds, after the target did. `fps`: their clip's rate, if
        known; `timed`: whether the times are known, not made up; `ingest`: they are of a stored video, whose end
        `end_ingest` tells."""

    @abstractmethod
    def checkpoint(self) -> Any:
        """Return the present state of the draft's stream, for `restore`; only one is in use at a time."""

    @abstractmethod
    def restore(self, mark: Any) -> None:
        """Return the draft's stream to its state at `checkpoint`."""

    @abstractmethod
    def prepare_question(self, question: Any, room: int, heard: QuestionAttention | None = None) -> None:
        """Prepare `question` (see `StreamModel.make_question`) for drafting, whose answer may have `room` tokens; the draft
        reads it when tokens are first needed. `heard`: the attention of the target's question, for a draft with a pruner."""

    @abstractmethod
    def end_question(self) -> None:
        """End the question: return the draft's stream to its state before it."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the draft's stream into the existing `folder`, as .safetensors and .json files."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote into a newly opened draft stream; raises `ModelError` if it does not fit."""

    def wait_for_device(self) -> None:
        """Wait until the draft's device has finished the work launched before, so that the next `add_frames` is timed
        without it. Does nothing if the draft runs in another process."""

    def end_ingest(self) -> None:
        """Tell the draft's stream that no more frames come for now."""

    def close(self, collected: bool = False) -> None:
        """Release all resources of the draft's stream. `collected`: the garbage collector calls, perhaps while this thread
        is sending something, so that nothing can be sent now."""
