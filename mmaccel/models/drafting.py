"""`generate` with our own decoding loop, for drafts and CUDA-graph steps; transformers prepares the call."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.decoding.draft import Prompt
from mmaccel.core.decoding.generate import CallEnded, GuardedDraft, Speculation, decode_round_robin
from mmaccel.core.errors import DraftError, warn
from mmaccel.models.hf import ModelAttachment
from mmaccel.models.prompt_layout import PIXELS, inputs_after_past, padded_length
from mmaccel.models.prompt_stream import PromptStreamRunner, open_prompt_runner
from mmaccel.models.sequences import (
    STATEFUL,
    CachedDraftState,
    SamplingDistribution,
    StreamCache,
    allowed_tokens_for_sequence,
    cache_length,
    check_single_row,
    drop_padding,
    split_batch,
    unpadded_cache_layout,
)
from mmaccel.models.signals import DraftPruningProbe


def generate(attachment: ModelAttachment, kwargs: dict[str, Any], lasts: bool = False) -> Any:
    """Run the model's own `generate` up to its decoding loop, then our loop instead; no beam search. `lasts`: the caller
    keeps the cache, so another turn may follow.

    Sequences of a batch (or several of one prompt) are prepared one by one without padding and decoded by
    `decode_round_robin`, each as if alone, with its own cache and random numbers; no `past_key_values` is returned. After an
    answer's end follows the padding token, or 0 if the model has none.
    """
    _read_stop_strings(attachment, kwargs)
    begun: list[_Sequence] = []
    sequences = _sequences(attachment, kwargs)
    try:
        try:
            for row, generator in sequences:
                seconds = attachment.generate_time_left()
                row = row if seconds is None else {**row, "max_time": seconds}
                begun.append(_Sequence(attachment, row, generator, lasts and len(sequences) == 1))
                if not attachment.owner.recipe.kv.sequences:  # one memory of a stream after the other
                    decode_round_robin([begun[-1].decoding])
                    begun[-1].end()
        except CallEnded:
            if not begun:
                raise
        decodings = [sequence.decoding for sequence in begun]
        began, before = time.perf_counter(), sum(one.ids.shape[1] for one in decodings)
        seat = attachment.owner.seat
        if seat is not None and not seat.alone:
            seat.decode(decodings)
        else:
            decode_round_robin(decodings)
            tokens = sum(one.ids.shape[1] for one in decodings) - before
            attachment.draft_times.record_drafted(padded_length(kwargs), time.perf_counter() - began, tokens)
    finally:
        for sequence in begun:
            sequence.end()
    unread = [row["input_ids"] for row, _ in sequences[len(begun) :]]
    if count := len(unread):
        warn(f"max_time: {count} of {len(sequences)} prompts were not read in time; give more seconds.")
    return _outputs(attachment, begun, unread, attachment.get_generate_option("use_cache", kwargs))


def _outputs(
    attachment: ModelAttachment, begun: list[_Sequence], unread: list[Tensor], keeps: bool | None
) -> Any:
    """What `generate` returns of sequences that have ended, and of prompts `unread` [1, S], whose time was over; `keeps` is
    the argument use_cache."""
    rows = [torch.cat([one.given, one.decoding.ids[:, one.read :]], 1) for one in begun]
    rows += unread
    width = max(row.shape[1] for row in rows)
    options = begun[0].options
    last = 0 if options._pad_token_tensor is None else int(options._pad_token_tensor)
    ids = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1]), value=last) for row in rows])
    if not options.return_dict_in_generate:
        return ids
    from transformers.generation import GenerateDecoderOnlyOutput

    cache = begun[0].cache if keeps is not False else None
    if len(rows) > 1 and cache is not None:
        cache = None
        message = "past_key_values is None: each sequence of this batch has a cache of its own"
        attachment.owner.attention.meter.add_note(message)
        warn(f"{message}; set use_cache=False, or give prompts one by one.")
    return GenerateDecoderOnlyOutput(
        sequences=ids,  # type: ignore[arg-type]
        scores=_steps([one.scores() for one in begun], len(unread)) if options.output_scores else None,  # type: ignore[arg-type]
        logits=_steps([one.logits() for one in begun], len(unread)) if options.output_logits else None,  # type: ignore[arg-type]
        past_key_values=cache,
    )


def _steps(rows: list[Tensor], unread: int) -> tuple[Tensor, ...]:
    """[n, V] of each sequence as [B, V] of each step; zeros after a sequence's end, and of the last `unread` ones."""
    return torch.nn.utils.rnn.pad_sequence([*rows, *([rows[0][:0]] * unread)]).unbind(0)


