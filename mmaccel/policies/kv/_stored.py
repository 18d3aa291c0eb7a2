"""Windowed memories whose older units lie on the host, and are found by the mean of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core import saving
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import RecipeError, shown
from mmaccel.core.kv import Piece, Stream, StreamPolicy
from mmaccel.core.policy import with_base_dir
from mmaccel.core.room import with_room
from mmaccel.policies.kv._stream import StreamMemory, WindowedPolicy
from mmaccel.policies.kv.store import HostStore, Sources, Spill, Way
from mmaccel.policies.kv.store.wire import on_device


@dataclass(frozen=True, kw_only=True)
class StoredPolicy(WindowedPolicy):
    """The fields of a memory that keeps units on the host and recalls some of them at a question.

    frames      recalled at a question, by each layer for itself; the local frames come on top
    similarity  of a unit's mean key to the question's mean query: "dot" or "cosine"
    host_bytes  host memory at most; None: as much as the host can spare
    spill       what happens when it is used up: "refuse", "disk", or "drop_oldest", which forgets the oldest frames for
                good as new ones come, also where the `watch` that brings these fails later
    folder      where files go with spill "disk", in a YAML file counted from its folder; None: a temporary folder
    """

    asks: ClassVar[frozenset[str]] = frozenset({"frames", "local"})

    frames: int = 64
    similarity: Literal["dot", "cosine"] = "dot"
    host_bytes: int | None = None
    spill: Spill = "refuse"
    folder: str | None = None

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        return with_base_dir(fields, folder, "folder")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 1:
            raise RecipeError(f"{self.name}: frames is {self.frames}; give at least 1.")
        if self.similarity not in ("dot", "cosine"):
            raise RecipeError(f"{self.name}: similarity is {shown(self.similarity)}; give 'dot' or 'cosine'.")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise RecipeError(f"{self.name}: host_bytes is {self.host_bytes}; give at least 0, or null.")
        if self.spill not in ("refuse", "disk", "drop_oldest"):
            raise RecipeError(
                f"{self.name}: spill is {shown(self.spill)}; give 'refuse', 'disk' or 'drop_oldest'."
            )


def store_for(
    stream: Stream,
    geometry: Geometry,
    device: torch.device,
    *,
    host_bytes: int | None,
    spill: Spill,
    folder: str | None,
    way: Way = "auto",
    tokens: int | None = None,
) -> HostStore:
    """A host store of a stream's units, or of parts of `tokens` tokens."""
    return HostStore(
        layers=geometry.layers,
        groups=geometry.kv_heads,
        tokens=stream.unit if tokens is None else tokens,
        size=geometry.head_dim,
        dtype=stream.dtype,
        device=device,
        cap=host_bytes,
        spill=spill,
        folder=folder,
        way=way,
    )


