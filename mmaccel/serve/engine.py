"""Runs the model for all requests: chat completions under each recipe, and videos cached for the next question."""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmaccel.core.adapter import home_device
from mmaccel.core.attach import Accelerated, adapter_for
from mmaccel.core.decoding.batch import Batch, BatchSlot
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, CallEnded, Deadline
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.recipe import Recipe, stream_policy
from mmaccel.core.streams.live import await_or_cancel, run_in_thread
from mmaccel.media.video import Video
from mmaccel.models import load_processor
from mmaccel.models.token_choice import build_schema_logits_processor, end_token_ids
from mmaccel.serve import sources
from mmaccel.serve.copies import CHECK_S, ModelCopyPool
from mmaccel.serve.kept import StreamEntry, VideoCache, without_kv_age_limit
from mmaccel.serve.messages import ChatRequest, ImagePart, TextPart, VideoPart
from mmaccel.serve.metrics import Metrics
from mmaccel.serve.settings import Limits, Refused, Settings
from mmaccel.serve.speech import StopTextFilter, TextStreamer, count_tokens_through_stop
from mmaccel.serve.turns import FairQueue

log = logging.getLogger("mmaccel.serve")
Put = Callable[[str], None]
OUT_OF_MEMORY = "out_of_memory"
DEVICE_SHARE = 0.9
"""Of what is free on the device beside the model: the rest is for what passes compute."""


@dataclass(frozen=True)
class Completion:
    """An answer and its statistics; `finish_reason` as in `core.decoding.generate.Answer`. `ttft_s`: seconds from request to
    first token, with waiting and reading the video. `alone`: why it shared no decode step with other answers, or ""."""

    text: str
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    recipe: str
    report: Mapping[str, Any] = field(repr=False)
    evidence: list[dict[str, Any]] | None = None
    ttft_s: float | None = None
    alone: str = ""


@dataclass(frozen=True)
class ActiveRequest:
    """A request being served: its recipe, `fetched` images and videos, `most` new tokens, and the callback `put` for pieces
    of the answer. `joined` is called once its prompt has been read: the next request may then read its own."""

    request: ChatRequest
    recipe: str
    fetched: list[sources.FetchedMedia]
    most: int
    put: Put
    deadline: Deadline
    joined: Callable[[], object]


