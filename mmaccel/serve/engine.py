"""The model at work for all callers: completions under each recipe, and videos kept for the next question."""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anyio import CapacityLimiter, to_thread
from torch import nn

from mmaccel.core.attach import Accelerated, accelerate
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS, Evidence
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.recipe import Recipe, stream_policy
from mmaccel.models import load_processor
from mmaccel.serve import sources
from mmaccel.serve.kept import Kept, KeptVideos
from mmaccel.serve.messages import ChatRequest, ImagePart, Sampling, Text, VideoPart
from mmaccel.serve.metrics import Metrics
from mmaccel.serve.settings import Refused, Settings
from mmaccel.serve.speech import Cutter, Speech
from mmaccel.serve.turns import Turns

log = logging.getLogger("mmaccel.serve")
Put = Callable[[str], None]


@dataclass(frozen=True)
class Completion:
    """An answer, and what it took; `finish_reason` is ours, as `core.decoding.generate.Answer` has it."""

    text: str
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    recipe: str
    report: Mapping[str, Any] = field(repr=False)
    evidence: list[dict[str, Any]] | None = None


class Engine:
    """One model, its processor, and the recipes that requests may name; the first is the default.

    Each recipe runs on a copy of the model that shares its weights, so that none waits for another to be detached. Streams
    run on the model itself.
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
        self.processor.special_tokens = False
        self.recipes, self.metrics = dict(recipes), metrics or Metrics()
        self.default = next(iter(self.recipes))
        self.turns = Turns(settings.limits.at_once, settings.limits.waiting)
        self.metrics.waiting.set_function(self.turns.__len__)
        self.kept = KeptVideos(settings.limits, self.metrics)
        self._fetching: dict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, settings.limits.fetching)
        )
        # Of their own: a source that is slow, or a long prompt, keeps no other kind of work waiting.
        self._threads = CapacityLimiter(64)
        self._idle: dict[str, queue.LifoQueue[Accelerated]] = defaultdict(queue.LifoQueue)
        self._made: dict[str, int] = defaultdict(int)
        self._making, self._drawing = threading.Lock(), threading.Lock()

    def recipe(self, model: str | None, asked: str | None) -> str:
        """The name of the recipe that a request means by its `model` (NAME, or NAME@RECIPE) and by `asked`."""
        name, _, inside = (model or self.name).partition("@")
        if name != self.name:
            raise Refused(404, f"model: this server has {self.name!r} alone; name that.", "model_not_found")
        chosen = asked or inside or self.default
        if chosen not in self.recipes:
            known = ", ".join(map(repr, self.recipes))
            raise Refused(404, f"recipe: this server has {known}; name one of these.", "recipe_not_found")
        return chosen

    def streams(self) -> list[str]:
        """Names of the recipes that serve streams."""
        found = []
        for name, recipe in self.recipes.items():
            try:
                stream_policy(recipe)
            except RecipeError:
                continue
            found.append(name)
        return found

    async def complete(self, request: ChatRequest, caller: str, put: Put) -> Completion:
        """The answer to `request`; `put` gets its text as it comes, in any thread."""
        name = self.recipe(request.model, request.mmaccel.recipe)
        end = time.monotonic() + self.settings.limits.seconds
        most = self._most(request)
        self._check(request)
        began, first = time.monotonic(), list[float]()

        def told(piece: str) -> None:
            if not first:
                first.append(time.monotonic() - began)
            put(piece)

        with tempfile.TemporaryDirectory(prefix="mmaccel-") as folder:
            fetched = await self._fetched(request, caller, Path(folder))
            async with self.turns.turn(caller):
                with self.out_of_memory():
                    if (asked := self._alone(request, name)) is not None:
                        key = caller, name, fetched[0].digest, request.fps, request.frames
                        whole = partial(self._read, fetched[0], request)
                        async with self.kept.open(key, partial(self._keep, whole, name)) as kept:
                            done = await self._answered(kept, name, asked, request, most, told, end)
                    else:
                        done = await self._generated(name, fetched, request, most, told, end)
        draft = done.report["draft"]
        self.metrics.prompt.inc(done.prompt_tokens)
        self.metrics.answered(
            first[0] if first else None, done.report["tokens_per_s"], done.new_tokens, draft
        )
        return done

    def _most(self, request: Sampling) -> int:
        most = request.max_completion_tokens or request.max_tokens or MAX_NEW_TOKENS
        if most > (limit := self.settings.limits.new_tokens):
            raise Refused(400, f"max_tokens: {most} is more than the {limit} of this server; ask for fewer.")
        return most

    def _check(self, request: ChatRequest) -> None:
        limits = self.settings.limits
        parts = [part for message in request.messages for part in message.parts()]
        if sum(len(part.text) for part in parts if isinstance(part, Text)) > limits.text:
            raise Refused(413, f"messages: their text has more than {limits.text} characters; write less.")
        if not any(not isinstance(part, Text) or part.text.strip() for part in parts):
            raise ModelError("messages: they are empty; ask something.")
        if sum(not isinstance(part, Text) for part in parts) > limits.visuals:
            raise Refused(413, f"messages: there are more than {limits.visuals} videos and images.")

    async def _fetched(self, request: ChatRequest, caller: str, folder: Path) -> list[sources.Fetched]:
        """The sources of a request, in order."""
        found = []
        for message in request.messages:
            for part in message.parts():
                if isinstance(part, VideoPart):
                    found.append(await self.fetch(part.video_url.url, "video", caller, folder))
                elif isinstance(part, ImagePart):
                    found.append(await self.fetch(part.image_url.url, "image", caller, folder))
        return found

    async def fetch(self, url: str, kind: sources.Kind, caller: str, folder: Path) -> sources.Fetched:
        """What stands at `url`; a caller has few sources under way."""
        async with self._fetching[caller]:
            work = partial(sources.fetch, url, kind, folder, self.settings)
            return await to_thread.run_sync(work, limiter=self._threads)

    async def thread(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, in a thread."""
        return await to_thread.run_sync(work, limiter=self._threads)

    def _read(self, source: sources.Fetched, request: ChatRequest) -> Any:
        return sources.video(source, self.processor, self.settings.limits, request.fps, request.frames)

    # Videos whose memory is kept.

    def _alone(self, request: ChatRequest, name: str) -> str | None:
        """The question of a request that is one on a single video, greedily, under a memory of streams."""
        parts = request.messages[0].parts()
        fits = len(request.messages) == 1 and request.messages[0].role == "user" and request.greedy
        # A pruner acts on what a stream recalls, and in `generate` on the prompt.
        plain = self.recipes[name].prune is None
        if not (fits and plain and len(parts) == 2 and name in self.streams()):
            return None
        video, text = parts
        return text.text if isinstance(video, VideoPart) and isinstance(text, Text) else None

    async def _keep(self, read: Callable[[], Any], name: str) -> Kept:
        video = await self.thread(read)
        kept = Kept(self.model, self.processor, self.recipes[name], self.settings.limits)
        try:
            stored = isinstance(kv := kept.recipe.kv, StreamPolicy) and kv.ingests
            await (kept.session.ingest(video) if stored else kept.session.watch(video))
        except BaseException:
            await kept.session.close()
            raise
        await self.thread(partial(kept.pictures.add, 0, video.frames))
        return kept

    async def _answered(
        self, kept: Kept, name: str, question: str, request: ChatRequest, most: int, put: Put, end: float
    ) -> Completion:
        wanted, cutter, text = request.mmaccel, Cutter(request.stops), ""
        left = max(0.01, end - time.monotonic())
        reply = kept.session.ask(question, most, timeout=left, evidence=wanted.evidence)
        async for piece in reply:
            text += piece
            if said := cutter.grown(text):
                put(said)
            if cutter.stopped:
                await reply.aclose()
                break
        if said := cutter.grown(text, whole=True):
            put(said)
        report, answer = kept.session.report().to_dict(), reply.answer
        if answer is None:
            new, reason, found = report["new_tokens"], "stop", tuple[Evidence, ...]()
        else:
            new, reason, found = len(answer.ids), answer.finish_reason, answer.evidence
        evidence = kept.told(found, wanted.thumbnails) if wanted.evidence else None
        return Completion(cutter.said, reason, report["prompt_tokens"], new, name, report, evidence)

    # All others.

    async def _generated(
        self,
        name: str,
        fetched: list[sources.Fetched],
        request: ChatRequest,
        most: int,
        put: Put,
        end: float,
    ) -> Completion:
        decode = partial(self.processor.decode, skip_special_tokens=True)
        speech = Speech(decode, request.stops, put, end)
        work = partial(self._generate, name, fetched, request, most, speech, end)
        task = asyncio.ensure_future(self.thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The model is left before the turn goes on to the next one.
            speech.cancelled.set()
            await asyncio.wait([task])
            raise

    def _generate(
        self,
        name: str,
        fetched: list[sources.Fetched],
        request: ChatRequest,
        most: int,
        speech: Speech,
        end: float,
    ) -> Completion:
        place = next(self.model.parameters())
        inputs = self.processor.chat(self._content(request, fetched), device=place.device, dtype=place.dtype)
        if speech.over:
            raise ModelError("the request took too long before the model began; ask for fewer frames.")
        how = {"max_new_tokens": most, "max_time": max(0.01, end - time.monotonic()), **request.options()}
        # Random numbers are the process's own: one draws at a time, and a seed gives the same again.
        drawing = nullcontext() if request.greedy else self._drawing
        with self._copy_of(name) as fast, drawing, torch.no_grad():
            if request.seed is not None:
                torch.manual_seed(request.seed)
            fast.generate(**inputs, streamer=speech, stopping_criteria=[speech.ended], **how)
            report = fast.report().to_dict()
        over = time.monotonic() > end
        speech.end()
        ends = set(self._ends())
        if speech.cutter.stopped or (speech.ids and speech.ids[-1] in ends):
            reason = "stop"
        else:
            reason = "length" if len(speech.ids) >= most else "timeout" if over else "positions"
        read = inputs["input_ids"].shape[1]
        return Completion(speech.cutter.said, reason, read, len(speech.ids), name, report)

    def _content(self, request: ChatRequest, fetched: list[sources.Fetched]) -> list[dict[str, Any]]:
        left, limits = iter(fetched), self.settings.limits

        def piece(part: Text | ImagePart | VideoPart) -> dict[str, Any]:
            if isinstance(part, Text):
                return {"type": "text", "text": part.text}
            if isinstance(part, ImagePart):
                return {"type": "image", "image": sources.image(next(left), limits)}
            return {"type": "video", "video": self._read(next(left), request)}

        return [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": [piece(part) for part in message.parts()],
            }
            for message in request.messages
        ]

    def _ends(self) -> list[int]:
        told: Any = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        told = self.processor.tokenizer.eos_token_id if told is None else told
        return list(told) if isinstance(told, list | tuple) else [told]

    @contextmanager
    def _copy_of(self, name: str) -> Iterator[Accelerated]:
        """The model under a recipe, for one call. A recipe has as many copies as calls run at once; with a draft, one."""
        recipe, idle = self.recipes[name], self._idle[name]
        most = 1 if recipe.draft.active else self.settings.limits.at_once
        with self._making:
            if make := idle.empty() and self._made[name] < most:
                self._made[name] += 1
        try:
            fast = accelerate(sharing(self.model), recipe) if make else idle.get()
        except BaseException:
            self._made[name] -= make
            raise
        try:
            yield fast
        finally:
            idle.put(fast)

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """Turn the device's having no memory left into a refusal of this request alone."""
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
        raise Refused(
            503, "the device has no memory left for this request; ask for fewer frames.", "out_of_memory"
        )

    async def close(self) -> None:
        """Give back all that is kept."""
        await self.kept.close()
        for idle in self._idle.values():
            while not idle.empty():
                idle.get().detach()


def sharing(model: nn.Module) -> nn.Module:
    """A copy of the modules of `model` over the same weights."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)
