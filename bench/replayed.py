"""Replayed acceptance: models of published shapes at real work, whose verdicts are drawn.

A `Counting` model runs every step whole, and then its answer is written over: it says the number after the last token. A
target says it with chance `keep`, on its own for each row; otherwise it says the one after that, with the same chance, and
so on. A draft says it always, and ranks the numbers after it in order, which is what a tree of branches is made of.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mmaccel.core.adapter import Runner
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.draft import DraftState, Prompt
from mmaccel.core.decoding.generate import Speculation, decode_round_robin
from mmaccel.core.decoding.worker import READY, MessageSocket, Worker
from mmaccel.core.report import DraftRounds
from mmaccel.models import decode as decoding
from mmaccel.models import loading, prompt_stream, runner, shapes
from mmaccel.models import step as steps
from mmaccel.models.attention import wrap_kv_cache
from mmaccel.models.decode import ROWS
from mmaccel.models.runner import HFRunner
from mmaccel.models.together import BatchedDecodeSteps
from mmaccel.policies.draft import _remote_drafter
from mmaccel.policies.draft._draft_decoder import DraftDecoder

VOCAB = 150_000
START = 7
"""The last token of every prompt."""
RANKS = 4
"""Numbers after the last token that may be said."""
LATER = 30
"""Tokens of text after a video."""


class Counting(HFRunner):
    """A model at work whose answers are written over; see above. `keep` None: a draft, which is always right."""

    def __init__(self, *given: Any, keep: float | None = None, seed: int = 0, **choices: Any) -> None:
        super().__init__(*given, **choices)
        self.keep = keep
        self.dice = torch.Generator().manual_seed(seed)

    def prefill(self, inputs: Mapping[str, Any], *rest: Any, **more: Any) -> Tensor:
        return self._said(super().prefill(inputs, *rest, **more)[None], inputs["input_ids"][:, -1:])[0]

    def step(self, ids: Tensor, branches: Any = None) -> Tensor:
        return self._said(super().step(ids, branches), ids)

    def _said(self, real: Tensor, ids: Tensor) -> Tensor:
        """`real` [1, n, V], written over: what follows `ids` [1, n]."""
        _say(real[0], ids[0], [(self, ids.shape[1])])
        return real


class CountingTogether:
    """Steps that counting runners of one model share, whose answers are written over, too; see `Runner.together`."""

    def __init__(self, runner: HFRunner) -> None:
        self.steps = BatchedDecodeSteps(runner)

    @property
    def warm(self) -> bool:
        return self.steps.warm

    def __call__(self, runners: Sequence[Counting], ids: Sequence[Tensor]) -> Sequence[Tensor]:
        counts = [one.shape[1] for one in ids]
        real = torch.cat(self.steps(runners, ids), 1)
        _say(real[0], torch.cat(list(ids), 1)[0], list(zip(runners, counts, strict=True)))
        return real.split(counts, 1)


def _say(real: Tensor, ids: Tensor, runners: Sequence[tuple[Counting, int]]) -> None:
    """Write over `real` [n, V] what follows `ids` [n], so many rows of each of the runners, all with one `keep`."""
    after = (ids[:, None] + 1 + torch.arange(RANKS, device=ids.device)) % VOCAB
    real.zero_()
    worth = torch.arange(RANKS, 0, -1, device=real.device, dtype=real.dtype)
    real.scatter_(1, after, worth.expand(len(after), RANKS))
    keep = runners[0][0].keep
    if keep is not None and keep < 1:
        rank = torch.cat([verdicts(count, keep, one.dice) for one, count in runners]).to(ids.device)
        real.scatter_(1, after.gather(1, rank[:, None]), float(2 * RANKS))


def verdicts(count: int, keep: float, dice: torch.Generator) -> Tensor:
    """[count] which of its ranks a target says after each row: 0, what the draft says, with chance `keep`."""
    missed = torch.rand(count, generator=dice).log() / math.log(1 - keep)
    # A draw of zero has an infinite logarithm.
    return missed.clamp(max=RANKS - 1).long()


def model_of(shape: str, device: str, layers: int | None = None, devices: Sequence[str] = ()) -> nn.Module:
    """A model of a shape in bfloat16, random weights, one layer of vision, over `devices`; or a trained one (tiny-...)."""
    if shape.startswith("tiny-"):
        kind = torch.float32 if device == "cpu" else torch.bfloat16
        return loading.load_model(shape, dtype=kind, device=device)
    more: dict[str, Any] = {"devices": devices} if devices else {"device": device}
    return shapes.build_model(shape, layers=layers, vision_layers=1, dtype=torch.bfloat16, **more)


def after(model: nn.Module, columns: int, rows: Sequence[int] | None = None, **choices: Any) -> Counting:
    """`model` at work after `columns` assumed columns: its cache is filled with small numbers. `rows`:
    of captured steps; None: the usual ones, where the model's layers admit them."""
    family: Any = adapter_for(model)
    shape, cache = family.geometry(model), wrap_kv_cache(model, family)
    size = (1, shape.kv_heads, columns, shape.head_dim)
    for layer in family.attentions(model):
        like = next(layer.parameters())
        pair = (torch.empty(size, dtype=like.dtype, device=like.device).normal_(0, 0.02) for _ in range(2))
        cache.update(*pair, layer.layer_idx)
    for one in getattr(cache, "states", {}).values():
        own = one.module
        conv = own.conv1d.weight.new_zeros(1, own.conv_dim, own.conv_kernel_size)
        sizes = 1, own.num_v_heads, own.head_k_dim, own.head_v_dim
        one.restore((columns, (conv, conv.new_zeros(sizes, dtype=torch.float32))))
    if rows is None:
        rows = ROWS if decoding.can_capture_decode(model, family, cache, also=("cpu",)) else ()
    return Counting(model, family, cache, rows, **choices)


