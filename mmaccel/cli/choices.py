"""From the words of a command line to a model, a processor and recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.core.errors import RecipeError, UnknownName
from mmaccel.core.kv import StreamPolicy
from mmaccel.core.recipe import Recipe, endings, fields_of, names, stream_policy
from mmaccel.core.registry import registry

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import nn

    from mmaccel.core.attach import Accelerated

DTYPES = ("auto", "bfloat16", "float16", "float32")


def recipe(text: str, draft: str | None = None) -> Recipe:
    """The recipe of a name, a YAML file or a table of head patterns.

    A draft strategy that takes a model gets `draft`, which beside a recipe that drafts nothing turns sequential drafting on.
    """
    fields = fields_of(text)
    if draft is None:
        return Recipe.load(fields)
    wanted = fields.get("draft")
    chosen: dict[str, Any] = dict(wanted) if isinstance(wanted, dict) else {"name": wanted or "off"}
    name = chosen.get("name")
    if name == "off":
        chosen = {"name": "sequential", "model": draft}
    elif isinstance(name, str) and name in registry("draft") and _takes_model(name):
        chosen["model"] = draft
    return Recipe.load({**fields, "draft": chosen})


def recipes(texts: Sequence[str], draft: str | None = None) -> dict[str, Recipe]:
    """Recipes by the name they are shown under: the text given, or a file's name without its ending."""
    found: dict[str, Recipe] = {}
    for text in texts:
        name = Path(text).stem if text.endswith(endings()) else text
        if name in found:
            raise RecipeError(f"recipe {name!r} is given twice; give each once, or rename one of the files.")
        found[name] = recipe(text, draft)
    return found


def memory(text: str) -> Recipe:
    """The recipe of a stream, by the name of a memory or by a YAML file; raises `RecipeError` for what cannot hold one."""
    streams = [name for name, kv in registry("kv").items() if issubclass(kv, StreamPolicy)]
    if not text.endswith((".yaml", ".yml")) and text not in names():
        raise UnknownName("memory of streams", text, streams, own=True)
    found = recipe(text)
    stream_policy(found)
    return found


def check(recipe: Recipe, model: str, device: str) -> None:
    """Raise `RecipeError` where `recipe` cannot serve prompts of `model` on `device`, which is known unloaded."""
    from mmaccel.backends import select
    from mmaccel.models.loading import check_recipe

    if recipe.backend != "auto":
        select.get(recipe.backend, device)
    check_recipe(recipe, model)


def _takes_model(name: str) -> bool:
    return "model" in {f.name for f in dataclasses.fields(registry("draft")[name])}


def processor(model: str) -> Any:
    """Our processor for a model's name or folder; raises `ModelError` for a family that is not supported."""
    from mmaccel.core.attach import family_of
    from mmaccel.models.loading import load_processor

    found = load_processor(model)
    family_of(found.model_type)
    return found


def load(model: str, device: str, dtype: str) -> nn.Module:
    """The model on a device, in a dtype ("auto": float32 on a CPU, the checkpoint's own elsewhere)."""
    import torch

    from mmaccel.models.loading import load_model

    if dtype == "auto":
        return load_model(model, dtype=torch.float32 if device == "cpu" else "auto", device=device)
    return load_model(model, dtype=getattr(torch, dtype), device=device)


def attach(model: nn.Module, recipe: Recipe, progress: Progress) -> Accelerated:
    """The model under a recipe; a bar shows while the draft's model loads, or its process starts."""
    from mmaccel.core.attach import accelerate

    if not recipe.draft.active:
        return accelerate(model, recipe)
    task = progress.add_task("draft", total=1, unit="started")
    try:
        return accelerate(model, recipe)
    finally:
        progress.remove_task(task)


def dtype(name: str) -> str:
    """A known dtype's name; raises `UnknownName` for another."""
    if name not in DTYPES:
        raise UnknownName("dtype", name, DTYPES)
    return name


def where(device: str) -> str:
    """A device that is there: "auto" is the first CUDA device, or else the CPU."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    from mmaccel.models.loading import there

    return str(there(device, "--device"))
