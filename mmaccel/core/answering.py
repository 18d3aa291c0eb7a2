"""Decodes an answer on a stream until an end token, the last position, `max_new_tokens` or a deadline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.core.answer import FinishReason, Said
from mmaccel.core.deadline import Deadline
from mmaccel.core.draft import DraftStrategy, Prompt
from mmaccel.core.errors import warn
from mmaccel.core.generate import speculate
from mmaccel.core.live import Question
from mmaccel.core.stream_adapter import StreamAdapter


def answered(
    seam: StreamAdapter,
    strategy: DraftStrategy,
    asked: Question,
    most: int,
    deadline: Deadline,
    put: Callable[[str], None] | None,
) -> tuple[Said, FinishReason]:
    """Decode at most `most` tokens of an answer, after the prefill of its question. Gives the text and why it ends.

    `put` gets new text as it comes. Warns when the answer ends with the model's positions.
    """
    ends, said = seam.ends(), Said(seam.decode, put)
    ids = torch.cat([seam.head(), asked.ids])[None]
    start = ids.shape[1]
    draft = strategy.open(seam.view)
    prompt = Prompt({"input_ids": ids}, ids, max_new_tokens=most)
    draft.begin(prompt)
    reason: FinishReason = "stop"

    def stop(ids: Tensor) -> bool:
        """Whether the answer ends with the last of `ids` [1, S]; notes why."""
        nonlocal reason
        count, over = ids.shape[1] - start, deadline.over()
        if int(ids[0, -1]) in ends:
            return True
        if count >= most:
            reason = "length"
        elif count >= asked.left:
            reason = "positions"
        elif over is not None:
            reason = over
        return reason != "stop"

    def emit(new: Tensor) -> None:
        """Take in the tokens `new` [n]; those that end an answer are not part of its text."""
        tokens = new.tolist()
        asked.meter.token(len(tokens))
        said.add([token for token in tokens if token not in ends])

    speculate(asked.turn, draft, prompt, asked.logits, stop=stop, emit=emit, meter=asked.meter)
    if reason == "positions":
        warn(
            "max_new_tokens: the answer ends early, for the model has no position left (max_position_embeddings); ask in "
            "fewer words, or open the session with a kv that keeps less."
        )
    return said, reason