def cache_bytes(model: nn.Module, columns: int) -> int:
    """What `columns` columns hold in all layers, and running states twice, which a step reads and writes."""
    family: Any = adapter_for(model)
    shape = family.geometry(model)
    each = shape.kv_heads * shape.head_dim * next(model.parameters()).dtype.itemsize
    states = (
        one.num_v_heads * one.head_k_dim * one.head_v_dim for one in family.recurrent_layers(model).values()
    )
    return 2 * shape.layers * columns * each + 2 * torch.float32.itemsize * sum(states)


def warm(runner: Runner, rows: Sequence[int], device: torch.device) -> None:
    """Compile and capture every step: the first of a width is run as it is written, the second captured."""
    length = runner.length()
    for count in [count for count in rows for _ in range(3)]:
        runner.step(torch.ones(1, count, dtype=torch.long, device=device))
        runner.truncate(length)
    wait(device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def question(shape: Any, tokens: int, device: str) -> dict[str, Tensor]:
    """A prompt for a shape or config: text around a video of about `tokens` tokens, 196 a frame (of Qwen: a step of two)."""
    conf = shapes.model_config(shape) if isinstance(shape, str) else shape
    steps = max(1, tokens // 196)
    vision, qwen = conf.vision_config, conf.model_type == "qwen2_5_vl"
    count, mark = (steps * 196, conf.video_token_id) if qwen else (steps * 196 + 1, conf.video_token_index)
    video = torch.full((1, count), mark)
    text = torch.full((1, LATER), START)
    ids = torch.cat([text, video, text], 1).to(device)
    if qwen:
        size = (steps * 28 * 28, 3 * vision.temporal_patch_size * vision.patch_size**2)
    else:
        size = (1, steps, 3, vision.image_size, vision.image_size)
    pixels = torch.zeros(size, dtype=torch.bfloat16, device=device)
    pixels.normal_(0, 1, generator=torch.Generator(device).manual_seed(0))
    told = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values_videos": pixels}
    if qwen:
        told["video_grid_thw"] = torch.tensor([[steps, 28, 28]], device=device)
        told["second_per_grid_ts"] = torch.tensor([1.0], device=device)
    return told


@contextmanager
def replaying(target: nn.Module, keep: float, seed: int) -> Iterator[None]:
    """While inside, the runners that `generate` opens are counting ones, `target`'s with chance `keep`."""

    def opened(model: nn.Module, family: Any, cache: Any) -> HFRunner:
        if not decoding.can_capture_decode(model, family, cache):
            raise RuntimeError("steps of this model cannot be captured.")
        return Counting(model, family, cache, ROWS, keep=keep if model is target else None, seed=seed)

    everywhere = patch.object(steps, "DEVICES", ("cuda", "cpu"))
    with (
        patch.object(runner, "open_runner", opened),
        patch.object(prompt_stream, "open_runner", opened),
        everywhere,
    ):
        yield


def assumed(columns: int, tokens: int, seat: int, device: torch.device) -> Prompt:
    """The prompt of a sequence that is taken to have been read; its draft holds `columns`."""
    ids = torch.full((1, 4), START, device=device)
    return Prompt(inputs={"input_ids": ids, "assumed": [columns, seat]}, ids=ids, max_new_tokens=tokens)


def decode(
    target: Counting, draft: DraftState | None, columns: Sequence[int], tokens: int, seed: int
) -> dict[str, Any]:
    """One generation after an assumed prompt; seconds count from the first token. `columns`: what target and draft hold."""
    device, meter = target.model.device, DraftRounds()
    target.truncate(columns[0])
    target.dice.manual_seed(seed)
    said = assumed(columns[1], tokens, 0, device)
    if draft is not None:
        draft.begin(said)
    first = torch.nn.functional.one_hot(said.ids[:, -1] + 1, VOCAB).float()
    end = said.ids.shape[1] + tokens
    sequence = Speculation(target, draft, said, first, stop=lambda out: out.shape[1] >= end, meter=meter)
    time.sleep(0.5)  # the start-up window is written under a prefill that is not run here
    sequence.commit_next_tokens()
    wait(device)
    began = time.perf_counter()
    decode_round_robin([sequence])
    seconds = time.perf_counter() - began
    return {
        "tokens": tokens,
        "steps": meter.target_steps,
        "seconds": seconds,
        "tokens_per_s": (tokens - 1) / seconds,
        "a_step": (tokens - 1) / meter.target_steps,
        "failed": [meter.failed] if meter.failed else [],
        "counters": {} if draft is None else draft.counters(),
    }


def serve(wire: MessageSocket, options: dict[str, Any]) -> None:
    """The second process: a counting draft of a shape, for prompts that are assumed and for real ones."""
    given = argparse.Namespace(**json.loads(options["model"]))
    device = torch.device(options["device"])
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    model = model_of(given.draft, options["device"], given.layers)
    held: dict[tuple[int, int], Counting] = {}
    wire.send(READY, options["vocab"])

    class Either(DraftDecoder):
        def read_prompt(self, inputs: Any, *rest: Any, **more: Any) -> None:
            if "assumed" not in inputs:
                held.clear()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                super().read_prompt(inputs, *rest, **more)
                return
            columns, seat = inputs["assumed"]
            if (columns, seat) not in held:
                held[columns, seat] = after(model, columns)
                warm(held[columns, seat], (1, 2, 4), device)
            self._runner = held[columns, seat]
            self._prompt, self._warp = inputs["input_ids"][0].cpu(), None
            self._after_prompt = torch.nn.functional.one_hot((self._prompt[-1] + 1) % VOCAB, VOCAB)
            self._runner.truncate(columns)
            self._origin = columns

    def fresh() -> Either:
        return Either(Counting(model, adapter_for(model), DynamicCache(), ROWS), options["device"], VOCAB)

    _remote_drafter.serve_decoder(wire, fresh, options["device"])


def second_process(given: argparse.Namespace, device: str) -> Worker:
    """The draft's process; it loads while the caller goes on."""
    plain = {k: v for k, v in vars(given).items() if isinstance(v, int | float | str | bool | None)}
    options = {"model": json.dumps(plain), "device": device, "vocab": VOCAB}
    return Worker("replayed:serve", options, silence_s=120.0)


def make_ready(worker: Worker, columns: int) -> None:
    """Have the second process fill and capture what a sequence of `columns` needs, so that nothing of it is timed."""
    said = assumed(columns, 0, 0, torch.device("cpu"))
    remote = _remote_drafter.RemoteDrafter(worker, VOCAB)
    remote.begin(said.inputs, None, False, False, 0)
    remote.request_tokens(0, [], 4)
    if remote.collect_tokens(180.0) is None:
        raise RuntimeError("the draft's process was not ready in time.")
    remote.close()
