"""Decoding at the speed of memory: one sequence, static shapes, a cache laid out beforehand, one compiled step.

A decode step reads every weight and the whole cache once, and should take no longer than that. So nothing in it depends on
the length but what a tensor says: keys go to the column that `columns` names, and a row sees the columns up to its own. The
step is one graph for all lengths; on CUDA it is captured once for each number of rows and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import Runner
from mmaccel.core.draft import Branches
from mmaccel.core.errors import ModelError
from mmaccel.models.runner import HFRunner

if TYPE_CHECKING:
    from mmaccel.models.family import Family

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def masked(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, scale: float) -> Tensor:
    """[1, H, n, D]: row i sees the columns up to ``columns[i]``; for any device, with a mask over the whole cache."""
    mask = torch.arange(key.shape[2], device=key.device) <= columns[:, None]
    grouped = query.shape[1] != key.shape[1]
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
    )


def flexible(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, scale: float) -> Tensor:
    """The same by FlexAttention, whose decoding kernel splits the cache over the device; for inside a compiled step."""
    from torch.nn.attention.flex_attention import flex_attention

    def seen(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.where(column <= columns[row], score, -float("inf"))

    out = flex_attention(query, key, value, score_mod=seen, scale=scale, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


class Step(nn.Module):
    """The language model of a Qwen2-like family over new rows, as one function of tensors of fixed shapes.

    Its buffers: keys and values [layers, 1, G, capacity, D] and the angles [capacity, D] of each column's rotary position.
    """

    def __init__(self, model: nn.Module, family: Family, capacity: int, attend: Attend) -> None:
        super().__init__()
        shape = family.geometry(model)
        first = next(model.parameters())
        self.shape, self.attend, self.scale = shape, attend, shape.head_dim**-0.5
        # Held in a tuple: these are the model's own modules, not parts of this one.
        self.parts: tuple[Any, ...] = (
            model.get_input_embeddings(),  # type: ignore[operator]
            list(family.layers(model)),
            family.text(model).norm,
            model.get_output_embeddings(),  # type: ignore[operator]
        )
        size = (shape.layers, 1, shape.kv_heads, capacity, shape.head_dim)
        self.key = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.value = torch.zeros_like(self.key)
        self.cos = torch.zeros(capacity, shape.head_dim, dtype=first.dtype, device=first.device)
        self.sin = torch.zeros_like(self.cos)

    def forward(self, ids: Tensor, columns: Tensor) -> Tensor:
        """Logits [1, n, V] of `ids` [1, n], which take the columns `columns` [n]."""
        embedding, layers, norm, head = self.parts
        n, shape = ids.shape[1], self.shape
        cos, sin = self.cos[columns], self.sin[columns]
        x = embedding(ids)
        for index, layer in enumerate(layers):
            h, own = layer.input_layernorm(x), layer.self_attn
            query = own.q_proj(h).view(1, n, shape.heads, shape.head_dim).transpose(1, 2)
            key = own.k_proj(h).view(1, n, shape.kv_heads, shape.head_dim).transpose(1, 2)
            value = own.v_proj(h).view(1, n, shape.kv_heads, shape.head_dim).transpose(1, 2)
            keys, values = self.key[index], self.value[index]
            keys.index_copy_(2, columns, _turned(key, cos, sin))
            values.index_copy_(2, columns, value)
            out = self.attend(_turned(query, cos, sin), keys, values, columns, self.scale)
            x = x + own.o_proj(out.transpose(1, 2).reshape(1, n, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return head(norm(x))  # type: ignore[no-any-return]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class StaticRunner(Runner):
    """A runner whose steps are compiled once. The prompt goes through the model itself; then its cache is moved over.

    capacity  columns of the cache: the prompt and all that may follow, what is verified and refused included
    rows      how many rows a step may have: a shorter one is padded to the next of these, and each is compiled by itself
    compiled  False leaves the step as it is written (for tests, and where there is no compiler)
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        capacity: int,
        rows: Sequence[int] = (1,),
        *,
        compiled: bool = True,
        backend: str = "inductor",
    ) -> None:
        if not rows or min(rows) < 1 or capacity < max(rows) + 1:
            raise ModelError(
                f"capacity {capacity} and rows {list(rows)}: give room for at least one step of each."
            )
        self.model, self.family, self.capacity = model, family, capacity
        self.rows = sorted(set(rows))
        device = next(model.parameters()).device
        cuda = device.type == "cuda"
        self.module = Step(model, family, capacity, flexible if cuda and compiled else masked)
        self.call: Callable[[Tensor, Tensor], Tensor] = self.module
        if compiled:
            self.call = torch.compile(self.module, fullgraph=True, dynamic=False, backend=backend)
        self.graphs: dict[int, tuple[Any, Tensor, Tensor, Tensor]] = {}
        self.captured = cuda and compiled
        self.held = 0

    @torch.no_grad()
    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        first = HFRunner(self.model, self.family, cache)
        logits = first.prefill(inputs, keep, compact)
        self.held = first.length()
        if self.held + max(self.rows) > self.capacity:
            raise ModelError(
                f"capacity: the prompt has {self.held} tokens and the cache room for {self.capacity}; raise capacity."
            )
        layers: list[Any] = list(cache.layers)
        for index, layer in enumerate(layers):
            self.module.key[index, :, :, : self.held] = layer.keys
            self.module.value[index, :, :, : self.held] = layer.values
            layer.keys = layer.values = None
        self._place(first.delta)
        return logits

    def assume(self, length: int) -> None:
        """As if a prompt of `length` text columns had been run, whose keys and values are what the buffers hold."""
        self.held = length
        self._place(0)

    @torch.no_grad()
    def _place(self, delta: int) -> None:
        device = self.module.key.device
        # Text after the prompt stands at the same place on every axis.
        places = torch.arange(self.capacity, device=device) + delta
        axes = places.expand(3, -1) if self.family.mrope else places
        cos, sin = self.family.angles(self.model, axes, self.module.key.dtype)
        self.module.cos.copy_(cos[0, 0])
        self.module.sin.copy_(sin[0, 0])

    @torch.no_grad()
    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        if branches is not None:
            raise ModelError("a static step runs chains; verify trees through the model itself.")
        count = ids.shape[1]
        width = next((rows for rows in self.rows if rows >= count), None)
        if width is None:
            raise ModelError(f"rows: a step of {count} rows; give rows up to that many.")
        if self.held + width > self.capacity:
            raise ModelError(f"capacity: {self.capacity} columns are full; raise capacity.")
        # Rows of padding write behind the last column, where the next step writes again, and no other row sees them.
        padded = nn.functional.pad(ids, (0, width - count))
        columns = torch.arange(self.held, self.held + width, device=ids.device)
        logits = self._run(padded, columns)
        self.held += count
        return logits[:, :count]

    def _run(self, ids: Tensor, columns: Tensor) -> Tensor:
        if not self.captured:
            return self.call(ids, columns)
        # A capture sees the streams of the current device alone, which need not be the model's.
        with torch.cuda.device(ids.device):
            held = self.graphs.get(ids.shape[1])
            if held is None:
                held = self.graphs[ids.shape[1]] = self._capture(ids, columns)
            graph, own_ids, own_columns, out = held
            own_ids.copy_(ids)
            own_columns.copy_(columns)
            graph.replay()
            return out.clone()

    def _capture(self, ids: Tensor, columns: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """A CUDA graph of the step; what the runs before it write is written again by the first replay."""
        ids, columns = ids.clone(), columns.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.call(ids, columns)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.call(ids, columns)
        return graph, ids, columns, out

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.held:
            raise ModelError(f"the cache has {self.held} columns; it cannot be cut to {length}.")
        self.held = length

    def length(self) -> int:
        return self.held
