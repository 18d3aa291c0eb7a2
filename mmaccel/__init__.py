"""Makes vision-language models fast on long video, without retraining.

``accelerate(model, recipe)`` applies a recipe (a sparse prefill pattern, a KV policy, a draft, a pruner) to a Hugging Face
model; leaving its context, or ``detach()``, restores the model. Importing this package registers the policies and the model
families and nothing else: it loads no model code and patches nothing.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# The first comes first: it listens while the others are imported.
from mmaccel import _stop, models, policies
from mmaccel.contract import check_family, check_policy
from mmaccel.core.attach import Accelerated, accelerate, attached
from mmaccel.core.errors import MmaccelError, MmaccelWarning
from mmaccel.core.recipe import Recipe, list_recipes
from mmaccel.core.registry import KINDS, register, registry
from mmaccel.core.report import Report
from mmaccel.core.streams.live import AsyncVideoSession
from mmaccel.core.streams.session import VideoSession
from mmaccel.models import load_processor
from mmaccel.models.loading import check_recipe, load_model
from mmaccel.models.shipped import NAMES as _SHIPPED

__version__ = "0.1.0"

__all__ = [
    "Accelerated",
    "AsyncVideoSession",
    "MmaccelError",
    "MmaccelWarning",
    "Recipe",
    "Report",
    "VideoSession",
    "__version__",
    "accelerate",
    "attached",
    "check_family",
    "check_policy",
    "check_recipe",
    "list_models",
    "list_policies",
    "list_recipes",
    "load_model",
    "load_processor",
    "models",
    "policies",
    "register",
]

_ROOMS = ("media", "search")


def list_policies(kind: str | None = None) -> dict[str, list[str]]:
    """Return the registered policy names of each kind (sparse, kv, draft, prune, model), or of `kind` alone.

    Raises `UnknownName` if there is no such kind.
    """
    return {one: list(registry(one)) for one in (KINDS if kind is None else (kind,))}


def list_models() -> tuple[str, ...]:
    """Return the names of the tiny models that mmaccel-lab ships; `load_model` also takes folders and hub names."""
    return _SHIPPED


def __getattr__(name: str) -> ModuleType:
    # Submodules that need PyAV are imported on first use.
    if name in _ROOMS:
        return import_module(f"mmaccel.{name}")
    raise AttributeError(f"module 'mmaccel' has no attribute {name!r}")


_stop.end_interrupt_handling()
