"""Gemma 3 and 4: windows of sliding layers, images that see themselves whole, layers that read the keys of others."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mmaccel
from mmaccel.core.adapter import TokenTree
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.models import sliding
from mmaccel.models.prompt_layout import remove_padding
from mmaccel.models.runner import HFRunner
from tests.models.tiny_random import batch, prompt, sampler
from tests.spies import crossed

KINDS = ("gemma3", "gemma4")
PIECES = [("text", 6), ("video", 24), ("text", 3), ("image",), ("text", 9)]
SPARSE = {"name": "a_shape", "block": 16, "sink": 16, "window": 32}
pytestmark = pytest.mark.numeric(by="torch")


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest) -> Any:
    model = sampler(request.param).model()
    model.generation_config.eos_token_id = None
    return request.param, model


def tokens_of(model: Any, inputs: Any, count: int = 12, **more: Any) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, **more)


def test_an_answer_longer_than_window_and_margin(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers let go of what no row will see; the answer is the plain one."""
    kind, model = built
    monkeypatch.setattr(sliding, "MARGIN", 16)
    inputs = prompt(kind, PIECES)
    plain = tokens_of(model, inputs, 60)
    with mmaccel.accelerate(model) as fast:
        out = model.generate(**inputs, max_new_tokens=60, do_sample=False, return_dict_in_generate=True)
        windows, everything = fast.last_kv_state._parts
        assert torch.equal(out.sequences, plain)
        assert windows.held_columns() == 24 + 16 + 1 and everything.held_columns() == plain.shape[1] - 1


