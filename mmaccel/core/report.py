"""Figures of a run: seconds, shares of attention computed, tokens drafted and accepted, memory."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.registry import DEFAULTS
from mmaccel.core.report_page import HtmlReport, format_report_lines, plural

_EVENTS = """
    recalled questions pages ingested eager_splits deferred_splits visual_splits cuts deferred singletons flushed resolved
    scenes host_puts host_fetches host_gathers
"""
_EVENT_PREFIXES = ("fetch_", "host_copies_", "host_bytes_", "host_seconds_", "host_disk_in")


def counter_increases_since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return a memory's counters `now`; those that count events (retrievals, say) only as their increase since `before`."""
    events = [name for name in before if name in _EVENTS.split() or name.startswith(_EVENT_PREFIXES)]
    return {**now, **{name: now[name] - before[name] for name in events if name in now}}


@dataclass(frozen=True)
class Report(HtmlReport):
    """Figures of the last generation or forward pass of an accelerated model, or of the last answer on a stream.

    kept            query-key pairs in the listed blocks over causal pairs in prefill, among the tokens that a layer has
                    (after a pruner, those left). Mean over layers, heads and rows; dense heads and rows count as 1. A listed
                    block counts whole, also past the diagonal. So a short prompt may have more than 1: nothing is saved
    kept_by_head    the same for each layer and head
    patterns        for each layer, the name of the pattern each head ran ("boundary_2d(grid)" when it ran within a boundary,
                    "dense" when it did not run sparse; "grid+dense" when pieces of a prompt ran differently)
    ttft_s          seconds from the call of `generate` to its first token, vision included; None without generation
    tokens_per_s    new tokens after the first over the seconds they took, without a draft's wait_s; None for fewer than two
    peak_bytes      largest device memory during the call (CUDA), or largest resident set of the process so far (CPU)
    new_tokens      of a batch, those of its longest answer
    draft           rounds, target_steps, proposed, accepted, lengths (accepted in each round), windows (proposed in each),
                    failed (a reason or None), wait_s (seconds that decoding waited for its prefill), counters (the
                    strategy's own), notes (its own sentences, `DraftState.report_notes`). In a batch they are summed, and
                    counters and notes are left out; sequences: if a draft was at work, the same for each sequence,
                    with its new_tokens and its memory's counters (kv)
    kv              counters of the KV memory; in a batch with drafts, of its last sequence's memory. If a call continues the
                    `past_key_values` of an earlier one, counters of events, such as "recalled", count this call alone
    backend_why     why this attention backend was chosen, with the measured rates where "auto" measured
    video_tokens    of the prompt's videos, in a session of the frames taken in; `video_units`: their steps of time (frames,
                    or what the tower takes as one)
    notes           one sentence for each thing that was asked for and did not act, or acted otherwise, and why
    """

    recipe: dict[str, Any]
    backend: str
    kept: float | None
    kept_by_head: tuple[tuple[float, ...], ...]
    patterns: tuple[tuple[str, ...], ...]
    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    tokens_per_s: float | None
    peak_bytes: int
    draft: dict[str, Any]
    kv: dict[str, float]
    backend_why: str = ""
    notes: tuple[str, ...] = ()
    video_tokens: int = 0
    video_units: int = 0

    def heads(self) -> Counter[str]:
        """Return how many heads, over all layers, ran each pattern."""
        return Counter(chain.from_iterable(self.patterns))

    def accepted_length(self) -> float:
        """Return the mean number of drafted tokens accepted per round that proposed any, without the target's own token. For
        streaks over rounds of a pipelined draft see ``draft["counters"]``."""
        lengths: list[int] = self.draft.get("lengths") or [0]
        return sum(lengths) / len(lengths)

    def __str__(self) -> str:
        return format_report_lines(self.to_dict())


@dataclass(kw_only=True)
class DraftRounds:
    """Counts the rounds of speculative decoding: of each non-empty proposal the length and the number of accepted tokens."""

    lengths: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    target_steps: int = 0
    wait_s: float = 0.0
    failed: str | None = None

    def count_round(self, proposed: int, accepted: int) -> None:
        """Count one target step that verified `proposed` tokens (0: plain decoding) and accepted `accepted` of them."""
        self.target_steps += 1
        if proposed:
            self.lengths.append(accepted)
            self.windows.append(proposed)

    def record_draft_failure(self, reason: str) -> None:
        """Record that the draft failed for `reason` and was dropped; decoding goes on without it."""
        self.failed = reason

    def record_draft_end(self, counters: dict[str, float], notes: list[str]) -> None:
        """Record the counters and notes of one sequence's draft, at the end of the sequence."""

    def draft_statistics(self) -> dict[str, Any]:
        """Return the draft statistics in the form of `Report.draft`."""
        told = {"rounds": len(self.lengths), "proposed": sum(self.windows), "accepted": sum(self.lengths)}
        names = ("target_steps", "lengths", "windows", "failed", "wait_s")
        return told | {name: copy(getattr(self, name)) for name in names}


