"""What pruning costs: text of pruned models under the eyes of the whole one, drafts that see less, and where tokens stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import accelerate, adapter_for
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.attention import NOTE, Note
from mmaccel.core.prefill.prune import TokenPruner, candidates
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report
from mmaccel.models.install import Hooks
from mmaccel.models.signals import Listener, hear
from mmaccel_lab.eval.caption import predicted


@torch.no_grad()
def write(
    model: nn.Module, inputs: Mapping[str, Tensor], recipe: Recipe | None, limit: int
) -> tuple[Tensor, Report]:
    """The ids [n] that the model writes greedily under `recipe`, at most `limit`, and the run's report."""
    with accelerate(model, recipe) as fast:
        ids = fast.generate(**inputs, max_new_tokens=limit, do_sample=False)
        return ids[0, inputs["input_ids"].shape[1] :], fast.report()


def continued(inputs: Mapping[str, Tensor], said: Tensor) -> dict[str, Tensor]:
    """`inputs` of one sequence with the text `said` [n] after them."""
    longer = dict(inputs)
    longer["input_ids"] = torch.cat([inputs["input_ids"], said[None]], 1)
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            more = torch.full_like(said[None], value, dtype=inputs[name].dtype)
            longer[name] = torch.cat([inputs[name], more], 1)
    return longer


def agrees(
    model: nn.Module, inputs: Mapping[str, Tensor], said: Tensor, prune: TokenPruner | None = None
) -> Tensor:
    """[n] bool: which tokens of `said` [n] the model would have written itself, everything before each one given.

    For the target without `prune` this is the paper's acceptance of a lossy model's text, token by token.
    """
    recipe = None if prune is None else Recipe(prune=prune)
    return predicted(model, continued(inputs, said), len(said), recipe) == said


@torch.no_grad()
def draft_agrees(
    draft: nn.Module,
    inputs: Mapping[str, Tensor],
    said: Tensor,
    seen: Mapping[str, Tensor],
    compact: bool = False,
) -> dict[str, Tensor]:
    """For each choice of prompt columns in `seen`, [n] bool: which tokens of the target's text `said` [n] a plain draft
    would have proposed that sees those columns alone, at their own positions or, `compact`, numbered anew on every axis. The
    video is encoded once for all."""
    adapter, whole = adapter_for(draft), continued(inputs, said)
    embeds, places = adapter.embed(draft, whole), adapter.positions(draft, whole)
    S, n = inputs["input_ids"].shape[1], len(said)
    found = {}
    for name, columns in seen.items():
        keep = torch.cat([columns.to(embeds.device), torch.arange(S, S + n, device=embeds.device)])
        # Without a mask, a gap in the positions would be read as the seam of two sequences packed into one.
        mask = torch.ones(1, len(keep), dtype=torch.long, device=embeds.device)
        at = places[..., keep]
        out = adapter.text(draft)(
            inputs_embeds=embeds[:, keep],
            position_ids=torch.arange(len(keep), device=at.device).expand_as(at) if compact else at,
            attention_mask=mask,
            use_cache=False,
        )
        logits = adapter.logits(draft, out.last_hidden_state[:, -n - 1 : -1])
        found[name] = logits[0].argmax(-1) == said
    return found


@torch.no_grad()
def chosen(
    target: nn.Module, inputs: Mapping[str, Tensor], pruners: Mapping[str, TokenPruner]
) -> tuple[TokenLayout, dict[str, Tensor]]:
    """The prompt's layout, and for each draft's pruner the columns it keeps, all heard in one prefill of the target."""
    found: dict[str, Tensor] = {}
    with accelerate(target) as fast, Hooks() as hooks:
        hear(hooks, fast.adapter.layers(target), *pruners.values())
        layout = fast.adapter.layout(target, inputs)
        probes = tuple(
            Listener(fast, pruner, layout, lambda columns, name=name: found.update({name: columns}))  # type: ignore[misc]
            for name, pruner in pruners.items()
        )
        fast(**inputs, **{NOTE: Note(probes=probes)}, logits_to_keep=1)
    return layout, found


@torch.no_grad()
def left(
    model: nn.Module, inputs: Mapping[str, Tensor], pruner: TokenPruner
) -> tuple[TokenLayout, Tensor, float]:
    """The prompt's layout, the columns that are left in the last layer of a pruned target, and the average share of video
    tokens over its layers."""
    with accelerate(model, Recipe(prune=pruner)) as fast:
        layout = fast.adapter.layout(model, inputs)
        state: Any = fast(**inputs, logits_to_keep=1).past_key_values.state
        held = state.held_by(len(state.kept) - 1, layout.length)
        depth = fast.view.geometry.layers
        share = average_share(fast.report().kv, depth)
    columns = torch.arange(layout.length, device=layout.device) if held is None else held
    return layout, columns, share


def average_share(told: Mapping[str, float], depth: int) -> float:
    """The share of the prompt's video tokens that layers hold, a mean over `depth` layers, from a report's `kv`."""
    held = _held(told, depth)
    return sum(held) / depth / told["visual"] if told["visual"] else 1.0


def seen_share(told: Mapping[str, float], pruner: TokenPruner, depth: int) -> float:
    """The share of the prompt's video tokens that a decoded token sees, a mean over the layers from the pruner's first cut
    on, from the `kv` of a report of a generation by a target of `depth` layers."""
    if not told["visual"]:
        return 1.0
    first, glance = pruner.stages(depth)[0].layer, pruner.glance
    seen = 0.0
    for layer, held in enumerate(_held(told, depth)):
        if layer >= first:
            seen += held if glance is None or layer <= glance else told.get("visual seen decoding", held)
    return seen / (depth - first) / told["visual"]


def _held(told: Mapping[str, float], depth: int) -> list[float]:
    """How many of the prompt's video tokens each layer holds, from a report's `kv`."""
    now, held = told["visual"], []
    for layer in range(depth):
        now = told.get(f"visual from layer {layer}", now)
        held.append(now)
    return held


def by_frame(layout: TokenLayout, columns: Tensor) -> list[int]:
    """How many of `columns` are video tokens of each frame, in order of the frames that hold video."""
    at = candidates(layout)
    numbers = layout.frame[0]
    stay = at[torch.isin(at, columns)]
    return [int((numbers[stay] == number).sum()) for number in numbers[at].unique().tolist()]


def at_ends(counts: Sequence[int], ends: int = 2) -> float:
    """The share of kept tokens in the first and last `ends` frames, over the share of those frames: 1 is no bias."""
    total, width = sum(counts), min(2 * ends, len(counts))
    if not total or not width:
        return 1.0
    outer = sum(counts[:ends]) + sum(counts[max(ends, len(counts) - ends) :])
    return (outer / total) / (width / len(counts))


def rounds(agree: Tensor, window: int) -> list[int]:
    """The accepted lengths of greedy speculation in windows of `window`, from which tokens [n] the draft would get right.

    A draft that stands at a committed prefix writes what it writes there, so teacher forcing tells every round exactly. The
    token that the target adds is not counted; the last round may be cut short by the end of the text.
    """
    right, lengths, place = agree.tolist(), [], 0
    while place < len(right):
        run = 0
        while run < window and place + run < len(right) and right[place + run]:
            run += 1
        lengths.append(run)
        place += run + 1
    return lengths


def paired(
    one: Sequence[float], other: Sequence[float], draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """The mean of `one` less `other`, sample by sample, and its 95% interval by bootstrap over samples."""
    gaps = torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    again = gaps[torch.randint(len(gaps), (draws, len(gaps)), generator=g)].mean(1)
    low, high = torch.quantile(again, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(gaps.mean()), low, high
