"""Generation for the commands: model inputs of a prompt, answers with their reports, and what a draft gained: accepted
tokens, speed-up over plain decoding, and whether tokens differ from plain decoding by rounding alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import Accelerated, accelerate, adapter_for, attached
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, FinishReason
from mmaccel.core.errors import MmaccelError
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report
from mmaccel.models import load_processor

Generation = tuple[Tensor, Report]
"""New ids [B, n], and the report of the run."""


@dataclass(frozen=True)
class Answer:
    """The text of an answer, why it ended, and its report.

    `text` has no special tokens; `raw` has those before the end of the turn. `report` covers all prompts of the batch.
    `finish_reason`: "stop" (an end-of-text token came), "length" (the token limit) or "positions" (the model has no more).
    """

    text: str
    raw: str = field(repr=False)
    report: Report = field(repr=False)
    finish_reason: FinishReason = "stop"


def prompt_inputs(
    processor: Any, content: Sequence[Mapping[str, Any]], model: nn.Module
) -> dict[str, Tensor]:
    """Return the model inputs of one user turn, on the model's device; `content`: its "video", "image" and "text" pieces."""
    first = next(model.parameters())
    shown = load_processor(processor, like=model)
    inputs = shown.chat(content, device=first.device, dtype=first.dtype)
    return {name: x.to(first.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def generate(
    model: nn.Module | Accelerated, inputs: Mapping[str, Tensor], recipe: Recipe | None = None, **options: Any
) -> Generation:
    """Return new ids [B, n], greedy by default, and the report. `recipe` is for a plain model; `Accelerated` ones have their
    own."""
    attach: AbstractContextManager[Accelerated] = (
        nullcontext(model) if isinstance(model, Accelerated) else accelerate(model, recipe)
    )
    with attach as fast, torch.no_grad():
        ids = fast.generate(**inputs, **{"do_sample": False, **options})
        return ids[:, inputs["input_ids"].shape[1] :], fast.report()


def ask(
    model: nn.Module | Accelerated,
    processor: Any,
    inputs: Mapping[str, Tensor],
    recipe: Recipe | None = None,
    **how: Any,
) -> Answer:
    """Return the greedy answer to the first prompt of `inputs`; further arguments as in `answer_prompts`."""
    return answer_prompts(model, processor, inputs, recipe, **how)[0]


def answer_prompts(
    model: nn.Module | Accelerated,
    processor: Any,
    inputs: Mapping[str, Tensor],
    recipe: Recipe | None = None,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    streamer: Any = None,
) -> list[Answer]:
    """Return the greedy answers to the batch of prompts `inputs`; `recipe` as in `generate`.

    All answers share one report, whose shares and `prompt_tokens` are means over the batch.
    """
    ids, report = generate(model, inputs, recipe, max_new_tokens=max_new_tokens, streamer=streamer)
    plain = model.model if isinstance(model, Accelerated) else model
    processor = load_processor(processor, like=plain)
    answers, tokenizer = [], processor.tokenizer
    ends = end_token_ids(plain, tokenizer)
    special = {place for place, token in tokenizer.added_tokens_decoder.items() if token.special}
    if len(ids) > 1:
        report = replace(report, prompt_tokens=report.prompt_tokens // len(ids))
    for said in ids.tolist():
        reason = finish_reason(said, ends, max_new_tokens)
        # A shorter answer of a batch is padded.
        said = list(takewhile(lambda token: token not in ends, said))
        text = processor.decode(said).strip()
        raw = str(tokenizer.decode(said, skip_special_tokens=False)).strip() if special & set(said) else text
        answers.append(Answer(text, raw, report, reason))
    return answers


def finish_reason(said: Sequence[int], ends: set[int], most: int) -> FinishReason:
    """Return why `generate` ended a sequence, from its new ids `said`, the end-of-text ids and the token limit `most`."""
    if ends & set(said):
        return "stop"
    return "length" if len(said) >= most else "positions"


def end_token_ids(model: nn.Module, tokenizer: Any) -> set[int]:
    """Return the model's end-of-text ids, or the tokenizer's if the model's generation config names none."""
    told: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if told is None:
        told = tokenizer.eos_token_id
    return set(told) if isinstance(told, list | tuple) else {told}


def draft_metrics(run: Generation, plain: Generation | None = None) -> dict[str, Any]:
    """Return JSON-ready figures of `run`, a generation of one prompt with a draft; `plain` is the same without the draft.

    kept          mean accepted tokens per round, the target's own token not counted (M of SpecVLM and PEARL)
    a_step        mean new tokens per step of the target, its own token counted (M of vLLM and Spec-Bench; 1 without a draft)
    streak        mean accepted tokens in a row, over rounds if the draft runs ahead (ParallelVLM's adaptive length)
    share         accepted tokens over drafted tokens; tokens after the first rejection of a round are not counted
    tokens_per_s  tokens per second after the first token, without `draft_wait_s`, in which the draft read the prompt
    plain_per_s   tokens per second of `plain`, and `speedup` over it with the wait counted (None: no `plain`)
    same          whether the tokens equal those of `plain` (True: no `plain`); `compare_generations` judges a difference
    """
    (ids, report), draft = run, run[1].draft
    lengths, steps, pace = draft["lengths"], draft["target_steps"], report.tokens_per_s
    plain_pace, whole = plain and plain[1].tokens_per_s, pace
    if pace and draft["wait_s"]:
        whole = 1 / (1 / pace + draft["wait_s"] / (report.new_tokens - 1))
    # A round is judged up to its first refusal; all kept, there is none.
    refused = sum(length < window for length, window in zip(lengths, draft["windows"], strict=True))
    return {
        "tokens": report.new_tokens,
        "steps": steps,
        "rounds": draft["rounds"],
        "kept": report.accepted_length(),
        "a_step": (report.new_tokens - 1) / steps if steps else 1.0,
        "streak": draft["counters"].get("streak_mean", 0.0) or report.accepted_length(),
        "share": draft["accepted"] / max(draft["accepted"] + refused, 1),
        "tokens_per_s": pace,
        "plain_per_s": plain_pace,
        "ttft_s": report.ttft_s,
        "plain_ttft_s": plain and plain[1].ttft_s,
        "draft_wait_s": draft["wait_s"],
        "same": plain is None or torch.equal(ids, plain[0]),
        "failed": draft["failed"],
        "counters": draft["counters"],
        "notes": draft["notes"],
        "speedup": whole / plain_pace if whole and plain_pace else None,
    }


@dataclass(frozen=True)
class GenerationComparison:
    """Result of comparing two greedy generations of one model.

    first   index of the first new token where they differ; None: they are equal
    gap     difference, in fp32, of the logits of the two candidate tokens there
    slack   largest change of any logit there, in the model's own precision, between a one-row and a many-row pass
    ended   one generation is a prefix of the other and ends at `first`, which rounding cannot explain
    """

    first: int | None
    gap: float = 0.0
    slack: float = 0.0
    ended: bool = False

    @property
    def is_explained(self) -> bool:
        """Whether there is no difference, or rounding explains it: `gap` is at most `slack`, and none `ended` early."""
        return self.first is None or (not self.ended and self.gap <= self.slack)


@torch.no_grad()
def compare_generations(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    ours: Tensor,
    plain: Tensor,
    window: int,
    exact: nn.Module | None = None,
) -> GenerationComparison:
    """Check whether `ours` [n] and `plain` [m], greedy new ids after the prompt `inputs`, differ by rounding alone.

    A target verifies drafted tokens in one pass of several rows. Its kernels round otherwise than those of one row, which
    may flip a near tie in low precision. At the first difference the logits of the two candidates are compared in fp32
    (`exact`: the model in fp32; None: a copy is made). Their gap may be at most the largest change of any logit there
    between a one-row and a `window`-row pass. Raises `MmaccelError` if the first token differs, which no draft changes.
    """
    length = min(ours.numel(), plain.numel())
    differ = (ours[:length] != plain[:length]).nonzero()
    if not differ.numel():
        same = ours.numel() == plain.numel()
        return GenerationComparison(None if same else length, ended=not same)
    first = int(differ[0])
    if first == 0:
        raise MmaccelError(
            "the first token comes from the prefill, which no draft changes; look for another cause of the difference."
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
    return GenerationComparison(first, gap, float((one - many).abs().max()))


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


def memory_bandwidth(device: torch.device | str = "cpu", size: int = 1 << 28) -> float:
    """Measure the memory bandwidth of `device` in bytes per second: the best of five sums over `size` bytes."""
    data, best = torch.ones(size // 4, device=device), 0.0
    wait: Callable[[torch.device], None] = torch.cuda.synchronize if data.is_cuda else lambda _: None
    for _ in range(5):
        wait(data.device)
        began = time.perf_counter()
        data.sum()
        wait(data.device)
        best = max(best, size / (time.perf_counter() - began))
    return best


def min_decode_step_s(model: nn.Module, cache_bytes: float, rate: float) -> float:
    """Return a lower bound of a decode step in seconds: reads weights and `cache_bytes` once, at `rate` bytes per second."""
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    embedding: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    parts = [part for part in (adapter_for(model).text_model(model), head) if part is not None]
    # A step reads one row of the embeddings, unless they are the head as well.
    rows = set() if embedding is None else {id(p) for p in embedding.parameters()}
    rows -= {id(p) for p in parts[-1].parameters()}
    read = {id(p): p.nbytes for part in parts for p in part.parameters() if id(p) not in rows}
    return (sum(read.values()) + cache_bytes) / rate
