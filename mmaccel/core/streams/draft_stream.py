"""The video stream of a draft model that runs in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import ModelFamily, StreamAdapter, StreamModel, stream_attention_config
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.decoding.watching import DraftStream, QuestionAttention
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.prefill.attention import AttentionConfig
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.core.report import counter_increases_since
from mmaccel.core.streams.asking import QuestionRunner, run_question
from mmaccel.core.streams.listening import GuidedRetrievalWrapper
from mmaccel.core.streams.parts import MemoryWrapper
from mmaccel.core.streams.saved_stream import (
    check_saved_model,
    read_stream,
    saved_content_fields,
    write_stream,
)
from mmaccel.core.streams.stream_runner import StreamRunner

FACTS = "stream.json"


class PromptAdapter(StreamModel):
    """A `StreamModel` by which a draft model reads the video and the text of a prompt of `generate` as if it were a stream.

    frames  [T, ...] pixels of the prompt's video, which the draft's memory is to take in, a row per frame; may be empty
    times   seconds at which each frame was shown
    """

    frames: Tensor
    times: list[float]

    @abstractmethod
    def __init__(
        self, model: nn.Module, family: ModelFamily, inputs: Mapping[str, Any], keeper: ModelView
    ) -> None:
        """`inputs` are of one sequence: ids [1, S], pixels, grids; no padding. What prompts share is cached in `keeper`."""

    @abstractmethod
    def read_video_into(self, live: StreamRunner, deadline: Deadline) -> None:
        """Read the video into its stream `live`, and free the pixels. Raises `CallEnded` at the deadline."""


class LocalDraftStream(DraftStream):
    """A `DraftStream` whose draft model runs in this process, with its own KV memory `kv`. It begins with the first frames,
    or, with a `PromptAdapter`, when the first question is read. Of the tokens that a question retrieves the draft reads only
    those that `prune` keeps: `counts` are their numbers before and after, `pruned_tokens` is the difference.

    deadline  has no time limit; another thread cancels it to stop reading
    reading   function: number of tokens in the memory's window -> the sparse pattern for reading stored videos. None, or a
              memory without a window: frames see all earlier ones
    """

    def __init__(
        self,
        adapter: StreamModel,
        kv: StreamPolicy,
        chunk: int | None,
        prune: TokenPruner | None = None,
        reading: Callable[[int], SparsePattern] | None = None,
    ) -> None:
        self._adapter, self._kv, self._chunk, self._prune, self._reading = adapter, kv, chunk, prune, reading
        self._ingesting: AttentionConfig | None = None
        self._guided: GuidedRetrievalWrapper | None = None
        self._live: StreamRunner | None = None
        self._asked: tuple[Any, int] | None = None
        self._question = ExitStack()
        self.deadline = Deadline()

    def add_frames(
        self, frames: Tensor, times: Sequence[float], fps: float | None, timed: bool, ingest: bool = False
    ) -> None:
        if self._live is None:
            parts = self._adapter, self._kv, self._chunk, frames, fps, timed
            self._live = StreamRunner.start_stream(*parts, quiet=True)
        live = self._live
        ingest = ingest and self._kv.ingests
        with self._attention_of_ingestion(live.info.tokens_per_unit) if ingest else nullcontext():
            live.add_frames(frames, list(times), lambda done: None, self.deadline, ingest)
        live.state.forget_old_units(live.unit_time, live.is_pinned)

    def read_prompt(self, deadline: Deadline | None = None) -> None:
        """Run the video of a `PromptAdapter`'s prompt into the memory, unless that is done. Raises `CallEnded` at
        `deadline` (None: that of this stream)."""
        prompt = self._adapter
        if self._live is not None or not isinstance(prompt, PromptAdapter):
            return
        live = StreamRunner.start_stream(prompt, self._kv, self._chunk, prompt.frames, None, True, quiet=True)
        try:
            with (
                self._attention_of_ingestion(live.info.tokens_per_unit) if self._kv.ingests else nullcontext()
            ):
                prompt.read_video_into(live, deadline or self.deadline)
        except BaseException:
            live.close()
            raise
        self._live = live

    @contextmanager
    def _attention_of_ingestion(self, unit: int) -> Iterator[None]:
        """While inside, passes over units of `unit` tokens see what `reading` lists, where the model can run it."""
        adapter = self._adapter
        window = self._kv.footprint(unit, adapter.frames_per_unit).window
        if self._ingesting is None and self._reading is not None and window is not None:
            pattern = self._reading(-(-window // adapter.frames_per_unit) * unit)
            with suppress(RecipeError):
                self._ingesting = stream_attention_config(Recipe(sparse=pattern), adapter)
        before = adapter.attention
        adapter.attention = self._ingesting or before
        try:
            yield
        finally:
            adapter.attention = before

    def wait_for_device(self) -> None:
        if self._adapter.device.type == "cuda":
            torch.cuda.synchronize(self._adapter.device)

    def end_ingest(self) -> None:
        self.read_prompt()
        if self._live is not None:
            self._live.state.end_ingest()

    def checkpoint(self) -> Any:
        return None if self._live is None else self._live.checkpoint()

    def restore(self, mark: Any) -> None:
        self.end_question()
        if mark is None:
            self.close()
        elif self._live is not None:
            self._live.restore(mark)

    @property
    def counts(self) -> dict[str, float]:
        return {} if self._guided is None else self._guided.counts

    @property
    def pruned_tokens(self) -> int:
        """Number of retrieved tokens that the pruner left out of the question that is being asked."""
        counts = [*self.counts.values()] or [0, 0]
        return int(counts[0] - counts[1])

    def prepare_question(self, question: Any, room: int, heard: QuestionAttention | None = None) -> None:
        self._asked = question, room
        pruned = self._prune is not None and heard is not None
        self._guided = GuidedRetrievalWrapper(self._prune, heard) if pruned else None  # type: ignore[arg-type]

    def read_question(self, deadline: Deadline | None = None) -> QuestionRunner:
        """Run the question of `prepare_question`; return its runner, valid until `end_question`. Raises `CallEnded` at the
        deadline. For a prompt of `generate` the runner's counters count the events of this call alone."""
        deadline = deadline or self.deadline
        before = {} if self._live is None else self._live.counters()
        self.read_prompt(deadline)
        if self._live is None or self._asked is None:
            raise ModelError("the draft has watched no frame, or has no question.")
        self._live.around = self._guided or MemoryWrapper()
        runner = self._question.enter_context(
            run_question(self._live, *self._asked, weigh=False, deadline=deadline)
        )
        if isinstance(self._adapter, PromptAdapter):
            counted = runner.counted
            runner.counted = lambda: counter_increases_since(before, counted())
        return runner

    def end_question(self) -> None:
        self._asked = None
        self._question.close()

    def save(self, folder: Path) -> None:
        if self._live is None:
            raise ModelError("the draft has seen no frame.")
        assert isinstance(self._adapter, StreamAdapter)  # a prompt's stream ends with its cache
        facts = {"model": self._adapter.weights_checksum(), **write_stream(folder, self._live)}
        checkpoint_io.write_json(folder / FACTS, {**facts, "kv": saved_content_fields(self._kv)})

    def load(self, folder: Path) -> None:
        if not (folder / FACTS).is_file():
            raise ModelError(f"{folder.parent} was saved without this draft's stream")
        facts = checkpoint_io.read_json(folder / FACTS, {"model": str, "dtype": str, "kv": dict})
        assert isinstance(self._adapter, StreamAdapter)  # a prompt's stream ends with its cache
        check_saved_model(folder, facts, self._adapter)
        # Fields that are not there have their defaults; those of a question, which are not saved, may be any.
        free = {name: getattr(self._kv, name) for name in self._kv.query_time_fields}
        if saved_content_fields(policy("kv", {**free, **facts["kv"]})) != saved_content_fields(self._kv):
            raise ModelError(f"{folder} was saved with another kv of the draft; give the draft that one.")
        self._live = read_stream(folder, folder / FACTS, facts, self._adapter, self._kv, self._chunk)

    def close(self, collected: bool = False) -> None:
        """End the stream; `collected`: the garbage collector calls, in any thread, so nothing may be waited for."""
        live, self._live = self._live, None
        try:
            self.end_question()
        finally:
            if live is not None:
                live.close(collected)
