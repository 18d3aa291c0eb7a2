"""The prompts of a conversation that a draft model has read, so that a later turn's draft continues from its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Runner
from mmaccel.core.errors import DraftError
from mmaccel.core.layout import TEXT, TokenLayout

IDS = "mmaccel_ids"
"""Beside a prompt's inputs, in a later turn: the ids [1, S] of the whole conversation, of which these have the last ones."""


class Conversation:
    """What a draft model has read of a conversation: the tokens that its `runner` has run, pruned ones included.

    A prompt is read only when needed (`tell`, then `read`). Only the answer after the last prompt can be rolled back:
    earlier there may be a video, whose pixels the next turn does not have.
    """

    def __init__(self, runner: Runner, device: torch.device | str) -> None:
        self.runner, self._device = runner, torch.device(device)
        self._ids = torch.empty(0, dtype=torch.long)
        self._prompt = self._origin = (
            0  # tokens up to the end of the last prompt, and the runner's columns of them
        )
        self._told: list[tuple[Tensor, Mapping[str, Any]]] = []

    def tell(self, inputs: Mapping[str, Any], ids: Tensor) -> None:
        """Announce the next prompt `ids` [S]; `inputs` are its last columns, which follow those of earlier turns."""
        self._told.append((ids.cpu(), inputs))

    def goes_on(self, ids: Tensor, past: TokenLayout) -> bool:
        """Return whether the prompt `ids` [S] continues this conversation; the target holds its first columns, `past`.
        Prompts that were announced, never read, and since rolled back are forgotten."""
        while self._told and not follows(self._told[-1][0], ids, past):
            self._told.pop()
        return bool(self._told) or (self._prompt > 0 and follows(self._ids[: self._prompt], ids, past))

    def read(self, keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Run the announced prompts; return logits [1, V] after the last one. See `Runner.prefill` for the rest."""
        logits = torch.empty(0)
        for number, (ids, inputs) in enumerate(self._told, 1):
            columns = keep
            if keep is not None and number < len(self._told):
                columns = torch.tensor(
                    [ids.numel() - 1]
                )  # of a prompt that nobody asked about, what it takes to go on
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

    def said(self, tokens: Tensor) -> Conversation:
        """End the turn, in which `tokens` [m] were generated after its prompt; those that the draft has run are kept."""
        if not self._told:
            run = min(self.runner.length() - self._origin, tokens.numel())
            self.runner.truncate(self._origin + run)
            self._ids = torch.cat([self._ids[: self._prompt], tokens[:run].cpu()])
        return self


def continued_conversation(
    who: str, left: Any, fresh: Conversation, inputs: Mapping[str, Any], ids: Tensor, past: TokenLayout | None
) -> Conversation:
    """Return the conversation to which the prompt `ids` [S] was announced: `left` if the prompt continues it; else `fresh`,
    if all that the target holds (`past`) is text. `inputs` are the columns after `past`. Otherwise raises `DraftError`."""
    talk = fresh
    if past is not None:
        if isinstance(left, Conversation) and left.goes_on(ids, past):
            talk = left
        else:
            check_text(who, past)
    talk.tell(inputs, ids)
    return talk


def check_text(who: str, past: TokenLayout) -> None:
    """Raise `DraftError` if the target's cache (`past`) holds images or videos, which this draft has not read."""
    if bool((past.modality != TEXT).any()):
        raise DraftError(
            f"{who}: past_key_values holds images or videos that this draft did not read; give the cache that a call with "
            "this draft gave back, as it was, or the whole prompt without a cache."
        )


def follows(known: Tensor, ids: Tensor, past: TokenLayout) -> bool:
    """Return whether prompt `ids` [S] continues the tokens `known` [n]; the target holds its first columns, `past`. An image
    or video that `known` lacks must not lie between."""
    n = known.numel()
    if n > past.length or not torch.equal(known, ids[:n].cpu()):
        return False
    return not bool((past.modality[0, n:] != TEXT).any())