class Engine:
    """One model, its processor, and the recipes that requests may name; the first is the default.

    Each recipe runs on its own copy of the model with shared weights, so that no request waits for another recipe to be
    detached. Streams run on the model itself.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        processor: Any,
        recipes: Mapping[str, Recipe],
        settings: Settings,
        metrics: Metrics | None = None,
    ) -> None:
        self.name, self.model, self.settings = name, model, settings
        self.processor = load_processor(processor, special_tokens=False, like=model)
        self.recipes, self.metrics = dict(recipes), metrics or Metrics()
        self.default = next(iter(self.recipes))
        self.turns = FairQueue(settings.limits.at_once, settings.limits.waiting, settings.limits.together)
        self.metrics.waiting.set_function(self.turns.__len__)
        self.batch = Batch(self.metrics.together.observe)
        self.kept = VideoCache(settings.limits, self.metrics)
        self._fetching: dict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, settings.limits.fetching)
        )
        self.copies, self._drawing = ModelCopyPool(model, self.turns.most), threading.Lock()

    def find_recipe(self, model: str | None, asked: str | None) -> str:
        """Return the name of a request's recipe: `asked`, else RECIPE if `model` is NAME@RECIPE, else the default. Raises
        `Refused` for an unknown model or recipe."""
        name, _, inside = (model or self.name).partition("@")
        if name != self.name:
            raise Refused(404, f"model: this server has {self.name!r} alone; name that.", "model_not_found")
        chosen = asked or inside or self.default
        if chosen not in self.recipes:
            known = ", ".join(map(repr, self.recipes))
            raise Refused(404, f"recipe: this server has {known}; name one of these.", "recipe_not_found")
        return chosen

    def stream_recipe_names(self) -> list[str]:
        """Return the names of the server's recipes that support video streams."""
        found = []
        for name, recipe in self.recipes.items():
            try:
                stream_policy(recipe)
            except RecipeError:
                continue
            found.append(name)
        return found

    def free_device_bytes(self) -> float:
        """Return how many bytes streams may take on the GPUs that hold the model's layers; infinity if one is not a GPU."""
        devices = {home_device(layer) for layer in adapter_for(self.model).layers(self.model)}
        if any(one.type != "cuda" for one in devices):
            return math.inf
        return DEVICE_SHARE * sum(torch.cuda.mem_get_info(one)[0] for one in devices)

    async def answer_chat_request(self, request: ChatRequest, caller: str, put: Put) -> Completion:
        """Answer a chat request of `caller`; calls `put` with the text piece by piece, from any thread. Raises `Refused`."""
        deadline, first = Deadline(self.settings.limits.seconds), list[float]()

        def told(piece: str) -> None:
            if not first:
                first.append(time.perf_counter() - deadline.began)
            put(piece)

        name, most = self.find_recipe(request.model, request.mmaccel.recipe), self._checked(request)
        with tempfile.TemporaryDirectory(prefix="mmaccel-") as folder:
            fetched = await self._fetched(request, caller, Path(folder), deadline)
            loop = asyncio.get_running_loop()
            async with self.turns.wait_for_turn(caller) as leave:
                joined = partial(loop.call_soon_threadsafe, leave)
                asked = ActiveRequest(request, name, fetched, most, told, deadline, joined)
                try:
                    done = await self._done(asked, caller)
                except Refused as error:
                    # What is kept for later gives way to what is asked now.
                    if error.code != OUT_OF_MEMORY or not await self.kept.close_unused(0) or first:
                        raise
                    done = await self._done(asked, caller)
        self.metrics.prompt.inc(done.prompt_tokens)
        figures = done.report["tokens_per_s"], done.new_tokens, done.report["draft"]
        ttft_s = first[0] if first else None
        self.metrics.count_answer(ttft_s, *figures)
        self.metrics.alone.inc(bool(done.alone))
        return replace(done, ttft_s=ttft_s)

    def _checked(self, request: ChatRequest) -> int:
        """How many tokens an answer may have. Raises `Refused` or `ModelError` for what is too much, or nothing."""
        limits, parts = self.settings.limits, [one for message in request.messages for one in message.content]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if len(texts) == len(parts) and not any(map(str.strip, texts)):
            raise ModelError("messages: they are empty; ask something.")
        if sum(map(len, texts)) > limits.text:
            raise Refused(413, f"messages: their text has more than {limits.text} characters; write less.")
        if len(parts) - len(texts) > limits.visuals:
            raise Refused(413, f"messages: there are more than {limits.visuals} videos and images.")
        most = request.max_completion_tokens or request.max_tokens or MAX_NEW_TOKENS
        if most > limits.new_tokens:
            raise Refused(400, f"max_tokens: {most} is more than the {limits.new_tokens} of this server.")
        return most

    async def _fetched(
        self, request: ChatRequest, caller: str, folder: Path, deadline: Deadline
    ) -> list[sources.FetchedMedia]:
        """The sources of a request, in order, which together have no more bytes than one may have."""
        found, limits = list[sources.FetchedMedia](), self.settings.limits
        for part in (part for message in request.messages for part in message.content):
            if isinstance(part, TextPart):
                continue
            address = part.video_url if isinstance(part, VideoPart) else part.image_url
            kind: sources.Kind = "video" if isinstance(part, VideoPart) else "image"
            left = limits.source_bytes - sum(one.size for one in found)
            how = replace(self.settings, limits=replace(limits, source_bytes=left))
            found.append(await self.fetch_media(address.url, kind, caller, folder, deadline, how))
        return found

    async def fetch_media(
        self,
        url: str,
        kind: sources.Kind,
        caller: str,
        folder: Path,
        deadline: Deadline,
        settings: Settings | None = None,
    ) -> sources.FetchedMedia:
        """Download or open the image or video at `url`. The number of concurrent fetches per caller is limited."""
        work = partial(sources.fetch_media, url, kind, folder, settings or self.settings, deadline)
        async with self._fetching[caller]:
            return await await_or_cancel(run_in_thread(work), deadline)

    def decode_video(
        self,
        source: sources.FetchedMedia,
        fps: float | None,
        frames: int | None,
        deadline: Deadline,
        limits: Limits | None = None,
    ) -> Video:
        """Decode the sampled frames of a video. Raises `CallEnded` if the deadline passes meanwhile."""
        deadline.check()
        limits = limits or self.settings.limits
        return sources.sample_video(
            source, self.processor, limits, fps, frames, lambda done, of: deadline.check()
        )

    async def _done(self, asked: ActiveRequest, caller: str) -> Completion:
        question, request = self._alone(asked), asked.request
        with self.refuse_out_of_memory():
            if question is None:
                speech = TextStreamer(self.processor.decode, request.stop_texts, asked.put, asked.deadline)
                # The model is left before the turn goes on to the next one.
                return await await_or_cancel(
                    run_in_thread(partial(self._generate, asked, speech)), asked.deadline
                )
            key = caller, asked.recipe, asked.fetched[0].digest, request.fps, request.frames
            async with self.kept.get_or_open(key, partial(self._keep, asked)) as kept:
                return await self._answered(kept, asked, question)
        raise AssertionError("out_of_memory lets nothing through")

    # Videos whose memory is kept.

    def _alone(self, asked: ActiveRequest) -> str | None:
        """The question of a request that is one on a single video, greedily, under a memory of streams."""
        first, *more = asked.request.messages
        parts = first.content
        fits = asked.recipe in self.stream_recipe_names() and self.recipes[asked.recipe].prune is None
        if more or first.role != "user" or not asked.request.greedy or not fits or len(parts) != 2:
            return None
        video, text = parts
        return text.text if isinstance(video, VideoPart) and isinstance(text, TextPart) else None

    async def _keep(self, asked: ActiveRequest) -> StreamEntry:
        request, deadline = asked.request, asked.deadline
        reading = partial(self.decode_video, asked.fetched[0], request.fps, request.frames, deadline)
        video = await await_or_cancel(run_in_thread(reading), deadline)
        parts = self.processor, without_kv_age_limit(self.recipes[asked.recipe]), self.settings.limits
        kept = StreamEntry(self.model, *parts)
        try:
            stored = isinstance(kv := kept.recipe.kv, StreamPolicy) and kv.ingests
            call = kept.session.ingest if stored else kept.session.watch
            if await call(video, timeout=deadline.seconds_left()) < len(video):
                raise CallEnded("timeout")
            await run_in_thread(partial(kept.pictures.add, 0, video.frames))
            kept.read_usage()
        except BaseException:
            await kept.session.close()
            raise
        return kept

    async def _answered(self, kept: StreamEntry, asked: ActiveRequest, question: str) -> Completion:
        wanted, cutter, text = asked.request.mmaccel, StopTextFilter(asked.request.stop_texts), ""
        async with kept.asking:  # a session reports on its last answer alone
            left = max(0.01, asked.deadline.seconds_left() or 0.0)
            reply = kept.session.ask(
                question, asked.most, timeout=left, evidence=wanted.evidence, **asked.request.answer_schema
            )
            async for piece in reply:
                if not (text or kept.recipe.draft.active):
                    asked.joined()
                text += piece
                if said := cutter.next_text_piece(text):
                    asked.put(said)
                if cutter.stopped:
                    await reply.aclose()
                    break
            answer = await reply
            report = (await run_in_thread(kept.session.report)).to_dict()
        if said := cutter.next_text_piece(text, whole=True):
            asked.put(said)
        evidence = kept.evidence_frames_json(answer.evidence, wanted.thumbnails) if wanted.evidence else None
        reason = "stop" if cutter.stopped else answer.finish_reason
        rows, new = report["prompt_tokens"], len(answer.ids)
        if cutter.stopped:
            new = count_tokens_through_stop(self.processor.decode, answer.ids, asked.request.stop_texts)
        return Completion(cutter.said, reason, rows, new, asked.recipe, report, evidence)

    # All others.

    def _generate(self, asked: ActiveRequest, speech: TextStreamer) -> Completion:
        request, deadline, place = asked.request, asked.deadline, next(self.model.parameters())
        inputs = self.processor.chat(self._content(asked), device=place.device, dtype=place.dtype)
        deadline.check()
        rows = inputs["input_ids"].shape[1]
        ends = end_token_ids(self.model, self.processor.tokenizer)
        how = {"max_new_tokens": asked.most, "max_time": deadline.seconds_left(), **request.options()}
        for schema in request.answer_schema.values():
            tokenizer = self.processor.tokenizer
            how["logits_processor"] = [
                build_schema_logits_processor(self.model, tokenizer, schema, ends, rows)
            ]
        with ExitStack() as drawing, self._copy_of(asked.recipe, deadline) as fast, torch.no_grad():

            def joined() -> None:
                drawing.close()
                asked.joined()

            fast.seat = seat = BatchSlot(self.batch, joined=joined, deadline=deadline)
            if not request.greedy:
                # An answer decoded alone draws the process's own random numbers, one answer at a time.
                drawing.enter_context(self._draws(deadline))
                seed = torch.seed() if request.seed is None else request.seed
                torch.manual_seed(seed)
                seat.generator = torch.Generator(place.device).manual_seed(seed)
            fast.generate(**inputs, streamer=speech, stopping_criteria=[speech.ended], **how)
            report = fast.report().to_dict()
        over = deadline.end_reason()
        speech.end()
        if speech.cutter.stopped or (speech.ids and speech.ids[-1] in ends):
            reason = "stop"
        else:
            reason = "length" if len(speech.ids) >= asked.most else over or "positions"
        what = speech.cutter.said, reason, rows, len(speech.ids), asked.recipe, report
        return Completion(*what, alone=seat.alone)

    def _content(self, asked: ActiveRequest) -> list[dict[str, Any]]:
        """The messages as `Processor.chat` takes them."""
        left, request, limits = iter(asked.fetched), asked.request, self.settings.limits

        def piece(part: TextPart | ImagePart | VideoPart) -> dict[str, Any]:
            nonlocal limits
            if isinstance(part, TextPart):
                return {"type": "text", "text": part.text}
            if isinstance(part, ImagePart):
                frames: Any = sources.decode_image(next(left), limits)
                found = {"type": "image", "image": frames}
            else:
                video = self.decode_video(next(left), request.fps, request.frames, asked.deadline, limits)
                frames, found = video.frames, {"type": "video", "video": video}
            limits = replace(limits, decoded_bytes=limits.decoded_bytes - frames.nbytes)
            return found

        roles = {"developer": "system"}
        said = [(one.role, [piece(part) for part in one.content]) for one in request.messages]
        return [{"role": roles.get(role, role), "content": parts} for role, parts in said]

    @contextmanager
    def _draws(self, deadline: Deadline) -> Iterator[None]:
        while not self._drawing.acquire(timeout=CHECK_S):
            deadline.check()
        try:
            yield
        finally:
            self._drawing.release()

    def _copy_of(self, name: str, deadline: Deadline) -> AbstractContextManager[Accelerated]:
        return self.copies.borrow(name, self.recipes[name], deadline)

    @contextmanager
    def refuse_out_of_memory(self) -> Iterator[None]:
        """Context that turns an out-of-memory error into a 503 response of this request only."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            log.warning("out of memory: %s", error)
        except RuntimeError as error:
            if "not enough memory" not in str(error):  # what the allocator of a CPU says
                raise
            log.warning("out of memory: %s", error)
        else:
            return
        self.metrics.out_of_memory.inc()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise Refused(503, "the device has no memory for this request; ask for fewer frames.", OUT_OF_MEMORY)

    async def close(self) -> None:
        """Release cached videos and model copies."""
        await self.kept.close()
        self.copies.close()