@torch.no_grad()
def test_of_a_prompt_sliding_layers_hold_their_window(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the next layer runs, but the last and one whose keys are read again; whole and in pieces."""
    kind, model = built
    monkeypatch.setattr(sliding, "MARGIN", 16)
    inputs, family = prompt(kind, PIECES), adapter_for(model)
    for chunk, last in ((None, inputs["input_ids"].shape[1]), (64, 24 + 16 + 64 + 8)):
        with mmaccel.accelerate(model, chunk=chunk):
            cache = model(**inputs).past_key_values
            held = [one.key.shape[2] for one in cache.state._parts[0]._held]
            assert held[:-1] == [24 + 16] * (len(held) - 1) and 24 < held[-1] <= last
            # A step back is one of the tokens after it, and not of its own.
            after = model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache).logits
            cache.crop(-2)
            again = model(input_ids=torch.tensor([[6, 7]]), past_key_values=cache).logits
            assert (again - after[:, 1:]).abs().max() < 2e-5
            cache.batch_repeat_interleave(2)
            both = model(input_ids=torch.tensor([[8], [9]]), past_key_values=cache).logits
            assert both.shape[0] == 2 and both.isfinite().all()
            with pytest.raises(ModelError, match="goes back at most 16 tokens, and not into a prompt"):
                cache.crop(-60)
    assert len(held) == len(set(family.kv_owners(model)) & family.sliding_layers(model).keys())


def test_batches_beams_and_chunks(built: Any) -> None:
    """A padded batch, beams, and pieces that end in the middle of images."""
    kind, model = built
    together = batch(kind, [prompt(kind, [("text", n), ("video", 20), ("text", 5)], seed=n) for n in (2, 19)])
    plain, beams = tokens_of(model, together), tokens_of(model, together, num_beams=3)
    for chunk in (None, 67):
        with mmaccel.accelerate(model, chunk=chunk):
            assert torch.equal(tokens_of(model, together), plain)
            assert torch.equal(tokens_of(model, together, num_beams=3), beams)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_5"])
def test_a_draft_that_goes_back_farther_than_the_layers_is_refused(kind: str) -> None:
    """The longest that is not refused ends in the plain answer."""
    model: Any = sampler(kind).model()
    model.generation_config.eos_token_id = None
    draft, told = {"name": "prompt_lookup", "window": 128}, r"rolls back up to 129 tokens and .* only 128"
    with pytest.raises(RecipeError, match=told):
        mmaccel.accelerate(model, draft=draft)
    if kind == "qwen3_5":  # whose family has streams
        with pytest.raises(RecipeError, match=told):
            mmaccel.VideoSession(model, sampler(kind).processor(model.config), None, kv="full", draft=draft)
    inputs = prompt(kind, [("text", 9)])
    inputs = {
        name: x.repeat(1, 40) if x.shape == inputs["input_ids"].shape else x for name, x in inputs.items()
    }
    plain = tokens_of(model, inputs, 20)
    with mmaccel.accelerate(model, draft={"name": "prompt_lookup", "window": 127}):
        assert torch.equal(tokens_of(model, inputs, 20), plain)


def test_streams_are_refused(built: Any) -> None:
    kind, model = built
    processor = sampler(kind).processor(model.config)
    with pytest.raises(ModelError, match="memories of streams do not support; use generate"):
        mmaccel.VideoSession(model, processor, None, kv="rekv")


@torch.no_grad()
def test_what_a_layer_gives_and_what_is_saved_of_a_model(built: Any) -> None:
    """Keys of layers that hold all columns; the turning of keys, and a digest of layers that have keys."""
    kind, model = built
    family: Any = adapter_for(model)
    with mmaccel.accelerate(model):
        cache = model(**prompt(kind, [("text", 207)])).past_key_values
        # The last sliding layer, and one whose keys are read again, let go later.
        owners, narrow = family.kv_owners(model), sorted(family.sliding_layers(model))
        narrow = [n for n in narrow[:-1] if owners.count(n) == 1]
        assert narrow and cache.layers[1].keys.shape[2] == 207
        assert all(cache.layers[n].keys is None and cache.layers[n].values is None for n in narrow)
    assert family.fingerprint(model)["rope"]["rope_theta"] > 0
    before = family.qk_checksum(model)
    other: Any = sampler(kind).model(seed=1)
    assert before is not None and before != family.qk_checksum(other)


@crossed("built", pieces=[[("image",)], [("video", 4)]], built=KINDS)
def test_drafts_in_batches_and_behind_padding(built: Any, pieces: Any) -> None:
    """Images of one kind alone, and padding behind a prompt, go with the tokens that they are of."""
    kind, model = built
    alone = [prompt(kind, [("text", n), *pieces, ("text", 5)], seed=n) for n in (2, 9)]
    together, one = batch(kind, alone), alone[0]
    shape = one["input_ids"].shape
    padded = {name: torch.nn.functional.pad(x, (0, 3)) if x.shape == shape else x for name, x in one.items()}
    plain, answer = tokens_of(model, together), tokens_of(model, one)[:, shape[1] :]
    with mmaccel.accelerate(model, draft={"name": "prompt_lookup", "in_batches": "always"}):
        assert torch.equal(tokens_of(model, together), plain)
        assert torch.equal(tokens_of(model, padded)[:, shape[1] + 3 :], answer)
    assert int(remove_padding(padded)[gemma_types(model)].sum()) == int(one[gemma_types(model)].sum())
    assert remove_padding(padded)[gemma_types(model)].shape == shape


def gemma_types(model: Any) -> str:
    family: Any = adapter_for(model)
    return str(family.token_types)


@torch.no_grad()
def test_a_second_turn_with_an_image(built: Any) -> None:
    kind, model = built
    both = prompt(kind, [*PIECES, ("text", 4), ("image",), ("text", 70)], seed=2)
    plain, first = model(**both).logits, prompt(kind, PIECES, seed=2)
    past = first["input_ids"].shape[1]
    assert torch.equal(both["input_ids"][:, :past], first["input_ids"])
    for recipe in ({}, {"chunk": 66}):
        with mmaccel.accelerate(model, **recipe):
            cache = model(**first).past_key_values
            later = {name: x[:, past:] if x.ndim == 2 else x[-1:] for name, x in both.items()}
            later = {name: x for name, x in later.items() if "video" not in name}
            later["attention_mask"] = both["attention_mask"]
            out = model(**later, past_key_values=cache).logits
        assert (out - plain[:, past:]).abs().max() < 2e-5


@torch.no_grad()
def test_weights_on_request(built: Any) -> None:
    kind, model = built[0], copy.deepcopy(built[1])
    inputs = prompt(kind, [("text", 30), ("video", 5), ("text", 5)])
    model.set_attn_implementation("eager")
    want = model(**inputs, output_attentions=True).attentions
    for cached in (True, False):
        with mmaccel.accelerate(model):
            got = model(**inputs, output_attentions=True, use_cache=cached).attentions
        # A key more or less moves a weight by far more than rounding does.
        assert all((a - b).abs().max() < 1e-4 * b.max() for a, b in zip(got, want, strict=True))


@torch.no_grad()
def test_rows_of_a_tree_see_their_window(built: Any) -> None:
    """Plain and accelerated: the rows of two branches, and each branch by itself."""
    kind, model = built
    inputs = prompt(kind, PIECES)
    sees = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]]).bool()
    ids = torch.tensor([[11, 12, 13]])
    rows = []
    for recipe in (None, "dense"):
        owner = None if recipe is None else mmaccel.accelerate(model, recipe)
        runner = HFRunner.open(model, adapter_for(model))
        runner.prefill(inputs)
        rows.append(runner.step(ids, TokenTree(sees, torch.tensor([0, 0, 1]))))
        runner.truncate(runner.length() - 3)
        alone = runner.step(ids[:, 1:])
        assert (rows[-1][:, 1:] - alone).abs().max() < 2e-5
        if owner is not None:
            owner.detach()
    assert (rows[0] - rows[1]).abs().max() < 2e-5


def test_estimates_weigh_scores_as_the_model_does() -> None:
    """Gemma 4's scores are not divided by the size of a head; a pattern's estimates divide by it."""
    model, seen = sampler("gemma4").model(), []
    with mmaccel.accelerate(model, sparse={**SPARSE, "name": "a_shape"}) as fast, torch.no_grad():
        plan, attend = fast.attention.plan, []
        fast.attention.plan = lambda layer, query, *a: seen.append((layer, query)) or plan(layer, query, *a)
        handle = model.model.language_model.layers[1].self_attn.q_norm.register_forward_hook(
            lambda module, args, out: attend.append(out)
        )
        model(**prompt("gemma4", PIECES))
        handle.remove()
    (layer, query), *_ = seen
    size = query.shape[-1]
    assert (layer, size) == (1, 32)
    # Turning keeps the length of a row.
    assert torch.allclose(query.norm(dim=-1), attend[0].transpose(1, 2).norm(dim=-1) * size**0.5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("gemma3", "attn_logit_softcapping", 50.0), ("gemma4", "use_bidirectional_attention", "all")],
)
def test_what_is_not_computed_is_refused(kind: str, field: str, value: Any) -> None:
    model = sampler(kind).model()
    setattr(model.config.get_text_config(), field, value)
    with pytest.raises(ModelError, match=field):
        mmaccel.accelerate(model)


def test_small_models_see_images_causally() -> None:
    """Without `use_bidirectional_attention`, as the smaller models of Gemma 4 come; and without keys that are shared."""
    kind = sampler("gemma4")
    config = kind.config()
    config.text_config.use_bidirectional_attention = None
    config.text_config.num_kv_shared_layers = 0
    torch.manual_seed(0)
    model = kind.kind(config).float().eval()
    inputs = prompt("gemma4", PIECES)
    with torch.no_grad():
        plain = model(**inputs).logits
        with mmaccel.accelerate(model):
            assert (model(**inputs).logits - plain).abs().max() < 1e-5
    assert not adapter_for(model).bidirectional_image_layers(model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_stock_processors_make(kind: str, random_folder: Callable[[str], Path]) -> None:
    """Frames are found among their inputs, with the times between them, and tokens stay what they are."""
    pytest.importorskip("torchvision")
    words = transformers.AutoTokenizer.from_pretrained(random_folder("tiny-qwen"))
    names = ("boi", "eoi", "image", "audio", "boa", "eoa")
    words.add_special_tokens({"additional_special_tokens": [f"<{name}>" for name in names]})
    for name in names:
        setattr(words, f"{name}_token", f"<{name}>")
        setattr(words, f"{name}_token_id", words.convert_tokens_to_ids(f"<{name}>"))
    maker = sampler(kind)
    config = maker.config()
    pixels = torch.randint(0, 255, (8, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    if kind == "gemma3":
        images = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
        processor = transformers.Gemma3Processor(images, words, image_seq_length=4)
        for video in (pixels, "film.mp4"):
            with pytest.raises(ModelError, match="models of type 'gemma3' take no videos"):
                mmaccel.load_processor(processor)("see", videos=video)
        text, given = " ".join(["at 1 : <boi>"] * 8), {"images": [list(pixels)]}
        config.image_token_index, tokens = words.image_token_id, 4
    else:
        made = (getattr(transformers, f"Gemma4{name}Processor")(patch_size=4) for name in ("Image", "Video"))
        (images, videos), hears = made, transformers.Gemma4AudioFeatureExtractor()
        processor = transformers.Gemma4Processor(hears, images, words, videos, image_seq_length=64)
        told = {"fps": 2.0, "total_num_frames": 8, "frames_indices": list(range(8)), "duration": 4.0}
        text, given = "<|video|>", {"videos": [pixels], "video_metadata": [told], "do_sample_frames": False}
        config.vision_config.pooling_kernel_size, config.vision_config.position_embedding_size = 3, 640
        config.image_token_id, config.audio_token_id = words.image_token_id, words.audio_token_id
        config.video_token_id, tokens = processor.video_token_id, 64
        config.text_config.vocab_size_per_layer_input = len(words)
    config.text_config.vocab_size = len(words)
    torch.manual_seed(0)
    model: Any = maker.kind(config).float().eval()
    for weight in model.parameters():
        if weight.ndim > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    model.generation_config.eos_token_id = None
    inputs = dict(processor(text=[f"see {text} what colour ?"], return_tensors="pt", **given))
    plain = tokens_of(model, inputs)
    layout = adapter_for(model).layout(model, inputs)
    assert [int((layout.frame[0] == n).sum()) for n in range(8)] == [tokens] * 8
    for recipe in ({}, {"chunk": 64}, {"draft": "prompt_lookup"}):
        with mmaccel.accelerate(model, **recipe) as fast:
            assert torch.equal(tokens_of(model, inputs), plain)
            assert fast.report().video_units == 8


@torch.no_grad()
def test_packed_prompts_see_themselves_alone(built: Any) -> None:
    kind, model = built
    one = prompt(kind, [("text", 20), ("video", 4), ("text", 5)])
    # Videos of transformers before 5.20 have as many frames each.
    frames = 4 if kind == "gemma4" and "num_frames_per_video" not in one else 6
    other = prompt(kind, [("text", 30), ("video", frames), ("text", 9)], seed=4)
    size = one["input_ids"].shape
    both = {name: torch.cat([x, other[name]], int(x.shape == size)) for name, x in one.items()}
    del both["attention_mask"]
    places = torch.cat([torch.arange(x["input_ids"].shape[1]) for x in (one, other)])[None]
    want = torch.cat([model(**one).logits, model(**other).logits], 1)
    with mmaccel.accelerate(model):
        whole = model(**both, position_ids=places, use_cache=False).logits
        last = model(**both, position_ids=places, use_cache=False, logits_to_keep=1).logits
    assert (whole - want).abs().max() < 1e-5 and (last - want[:, -1:]).abs().max() < 1e-5
