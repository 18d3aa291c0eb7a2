"""A `mosaic` memory driven as a session drives it, on planted streams of made-up keys; no model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.contract import memory as contract
from mmaccel.contract.memory import GROUPS, HEAD, HEADS, LAYERS, SIZE, TOKENS, RotaryModel
from mmaccel.core.decoding.replay import GraphBuffers
from mmaccel.core.memory.kv import KVView, Stream, StreamPass
from mmaccel.policies.kv._retrieval import ArchivedMemory
from mmaccel.policies.kv.mosaic import Clusters, Mosaic
from tests.policies.kv.mosaic.scenes import runs
from tests.policies.kv.token_streams import CPU, passes, position_ids, run

HIDDEN = 10
GEOMETRY = replace(contract.GEOMETRY, hidden=HIDDEN)
SMALL: dict[str, Any] = dict(window=5, local=2, frames=8, cache=6)
CLUSTERS: dict[str, Any] = dict(init=12, visual=4, semantic=2, buffer=4)
RULES: dict[str, Any] = dict(smallest=3, largest=6, alpha=2.0)
"""Constants of the clustering, for short streams."""


class Looking(RotaryModel):
    """A model that turns, and whose layers' queries are all alike a fixed map of what enters them."""

    def project_query(self, layer: int, rows: Tensor) -> Tensor:
        apply_rope = torch.eye(HIDDEN, HEADS * SIZE, dtype=rows.dtype) + 0.1 * layer
        return (rows @ apply_rope).view(1, -1, HEADS, SIZE).transpose(1, 2)


WHEEL = Looking()


