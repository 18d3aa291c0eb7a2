"""`HFRunner`: prefill, decode step and rollback of one sequence on one Hugging Face model, with explicit positions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import Columns, Runner, TokenTree
from mmaccel.core.attach import attached
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.memory.kv import KVState
from mmaccel.core.prefill.prune import NOTE, ForwardPassInfo, ForwardProbe
from mmaccel.core.registry import DEFAULTS, registry
from mmaccel.models import decode, deepstack
from mmaccel.models.install import Hooks
from mmaccel.models.modules import batched_tower
from mmaccel.models.prompt_layout import Inputs, remove_padding, slice_inputs


class HFRunner(Runner):
    """A `Runner` on a transformers cache: `KVCache` on an accelerated model, `DynamicCache` on a plain one. Batch size 1.

    It runs without gradients, whose graph would keep all activations alive.
    """

    def __init__(self, model: nn.Module, family: Any, cache: Any, rows: Sequence[int] = ()) -> None:
        """`rows`: the numbers of rows of which steps are captured (`SequenceDecodeSteps`); all others go through the model,
        which prompts always do."""
        self.model, self.family, self.cache = model, family, cache
        self.delta = self._last = 0
        self._whole: tuple[dict[str, Any], Tensor] | None = None  # what enters, and positions, of all prompts
        self.steps = decode.SequenceDecodeSteps(model, family, rows) if rows else None
        self.laid: Any = None  # where its memory lies, as `together` last saw it
        self._moved: KVState | None = None

    @staticmethod
    def open(model: nn.Module, family: Any, state: KVState | None = None) -> HFRunner:
        """Return a runner for a new sequence; `state` replaces the recipe's KV memory and needs an accelerated model."""
        from mmaccel.models.attention import wrap_kv_cache

        owner = attached(model)
        if owner is None:
            if state is not None:
                raise ModelError(
                    "state: a plain model keeps everything; leave state out, or accelerate the model."
                )
            return open_runner(model, family, wrap_kv_cache(model, family))
        if state is None and not owner.recipe.kv.sequences:
            # The recipe's memory is of a call's own prompt; who runs the model beside it, as a draft may, sees everything.
            full = registry("kv").build(DEFAULTS["kv"])
            state = full.open(owner.view.geometry, owner.view, owner.view.device)
        state = owner.open_kv_state() if state is None else state
        return open_runner(model, family, wrap_kv_cache(model, family, state))

    @torch.no_grad()
    def prefill(
        self,
        inputs: Inputs,
        keep: Tensor | None = None,
        compact: bool = False,
        probes: Sequence[ForwardProbe] = (),
    ) -> Tensor:
        """Run the whole prompt and return the logits [1, V] of its last token. Arguments as in `Runner.prefill`; `probes`
        read hidden states or attention of an accelerated model's layers."""
        if inputs["input_ids"].shape[0] != 1:
            raise ModelError(
                f"input_ids: {inputs['input_ids'].shape[0]} sequences; a runner takes one at a time."
            )
        if self.length():
            self.update_hf_cache()
        if self._whole is not None:
            start = int(self._whole[1].flatten(0, -2)[-1, -1]) + 1
        else:
            start = self.length() and self.length() + self.delta
        inputs, positions = self._prompt(inputs, start)
        if keep is not None:
            return self._prefill_kept(inputs, positions, keep.to(positions.device), compact)
        if probes or attached(self.model) is not None:
            inputs[NOTE] = ForwardPassInfo(probes=tuple(probes), last_only=True)
        shown = self.family.given_modalities(inputs)
        with batched_tower(self.family, self.model) if shown else nullcontext():
            return self._read(positions, **inputs)

    def _prompt(self, inputs: Inputs, start: int) -> tuple[dict[str, Any], Tensor]:
        """The inputs of one prompt that the model's forward knows, without padding and empty ones, and its positions, from
        `start` on where none are given."""
        known = inspect.signature(type(self.model).forward).parameters
        loose = any(p.kind is p.VAR_KEYWORD for p in known.values())
        takes = {*known, "mm_token_type_ids"} if loose else set(known)
        takes -= {"past_key_values", "use_cache", "logits_to_keep"}
        kept = {k: v for k, v in remove_padding(inputs).items() if v is not None and k in takes}
        positions = kept.pop("position_ids", None)
        if positions is None:
            positions = self.family.positions(self.model, kept)
            positions = positions + start if start else positions
        return kept, positions

    def _read(self, positions: Tensor, **inputs: Any) -> Tensor:
        """Logits [1, V] of the last token of a prompt."""
        out = self.model(
            **inputs, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        # As `generate` does, go on from the last column: after a long video that is not the largest position.
        self.delta = int(positions.flatten(0, -2)[-1, -1]) + 1 - self.length()
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def _prefill_kept(self, inputs: dict[str, Any], positions: Tensor, keep: Tensor, compact: bool) -> Tensor:
        """The vision tower sees every frame; the language model runs the kept columns alone."""
        if attached(self.model) is not None:
            raise ModelError(
                "prune: an accelerated model cannot be its own pruned draft; load the draft apart."
            )
        with batched_tower(self.family, self.model):
            entering = self.family.forward_inputs(self.model, inputs)
        if self._whole is not None:
            entering = deepstack.concatenate_prompt_embeds(self._whole[0], entering)
            positions = torch.cat([self._whole[1], positions], -1)
            self.truncate(0)
        if self.lasting:
            self._whole = entering, positions
        count = keep.numel()
        if compact:
            positions = torch.arange(count, device=keep.device).expand(*positions.shape[:-1], count)
        else:
            positions = positions[..., keep]
        kept, thread = slice_inputs(entering, keep), threading.get_ident()
        embeds = kept.pop("inputs_embeds")

        def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return (args, {**kwargs, **kept}) if threading.get_ident() == thread else None

        with Hooks() as hooks:
            if kept:  # the whole model's forward does not take them
                hooks.add_pre_hook(self.family.text_model(self.model), give)
            return self._read(positions, inputs_embeds=embeds)

    @torch.no_grad()
    def step(self, ids: Tensor, branches: TokenTree | None = None) -> Tensor:
        self._last = count = ids.shape[1]
        self.laid = None
        states = getattr(self.cache, "states", {})
        steps = self.steps
        if states and branches is not None:  # a tree goes through the layers' modules
            # And so do all steps from now on where the plain cache would be copied back and forth.
            steps, self.steps = None, steps if self._moved is None else None
        if steps is not None and (width := steps.padded_row_count(count, branches)):
            return steps(self.memory(), self.delta, ids, width, branches, [*states.values()])
        self.update_hf_cache()
        held = self.length()
        start = held + self.delta
        if branches is None:
            positions = torch.arange(start, start + count, device=ids.device)[None]
        else:
            before = branches.sees.shape[1] - count
            positions = (branches.depth.to(ids.device) + start - before)[None]
        if self.family.mrope:
            positions = positions.expand(3, -1, -1)
        more: dict[str, Any] = {}
        if attached(self.model) is not None:
            more[NOTE] = ForwardPassInfo(verify=True, branches=branches)
        elif branches is not None:
            # [1, 1, n, N]: what a plain model adds to its scores.
            sees, dtype = branches.sees.to(ids.device), next(self.model.parameters()).dtype
            mask = torch.zeros(count, held + count, dtype=dtype, device=ids.device)
            mask[:, held + count - sees.shape[1] :].masked_fill_(~sees, torch.finfo(dtype).min)
            more["attention_mask"] = self.family.tree_mask_argument(self.model, mask[None, None], positions)
        self.cache.branches = branches
        try:
            out = self.model(
                input_ids=ids, past_key_values=self.cache, position_ids=positions, use_cache=True, **more
            )
        finally:
            self.cache.branches = None
        return out.logits  # type: ignore[no-any-return]

    def resume(self, inputs: Inputs, past: Columns | None = None) -> None:
        start = 0 if past is None else past.layout.length + int(past.delta)
        inputs, positions = self._prompt(inputs, start)
        layout = self.family.layout(self.model, inputs)
        layout = layout if past is None else past.layout.append(layout)
        self.delta = int(positions.flatten(0, -2)[-1, -1]) + 1 - layout.length
        self.cache.sequence = Columns(layout, torch.full((1, 1), self.delta, device=positions.device))

    def count_decoded_tokens(self, count: int) -> None:
        """Record that a batched step wrote `count` rows to this runner's KV memory without a call of `step`."""
        self._last = count
        self.memory().record_written(count)

    def memory(self) -> KVState:
        """Return the KV memory that CUDA-graph steps write to: that of a `KVCache`. A `DynamicCache` gets a `full` memory:
        its keys and values are moved there, and its tensors become views of that memory's."""
        if (state := getattr(self.cache, "state", None)) is not None:
            return state  # type: ignore[no-any-return]
        if self._moved is None:
            full = registry("kv")["full"]()
            layers = self._attended()
            self._moved = full.open(self.family.geometry(self.model), None, layers[0].keys.device)
            # One layer after the other, so that no more than one is there twice.
            for number, layer in enumerate(layers):
                self._moved.append(number, layer.keys, layer.values)
                self._show(number, layer)
        return self._moved

    def _attended(self) -> list[Any]:
        """The layers of the plain cache that hold keys and values."""
        states = getattr(self.cache, "states", {})
        return [layer for number, layer in enumerate(self.cache.layers) if number not in states]

    def _show(self, number: int, layer: Any) -> None:
        """A layer of the plain cache is a view of what the memory holds."""
        assert self._moved is not None
        view = self._moved.view(number, torch.empty(0))
        layer.keys, layer.values = view.key, view.value

    def update_hf_cache(self) -> None:
        """Update the transformers cache to all tokens so far, as if the model itself had processed them."""
        if self._moved is not None:
            for number, layer in enumerate(self._attended()):
                self._show(number, layer)
            self._moved = None
        known = getattr(self.cache, "sequence", None)
        if known is not None and known.layout.length < self.length():
            kinds = torch.full((1, self.length() - known.layout.length), TEXT, device=known.layout.device)
            self.cache.sequence = replace(known, layout=known.layout.append(TokenLayout.build(kinds)))

    def accept(self, path: Tensor) -> None:
        state = getattr(self.cache, "state", None) or self._moved
        for one in getattr(self.cache, "states", {}).values():
            one.accept(path)
        if state is not None:
            state.accept(path)
            return
        start = self.length() - self._last
        for layer in self._attended():
            columns = torch.cat([torch.arange(start), path.cpu() + start]).to(layer.keys.device)
            layer.keys = layer.keys.index_select(2, columns)
            layer.values = layer.values.index_select(2, columns)

    def truncate(self, length: int) -> None:
        surplus = self.length() - length
        if surplus > 0 and self._moved is not None:
            for one in getattr(self.cache, "states", {}).values():
                one.crop(-surplus)
            self._moved.truncate(length)
        elif surplus > 0:
            self.cache.crop(-surplus)

    def length(self) -> int:
        return int(self.cache.get_seq_length()) if self._moved is None else self._moved.length()


def open_runner(model: nn.Module, family: Any, cache: Any) -> HFRunner:
    """Return a runner of `model` on `cache`, with CUDA-graph decode steps if `decode.can_capture_decode` allows them."""
    return HFRunner(
        model, family, cache, decode.ROWS if decode.can_capture_decode(model, family, cache) else ()
    )
