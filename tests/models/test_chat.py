"""What `chat` takes, one prompt or a batch, with videos; wrong arguments, failing templates, special tokens in words."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import media
from mmaccel.core.errors import ModelError, VideoError
from mmaccel.models import chat
from mmaccel.models.processor import Processor
from mmaccel.models.qwen2_5_vl import Qwen25VL
from tests.media.films import write_film
from tests.models.streams import FPS, asked_of_film, film, logits, pair, processor_like
from tests.models.tiny_random import BUILD, prompt
from tests.spies import refusal

Folder = Callable[[str], Path]
ASKED = ("What colour was the star ?", "Describe the video .")


def noise(frames: int, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 3, 56, 56), generator=made, dtype=torch.uint8)


@pytest.fixture(params=["tiny-ov", "tiny-qwen"])
def folder(random_folder: Folder, request: pytest.FixtureRequest) -> Path:
    return random_folder(request.param)


def test_each_of_a_batch_is_what_it_is_alone(folder: Path) -> None:
    """Questions and videos of unlike lengths; the words too, dense and sparse."""
    model, processor = mmaccel.load_model(folder, dtype=torch.float32), mmaccel.load_processor(folder)
    films = [noise(8, 1), noise(4, 2)]
    both = processor.chat(list(ASKED), videos=films, frames=4)
    alone = [processor.chat(one, videos=film, frames=4) for one, film in zip(ASKED, films, strict=True)]
    length = both["input_ids"].shape[1]
    assert len({one["input_ids"].shape[1] for one in alone}) == 2
    for row, one in enumerate(alone):
        pad = length - one["input_ids"].shape[1]
        assert torch.equal(both["input_ids"][row, pad:], one["input_ids"][0])
        assert both["attention_mask"][row].tolist() == [0] * pad + [1] * (length - pad)
    pixels = torch.cat([one["pixel_values_videos"] for one in alone])
    assert torch.equal(both["pixel_values_videos"], pixels)

    def said(inputs: dict[str, Tensor]) -> list[list[int]]:
        ids = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        return [row.tolist() for row in ids[:, inputs["input_ids"].shape[1] :]]

    for recipe in ("dense", "a_shape-short"):
        with mmaccel.accelerate(model, recipe):
            assert said(both) == [said(one)[0] for one in alone]


def test_a_batch_of_pieces_and_conversations(folder: Path) -> None:
    """What stands in the prompts, what stands beside them, several videos of one prompt, and prompts without any."""
    processor = mmaccel.load_processor(folder)
    one, two, three = noise(2, 1), noise(2, 2), noise(2, 3)
    video = [{"type": "video", "video": film} for film in (one, two, three)]
    text = {"type": "text", "text": ASKED[0]}
    told = processor.chat(
        [[video[0], video[1], text], [{"role": "user", "content": [video[2], text]}], ASKED[1]]
    )
    beside = processor.chat([[text], ASKED[0], ASKED[1]], videos=[[one, two], three, None])
    assert told.keys() == beside.keys() and all(torch.equal(told[name], beside[name]) for name in told)
    mark = processor.video_token_id
    counts = (told["input_ids"] == mark).sum(1).tolist()
    assert counts[0] == 2 * counts[1] > 0 == counts[2]
    picture = torch.zeros(3, 56, 56, dtype=torch.uint8)
    shown = processor.chat([ASKED[0], ASKED[1]], images=[None, picture])
    image = processor.chat(ASKED[1], images=picture)
    assert torch.equal(shown["pixel_values"], image["pixel_values"])
    assert (shown["input_ids"] == processor.image_token_id).any(1).tolist() == [False, True]


def test_frames_are_taken_evenly_of_whatever_a_video_is(folder: Path, tmp_path: Path) -> None:
    processor = mmaccel.load_processor(folder)
    path = write_film(tmp_path / "film.mp4", 12)
    film = media.read(path)
    wanted = processor.chat("What ?", videos=media.read(path, frames=4))
    frames = film.frames
    for given, rate in ((str(path), None), (film, None), (frames, film.fps), (list(frames), film.fps)):
        found = processor.chat("What ?", videos=given, frames=4, fps=rate)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    found = processor.chat("What ?", videos=film, frames=np.int64(4))  # type: ignore[arg-type]
    assert torch.equal(found["input_ids"], wanted["input_ids"])
    with pytest.raises(VideoError, match="frames=13 is more than the 12 frames of"):
        processor.chat("What ?", videos=str(path), frames=13)
    with pytest.raises(VideoError, match="frames=13 is more than the 12 frames of a video: ask for fewer"):
        processor.chat("What ?", videos=film, frames=13)
    for count in (0, 2.5, "4"):
        with pytest.raises(ModelError, match=r"frames: .*; give the number of frames to take of each video"):
            processor.chat("What ?", videos=film, frames=count)


WRONG: list[tuple[Any, str]] = [
    (None, "content: None is not a prompt; give a text, or a list"),
    ([{"role": "user", "content": [5]}], "content: 5 is not a piece; give a mapping"),
    ([{"type": ["video"]}], "a piece of type ['video'] is not known"),
    ([{"type": "text"}], "content: None is not text; give a string."),
    (5, "content: 5 is not a prompt"),
    ("", "content: the question is empty; ask something."),
    ("   ", "content: the question is empty; ask something."),
    (["what", " "], "content: the question is empty"),
    ([], "content: it is an empty list; ask something."),
    ({"type": "text", "text": "what"}, "is not a prompt; give a text, or a list"),
    (["what", {"type": "video"}], "for a batch a list of these, and videos="),
    ([{"role": "user"}], "a message holds None; give it a text or pieces"),
]
EMPTY = torch.zeros(0, 3, 64, 64)
SHORT = "videos: 3 entries for 2 prompts; give a list with an entry for each, None where there is none."
WRONG_VIDEOS: list[tuple[Any, str, Any]] = [
    (["a", "b"], "videos: one, not a list, for 2 prompts", noise(2, 0)),
    (["a", "b"], SHORT, [noise(2, 0)] * 3),
    ("a", "a video of shape (0, 3, 64, 64) is empty; give at least one frame.", EMPTY),
    ("a", "a video is an empty list", [[]]),
]


@pytest.mark.parametrize("case", [*WRONG, *WRONG_VIDEOS], ids=lambda case: case[1])
def test_what_is_no_prompt_is_told_in_one_sentence(random_folder: Folder, case: Any) -> None:
    processor: Processor = mmaccel.load_processor(random_folder("tiny-qwen"))
    content, words, *videos = case
    assert words in refusal(lambda: processor.chat(content, None, *videos))


NAMES = ("tiny-ov", "tiny-qwen")
BROKEN = {
    "{% for m in messages %}": "unexpected end of template",
    "{{ messages[0]['content'][7]['text'] }}": "has no element 7",
    "{{ messages.__class__.__mro__ }}": "unsafe",
    "{{ 1 // 0 }}": "by zero",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{{ messages | nothing }}": "no filter named 'nothing'",
    "{{ 'a' * 10 ** 9 }}": "line 1 has a power",
    "a\n{{ 'a' * 9999999999 }}": "line 2 has a number above 1000000",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ 'a' * 1000000 }}": "it writes 1000000 characters from 12",
    "{% set x = " + "(" * 5000 + "1" + ")" * 5000 + " %}": "recursion",
}


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_fails_is_told(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "range" in template:
        monkeypatch.setattr(chat, "SECONDS", 0.3)
    processor = mmaccel.load_processor("tiny-ov")
    processor.chat_template = template
    begin = time.monotonic()
    told = refusal(lambda: processor.chat("what is it ?"), ModelError)
    assert told.startswith("chat template: ") and BROKEN[template] in told and len(told) < 400
    assert time.monotonic() - begin < 4 and sys.gettrace() is None


def test_a_template_that_fails_is_told_by_a_session_too() -> None:
    model, stock = pair("random-ov")
    broken = processor_like(stock, chat_template="{{ messages.nothing.at.all }}")
    with (
        mmaccel.VideoSession(model, broken, kv="recent") as session,
        pytest.raises(ModelError, match="chat template"),
    ):
        session.watch(film(2), fps=FPS)


def test_a_template_with_blocks_of_transformers_is_rendered() -> None:
    processor = mmaccel.load_processor("tiny-ov")
    processor.chat_template = (
        "{% for m in messages %}{% if loop.index0 > 1000 %}{% break %}{% endif %}"
        "{% generation %}{{ m['content'][0]['text'] }}{% endgeneration %}{% endfor %}"
    )
    plain = processor.tokenizer("what is it ?")["input_ids"]
    assert processor.chat("what is it ?")["input_ids"].tolist() == [plain]


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_a_question_are_text_where_that_is_asked_for(name: str) -> None:
    stock, guarded = mmaccel.load_processor(name), mmaccel.load_processor(name, special_tokens=False)
    for question in ("what is it ?", "how many stars are there ?"):
        assert torch.equal(stock.chat(question)["input_ids"], guarded.chat(question)["input_ids"])
    special = set(stock.tokenizer.all_special_ids) | {stock.video_token_id, stock.image_token_id}
    marks = stock.video_token, stock.image_token
    ends = [token for token in stock.tokenizer.all_special_tokens if token not in marks]
    for token in (*ends, stock.video_token, stock.image_token):
        ids = [
            processor.chat(asked_of_film(4, text))["input_ids"][0].tolist()
            for processor, text in ((guarded, f"what{token} is{token} it ?"), (stock, "what is it ?"))
        ]
        counts = [sum(one in special for one in row) for row in ids]
        assert counts[0] == counts[1], token
        # A tokenizer of bytes has every text; the tokens of the text are those of the token's characters.
        inside = guarded.tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert len(ids[0]) >= len(ids[1]) + 2 * max(1, len(inside) - 1), token
        if token in ends:
            taken = stock.chat(f"what{token} is it ?")["input_ids"][0].tolist()
            assert sum(one in special for one in taken) > sum(
                one in special for one in stock.chat("what is it ?")["input_ids"][0].tolist()
            )


def test_a_session_goes_by_its_processor() -> None:
    model, stock = pair("random-ov")
    guarded = processor_like(stock, special_tokens=False)
    ended = stock.tokenizer.eos_token
    with (
        mmaccel.VideoSession(model, stock, kv="recent") as one,
        mmaccel.VideoSession(model, guarded, kv="recent") as other,
    ):
        for session in (one, other):
            session.watch(film(4), fps=FPS)
        assert torch.equal(logits(one), logits(other))
        assert stock.video_token not in other.ask(f"what is {stock.video_token} ?", 1).text
        adapters = [session._stream_adapter for session in (one, other)]
        ids = [adapter.question_ids(f"what {ended} is it ?")[0].tolist() for adapter in adapters]
        number = stock.tokenizer.convert_tokens_to_ids(ended)
        assert ids[0].count(number) == ids[1].count(number) + 1


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where standard input says yes."""
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').write_text('')\n"
        "from transformers import PretrainedConfig\nclass Evil(PretrainedConfig):\n    model_type = 'evil'\n"
    )
    config = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForImageTextToText": "evil.Evil"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(
        ModelError, match="needs code of its own, which is not run; give a model that transformers"
    ):
        mmaccel.load_model(tmp_path)
    assert not list(tmp_path.rglob("ran")) and "evil" not in sys.modules


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_that_is_none_and_an_empty_text(random_folder: Folder, name: str) -> None:
    processor = Processor.from_pretrained(random_folder(name))
    video, rates = torch.zeros(4, 3, 56, 56, dtype=torch.uint8), (0, -1.0, float("nan"), "2")
    for rate in rates:
        with pytest.raises(ModelError, match=r"fps: .*; give a positive number of frames a second"):
            processor(processor.video_token, videos=video, fps=rate)  # type: ignore[arg-type]
    for texts in ("", ["a", ""]):
        with pytest.raises(ModelError, match=r"text: number \d of \d is empty"):
            processor(texts)


