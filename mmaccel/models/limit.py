"""The end of a model's context: no token is said at a position that the model was not made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from mmaccel.core.errors import ModelError, warn


def positions_of(config: Any) -> int | None:
    """How many positions a text model of `config` has, what its rotary scaling adds included; None where it does not say."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    before = rope.get("original_max_position_embeddings") or most
    return max(most, int(before * (rope.get("factor") or 1)))


class Limit(StoppingCriteria):
    """Ends each sequence [B] at `ends` [B] columns, where its positions are used up, and says so once.

    padded  whether there is a token to go on with after it: without one, and without an end-of-text token, transformers lets
            a sequence of a batch run on beside the others
    """

    def __init__(self, ends: Tensor, most: int, padded: bool) -> None:
        self._ends, self._most, self._told = ends, most, False
        if padded:
            # By this name transformers knows a criterion after which a sequence is padded.
            self.eos_token_id = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # Beams and samples of a prompt stand next to each other.
        ends = self._ends.repeat_interleave(input_ids.shape[0] // len(self._ends))
        over = input_ids.shape[1] >= ends
        if not self._told and bool(over.any()):
            self._told = True
            warn(
                f"max_new_tokens: the model has {self._most} positions (max_position_embeddings), and the answer ends with "
                "them; give a shorter prompt for a longer answer."
            )
        return over.to(input_ids.device)


def limited(kwargs: Mapping[str, Any], positions: Tensor, most: int, default: Any) -> dict[str, Any]:
    """The arguments of `generate` with a criterion that ends each sequence at the model's `most` positions, where it could
    get there; `positions` [B, S] or [3, B, S] are those of the prompt's new columns, `default` is the model's own generation
    config. An answer goes on from the last column, which after a long video is not the largest position.

    Raises `ModelError` for a prompt after which there is no position left.
    """
    last = positions[..., -1]
    last = last if last.ndim == 1 else last.amax(0)
    length, top, taken = kwargs["input_ids"].shape[1], int(last.max()), int(positions.max()) + 1
    if top + 1 >= most or taken > most:
        raise ModelError(
            f"input_ids: the prompt takes {taken} positions of the model's {most} (max_position_embeddings), which leaves "
            "none for an answer; give fewer frames or a shorter text."
        )
    config = kwargs.get("generation_config") or default
    new = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    if new is not None and top + new < most:
        return dict(kwargs)
    ends = length + most - 1 - last.cpu()
    padded = any(
        kwargs.get(name) is not None or getattr(config, name, None) is not None
        for name in ("pad_token_id", "eos_token_id")
    )
    given = list(kwargs.get("stopping_criteria") or [])
    return {**kwargs, "stopping_criteria": StoppingCriteriaList([*given, Limit(ends, most, padded)])}
