"""How an answer's tokens are chosen: transformers' logits processors and stopping criteria, for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, nearest
from mmaccel.core.streams.parts import TokenChoice
from mmaccel.models.sequences import STATEFUL, Sampling

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that act where tokens are drawn."""
OBJECTS = "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"
SETTINGS = (
    *("do_sample", *SAMPLING, "seed", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("min_new_tokens", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings"),
    *OBJECTS,
    "schema",
)
"""Settings of `generate` that `VideoSession.ask` takes; and a seed, and the schema of an answer in JSON."""


def choosing(adapter: Any, ids: Tensor, most: int, settings: Mapping[str, Any], drafts: bool) -> TokenChoice:
    """Build the logits processors and stopping criteria for up to `most` new tokens after `ids` [1, S], from the arguments
    of `generate` in `settings`, not from the model's `generation_config`; raises `ModelError`. `drafts`: a draft proposes
    tokens."""
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

    for name in settings:
        if name not in SETTINGS:
            raise ModelError(f"{name}: it is no setting of an answer; {nearest(name, SETTINGS)}leave it out.")
    given = {name: value for name, value in settings.items() if value is not None}
    idle = [name for name in (*SAMPLING, "seed") if name in given and not given.get("do_sample")]
    if idle:
        raise ModelError(f"{idle[0]}: it acts where tokens are drawn; set do_sample=True too.")
    seed, found = given.pop("seed", None), dict[str, Any]()
    told: dict[str, Any] = {name: given.pop(name) for name in OBJECTS if name in given}
    for name, kind in (
        ("logits_processor", LogitsProcessorList),
        ("stopping_criteria", StoppingCriteriaList),
    ):
        told[name] = kind(told.get(name, ()))
    if (stops := given.pop("stop_strings", None)) is not None:
        told["stopping_criteria"].append(StopStringCriteria(adapter.processor.tokenizer, stops))

    ends = sorted(adapter.ends())
    if (schema := given.pop("schema", None)) is not None:
        from mmaccel.models.schema import by_schema

        told["logits_processor"].append(
            by_schema(adapter.model, adapter.processor.tokenizer, schema, ends, ids.shape[1])
        )

    def caught(model: Any, input_ids: Tensor, **made: Any) -> Tensor:
        found.update(made)
        return input_ids

    own = {"eos_token_id": ends or None, "pad_token_id": ends[0] if ends else 0, "max_new_tokens": most}
    try:
        adapter.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(**own, **given),
            custom_generate=caught,
            **told,
        )
    except (TypeError, ValueError) as error:
        raise ModelError(f"ask: {error}") from error
    processors = found["logits_processor"]
    for one in processors if drafts else ():
        if (field := STATEFUL.get(type(one).__name__)) is not None:
            raise ModelError(
                f"{field}: it keeps state for each token, and a draft's tokens may be rejected; leave it or the draft out."
            )
    sample = found["generation_config"].do_sample
    warp = Sampling(processors, sample) if sample or processors else None
    generator = None if seed is None else torch.Generator(adapter.device).manual_seed(int(seed))
    criteria = found["stopping_criteria"]
    return TokenChoice(warp, generator, lambda ids: bool(criteria(ids, ()).any()))
