"""Streams on transformers: a Hugging Face model and its processor as a `VideoSession` uses them.

A pass calls the text model. Meanwhile attention modules hold a copy of their config that names our function, and for its
thread the rotary module returns the identity: keys reach the KV memory before RoPE. Norms and MLPs use fused kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ModelView, TokenTree, home_device
from mmaccel.core.attach import StreamAdapter, adapter_for
from mmaccel.core.errors import ModelError, check_not_cast, check_question
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.buffers import on_device
from mmaccel.core.memory.kv import StreamState
from mmaccel.core.prefill.attention import PASS, AttentionConfig, ForwardPass
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.prefill.sparse import sliding_window_kernel
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter
from mmaccel.core.streams.fair_lock import fair_lock_of
from mmaccel.core.streams.parts import Question, TokenChoice
from mmaccel.core.streams.sources import Clip
from mmaccel.media.preprocess import resize
from mmaccel.models import deepstack, deltanet, dialogue, shards, step
from mmaccel.models.attention import ATTENTION, PLAIN, KVCache
from mmaccel.models.chat import ids_around_video, iterate_video_clips, prefix_length, tokenize_plainly
from mmaccel.models.install import Hooks, model_lock
from mmaccel.models.loading import skip_unused_norm_rows
from mmaccel.models.modules import batched_tower, pointwise_modules, process_in_token_chunks, rebind_function
from mmaccel.models.packed import BatchedStreamPass
from mmaccel.models.processor import Processor
from mmaccel.models.prompt_layout import derive_stream_positions, token_ids
from mmaccel.models.pruning import kept_tokens_per_frame, prune_frames
from mmaccel.models.running_states import StreamRecurrentStates
from mmaccel.models.signals import VisionAttentionProbe, reads_vision_tower
from mmaccel.models.stock import wrap_processor
from mmaccel.models.token_choice import build_token_choice


class StreamForwardPasses:
    """The methods of a `StreamModel` that run the model and need no processor; sessions and `generate` prompts share them.
    `attachment`: the recipe on the model, if this stream belongs to it; a pass under another recipe raises `ModelError`."""

    pruned_per_unit: int | None = None
    text_around_unit: tuple[int, int] = (0, 0)

    def __init__(self, model: nn.Module, family: Any, attachment: Any = None) -> None:
        self.model, self.family, self._attachment = model, family, attachment
        self.view = ModelView(model, family, adapter_for)
        self.frames_a_step = family.frames_per_unit(model)
        self.device, self.dtype = home_device(model), family.token_embedding(model).weight.dtype
        self.layer_devices = [home_device(layer) for layer in family.attended_layers(model)]
        recipe = Recipe() if attachment is None else attachment.owner.recipe
        plain = AttentionConfig(recipe, "auto", sliding_window_kernel(self.device, self.dtype))
        self.attention = plain if recipe.sparse.dense else attachment.owner.attention
        self.text: Any = family.text_model(model)
        self._gate, self.turns = model_lock(self.text), fair_lock_of(self.text)
        self._between = partial(self.turns.yield_between_layers, self.device)

    def warm_up_decoding(self, state: Any, running: Any) -> None:
        if self.device.type in step.DEVICES:
            step.capture_answer_step(self, state, running)

    @cached_property
    def _few(self) -> step.CapturedStreamSteps:
        """The captured steps of questions and answers: those of all streams of the model."""
        return step.shared_captured_steps(self)

    def encode_prompt_video(self, inputs: Mapping[str, Any], units: int, unit: int) -> tuple[Tensor, Tensor]:
        """Encode a video's `inputs`, `units` time steps of `unit` tokens. Return features [n, P, E] of the stream's units
        (time steps, or what the recipe's pruner keeps of each group of them), and [m, E] of separator tokens at the end."""
        with self.hold_model(), batched_tower(self.family, self.model, fuse=False), Hooks() as hooks:
            listens = self.frame_pruner and reads_vision_tower(self.frame_pruner)
            vision = VisionAttentionProbe(hooks, self.model, self.family) if listens else None
            captures = not listens and self.device.type in step.DEVICES
            rows = step.shared_captured_steps(self).tower.features(inputs) if captures else None
            if rows is None:
                for block in self._tower:
                    hooks.add_pre_hook(block, self._between)
                rows = self.family.encode_frames(self.model, inputs)
        if self.frame_pruner is not None and units:
            return prune_frames(self.frame_pruner, self.view.geometry, rows, units, unit, vision)
        return rows[: units * unit].view(units, unit, -1), rows[units * unit :]

    @cached_property
    def _tower(self) -> nn.ModuleList:
        """The layers of the vision tower."""
        others = {*self.model.modules()} - {*self.text.modules()}
        return max((x for x in others if isinstance(x, nn.ModuleList)), key=len, default=nn.ModuleList())

    def new_running_states(self) -> Any:
        states = self.family.recurrent_layers(self.model)
        return StreamRecurrentStates(self, states) if states else None

    @property
    def frames_per_unit(self) -> int:  # type: ignore[override]
        return self.frames_a_step * (1 if self.frame_pruner is None else self.frame_pruner.group)

    @property
    def frame_pruner(self) -> TokenPruner | None:
        """The recipe's pruner, if it drops tokens of each frame before the language model; else None."""
        acts = None if (prune := self.attention.recipe.prune) is None else prune.for_stream()
        return None if acts is None or acts.stage != "frames" or not acts.compact else acts

    def _kept(self, made: PositionIds) -> PositionIds:
        """The positions of what the recipe's pruner leaves of units at positions `made`."""
        if self.frame_pruner is None:
            return made
        tokens = made.tokens - (words := sum(self.text_around_unit))
        left = kept_tokens_per_frame(self.frame_pruner, tokens)
        self.pruned_per_unit = tokens * self.frame_pruner.group - left
        return made.renumbered_positions(left + words)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self.family.token_embedding(self.model)(ids.to(self.device))  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self.family.logits(self.model, hidden)

    def run_layers(
        self,
        state: StreamState,
        embeds: Tensor,
        hidden: bool = False,
        few: bool = False,
        check: Callable[[], None] | None = None,
        branches: TokenTree | None = None,
        meter: Meter | None = None,
        input_hooks: Mapping[int, Callable[[Tensor], None]] | None = None,
        running: Any = None,
    ) -> Tensor:
        rest = 0 if few else self.attention.recipe.dense_tail  # no row of a unit is a prompt's last
        shared = None if few or check or running or input_hooks else self.pass_buffers(state, embeds)
        told: dict[str, Any] = {"check": check or (None if few or shared else self._between), "meter": meter}
        told |= {"state": state, "stream": True, "later": few}
        run = ForwardPass(self.attention, False, rest, branches, **told)
        captured = few and branches is None and not input_hooks and embeds.device.type in step.DEVICES
        steps = self._few if captured and embeds.shape[1] == self.view.geometry.hidden else None
        slots = None if steps is None else state.new_kv_slots()
        if slots is None and "_few" in self.__dict__:
            self._few.invalidate_layer_check()
        if steps is not None and steps.can_run_fused(embeds, slots is not None):
            with self.hold_model():
                return steps.run_step(run, embeds, hidden, slots, running)
        if shared:
            with self.hold_model():
                forward = partial(self._forward, run, hidden=hidden, hooks={})
                return self.turns.add_launched_pass(state.replay_forward(embeds, forward, shared))
        return self._forward(run, embeds, hidden, input_hooks or {}, few, running)

    def pass_buffers(self, state: StreamState, embeds: Tensor) -> Any:
        """What replays the pass of units `embeds` that has begun on `state`; None: it is launched."""
        whole = embeds.device.type in step.DEVICES and embeds.shape[1] == self.view.geometry.hidden
        found = step.shared_captured_steps(self).unit_buffers.find() if whole and state.replays_pass else None
        state.replays_pass = found is not None
        return found

    def _forward(
        self, run: Any, embeds: Tensor, hidden: bool, hooks: Any, few: bool = False, running: Any = None
    ) -> Tensor:
        """Final states [n, E] of rows `embeds` through the modules of the layers."""
        more: dict[str, Any] = {}
        state: Any = run if isinstance(run, BatchedStreamPass) else run.state
        if embeds.shape[1] > (wide := self.view.geometry.hidden):
            embeds, more = deepstack.split_deepstack_rows(embeds, wide)
        cache: Any = KVCache(state, self.view.geometry.layers, None if running is None else running.states)
        if running is not None:
            running.cache, cache.branches = cache, run.branches
        positions = torch.zeros(1, embeds.shape[0], dtype=torch.long, device=embeds.device)
        forward = self.text if self._attachment is None else self._attachment.forward
        with self.hold_model(), self._hooked(state, hidden, hooks, few), cache.allow_append():
            out = forward(
                inputs_embeds=embeds[None],
                position_ids=positions.expand(3, 1, -1) if self.family.mrope else positions,
                # Of four axes: transformers makes none of its own.
                attention_mask=embeds.new_ones(1, 1, 1, 1),
                past_key_values=cache,
                use_cache=True,
                **{PASS: run},
                **more,
            )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    @property
    def can_batch_answers(self) -> bool:  # type: ignore[override]
        return step.shared_captured_steps(self).can_run_fused(torch.empty(1, 0, device=self.device))

    def run_batched_passes(self, passes: Any, embeds: Tensor, units: bool = False) -> Any:
        if units:
            joined = BatchedStreamPass(passes, self._between)
            return self._forward(joined, embeds, passes[0][2], {}), joined.errors
        with self.hold_model():
            return step.shared_captured_steps(self).run_batched_answers(passes, embeds)

    @contextmanager
    def hold_model(self) -> Iterator[None]:
        with self._gate.call_without_recipe():
            if self._gate.attachment_in_force is not self._attachment:
                raise ModelError(
                    "the model is accelerated; detach the recipe before a session uses it, or give the session its own copy."
                )
            with self.turns.hold(), torch.inference_mode(False), torch.no_grad():
                yield

    @contextmanager
    def _hooked(
        self, state: StreamState, hidden: bool, input_hooks: Mapping[int, Callable[[Tensor], None]], few: bool
    ) -> Iterator[None]:
        """The hooks of a pass, for its thread: attention of ours without rotation; `state` and `input_hooks` hear layers."""
        thread = threading.get_ident()

        def unturned(module: nn.Module, args: Any, out: Any) -> Any:
            if threading.get_ident() != thread:
                return out
            cos, sin = out
            return torch.ones_like(cos), torch.zeros_like(sin)

        def left(whole: Any, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
            return (query, key) if threading.get_ident() == thread else whole(query, key, *rest, **named)

        def entering(ear: Callable[[Tensor], None], _: nn.Module, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread:
                ear(args[0] if args else kwargs["hidden_states"])

        def leaving(ear: Callable[[Tensor], None], module: nn.Module, args: Any, out: Any) -> None:
            if threading.get_ident() == thread:
                ear(out if isinstance(out, Tensor) else out[0])

        layers, shared = self.family.attended_layers(self.model), self.text.config
        inside = self.family.attentions(self.model)
        with Hooks() as hooks:
            hooks.add_hook(self.family.rotary_module(self.model), unturned)
            if self._attachment is None:  # else all of this is there
                rebind_function(hooks, inside, self.family.rotate_function, left)
                process_in_token_chunks(hooks, pointwise_modules(self.model, self.family), self.family)
                facts = {PLAIN: shared, **self.family.attention_layer_indices(self.model)}
                hooks.set_attention(inside, shared, ATTENTION, **facts)
                if states := self.family.recurrent_layers(self.model):
                    deltanet.hook_deltanet(hooks, states.values())
            for number, layer in enumerate(layers if hidden else ()):
                hooks.add_pre_hook(layer, partial(entering, partial(state.receive_hidden, number)))
            for number, ear in input_hooks.items():
                if number < len(layers):
                    hooks.add_pre_hook(layers[number], partial(entering, ear))
                else:
                    hooks.add_hook(layers[-1], partial(leaving, ear))
            if not few and len({*self.layer_devices}) > 1:
                hooks.add_pre_hook(self.text.norm, partial(skip_unused_norm_rows, thread), prepend=True)
            yield


class HFStreamAdapter(StreamForwardPasses, StreamAdapter):  # type: ignore[override]
    """`StreamAdapter` for transformers: a model, its family and its processor."""

    def __init__(self, model: nn.Module, family: Any, processor: Any) -> None:
        if why := family.unable.get("streams"):
            raise ModelError(f"models of the family {family.name!r} {why}; use generate, not a session.")
        if not isinstance(processor, Processor) or getattr(processor, "guessed", False):
            processor = wrap_processor(processor, model.config.model_type)  # type: ignore[union-attr, arg-type]
        if processor.model_type not in family.model_types:
            raise ModelError(
                f"processor: it is for models of type {processor.model_type!r}, not for this one; load the model's own."
            )
        super().__init__(model, family)
        self.processor = processor
        self._units: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}

    def iterate_clips(
        self, video: Any, fps: float | None, check: Callable[[], None] | None = None
    ) -> Generator[Clip, None, None]:
        return iterate_video_clips(self.processor, video, fps, check)

    def accepts_frames(self, frames: Tensor, size: tuple[int, int]) -> bool:
        height, width = frames.shape[-2:]
        return (height, width) == size or self._unit((height, width))[0] == self._unit(size)[0]

    def features(self, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        frames = frames if self.accepts_frames(frames, size) else self.resize_frames(frames, size)
        if self.device.type == "cuda" and not frames.is_cuda:
            frames = frames.pin_memory().to(self.device, non_blocking=True)  # without waiting for the device
        seen, unit = self._unit(size)
        inputs = self._pixels(frames, seen)
        if self.family.frame_size(self.model, inputs) != seen:
            raise ModelError(
                f"frames of {frames.shape[3]}x{frames.shape[2]} come to the model in a size that depends on their number; "
                "set cap_pixels_per_frame to false in the processor's video settings."
            )
        return self.encode_prompt_video(inputs, frames.shape[0] // self.frames_a_step, unit)

    @property
    def batch_key(self) -> Hashable | None:  # type: ignore[override]
        alone, on = self.frame_pruner is not None or len({*self.layer_devices}) > 1, self.device
        if on.type == "cuda" and not alone:  # what is queued on another stream is not in order with this
            alone = torch.cuda.current_stream(on) != torch.cuda.default_stream(on)
        # Each session wraps a stock processor anew.
        return None if alone else id(getattr(self.processor, "stock", self.processor))

    def _pixels(self, frames: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        check_not_cast(self.dtype, self.family.token_embedding(self.model).weight.dtype)
        return self.processor.prepare_pixels(frames, device=self.device, dtype=self.dtype)

    def _unit(self, size: tuple[int, int]) -> tuple[tuple[int, int], int]:
        """What frames of (height, width) come to: the size in which the model sees them, and the tokens of a unit."""
        if size not in self._units:
            inputs, _, unit, _ = self._positions(size, None, 1)
            tokens = unit.shape[1] - sum(self.text_around_unit)
            self._units[size] = self.family.frame_size(self.model, inputs), tokens
        return self._units[size]

    resize_frames = staticmethod(resize)

    def head_ids(self) -> Tensor:
        return self._template[0]

    def make_question(self, text: Any) -> Question:
        ids, words = self.question_ids(text)
        asking = Question(ids, words, self.embed_tokens(ids), suffix_length=self._template[2])
        images = [] if isinstance(text, str) else dialogue.question_messages(text)[2]
        return dialogue.expand_image_placeholders(self, asking, images) if images else asking

    def token_choice(self, ids: Tensor, most: int, settings: Mapping[str, Any], drafts: bool) -> TokenChoice:
        return build_token_choice(self, ids, most, settings, drafts)

    def question_ids(self, question: Any) -> tuple[Tensor, tuple[int, int]]:
        if isinstance(question, list | tuple):
            ids, plain = (self._chat(one)[1] for one in dialogue.question_messages(question)[:2])
        else:
            ids, plain = self._chat(check_question(question))[1], self._template[1]
        begin = prefix_length(ids, plain)
        end = prefix_length(ids[begin:][::-1], plain[begin:][::-1])
        return on_device(ids, self.device), (begin, len(ids) - end)

    def text_ids(self, text: str) -> Tensor:
        return on_device(tokenize_plainly(self.processor.tokenizer, text), self.device)

    @cached_property
    def _template(self) -> tuple[Tensor, list[int], int]:
        (head, tail), asked = self._chat(""), self._chat("?")[1]
        return (torch.tensor(head, device=self.device).long(), tail, prefix_length(tail[::-1], asked[::-1]))

    def _chat(self, question: str | list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Ids before and after the video of a prompt; `question` is a text or messages (`dialogue.question_messages`)."""
        check_not_cast(self.dtype, self.family.token_embedding(self.model).weight.dtype)
        return ids_around_video(self.processor, question)

    def end_token_ids(self) -> frozenset[int]:
        own = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return frozenset(token_ids(getattr(self.text.config, "eos_token_id", None) if own is None else own))

    def decode(self, ids: Tensor) -> str:
        return str(self.processor.decode(ids.tolist()))

    def position_ids(self, size: tuple[int, int], fps: float | None) -> PositionIds:
        some = [self._positions(size, fps, units) for units in (1, 2, 3)]
        made = derive_stream_positions(self.family, self.model, some, not any(self.text_around_unit))
        return self._kept(made)

    def _positions(
        self, size: tuple[int, int], fps: float | None, units: int
    ) -> tuple[dict[str, Any], Tensor, Tensor, int]:
        """A prompt with so many units, the positions of its head [A, h] and units [A, units * P], and its text's first."""
        count, (head, tail, _) = units * self.frames_a_step, self._template
        inputs = self.prompt(torch.zeros(count, 3, *size, dtype=torch.uint8), fps, [0.0] * count, tail)
        positions = self.family.positions(self.model, inputs)
        rows = positions[:, 0] if positions.ndim == 3 else positions
        begin, inside = head.numel(), int((self.family.layout(self.model, inputs).frame[0] >= 0).sum())
        end = begin + inside + units * sum(self.text_around_unit)
        return inputs, rows[:, :begin], rows[:, begin:end], int(rows[0, end])

    def prompt(
        self, frames: Tensor, fps: float | None, times: Sequence[float], tail: Sequence[int]
    ) -> dict[str, Any]:
        """Return model inputs of a prompt equal to a stream: its head, `frames` [T, 3, H, W] at `times` (s), ids `tail`."""
        inputs = self.processor(
            self.processor.video_token, videos=[frames], fps=fps, add_special_tokens=False, device=self.device
        )
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        shown, end = self._shown(inputs, times), torch.tensor(tail, device=self.device)
        inputs["input_ids"] = ids = torch.cat([self.head_ids()[None], shown, end[None]], 1)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = self.family.token_modalities(self.model.config, ids).int()
        return inputs

    def _shown(self, inputs: Mapping[str, Any], times: Sequence[float]) -> Tensor:
        """[1, n] ids of the video of `inputs`, which show nothing else."""
        return inputs["input_ids"]  # type: ignore[no-any-return]

    def weights_checksum(self) -> str:
        return shards.weights_checksum(self.model)
