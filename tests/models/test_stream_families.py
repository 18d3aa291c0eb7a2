"""Streams of every family that has them, on tiny models of transformers' own classes: what is written beside the frames,
where all stands, and what memories, pruners and files make of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import family_of
from mmaccel.core.errors import ModelError
from mmaccel.core.registry import registry
from mmaccel.models import deepstack
from mmaccel.models.prompt_layout import in_seconds
from mmaccel.models.qwen3_vl import Qwen3VL
from tests.models.streams import every_stream, logits
from tests.models.test_hybrid import Echo
from tests.models.tiny_random import prompt, sampler

KINDS = (
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm46v", "glm4v_moe"),
    *("internvl", "llava_next_video", "perception_lm", "smolvlm", "video_llama_3"),
)
QUESTION, FPS, CLOSE = "what moved?", 2.0, 2e-5
WHOLE, TIGHT = every_stream(), every_stream(frames=6, window=8)
pytestmark = pytest.mark.numeric(by="torch")


@cache
def pair(kind: str) -> tuple[Any, Any]:
    made = sampler(kind)
    model = made.model()
    return model, made.processor(model.config)


@cache
def film(units: int, kind: str) -> Tensor:
    frames = units * family_of(kind).pace(pair(kind)[0])
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
    inputs = adapter.prompt(frames, FPS, live.info.times, adapter.tail(QUESTION)[0].tolist())
    return pair(kind)[0](**inputs).logits[0, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kv", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_with_room_for_all_it_is_the_plain_model(kind: str, kv: str) -> None:
    fields = dict(WHOLE[kv])
    if "positions" in registry("kv")[kv].__dataclass_fields__:
        fields["positions"] = "original"
    with session(kind, fields) as one:
        for part in film(13, kind).split(5):
            one.watch(part, fps=FPS)
        assert (logits(one, QUESTION) - plain(kind, one, film(13, kind))).abs().max() <= CLOSE
        assert len(one.ask(QUESTION, 4).evidence) == 13


@pytest.mark.parametrize("kv", TIGHT)
@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl", "qwen3_5"])
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
            if (
                kv != "mosaic"
            ):  # whose passes retrieve, so that what is stored depends on how the stream is cut
                assert torch.allclose(logits(quiet, QUESTION), own, atol=1e-5)
            assert two.ask(QUESTION, 4).text == one.ask(QUESTION, 4).text
        if kv not in ("full", "offload"):
            assert (own - plain(kind, one, frames)).abs().max() > 1e-4


def test_a_time_has_five_characters() -> None:
    times = {
        0.0: "0.000",
        9.25: "9.250",
        12.5: "12.50",
        100.0: "100.0",
        999.96: "1000.",
        1234.5: "1234.",
        86400.0: "86400",
    }
    assert {time: in_seconds(time) for time in times} == times
    assert all(len(in_seconds(time)) == 5 for time in (9.99996, 99.9996, 99999.7, 1e5, 123456.7))


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def tokenizer(special: dict[str, int], **named: str) -> Any:
    """A token a character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(n): n - 32 + 3 for n in range(32, 127)} | {"\n": 100, "<unk>": 101}
    made = Tokenizer(models.WordLevel({**letters, **special}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        additional_special_tokens=[*special],
        unk_token="<unk>",
        pad_token="<unk>",
        **named,
    )


def stock_qwen3_vl(model: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("torchvision", reason="transformers' own processors need torchvision")
    vision = model.config.vision_config
    cut = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    words = tokenizer(
        {"<|image_pad|>": 190, "<|video_pad|>": 191, "<|vision_start|>": 192, "<|vision_end|>": 193}
        | {"<|im_start|>": 194, "<|im_end|>": 195}
    )
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**cut),
        video_processor=transformers.Qwen3VLVideoProcessor(
            **cut, size={"shortest_edge": 2 * 32 * 32, "longest_edge": 6 * 64 * 96}
        ),
        tokenizer=words,
        chat_template=TEMPLATE,
    )