def _sequences(
    attachment: ModelAttachment, kwargs: dict[str, Any]
) -> list[tuple[dict[str, Any], torch.Generator | None]]:
    """The arguments of `generate` for each sequence of a batch by itself, and where its random numbers come from."""
    ids, times = kwargs["input_ids"], 1
    if attachment.get_generate_option("do_sample", kwargs):  # else transformers refuses more than one
        times = attachment.get_generate_option("num_return_sequences", kwargs) or 1
    if ids.shape[0] * times == 1:
        seat = attachment.owner.seat
        return [(kwargs, None if seat is None or seat.alone else seat.generator)]
    if kwargs.get("streamer") is not None:
        raise DraftError("streamer: a streamer takes one sequence; give prompts one by one, or leave it out.")
    cache = kwargs.pop("past_key_values", None)
    if cache is not None and (cache.get_seq_length() or getattr(cache, "state", None) is None):
        raise DraftError(
            "past_key_values: each sequence of a batch has a cache of its own; give prompts one by one, or leave it out."
        )
    mask = kwargs.get("attention_mask")
    each = ids.numel() if mask is None else int(mask.sum())
    attachment.owner.attention.meter.prompt_tokens = times * each
    device = attachment.owner.view.device
    seeds = torch.randint(1 << 62, (ids.shape[0] * times,)).tolist()
    if times > 1:
        kwargs["num_return_sequences"] = 1
    prompts = split_batch(attachment.family, attachment.model, kwargs)
    rows = [dict(row) for row in prompts for _ in range(times)]
    if (allowed := kwargs.get("prefix_allowed_tokens_fn")) is not None:
        for number, row in enumerate(rows):
            row["prefix_allowed_tokens_fn"] = partial(allowed_tokens_for_sequence, allowed, number)
    return [(row, torch.Generator(device).manual_seed(seed)) for row, seed in zip(rows, seeds, strict=True)]


