"""Decoding at the speed of memory: static shapes, a cache with room, a step that reads the weights and it once.

Nothing in a step depends on the length but what a tensor says: keys go to the column that `columns` names, and a row sees
the columns up to its own. So on CUDA a step is captured once for each number of rows and replayed at every length, and
nothing is launched from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from mmaccel.backends import ops
from mmaccel.core.attach import attached
from mmaccel.core.draft import Branches
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.replay import captured
from mmaccel.core.room import with_room
from mmaccel.core.thinned import ThinnedState
from mmaccel.models import layers as layers_of
from mmaccel.models import pipeline_parallel
from mmaccel.models.pipeline_parallel import MoveInputs
from mmaccel.models.pruning import Entering
from mmaccel.models.runner import HFRunner
from mmaccel.models.signals import Ear
from mmaccel.models.step import Held, Step

if TYPE_CHECKING:
    from mmaccel.models.family import Family

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows a step is captured for; what lies between is padded, which costs next to nothing."""


class Memory(Protocol):
    """What a static step needs of a memory: `KVState` says what these do, where it is `in_place`."""

    def buffers(self, room: int) -> list[tuple[Tensor, Tensor]]: ...

    def wrote(self, count: int) -> None: ...

    def lacks(self, layer: int) -> int: ...


class Moved:
    """The sequence of a plain model: what its transformers cache holds becomes the first columns of buffers with room.

    `count` columns are held; None as long as the cache itself holds them, before the first step and after `settle`.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.count: int | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def buffers(self, room: int) -> list[tuple[Tensor, Tensor]]:
        """See `KVState.buffers`. One layer after the other, so that no more than one is there twice."""
        if self.count is None:
            self._move(room)
        count = self.count
        assert count is not None
        if count + room > self._buffers[0][0].shape[2]:
            for index, pair in enumerate(self._buffers):
                key, value = (with_room(buffer, buffer, count, count + room) for buffer in pair)
                self._buffers[index] = key, value
        return self._buffers

    def _move(self, room: int) -> None:
        layers = self.cache.layers
        self.count = count = int(self.cache.get_seq_length())
        if [layer.keys.data_ptr() for layer in layers] == [key.data_ptr() for key, _ in self._buffers]:
            return
        self._buffers = []
        for layer in layers:
            key, value = (with_room(None, x, 0, count + room) for x in (layer.keys, layer.values))
            key[:, :, :count], value[:, :, :count] = layer.keys, layer.values
            layer.keys, layer.values = key[:, :, :count], value[:, :, :count]
            self._buffers.append((key, value))

    def wrote(self, count: int) -> None:
        """See `KVState.wrote`."""
        assert self.count is not None
        self.count += count

    def lacks(self, layer: int) -> int:
        return 0

    def accept(self, start: int, path: Tensor) -> None:
        """Of the columns from `start` on keep those at `path`, counted from there."""
        for buffer in (buffer for pair in self._buffers for buffer in pair):
            chosen = buffer.index_select(2, path.to(buffer.device) + start)
            buffer[:, :, start : start + path.numel()] = chosen
        self.count = start + path.numel()

    def settle(self) -> None:
        """Give the columns back to the cache, which shows them where they are."""
        if self.count is not None:
            for layer, pair in zip(self.cache.layers, self._buffers, strict=True):
                layer.keys, layer.values = (buffer[:, :, : self.count] for buffer in pair)
        self.count = None


def admits(model: nn.Module, family: Family, cache: Any) -> bool:
    """Whether the steps of `model` after `cache` can be captured: on CUDA devices, each layer on one of them and the ends on
    one, layers that are `known`, with no module that others put or hooked in, and a memory that is written in place. A
    pruner's hooks serve the prompt; what they do to a step is in the memory."""
    from transformers import DynamicCache

    if any(p.device.type not in layers_of.DEVICES for p in model.parameters()):
        return False
    owner, state = attached(model), getattr(cache, "state", None)
    if state is None and (type(cache) is not DynamicCache or _mixed(model)):
        return False
    if state is not None and (not state.in_place or owner is None):
        return False
    layers: list[Any] = list(family.layers(model))
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    ends: list[Any] = [model.get_input_embeddings(), family.text(model).norm, head]  # type: ignore[operator]
    inner = [module for part in (*layers, *ends) for module in part.modules()]
    return (
        layers_of.known(layers, family.text(model).config.hidden_act)  # type: ignore[union-attr,arg-type]
        and type(head) is nn.Linear
        and len({p.device for end in ends for p in end.parameters()}) == 1
        and all(isinstance(hook, Ear) for module in inner for hook in module._forward_hooks.values())
        and all(
            isinstance(hook, MoveInputs | Ear | Entering)
            for module in inner
            for hook in module._forward_pre_hooks.values()
        )
    )


def _mixed(model: nn.Module) -> bool:
    """Whether autocast makes another type of products than weights have: a cache then holds keys of one and values of the
    other."""
    kinds = {(p.device.type, p.dtype) for p in model.parameters()}
    return any(torch.is_autocast_enabled(on) and torch.get_autocast_dtype(on) != dtype for on, dtype in kinds)