@dataclass
class SequenceMeter(DraftRounds):
    """Statistics of one sequence decoded with a draft; what it counts is also added to the `Meter` of the whole call."""

    whole: Meter
    new_tokens: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    kv: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count_round(self, proposed: int, accepted: int) -> None:
        super().count_round(proposed, accepted)
        self.whole.count_round(proposed, accepted)

    def record_draft_failure(self, reason: str) -> None:
        super().record_draft_failure(reason)
        self.whole.record_draft_failure(reason)

    def record_draft_end(self, counters: dict[str, float], notes: list[str]) -> None:
        self.counters, self.notes, self.wait_s = counters, notes, counters.pop("draft_wait_seconds", 0.0)
        self.whole.wait_s += self.wait_s

    def count_tokens(self, count: int) -> None:
        """Count `count` new tokens of this sequence, and of the whole call if it has the longest answer."""
        self.new_tokens += count
        self.whole.count_tokens(max(0, self.new_tokens - self.whole.new_tokens))

    def draft_statistics(self) -> dict[str, Any]:
        names = ("counters", "notes", "new_tokens", "kv")
        return super().draft_statistics() | {name: copy(getattr(self, name)) for name in names}


@dataclass
class Meter(DraftRounds):
    """Collects the figures of a `Report` during a run, by layer and pass; tensors stay on the device until it is made."""

    listed: dict[int, list[Tensor]] = field(default_factory=dict)
    causal: dict[int, list[Tensor]] = field(default_factory=dict)
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    prompt_tokens: int = 0
    video: tuple[int, int] = (0, 0)  # its tokens and units
    new_tokens: int = 0
    started: float | None = None
    first: float | None = None
    last: float | None = None
    notes: list[str] = field(default_factory=list)
    sequences: list[SequenceMeter] = field(default_factory=list)
    idle: dict[str, None] = field(default_factory=dict)  # why layers under a pattern ran dense, each once
    acted_before: bool = False  # whether a pattern ran when an earlier call read what this one goes on from
    generating: bool = False  # once a generation is over its figures stay until the next pass

    def clear(self) -> None:
        """Forget all figures of the last call."""
        self.__init__()  # type: ignore[misc]

    def begin_generation(self, device: torch.device, acted_before: bool = False) -> None:
        """Start measuring a generation: reset all figures and the device's peak memory, and start the clock."""
        self.clear()
        self.generating, self.acted_before = True, acted_before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.started = time.perf_counter()

    def begin_pass(self, tokens: int, start: int, video: tuple[int, int] = (0, 0)) -> None:
        """Start measuring a pass over `tokens` new columns from column `start`; `video`: its video tokens and units."""
        if not self.generating and (start == 0 or self.awaits_first_pass):
            self.clear()
        if self.prompt_tokens == 0:
            self.prompt_tokens, self.video = tokens, video

    @property
    def awaits_first_pass(self) -> bool:
        """Whether the next forward pass starts new figures: it is the first of all, or the first after a generation, whose
        figures are then dropped."""
        return self.prompt_tokens == 0 or (self.started is not None and not self.generating)

    def count_tokens(self, count: int = 1) -> None:
        """Count `count` new tokens that have reached the host, and note the time."""
        self.last = time.perf_counter()
        self.first = self.last if self.first is None else self.first
        self.new_tokens += count

    def count_attention(self, layer: int, names: tuple[str, ...], listed: Tensor, causal: Tensor) -> None:
        """Add the query-key pairs of one layer's prefill: `listed` [B, H], in the blocks that the patterns `names` of its
        heads chose, and `causal` [B, 1], all causal ones."""
        self.listed.setdefault(layer, []).append(listed)
        self.causal.setdefault(layer, []).append(causal)
        known = self.names.get(layer, names)
        both = (f"{a}+{b}".split("+") for a, b in zip(known, names, strict=True))
        self.names[layer] = tuple("+".join(dict.fromkeys(parts)) for parts in both)

    def new_sequence(self) -> SequenceMeter:
        """Add and return the meter of one more sequence that is decoded with a draft."""
        self.sequences.append(SequenceMeter(self))
        return self.sequences[-1]

    def add_note(self, sentence: str) -> None:
        """Add a sentence for the report on what did not act as requested, beginning with its part ("draft: "); once each."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def note_unplanned_layers(self, pattern: Any, heads: int) -> None:
        """Note that `pattern` planned nothing for a layer, unless all its heads are dense by choice."""
        if set(pattern.head_pattern_names(heads)) != {DEFAULTS["sparse"]}:
            self.add_note(f"sparse: {pattern.name} planned nothing for some layers; these are dense")

    def merge_counts(self, other: Meter) -> None:
        """Add to this meter the query-key pairs and the notes that the meter `other` has counted."""
        for layer, names in other.names.items():
            for listed, causal in zip(other.listed[layer], other.causal[layer], strict=True):
                self.count_attention(layer, names, listed, causal)
        for sentence in other.notes:
            self.add_note(sentence)
        self.idle |= other.idle

    def merged_with(self, other: Meter, video: tuple[int, int]) -> Meter:
        """Return a new meter with the query-key pairs and notes of `other` added; `video`: the stream's tokens and units."""
        whole = replace(self, listed={}, causal={}, names={}, notes=[], idle={}, video=video)
        for one in (other, self):
            whole.merge_counts(one)
        return whole

    def kept_by_head(self) -> tuple[tuple[float, ...], ...]:
        """Return listed over causal pairs for each layer and head, averaged over sequences; waits for the device."""
        shares: list[Tensor] = []
        for layer, parts in sorted(self.listed.items()):
            pairs = (torch.stack([p.double() for p in t]).sum(0) for t in (parts, self.causal[layer]))
            listed, causal = pairs
            mean = (listed / causal.clamp(min=1)).mean(0)
            # Layers of a model spread over devices tell from where they are.
            shares.append(mean if not shares else mean.to(shares[0].device))
        return tuple(map(tuple, torch.stack(shares).tolist())) if shares else ()

    def has_run_patterns(self) -> bool:
        """Return whether any head ran another pattern than "dense"."""
        return bool({*chain.from_iterable(self.names.values())} - {DEFAULTS["sparse"]})

    def _last_notes(self, recipe: dict[str, Any], kv: dict[str, float]) -> Iterator[str]:
        """Sentences on a pattern or a draft that did nothing, unless a note tells of it; and on forgotten frames."""
        asked, draft = (recipe.get(kind, {}).get("name", DEFAULTS[kind]) for kind in ("sparse", "draft"))
        noted = {one.split(": ")[0] for one in self.notes}
        if (
            asked != DEFAULTS["sparse"]
            and not self.has_run_patterns()
            and ("sparse" not in noted or self.idle)
        ):
            did = "was asked for and did nothing"
            if self.acted_before:
                did = "acted in an earlier call, which read what this one goes on from, and acts on no part of this call"
            yield f"sparse: {asked} {did}: {'; '.join(self.idle) or 'no prompt or film was read since the start or load'}"
        idle = not (self.lengths or self.failed or "draft" in noted)
        if draft != DEFAULTS["draft"] and self.new_tokens and idle:
            steps = plural(self.target_steps, "target step")
            why = f"it proposed nothing in {steps}" if self.target_steps else "the first token needs no draft"
            yield f"draft: {draft} was asked for and did nothing: {why}"
        if gone := kv.get("let_go"):
            yield f"kv: {gone:g} of {kv['units']:g} steps of time (frames) were let go of, and no question recalls them"

    def report(
        self, recipe: dict[str, Any], backend: str, kv: dict[str, float], device: torch.device, why: str = ""
    ) -> Report:
        """Return the figures so far as a `Report`."""
        by_head, ttft, rate = self.kept_by_head(), None, None
        if self.first is not None and self.last is not None:
            ttft = None if self.started is None else self.first - self.started
            if self.new_tokens > 1 and (seconds := self.last - self.first - self.wait_s) > 0:
                rate = (self.new_tokens - 1) / seconds
        only = self.sequences[0] if len(self.sequences) == 1 else SequenceMeter(self)
        return Report(
            recipe=recipe,
            backend=backend,
            kept=fmean(chain.from_iterable(by_head)) if by_head else None,
            kept_by_head=by_head,
            patterns=tuple(self.names[layer] for layer in sorted(self.names)),
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            ttft_s=ttft,
            tokens_per_s=rate,
            peak_bytes=peak_bytes(device),
            draft={
                **self.draft_statistics(),
                "notes": list(only.notes),
                "counters": dict(only.counters),
                "sequences": [sequence.draft_statistics() for sequence in self.sequences],
            },
            kv=kv,
            backend_why=why,
            notes=(*self.notes, *self._last_notes(recipe, kv)),
            **dict(zip(("video_tokens", "video_units"), self.video, strict=True)),
        )


def peak_bytes(device: torch.device) -> int:
    """Return the peak device memory since the last reset (CUDA), or this process's peak resident set (CPU), in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # there is none on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def time_after_device_work(device: torch.device) -> float:
    """Return `time.perf_counter()` once `device` has done what this thread's stream has launched."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
