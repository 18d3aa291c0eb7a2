"""The recipes whose files the house counts: all that serve `generate`, and those that read its video as a stream."""

import dataclasses
from typing import Any

from mmaccel.core.recipe import Recipe, check_generate, list_recipes
from mmaccel.core.registry import registry


def recipes(draft: Any) -> dict[str, dict[str, Any]]:
    """Each policy and each preset that serves `generate`, as fields of a recipe; drafts run on the model `draft`."""
    heads = {0: {0: {"name": "a_shape", "sink": 16, "window": 32}, 1: "grid"}}
    found: dict[str, dict[str, Any]] = {"per_head": {"sparse": {"name": "per_head", "table": heads}}}
    for name, kind in list_recipes().items():
        if kind == "prune" and registry("prune")[name].stage == "draft":  # type: ignore[attr-defined]
            found[name] = {"draft": {"name": "sequential", "model": draft, "prune": name}}
            continue
        fields = Recipe.load(name).to_dict() if name not in ("per_head", "searched") else None
        if fields is None or not Recipe.load(fields).kv.sequences:
            continue
        own = {field.name for field in dataclasses.fields(registry("draft")[fields["draft"]["name"]])}
        if "/" in str(fields["draft"].get("model")):
            continue  # of models by name: another preset is the same draft beside any model
        if "model" in own:
            fields["draft"]["model"] = draft
        if "process" in own:
            fields["draft"]["process"] = False
        check_generate(Recipe.load(fields))
        found[name] = fields
    return found


def streamed(draft: Any) -> dict[str, dict[str, Any]]:
    """Each memory of streams, which a `generate` of its own call reads its video into, and one with pattern and draft."""
    found: dict[str, Any] = {name: {"kv": name} for name, cls in registry("kv").items() if not cls.sequences}
    whole = {"kv": "mosaic", "sparse": "grid", "draft": {"name": "sequential", "model": draft}}
    return {
        f"stream {name}": recipe for name, recipe in {**found, "mosaic + grid + sequential": whole}.items()
    }
