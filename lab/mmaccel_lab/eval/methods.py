"""The methods of a haystack: recipes as they are, and rivals brought to the share of attention of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.cli.answer import ask
from mmaccel.core.attach import adapter_for
from mmaccel.core.layout import TokenLayout
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval.encoded import Encoded
from mmaccel_lab.eval.rivals import Fields, Rival, computed, left


@dataclass(frozen=True)
class Methods:
    """Recipes by name, rivals by name, the recipe whose share rivals get, and fields that every rival has unless it gives
    them itself."""

    fixed: Mapping[str, Recipe]
    rivals: Mapping[str, Rival]
    yardstick: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, fields: Fields) -> Recipe:
        """A rival's recipe."""
        return Recipe.load({**self.more, **fields})


def share(
    model: nn.Module, processor: Any, inputs: Mapping[str, Tensor], recipe: Recipe, seen: Encoded
) -> float:
    """The share of attention that a recipe computes, a mean over the prompts of a batch: counted where it only drops tokens
    or where its pattern looks at the layout alone, otherwise measured."""
    family: Any = adapter_for(model)
    if recipe.prune is not None and recipe.sparse.dense:
        layout = family.layout(model, inputs)
        if (counted := left(recipe.prune, layout, len(family.layers(model)))) is not None:
            return counted
    elif recipe.prune is None and (planned := listed(recipe, family.layout(model, inputs))) is not None:
        return planned
    with seen.shared(model, recipe):
        found = computed(ask(model, processor, inputs, recipe, max_new_tokens=1).report)
    assert found is not None
    return found


def listed(recipe: Recipe, layout: TokenLayout) -> float | None:
    """The share of attention that a recipe of one pattern on every layer computes, the dense rows at the end included, by
    planning once; None where the plan hangs on queries and keys, some layers are dense beside it, or prompts are padded."""
    pattern, n = recipe.sparse, layout.length
    if pattern.adaptive or pattern.dense or recipe.dense_layers or layout.has_padding:
        return None
    blank = torch.zeros(layout.batch, 1, n, 16, device=layout.position.device)
    plan = pattern.plan(blank, blank, layout, layout)
    if plan is None:
        return 1.0
    first = max(0, n - recipe.dense_tail)
    pairs = plan.limit_to_first_rows(first).count_listed_pairs() + sum(range(first + 1, n + 1))
    return float(pairs.mean()) / (n * (n + 1) / 2)
