"""Every argument that the installed transformers takes is honoured by each recipe as by the plain model, or refused.

A row that the installed version, 5.17 to 5.23, lacks is left alone. What a new version brings needs a row here: a value that
asks for something, and, if a recipe refuses it, its name in `REFUSED`.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as T
from transformers.utils.generic import TransformersKwargs

import mmaccel
from mmaccel.core.errors import MmaccelError
from mmaccel.models.generate import LOOPS, STREAM
from tests.models.tiny_random import BUILD, IMG, PROMPTS, VID, prompt

RECIPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "full budget": {"sparse": {"name": "a_shape", "sink": 512, "window": 512}},
    "window": {"kv": {"name": "window", "window": 512}},
    "prompt_lookup": {"draft": "prompt_lookup"},
    "offload": {"kv": "offload"},
}

_ALWAYS = {"cache_implementation", "is_causal"}
REFUSED: dict[str, set[str]] = {
    "dense": _ALWAYS,
    "full budget": {*_ALWAYS, "output_attentions"},
    "window": {*_ALWAYS, "output_attentions", "past_key_values"},
    "prompt_lookup": {*_ALWAYS, *LOOPS, "guidance_scale", "output_attentions", "output_hidden_states"},
    "offload": {"cache_implementation", *LOOPS, *STREAM},
}
"""What each recipe refuses of `generate`, or of `forward` where `generate` has no such argument."""


class Record:
    """A streamer that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.shown += value.flatten().tolist()

    def end(self) -> None:
        self.shown.append(-1)


class Ban(T.LogitsProcessor):
    """Forbids even tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(0, scores.shape[1], 2), float("-inf"))


class Short(T.StoppingCriteria):
    """Ends after two tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length + 2)


