"""Arguments of `generate` and `forward` under a recipe: the few that it refuses, each with its sentence.

Everything else is honoured as transformers honours it. `tests/models/test_arguments.py` walks the installed version's
arguments and holds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from mmaccel.core.errors import DraftError, ModelError
from mmaccel.core.recipe import Recipe

NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1.0,
    "use_cache": True,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_mtp": False,
}
"""The value of an argument that, like None, changes nothing."""

LOOPS = (
    "num_beams",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "custom_generate",
)
"""Arguments of `generate` that choose a decoding loop."""

OUTPUTS = (
    "num_return_sequences",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
    "guidance_scale",
    "inputs_embeds",
)
"""Arguments of `generate` that ask for more than the loop without a draft gives."""

EVERY = {
    "cache_implementation": "an accelerated model keeps its own cache; leave it out and choose kv in the recipe.",
}
"""Arguments of `generate` that no recipe takes."""

FORWARD = {
    "is_causal": "the attention of an accelerated model is causal; leave it out, or detach the recipe.",
}
"""Arguments of `forward` that no recipe takes."""

WEIGHTS = "{part} never holds the attention weights; ask for them under the recipe 'dense'."
"""Why a recipe refuses output_attentions, where it does not run dense attention over whole keys."""

_LOOP = "draft {draft!r} has a decoding loop of its own; leave one of the two out."
_ROWS = "draft {draft!r} gives tokens, scores and logits only; leave it out, or detach the draft."
DRAFT = {
    **dict.fromkeys(LOOPS, _LOOP),
    "num_beams": "draft {draft!r} decodes each sequence with one beam; set num_beams to 1.",
    "output_attentions": _ROWS,
    "output_hidden_states": _ROWS,
    "inputs_embeds": "draft {draft!r} reads token ids; give input_ids.",
    "guidance_scale": "it keeps state from earlier tokens, and draft {draft!r} scores tokens that may be rejected; "
    "leave one of the two out.",
}
"""Arguments of `generate` that a draft does not take. It also refuses filled caches, and processors that remember
(`sampling.STATEFUL`)."""


def asked(name: str, kwargs: Mapping[str, Any], default: Any) -> Any:
    """What `generate` is asked as argument `name`, or None; `default` is the model's generation config."""
    if name in kwargs:
        return kwargs[name]
    given = getattr(kwargs.get("generation_config"), name, None)
    return given if given is not None else getattr(default, name, None)


def wants(name: str, value: Any) -> bool:
    """Whether argument `name` with `value` changes anything."""
    if isinstance(value, Tensor):
        return True
    if name == "penalty_alpha":
        return bool(value)
    return value is not None and value != NEUTRAL.get(name)


def check_generate(recipe: Recipe, kwargs: Mapping[str, Any], default: Any) -> None:
    """Raise one sentence for an argument of `generate` that `recipe` does not take: `ModelError`, or `DraftError` where its
    draft does not."""
    for name, sentence in EVERY.items():
        if wants(name, asked(name, kwargs, default)):
            raise ModelError(f"{name}: {sentence}")
    chunk = asked("prefill_chunk_size", kwargs, default)
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ModelError("prefill_chunk_size: it is a number of tokens; give at least 1, or leave it out.")
    if chunk is not None and recipe.prune is not None and recipe.prune.seat == "layer":
        raise ModelError(
            f"prefill_chunk_size: prune {recipe.prune.name!r} runs the prompt whole; leave it out."
        )
    if not recipe.draft.active:
        return
    for name, sentence in DRAFT.items():
        if wants(name, asked(name, kwargs, default)):
            raise DraftError(f"{name}: {sentence.format(draft=recipe.draft.name)}")
    if kwargs.get("input_ids") is None and kwargs.get("inputs") is None:
        raise DraftError(f"input_ids: draft {recipe.draft.name!r} reads token ids; give them.")


def check_forward(recipe: Recipe, kwargs: Mapping[str, Any]) -> None:
    """Raise `ModelError` with one sentence for an argument of `forward` that `recipe` does not take."""
    if kwargs.get("is_causal") is False:
        raise ModelError(f"is_causal: {FORWARD['is_causal']}")
    if kwargs.get("output_attentions"):
        part = None
        if not recipe.sparse.dense:
            part = f"sparse {recipe.sparse.name!r}"
        elif not recipe.kv.exact:
            part = f"kv {recipe.kv.name!r}"
        elif recipe.prune is not None:
            part = f"prune {recipe.prune.name!r}"
        if part is not None:
            raise ModelError(f"output_attentions: {WEIGHTS.format(part=part)}")


def packed_in(kwargs: Mapping[str, Any], mask: Tensor | None, mrope: bool) -> Tensor | None:
    """[B, S] number of the sequence that each column belongs to, where a forward pass without a cache has several in a row;
    else None.

    As transformers has it: where positions start anew and there is no mask. Under M-RoPE the ranks stand before the three
    coordinates, where packed sequences are given.
    """
    positions: Tensor | None = kwargs.get("position_ids")
    if mask is not None or positions is None:
        return None
    if mrope:
        if positions.ndim != 3 or positions.shape[0] != 4:
            return None
        positions = positions[0]
    return find_packed_sequence_indices(positions)
