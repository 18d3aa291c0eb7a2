"""How an answer's tokens are chosen: transformers' logits processors and stopping criteria, for one sequence, also those of
answers that follow a JSON schema (by llguidance, an optional package)."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mmaccel.core.errors import ModelError, nearest_name_hint
from mmaccel.core.streams.parts import TokenChoice
from mmaccel.models.sequences import STATEFUL, SamplingDistribution

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
LONGEST, STACK = 1 << 16, 256 << 20
"""Characters of a schema at most, and bytes of the stack on which it is compiled."""
_stacks = threading.Lock()
WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space is that of `json.dumps`, for a model that may write as much of it as it likes may write nothing else."""


def build_token_choice(
    adapter: Any, ids: Tensor, most: int, settings: Mapping[str, Any], drafts: bool
) -> TokenChoice:
    """Build the logits processors and stopping criteria for up to `most` new tokens after `ids` [1, S]. Options are
    `settings` (arguments of `generate`) alone, not the model's `generation_config`. `drafts`: a draft proposes tokens, so
    stateful processors are refused. Raises `ModelError` for an unusable setting."""
    for name in settings:
        if name not in SETTINGS:
            raise ModelError(
                f"{name}: it is no setting of an answer; {nearest_name_hint(name, SETTINGS)}leave it out."
            )
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

    ends = sorted(adapter.end_token_ids())
    if (schema := given.pop("schema", None)) is not None:
        told["logits_processor"].append(
            build_schema_logits_processor(
                adapter.model, adapter.processor.tokenizer, schema, ends, ids.shape[1]
            )
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
    warp = SamplingDistribution(processors, sample) if sample or processors else None
    generator = None if seed is None else torch.Generator(adapter.device).manual_seed(int(seed))
    criteria = found["stopping_criteria"]
    return TokenChoice(warp, generator, lambda ids: bool(criteria(ids, ()).any()))


class JSONSchemaLogitsProcessor(LogitsProcessor):
    """Logits processor for one sequence that allows only tokens by which the answer can still become JSON of a schema.

    It depends only on the ids of each call, not on earlier calls, so drafted tokens can be rejected. It is pickled as its
    arguments, for use in other processes.

    tokenizer  the JSON of a fast tokenizer
    vocabulary  size of the model's vocabulary
    ends       ids that end an answer
    start      number of tokens before the answer
    """

    def __init__(
        self, tokenizer: str, vocabulary: int, ends: tuple[int, ...], schema: str, start: int
    ) -> None:
        self._made_of = tokenizer, vocabulary, ends, schema, start
        self._start, self._ends, self._read = start, set(ends), list[int]()
        self._matcher = _matcher(tokenizer, vocabulary, ends, schema).deep_copy()

    def __reduce__(self) -> Any:
        return JSONSchemaLogitsProcessor, self._made_of

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[0, self._start :].tolist()
        if not self._ends.isdisjoint(ids):
            return scores  # behind an end: this is not looked at
        follows = self._follow(ids)
        mask = self._matcher.compute_bitmask() if follows else b""
        if self._matcher.is_error():  # it met a limit of its own, and would let everything through
            raise schema_error(self._matcher.get_error())
        if not follows:
            return scores  # nor is this behind what is refused
        bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8)).bitwise_and_(1).flatten().bool()
        allowed = torch.nn.functional.pad(allowed, (0, max(0, scores.shape[-1] - len(allowed))))
        return scores.masked_fill(~allowed[: scores.shape[-1]].to(scores.device), -torch.inf)

    def _follow(self, ids: list[int]) -> bool:
        """Bring the matcher behind `ids`; whether all of them are let through."""
        same = next((n for n, (a, b) in enumerate(zip(self._read, ids, strict=False)) if a != b), None)
        same = min(len(self._read), len(ids)) if same is None else same
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
        new = ids[same:]
        count = self._matcher.validate_tokens(new) if new else 0
        self._read = ids[: same + count]
        return self._matcher.consume_tokens(new[:count]) and count == len(new)


def build_schema_logits_processor(
    model: nn.Module, tokenizer: Any, schema: Mapping[str, Any] | str | type, ends: Iterable[int], start: int
) -> LogitsProcessor:
    """Build the logits processor that makes `model`'s answer, after `start` tokens, JSON by `schema` (a mapping, its JSON
    text, or a pydantic model class). Raises `ModelError` for an invalid schema, or without llguidance."""
    told = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    try:
        text = told if isinstance(told, str) else json.dumps(told)
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is no JSON object")
    except (TypeError, ValueError) as error:
        raise ModelError(f"schema: {error}; give a JSON schema, as a mapping or in JSON.") from error
    if len(text) > LONGEST:
        raise ModelError(f"schema: it has {len(text)} characters; give one of {LONGEST} at most.")
    size = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    return JSONSchemaLogitsProcessor(
        tokenizer.backend_tokenizer.to_str(), size, tuple(sorted(ends)), text, start
    )


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: str, vocabulary: int, ends: tuple[int, ...]) -> Any:
    """The tokenizer as llguidance has it, which takes a second to make."""
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer, pre_tokenizers

    inner = Tokenizer.from_str(tokenizer)
    inner.no_padding()
    inner.no_truncation()
    if inner.decode(inner.encode("{", add_special_tokens=False).ids) != "{" or len(inner.encode("{").ids) > 1:
        # Text that has one spelling is written by the tokenizer: without a space of its own before it.
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return LLTokenizer(inner.to_str(), n_vocab=vocabulary, eos_token=list(ends) or None)


@functools.lru_cache(maxsize=8)
def _matcher(tokenizer: str, vocabulary: int, ends: tuple[int, ...], schema: str) -> Any:
    """A matcher at the beginning, to copy; to compile one may take a second."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ModelError(
            "schema: it needs llguidance; install it with pip install 'mmaccel[json]'."
        ) from error
    known, made = _tokens(tokenizer, vocabulary, ends), list[Any]()

    def make() -> None:
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=WRITTEN)
            fault = LLMatcher.validate_grammar(grammar, known)
            made.append(fault or LLMatcher(known, grammar, log_level=0))
        except ValueError as error:
            made.append(str(error))

    # llguidance recurses on the native stack, as deep as a schema is nested.
    with _stacks:
        before = threading.stack_size(STACK)
        try:
            thread = threading.Thread(target=make, name="mmaccel-schema")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    fault = made[0] if made else "it could not be read"
    if isinstance(fault, str):
        raise schema_error(fault)
    return fault


def schema_error(fault: str) -> ModelError:
    """Return the error for a schema that cannot be kept, with llguidance's reason."""
    return ModelError(f"schema: {fault.strip().splitlines()[0].rstrip('.')}; give one that can be kept.")


def end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the end-of-text ids: those of the model's `generation_config`, or else the tokenizer's."""
    told: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    told = tokenizer.eos_token_id if told is None else told
    return set(told) if isinstance(told, list | tuple) else {told}
