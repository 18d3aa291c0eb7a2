"""What `chat` takes: one prompt, or a batch of them with a video each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import media
from mmaccel.core.errors import MmaccelError, ModelError, VideoError
from mmaccel.models.processor import Processor
from tests.media.films import write_film

pytestmark = pytest.mark.in_turn("folder", 1)

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
    for given, rate in (
        (str(path), None),
        (film, None),
        (film.frames, film.fps),
        (list(film.frames), film.fps),
    ):
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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"content": None}, "content: None is not a prompt; give a text, or a list"),
    "a piece that is none": (
        {"content": [{"role": "user", "content": [5]}]},
        "content: 5 is not a piece; give a mapping",
    ),
    "a type that is none": ({"content": [{"type": ["video"]}]}, "a piece of type ['video'] is not known"),
    "a text that is none": ({"content": [{"type": "text"}]}, "content: None is not text; give a string."),
    "a number": ({"content": 5}, "content: 5 is not a prompt"),
    "an empty text": ({"content": ""}, "content: the question is empty; ask something."),
    "a blank text": ({"content": "   "}, "content: the question is empty; ask something."),
    "a blank one of several": ({"content": ["what", " "]}, "content: the question is empty"),
    "an empty list": ({"content": []}, "content: it is an empty list; ask something."),
    "a piece of a list": (
        {"content": {"type": "text", "text": "what"}},
        "is not a prompt; give a text, or a list",
    ),
    "texts among pieces": (
        {"content": ["what", {"type": "video"}]},
        "for a batch a list of these, and videos=",
    ),
    "a message of nothing": (
        {"content": [{"role": "user"}]},
        "a message holds None; give it a text or pieces",
    ),
    "one video for two": (
        {"content": ["a", "b"], "videos": noise(2, 0)},
        "videos: one, not a list, for 2 prompts",
    ),
    "three for two": (
        {"content": ["a", "b"], "videos": [noise(2, 0)] * 3},
        "videos: 3 entries for 2 prompts; give a list with an entry for each, None where there is none.",
    ),
    "a video without frames": (
        {"content": "a", "videos": torch.zeros(0, 3, 64, 64)},
        "a video of shape (0, 3, 64, 64) is empty; give at least one frame.",
    ),
    "an empty list of frames": ({"content": "a", "videos": [[]]}, "a video is an empty list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_prompt_is_told_in_one_sentence(random_folder: Folder, name: str) -> None:
    processor: Processor = mmaccel.load_processor(random_folder("tiny-qwen"))
    given, words = WRONG[name]
    with pytest.raises(MmaccelError) as error:
        processor.chat(**given)
    assert words in str(error.value) and "\n" not in str(error.value)