class _Sequence:
    """One prompt of a `generate` call: the target has read it and its draft has been given it; `decoding` continues from
    there.

    given    [1, S], the prompt as it came, padding and all, of which `read` tokens were run
    rows     the logits [1, V] of each token, where they were asked for
    options  the generation config as transformers prepared it
    """

    decoding: Speculation
    _listener: DraftPruningProbe | None = None

    def __init__(
        self,
        attachment: ModelAttachment,
        kwargs: dict[str, Any],
        generator: torch.Generator | None,
        lasts: bool,
    ) -> None:
        """Read the prompt, and commit its first token."""
        self._attachment, self._generator, self._lasts = attachment, generator, lasts
        self.given, self._over = kwargs["input_ids"], False
        streams = not attachment.owner.recipe.kv.sequences
        if kwargs.get("past_key_values") is None and not streams:
            # One of a batch, whose cache and layout are not its own.
            kwargs["past_key_values"] = attachment.open_kv_cache()
            attachment.prepare_layout(kwargs)
        kwargs = drop_padding(attachment, kwargs)
        kwargs = kwargs if streams else attachment.limit_to_max_positions(kwargs)
        self._raw = dict(kwargs)
        # transformers shows it the prompt, and leaves the rest to the loop
        self._streamer = self._raw.pop("streamer", None)
        if streams:
            if self._raw.get("past_key_values") is not None:
                self._raw["past_key_values"].begin_turn(attachment, self._raw)
            # transformers would have the tower see all frames at once; those of a stream are read from the raw inputs.
            seen = {*PIXELS.values(), *attachment.family.extra_inputs, "past_key_values"}
            kwargs = {name: value for name, value in kwargs.items() if name not in seen}
        try:
            attachment.generate(**kwargs, custom_generate=self._prefill)
        finally:
            # Read by now; another sequence may have the same ids with other pixels.
            attachment.running.layout = None
        try:
            # Only here: the features of the prompt's pass are gone, and a draft that reads now takes their place.
            self.decoding.commit_next_tokens()
        except BaseException:
            self.decoding.close()
            self.runner.update_hf_cache()
            raise

    def _prefill(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> None:
        """In the place of transformers' decoding loop: run the prompt, with the draft begun and listening."""
        attachment, options = self._attachment, generation_config
        owner, draft = attachment.owner, attachment.owner.recipe.draft
        for processor in (logits_processor or ()) if draft.active else ():
            if (field := STATEFUL.get(type(processor).__name__)) is not None:
                raise DraftError(
                    f"{field}: it keeps state for each token, and tokens of draft {draft.name!r} may be rejected; leave it "
                    "or the draft out."
                )
        model_kwargs.pop("labels", None)  # as transformers' own loops do
        self.cache, most = model_kwargs.pop("past_key_values", None), options.max_length - input_ids.shape[1]
        if not owner.recipe.kv.sequences:
            self.cache = self._raw.get("past_key_values")
        given, past = self._raw, None
        if held := cache_length(self.cache):
            given, past = inputs_after_past(self._raw, held), unpadded_cache_layout(attachment, self.cache)
            assert past is not None
        self._turn = turn = CachedDraftState.from_cache(self.cache, draft)
        self.options, self.processors, self.read = options, logits_processor, input_ids.shape[1]
        self.runner = runner = open_prompt_runner(attachment, model, self.cache, most)
        if (seat := owner.seat) is not None and not seat.alone:
            from mmaccel.models.together import BatchedDecodeSteps

            assert not isinstance(runner, PromptStreamRunner)
            seat.batch.register_shared_runner(runner, BatchedDecodeSteps.find_or_create)
        warped = options.do_sample or logits_processor
        prompt = Prompt(
            inputs=given if past is None else {**given, "position_ids": None},
            ids=input_ids,
            warp=SamplingDistribution(logits_processor, options.do_sample) if warped else None,
            generator=self._generator,
            max_new_tokens=most,
            past=past,
            previous_state=turn.pop_state(),
            lasts=self._lasts,
            deadline=getattr(attachment.running, "deadline", None),
        )
        scored = options.return_dict_in_generate and (options.output_scores or options.output_logits)
        self.rows: list[Tensor] | None = [] if scored else None
        # None of these functions holds the sequence: it goes with the call, and what its memory held goes with it.
        read, rows, scores = self.read, self.rows, list[Tensor]()
        self._scores = scores
        self.meter = owner.attention.meter.new_sequence()
        careful = self._careful = GuardedDraft(self.meter, lasts=self._lasts)
        meter, streamer = self.meter, self._streamer

        def emit(tokens: Tensor) -> None:
            meter.count_tokens(tokens.numel())
            if streamer is not None:
                for token in tokens.cpu().reshape(-1):
                    streamer.put(token[None])

        def scores_to(ids: Tensor) -> tuple[Tensor, ...] | None:
            """The scores [1, V] of all tokens up to the last of `ids`, the next one asked about; None: not asked for."""
            if rows is None or not options.output_scores:
                return None
            scores.append(logits_processor(ids[:, : read + len(scores)], rows[len(scores)]))
            return tuple(scores)

        def keep(columns: Tensor) -> None:
            with careful.drop_on_error() as state:
                if state is not None:
                    state.keep_columns(columns)

        def begin_draft(prompt: Prompt) -> None:
            with careful.drop_on_error():
                if draft.active:
                    careful.state = draft.open(owner.view)
                    careful.state.begin(prompt)

        pruner = probe = listener = None
        # A memory of streams has a draft's own stream read the prompt, and asks it with the target.
        streamed = isinstance(runner, PromptStreamRunner) and "video" in draft.needs
        try:
            if not streamed:
                begin_draft(prompt)
            with careful.drop_on_error() as state:
                if state is not None:
                    pruner, probe = state.prompt_pruner(draft.pruner), state.target_prefill_probe()
            if pruner is not None:
                layout, new = attachment.family.layout(attachment.model, given), None
                if past is not None:
                    layout, new = past.append_turn(layout), layout.length
                self._listener = listener = DraftPruningProbe(
                    owner, pruner, layout, keep, careful.drop_draft, new, turn.heard, self._lasts
                )
            probes = [one for one in (probe, listener) if one is not None]
            own = past is None and self.cache is not None
            inputs = {"input_ids": input_ids, **model_kwargs} if own else given
            first = runner.prefill(inputs, probes=probes)
            self.cache = runner.cache
            if listener is not None:
                listener.close()
            if isinstance(runner, PromptStreamRunner):
                stopping_criteria.append(runner.position_limit(self.read))
                if streamed:
                    words = {"input_ids": input_ids}
                    prompt = replace(prompt, inputs=words, past=None, stream=runner.drafts.stream)
                    if runner.drafts.failed:
                        self.meter.record_draft_failure(runner.drafts.failed)
                    else:
                        begin_draft(prompt)
            self.decoding = Speculation(
                self.runner,
                careful,
                prompt,
                first,
                stop=lambda ids: bool(
                    check_single_row("stopping_criteria", stopping_criteria(ids, scores_to(ids))).all()
                ),
                emit=emit,
                meter=self.meter,
                rows=self.rows,
            )
        except BaseException:
            careful.close()
            self._leave()
            self.runner.update_hf_cache()
            raise

    def _leave(self) -> None:
        """Keep with the cache the state of the draft, for the next turn."""
        if self._lasts and self.cache is not None:
            heard = None if self._listener is None else self._listener.states
            self._turn.store_state(self.cache, self._careful.next_state, heard)

    def end(self) -> None:
        """Close this sequence's cache and figures, however decoding ended; a second call does nothing."""
        if self._over:
            return
        self._over = True
        self.decoding.close()
        self._leave()
        if isinstance(self.cache, StreamCache) and self._lasts and self.decoding.ended:
            self.cache.record_turn(self.decoding.ids[:, :-1])
        self.runner.update_hf_cache()
        if isinstance(self.runner, PromptStreamRunner):
            self.meter.kv = self.runner.counters
        elif (state := getattr(self.cache, "state", None)) is not None:
            self.meter.kv = state.counters()
        if self._streamer is not None and self.decoding.ended:
            self._streamer.end()

    def logits(self) -> Tensor:
        """Raw logits of the target for each generated token, [n, V] float32."""
        return torch.cat(self.rows or [])

    def scores(self) -> Tensor:
        """Logits of each generated token after logits processors, [n, V] float32."""
        return torch.cat(self._scores or [])


def _read_stop_strings(attachment: ModelAttachment, kwargs: dict[str, Any]) -> None:
    """Turn `stop_strings` into a criterion here: a decoding loop of one's own makes transformers lose the tokenizer."""
    from transformers import StoppingCriteriaList, StopStringCriteria

    config: Any = kwargs.get("generation_config") or attachment.model.generation_config
    strings = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
    if not strings or kwargs.get("tokenizer") is None:
        return  # without a tokenizer transformers says what is missing
    tokenizer = kwargs.pop("tokenizer")
    if getattr(config, "stop_strings", None):
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    kwargs.pop("stop_strings", None)
    given = list(kwargs.get("stopping_criteria") or [])
    kwargs["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(tokenizer, strings)])
