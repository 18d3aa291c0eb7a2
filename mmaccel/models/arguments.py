"""Arguments of `generate` under a recipe: the few that it refuses, each with its sentence, and what it adds to others.

Everything else is honoured as transformers honours it. `tests/models/test_arguments.py` walks the installed version's
arguments and holds both. It adds an end at the model's last position, and a clock for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from mmaccel.core.errors import DraftError, ModelError, warn
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
(`batches.STATEFUL`)."""


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


def sequences(kwargs: Mapping[str, Any], default: Any) -> int:
    """How many sequences a call of `generate` writes."""
    ids = kwargs.get("input_ids")
    return (len(ids) if isinstance(ids, Tensor) else 1) * (
        asked("num_return_sequences", kwargs, default) or 1
    )


def columns(kwargs: Mapping[str, Any]) -> int:
    """The length of the prompts of a call of `generate`, with their padding."""
    ids = kwargs.get("input_ids")
    return ids.shape[1] if isinstance(ids, Tensor) else 0


def positions_of(config: Any) -> int | None:
    """How many positions a text model of `config` has, what its rotary scaling adds included; None where it does not say."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    before = rope.get("original_max_position_embeddings") or most
    return max(most, int(before * (rope.get("factor") or 1)))


class MaxLength(StoppingCriteria):
    """Ends each sequence [B] at `ends` [B] columns, where its positions are used up, and says so once.

    padded  whether there is a token to go on with after it: without one, and without an end-of-text token, transformers lets
            a sequence of a batch run on beside the others
    """

    def __init__(self, ends: Tensor, most: int, padded: bool) -> None:
        self._ends, self._most, self._told = ends, most, False
        if padded:
            # By this name transformers knows a criterion after which a sequence is padded.
            self.eos_token_id = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # Beams and samples of a prompt stand next to each other.
        ends = self._ends.repeat_interleave(input_ids.shape[0] // len(self._ends))
        over = input_ids.shape[1] >= ends
        if not self._told and bool(over.any()):
            self._told = True
            warn(
                f"max_new_tokens: the model has {self._most} positions (max_position_embeddings), and the answer ends with "
                "them; give a shorter prompt for a longer answer."
            )
        return over.to(input_ids.device)


def end_at_positions(kwargs: Mapping[str, Any], positions: Tensor, most: int, default: Any) -> dict[str, Any]:
    """The arguments of `generate` with a criterion that ends each sequence at the model's `most` positions, where it could
    get there; `positions` [B, S] or [3, B, S] are those of the prompt's new columns, `default` is the model's own generation
    config. An answer goes on from the last column, which after a long video is not the largest position.

    Raises `ModelError` for a prompt after which there is no position left.
    """
    last = positions[..., -1]
    last = last if last.ndim == 1 else last.amax(0)
    length, top, taken = kwargs["input_ids"].shape[1], int(last.max()), int(positions.max()) + 1
    if top + 1 >= most or taken > most:
        raise ModelError(
            f"input_ids: the prompt takes {taken} positions of the model's {most} (max_position_embeddings), which leaves "
            "none for an answer; give fewer frames or a shorter text."
        )
    config = kwargs.get("generation_config") or default
    new = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    if new is not None and top + new < most:
        return dict(kwargs)
    ends = length + most - 1 - last.cpu()
    padded = any(
        kwargs.get(name) is not None or getattr(config, name, None) is not None
        for name in ("pad_token_id", "eos_token_id")
    )
    given = list(kwargs.get("stopping_criteria") or [])
    return {**kwargs, "stopping_criteria": StoppingCriteriaList([*given, MaxLength(ends, most, padded)])}


class Clock:
    """A streamer that calls `token` with the number of tokens that reached the host, and passes the tokens on to `inner`."""

    def __init__(self, token: Callable[[int], None], inner: Any) -> None:
        self.token, self.inner, self.prompt = token, inner, True

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            # [B] tokens of a step, or [1, n] that were guessed and verified.
            self.token(value.shape[1] if value.ndim == 2 else 1)
        self.prompt = False
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()
