"""Every argument that the installed transformers takes is honoured by each recipe as by the plain model, or refused."""

import copy
import inspect

import pytest
import torch
import transformers as T
from transformers.utils.generic import TransformersKwargs

import mmaccel
from mmaccel.core.errors import MmaccelError
from tests.models.argument_cases import FORWARD, GENERATE, RECIPES, REFUSED, Record
from tests.models.tiny_random import BUILD, PROMPTS, prompt

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
    made = {}
    for family, build in BUILD.items():
        plain = build()
        plain.generation_config.eos_token_id = None
        plain.set_attn_implementation("eager")
        made[family] = {"plain": plain, **{name: copy.deepcopy(plain) for name in RECIPES}}
    handles = [
        mmaccel.accelerate(made[family][name], **recipe)
        for family in made
        for name, recipe in RECIPES.items()
    ]
    yield made
    for handle in handles:
        handle.detach()


def test_each_argument_has_its_row():
    known = set().union(*map(of_forward, CLASSES))
    assert of_generate() <= set(GENERATE), "give the new arguments of generate a case, see argument_cases.py"
    assert known <= set(FORWARD), "give the new arguments of forward a case, see argument_cases.py"
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
        return (
            isinstance(got, torch.Tensor)
            and got.shape == plain.shape
            and bool(((got - plain).abs() <= 1e-4).all())
        )
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
def test_generate(models, name, every):
    model = models["llava"]["plain"]
    call = {**prompt("llava", PROMPTS["video"]), "max_new_tokens": 5, "do_sample": False}
    before = model.generate(**call)
    facts = {**call, "second": int(before[0, -4]), "another": BUILD["llava"](seed=1)}
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
        if recipe == "offload" and isinstance(plain, tuple) and isinstance(plain[0], dict):
            # A memory of streams ends with its call.
            plain = {key: plain[0][key] for key in plain[0] if key != "past_key_values"}, plain[1]
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
