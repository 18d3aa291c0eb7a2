"""The processor of both families: tokens, pixels, files, chat, placeholders that a text names, and what it refuses."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import media
from mmaccel.core.errors import MmaccelWarning, ModelError, VideoError
from mmaccel.models.processor import Processor
from mmaccel_lab.tiny.configs import SPECS, build_model
from mmaccel_lab.tiny.package import processor_files
from mmaccel_lab.tiny.tokenizer import PLACEHOLDERS, build_tokenizer
from tests.media.films import write_film

T = pytest.importorskip("transformers")

WORDS = ["what", "colour", "was", "the", "star", "?", "red", "."]
FAMILIES = {"qwen2_5_vl": "tiny-qwen", "llava_onevision": "tiny-ov"}
MODELS: dict[str, Any] = {}


def model_of(family: str) -> Any:
    if family not in MODELS:
        MODELS[family] = build_model(SPECS[FAMILIES[family]])
    return MODELS[family]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """A folder with everything but weights."""
    folder.mkdir(exist_ok=True)
    model_of(family).config.save_pretrained(folder)
    build_tokenizer(WORDS, family).save_pretrained(folder)
    for name, content in processor_files(SPECS[FAMILIES[family]]).items():
        (folder / name).write_text(json.dumps({**content, **changes.get(name, {})}))
    return folder


SHIPPED = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
"""preprocessor_config.json of Qwen2.5-VL-7B-Instruct, the one file of settings that it has."""


def shipped_qwen(folder: Path) -> Path:
    write_model(folder, "qwen2_5_vl")
    for name in ("processor_config.json", "video_preprocessor_config.json"):
        (folder / name).unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(SHIPPED))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["temporal_patch_size"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, family: str) -> Path:
    return write_model(tmp_path / "model", family)


@pytest.fixture
def processor(folder: Path) -> Processor:
    return Processor.from_pretrained(folder)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


def test_a_path_is_sampled_and_a_video_brings_its_rate(
    processor: Processor, family: str, tmp_path: Path
) -> None:
    path = write_film(tmp_path / "film.mp4", 40)
    mark = PLACEHOLDERS[family]["video"]
    inputs = processor(mark, videos=path, fps=2)
    video = media.read(path, fps=2)
    same(inputs, processor(mark, videos=video))
    same(inputs, processor(mark, videos=video.frames, fps=2.0))
    same(
        inputs,
        processor.chat([{"type": "video", "path": str(path)}], fps=2)
        | {k: x for k, x in inputs.items() if k in ("input_ids", "attention_mask", "mm_token_type_ids")},
    )
    if family == "qwen2_5_vl":
        assert inputs["second_per_grid_ts"].tolist() == [0.5]
        both = processor(mark * 2, videos=[video, video.frames], fps=[None, 4.0])
        assert both["second_per_grid_ts"].tolist() == [0.5, 0.25]
        assert processor(mark, videos=video.frames)["second_per_grid_ts"].tolist() == pytest.approx([1 / 24])


def test_videos_may_be_nested_or_lists_of_images(processor: Processor, family: str) -> None:
    mark = PLACEHOLDERS[family]["video"]
    one, two = noise(2, 3, 84, 140, seed=1), noise(2, 3, 84, 140, seed=2)
    wanted = processor([mark, mark], videos=[one, two])
    for given in ([[one], [two]], [list(one), list(two)], (one, [two]), [[list(one)], [list(two)]]):
        same(processor([mark, mark], videos=given), wanted)
    same(processor(mark, videos=list(one)), processor(mark, videos=one))
    same(processor.chat("what", videos=list(one)), processor.chat("what", videos=one))


def test_chat_renders_pieces_in_order(processor: Processor, family: str) -> None:
    one, two, image = noise(2, 3, 84, 140, seed=1), noise(2, 3, 84, 140, seed=2), noise(3, 112, 112)
    pieces = [
        {"type": "text", "text": "Red."},
        {"type": "video", "video": one},
        {"type": "image", "image": image},
        {"type": "text", "text": "What colour was the star?"},
        {"type": "video", "video": two},
    ]
    video, picture = PLACEHOLDERS[family]["video"], PLACEHOLDERS[family]["image"]
    text = (
        f"<|im_start|>user\nRed.\n{video}\n{picture}\nWhat colour was the star?\n{video}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    wanted = processor(text, images=[[image]], videos=[one, two])
    same(processor.chat(pieces), wanted)
    same(processor.chat([{"role": "user", "content": pieces}]), wanted)
    told = processor.chat("What colour was the star?", videos=one)
    same(told, processor.chat([pieces[1], pieces[3]]))
    talk = [
        {"role": "user", "content": [{"type": "video", "video": one}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "the star?"},
    ]
    turns = f"<|im_start|>user\n{video}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"
    turns += "<|im_start|>user\nthe star?<|im_end|>\n<|im_start|>assistant\n"
    same(processor.chat(talk), processor(turns, videos=one))


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|endoftext|>"], ids=["cut off", "ended", "stopped"])
def test_the_next_turn_follows_the_ids_of_the_answer(processor: Processor, family: str, end: str) -> None:
    """As in the whole conversation, though no video is given; also with placeholders and special tokens in the words."""
    named, own = PLACEHOLDERS[family]["video"], "<|vision_end|>" if end else ""
    talk: list[Any] = [{"role": "user", "content": [{"type": "video", "video": noise(2, 3, 84, 140)}]}]
    ids = processor.chat(talk)["input_ids"]
    for answer, question in (("red", "what colour ?"), (f"the star{own}", f"what was {named} ?")):
        said = processor.tokenizer(answer + end, add_special_tokens=False, return_tensors="pt")["input_ids"]
        ids = processor.next_turn(torch.cat([ids, said], 1), question)
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        assert torch.equal(ids, processor.chat(talk)["input_ids"])


def test_a_processor_of_images_alone_makes_the_next_turn(processor: Processor) -> None:
    """As stock ones do that have no token for videos."""
    ids = torch.cat([processor.chat("what ?")["input_ids"], torch.tensor([[60, 2]])], 1)
    want = processor.next_turn(ids, "what ?")
    processor.video_token = None  # type: ignore[assignment]
    assert torch.equal(processor.next_turn(ids, "what ?"), want)


def test_a_next_turn_that_cannot_be_is_told(processor: Processor) -> None:
    ids = processor.chat("what ?")["input_ids"]
    for given, question, told in (
        (ids.expand(2, -1), "what ?", r"^ids: they are \[2, \d+\]; give those of one conversation"),
        (ids, " ", "^question: it is empty; ask something"),
    ):
        with pytest.raises(ModelError, match=told):
            processor.next_turn(given, question)
    processor.chat_template = "{{- messages[-1]['content'][0]['text'] }}"
    with pytest.raises(ModelError, match=r"^chat template: it leaves answers out; write"):
        processor.next_turn(ids, "what ?")


def test_decode(processor: Processor) -> None:
    ids = processor("what colour was the star ?")["input_ids"]
    assert processor.decode(ids[0]) == "what colour was the star ?"
    assert processor.decode(ids) == processor.decode(ids.tolist()) == ["what colour was the star ?"]
    assert (
        processor.decode([*ids[0].tolist(), processor.tokenizer.eos_token_id]) == "what colour was the star ?"
    )


def test_save_and_read_again(processor: Processor, family: str, folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    processor.save_pretrained(again)
    (again / "config.json").write_text((folder / "config.json").read_text())
    back = Processor.from_pretrained(again)
    assert (back.image, back.video, back.extra) == (processor.image, processor.video, processor.extra)
    pieces = [{"type": "video", "video": noise(2, 3, 84, 140)}, {"type": "image", "image": noise(3, 60, 60)}]
    same(back.chat(pieces), processor.chat(pieces))


def test_layouts_on_disk_mean_the_same(tmp_path: Path, family: str) -> None:
    old = write_model(tmp_path / "old", family)
    new = write_model(tmp_path / "new", family)
    whole = json.loads((new / "processor_config.json").read_text())
    for part, name in (("image", "preprocessor_config.json"), ("video", "video_preprocessor_config.json")):
        whole[f"{part}_processor"] = json.loads((new / name).read_text())
        (new / name).unlink()
    (new / "processor_config.json").write_text(json.dumps(whole))
    template = (new / "chat_template.jinja").read_text()
    (new / "chat_template.jinja").unlink()
    (new / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    one, other = Processor.from_pretrained(old), Processor.from_pretrained(new)
    assert (one.image, one.video, one.extra) == (other.image, other.video, other.extra)
    assert one.chat_template == other.chat_template


def test_the_oldest_layout_names_pixel_budgets_and_serves_videos_with_the_image_file(tmp_path: Path) -> None:
    processor = Processor.from_pretrained(shipped_qwen(tmp_path / "model"))
    budget = {"shortest_edge": 3136, "longest_edge": 12845056}
    assert processor.video.size == processor.image.size == budget
    assert processor.video.temporal_patch_size == 2


def test_what_the_files_leave_open_comes_from_config_json(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llava", "llava_onevision")
    (folder / "processor_config.json").unlink()
    assert Processor.from_pretrained(folder).extra["num_image_tokens"] == 64
    folder = write_model(tmp_path / "qwen", "qwen2_5_vl")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text())
        del settings["temporal_patch_size"]
        (folder / name).write_text(json.dumps(settings))
    assert Processor.from_pretrained(folder).video.temporal_patch_size == 1


def raises(told: str) -> Any:
    return pytest.raises(ModelError, match=told)


def test_wrong_calls_are_told(processor: Processor, family: str) -> None:
    mark, video = PLACEHOLDERS[family]["video"], noise(2, 3, 84, 140)
    both = {"videos": video, "fps": [1, 2]}
    for told, call in (
        (r"the text has 0 placeholders '.*' for 1 videos: write one for each\.", lambda: processor("what", videos=video)),
        (r"the text has 2 placeholders '.*' for 1 videos", lambda: processor([mark, mark], videos=video)),
        ("text is an empty list: give at least one text", lambda: processor([])),
        (r"fps has 2 entries for 1 videos: give one number, or one a video\.", lambda: processor(mark, **both)),
        ("padding_side='up' must be 'left' or 'right'", lambda: processor(mark, videos=video, padding_side="up")),
        ("a piece of type 'sound' is not known", lambda: processor.chat([{"type": "sound", "sound": 1}])),
        ("a piece of type 'video' holds no video: give it under 'video'", lambda: processor.chat([{"type": "video"}])),
        (
            "images and videos of a conversation belong in its messages",
            lambda: processor.chat([{"role": "user", "content": "what"}], videos=video),
        ),
    ):  # fmt: skip
        with raises(told):
            call()
    with pytest.raises(VideoError, match=r"there is no file none\.mp4"):
        processor(mark, videos="none.mp4")
    processor.chat_template = None
    with raises(r"has no chat template: add chat_template\.jinja"):
        processor.chat("what")
    processor.tokenizer.pad_token = None
    with raises("the tokenizer has no pad token"):
        processor(["what", "what colour"])


def test_llava_videos_of_unequal_length_make_no_batch(tmp_path: Path) -> None:
    processor = Processor.from_pretrained(write_model(tmp_path / "model", "llava_onevision"))
    with raises(r"videos of 1 and 2 frames make no batch on this model: give frames=1, so many of each\."):
        processor(["<video>", "<video>"], videos=[noise(2, 3, 9, 9), noise(1, 3, 9, 9)])


def test_broken_folders_are_told(tmp_path: Path) -> None:
    with raises("no/such/folder is not a folder: name the folder of a saved model"):
        Processor.from_pretrained("no/such/folder")
    with raises(r"has no config\.json: name the folder"):
        Processor.from_pretrained(tmp_path)

    config = json.loads((write_model(tmp_path / "whole", "qwen2_5_vl") / "config.json").read_text())
    types = "one of llava_onevision, qwen2_5_vl, qwen2_vl, which mmaccel's own"
    for number, (gone, written, told) in enumerate(
        (
            ("", "{", r"config\.json is not valid JSON .*; save it again"),
            (
                "*processor_config.json",
                "",
                r"has neither processor_config\.json nor preprocessor_config\.json",
            ),
            ("tokenizer*", "", r"has no tokenizer\.json: save the tokenizer there\."),
            ("", json.dumps({**config, "model_type": "bert"}), f"model type 'bert' is not {types}"),
            (
                *("", json.dumps({**config, "video_token_id": 3})),
                r"'<\|video_pad\|>' is token 8 of the tokenizer, but video_token_id is 3 in config\.json",
            ),
        )
    ):
        folder = write_model(tmp_path / f"{number}", "qwen2_5_vl")
        for path in folder.glob(gone) if gone else ():
            path.unlink()
        if written:
            (folder / "config.json").write_text(written)
        with raises(told):
            Processor.from_pretrained(folder)


@pytest.mark.parametrize(
    "video",
    [
        {},
        {"image_mean": [0.3] * 3, "resample": 2},
        {"temporal_patch_size": 2, "cap_pixels_per_frame": True, "max_video_tokens": 80},
    ],
)
def test_equal_to_stock_bit_for_bit(family: str, video: dict[str, Any], tmp_path: Path) -> None:
    if family == "llava_onevision" and "temporal_patch_size" in video:
        video = {"size": {"height": 56, "width": 70}}
    pytest.importorskip("torchvision", reason="transformers' own processors need torchvision")
    folder = write_model(tmp_path / "model", family, **{"video_preprocessor_config.json": video})
    stock, processor = T.AutoProcessor.from_pretrained(folder), Processor.from_pretrained(folder)
    mark, picture = PLACEHOLDERS[family]["video"], PLACEHOLDERS[family]["image"]
    texts = [f"{mark}what {picture}", f"red {picture}{picture} star {mark}{mark} colour of the"]
    videos = [noise(4, 3, 96, 128, seed=1), noise(4, 3, 200, 90, seed=2), noise(4, 3, 96, 128, seed=3)]
    images = [noise(3, 70, 150), noise(3, 233, 90), noise(3, 112, 112)]
    metadata = [{"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}] * 3
    for pictures in (images, [images[:1], images[1:]]):
        wanted = stock(
            text=texts, images=pictures, videos=videos, video_metadata=metadata, return_tensors="pt",
            padding=True, padding_side="left",
        )  # fmt: skip
        wanted.pop("token_type_ids", None)
        same(processor(texts, images=pictures, videos=videos, fps=2.0), dict(wanted))


def test_a_placeholder_without_its_visual_is_a_word(processor: Processor, family: str) -> None:
    for kind, mark in PLACEHOLDERS[family].items():
        with pytest.warns(MmaccelWarning, match=f"1 placeholders .* no {kind} is given"):
            got = processor(f"what is {mark}")
        assert got["input_ids"][0].tolist() == processor.tokenizer(f"what is {mark}")["input_ids"]


def test_a_question_may_name_a_placeholder(processor: Processor, family: str) -> None:
    """Beside a video it is text, in as many tokens as text takes; the video keeps its one place."""
    marks = PLACEHOLDERS[family]
    video, image = noise(2, 3, 84, 140), noise(3, 84, 140)
    both = f"what is {marks['video']} and {marks['image']} here"
    plain = processor.chat("what is and here", videos=video, images=image)
    with warnings.catch_warnings(action="error"):
        named = processor.chat(both, videos=video, images=image)
    for number in (processor.video_token_id, processor.image_token_id):
        assert (named["input_ids"] == number).sum() == (plain["input_ids"] == number).sum() > 0
    assert named["input_ids"].shape[1] > plain["input_ids"].shape[1]
    assert processor.video_token in processor.decode(named["input_ids"][0]).replace(" ", "")
    batch = processor.chat(["what is here", both], videos=[video, None])
    assert (batch["input_ids"][1] == processor.video_token_id).sum() == 0