def open_runner(model: nn.Module, family: Family, cache: Any) -> HFRunner:
    """The runner of `model` after `cache`: with captured steps where `admits` says so, else through the model."""
    return (StaticRunner if admits(model, family, cache) else HFRunner)(model, family, cache)


class StaticRunner(HFRunner):
    """A runner whose prompt goes through the model, and whose steps through `Step`, captured where there is a device.

    rows  how many rows a step may have: a shorter one is padded to the next of these. Steps of more rows, and of trees that
          do not fit a word of `ops.decode_attend`, go through the model.
    """

    def __init__(self, model: nn.Module, family: Family, cache: Any, rows: Sequence[int] = ROWS) -> None:
        super().__init__(model, family, cache)
        if not rows or min(rows) < 1 or max(rows) > ops.WINDOW:
            raise ModelError(f"rows {list(rows)}: give numbers from 1 to {ops.WINDOW}.")
        self.rows = sorted(set(rows))
        state = getattr(cache, "state", None)
        self.memory: Memory = Moved(cache) if state is None else state
        self.thinned = state if isinstance(state, ThinnedState) else None
        self.modules: list[Step] = []
        self.laid: list[int] = []
        self.biases: list[Tensor] = []
        self.graphs: dict[tuple[int, bool], list[_Graph]] = {}
        self.pool: Any = None

    def prefill(self, *args: Any, **kwargs: Any) -> Tensor:
        self.modules = []
        return super().prefill(*args, **kwargs)

    @torch.no_grad()
    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        held, count = self.length(), ids.shape[1]
        width = next((rows for rows in self.rows if rows >= count), None)
        if width is None or (branches and width - count + branches.sees.shape[1] > ops.WINDOW):
            self.settle()
            return super().step(ids, branches)
        steps = self.lay(width)
        self._last = count
        key = (width, branches is not None)
        if key not in self.graphs:
            self.graphs[key] = [_Graph(step, *key, self.pool) for step in steps]
        out = ids
        for graph in self.graphs[key]:
            out = graph(out, held, count, branches)
            if graph.step.looks is not None:
                self._look(graph.step, held, count)
        self.memory.wrote(count)
        return out[:, :count].clone()

    def lay(self, room: int) -> list[Step]:
        """The steps, device after device, over buffers with room for `room` more columns; captures do not outlive the
        buffers they were made of."""
        buffers = self.memory.buffers(room)
        lacks = [self.memory.lacks(layer) for layer in range(len(buffers))]
        laid = [pair for step in self.modules for pair in step.buffers_of]
        same = laid and all(a[0] is b[0] for a, b in zip(buffers, laid, strict=True))
        if same and lacks == self.laid:
            return self.modules
        self.graphs.clear()
        self.laid = lacks
        # One for all captures: none is at work beside another, and what each gives is copied at once.
        self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        family, model = self.family, self.model
        words, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
        home = words.weight.device
        scale = family.geometry(model).head_dim ** -0.5
        glance = None if self.thinned is None else self.thinned.pruner.glance
        laid_out = [
            (device, some)
            for device, numbers in pipeline_parallel.runs([key.device for key, _ in buffers], home)
            for some in _cut_after(numbers, glance)
        ]
        layers: list[Any] = list(family.layers(model))
        held = _Holds(self, buffers, glance, home)
        self.modules = [
            Step(
                device,
                [layers[number] for number in numbers],
                scale,
                [buffers[number] for number in numbers],
                [held(number) for number in numbers],
                words if place == 0 else None,
                (family.text(model).norm, head) if place == len(laid_out) - 1 else None,
                held.looks() if glance is not None and numbers[-1:] == [glance] else None,
            )
            for place, (device, numbers) in enumerate(laid_out)
        ]
        self.biases = held.biases
        return self.modules

    def _look(self, step: Step, held: int, count: int) -> None:
        """Between the layer at which a pruner glances and the next one: what a token sees of the video from there on."""
        thinned = self.thinned
        assert thinned is not None and step.looks is not None
        key = step.buffers_of[-1][0][:, :, : held + 1 - step.held[-1].lacks]
        shown = thinned.recall(step.looks, key) if count == 1 else None
        for bias in self.biases:
            bias.fill_(0.0 if shown is None else -torch.inf)
            if shown is not None:
                bias[shown.to(bias.device)] = 0.0

    def accept(self, path: Tensor) -> None:
        if self._moved is None:
            super().accept(path)
        else:
            self._moved.accept(self.length() - self._last, path)

    def truncate(self, length: int) -> None:
        if self._moved is None:
            super().truncate(length)
        else:
            self._moved.count = min(length, self.length())

    def length(self) -> int:
        moved = self._moved
        return super().length() if moved is None or moved.count is None else moved.count

    @property
    def _moved(self) -> Moved | None:
        """The memory of a plain model whose columns are in buffers."""
        memory = self.memory
        return memory if isinstance(memory, Moved) and memory.count is not None else None

    def settle(self) -> None:
        """Leave the cache as if all columns had gone through the model."""
        if isinstance(self.memory, Moved):
            self.memory.settle()
        known = getattr(self.cache, "sequence", None)
        if known is not None and known.layout.length < self.length():
            kinds = torch.full((1, self.length() - known.layout.length), TEXT, device=known.layout.device)
            self.cache.sequence = replace(known, layout=known.layout.append(TokenLayout.build(kinds)))


