"""Streams of every family that has them, on tiny models: what stands beside the frames, memories, pruners and files."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

import mmaccel
from mmaccel.core.attach import family_of
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.prefill.recalled import RetrievedTokenPruning
from mmaccel.models import deepstack, step
from mmaccel.models.qwen3_vl import Qwen3VL
from tests.models.streams import every_stream, logits
from tests.models.test_prompt_turns import check_later_turn
from tests.models.test_pruned_steps import Echo
from tests.models.tiny_random import prompt, sampler
from tests.spies import crossed, returned

KINDS = (
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm46v", "glm4v_moe"),
    *("internvl", "llava_next_video", "perception_lm", "smolvlm", "video_llama_3"),
)
QUESTION, FPS, CLOSE = "what moved?", 2.0, 2e-5
WHOLE, TIGHT = every_stream(positions="original"), every_stream(frames=6, window=8)
pytestmark = [pytest.mark.numeric(by="torch"), pytest.mark.filterwarnings("error:An output with one")]


@cache
def pair(kind: str) -> tuple[Any, Any]:
    if kind == "perception_lm" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its tower needs a newer timm under earlier transformers")
    made, model = sampler(kind), sampler(kind).model()
    return model, made.processor(model.config)


@cache
def film(units: int, kind: str) -> Tensor:
    frames = units * family_of(kind).frames_per_unit(pair(kind)[0])
    return torch.randint(
        0, 256, (frames, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)
    )


def session(kind: str, kv: Any, **choices: Any) -> mmaccel.VideoSession:
    return mmaccel.VideoSession(*pair(kind), None, kv=kv, **choices)


@torch.no_grad()
def plain(kind: str, one: mmaccel.VideoSession, frames: Tensor) -> Tensor:
    """[V] the plain model's logits for the prompt that a session stands for."""
    adapter: Any = one._stream_adapter
    live: Any = one._live
    inputs = adapter.prompt(frames, FPS, live.info.times, adapter.question_ids(QUESTION)[0].tolist())
    return pair(kind)[0](**inputs).logits[0, -1]  # type: ignore[no-any-return]


@crossed(kind=KINDS, kv=WHOLE)
def test_with_room_for_all_it_is_the_plain_model(kind: str, kv: str) -> None:
    with session(kind, WHOLE[kv]) as one:
        for part in film(13, kind).split(5):
            one.watch(part, fps=FPS)
        assert (logits(one, QUESTION) - plain(kind, one, film(13, kind))).abs().max() <= CLOSE
        assert len(one.ask(QUESTION, 4).evidence) == 13


@crossed(kv=TIGHT, kind=["qwen3_vl", "internvl", "qwen3_5"])
def test_it_forgets_goes_on_and_comes_back_from_a_folder(kind: str, kv: str, tmp_path: Path) -> None:
    """A tight memory differs from the whole; questions leave no trace; a saved one says what it would have said."""
    frames = film(25, kind)
    with session(kind, TIGHT[kv]) as one:
        for part in frames[:-7].split(9):
            one.watch(part, fps=FPS)
            one.ask("and before?", 2)
        one.save(tmp_path)
        with mmaccel.VideoSession.resume(*pair(kind), tmp_path) as two, session(kind, TIGHT[kv]) as quiet:
            quiet.watch(frames[:-7], fps=FPS)
            for other in (one, two, quiet):
                other.watch(frames[-7:], fps=FPS)
            own = logits(one, QUESTION)
            assert torch.allclose(logits(two, QUESTION), own, atol=1e-5)
            # Passes of mosaic retrieve, so that what is stored depends on how the stream is cut.
            if kv != "mosaic":
                assert torch.allclose(logits(quiet, QUESTION), own, atol=1e-5)
            assert two.ask(QUESTION, 4).text == one.ask(QUESTION, 4).text
        if kv not in ("full", "offload"):
            assert (own - plain(kind, one, frames)).abs().max() > 1e-4