class MeanKeys:
    """The mean raw key of each unit at each layer, on the device: [1, G, units, D] in buffers that grow ahead of need."""

    def __init__(self, layers: int, similarity: str) -> None:
        self.cosine = similarity == "cosine"
        self._held: list[Tensor | None] = [None] * layers
        self.gone: set[int] = set()

    def add(self, layer: int, first: int, key: Tensor, tokens: int) -> None:
        """Units from `first` on, keys [1, G, n * tokens, D]."""
        mean = key.float().view(*key.shape[:2], -1, tokens, key.shape[3]).mean(3).to(key.dtype)
        end = first + mean.shape[2]
        held = self._held[layer] = with_room(self._held[layer], mean, first, end)
        held[:, :, first:end] = mean

    def forget(self, units: Sequence[int]) -> None:
        """Units whose keys and values are no more; they are not found again."""
        self.gone |= set(units)

    def score(self, layer: int, query: Tensor, end: int) -> Tensor:
        """[end] float32: of units below `end`, against the mean query [H, D]; the heads of a group share their keys."""
        held = self._held[layer]
        if held is None or not end:
            return torch.zeros(0, device=query.device)
        key = held[0, :, :end].float()
        summed = query.view(key.shape[0], -1, key.shape[2]).sum(1)
        score = torch.einsum("gud,gd->u", key, summed)
        if self.cosine:
            size = key.square().sum((0, 2)).sqrt() * query.norm() * (query.shape[0] / key.shape[0]) ** 0.5
            score = score / size.clamp(min=1e-12)
        return score

    def best(self, score: Tensor, count: int) -> Tensor:
        """[k] ascending numbers of the `count` highest scores; of equal ones the older unit."""
        absent = [number for number in self.gone if number < len(score)]
        if absent:
            score = score.index_fill(0, on_device(absent, score.device), -torch.inf)
            count = min(count, len(score) - len(absent))
        if count >= len(score):
            return torch.arange(len(score), device=score.device)
        return torch.sort(score, descending=True, stable=True).indices[:count].sort().values

    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held if held is not None)

    def tensors(self, units: int) -> dict[str, Tensor]:
        """What there is to save."""
        return {f"mean.{i}": held[:, :, :units] for i, held in enumerate(self._held) if held is not None}

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors` gave."""
        self._held = [tensors.get(f"mean.{i}") for i in range(len(self._held))]


class StoredMemory(StreamMemory):
    """Units that leave the window go to the store; a question recalls those whose mean keys suit it best, layer by layer."""

    def __init__(
        self,
        policy: StoredPolicy,
        stream: Stream,
        geometry: Geometry,
        model: ModelView,
        device: torch.device,
        *,
        local: int | None = None,
        way: Way = "auto",
    ) -> None:
        super().__init__(
            stream,
            geometry,
            model,
            device,
            window=stream.units(policy.window),
            local=stream.units(policy.local) if local is None else local,
            positions=policy.positions,
        )
        self.budget = stream.units(policy.frames)
        self.index = MeanKeys(geometry.layers, policy.similarity)
        self.store = store_for(
            stream,
            geometry,
            device,
            host_bytes=policy.host_bytes,
            spill=policy.spill,
            folder=policy.folder,
            way=way,
        )
        self.sources = Sources(self.store, self.window)
        self._recalled = self._questions = 0

    def asked_under(self, policy: StreamPolicy) -> None:
        assert isinstance(policy, StoredPolicy)
        self.budget, self.local = self.stream.units(policy.frames), self.stream.units(policy.local)

    def _took(self, piece: Piece) -> None:
        for layer, new in enumerate(self._new):
            if new is not None:
                self.index.add(layer, piece.first, new[0], self.stream.unit)

    def _gone(self, layer: int, first: int, count: int, key: Tensor, value: Tensor) -> None:
        self.index.forget(self.store.put(layer, range(first, first + count), key, value))

    def _recall(self, layer: int, query: Tensor, end: int) -> Tensor:
        numbers = self.index.best(self.index.score(layer, query, end), self.budget)
        self._recalled += len(numbers)
        self._questions += layer == 0
        return numbers

    def _most(self) -> int:
        return self.budget + super()._most()

    def _bring(self, layer: int, numbers: Tensor, begin: int, out: Tensor) -> None:
        ring, first, count = self._rings[layer], self._first, self._count
        assert ring is not None
        if begin < count:
            numbers = torch.cat([numbers, torch.arange(begin, count, device=numbers.device)])
        if not self.store.indexed:
            out.copy_(self.sources.listed(layer, numbers.tolist(), first, (ring.key, ring.value)))
            return
        self.sources.window(ring.key, ring.value)
        _, ready = self.sources.gather(self.sources.table(layer, first, count)[numbers], out)
        self.store.lanes.compute.wait(ready)

    @contextmanager
    def turn(self) -> Iterator[None]:
        try:
            with super().turn():
                yield
        finally:
            # A question that broke off may still be written to where the next one's columns go.
            self.store.lanes.join()
            self.sources.settle()

    def _rewind(self, units: int, first: int) -> None:
        # Units that were forgotten to make room do not come back.
        self.index.gone = {number for number in self.index.gone if number < first}
        self.store.cut(first)

    def nbytes(self) -> int:
        return super().nbytes() + self.index.nbytes() + self.store.nbytes() + self.sources.nbytes()

    def counters(self) -> dict[str, float]:
        self.sources.settle()
        own = {"recalled": float(self._recalled), "questions": float(self._questions)}
        host = {"host_" + name.removeprefix("host_"): n for name, n in self.store.counters().items()}
        return {**super().counters(), **own, **host, "index_bytes": float(self.index.nbytes())}

    def _save(self, folder: Path) -> None:
        saving.write_tensors(folder / "index.safetensors", self.index.tensors(self._count))
        saving.write_json(folder / "index.json", {"gone": sorted(self.index.gone)})
        (folder / "store").mkdir()
        self.store.save(folder / "store")

    def _load(self, folder: Path) -> None:
        size = (1, self.geometry.kv_heads, self._count, self.geometry.head_dim)
        wanted = {f"mean.{layer}": (size, self.stream.dtype) for layer in range(self.geometry.layers)}
        self.index.fill(
            saving.read_tensors(folder / "index.safetensors", wanted if self._count else {}, self.device)
        )
        gone = saving.read_json(folder / "index.json", {"gone": list})["gone"]
        self.index.gone = set(saving.numbers(gone, "index.json: gone", self._count))
        self.store.load(folder / "store", self._count)

    def close(self) -> None:
        self.store.close()