class _Holds:
    """How each layer holds the sequence of a runner, told once for all layers that hold it alike on one device."""

    def __init__(
        self,
        runner: StaticRunner,
        buffers: list[tuple[Tensor, Tensor]],
        glance: int | None,
        home: torch.device,
    ) -> None:
        self.runner, self.buffers, self.glance, self.home = runner, buffers, glance, home
        self.known: dict[tuple[Any, ...], Held] = {}

    @property
    def biases(self) -> list[Tensor]:
        return [held.bias for held in self.known.values() if held.bias is not None]

    def looks(self) -> Tensor:
        assert self.glance is not None
        key = self.buffers[self.glance][0]
        shape = self.runner.family.geometry(self.runner.model)
        return key.new_zeros(1, shape.heads, 1, shape.head_dim)

    def __call__(self, layer: int) -> Held:
        runner, like = self.runner, self.buffers[layer][0]
        lacks, thinned, after = (
            runner.laid[layer],
            runner.thinned,
            self.glance is not None and layer > self.glance,
        )
        anew = thinned is not None and thinned.renumbers(layer)
        key = like.device, like.shape[2], lacks, anew, after
        if key not in self.known:
            # Text after the prompt stands at the same place on every axis.
            begin = 0 if anew else lacks + runner.delta
            places = torch.arange(like.shape[2], device=self.home) + begin
            axes = places.expand(3, -1) if runner.family.mrope else places
            angles = torch.stack([angle[0] for angle in runner.family.angles(runner.model, axes, like.dtype)])
            bias = None
            if after:
                assert thinned is not None
                bias = torch.zeros(thinned.prompt - lacks, device=like.device)
            self.known[key] = Held(lacks, angles.to(like.device), bias)
        return self.known[key]


def _cut_after(numbers: list[int], layer: int | None) -> list[list[int]]:
    """`numbers` in two where `layer` is one of them and not the last."""
    if layer not in numbers[:-1]:
        return [numbers]
    end = numbers.index(layer) + 1  # type: ignore[arg-type]
    return [numbers[:end], numbers[end:]]


class _Graph:
    """A step of `width` rows, of a chain or a tree. The first is run as it is written; on CUDA the second is captured.

    Rows of padding write behind the last column, where the next step writes again, and no other row sees them.
    """

    def __init__(self, step: Step, width: int, tree: bool, pool: Any) -> None:
        device = step.device
        self.step, self.width, self.tree, self.pool = step, width, tree, pool
        self.given: Tensor | None = None
        self.start = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.rows = torch.arange(width, device=device)[None]
        self.depth = self.rows.clone()
        self.sees = torch.zeros(width, dtype=torch.long, device=device)
        self.graph: Any = None
        self.out: Any = None

    def __call__(self, given: Tensor, held: int, count: int, branches: Branches | None) -> Tensor:
        """What the step makes of `given`, ids [1, count] or hidden states [width, E], after `held` columns: logits
        [1, width, V] or hidden states, in a tensor that the next call writes over."""
        if self.given is None:
            shape = (1, self.width) if given.dtype == torch.long else tuple(given.shape)
            self.given = torch.zeros(shape, dtype=given.dtype, device=self.start.device)
        # From another device: its stream is waited for, and the host is not.
        (self.given[:, :count] if given.dtype == torch.long else self.given).copy_(given)
        self.start.fill_(held)
        if branches is not None:
            before = branches.sees.shape[1] - count
            self.depth[0, :count] = branches.depth.to(self.depth.device) - before
            self.sees.copy_(self._words(branches))
        if self.graph is None and self.out is not None and self.start.is_cuda:
            self._capture()
        if self.graph is None:
            self.out = self._run()
        else:
            with torch.cuda.device(self.start.device):
                self.graph.replay()
        return self.out  # type: ignore[no-any-return]

    def _run(self) -> Tensor:
        assert self.given is not None
        columns = self.start + self.rows
        if not self.tree:
            return self.step(self.given, columns, columns)  # type: ignore[no-any-return]
        return self.step(self.given, columns, self.start + self.depth, self.sees)  # type: ignore[no-any-return]

    def _words(self, branches: Branches) -> Tensor:
        """[width] long, on the host: what each row sees of the last columns; rows of padding see all."""
        n, m = branches.sees.shape
        bits = torch.ones(self.width, ops.WINDOW, dtype=torch.bool)
        end = ops.WINDOW - (self.width - n)
        bits[:n, end:] = False
        bits[:n, end - m : end] = branches.sees.cpu()
        return (bits.long() << torch.arange(ops.WINDOW)).sum(1)

    def _capture(self) -> None:
        graph, out = captured(self._run, self.start.device, self.pool)
        # Only now: a step that failed would be replayed.
        self.graph, self.out = graph, out
