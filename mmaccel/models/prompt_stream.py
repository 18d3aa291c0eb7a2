"""`generate` with a KV policy for streams: it reads the video unit by unit (one or two frames), then the text as a question.

The KV memory holds the prompt's longest video; if text such as times stands between its frames, the longest run of frames
whose texts have equal length. All other tokens stay fully visible, as on a stream: those before the video are the head,
those after it are run with the question. A prompt without video is head and question alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ModelView, Runner, TokenTree
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.decoding.watching import DraftStreamSettings
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, PositionIds, TokenLayout
from mmaccel.core.memory.kv import StreamState
from mmaccel.core.prefill.prune import ForwardProbe
from mmaccel.core.streams.asking import QuestionRunner, run_question
from mmaccel.core.streams.draft_stream import PromptAdapter
from mmaccel.core.streams.parts import Moment, Question, concat_padded
from mmaccel.core.streams.stream_runner import GuardedDraftStream, StreamRunner
from mmaccel.models import deepstack, units
from mmaccel.models.attention import MaxPositionCriteria
from mmaccel.models.hf import ModelAttachment
from mmaccel.models.prompt_layout import (
    PIXELS,
    Inputs,
    is_nonempty,
    last_message_span,
    markup_token_ids,
    max_positions,
    question_token_mask,
    remove_padding,
)
from mmaccel.models.runner import HFRunner, open_runner
from mmaccel.models.sequences import StreamCache
from mmaccel.models.step import CapturedStreamSteps
from mmaccel.models.stream import StreamForwardPasses

NO_FRAMES = (0, 1, 1, 1)
"""The shape of the frames of a prompt without video."""


class PromptStreamModel(StreamForwardPasses, PromptAdapter):  # type: ignore[override]
    """A prompt of `generate` as a stream (text before the video, units, question), for the target or a draft model.

    inputs  the prompt's inputs; without pixels once they have been read
    times   seconds of each frame, as far as the inputs tell them
    """

    def __init__(
        self,
        model: nn.Module,
        family: Any,
        inputs: Inputs,
        keeper: ModelView,
        attachment: ModelAttachment | None = None,
    ) -> None:
        super().__init__(model, family, attachment)
        self._keeper = keeper
        at_work: Any = self._gate.attachment_in_force
        if attachment is None and at_work is not None and at_work.owner.view is keeper:
            self._attachment = at_work  # the draft is the target itself
        # A video's pixels stay where they are, and go to the device some frames at a time.
        self.inputs = inputs = {
            name: x.to(self.device) if isinstance(x, Tensor) and name != PIXELS[VIDEO] else x
            for name, x in inputs.items()
        }
        self.ids = ids = inputs["input_ids"]
        self.layout = layout = self.family.layout(self.model, inputs)
        marks = ids.new_tensor(self.family.placeholders(self.model))
        given = any(is_nonempty(inputs.get(one)) for one in PIXELS.values())
        if not given and bool(torch.isin(ids, marks).any()):
            raise ModelError(
                "pixel_values_videos: input_ids show images or videos, and no pixels are given; give all that the "
                "processor returned."
            )
        self._video = self._longest(layout)
        self._head, self._inside, self._tail = self._columns(layout, ids[0].tolist())
        own, others = self._shares(layout)
        if not self._head or self._inside == ids.shape[1]:
            raise ModelError(
                "input_ids: a kv for streams needs text before a video and behind it; build the prompt with the model's "
                "chat template."
            )
        self._made: Callable[[Tensor], dict[str, Any]] = dict
        self.frames, seconds = torch.empty(NO_FRAMES), 1.0
        self._unit, self._count = 1, 0
        if self._video is not None:
            self.frames, self._made = self.family.split_pixels_by_frame(self.model, own)
            self._count = len(self.frames) // self.frames_a_step
            self._unit = (self._inside - self._head) // self._count
            scale = self.family.stream_time_scale(self.model, own)
            seconds = 1.0 if scale is None else scale.unit_s / self.frames_a_step
        self.times = [number * seconds for number in range(len(self.frames))]
        visual = (layout.modality[0, self._tail :] != TEXT).nonzero()[:, 0]
        self._seen = int(visual[-1]) + 1 if len(visual) else 0
        before, behind = slice(self._head), slice(self._tail, self._tail + self._seen)
        rest = torch.cat([ids[0, before], ids[0, behind]])
        if others:
            kinds = inputs.get("mm_token_type_ids")
            if kinds is not None:
                others["mm_token_type_ids"] = torch.cat([kinds[:, before], kinds[:, behind]], 1)
            with self.hold_model():
                given = self.family.forward_inputs(self.model, {**others, "input_ids": rest[None]})
                levels = deepstack.WHERE in given
                self._rest = (deepstack.join_prompt_deepstack(given) if levels else given["inputs_embeds"])[0]
        else:
            self._rest = self.embed_tokens(rest)

    @property
    def ids_through_last_video(self) -> Tensor:
        """The prompt's ids [n] up to the last image or video, which no later turn changes."""
        return self.ids[0, : self._tail + self._seen]

    def make_question(self, text: Any) -> Question:
        """Return the tokens after the video. `text`: all ids [1, S] of a later turn; any string stands for this prompt's."""
        ids = self.ids if isinstance(text, str) else text.to(self.device)
        if not torch.equal(ids, self.ids):
            begun, self.ids = len(self.ids_through_last_video), ids
            layout = self.layout.select_tokens(slice(0, begun)).extend(ids.shape[1] - begun)
            asked = question_token_mask(self.model, ids.to(layout.device), layout.modality, layout.segment)
            self.layout = replace(layout, asked=asked)
        tail = ids[0, self._tail :]
        own = self.layout.select_tokens(slice(self._tail, None)).to(self.device)
        is_text = (own.modality[0] == TEXT).tolist()
        words = last_message_span(tail.tolist(), is_text, *markup_token_ids(self.model), int(ids[0, 0]))
        own = replace(own, position=torch.arange(own.length, device=own.device)[None])
        rows = concat_padded([self._rest[self._head :], self.embed_tokens(tail[self._seen :])])
        return Question(tail, words, rows, self._seen, own)

    def read_video_into(self, live: StreamRunner, deadline: Deadline) -> None:
        live.add_frames(self.frames, self.times, lambda read: None, deadline, live.kv.ingests)
        deadline.check()
        live.state.end_ingest()
        self.inputs, self.frames = {}, torch.empty(NO_FRAMES)

    @property
    def _few(self) -> CapturedStreamSteps:  # type: ignore[override]
        """One for all prompts of the recipe, whose steps are then captured once; a draft's until another model drafts."""
        made = partial(CapturedStreamSteps, self.model, self.family)
        name = f"steps of {'prompts' if self.model is self._keeper.model else 'the draft'}"
        return self._keeper.get_or_create(name, made, lambda steps: steps.model is self.model)  # type: ignore[no-any-return]

    @staticmethod
    def _longest(layout: TokenLayout) -> int | None:
        """The segment of the video of most tokens, the first of several; None: there is no video."""
        found = layout.segment[0][layout.modality[0] == VIDEO]
        numbers, counts = (one.tolist() for one in found.unique(return_counts=True))
        return max(zip(numbers, counts, strict=True), key=lambda one: one[1])[0] if numbers else None

    def _columns(self, layout: TokenLayout, ids: list[int]) -> tuple[int, int, int]:
        """Columns of the prompt: where the video begins, where its units end, and where its marks do."""
        if self._video is None:
            ends, marks = markup_token_ids(self.model)
            text = (layout.modality[0] == TEXT).tolist()
            begin = min(max(1, last_message_span(ids, text, ends, marks, ids[0])[0]), len(ids) - 1)
            return begin, begin, begin
        mine = layout.segment[0] == self._video
        columns = mine.nonzero()[:, 0]
        begin, stop = int(columns[0]), int(columns[-1]) + 1
        if self.family.has_frame_text:
            self._part, words, (start, end) = units.find_longest_evenly_spaced_run(layout, mine)
            self.text_around_unit = words, 0
            if words:
                return start, end, end
        return begin, begin + int((layout.frame[0][mine] >= 0).sum()), stop

    def _shares(self, layout: TokenLayout) -> tuple[dict[str, Any], dict[str, Any]]:
        """What of the inputs tells of the video that the memory holds, and what of other videos and of images."""
        given = self.inputs
        if self.family.split_images is not None:
            parted = self.family.split_images(given, layout, slice(self._head, self._tail))
            if parted is not None:
                return parted  # type: ignore[no-any-return]
        others = {name: given[name] for name in self.family.pixel_rows_per_item(given, IMAGE)}
        own: dict[str, Any] = {}
        if self._video is None:
            return own, others
        before = layout.segment[0][(layout.modality[0] == VIDEO) & (layout.segment[0] < self._video)]
        number = before.unique().numel()
        rest: dict[str, list[Tensor]] = {}
        for name, sizes in self.family.pixel_rows_per_item(given, VIDEO).items():
            begin, whole = sum(sizes[:number]), torch.as_tensor(given[name])
            own[name] = whole[begin : begin + sizes[number]]
            rest[name] = [whole[:begin], whole[begin + sizes[number] :]]
        if any(self.text_around_unit):
            # Frames before and behind the part that the memory holds are two videos more.
            rows, made = self.family.split_pixels_by_frame(self.model, own)
            first, last = (end * self.frames_a_step for end in (self._part[0], self._part[-1] + 1))
            own = made(rows[first:last])
            for more in (made(some) for some in (rows[:first], rows[last:]) if len(some)):
                for name in rest:
                    rest[name].insert(-1, more[name])
        several = {name: torch.cat(some).to(self.device) for name, some in rest.items()}
        return own, others | {name: x for name, x in several.items() if len(x)}

    # What a stream asks.

    def head_ids(self) -> Tensor:
        return self.ids[0, : self._head]

    def head_embeds(self) -> Tensor:
        return self._rest[: self._head]

    def features(self, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        if not len(frames):
            none = self._rest[:0]
            return none[:, None].expand(0, self._unit, -1), none
        unit = self._unit - self.text_around_unit[0]
        return self.encode_prompt_video(
            self._made(frames.to(self.device)), len(frames) // self.frames_a_step, unit
        )

    def embed_units(self, features: Tensor, moments: Sequence[Moment]) -> Tensor:
        if not any(self.text_around_unit) or not len(features):
            return features
        begins = [self._head + frame // self.frames_a_step * self._unit for frame, _ in moments]
        ids = self.ids[0]
        around = [(ids[begin : begin + self.text_around_unit[0]].tolist(), list[int]()) for begin in begins]
        return units.join_unit_embeds(self.embed_tokens, features, around)

    def position_ids(self, size: tuple[int, int], fps: float | None) -> PositionIds:
        positions = self.family.positions(self.model, {**self.inputs, "attention_mask": None})
        rows = positions[:, 0] if positions.ndim == 3 else positions
        begin, end, count = self._head, self._inside, self._count
        limit = max_positions(self.text.config) or 1 << 15
        after = rows[:, end:] - rows[0, end] if self._seen and rows.shape[0] > 1 else None
        head, text = rows[:, :begin], int(rows[0, end])
        if self._video is None:
            unit = rows[:, begin : begin + 1]
            return PositionIds(head, unit, torch.arange, text + 1, 1, limit, after=after)
        unit = rows[:, begin : begin + self._unit]
        if any(self.text_around_unit):
            slope = int(rows[0, begin + self._unit] - rows[0, begin])
            made = PositionIds.evenly_spaced(head, unit, text - (count - 1) * slope, slope, limit, after)
            return self._checked(made, rows[:, begin:end], count)
        one, first = self._alone(1)
        second, third = self._alone(2)[1], self._alone(3)[1]
        slope = second - first

        def steps(units: int) -> Tensor:
            return self.family.time_step_positions(self.model, one, units)

        scale = self.family.stream_time_scale(self.model, one)
        made = PositionIds(head, unit, steps, text - (count - 1) * slope, slope, limit, scale, after)
        return self._checked(made, rows[:, begin:end], count, third - second == slope)

    def _checked(self, made: PositionIds, rows: Tensor, count: int, even: bool = True) -> PositionIds:
        """`made`, the positions of `count` units, once `rows` [A, n] are found to be equal to them."""
        if not even or not torch.equal(made.position_range(0, count).view(rows.shape), rows):
            raise ModelError(
                f"{self.family.name}: the installed transformers gives positions that do not go on evenly from frame to "
                f"frame; set kv to 'full'."
            )
        return self._kept(made)

    def _alone(self, units: int) -> tuple[dict[str, Any], int]:
        """Inputs of a video of so many units alone, and the position of what follows the units."""
        ids, inside = self.ids, units * self._unit
        made = self._made(self.frames[:1].repeat(units * self.frames_a_step, 1, 1, 1))
        marks = self._tail - self._inside
        video = ids[:, self._head : self._head + 1].expand(-1, inside + marks)
        word = next(n for n in range(ids.numel()) if n not in self.family.placeholders(self.model))
        alone = {**made, "input_ids": torch.cat([video, torch.full_like(ids[:, :1], word)], 1)}
        if self.inputs.get("mm_token_type_ids") is not None:
            alone["mm_token_type_ids"] = torch.full_like(alone["input_ids"], VIDEO)
            alone["mm_token_type_ids"][:, -1] = TEXT
        return alone, int(self.family.positions(self.model, alone).flatten(0, -2)[0, inside])


class PromptStreamRunner(Runner):
    """Runs one prompt of `generate` on a KV policy for streams, from `prefill` to `update_hf_cache`.

    cache     the `StreamCache` of the turn before; None: `prefill` begins a stream
    counters  the KV memory's counters, set when the question has ended
    drafts    the draft model's stream; `prefill` asks it the question too
    """

    def __init__(self, attachment: ModelAttachment, cache: StreamCache | None, room: int) -> None:
        """`room` tokens may follow the prompt."""
        self._attachment, self.cache, self._room = attachment, cache, room
        self._open = ExitStack()
        self._question: QuestionRunner | None = None
        self._state: StreamState | None = None
        self._counted: Callable[[], dict[str, float]] = dict
        self._positions = 0
        self.counters: dict[str, float] = {}
        self.drafts, self._deadline = GuardedDraftStream(), Deadline()

    def prefill(
        self,
        inputs: Mapping[str, Any],
        keep: Tensor | None = None,
        compact: bool = False,
        probes: Sequence[ForwardProbe] = (),
    ) -> Tensor:
        attachment, owner = self._attachment, self._attachment.owner
        deadline = self._deadline = getattr(attachment.running, "deadline", None) or Deadline()
        with self._plainly():
            try:
                before, inputs = self.cache, remove_padding(inputs)
                ids = inputs["input_ids"].to(owner.view.device)
                if before is not None:
                    ids = torch.cat([before.ids, ids], 1)
                cache = self.cache = self._begun(inputs) if before is None else before
                owner.attention.meter.begin_pass(ids.shape[1], 0, cache.prompt.layout.video())
                live, self.drafts = cache.live, cache.live.draft_stream
                self._state, self._counted = live.state, live.counters
                self._positions = live.stream.positions.limit
                self._open.callback(owner.track_kv_state(live.state, self))
                meter = owner.attention.meter
                if before is None:
                    cache.prompt.read_video_into(live, deadline)
                    cache.read_sparsely = meter.has_run_patterns()
                turn = run_question(live, ids, self._room, weigh=False, deadline=deadline)
                self._question = self._open.enter_context(turn)
                self._open.enter_context(self.drafts.question_scope(ids, self._room, live.around))
            except BaseException:
                self.update_hf_cache()
                raise
            if before is not None and not self._question.meter.idle:
                meter.idle["a short question is dense"] = None
            meter.merge_counts(self._question.meter)
            return self._question.logits

    def _begun(self, inputs: Inputs) -> StreamCache:
        """A stream that has read what comes before the video of `inputs`."""
        attachment, recipe = self._attachment, self._attachment.owner.recipe
        chunk = getattr(attachment.running, "chunk", None) or recipe.chunk
        view, kv = attachment.owner.view, recipe.kv
        prompt = PromptStreamModel(attachment.model, attachment.family, inputs, view, attachment)
        live = StreamRunner.start_stream(prompt, kv, chunk, prompt.frames, None, True, quiet=True)  # type: ignore[arg-type]
        read = PromptStreamModel, inputs
        told = DraftStreamSettings(None, kv, chunk, prompt=read, deadline=self._deadline)  # type: ignore[arg-type]
        live.draft_stream = GuardedDraftStream.open(recipe.draft, view, told)
        return StreamCache(attachment, prompt, live)

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        # As in a session: what is made in inference mode is not written to outside of it, and keys have the weights' type.
        exact = torch.autocast(self._attachment.owner.view.device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), exact:
            yield

    def _at_work(self) -> QuestionRunner:
        assert self._question is not None
        return self._question

    def position_limit(self, read: int) -> MaxPositionCriteria:
        """Return a criterion that stops the answer to a prompt of `read` tokens at the model's last position."""
        return MaxPositionCriteria(torch.tensor([read + self._at_work().tokens_left]), self._positions, True)

    def step(self, ids: Tensor, branches: TokenTree | None = None) -> Tensor:
        with self._plainly():
            return self._at_work().step(ids, branches)

    def accept(self, path: Tensor) -> None:
        self._at_work().accept(path)

    def truncate(self, length: int) -> None:
        self._at_work().truncate(length)

    def length(self) -> int:
        return self._at_work().length()

    def update_hf_cache(self) -> None:
        """End the question, and close the stream unless a later turn may use its cache. A second call does nothing."""
        state, self._state = self._state, None
        if self.cache is not None and self.cache.lasts and self._deadline.end_reason() is None:
            self.drafts.end_ingest()  # one that has not read the prompt yet would hold its pixels
        if state is not None:
            assert self.cache is not None
            self.counters = self.cache.counters_since_last_call(self._counted())
            self._attachment.owner.release_state(state, self.counters)
        self._open.close()
        # The call keeps this runner until its last prompt has an answer, and is to keep one memory at a time.
        self._question, self._counted = None, dict
        if self.cache is not None and not self.cache.lasts:
            self.cache.close()


def open_prompt_runner(
    attachment: ModelAttachment, model: nn.Module, cache: Any, room: int
) -> HFRunner | PromptStreamRunner:
    """Return a runner of one prompt that continues `cache` (None: begins a stream). `room` tokens may follow the prompt."""
    if cache is None or isinstance(cache, StreamCache):
        return PromptStreamRunner(attachment, cache, room)
    runner, columns = open_runner(model, attachment.family, cache), attachment.cached_columns(cache)
    if columns is not None and cache.get_seq_length():
        runner.delta = int(columns.delta)
    return runner
