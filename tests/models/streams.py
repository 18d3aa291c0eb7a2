"""Streams for tests: models of both families with processors, clips of the synthetic world, and the plain model's word."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.core.registry import registry
from mmaccel.core.streams.asking import run_question as asked_of
from mmaccel.models.processor import Processor
from mmaccel_lab.tiny.configs import SPECS, build_model
from mmaccel_lab.tiny.tokenizer import build_tokenizer
from mmaccel_lab.world import World, render, vocabulary
from tests.models.tiny_random import redraw_patches

FPS = 2.0
QUESTION = "what colour was the star ?"
CLUSTERS = {"name": "clusters", "init": 8, "visual": 4, "semantic": 2, "buffer": 4}
SEARCHES = {
    "mosaic": {"name": "mosaic", "window": 6, "local": 2, "frames": 4, "index": CLUSTERS, "encode_frames": 2},
    "rekv reps": {"name": "rekv", "window": 6, "local": 2, "frames": 4, "reps": 3, "cache": 4},
}
"""Memories whose passes search clusters or representatives, with small budgets."""
MODELS = ("tiny-ov", "tiny-qwen", "random-ov", "random-qwen")
"""Two trained ones, and two random ones; the random Qwen takes two frames a unit and four positions a second."""


def strengthen(model: Any) -> None:
    """Make what a random model says hang on what it sees, and no answer end by chance."""
    for path, weight in model.named_parameters():
        if "language_model.layers." in path and weight.ndim == 2:
            weight.data *= 5
    model.generation_config.eos_token_id = 2
    model.get_output_embeddings().weight.data[2] = 0


@functools.cache
def pair(name: str, layers: int = 2, wide: int = 128) -> tuple[Any, Processor]:
    """A model in float32, and its processor; of a random one `layers`, whose feed-forward networks are so `wide`.

    Its layers' weights are large: what random models of usual weights say is one token again and again, whatever they see.
    """
    if name.startswith("tiny"):
        return mmaccel.load_model(name, dtype=torch.float32), mmaccel.load_processor(name)
    spec = SPECS[name.replace("random", "tiny")]
    torch.manual_seed(6)
    like = build_model(spec)
    config = copy.deepcopy(like.config)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = ["full_attention"] * layers
    config.text_config.intermediate_size = wide
    config.vision_config.num_hidden_layers = 1
    if name == "random-qwen":
        config.vision_config.depth = 1
        config.vision_config.fullatt_block_indexes = [0]
        config.vision_config.temporal_patch_size = 2
        config.vision_config.tokens_per_second = 4
    model = type(like)(config).float().eval()
    if name == "random-ov":
        redraw_patches(model, 10)
    strengthen(model)
    kind = config.model_type
    stock = mmaccel.load_processor(name.replace("random", "tiny"))
    video = {**stock.video.to_dict(), "temporal_patch_size": None, "patch_size": None, "merge_size": None}
    tokenizer = build_tokenizer(vocabulary(), kind)
    return model, Processor(
        kind,
        tokenizer,
        image=video,
        video=video,
        extra=stock.extra,
        config=config.to_dict(),
        chat_template=stock.chat_template,
    )


@functools.cache
def film(frames: int, seed: int = 3) -> Tensor:
    """[frames, 3, 42, 70] uint8: the first frames of a world with scenes and cards."""
    return render({k: v[:frames] for k, v in World.generate(seed, 25).table().items()}, 42, 70)


def asked_of_film(count: int, question: str = QUESTION, seed: int = 3) -> list[dict[str, Any]]:
    """A prompt: the first frames of a film, and a question on them."""
    return [{"type": "video", "video": film(count, seed)}, {"type": "text", "text": question}]


def inputs_of(
    name: str, count: int, question: str = QUESTION, fps: float = FPS, **how: Any
) -> dict[str, Any]:
    """That prompt, as a model takes it."""
    return pair(name)[1].chat(asked_of_film(count, question), fps=fps, **how)


def processor_like(stock: Processor, kind: str | None = None, **changes: Any) -> Processor:
    """The same processor but for some of its settings, or for another type of model."""
    given = {name: getattr(stock, name).to_dict() for name in ("image", "video")}
    given |= {"extra": stock.extra, "chat_template": stock.chat_template}
    return Processor(kind or stock.model_type, stock.tokenizer, **{**given, **changes})


def open_session(
    name: str, kv: Any, count: int = 0, fps: float = FPS, **choices: Any
) -> mmaccel.VideoSession:
    """A session, which has watched so many of the first frames of a film."""
    session = mmaccel.VideoSession(*pair(name), None, kv=kv, **choices)
    if count:
        session.watch(film(count), fps=fps)
    return session


def every_stream(frames: int = 1 << 20, window: int = 1 << 20, **more: Any) -> dict[str, dict[str, Any]]:
    """Each registered memory of streams, by name, with budgets and windows of so many frames, and `more` where it has such
    fields; frames that look alike are not merged, unless `more` says when."""
    made = {}
    for name, cls in registry("kv").items():
        if issubclass(cls, mmaccel.core.memory.kv.StreamPolicy):
            fields: dict[str, Any] = {"name": name}
            own = {"frames": frames, "window": window, "local": min(frames, window), "similar": None}
            for field, value in {**own, **more}.items():
                if field in cls.__dataclass_fields__:
                    fields[field] = value
            if name == "window":
                fields["window"] = window * 16
            if name == "no_cache":
                fields["kept"] = 2 * frames
            if name == "mosaic" and frames < 8:
                # Short films have clusters too, which split.
                fields["index"] = CLUSTERS
            made[name] = fields
    return made


@functools.cache
@torch.no_grad()
def plain(name: str, count: int, fps: float = FPS, seed: int = 3) -> Tensor:
    """[V] the plain model's logits for the first token of the answer, to the same prompt with `count` frames."""
    model, processor = pair(name)
    return model(**processor.chat(asked_of_film(count, seed=seed), fps=fps)).logits[0, -1]


@functools.cache
def said(name: str, count: int, tokens: int = 6) -> str:
    """The plain model's greedy answer."""
    model, processor = pair(name)
    inputs = inputs_of(name, count)
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return processor.decode(out[0, inputs["input_ids"].shape[1] :]).strip()


def logits(session: mmaccel.VideoSession, question: Any = QUESTION, **how: Any) -> Tensor:
    """[V] a session's logits for the first token of its answer."""
    with asked_of(session._live, question, 4, **how) as asked:
        return asked.logits[0].clone()


def told(answer: mmaccel.core.decoding.generate.Answer) -> tuple[Any, ...]:
    return answer.ids, answer.text, answer.evidence, answer.finish_reason


@contextmanager
def resumed(session: mmaccel.VideoSession, folder: Path) -> Iterator[mmaccel.VideoSession]:
    """Another session with the same stream, saved and read anew: it says the same."""
    session.save(folder)
    model, processor = session._stream_adapter.view.model, session._processor
    with mmaccel.VideoSession.resume(model, processor, folder) as other:
        assert torch.equal(logits(other), logits(session))
        yield other
