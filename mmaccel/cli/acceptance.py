"""What a draft is worth: tokens kept in a round and in a row, speed beside plain decoding, and proof where bytes differ."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.cli import answer
from mmaccel.core.attach import Accelerated, accelerate, adapter_for, attached
from mmaccel.core.errors import MmaccelError
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report


@dataclass(frozen=True)
class Drafted:
    """One generation with a draft, against the same one without.

    kept          drafted tokens kept in a round, mean: M without the target's own token (SpecVLM, PEARL)
    a_step        tokens a target step, mean: M with it (vLLM, Spec-Bench; plain decoding has 1)
    streak        drafted tokens kept in a row, over rounds where the draft runs ahead (ParallelVLM's adaptive length), mean
    share         drafted tokens that were kept, of those that were judged up to the first refusal
    tokens_per_s  after the first token; `plain_per_s` of the model alone
    same          whether the tokens are those of the model alone; `certified` tells of the first that is not
    """

    tokens: int
    steps: int
    rounds: int
    kept: float
    a_step: float
    streak: float
    share: float
    tokens_per_s: float | None
    plain_per_s: float | None
    ttft_s: float | None
    plain_ttft_s: float | None
    same: bool
    failed: str | None
    counters: Mapping[str, float]
    notes: Sequence[str] = ()

    @property
    def speedup(self) -> float | None:
        """Of decoding, the first token left out."""
        if not self.tokens_per_s or not self.plain_per_s:
            return None
        return self.tokens_per_s / self.plain_per_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "counters": dict(self.counters), "speedup": self.speedup}


@dataclass(frozen=True)
class Plain:
    """The model alone: its new ids [n], tokens a second after the first, seconds to the first."""

    ids: Tensor
    tokens_per_s: float | None
    ttft_s: float | None


def generate(
    model: nn.Module | Accelerated,
    inputs: Mapping[str, Tensor],
    tokens: int,
    recipe: Recipe | None = None,
    **options: Any,
) -> tuple[Tensor, Report]:
    """Greedy new ids [n] under what is attached, or of a plain model under `recipe`, and the report."""
    ids, report = answer.generate(model, inputs, recipe, max_new_tokens=tokens, **options)
    return ids[0], report


def alone(model: nn.Module | Accelerated, inputs: Mapping[str, Tensor], tokens: int, **options: Any) -> Plain:
    """Greedy decoding one token a step, of a plain model or under what is attached."""
    ids, report = generate(model, inputs, tokens, **options)
    return Plain(ids, report.tokens_per_s, report.ttft_s)


def drafted(
    model: nn.Module | Accelerated,
    inputs: Mapping[str, Tensor],
    tokens: int,
    plain: Plain,
    recipe: Recipe | None = None,
    **options: Any,
) -> Drafted:
    """The same generation with a draft: an accelerated model's own, or that of `recipe`."""
    return summed(*generate(model, inputs, tokens, recipe, **options), plain)


def summed(ids: Tensor, report: Report, plain: Plain) -> Drafted:
    """The figures of a generation of new `ids` [n] with a draft."""
    told = report.draft
    lengths = told["lengths"]
    steps = told["target_steps"]
    streak = told["counters"].get("streak_mean", 0.0) or (sum(lengths) / len(lengths) if lengths else 0.0)
    # A round is judged up to its first refusal; all kept, there is none.
    refused = sum(length < window for length, window in zip(lengths, told["windows"], strict=True))
    return Drafted(
        tokens=report.new_tokens,
        steps=steps,
        rounds=told["rounds"],
        kept=report.accepted_length(),
        a_step=(report.new_tokens - 1) / steps if steps else 1.0,
        streak=streak,
        share=told["accepted"] / max(told["accepted"] + refused, 1),
        tokens_per_s=report.tokens_per_s,
        plain_per_s=plain.tokens_per_s,
        ttft_s=report.ttft_s,
        plain_ttft_s=plain.ttft_s,
        same=torch.equal(ids, plain.ids),
        failed=told["failed"],
        counters=told["counters"],
        notes=told["notes"],
    )


def compare(
    model: nn.Module, inputs: Sequence[Mapping[str, Tensor]], tokens: int, recipes: Mapping[str, Recipe]
) -> Iterator[dict[str, Any]]:
    """A row for each recipe and prompt; each prompt is generated from without a draft first."""
    references = [alone(model, one, tokens) for one in inputs]
    for name, recipe in recipes.items():
        with accelerate(model, recipe) as fast:
            for number, (one, plain) in enumerate(zip(inputs, references, strict=True)):
                yield {"recipe": name, "prompt": number, **drafted(fast, one, tokens, plain).to_dict()}


@dataclass(frozen=True)
class Certificate:
    """Of two greedy generations from one model.

    first   the first new token in which they differ; None: they are the same
    gap     by how much, in fp32, the logits of the two candidates there differ
    slack   the largest change of a logit, in the model's own precision, between a pass of one row and one of many there
    ended   one is the beginning of the other and ends at `first`, after the same tokens: no rounding does that
    """

    first: int | None
    gap: float = 0.0
    slack: float = 0.0
    ended: bool = False

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference: no logit was further from the other than rounding moves one."""
        return self.first is None or (not self.ended and self.gap <= self.slack)


@torch.no_grad()
def certify(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    ours: Tensor,
    plain: Tensor,
    window: int,
    exact: nn.Module | None = None,
) -> Certificate:
    """Whether `ours` [n] and `plain` [m], greedy new ids after the prompt `inputs`, differ by rounding alone.

    A window verifies several rows with other kernels than a single one has, which in low precision may turn a near tie. At
    the first difference the two candidates are looked at in fp32 (`exact`: the model in fp32, or a copy is made), and what
    is allowed is what rounding does to any logit there between a one-row and a `window`-row pass.
    """
    length = min(ours.numel(), plain.numel())
    differ = (ours[:length] != plain[:length]).nonzero()
    if not differ.numel():
        same = ours.numel() == plain.numel()
        return Certificate(None if same else length, ended=not same)
    first = int(differ[0])
    if first == 0:
        raise MmaccelError(
            "the first token comes from the prompt's pass, which no window touches; look for another cause."
        )
    before = plain[:first]
    rows = min(window, first)
    # On the road that both were generated on: its kernels are what rounds.
    with accelerate(model) if attached(model) is None else nullcontext():
        one = _logits(model, inputs, before, [1] * rows)
        many = _logits(model, inputs, before, [rows])
    exact = exact if exact is not None else copy.deepcopy(model).float()
    kind = next(exact.parameters()).dtype
    cast = {name: x.to(kind) if x.is_floating_point() else x for name, x in inputs.items()}
    true = _logits(exact, cast, before, [1] * rows)
    gap = float((true[ours[first]] - true[plain[first]]).abs())
    return Certificate(first, gap, float((one - many).abs().max()))


def _logits(model: nn.Module, inputs: Mapping[str, Tensor], before: Tensor, sizes: Sequence[int]) -> Tensor:
    """[V] float64 logits after the prompt and `before`, of which the last ``sum(sizes)`` are run in passes of `sizes`."""
    runner = adapter_for(model).runner(model)
    runner.prefill(inputs)
    start = before.numel() - sum(sizes)
    if start:
        runner.step(before[None, :start])
    for size in sizes:
        out = runner.step(before[None, start : start + size])
        start += size
    return out[0, -1].double()


def read_rate(device: torch.device | str = "cpu", size: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes a second that this device reads: the best of a few sums over `size` bytes."""
    place = torch.device(device)
    data = torch.ones(size // 4, device=place)
    best = 0.0
    for _ in range(repeats):
        _wait(place)
        began = time.perf_counter()
        data.sum()
        _wait(place)
        best = max(best, size / (time.perf_counter() - began))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def floor_s(model: nn.Module, cache_bytes: float, rate: float) -> float:
    """Seconds a decode step cannot go below: the language model's weights and the cache, read once each."""
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    embedding: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    parts = [part for part in (adapter_for(model).text(model), head) if part is not None]
    # A step reads one row of the embeddings, unless they are the head as well.
    rows = set() if embedding is None else {id(p) for p in embedding.parameters()}
    rows -= {id(p) for p in parts[-1].parameters()}
    read = {id(p): p.nbytes for part in parts for p in part.parameters() if id(p) not in rows}
    return (sum(read.values()) + cache_bytes) / rate
