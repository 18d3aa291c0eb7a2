"""The methods of a haystack: recipes as they are, and rivals brought to the share of attention of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.eval.answer import ask
from mmaccel.eval.encoded import Encoded
from mmaccel.eval.rivals import Fields, Rival, computed, left, level


@dataclass(frozen=True)
class Methods:
    """Recipes by name, rivals by name, the recipe whose share rivals get, and fields that every rival has beside its own."""

    fixed: Mapping[str, Recipe]
    rivals: Mapping[str, Rival]
    yardstick: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, fields: Fields) -> Recipe:
        """A rival's recipe."""
        return Recipe.load({**fields, **self.more})

    def wanted(self, model: nn.Module, processor: Any, inputs: Mapping[str, Tensor], seen: Encoded) -> float:
        """The share of attention that the yardstick computes on a prompt."""
        return min(1.0, share(model, processor, inputs, self.fixed[self.yardstick], seen))

    def levelled(
        self,
        name: str,
        wanted: float,
        model: nn.Module,
        processor: Any,
        inputs: Mapping[str, Tensor],
        seen: Encoded,
    ) -> tuple[Fields, float]:
        """The fields of a rival that computes `wanted` of a prompt's attention, or as near as it comes, and its share."""

        def measure(fields: Fields) -> float:
            return share(model, processor, inputs, self.recipe(fields), seen)

        return level(self.rivals[name], wanted, measure)


def share(
    model: nn.Module, processor: Any, inputs: Mapping[str, Tensor], recipe: Recipe, seen: Encoded
) -> float:
    """The share of a prompt's attention that a recipe computes: counted where it only drops tokens, otherwise measured."""
    if recipe.prune is not None and recipe.sparse.name == "dense":
        family: Any = adapter_for(model)
        layout = family.layout(model, inputs)
        if (counted := left(recipe.prune, layout, len(family.layers(model)))) is not None:
            return counted
    with seen.shared(model, recipe):
        found = computed(ask(model, processor, inputs, recipe, max_new_tokens=1).report)
    assert found is not None
    return found
