"""Outputs of a text model: joined over the chunks of a prompt, and without the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def drop_past_key_values(out: Any) -> Any:
    """Return a copy of a model output that lacks `past_key_values` (a field set to None would remain among its keys)."""
    return type(out)(**{name: value for name, value in out.items() if name != "past_key_values"})


def join_chunk_outputs(outputs: Iterable[Any], chunk: int, last_only: bool) -> Any:
    """Join the text model's outputs for a prompt's chunks of `chunk` tokens along the token axis. `last_only`: return the
    last token's output only, and keep no more of each chunk (all would take 15 GB at two million tokens of a 7B model)."""
    held = list[Any]()
    for out in outputs:
        if last_only:
            out.last_hidden_state = out.last_hidden_state[:, -1:].clone()
        held.append(out)
    whole = held[-1]
    if last_only:
        return whole
    if held[0].last_hidden_state.shape[1] > 1 or chunk == 1:  # else layers ran the last row of each alone
        whole.last_hidden_state = torch.cat([one.last_hidden_state for one in held], 1)
    if whole.get("hidden_states") is not None:
        each = zip(*(one.hidden_states for one in held), strict=True)
        whole.hidden_states = tuple(torch.cat(states, 1) for states in each)
    return whole
