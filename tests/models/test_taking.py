"""What is taken of a video file, by qwen_vl_utils, a paper, a folder or the room; and transformers' own processor."""

import functools
import pickle
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch
import transformers

import mmaccel
from mmaccel import media
from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning, ModelError, VideoError
from mmaccel.models import stock, taking
from mmaccel.models.processor import Processor
from mmaccel.models.prompt_layout import VideoBudget
from mmaccel.models.shipped import WORLD
from mmaccel.models.taking import max_frames_that_fit, processor_frame_budget, read_sampled_video
from tests.media.films import write_film
from tests.models.streams import QUESTION, asked_of_film, film, pair
from tests.models.test_processor import FAMILIES, noise, same, shipped_qwen, write_model
from tests.models.test_stream_families import pair as stock_model
from tests.models.test_stream_families import stock as stock_processor
from tests.spies import broken


def plain_film(path: Path, frames: int, rate: int, height: int, width: int) -> Path:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "ultrafast", "g": "30"}
        image = torch.zeros(height, width, 3, dtype=torch.uint8)
        for number in range(frames):
            image[:, : width * number // frames] = 200
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image.numpy(), format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("frames", "rate", "height", "width"),
    [(18, 6, 720, 1280), (45, 30, 90, 160), (7, 1, 360, 202), (3, 1, 240, 320), (100, 25, 480, 640)],
)
def test_a_file_becomes_for_qwen_what_qwen_vl_utils_makes_of_it(
    frames: int, rate: int, height: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = pytest.importorskip("qwen_vl_utils.vision_process")
    path = plain_film(tmp_path / "film.mp4", frames, rate, height, width)

    def by_pyav(told: dict[str, Any]) -> Any:
        """A reader of theirs, none of which is here, about their own rule."""
        number = utils.smart_nframes(told, total_frames=frames, video_fps=rate)
        found = media.read(told["video"], frames=number)
        return found.frames, {}, number / frames * rate

    monkeypatch.setattr(utils, "VIDEO_READER_BACKENDS", {"torchvision": by_pyav})
    utils.get_video_reader_backend.cache_clear()
    monkeypatch.setattr(utils, "FORCE_QWENVL_VIDEO_READER", "torchvision")
    video, fps = utils.fetch_video({"type": "video", "video": str(path)}, return_video_sample_fps=True)
    processor = mmaccel.load_processor(shipped_qwen(tmp_path / "model"))
    wanted = processor("<|video_pad|>", videos=video.to(torch.uint8), fps=fps)
    taken = read_sampled_video(processor, path)
    assert torch.equal(taken.frames, video.to(torch.uint8)) and taken.fps == pytest.approx(fps)
    for one in (processor, Processor.from_pretrained(tmp_path / "model")):
        got = one("<|video_pad|>", videos=path)
        assert got.keys() == wanted.keys()
        for name, value in got.items():
            assert (
                torch.allclose(value, wanted[name]) if "second" in name else torch.equal(value, wanted[name])
            )
    if height == 720:
        assert got["video_grid_thw"].tolist() == [[3, 40, 72]] and got["input_ids"].numel() == 2160


def test_of_a_long_video_pixels_are_shared_out() -> None:
    budget = Processor.from_pretrained(mmaccel.models.shipped.tiny_model_folder("tiny-qwen")).style.budget
    assert budget.frame_count(100_000, 25.0) == 768 and budget.frame_count(1, 30.0) == 1
    rows, columns = budget.frame_size(768, 1080, 1920)
    assert 0.9 * 128000 * 28 * 28 / 768 * 2 >= rows * columns > 0.7 * 0.9 * 128000 * 28 * 28 / 768 * 2


def test_llava_onevision_takes_32_frames_of_any_length(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "model", "llava_onevision", **{"video_preprocessor_config.json": {"fps": None}}
    )
    processor = mmaccel.load_processor(folder)
    assert len(read_sampled_video(processor, write_film(tmp_path / "long.mp4", 100))) == 32
    assert len(read_sampled_video(processor, write_film(tmp_path / "short.mp4", 20))) == 20
    inputs = processor("<video>", videos=tmp_path / "long.mp4")
    assert inputs["pixel_values_videos"].shape[1] == 32


def test_a_folder_and_a_caller_say_otherwise(tmp_path: Path) -> None:
    path = write_film(tmp_path / "film.mp4", 60)  # 10 frames a second
    folder = write_model(
        tmp_path / "model", "llava_onevision", **{"video_preprocessor_config.json": {"fps": 5.0}}
    )
    processor = mmaccel.load_processor(folder)
    assert processor_frame_budget(processor) == VideoBudget(fps=5.0, most=4096)
    assert len(read_sampled_video(processor, path)) == 30
    assert len(read_sampled_video(processor, path, max_frames=7)) == 7
    assert len(read_sampled_video(processor, path, fps=1)) == 6
    assert len(read_sampled_video(processor, path, frames=9)) == 9
    settings = {"fps": None, "num_frames": 8}
    other = write_model(tmp_path / "other", "llava_onevision", **{"video_preprocessor_config.json": settings})
    for one in (mmaccel.load_processor(other), Processor.from_pretrained(other)):
        assert len(read_sampled_video(one, path)) == 8
    # No frame twice of a source that is slower.
    slow = plain_film(tmp_path / "slow.mp4", 9, 1, 96, 128)
    assert len(read_sampled_video(processor, slow)) == 9


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_auto_takes_all_that_there_is_room_for(name: str, tmp_path: Path, monkeypatch) -> None:
    model, processor = pair(name)
    path = write_film(tmp_path / "film.mp4", 60)
    family = adapter_for(model)
    with pytest.raises(ModelError, match="frames: 'auto' takes what a model has room for; give it as model="):
        processor.chat("what", videos=path, frames="auto")
    count, told = max_frames_that_fit(processor, model, path)
    assert count == 60 and "took 60 of 60 frames" in told and told.endswith("there are no more")
    with pytest.warns(MmaccelWarning, match="frames='auto' took 60 of 60"):
        inputs = processor.chat("what colour ?", videos=path, frames="auto", model=model)
    # Qwen's positions are seconds: fewer frames of the same video end where all of them do.
    if name == "random-ov":
        most = int(family.positions(model, inputs).max())
        limit = most * 4 // 7  # an eighth is left for the answer
        monkeypatch.setattr(family.text_model(model).config, "max_position_embeddings", limit)
        count, told = max_frames_that_fit(processor, model, path)
        assert 20 <= count <= 30 and f"the model has {limit} positions, and {limit // 8} are left" in told
        with pytest.warns(MmaccelWarning, match=re.escape(told)):
            inputs = processor.chat("what colour ?", videos=path, frames="auto", model=model)
        assert int(family.positions(model, inputs).max()) < limit
        with pytest.warns(MmaccelWarning, match="positions, for 2 videos, and"):
            inputs = processor.chat("what colour ?", videos=[path, path], frames="auto", model=model)
        assert limit // 2 < int(family.positions(model, inputs).max()) < limit
        monkeypatch.undo()
    # And so much memory; a window of keys needs less of it.
    monkeypatch.setattr("mmaccel.models.taking.free_host_bytes", lambda: 1 << 20)
    count, told = max_frames_that_fit(processor, model, path)
    assert 0 < count < 60 and "GiB are free on cpu" in told
    with mmaccel.accelerate(model, kv={"name": "window", "window": 64}, chunk=64):
        assert max_frames_that_fit(processor, model, path)[0] > count


def test_auto_takes_all_that_the_positions_of_qwen_hold(tmp_path: Path, monkeypatch) -> None:
    """Its positions are seconds: of fewer frames the last begins earlier. One step of time more would not fit."""
    model, processor = pair("random-qwen")
    path, family = write_film(tmp_path / "film.mp4", 600), adapter_for(model)
    config = family.text_model(model).config

    @functools.cache
    def last(count: int) -> int:
        inputs = processor(processor.video_token, videos=path, frames=count)
        return int(family.positions(model, inputs).max())

    taken = set()
    for limit in (6, 125, 137, 138, 182, 205, 206, 273, 274, 275):
        monkeypatch.setattr(config, "max_position_embeddings", limit)
        count, told = max_frames_that_fit(processor, model, path)
        left = limit - limit // 8
        assert last(count) < left and (count == 600 or last(count + 2) >= left)
        assert count == 600 or f"the model has {limit} positions" in told
        taken.add(count)
    if last(600) < last(20):  # transformers before 5.20 rounds a step of 0.8 positions down to none
        assert 600 in taken
    else:
        assert {2, 4, 6, 600} <= taken and len(taken) > 5
    monkeypatch.setattr(config, "max_position_embeddings", 5)
    with pytest.raises(VideoError, match=r"no room for 2 frames of .*, for the model has 5 positions"):
        max_frames_that_fit(processor, model, path)


@pytest.mark.parametrize("kind", ["internvl", "glm4v", "qwen3_vl"])
def test_auto_counts_the_prompt_that_the_processor_makes(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Numbers of frames grow by digits, and a cap of a whole video's pixels makes the frames of a long one smaller."""
    model, processor = stock_model(kind)[0], stock_processor(kind)
    family, path = adapter_for(model), plain_film(tmp_path / "film.mp4", 240, 4, 64, 96)
    if kind != "internvl":
        processor.stock.video_processor.size["longest_edge"] = 60 * 64 * 96
    inputs = {n: processor(processor.video_token, videos=path, frames=n) for n in (60, 120, 240)}
    ends = {n: int(family.positions(model, made).max()) for n, made in inputs.items()}
    assert abs(ends[240] - 2 * ends[120] + 2) > 10
    for wanted in (120, 240):
        monkeypatch.setattr(
            family.text_model(model).config, "max_position_embeddings", limit := ends[wanted] * 8 // 7 + 2
        )
        count, told = max_frames_that_fit(processor, model, path)
        made = processor(processor.video_token, videos=path, frames=count)
        assert count >= wanted and f" {made['input_ids'].numel()} tokens: " in told
        assert int(family.positions(model, made).max()) < limit - limit // 8
    # And of a moment no fewer frames than the processor takes.
    short = plain_film(tmp_path / "short.mp4", 9, 30, 64, 96)
    assert processor.chat("what", videos=short)["input_ids"].numel()
    if kind == "glm4v":
        with pytest.raises(ModelError, match=r"videos \(of 2 frames or more\)"):
            processor.chat("what", videos=short, frames=1)


def test_a_file_gives_as_many_frames_as_stock_takes() -> None:
    pytest.importorskip("torchvision", reason="transformers' own processors need torchvision")
    for name, settings, counts in (
        ("Glm4v", {}, {2: 4, 100: 200, 700: 600}),
        ("Glm46V", {}, {10: 60, 100: 200, 4000: 640}),
        ("SmolVLM", dict(do_sample_frames=True, fps=1, num_frames=64), {20: 20, 700: 64}),
        ("SmolVLM", {}, {20: 40}),  # it takes every frame: our own budget
    ):
        own = getattr(transformers, f"{name}VideoProcessor")(**settings)
        one = SimpleNamespace(style=None, video=None, video_processor=own)
        usual = processor_frame_budget(one)
        found = {time: taking.default_frame_count(one, usual, time * 30, 30.0) for time in counts}
        assert found == counts, name


def test_the_report_says_what_was_taken(tmp_path: Path) -> None:
    for name, units in (("random-ov", 12), ("random-qwen", 6)):
        model, processor = pair(name)
        inputs = processor.chat("what colour ?", videos=write_film(tmp_path / "film.mp4", 60), frames=12)
        with mmaccel.accelerate(model) as fast:
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            report = fast.report()
            assert report.video_units == units
            assert report.video_tokens == int((inputs["input_ids"] == processor.video_token_id).sum())
            model.generate(input_ids=inputs["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
            assert (fast.report().video_units, fast.report().video_tokens) == (0, 0)


def test_a_tiny_model_says_once_what_it_knows(shipped: Any, tmp_path: Path) -> None:
    from mmaccel_lab.world import World, write_mp4
    from mmaccel_lab.world.mp4 import COMMENT

    assert COMMENT == WORLD
    own, other = tmp_path / "own.mp4", write_film(tmp_path / "other.mp4", 20)
    write_mp4(World.generate(3, 4), own, 42, 70)
    processor = mmaccel.load_processor(shipped("tiny-ov"))
    with warnings.catch_warnings(action="error"):
        processor.chat("what ?", videos=own)
        # Of any other model nothing is said.
        pair("random-ov")[1].chat("what ?", videos=other)
    told = r"tiny-ov knows only the world of `mmaccel-lab world`; what it says of .*other\.mp4 means nothing"
    with pytest.warns(MmaccelWarning, match=told):
        processor.chat("what ?", videos=other)
    with warnings.catch_warnings(action="error"):
        processor.chat("what ?", videos=other)
    session = mmaccel.VideoSession(mmaccel.load_model("tiny-ov"), mmaccel.load_processor("tiny-ov"), "rekv")
    with session, pytest.warns(MmaccelWarning, match=told):
        session.watch(other, fps=10)


pytest.importorskip("torchvision", reason="transformers' own processors need torchvision")
T = pytest.importorskip("transformers")


@pytest.fixture(params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", str(request.param))


def test_stock_code_is_taken_where_it_runs_and_ours_where_it_does_not(folder: Path, monkeypatch) -> None:
    chosen = mmaccel.load_processor(folder)
    assert isinstance(chosen, stock.HFProcessor) and isinstance(chosen.stock, T.ProcessorMixin)
    monkeypatch.setattr(stock, "find_spec", lambda name: None)
    assert type(mmaccel.load_processor(folder)) is Processor


@pytest.mark.filterwarnings("ignore:the text has 1 placeholders")
@pytest.mark.parametrize("special", [True, False])
def test_ours_gives_what_stock_gives(folder: Path, special: bool) -> None:
    """Prompts of every kind: also with placeholders and special tokens in what the user writes."""
    loads = mmaccel.load_processor, Processor.from_pretrained
    theirs, ours = (load(folder, special_tokens=special) for load in loads)
    video, image = noise(5, 3, 90, 130), noise(3, 70, 150)
    named = f"what {ours.video_token} {ours.image_token} <|im_end|> colour"
    shown: list[dict[str, Any]] = [{"videos": video, "fps": 2.0}, {"videos": video, "images": image}]
    for question in ("what colour", named):
        for given in (*shown, {"images": image}, {}):
            same(theirs.chat(question, **given), ours.chat(question, **given))
    two = ["what colour", "the red star was"]
    low = {"videos": [video, video], "dtype": torch.bfloat16, "padding_side": "right"}
    made = ours.chat(two, **low)
    same(theirs.chat(two, **low), made)
    assert made["pixel_values_videos"].dtype == torch.bfloat16
    same(theirs.prepare_pixels(video, dtype=torch.bfloat16), ours.prepare_pixels(video, dtype=torch.bfloat16))
    content = [{"type": "video"}, {"type": "text", "text": "what"}]
    assert theirs.template_ids(content) == ours.template_ids(content)


def test_what_stock_refuses_is_one_sentence(tmp_path: Path) -> None:
    processor = mmaccel.load_processor(write_model(tmp_path / "model", "llava_onevision"))
    with pytest.raises(ModelError, match=r"LlavaOnevisionProcessor cannot process these inputs \(.*frames="):
        processor(["<video>", "<video>"], videos=[noise(2, 3, 9, 9), noise(1, 3, 9, 9)])
    with pytest.raises(ModelError, match="has 0 placeholders"):
        processor("what", videos=noise(2, 3, 9, 9))


def test_a_device_without_memory_is_not_the_fault_of_the_input(tmp_path: Path, monkeypatch) -> None:
    processor: Any = mmaccel.load_processor(write_model(tmp_path / "model", "llava_onevision"))
    broken(monkeypatch, processor.stock.video_processor, "preprocess", torch.OutOfMemoryError("none left"))
    with pytest.raises(torch.OutOfMemoryError):
        processor("<video>", videos=noise(2, 3, 9, 9))


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_a_session_and_the_helpers_take_stock_itself(shipped: Any, name: str) -> None:
    model = mmaccel.load_model(shipped(name), torch.float32)
    own = Processor.from_pretrained(stock.resolve_model_name(name))
    theirs = T.AutoProcessor.from_pretrained(stock.resolve_model_name(name))
    content = asked_of_film(12)
    inputs = answer.prompt_inputs(theirs, content, model)
    same(inputs, answer.prompt_inputs(own, content, model))
    said = answer.ask(model, theirs, inputs, max_new_tokens=4)
    assert said.text == answer.ask(model, own, inputs, max_new_tokens=4).text != ""
    told = []
    for processor in (theirs, own):
        with mmaccel.VideoSession(model, processor, "rekv") as session:
            session.watch(film(12), fps=1.0)
            told.append(session.ask(QUESTION, max_new_tokens=4).text)
    assert told[0] == told[1] != ""
    assert type(pickle.loads(pickle.dumps(mmaccel.load_processor(theirs)))) is stock.HFProcessor


def test_a_session_takes_a_processor_whose_class_several_types_share(shipped: Any) -> None:
    folder = stock.resolve_model_name(shipped("tiny-hybrid"))
    processor = mmaccel.load_processor(T.AutoProcessor.from_pretrained(folder))
    session: Any = mmaccel.VideoSession(mmaccel.load_model(folder), processor, "rekv")
    assert (processor.model_type, session._stream_adapter.processor.model_type) == ("qwen3_vl", "qwen3_5")


def test_a_session_refuses_another_models_processor_and_what_is_none(shipped: Any) -> None:
    model, _ = pair("random-ov")
    with pytest.raises(ModelError, match="it is for models of type 'qwen2_5_vl', not for this one; load the"):
        mmaccel.VideoSession(
            model, T.AutoProcessor.from_pretrained(stock.resolve_model_name(shipped("tiny-qwen")))
        )
    with pytest.raises(ModelError, match=r"processor: 7 is not a processor; give the model's own"):
        mmaccel.VideoSession(model, 7)


def test_a_family_needs_no_processor_of_ours(shipped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a style of its model type a stock processor makes the same prompts."""
    known = mmaccel.load_processor(shipped("tiny-qwen"))
    monkeypatch.setattr(stock, "processor_specs", dict)
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


def test_a_processor_that_reads_pixels_is_asked_with_pixels() -> None:
    """For frames="auto", which first asks without memory for them."""

    class Reads:
        video_token = "video"

        def __call__(self, text: str, videos: list[Any]) -> dict[str, Any]:
            return {"pixels": videos[0].frames.numpy().mean()}

    assert taking._prompt(Reads(), 4, (8, 8), 1.0) == {"pixels": 0.0}