TEMPLATE = (
    "{% for m in messages %}user\n{% for c in m.content %}{% if c.type == 'video' %}VIDEO{% elif c.type == 'image' %}IMAGE"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}assistant\n"
)
QWEN = {"<|image_pad|>": 190, "<|video_pad|>": 191, "<|vision_start|>": 192, "<|vision_end|>": 193}
GLM = {"<|image|>": 190, "<|video|>": 191, "<|begin_of_video|>": 192, "<|end_of_video|>": 193}
GLM |= {"<|begin_of_image|>": 194, "<|end_of_image|>": 195}
LLAVA = {"<image>": 190, "<video>": 191}
INTERN = {"<IMG_CONTEXT>": 190, "<video>": 191, "<img>": 194, "</img>": 195}
SQUARE = {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}}
STOCK: dict[str, tuple[str, dict[str, int], str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "qwen3_vl": ("Qwen3VL", QWEN, "<|vision_start|><|video_pad|><|vision_end|>", {}, {}, {}),
    "glm4v": ("Glm4v", GLM, "<|begin_of_video|><|video|><|end_of_video|>", {}, {}, {}),
    "glm46v": ("Glm46V", GLM, "<|begin_of_video|><|video|><|end_of_video|>", {}, {}, {}),
    "video_llama_3": ("VideoLlama3", QWEN, "<|video_pad|>\n", {}, {}, {}),
    "llava_next_video": ("LlavaNextVideo", LLAVA, "<video>\n", SQUARE, {"patch_size": 7}, {}),
    "perception_lm": (
        *(
            "PerceptionLM",
            LLAVA,
            "<video>",
            {"tile_size": 28, **SQUARE},
            {"patch_size": 7, "pooling_ratio": 2},
        ),
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "internvl": (
        *("InternVL", INTERN, "<video>\n", SQUARE, {"image_seq_length": 4}),
        {"start_image_token": "<img>", "end_image_token": "</img>"}
        | {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    ),
}
STOCK["smolvlm"] = (
    *("SmolVLM", {"<image>": 190, "<fake_token_around_image>": 194, "<global-img>": 195}, "<video>"),
    *({"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}}, {"image_seq_len": 4}),
    {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    },
)
"""Model type -> the name of its classes, special tokens, the place of a video, settings of its video processor and of its
processor, and what its tokenizer names."""
IMAGES = {"qwen3_vl": "Qwen2VL", "internvl": "GotOcr2", "llava_next_video": "LlavaNext"}


def tokenizer(special: dict[str, int], named: dict[str, str]) -> Any:
    """A token a character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(n): n - 32 + 3 for n in range(32, 127)} | {"\n": 100, "<unk>": 101}
    made = Tokenizer(models.WordLevel({**letters, **special}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    whole = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<unk>", extra_special_tokens=named
    )
    whole.add_special_tokens({"additional_special_tokens": [*special]}, replace_extra_special_tokens=False)
    return whole


def stock(kind: str) -> Any:
    """The processor of transformers itself for the tiny model."""
    pytest.importorskip("torchvision", reason="transformers' own processors need torchvision")
    name, special, place, settings, own, named = STOCK[kind]
    vision: Any = pair(kind)[0].config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        cut = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        settings = {**cut, "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 6 * 64 * 96}}
    elif kind == "video_llama_3":
        settings = {"size": {"shortest_edge": 28 * 28, "longest_edge": 6 * 64 * 96}}
    images = getattr(transformers, f"{IMAGES.get(kind, name)}ImageProcessor")
    videos = getattr(transformers, f"{name}VideoProcessor")
    return mmaccel.load_processor(
        getattr(transformers, f"{name}Processor")(
            image_processor=images(),
            video_processor=videos(**settings),
            tokenizer=tokenizer(special, named),
            chat_template=TEMPLATE.replace("VIDEO", place),
            **own,
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_turn_of_generate_is_the_whole_prompt(kind: str) -> None:
    check_later_turn(pair(kind)[0], kind, 12)


@pytest.mark.parametrize("kind", STOCK)
def test_it_is_the_prompt_of_the_stock_processor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of frames from 100 s on, whose times have as many characters there; of InternVL, whose numbers do not, as it says. The
    budget of pixels makes frames of one unit larger than those of all."""
    model, _ = pair(kind)
    if kind == "smolvlm":  # writes how many frames there are in words
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    processor = stock(kind)
    rate, first, count = 0.02, 500 if kind == "glm4v" else 5, 3 * family_of(kind).frames_per_unit(model)
    size = (64, 96) if kind not in ("internvl", "llava_next_video", "perception_lm", "smolvlm") else (28, 28)
    frames = torch.randint(
        0, 256, (count, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    numbers = [*range(first, first + count)]
    told = {"total_num_frames": first + count, "fps": rate, "frames_indices": numbers, "duration": 10000.0}
    content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
    text = processor.stock.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor.stock(
        text=[text], videos=[[frames]], video_metadata=[[told]], do_sample_frames=False, return_tensors="pt"
    )
    with mmaccel.VideoSession(model, processor, None, kv="full") as one, torch.no_grad():
        times = [number / rate for number in numbers]
        one.watch(frames[: count - 1], times=times[: count - 1])
        one.watch(frames[count - 1 :], times=times[count - 1 :])
        if kind in ("internvl", "smolvlm"):
            adapter: Any = one._stream_adapter
            own = adapter.prompt(frames, None, times, adapter.question_ids(QUESTION)[0].tolist())
            assert torch.allclose(own["pixel_values"], inputs["pixel_values"], atol=1e-6)
            if kind == "internvl":
                zero = ord("0") - 32 + 3
                ids = [token for token in own["input_ids"][0].tolist() if token != zero]
                assert ids == inputs["input_ids"][0].tolist()
                assert own["input_ids"].shape[1] == len(ids) + 4 * count
            else:
                ids, whole = own["input_ids"][0].tolist(), inputs["input_ids"][0].tolist()
                frames_of = ids[ids.index(100) + 1 : -ids[::-1].index(190) + 1]
                assert any(whole[n:][: len(frames_of)] == frames_of for n in range(len(whole)))
            inputs = {**inputs, "input_ids": own["input_ids"], "attention_mask": None}
        assert (logits(one, QUESTION) - model(**inputs).logits[0, -1]).abs().max() <= CLOSE
        one.watch(torch.cat([frames, frames, frames]), fps=2.0)
        assert one.frames == 4 * count and one.ask(QUESTION, 2).evidence


def test_features_that_layers_add_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepstack, "split_deepstack_rows", lambda embeds, wide: (embeds[:, :wide], {}))
    with session("qwen3_vl", "full") as one:
        one.watch(film(4, "qwen3_vl"), fps=FPS)
        own = plain("qwen3_vl", one, film(4, "qwen3_vl"))
        assert (logits(one, QUESTION) - own).abs().max() > 100 * CLOSE


def test_a_pruner_of_frames_leaves_the_times() -> None:
    """Groups of four units lose tokens that repeat, and keep the time of the first."""
    with session("qwen3_vl", "rekv", prune={"name": "dycoke", "layer": 2}) as one:
        one.watch(film(16, "qwen3_vl"), fps=FPS)
        one.ask(QUESTION, 2)
        counted, live = one.counters(), one._live
        assert live is not None and counted["units"] == 4
        assert counted["visual"] > counted["visual from layer 0"] > 0
    with pytest.raises(RecipeError, match="cannot read the vision tower of smolvlm"):
        session("smolvlm", "rekv", prune="visionzip")


def test_a_pruner_between_layers_leaves_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Tensor] = returned(monkeypatch, RetrievedTokenPruning, "_cut", lambda made, *_: made)
    with session("qwen3_vl", "full", prune={"name": "fastv", "layer": 2, "retention": 0.25}) as one:
        one.watch(film(12, "qwen3_vl"), fps=FPS)
        one.ask(QUESTION, 2)
        stream: Any = one._live.stream  # type: ignore[union-attr]
    ahead, behind = stream.words
    place = (left[0][left[0] >= stream.head] - stream.head) % stream.tokens_per_unit
    words = (place < ahead) | (place >= stream.tokens_per_unit - behind)
    tokens = stream.tokens_per_unit - ahead - behind
    assert ahead > 10 and behind == 1
    assert int(words.sum()) == 12 * (ahead + behind) and int((~words).sum()) == 12 * tokens // 4


@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl", "qwen3_5"])
def test_a_call_holds_the_frames_between_which_words_are_of_one_length(kind: str) -> None:
    """One word more before the sixth frame: those behind it are held, with the words before each, and all others stay."""
    model, _ = pair(kind)
    inputs = prompt(kind, [("text", 6), ("video", 12), ("text", 9)])
    odd, visual = dict(inputs), [*family_of(kind).placeholders(model)]
    begins = [n for n, token in enumerate(inputs["input_ids"][0].tolist()) if token in visual]
    at = begins[5 * len(begins) // 12] - 1
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in odd:
            one = inputs[name]
            odd[name] = torch.cat([one[:, :at], one[:, at - 1 : at], one[:, at:]], 1)
    for given, units in ((inputs, 12), (odd, 7)):
        with torch.no_grad():
            plain = model.generate(**given, max_new_tokens=4, do_sample=False)
        for kv in ("offload", "rekv"):
            with mmaccel.accelerate(model, kv={"name": kv}) as fast:
                assert torch.equal(fast.generate(**given, max_new_tokens=4, do_sample=False), plain)
                assert fast.report().kv["units"] == units


def test_times_that_a_tokenizer_writes_in_unlike_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Qwen3VL.text_around_frame

    def text_around_frame(self: Any, config: Any, frame: int, seconds: Any) -> Any:
        before, after = own(self, config, frame, seconds)
        return [*before, "!"] if frame > 8 else before, after

    monkeypatch.setattr(Qwen3VL, "text_around_frame", text_around_frame)
    with session("qwen3_vl", "full") as one, pytest.raises(ModelError, match="units of one length"):
        one.watch(film(8, "qwen3_vl"), fps=FPS)


@pytest.mark.parametrize("captured", [False, True])
def test_running_states_come_back_after_errors_questions_and_drafts(captured: bool, monkeypatch) -> None:
    """A watch that fails in a pass, a question that fails, and drafted tokens that are not taken leave nothing behind."""
    kind, kv = "qwen3_5", TIGHT["rekv"]
    frames = film(20, kind)
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
    with session(kind, kv) as quiet, session(kind, kv, draft=Echo()) as one:
        for each in (quiet, one):
            each.watch(frames[:24], fps=FPS)
        states: Any = one._live.running  # type: ignore[union-attr]
        before = {name: x.clone() for name, x in states.named_tensors().items()}
        module = family_of(kind).attentions(pair(kind)[0])[-1]
        calls: list[int] = []

        def fails(*given: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise ZeroDivisionError

        handle = module.register_forward_pre_hook(fails)
        with pytest.raises(ZeroDivisionError):
            one.watch(torch.cat([frames, frames]), fps=FPS)
        calls[:] = [1]
        with pytest.raises(ZeroDivisionError):
            one.ask(QUESTION)
        handle.remove()
        told = one.ask("a b a b a b a b a b?", 12)
        assert told.counters["drafted"] > told.counters["accepted"]
        assert told.ids == quiet.ask("a b a b a b a b a b?", 12).ids
        assert all(torch.equal(x, before[name]) for name, x in states.named_tensors().items())
        for each in (quiet, one):
            each.watch(frames[24:], fps=FPS)
        assert torch.allclose(logits(one, QUESTION), logits(quiet, QUESTION), atol=1e-6)