class Driven:
    """A memory and the stream that it is given: unit i is always the same."""

    def __init__(
        self,
        scenes: Sequence[int] | None = None,
        axes: int = 1,
        dtype: torch.dtype = torch.float64,
        limit: int = 10**6,
        **fields: Any,
    ) -> None:
        self.scenes, self.dtype = list(runs(90) if scenes is None else scenes), dtype
        own = {name: fields.pop(name) for name in list(fields) if name in Clusters.__dataclass_fields__}
        self.policy = Mosaic(**{**SMALL, "index": Clusters(**{**CLUSTERS, **own}), **fields})
        at = position_ids(axes, limit)
        stream = Stream(tokens_per_unit=TOKENS, head=HEAD, frames_per_unit=1, positions=at, dtype=dtype)
        state = self.policy.open_stream(stream, GEOMETRY, WHEEL, CPU)  # type: ignore[arg-type]
        assert isinstance(state, ArchivedMemory)
        self.state, self.shared = state, GraphBuffers(CPU)
        self.index: Any = state.index
        if "index" not in fields:
            self.index.tree.rules = replace(self.index.tree.rules, **RULES)
        g = torch.Generator().manual_seed(1)
        self.kinds = torch.randn(16, LAYERS, 3, SIZE * HEADS, generator=g, dtype=torch.float64)
        self.kind_looks = torch.randn(16, HIDDEN, generator=g, dtype=torch.float64)
        self.run(StreamPass(kind="head", rows=HEAD), lambda layer: self.noise((layer, -1), HEAD))

    def noise(self, name: tuple[int, ...], rows: int) -> list[Tensor]:
        """Query, key, value of `rows` columns that follow from a name."""
        seed = 7919 * name[0] + name[1] + 13
        g = torch.Generator().manual_seed(seed)
        heads = (HEADS, GROUPS, GROUPS)
        return [torch.randn(1, n, rows, SIZE, generator=g, dtype=torch.float64).to(self.dtype) for n in heads]

    def unit(self, layer: int, unit: int) -> list[Tensor]:
        """Query, key, value of a unit: its scene's, its token's and noise; keys have much in common."""
        kind = self.kinds[self.scenes[unit], layer].view(3, 1, HEADS, 1, SIZE)
        g = torch.Generator().manual_seed(100 * unit + layer)
        rows = []
        for side, heads in enumerate((HEADS, GROUPS, GROUPS)):
            shake = 0.5 * torch.randn(1, heads, TOKENS, SIZE, generator=g, dtype=torch.float64)
            rows.append((kind[side][:, :heads] + shake + 2.0 * (side == 1)).to(self.dtype))
        return rows

    def looks(self, first: int, count: int) -> Tensor:
        g = [torch.Generator().manual_seed(unit) for unit in range(first, first + count)]
        shake = torch.stack([torch.randn(HIDDEN, generator=one, dtype=torch.float64) for one in g])
        return (self.kind_looks[self.scenes[first : first + count]] + 0.2 * shake).to(torch.float32)

    def run(self, stream_pass: StreamPass, rows: Any, hidden: Any = None) -> list[KVView]:
        return run(self.state, stream_pass, rows, hidden)

    def watch(self, count: int, step: int = 4) -> list[Tensor]:
        """`count` more units, at most `step` at a time: of each pass and layer what its rows get from attention."""
        out = []
        for first, n, rows in passes(self.state, count, step, self.unit):
            where = dict(rows=n * TOKENS, first=first, count=n, look=self.looks(first, n))
            self.state.begin_pass(StreamPass(kind="units", **where))  # type: ignore[arg-type]
            sides = [side[0].transpose(0, 1) for layer in range(LAYERS) for side in rows(layer)]
            embeds = torch.cat(sides, 1)
            run = self.state.replay_forward if self.state.replays_pass else lambda x, forward, _: forward(x)
            made = run(embeds.flatten(1), self.forward, self.shared).clone()
            out.append(made.unflatten(1, (LAYERS, -1, SIZE)).permute(1, 2, 0, 3)[:, :HEADS])
            self.state.end_pass()
        return out

    def forward(self, embeds: Tensor) -> Tensor:
        """[n, E]: what the rows of a pass, which have queries, keys and values of all layers in them, get at each layer."""
        out = torch.zeros_like(embeds).unflatten(1, (LAYERS, -1, SIZE))
        for layer, columns in enumerate(embeds.unflatten(1, (LAYERS, -1, SIZE)).unbind(1)):
            query, *pair = columns.transpose(0, 1)[None].split((HEADS, GROUPS, GROUPS), 1)
            self.state.append(layer, *pair)
            out[:, layer, :HEADS] = attend(self.state.view(layer, query), len(embeds)).transpose(0, 1)
        return out.flatten(1)

    def stream_pass(self, rows: int = 4) -> StreamPass:
        return StreamPass(kind="question", rows=rows, words=(1, rows), room=2)

    def question(self, name: int = 0, rows: int = 4) -> Any:
        """Rows of a question that asks for the scene of its name."""

        def made(layer: int) -> list[Tensor]:
            query, key, value = self.noise((layer, 500 + name), rows)
            wanted = self.kinds[name % 16, layer, 1].view(1, HEADS, 1, SIZE)[:, [0, 0, 1, 1]]
            return [query * 0.3 + wanted.to(self.dtype), key, value]

        return made

    def hidden(self, name: int) -> Any:
        """What enters the layers with the rows of a question."""
        return lambda layer: self.question(name)(layer)[0].transpose(1, 2).flatten(2)[..., :HIDDEN]

    def ask(self, name: int = 0, rows: int = 4, answer: bool = True) -> Tensor:
        """[L, H, rows (+ 1), D]: what the rows of a question, and one of its answer, get from attention."""

        with self.state.question_scope():
            views = self.run(self.stream_pass(rows), self.question(name, rows), self.hidden(name))
            out = torch.stack([attend(view, rows) for view in views])
            self.seen, self.evidence = views, self.state.evidence()
            if answer:
                said = self.run(
                    StreamPass(kind="answer", rows=1), lambda layer: self.noise((layer, 900 + name), 1)
                )
                out = torch.cat([out, torch.stack([attend(view, 1) for view in said])], 2)
            self.counters = self.state.counters()
        return out


def attend(view: KVView, rows: int) -> Tensor:
    """[H, rows, D]: causal attention of the last `rows` columns of a view, in loops."""
    query, out = view.query, []
    assert query is not None
    count = view.key.shape[2]
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        score = query[0, head].double() @ view.key[0, group].double().T * SIZE**-0.5
        if view.bias is not None:
            score[:, : len(view.bias)] += view.bias
        q = torch.arange(count - rows, count)[:, None]
        k = torch.arange(count)
        sees = k <= q
        if view.window is not None:
            sees &= (k < view.sinks) | (q - k < view.window)
        out.append(score.masked_fill(~sees, -torch.inf).softmax(1) @ view.value[0, group].double())
    return torch.stack(out)