def test_where_times_are_as_long_it_is_the_prompt_of_the_stock_processor() -> None:
    """Units at 100, 500 and 900 s; the processor makes fewer pixels of three units than of each alone."""
    model, _ = pair("qwen3_vl")
    processor = mmaccel.load_processor(stock_qwen3_vl(model))
    frames = torch.randint(
        0, 256, (6, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    inputs = processor.chat(
        [{"type": "video", "video": frames}, {"type": "text", "text": QUESTION}], fps=1 / 200
    )
    with mmaccel.VideoSession(model, processor, None, kv="full") as one, torch.no_grad():
        one.watch(frames[:3], fps=1 / 200)
        one.watch(frames[3:], fps=1 / 200)
        assert (logits(one, QUESTION) - model(**inputs).logits[0, -1]).abs().max() <= CLOSE
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert one.ask(QUESTION, 6).text == processor.decode(ids).strip()
        one.watch(torch.cat([frames, frames]), fps=2.0)
        assert one.frames == 18 and one.ask(QUESTION, 2).evidence


def test_features_that_layers_add_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(embeds: Tensor, wide: int) -> tuple[Tensor, dict[str, Any]]:
        return embeds[:, :wide], {}

    with session("qwen3_vl", "full") as one:
        one.watch(film(4, "qwen3_vl"), fps=FPS)
        own = plain("qwen3_vl", one, film(4, "qwen3_vl"))
        monkeypatch.setattr(deepstack, "parted", lost)
        with session("qwen3_vl", "full") as two:
            two.watch(film(4, "qwen3_vl"), fps=FPS)
            assert (logits(two, QUESTION) - own).abs().max() > 100 * CLOSE


def test_a_pruner_of_frames_leaves_the_times() -> None:
    """Groups of four units lose tokens that repeat, and keep the time of the first."""
    with session("qwen3_vl", "rekv", prune={"name": "dycoke", "layer": 2}) as one:
        one.watch(film(16, "qwen3_vl"), fps=FPS)
        one.ask(QUESTION, 2)
        counted, live = one.counters(), one._live
        assert live is not None and counted["units"] == 4
        assert counted["visual"] > counted["visual from layer 0"] > 0
    with (
        session("qwen3_vl", "rekv", prune="visionzip") as one,
        pytest.raises(ModelError, match="cannot read the vision tower of qwen3_vl"),
    ):
        one.watch(film(4, "qwen3_vl"), fps=FPS)


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
    own = Qwen3VL.beside

    def beside(self: Any, config: Any, frame: int, seconds: Any) -> Any:
        before, after = own(self, config, frame, seconds)
        return [*before, "!"] if frame > 8 else before, after

    monkeypatch.setattr(Qwen3VL, "beside", beside)
    with session("qwen3_vl", "full") as one, pytest.raises(ModelError, match="units of one length"):
        one.watch(film(8, "qwen3_vl"), fps=FPS)


def test_running_states_come_back_after_errors_questions_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that fails in a pass, a question that fails, and drafted tokens that are not taken leave nothing behind."""
    kind, kv = "qwen3_5", TIGHT["rekv"]
    frames = film(20, kind)
    with session(kind, kv) as quiet, session(kind, kv, draft=Echo()) as one:
        for each in (quiet, one):
            each.watch(frames[:24], fps=FPS)
        states: Any = one._live.running  # type: ignore[union-attr]
        before = {name: x.clone() for name, x in states.tensors().items()}
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
        assert all(torch.equal(x, before[name]) for name, x in states.tensors().items())
        for each in (quiet, one):
            each.watch(frames[24:], fps=FPS)
        assert torch.allclose(logits(one, QUESTION), logits(quiet, QUESTION), atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "internvl"])
def test_a_stored_video_under_a_pattern(kind: str) -> None:
    """A pattern that lists everything changes nothing, one that does not something."""
    found = []
    for sparse in (
        "dense",
        {"name": "a_shape", "window": 1 << 16},
        {"name": "a_shape", "sink": 16, "window": 32, "block": 16},
    ):
        with session(kind, "rekv", sparse=sparse, chunk=256, dense_tail=0) as one:
            one.ingest(film(30, kind), fps=FPS)
            found.append((logits(one, QUESTION), one.report().kept))
    dense, listed, sparse_ = found
    assert (dense[0] - listed[0]).abs().max() <= CLOSE
    assert sparse_[1] is not None and 0 < sparse_[1] < 1 and (dense[0] - sparse_[0]).abs().max() > 1e-4
