"""`generate` with a draft: transformers prepares the call, our loop runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.core.draft import Prompt
from mmaccel.core.errors import DraftError
from mmaccel.core.generate import speculate
from mmaccel.models.runner import HFRunner

if TYPE_CHECKING:
    from mmaccel.models.hf import Attachment


def generate(attachment: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the model's own `generate` up to its decoding loop, and there our own. Batch 1, one beam."""
    raw = dict(kwargs)
    if args:
        raw["input_ids"] = args[0]
    owner = attachment.owner
    name = owner.recipe.draft.name
    listener = raw.pop("streamer", None)  # transformers shows it the prompt, and leaves the rest to the loop

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if input_ids.shape[0] != 1 or generation_config.num_beams > 1:
            raise DraftError(
                f"draft {name!r} decodes one sequence with one beam; set batch, num_beams and num_return_sequences to 1."
            )
        if (
            generation_config.output_scores
            or generation_config.output_logits
            or generation_config.output_attentions
        ):
            raise DraftError(
                f"draft {name!r} returns tokens only; set output_scores, output_logits and output_attentions to False."
            )
        cache = model_kwargs.pop("past_key_values")
        if cache.get_seq_length():
            raise DraftError(f"draft {name!r} starts from an empty cache; leave past_key_values out.")
        runner = HFRunner(model, attachment.family, cache)
        sample = generation_config.do_sample
        prompt = Prompt(
            inputs=raw,
            ids=input_ids,
            warp=_warp(logits_processor, sample),
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
        )
        meter = owner.road.meter
        state = owner.recipe.draft.open(owner.view)

        def emit(tokens: Tensor) -> None:
            meter.token(tokens.numel())
            if listener is not None:
                for token in tokens.cpu().reshape(-1):
                    listener.put(token[None])

        try:
            state.begin(prompt)
            first = runner.prefill({"input_ids": input_ids, **model_kwargs})
        except BaseException:
            state.close()
            raise
        ids = speculate(
            runner,
            state,
            prompt,
            first,
            stop=lambda ids: bool(stopping_criteria(ids, None).all()),
            emit=emit,
            meter=meter,
        )
        if listener is not None:
            listener.end()
        if generation_config.return_dict_in_generate:
            from transformers.generation import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=ids, past_key_values=cache)  # type: ignore[arg-type]
        return ids

    return attachment.generate(*args, **kwargs, custom_generate=decode)


def _warp(processors: Any, sample: bool) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(ids before [S], logits [V]) -> probabilities [V]; None when greedy decoding takes the raw maximum."""
    if not sample and not processors:
        return None

    def warp(ids: Tensor, logits: Tensor) -> Tensor:
        scores = processors(ids[None], logits[None].float())[0]
        if sample:
            return torch.softmax(scores, -1)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()

    return warp
