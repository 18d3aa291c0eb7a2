"""What can stand beside what in a recipe, and what a recipe can serve: from the recipe alone, before any weight moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmaccel.core.errors import RecipeError
from mmaccel.core.kv import StreamPolicy
from mmaccel.core.prune import TokenPruner
from mmaccel.core.registry import DEFAULTS, registry

if TYPE_CHECKING:
    from mmaccel.core.recipe import Recipe


def check_pairs(recipe: Recipe) -> None:
    """Raise `RecipeError` for the first two choices that exclude each other; no rule looks at three."""
    sparse, kv, draft = recipe.sparse, recipe.kv, recipe.draft
    if recipe.prune is not None:
        _check_prune(recipe, recipe.prune)
    if not sparse.dense and not kv.admits_sparse:
        raise RecipeError(
            f"sparse {sparse.name!r} cannot stand beside kv {kv.name!r}, which decides by itself what each "
            f"query sees; set sparse to {DEFAULTS['sparse']!r} or kv to {DEFAULTS['kv']!r}."
        )
    if "memory" in draft.needs and not (kv.exact and kv.sequences):
        raise RecipeError(
            f"draft {draft.name!r} reads the whole cache and kv {kv.name!r} is another; set kv to {DEFAULTS['kv']!r}."
        )
    if "rollback" in draft.needs and kv.reach is not None and kv.reach < draft.lookback:
        raise RecipeError(
            f"draft {draft.name!r} rolls back up to {draft.lookback} tokens and kv {kv.name!r} only "
            f"{kv.reach}; lower the draft's window or raise the memory's margin."
        )


def _check_prune(recipe: Recipe, prune: TokenPruner) -> None:
    if prune.seat == "draft":
        raise RecipeError(
            f"prune {prune.name!r} chooses what a draft sees; give it to the draft, in its field prune, or choose one "
            "for the target."
        )
    if not (recipe.kv.exact and recipe.kv.sequences):
        raise RecipeError(
            f"prune {prune.name!r} needs a memory that keeps what it is given, whose class says exact = True and "
            f"sequences = True, and kv {recipe.kv.name!r} is none; set kv to {DEFAULTS['kv']!r}."
        )
    if prune.seat == "layer" and recipe.chunk is not None:
        raise RecipeError(
            f"prune {prune.name!r} ranks the video by what comes after it and runs the prompt whole; set chunk to null."
        )
    if "memory" in recipe.draft.needs:
        raise RecipeError(
            f"draft {recipe.draft.name!r} reads the target's memory, whose layers prune {prune.name!r} makes unlike; "
            "leave prune out, or choose another draft."
        )
    if prune.glance is not None and recipe.draft.active:
        raise RecipeError(
            f"prune {prune.name!r} chooses what each decoded token sees by the one before it, so no window can be "
            f"verified at once; set its forget to 0, or draft to {DEFAULTS['draft']!r}."
        )


def check_sequences(recipe: Recipe) -> None:
    """Raise `RecipeError` for a recipe that cannot serve a model's own `generate`."""
    if not recipe.kv.sequences:
        raise RecipeError(
            f"kv {recipe.kv.name!r} is a memory of video streams; use it in a VideoSession, or set kv to {DEFAULTS['kv']!r}."
        )


def stream_policy(recipe: Recipe) -> StreamPolicy:
    """The memory of a recipe that can serve a stream; raises `RecipeError` for one that cannot."""
    kv, draft = recipe.kv, recipe.draft
    if not isinstance(kv, StreamPolicy):
        streams = registry("kv").names(lambda cls: issubclass(cls, StreamPolicy))
        raise RecipeError(f"kv {kv.name!r} cannot hold a stream; set kv to {streams}.")
    if not recipe.sparse.dense:
        raise RecipeError(
            f"sparse {recipe.sparse.name!r} has no part in a stream, whose memory decides what is seen; set sparse to "
            f"{DEFAULTS['sparse']!r}."
        )
    if recipe.prune is not None:
        raise RecipeError(f"prune {recipe.prune.name!r} has no part in a stream; leave prune out.")
    if draft.active and not draft.needs <= {"rollback"}:
        raise RecipeError(
            f"draft {draft.name!r} needs the prompt's video, and a stream has none; set draft to "
            f"{DEFAULTS['draft']!r}."
        )
    return kv
