"""A stream of planted scenes at a published model's shape: keys with structure where random weights give none.

A scene is a direction of the residual stream. The scene's keys at a layer are that layer's own query of the direction, the
heads of a group summed, as retrieval compares them. A question about scenes has their directions added to its words'
embeddings, `STRENGTH` a coordinate, and runs through the real model. So what it retrieves, and how well one layer's hidden
states tell the next one's query, comes out of the model at work, diluted from layer to layer by what layers add.

Frames go into a memory through its own interface (`begin_pass`, `append`, `view`, `end_pass`) with these keys, past the
layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.generate import Answer
from mmaccel.core.memory.kv import StreamPass
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.models import shapes
from mmaccel.models.processor import Processor
from mmaccel_lab.tiny.tokenizer import build_tokenizer
from mmaccel_lab.world import vocabulary

SHAPE = "llava-onevision-7b"
SIDE = 384
STRENGTH = 6.0
"""Of a question's scene directions; a layer of random weights adds about 1.6 a coordinate, so that hidden states of
neighbouring layers have a cosine of about 0.96, as in trained models (InfiniGen, section 4.2)."""
VISIT, FRAME, TOKEN = 0.4, 0.4, 1.0
"""Of what a visit to a scene, a frame and a token have of their own, to the scene's share of a key."""
QUESTION = "what was shown , and when ?"


def build(device: str, small: bool) -> tuple[nn.Module, Any]:
    """A model of `SHAPE`, and a processor of its family with the tiny models' words; `small`: the tiny model itself."""
    if small:
        model = mmaccel.load_model("tiny-ov", dtype=torch.float32, device=device)
        return model, mmaccel.load_processor("tiny-ov")
    model = shapes.build_model(SHAPE, device=device)
    stock = mmaccel.load_processor("tiny-ov")
    settings = {**stock.video.to_dict(), "size": {"height": SIDE, "width": SIDE}}
    processor = Processor(
        "llava_onevision",
        build_tokenizer(vocabulary(), "llava_onevision"),
        image=settings,
        video=settings,
        extra={**stock.extra, "num_image_tokens": 729},
        config={"vision_config": model.config.vision_config.to_dict()},  # type: ignore[union-attr]
        chat_template=stock.chat_template,
    )
    config: Any = model.config
    config.video_token_id, config.image_token_id = processor.video_token_id, processor.image_token_id
    # No answer ends before its last token: words of random weights mean nothing.
    model.generation_config.eos_token_id = -1  # type: ignore[union-attr]
    return model, processor


def timeline(frames: int, kinds: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scene and visit [frames] of each frame: scenes stay for 8 to 40 frames, cut, and return."""
    scene, visit, number = list[int](), list[int](), 0
    while len(scene) < frames:
        stay = int(torch.randint(8, 41, (), generator=generator))
        scene += [int(torch.randint(kinds, (), generator=generator))] * stay
        visit += [number] * stay
        number += 1
    return torch.tensor(scene[:frames]), torch.tensor(visit[:frames])


class Scenes:
    """`frames` frames of `kinds` scenes for a model; the same for the same seed."""

    def __init__(self, model: nn.Module, frames: int, kinds: int, seed: int = 0) -> None:
        self.model, self.family = model, adapter_for(model)
        self.device, self.dtype = next(model.parameters()).device, next(model.parameters()).dtype
        self.geometry, self.frames, self.kinds = self.family.geometry(model), frames, kinds
        host = torch.Generator().manual_seed(seed)
        self.scene, self.visit = timeline(frames, kinds, host)
        self._own = torch.Generator(self.device).manual_seed(seed)
        visits = int(self.visit[-1]) + 1
        self.direction = self._noise(kinds, self.geometry.hidden)
        self.look = self._noise(kinds, self.geometry.hidden)
        groups, size = self.geometry.kv_heads, self.geometry.head_dim
        self.keys, self.common, self.visits = [], [], []
        with torch.no_grad():
            for layer in range(self.geometry.layers):
                hidden = (STRENGTH * self.direction).to(self.dtype)[None]
                query = self.family.project_query(model, layer, hidden)[0].float()
                folded = query.view(groups, -1, kinds, size).sum(1).transpose(0, 1).flatten(1)
                self.keys.append(folded / folded.square().mean(1, keepdim=True).sqrt())
                # What all keys of a layer share, as a bias gives it.
                self.common.append(self._noise(groups * size))
                self.visits.append(self._noise(visits, groups * size))

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._own, device=self.device)

    def open(self, session: mmaccel.VideoSession, size: tuple[int, int], frames: int | None = None) -> None:
        """Give a fresh session the stream, by its memory's own interface."""
        blank = torch.zeros(1, 3, *size, dtype=torch.uint8, device=self.device)
        session._live = StreamRunner.start_stream(session._stream_adapter, session._kv, None, blank, 0.5)
        self.go_on(session, self.frames if frames is None else frames)

    @torch.no_grad()
    def go_on(self, session: mmaccel.VideoSession, until: int) -> None:
        """Frames up to number `until`."""
        live = session._live
        assert live is not None
        state, film = live.state, live.info
        cells = self._noise(1, film.tokens_per_unit, self.geometry.kv_heads * self.geometry.head_dim) * TOKEN
        cells = cells - cells.mean(1, keepdim=True)
        while state.units() < until:
            first = state.units()
            count = state.units_that_fit(first, min(16, until - first))
            span = slice(first, first + count)
            at, visit = self.scene[span].to(self.device), self.visit[span].to(self.device)
            film.spans += [(first + i, 1) for i in range(count)]
            film.times += [2.0 * (first + i) for i in range(count)]
            look = self.look[at] + 0.3 * self._noise(count, self.geometry.hidden)
            state.begin_pass(
                StreamPass(
                    kind="units",
                    rows=count * film.tokens_per_unit,
                    first=first,
                    count=count,
                    times=tuple(film.times[-count:]),
                    look=look,
                )
            )
            for layer in range(self.geometry.layers):
                mean = self.common[layer] + self.keys[layer][at] + VISIT * self.visits[layer][visit]
                mean = mean + FRAME * self._noise(*mean.shape)
                key = self._heads(mean[:, None] + cells)
                state.append(layer, key, key.roll(1, 2))
                state.view(layer, key.repeat_interleave(self.geometry.heads // self.geometry.kv_heads, 1))
            state.end_pass()
        state.end_ingest()

    def _heads(self, rows: Tensor) -> Tensor:
        """[n, P, G * D] to [1, G, n * P, D] in the model's type."""
        groups, size = self.geometry.kv_heads, self.geometry.head_dim
        return rows.to(self.dtype).view(1, -1, groups, size).transpose(1, 2).contiguous()

    @contextmanager
    def asking(self, *kinds: int) -> Iterator[None]:
        """What is embedded inside is about these scenes."""
        about = self.direction[list(kinds)].sum(0) / len(kinds) ** 0.5

        def tell(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            own = out.float() / out.float().square().mean(-1, keepdim=True).sqrt()
            return (STRENGTH * about + own).to(out.dtype)

        hook = self.family.token_embedding(self.model).register_forward_hook(tell)
        try:
            yield
        finally:
            hook.remove()

    def recall(self, answer: Answer, kinds: tuple[int, ...]) -> float:
        """Of what the layers recalled, the share that shows the scenes asked for."""
        shown = {int(one) for one in torch.isin(self.scene, torch.tensor(kinds)).nonzero()[:, 0]}
        total = sum(one.recalled for one in answer.evidence)
        right = sum(one.recalled for one in answer.evidence if one.frames[0] in shown)
        return right / total if total else 0.0