def first_tokens(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A decoding loop that writes nothing."""
    return input_ids[:, :3]


SURE = {"do_sample": True, "temperature": 1e-6}
"""Drawing that is as good as certain, so that no recipe's random numbers matter."""
LENGTH = len(prompt("llava", PROMPTS["video"])["input_ids"][0])
TEXT = {**prompt("llava", [("text", 40)]), "pixel_values_videos": None}
"""A prompt without a video: not every version reads another in chunks."""

GENERATE: dict[str, dict[str, Any] | Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "inputs": lambda model, call: {"inputs": call["input_ids"], "input_ids": None},
    "generation_config": {"generation_config": T.GenerationConfig(max_new_tokens=3), "max_new_tokens": None},
    "logits_processor": {"logits_processor": [Ban()]},
    "stopping_criteria": {"stopping_criteria": [Short(LENGTH)]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(50, 60))},
    "synced_gpus": {"synced_gpus": False},
    "assistant_model": lambda model, call: {"assistant_model": BUILD["llava"](seed=1)},
    "streamer": {"streamer": Record()},
    "negative_prompt_ids": {"negative_prompt_ids": torch.tensor([[3, 4, 5]])},
    "negative_prompt_attention_mask": {"negative_prompt_attention_mask": torch.ones(1, 3, dtype=torch.long)},
    "custom_generate": {"custom_generate": first_tokens},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "assistant_lookbehind": {"assistant_lookbehind": 4},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(0, 190, 2)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 190, 2))},
    "bos_token_id": {"bos_token_id": 7},
    "cache_config": {"cache_config": {"nbits": 4}},
    "cache_implementation": {"cache_implementation": "static"},
    "compile_config": lambda model, call: {"compile_config": T.CompileConfig()},
    "constraints": {"constraints": [object()]},
    "continuous_batching_config": lambda model, call: {"continuous_batching_config": T.ContinuousBatchingConfig()},
    "decoder_start_token_id": {"decoder_start_token_id": 7},
    "disable_compile": {"disable_compile": True},
    "diversity_penalty": {"diversity_penalty": 0.5},
    "do_sample": SURE,
    "dola_layers": {"dola_layers": "low"},
    "early_stopping": {"early_stopping": True},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "eos_token_id": lambda model, call: {"eos_token_id": call["second"]},
    "epsilon_cutoff": {**SURE, "epsilon_cutoff": 0.3},
    "eta_cutoff": {**SURE, "eta_cutoff": 0.3},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 9.0), "eos_token_id": 5},
    "force_words_ids": {"force_words_ids": [[5]]},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "guidance_scale": {"guidance_scale": 1.5},
    "is_assistant": {"is_assistant": True},
    "length_penalty": {"length_penalty": 2.0},
    "low_memory": {"low_memory": True},
    "max_cache_len": {"max_cache_len": 512},
    "max_length": {"max_new_tokens": None, "max_length": LENGTH + 3},
    "max_matching_ngram_size": {"max_matching_ngram_size": 2},
    "max_new_tokens": {"max_new_tokens": 2},
    "max_time": {"max_time": 60.0},
    "min_length": lambda model, call: {"min_length": LENGTH + 4, "eos_token_id": call["second"]},
    "min_new_tokens": lambda model, call: {"min_new_tokens": 4, "eos_token_id": call["second"]},
    "min_p": {"do_sample": True, "min_p": 1.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "num_assistant_tokens": {"num_assistant_tokens": 2},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "constant"},
    "num_beam_groups": {"num_beam_groups": 2},
    "num_beams": {"num_beams": 2},
    "num_return_sequences": {**SURE, "num_return_sequences": 2, "return_dict_in_generate": False},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "output_logits": {"output_logits": True},
    "output_scores": {"output_scores": True},
    "pad_token_id": {"pad_token_id": 7},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "prefill_chunk_size": {"prefill_chunk_size": 16, **TEXT},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "output_scores": True},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "return_dict_in_generate": {"return_dict_in_generate": False},
    "sequence_bias": {"sequence_bias": {(5,): 90.0}},
    "speculation_type": {"speculation_type": "dflash"},
    "stop_strings": {"stop_strings": ["x"]},
    "suppress_tokens": {"suppress_tokens": list(range(0, 190, 2))},
    "target_lookbehind": {"target_lookbehind": 4},
    "temperature": SURE,
    "token_healing": {"token_healing": True},
    "top_h": {**SURE, "top_h": 0.2},
    "top_k": {"do_sample": True, "top_k": 1},
    "top_p": {"do_sample": True, "top_p": 1e-6},
    "transformers_version": {"transformers_version": "5.0.0"},
    "typical_p": {**SURE, "typical_p": 0.5},
    "use_cache": {"use_cache": False, "bad_words_ids": [[VID], [IMG]]},
    "use_mtp": {"use_mtp": True},
    "watermarking_config": lambda model, call: {"watermarking_config": T.WatermarkingConfig(bias=50.0)},
}  # fmt: skip
"""Name of an argument of `generate` or a field of `GenerationConfig` -> what a call is given for it."""


