"""Metrics of the server at `/metrics`, in Prometheus format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
STEPS = (1, 2, 4, 8, 16, 32)
PACES = (1, 5, 10, 25, 50, 100, 200, 400, 800)


class Metrics:
    """Prometheus metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"mmaccel_{name}", told, labels, registry=registry)

        def gauge(name: str, told: str) -> Gauge:
            return Gauge(f"mmaccel_{name}", told, registry=registry)

        def histogram(name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mmaccel_{name}", told, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests by path and status.", "path", "status")
        self.first = histogram("first_token_seconds", "From the request to the first token.", SECONDS)
        self.pace = histogram("tokens_per_second", "Tokens a second after the first, of each answer.", PACES)
        self.prompt = counter("prompt_tokens", "Tokens of prompts.")
        self.together = histogram("answers_per_step", "Answers that one step of the model decoded.", STEPS)
        self.alone = counter("alone_answers", "Answers that shared no step with others.")
        self.tokens = counter("new_tokens", "Tokens of answers.")
        self.drafted = counter("drafted_tokens", "Tokens that drafts proposed.")
        self.accepted = counter("accepted_tokens", "Of these, tokens that were kept.")
        self.running = gauge("running_requests", "Requests that run or wait, without WebSockets.")
        self.waiting = gauge("waiting_requests", "Requests that wait for their turn.")
        self.streams = gauge("streams", "Streams that are open.")
        self.frames = counter("frames", "Frames taken in by streams.")
        self.dropped = counter("dropped_frames", "Frames of streams that came too fast and were left out.")
        self.rate = gauge("frames_per_second", "Frames a second, of the last call that took in some.")
        self.held = gauge("memory_bytes", "Bytes that the memories of streams and kept videos hold.")
        self.kept = gauge("kept_videos", "Videos whose memory is kept.")
        self.hits = counter("kept_hits", "Questions that found their video's memory.")
        self.retrieved = counter("retrieved_units", "Units (layer by layer) that questions recalled.")
        self.out_of_memory = counter("out_of_memory", "Requests that the device had no memory for.")

    def count_answer(
        self, ttft_s: float | None, pace: float | None, tokens: int, draft: Mapping[str, Any]
    ) -> None:
        """Count an answer of `tokens` tokens, its seconds to the first token `ttft_s`, and its tokens per second after that
        (`pace`); `draft` holds the numbers of tokens `proposed` and `accepted`, as in a `Report`."""
        self.tokens.inc(tokens)
        if ttft_s is not None:
            self.first.observe(ttft_s)
        if pace is not None:
            self.pace.observe(pace)
        self.drafted.inc(draft.get("proposed", 0))
        self.accepted.inc(draft.get("accepted", 0))

    def prometheus_text(self) -> bytes:
        return generate_latest(self.registry)
