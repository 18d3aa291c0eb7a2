"""Gated DeltaNet in training (Yang et al., arXiv 2412.06464), every branch of a batch in one pass.

A running state cannot be masked as attention can: a branch must go on from the state at the end of its own prompt. So the
prompt and each branch are cut into chunks, and each chunk knows the one before it; of a branch's first, that is the last of
its prompt. What a chunk makes of a state, decay and correction, is one affine map, and maps are composed along those
ways by pointer doubling, in as many steps as the logarithm of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 32
REACH = 3
"""How many tokens before its own the convolution sees."""


@dataclass(frozen=True)
class Chunks:
    """The tokens of a batch, numbered from 0 to T - 1 row by row, in n chunks. One behind the last number stands for none.

    `slots` [n * CHUNK]: the token of each slot. `places` [T]: the slot of each token. `before` [n]: the chunk before each.
    `back` [T, REACH]: the tokens before each, the farthest first. `longest`: chunks of the longest way.
    """

    slots: Any
    places: Any
    before: Any
    back: Any
    longest: int


def on(device: torch.device, value: Any) -> Any:
    """Arrays as tensors on `device`: `value` itself, those of a mapping and those of a dataclass; the rest as it is."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: on(device, one) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: on(device, one) for name, one in vars(value).items()})
    return value


def chunked(length: NDArray[np.int64], branch: NDArray[np.int64], prefix: int) -> Chunks:
    """The chunks of rows of `prefix` + N tokens: [B] true lengths of prompts, [B, N] branch numbers (-1 is padding), each
    branch in one piece."""
    rows, count = branch.shape
    width, none = prefix + count, rows * (prefix + count)
    slots: list[NDArray[np.int64]] = []
    before: list[int] = []
    back = np.full((none, REACH), none)
    longest = 1

    def cut(first: int, size: int, parent: int, tail: NDArray[np.int64]) -> int:
        tokens = np.arange(first, first + size)
        seen = np.concatenate((tail, tokens))
        for far in range(REACH):
            back[tokens, far] = seen[far : far + size]
        pieces = -(-size // CHUNK)
        slots.append(np.pad(tokens, (0, pieces * CHUNK - size), constant_values=none))
        begun = len(before)
        before.extend((parent, *range(begun, begun + pieces - 1)))
        return pieces

    for row in range(rows):
        start, size = row * width, int(length[row])
        nothing = np.full(REACH, none)
        whole = cut(start, size, -1, nothing)
        end, tail = len(before) - 1, np.concatenate((nothing, np.arange(start, start + size)))[-REACH:]
        at = start + prefix
        for own in np.bincount(branch[row][branch[row] >= 0]).tolist():
            longest = max(longest, whole + cut(at, own, end, tail))
            at += own
        longest = max(longest, whole)
    chain = np.array(before)
    chain[chain < 0] = len(before)
    flat = np.concatenate(slots)
    places = np.full(none, len(flat))
    places[flat[flat < none]] = np.flatnonzero(flat < none)
    return Chunks(flat, places, chain, back, longest)


def convolve(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """The causal convolution of [T, C] along the ways of the chunks, by a weight [C, 1, REACH + 1], and SiLU."""
    taps, wide = weight.float()[:, 0], x.float()
    padded = F.pad(wide, (0, 0, 0, 1))
    total = wide * taps[:, REACH]
    for far in range(REACH):
        total = total + padded.index_select(0, chunks.back[:, far]) * taps[:, far]
    return F.silu(total).to(x.dtype)


def mix(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor, chunks: Chunks) -> Tensor:
    """The gated delta rule: queries and keys [T, K, D], values [T, H, E], logarithms of decay and strengths of writing
    [T, H] -> what each token reads [T, H, E], in float32. H is a multiple of K."""
    groups = value.shape[1] // key.shape[1]
    query, key = (_unit(x.float()).repeat_interleave(groups, 1) for x in (query, key))
    # [n, H, CHUNK, D or E]; [n, H, CHUNK]
    query, key, value, decay, write = (
        _cut(x, chunks) for x in (query * query.shape[-1] ** -0.5, key, value.float(), decay, write)
    )
    gone = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=gone.device).triu(1)
    pair = (gone[..., :, None] - gone[..., None, :]).masked_fill(later, float("-inf")).exp()
    through = gone.exp()[..., None]
    strong = key * write[..., None]
    # Each write is corrected by what the state already says: a triangular system within a chunk.
    solved = torch.linalg.solve_triangular(
        (strong @ key.transpose(-1, -2)) * pair,
        torch.cat((value * write[..., None], strong * through), -1),
        upper=False,
        unitriangular=True,
    )
    fresh, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    kept = (key * (gone[..., -1:] - gone).exp()[..., None]).transpose(-1, -2)
    unit = torch.eye(key.shape[-1], device=key.device)
    state = _states(through[..., -1:, :] * unit - kept @ read, kept @ fresh, unit, chunks)
    out = query * through @ state + (query @ key.transpose(-1, -2)) * pair @ (fresh - read @ state)
    return F.pad(out.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1)).index_select(0, chunks.places)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _cut(x: Tensor, chunks: Chunks) -> Tensor:
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded.index_select(0, chunks.slots).unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _states(change: Tensor, added: Tensor, unit: Tensor, chunks: Chunks) -> Tensor:
    """The state before each chunk, of maps state -> change @ state + added of all chunks."""
    none = unit.expand(1, change.shape[1], -1, -1)
    change, added = torch.cat((change, none)), F.pad(added, (0, 0, 0, 0, 0, 0, 0, 1))
    first = torch.cat((chunks.before, chunks.before.new_full((1,), len(chunks.before))))
    parent = first
    for _ in range((chunks.longest - 1).bit_length()):
        added = change @ added.index_select(0, parent) + added
        change = change @ change.index_select(0, parent)
        parent = parent[parent]
    return added.index_select(0, first)[:-1]
