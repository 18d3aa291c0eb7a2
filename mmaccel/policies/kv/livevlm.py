"""The `livevlm` memory: keeps the past tokens that recent frames attend to; a question retrieves pages (groups) of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.memory.kv import KVView, Stream, StreamPass, StreamState
from mmaccel.core.registry import FieldLimit, at_least, in_range, limited, register
from mmaccel.policies.kv._tokens import HeldTokens, TokenMemory, TokenPolicy, attention_shares


@register("kv", "livevlm")
@dataclass(frozen=True, kw_only=True)
class LiveVLM(TokenPolicy):
    """Keeps the tokens that recent frames attend to, some from every stretch of time; a question retrieves pages of them.

    After Ning et al., "LiveVLM" (2505.15269, second version). After each clip of 32 frames the tokens older than the last
    `recent` frames are cut down to the budget (`choose_tokens_across_stream`): first the most attended ones, then by score
    as many as their stretch of the stream has room for. A question sees the recent frames and, layer by layer, the pages
    whose mean keys (before RoPE) best match its mean query. All of it is on the device. Exact while the stream is shorter
    than what a question retrieves.

    Our choices where the paper is open: the most attended tokens stay whatever their stretch holds already, and remaining
    room is filled by score, so that each layer keeps the same number; of its last incomplete clip a stream holds all tokens,
    which are retrieved like the older ones.

    frames     kept in the long term, in tokens: 64 are 12 544 of LLaVA-OneVision (the paper: 12 000)
    recent     last frames that are kept, and seen by every question, whole
    recall     share of the budget (`frames`) that a question retrieves from the long term, and sees
    scatter    share of the budget that goes to the most attended tokens, wherever they are in the stream
    bucket     tokens that a stretch of the stream has room for; there are budget / bucket stretches
    page       tokens retrieved together
    probes     tokens at the end of a clip whose queries score the others; None: those of its last frame
    positions  of kept tokens: "original", as in the paper, as long as the model's limit allows, then compact; or
               "compact" always
    """

    clip: ClassVar[int | None] = 32

    recent: int = limited(2, at_least(0))
    recall: float = limited(0.4, FieldLimit(lambda share: 0 < share <= 1, "more than 0 and at most 1"))
    scatter: float = limited(0.5, in_range(0, 1, "0 to 1"))
    bucket: int = limited(1, at_least(1))
    page: int = limited(16, at_least(1))
    probes: int | None = limited(None, at_least(1))

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        held, found = super().footprint(tokens, frames_per_unit), int(self.frames * self.recall)
        return replace(held, window=self.frames + self.recent, shown=found + self.recent, recalled=found)

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return LiveVLMMemory(self, stream, geometry, model, device)


class LiveVLMMemory(TokenMemory):
    """The stream memory of `livevlm`: selected older tokens, and all tokens of the last `recent` units (frames)."""

    _pages = _questions = 0

    @property
    def recent(self) -> int:
        """Number of the last units (frames) that are kept whole."""
        return self.stream.units(self.policy.recent)

    def _encode(
        self, layer: int, query: Tensor, stream_pass: StreamPass, key: Tensor, value: Tensor
    ) -> KVView:
        view = super()._encode(layer, query, stream_pass, key, value)
        old = view.key.shape[2] - self.stream.head - self.recent * self.stream.tokens_per_unit
        # The pass ends a clip, and more tokens are old than the budget allows.
        if (stream_pass.first + stream_pass.count) % self.clip == 0 and old > self.budget:
            probes = min(self.policy.probes or self.stream.tokens_per_unit, self.stream.tokens_per_unit)
            assert view.query is not None
            share = attention_shares(view.query[:, :, -probes:], view.key)
            self._scores[layer] = share[self.stream.head :]
        return view

    def _move(self, stream_pass: StreamPass) -> None:
        super()._move(stream_pass)
        for layer, share in self._scores.items():
            stream_pass.pause()
            held = self._held[layer]
            assert held is not None
            old = held.column.shape[0] - self.recent * self.stream.tokens_per_unit
            stretch = max(1, self.budget // self.policy.bucket)
            span = (self._count - self.recent) * self.stream.tokens_per_unit
            where = held.column[:old] * stretch // span
            kept = choose_tokens_across_stream(
                share[:old], where, self.budget, self.policy.scatter, self.policy.bucket
            )
            rest = torch.arange(old, held.column.shape[0], device=kept.device)
            self._keep(layer, torch.cat([kept, rest]))

    def _pick(self, layer: int, query: Tensor, held: HeldTokens) -> tuple[Tensor | None, int]:
        size = self.policy.page
        begin = max(self._count - self.recent, 0)
        old = max(held.column.shape[0] - self.recent * self.stream.tokens_per_unit, 0)
        # The last, incomplete page comes with the recent frames, whatever it holds.
        pages = old // size
        most = max(1, int(self.budget * self.policy.recall) // size)
        groups, _, width = held.key.shape[1:]
        mean = held.key[0, :, : pages * size].float().reshape(groups, pages, size, width).mean(2)
        score = torch.einsum("gpd,gd->p", mean, query.reshape(groups, -1, width).sum(1))
        chosen = min(pages, most)
        counted = self._main or self  # snapshots of several questions count together
        counted._pages += chosen
        counted._questions += layer == 0
        if pages <= most:
            return None, begin
        best = torch.sort(score, descending=True, stable=True).indices[:most].sort().values
        found = (best[:, None] * size + torch.arange(size, device=best.device)).flatten()
        rest = torch.arange(pages * size, held.column.shape[0], device=best.device)
        return torch.cat([found, rest]), begin

    def usage(self) -> dict[str, float]:
        return {**super().usage(), "questions": float((self._main or self)._questions)}

    def counters(self) -> dict[str, float]:
        return {**super().counters(), **self.usage(), "pages": float((self._main or self)._pages)}


def choose_tokens_across_stream(
    score: Tensor, where: Tensor, budget: int, scatter: float, room: int
) -> Tensor:
    """Choose `budget` tokens of the N with `score` [N], so that all of the stream is represented; return ascending indices.

    `where` [N] long: number of the stretch of the stream that each token is in; N >= budget. First the ``scatter * budget``
    best by score are taken. Then, by score, tokens of stretches in which less than `room` were taken. The rest is filled by
    score alone. Of equal scores the older token goes first.
    """
    order = torch.sort(score, descending=True, stable=True).indices
    place = where[order]
    grouped = torch.sort(place, stable=True).indices
    ranked = torch.arange(len(order), device=order.device)
    sorted_place = place[grouped]
    first = torch.searchsorted(sorted_place, sorted_place)
    before = torch.empty_like(ranked)
    before[grouped] = ranked - first
    group = torch.where(before < room, 1, 2)
    group[: int(scatter * budget)] = 0
    return order[torch.sort(group, stable=True).indices[:budget]].sort().values
