"""transformers' own processor: chosen where it can run, given to sessions and helpers, and ours its equal bit for bit."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.cli import answer
from mmaccel.core.errors import ModelError
from mmaccel.models import stock
from mmaccel.models.processor import Processor
from tests.models.streams import QUESTION, film, pair
from tests.models.test_processor import FAMILIES, noise, same, write_model

pytest.importorskip("torchvision", reason="transformers' own processors need torchvision")
T = pytest.importorskip("transformers")


@pytest.fixture(params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", str(request.param))


def both(folder: Path, **how: Any) -> tuple[Any, Processor]:
    return mmaccel.load_processor(folder, **how), Processor.from_pretrained(folder, **how)


def test_stock_code_is_taken_where_it_runs_and_ours_where_it_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = mmaccel.load_processor(folder)
    assert isinstance(chosen, stock.StockProcessor) and isinstance(chosen.stock, T.ProcessorMixin)
    monkeypatch.setattr(stock, "find_spec", lambda name: None)
    assert type(mmaccel.load_processor(folder)) is Processor


@pytest.mark.filterwarnings("ignore:the text has 1 placeholders")
@pytest.mark.parametrize("special", [True, False])
def test_ours_gives_what_stock_gives(folder: Path, special: bool) -> None:
    """Prompts of every kind: also with placeholders and special tokens in what the user writes."""
    theirs, ours = both(folder, special_tokens=special)
    video, image = noise(5, 3, 90, 130), noise(3, 70, 150)
    named = f"what {ours.video_token} {ours.image_token} <|im_end|> colour"
    for question in ("what colour", named):
        for given in (
            {"videos": video, "fps": 2.0},
            {"videos": video, "images": image},
            {"images": image},
            {},
        ):
            same(theirs.chat(question, **given), ours.chat(question, **given))
    two = ["what colour", "the red star was"]
    low = {"videos": [video, video], "dtype": torch.bfloat16, "padding_side": "right"}
    made = ours.chat(two, **low)
    same(theirs.chat(two, **low), made)
    assert made["pixel_values_videos"].dtype == torch.bfloat16
    same(theirs.pixels(video, dtype=torch.bfloat16), ours.pixels(video, dtype=torch.bfloat16))
    content = [{"type": "video"}, {"type": "text", "text": "what"}]
    assert theirs.template_ids(content) == ours.template_ids(content)


def test_what_stock_refuses_is_one_sentence(tmp_path: Path) -> None:
    processor = mmaccel.load_processor(write_model(tmp_path / "model", "llava_onevision"))
    with pytest.raises(ModelError, match=r"LlavaOnevisionProcessor makes no inputs of this \(.*frames="):
        processor(["<video>", "<video>"], videos=[noise(2, 3, 9, 9), noise(1, 3, 9, 9)])
    with pytest.raises(ModelError, match="has 0 placeholders"):
        processor("what", videos=noise(2, 3, 9, 9))


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_a_session_and_the_helpers_take_stock_itself(shipped: Any, name: str) -> None:
    model, own = (
        mmaccel.load_model(shipped(name), torch.float32),
        Processor.from_pretrained(stock.resolve(name)),
    )
    theirs = T.AutoProcessor.from_pretrained(stock.resolve(name))
    content = [{"type": "video", "video": film(12)}, {"type": "text", "text": QUESTION}]
    inputs = answer.prompt(theirs, content, model)
    same(inputs, answer.prompt(own, content, model))
    said = answer.ask(model, theirs, inputs, max_new_tokens=4)
    assert said.text == answer.ask(model, own, inputs, max_new_tokens=4).text != ""
    told = []
    for processor in (theirs, own):
        with mmaccel.VideoSession(model, processor, "rekv") as session:
            session.watch(film(12), fps=1.0)
            told.append(session.ask(QUESTION, max_new_tokens=4).text)
    assert told[0] == told[1] != ""
    assert type(pickle.loads(pickle.dumps(mmaccel.load_processor(theirs)))) is stock.StockProcessor


def test_a_session_refuses_another_models_processor_and_what_is_none(shipped: Any) -> None:
    model, _ = pair("random-ov")
    with pytest.raises(
        ModelError, match="it is one of 'qwen2_5_vl' and the model is not; load the model's own"
    ):
        mmaccel.VideoSession(model, T.AutoProcessor.from_pretrained(stock.resolve(shipped("tiny-qwen"))))
    with pytest.raises(ModelError, match=r"processor: 7 is none; give the model's own"):
        mmaccel.VideoSession(model, 7)


def test_a_family_needs_no_processor_of_ours(shipped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a style of its model type a stock processor makes the same prompts."""
    known = mmaccel.load_processor(shipped("tiny-qwen"))
    monkeypatch.setattr(stock, "styles", dict)
    bare = mmaccel.load_processor("tiny-qwen")
    assert known.style is not None and bare.style is None
    same(bare.chat(QUESTION, videos=film(6), fps=2.0), known.chat(QUESTION, videos=film(6), fps=2.0))


def test_a_build_of_torchvision_for_cuda_imports_beside_a_torch_for_cpus() -> None:
    assert find_spec("torchvision") is not None
    import torchvision  # conftest imports mmaccel first, which declares what it registers for

    assert torchvision.__version__


def test_a_processor_that_is_there_can_still_be_guarded() -> None:
    ours = mmaccel.load_processor("tiny-qwen")
    guarded = mmaccel.load_processor(ours, special_tokens=False)
    assert ours.special_tokens and not guarded.special_tokens
    assert mmaccel.load_processor(guarded) is guarded