@torch.no_grad()
def _embedded(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    return {"inputs_embeds": model.get_input_embeddings()(call["input_ids"]), "input_ids": None}


@torch.no_grad()
def _encoded(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    given = [call[name] for name in ("pixel_values_videos", "video_grid_thw") if name in call]
    found = model.model.get_video_features(*given, return_dict=True)
    return {"mm_encoder_outputs": {"video": found}, "pixel_values_videos": None}


def _places(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    places = 3 + torch.arange(call["input_ids"].shape[1])[None]
    return {"position_ids": places.expand(3, 1, -1) if "mm_token_type_ids" in call else places}


FORWARD: dict[str, tuple[str, dict[str, Any] | Callable[[Any, dict[str, Any]], dict[str, Any]]]] = {
    "input_ids": ("text", {}),
    "attention_mask": ("text", lambda model, call: {"attention_mask": torch.ones_like(call["input_ids"])}),
    "position_ids": ("text", _places),
    "past_key_values": ("video", lambda model, call: {"past_key_values": T.DynamicCache()}),
    "inputs_embeds": ("text", _embedded),
    "labels": ("text", lambda model, call: {"labels": call["input_ids"]}),
    "use_cache": ("video", {"use_cache": False}),
    "logits_to_keep": ("video", {"logits_to_keep": 3}),
    "pixel_values": ("image", {}),
    "pixel_values_videos": ("video", {}),
    "image_sizes": ("image", {}),
    "image_sizes_videos": ("video", lambda model, call: {"image_sizes_videos": torch.tensor([[28, 28]])}),
    "batch_num_images": ("image", {}),
    "vision_feature_layer": ("video", {"vision_feature_layer": -2}),
    "vision_feature_select_strategy": ("video", {"vision_feature_select_strategy": "full"}),
    "vision_aspect_ratio": ("image", {"vision_aspect_ratio": "anyres_max_4"}),
    "image_grid_thw": ("image", {}),
    "video_grid_thw": ("video", {}),
    "mm_token_type_ids": ("video", {"mm_token_type_ids": None}),
    "second_per_grid_ts": ("video", lambda model, call: {"second_per_grid_ts": torch.tensor([0.5])}),
    "mm_encoder_outputs": ("video", _encoded),
    "num_items_in_batch": (
        "text",
        lambda model, call: {"labels": call["input_ids"], "num_items_in_batch": 7},
    ),
    "output_hidden_states": ("video", {"output_hidden_states": True}),
    "output_attentions": ("video", {"output_attentions": True}),
    "output_router_logits": ("text", {"output_router_logits": True}),
    "cu_seq_lens_q": ("text", {"cu_seq_lens_q": torch.tensor([0, 20], dtype=torch.int32)}),
    "cu_seq_lens_k": ("text", {"cu_seq_lens_k": torch.tensor([0, 20], dtype=torch.int32)}),
    "max_length_q": ("text", {"max_length_q": 20}),
    "max_length_k": ("text", {"max_length_k": 20}),
    "is_causal": ("text", {"is_causal": False}),
    "seq_idx": ("text", {"seq_idx": torch.zeros(1, 20, dtype=torch.int32)}),
}
"""Name of an argument of a model's `forward` -> the prompt it is given with, and what the call is given for it."""


CLASSES = {"llava": T.LlavaOnevisionForConditionalGeneration, "qwen": T.Qwen2_5_VLForConditionalGeneration}


def of_generate() -> set[str]:
    names = set(inspect.signature(T.GenerationMixin.generate).parameters) - {"self", "kwargs"}
    return names | {name for name in vars(T.GenerationConfig()) if not name.startswith("_")}


def of_forward(family: str) -> set[str]:
    names = set(inspect.signature(CLASSES[family].forward).parameters) - {"self", "kwargs"}
    return names | set(TransformersKwargs.__annotations__)


@pytest.fixture(scope="module")
def models():
    """Family -> the plain model, and one under each recipe; all with the same weights."""
    made, handles = {}, []
    for family, build in BUILD.items():
        plain = build()
        plain.set_attn_implementation("eager")
        made[family] = {"plain": plain, **{name: copy.deepcopy(plain) for name in RECIPES}}
        handles += [mmaccel.accelerate(made[family][name], **recipe) for name, recipe in RECIPES.items()]
    yield made
    for handle in handles:
        handle.detach()


def call_of_generate():
    return {**prompt("llava", PROMPTS["video"]), "max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def second(models):
    """The second token of the plain answer."""
    return int(models["llava"]["plain"].generate(**call_of_generate())[0, -4])


def test_each_argument_has_its_row():
    known = set().union(*map(of_forward, CLASSES))
    assert of_generate() <= set(GENERATE), "give the new arguments of generate a case"
    assert known <= set(FORWARD), "give the new arguments of forward a case"
    assert all(refused <= {*GENERATE, *FORWARD} for refused in REFUSED.values())
    assert all(len(refused) <= 15 for name, refused in REFUSED.items() if name != "offload")


def outcome(call, *args, **kwargs):
    """What a call gives, or the error it ends in."""
    torch.manual_seed(0)
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


def alike(got, plain) -> bool:
    """Whether two outcomes are the same: numbers nearly, shapes and errors exactly, caches by their length."""
    if isinstance(plain, Exception):
        return type(got) is type(plain) and str(got) == str(plain)
    if isinstance(plain, torch.Tensor):
        there = isinstance(got, torch.Tensor) and got.shape == plain.shape
        return there and bool(((got - plain).abs() <= 1e-4).all())
    if isinstance(plain, T.Cache):
        return got.get_seq_length() == plain.get_seq_length()
    if isinstance(got, Exception):
        return False
    if isinstance(plain, dict):
        return set(got) == set(plain) and all(alike(got[name], plain[name]) for name in plain)
    if isinstance(plain, tuple):
        return len(got) == len(plain) and all(map(alike, got, plain))
    return got == plain


def refuses(got, name: str) -> bool:
    return isinstance(got, MmaccelError) and str(got).startswith(f"{name}: ") and str(got).endswith(".")


def in_turn(name):
    """The recipes that an argument is given to by default: that of drafts, that of streams, and one of the others."""
    first, *others, drafted, streamed = RECIPES
    return [[first, *others][list(GENERATE).index(name) % 3], drafted, streamed]


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in turn", "every"]
)
@pytest.mark.parametrize("name", [name for name in GENERATE if name in of_generate()])
@pytest.mark.filterwarnings("ignore")
def test_generate(models, second, name, every):
    model, call = models["llava"]["plain"], call_of_generate()
    facts = {**call, "second": second}
    made = GENERATE[name](model, facts) if callable(GENERATE[name]) else GENERATE[name]
    call = {"return_dict_in_generate": True, **call, **made}
    call = {key: value for key, value in call.items() if value is not None or key == name}

    def run(one):
        streamer = Record()
        given = {key: streamer if isinstance(value, Record) else value for key, value in call.items()}
        found = outcome(one.generate, **given)
        return found if isinstance(found, Exception) else (found, streamer.shown)

    plain = run(model)
    for recipe in RECIPES if every else in_turn(name):
        got = run(models["llava"][recipe])
        if name in REFUSED[recipe]:
            assert refuses(got, name), (recipe, got)
        else:
            assert alike(got, plain), (recipe, got, plain)


@pytest.mark.parametrize(
    ("family", "name"), [(one, name) for one in CLASSES for name in FORWARD if name in of_forward(one)]
)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_forward(models, family, name):
    kind, value = FORWARD[name]
    call = prompt(family, PROMPTS[kind])
    call.pop("attention_mask")

    def run(model):
        given = {**call, **(value(model, call) if callable(value) else value)}
        found = outcome(model, **{key: one for key, one in given.items() if one is not None})
        # Older releases of Qwen2.5-VL give back what they keep for a second turn; here the cache holds it.
        return (
            {key: found[key] for key in found if key != "rope_deltas"} if isinstance(found, dict) else found
        )

    plain = run(models[family]["plain"])
    assert not isinstance(plain, Exception), plain
    for recipe in RECIPES:
        if recipe == "offload":  # whose prompts go through generate: test_prompt_arguments
            continue
        got = run(models[family][recipe])
        if name in REFUSED[recipe] and not (recipe == "prompt_lookup" and name in OF_THE_LOOP):
            assert refuses(got, name), (recipe, got)
        else:
            assert alike(got, plain), (recipe, got, plain)


OF_THE_LOOP = {"output_attentions", "output_hidden_states"}
"""What a draft refuses of `generate` alone: a forward pass drafts nothing."""
