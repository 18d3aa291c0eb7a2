"""How much cheaper a draft's decode step is than its target's, on this machine's CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from mmaccel.models.tiny.configs import SPECS, Spec, build_model


@dataclass(frozen=True)
class Ratio:
    """Milliseconds of one decode step of a target and of its draft, medians over `rounds` alternating rounds."""

    target: str
    draft: str
    target_ms: float
    draft_ms: float

    @property
    def ratio(self) -> float:
        return self.target_ms / self.draft_ms


def _inputs(spec: Spec, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(length).remainder(200).add(16)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.inference_mode()
def decode_steps(spec: Spec, length: int, steps: int) -> list[float]:
    """Seconds of each of `steps` greedy decode steps after `length` tokens of text, batch 1, fp32."""
    model = build_model(spec)
    inputs = _inputs(spec, length)
    out = model(**inputs, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        out = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        taken.append(time.perf_counter() - began)
    return taken


def measure(length: int = 1024, steps: int = 40, rounds: int = 3, threads: int = 2) -> list[Ratio]:
    """The ratio of every target and its draft, with random weights (a step's cost does not depend on them)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows = []
    try:
        for spec in SPECS.values():
            if spec.target is None:
                continue
            times: dict[str, list[float]] = {spec.target: [], spec.name: []}
            for _ in range(rounds):
                for name, taken in times.items():
                    taken += decode_steps(SPECS[name], length, steps)[5:]
            # The lower quartile is what the step costs when the machine is left alone.
            low = {name: sorted(taken)[len(taken) // 4] * 1000 for name, taken in times.items()}
            rows.append(Ratio(spec.target, spec.name, low[spec.target], low[spec.name]))
    finally:
        torch.set_num_threads(before)
    return rows
