"""The tiny models' tokenizer, sizes and folders."""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

import mmaccel
from mmaccel.core.errors import MmaccelError, ModelError
from mmaccel.models.shipped import tiny_model_folder
from mmaccel_lab import tiny, world
from mmaccel_lab.tiny.configs import SPECS, build_model
from mmaccel_lab.tiny.package import export
from mmaccel_lab.tiny.tokenizer import PLACEHOLDERS, SPECIAL, build_tokenizer
from mmaccel_lab.train.dialect import Dialect, words
from tests.spies import refusal

FAMILIES = tuple(PLACEHOLDERS)


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request):
    return build_tokenizer(words(), request.param)


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_word_is_one_token(tokenizer):
    assert len({tuple(_ids(tokenizer, word)) for word in words()}) == len(words())
    assert all(len(_ids(tokenizer, word)) == 1 for word in world.vocabulary())


def test_spellings_are_equal_and_text_returns(tokenizer):
    text = "what colour was the star ?"
    assert _ids(tokenizer, "What colour was the star?") == _ids(tokenizer, text)
    assert tokenizer.decode(_ids(tokenizer, text)) == text
    assert tokenizer.decode(_ids(tokenizer, "Zürich, 東京")) == "zürich , 東京"


def test_special_tokens_are_single_and_kept_apart(tokenizer):
    text = "".join(SPECIAL)
    assert _ids(tokenizer, text) == list(range(len(SPECIAL)))
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_families_share_ids():
    """Those whose frames have a time have words for it besides."""
    first, second, *timed = (build_tokenizer(words(), family).get_vocab() for family in FAMILIES)
    assert first == second
    assert all(first.items() < more.items() for more in timed)


@pytest.mark.parametrize("seconds", [0.0, 12.5, 4095.0])
def test_a_time_is_read_digit_by_digit(seconds):
    dialect = Dialect(SPECS["tiny-qwen3"])
    assert _ids(dialect.tokenizer, f"<{seconds:.1f} seconds>") == dialect.stamp(seconds).tolist()


@pytest.mark.parametrize("name", SPECS)
def test_template_is_what_training_writes(name):
    spec = SPECS[name]
    dialect = Dialect(spec)
    said = [
        {
            "role": "user",
            "content": [{"type": "video"}, {"type": "text", "text": "What colour was the star?"}],
        },
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "How many cards were shown?"},
    ]
    text = dialect.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    video = SPECIAL[dialect.video]
    shown = video * (3 * spec.tokens_per_frame + spec.newline)
    if spec.stamped:
        around = f"<|vision_start|>{video * spec.tokens_per_frame}<|vision_end|>"
        shown = "".join(f"<{n}.0 seconds>{around}" for n in range(3))
    ids = _ids(dialect.tokenizer, text.replace(video, shown))
    laid, *_ = dialect.lay(dialect.spans([("video", 0, 3)]), 1.0)
    parts = [laid, dialect.encode("what colour was the star ?"), dialect.closing]
    parts += [dialect.encode("red"), [dialect.end]]
    parts += [dialect.turn, dialect.encode("how many cards were shown ?"), dialect.closing]
    assert ids == [int(token) for part in parts for token in part]


SIZES = {
    "tiny-ov": (16, 6, 8),
    "tiny-ov-draft": (16, 0.6, 1.1),
    "tiny-qwen": (15, 6, 8),
    "tiny-qwen-draft": (15, 0.6, 1.1),
    "tiny-qwen3": (15, 1.5, 1.8),
    "tiny-hybrid": (15, 1.5, 1.8),
}
"""Tokens of a frame, and the fewest and most parameters, in millions."""


def test_sizes():
    """All weights fit in 40 megabytes."""
    counts = {name: sum(p.numel() for p in build_model(spec).parameters()) for name, spec in SPECS.items()}
    assert counts.keys() == SIZES.keys() and 2 * sum(counts.values()) < 40e6
    for name, (tokens, fewest, most) in SIZES.items():
        assert SPECS[name].tokens_per_frame == tokens and fewest < counts[name] / 1e6 < most, name


@pytest.mark.parametrize("name", ["tiny-ov-draft", "tiny-qwen-draft", "tiny-qwen3", "tiny-hybrid"])
def test_exported_folder_loads_in_stock_classes(name, tmp_path):
    spec = SPECS[name]
    model = build_model(spec, seed=3)
    export(model, spec, words(), tmp_path, "# card\n")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor.bfloat16()), key
    assert loaded.generation_config.eos_token_id == SPECIAL.index("<|im_end|>")
    text = "What colour was the star?"
    assert _ids(AutoTokenizer.from_pretrained(tmp_path), text) == _ids(
        build_tokenizer(words(), spec.model_type), text
    )
    for file in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        assert json.loads((tmp_path / file).read_text())["processor_class"].endswith("Processor")


@pytest.mark.parametrize("name", ["tiny-qwen", "tiny-qwen3", "tiny-hybrid"])
def test_a_processed_video_is_what_training_shows(name, random_folder):
    from mmaccel_lab.tiny import tower
    from mmaccel_lab.train import pixels

    pytest.importorskip("torchvision", reason="Qwen3-VL's processor needs torchvision")
    spec, table = SPECS[name], world.World.generate(3, 5).table()
    dialect = Dialect(spec)
    shown = world.render(table, pixels.NATIVE_HEIGHT, pixels.NATIVE_WIDTH)
    question = "what colour was the star ?"
    inputs = mmaccel.load_processor(random_folder(name)).chat(question, videos=shown, fps=1.0)
    laid, *_ = dialect.lay(dialect.spans([("video", 0, 5)]), 1.0)
    assert inputs["input_ids"][0].tolist() == [*laid, *dialect.encode(question), *dialect.closing]
    ours = tower.patchify(pixels.draw(table, spec)).flatten(0, 1)
    # The 8-bit resize uses integer weights: single grey levels differ.
    assert (inputs["pixel_values_videos"] - ours).abs().mean() < 0.1 / 255 / min(spec.std)


def test_missing_weights_and_names_are_told(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="choose one of tiny-ov"):
        tiny_model_folder("tiny")
    monkeypatch.setattr(tiny, "ROOT", tmp_path)
    with pytest.raises(ModelError, match="make train"):
        tiny_model_folder("tiny-ov")
    with pytest.raises(MmaccelError, match="did you mean 'tiny-ov'"):
        mmaccel.load_processor("tiny-vo")


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"name": "tiny-vo"}, "did you mean 'tiny-ov'?"),
        ({"device": "cuda:99"}, "device: cuda:99 is not there"),
        ({"device": "gpu"}, "device: 'gpu' is not a device"),
        ({"devices": "cpu"}, "devices: 'cpu' is a single device; give a list"),
        ({"devices": ["cpu", "cuda:99"]}, "devices: cuda:99 is not there"),
        ({"dtype": "fp16"}, "unknown dtype 'fp16'"),
    ],
)
def test_what_cannot_be_loaded_is_told_before_weights_are_read(choices, words, monkeypatch):
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", None)
    assert words in refusal(lambda: mmaccel.load_model(**{"name": "tiny-ov", **choices}))
