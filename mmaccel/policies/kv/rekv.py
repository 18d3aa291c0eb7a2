"""The `rekv` memory: retrieves whole frames by their mean keys; and its index `frames`, which other memories can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops import clusters
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.buffers import LEAST as PLACES
from mmaccel.core.memory.kv import grow_buffer
from mmaccel.core.registry import register
from mmaccel.policies.kv._archived import ArchivedPolicy
from mmaccel.policies.kv._index import SPARE, Index, IndexPolicy, SearchTables
from mmaccel.policies.kv._ingest import unit_means
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.store import Rows


class FrameIndex(Index):
    """An index in which every unit (frame) is its own cluster: cluster n is unit n. It is kept entirely on the device."""

    def add_units(self, look: Tensor | None, pairs: Sequence[Pair], retrieved: Tensor | None) -> None:
        first, end = self._units, self._units + pairs[0][0].shape[2] // self._tokens
        sides = ("key", "value") if self.summaries else ("key",)
        for side, name in enumerate(sides):
            held = grow_buffer(getattr(self, name), 1, end, fill=0, share=SPARE)
            setattr(self, name, held)
            held[:, first:end] = unit_means(pairs, side, self._tokens)
        self._units, self._ready = end, None

    def _known(self) -> int:
        return self._units

    def _keep(self, kept: Tensor) -> None:
        rows, more = self._sent(kept), max(int(SPARE * len(kept)), PLACES)
        self.key = pad(self.key[:, rows], (0, 0, 0, more))
        if self.summaries:
            self.value = pad(self.value[:, rows], (0, 0, 0, more))
        self.time, self._units = self.time[:, :0], len(kept)

    def _survey(self, end: int) -> SearchTables:
        room, rows = self.key.shape[1], self.at.count_rows_below(end)
        number = torch.arange(room, device=self.device)
        gone = grow_buffer(self.absent, 0, room, fill=0, share=0.0)[:room]
        told = self._surveyed(end, room, gone[:rows])
        count, here = len(told["entries"]), number < rows
        if count < rows:
            here &= ~self._sent(gone)
        if self.time.shape[1] != room:
            self.time = self._sent(torch.from_numpy(self.at.units_of(room))).float().repeat(self.layers, 1)

        owner, within = torch.where(here, number, room + 1), torch.zeros_like(number)
        made = {"owner": owner, "within": within, "flat": number, "size": here.long()}
        fixed = {name: self._fix(name, row.expand(self.layers, -1)) for name, row in made.items()}
        owner, within, flat, size = fixed.values()
        lists = clusters.ClusterMembership(owner, within, flat, flat, size, 1)
        return SearchTables(lists=lists, alive=[count] * self.layers, ready=self.summaries, **told)

    def _own_keys(self, layer: int) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
        return self.key.transpose(0, 1), layer, lambda units: self.key[layer, units].float()

    def checkpoint(self) -> Any:
        return self._units

    def restore(self, mark: Any) -> None:
        self._units, self._ready = mark, None

    def clear(self) -> None:
        self.at.clear()
        self.restore(0)

    def rows(self) -> dict[str, Tensor]:
        sides = {"mean": self.key} | ({"mean_value": self.value} if self.summaries else {})
        return {name: side[:, : self._units].transpose(0, 1) for name, side in sides.items()}

    def save(self, folder: Path) -> None:
        facts = {"gone": self.absent.nonzero()[:, 0].tolist(), **self.at.to_dict()}
        checkpoint_io.write_json(folder / "index.json", facts)

    def load(self, folder: Path, units: int, rows: Rows | None) -> None:
        facts = checkpoint_io.read_json(folder / "index.json", {"gone": list})
        count, means = self._load_rows(folder, facts, "gone", units, rows)
        for side, mean in zip(("key", "value"), means.values(), strict=False):
            held = grow_buffer(getattr(self, side), 1, count, fill=0, share=SPARE)
            setattr(self, side, held)
            held[:, :count] = mean.transpose(0, 1)
        self._units, self._ready = count, None

    def _former_rows(self, folder: Path, count: int) -> dict[str, Tensor]:
        layers, names = range(self.layers), [*self.rows()]
        size = 1, self.geometry.kv_heads, count, self.geometry.head_dim
        wanted = {f"{name}.{layer}": (size, self.key.dtype) for name in names for layer in layers if count}
        found = checkpoint_io.read_tensors(folder / "index.safetensors", wanted, self.device)
        rows = {name: [found[f"{name}.{layer}"][0] for layer in layers] for name in names if count}
        return {name: torch.stack(some).permute(2, 0, 1, 3).flatten(2) for name, some in rows.items()}


@register("index", "frames")
@dataclass(frozen=True, kw_only=True)
class EveryFrameIndex(IndexPolicy):
    """The index `frames`: each layer finds every unit (frame) by its own mean key before RoPE, as in ReKV (ICLR 2025)."""

    opens: ClassVar = FrameIndex


@register("kv", "rekv")
@dataclass(frozen=True, kw_only=True)
class ReKV(ArchivedPolicy):
    """Encodes under a sliding window and keeps all frames on the host; each layer retrieves those nearest to the question.

    After Di et al., "Streaming Video Question-Answering with In-context Video KV-Cache Retrieval" (ICLR 2025): a frame is
    represented by its mean key before RoPE, a question by its mean query; each layer retrieves the best `frames`, in order
    of time and with consecutive positions, and keeps them for the answer. As in the paper's code no local window is seen by
    a question (``local = 0``). Departures: the positions of the prompt before the video while encoding (see
    `_ingest.Bases`), one pass over the question instead of two, and no language head while encoding.
    """

    local: int = 0
    index: Any = "frames"
