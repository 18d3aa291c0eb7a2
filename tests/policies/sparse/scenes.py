"""Prompts to test on: tokens told one by one in plain Python, and the tensors made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import SparsePattern


@dataclass(frozen=True)
class Token:
    """One token: its modality, the number of its frame (-1 outside frames), its number in that frame."""

    modality: int
    frame: int = -1
    cell: int = -1


@dataclass(frozen=True)
class Scene:
    """Some sequences, each padded on the left to the longest, of which the rows from `start` on are the queries."""

    sequences: tuple[tuple[Token, ...], ...]
    start: int = 0
    heads: int = 4
    groups: int = 2
    size: int = 8
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.sequences)

    @property
    def length(self) -> int:
        return max(len(s) for s in self.sequences)

    def pad(self, b: int) -> int:
        return self.length - len(self.sequences[b])

    def layout(self) -> TokenLayout:
        def column(read, fill: int) -> Tensor:
            rows = [[fill] * self.pad(b) + [read(t) for t in s] for b, s in enumerate(self.sequences)]
            return torch.tensor(rows)

        return TokenLayout.build(
            column(lambda t: t.modality, TEXT),
            frame=column(lambda t: t.frame, -1),
            valid=column(lambda t: 1, 0).bool(),
        )

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """query (the rows from `start`), key, value."""
        rng = torch.Generator().manual_seed(self.seed)

        def draw(heads: int) -> Tensor:
            shape = (self.batch, heads, self.length, self.size)
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

        return draw(self.heads)[:, :, self.start :], draw(self.groups), draw(self.groups)

    def plan(self, pattern: SparsePattern, dtype: torch.dtype = torch.float64) -> AttentionPlan | None:
        """What a pattern plans for these queries."""
        query, key, _ = self.tensors(dtype)
        layout = self.layout()
        return pattern.plan(query, key, layout.select_tokens(slice(self.start, None)), layout)

    def planned(
        self, pattern: SparsePattern, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> tuple[AttentionPlan, tuple[Tensor, Tensor, Tensor]]:
        """The plan on that device, and the query, key and value that it was made for."""
        query, key, value = (t.to(device) for t in self.tensors(dtype))
        layout = self.layout().to(device)
        plan = pattern.plan(query, key, layout.select_tokens(slice(self.start, None)), layout)
        assert plan is not None
        return plan, (query, key, value)

    def mask(self, pattern: SparsePattern) -> np.ndarray:
        """[B, H, n_query, n_key] bool of the plan, every pair of which is computed once."""
        plan = self.plan(pattern)
        assert plan is not None and (plan.may_share_rows or int(plan.spans_per_pair().max()) <= 1)
        return plan.to_mask().numpy()

    def check(
        self, pattern: SparsePattern, masks_of: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Assert that the mask of head h of sequence b lies between the two that `masks_of(b, h)` gives."""
        got = self.mask(pattern)
        for b, h in itertools.product(range(self.batch), range(self.heads)):
            element, closure = (self.place(b, mask) for mask in masks_of(b, h))
            assert (got[b, h] >= element).all() and (got[b, h] <= closure).all()

    def place(self, b: int, mask: np.ndarray) -> np.ndarray:
        """The mask of sequence b, unpadded, as [n_query, n_key] of the scene."""
        pad, n = self.pad(b), self.length
        whole = np.zeros((n, n), bool)
        whole[pad:, pad:] = mask
        return whole[self.start :]

    def alone(self, b: int) -> tuple[Scene, tuple[slice, slice]]:
        """Sequence b as a scene of its own, and where its queries and keys lie in the rows of this one."""
        pad = self.pad(b)
        scene = Scene(
            (self.sequences[b],), max(0, self.start - pad), self.heads, self.groups, self.size, self.seed
        )
        return scene, (slice(max(0, pad - self.start), None), slice(pad, None))


def sequence(segments: list[tuple[int, list[int]]]) -> tuple[Token, ...]:
    """Tokens of segments (modality, sizes): the sizes of a text's runs, or of a picture's or video's frames."""
    tokens: list[Token] = []
    frame = 0
    for modality, sizes in segments:
        for size in sizes:
            if modality == TEXT:
                tokens += [Token(TEXT)] * size
            else:
                tokens += [Token(modality, frame, cell) for cell in range(size)]
                frame += 1
    return tuple(tokens)


_text = st.tuples(st.just(TEXT), st.lists(st.sampled_from([1, 1, 2, 5, 12]), min_size=1, max_size=1))
_image = st.tuples(st.just(IMAGE), st.lists(st.integers(1, 9), min_size=1, max_size=1))
_video = st.tuples(st.just(VIDEO), st.lists(st.sampled_from([1, 4, 6, 6, 6, 7]), min_size=1, max_size=5))
_segments = st.lists(st.one_of(_text, _image, _video, _video), min_size=3, max_size=9)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Interleaved modalities, ragged frames, islands of one token, padding, groups of heads, late queries."""
    sequences = tuple(sequence(s) for s in draw(st.lists(_segments, min_size=1, max_size=2)))
    length = max(len(s) for s in sequences)
    heads, groups = draw(st.sampled_from([(4, 2), (2, 2), (3, 1)]))
    start = int(length * draw(st.sampled_from([0, 0, 0.2, 0.43, 0.77, 0.98])))
    return Scene(sequences, start, heads, groups, seed=draw(st.integers(0, 2**16)))