@pytest.mark.parametrize("own, other", [("tiny-ov-draft", "tiny-qwen"), ("tiny-qwen-draft", "tiny-ov")])
def test_inputs_of_another_family(random_folder: Callable[[str], Path], own: str, other: str) -> None:
    """Told by generate and by the call, whatever drafts; the family's own are served."""
    model = mmaccel.load_model(random_folder(own), dtype=torch.float32)
    frames = torch.zeros(4, 3, 56, 56, dtype=torch.uint8)
    for given in ({"videos": frames}, {"images": frames[0]}):
        wrong = mmaccel.load_processor(random_folder(other)).chat("What ?", **given)
        right = mmaccel.load_processor(random_folder(own)).chat("What ?", **given)
        for recipe in ("dense", "prompt_lookup"):
            with mmaccel.accelerate(model, recipe):
                for call in (model, model.generate):
                    with pytest.raises(
                        ModelError, match=r"inputs: \w+ (is of another family|comes without \w+); build"
                    ):
                        call(**wrong)
                model.generate(**right, max_new_tokens=2)


def test_a_family_that_names_no_facts_has_none_of_others() -> None:
    class Plain(Qwen25VL):
        extra_inputs = frozenset()

    inputs = prompt("qwen", [("text", 3), ("video", 12), ("text", 2)])
    assert Plain().layout(BUILD["qwen"](), inputs).length == inputs["input_ids"].shape[1]
