"""Mosaic: the unit of a stream's memory is a cluster of frames that look alike and have like keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

import torch

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import RecipeError, shown
from mmaccel.core.kv import Stream, StreamState
from mmaccel.core.registry import register
from mmaccel.policies.kv._stored import StoredPolicy
from mmaccel.policies.kv.mosaic.memory import MosaicMemory
from mmaccel.policies.kv.mosaic.rules import Levels, Rules
from mmaccel.policies.kv.mosaic.threshold import Mode

Granularity = Literal["frame", "tile", "token"]
Predictor = Literal["query", "projected", "frames"]

CHOICES: dict[str, tuple[str, ...]] = {
    "granularity": get_args(Granularity),
    "levels": get_args(Levels),
    "threshold": get_args(Mode),
    "predictor": get_args(Predictor),
    "reps_for": ("all", "left"),
    "rep_of": ("mean", "medoid"),
    "rep_bias": ("none", "log_size"),
}
LEAST: dict[str, float] = {
    "init": 2,
    "lift": 0,
    "visual": 1,
    "semantic": 1,
    "smallest": 2,
    "largest": 2,
    "buffer": 0,
    "cache": 0,
    "reps": 0,
    "encode_frames": 0,
    "tile": 1,
    "slack": 1,
}


@register("kv", "mosaic")
@dataclass(frozen=True, kw_only=True)
class Mosaic(StoredPolicy):
    """Units are clustered by look, and inside each visual cluster by key, layer by layer; a question recalls whole clusters.

    The device keeps the local window, one representative a cluster and a cache; the host everything. Clusters are kept up
    to date as units come: by their centroid and variance, split when the variance passes a threshold that depends on the
    size, at once where a cluster is in the window or was retrieved by the pass that brings the unit, else when a pass next
    retrieves it. A question makes no splits, so that it changes nothing of what is stored later, but where passes retrieve
    nothing (`encode_frames` 0). While a layer computes, what the next will need is guessed and fetched; what was missed is
    fetched before it is used, so that the guess changes no answer.

    After Mosaic (arXiv 2604.10060), whose sections are named below. Departures: a cluster holds units (the paper speaks of
    tokens, its budgets of frames), found by their mean keys before rotation; semantic clusters exist from a unit's arrival,
    so that those inside the window can be split at once; the first stage compares queries with the mean keys of visual
    clusters, for queries and looks have nothing in common; the memory itself writes every unit to the host, buffered ones
    too. Exact while all units fit into `frames` and `window`, with positions "original" or nothing left out.

    positions     as for others, but "original" by default: closed up, the pseudo tokens of clusters lose their time
    levels        "both"; for comparison one level alone, or "none": units retrieved one by one (V-B, Table IV)
    granularity   what is clustered: a unit ("frame"), `tile` consecutive tokens of it, or a "token"
    init          frames before the first clustering; until then units are retrieved one by one
    lift          how far points are from directions (0, the paper's cosine) towards places; see `Summaries`
    visual, semantic  units (entries) of a cluster at the start, on average, at each level
    smallest, largest  entries below which a semantic cluster is not split, and above which it is; `largest` holds for the
                  visual level in proportion
    tau_small, tau_large, alpha, threshold  equation 5, in multiples of the layer's variance at the start; see `Threshold`
    new_scene     a unit whose squared distance to the nearest visual cluster is above so many thresholds opens one
    gain          a split must lower the variance by this share, or it is not made
    unmix         before the first thresholds are set, a cluster that loses this share of its variance when it is split is
                  split: it was a mixture of scenes
    deferred      split later what is not on the device (VI-B); off: everything at once
    buffer        entries a layer that may wait for a deferred split; what it goes by, their mean keys, is at hand wherever
                  they are
    reps          pseudo tokens at most, one a cluster (V-C), those of the largest score first. 0: none
    reps_for      "all": clusters, as the paper says, retrieved ones last; "left": those that were not retrieved, but only so
                  many as are sure to be left, whatever is retrieved, for the host does not wait to know
    rep_of        "mean": the mean over all tokens of the cluster, at its mean time; "medoid": over those of the one entry
                  nearest to the centroid, at that entry's time
    rep_bias      "log_size": a pseudo token weighs as much as the tokens that it stands for, that of a retrieved cluster
                  nothing; "none": as one
    encode_frames while the stream is encoded, each layer of a pass retrieves so many frames (VII-A speaks of "cluster
                  retrieval" in batches of frames that are encoded); 0: it sees the window alone. A frame that was stored
                  under its window alone knows nothing of what came before, and questions about the order of two things
                  are then answered at chance, whatever they retrieve (`docs/mosaic.md`). Above 0 what is stored depends
                  on how the stream is cut into passes, so on where calls of `watch` end too; not on questions, the cache,
                  or the way across the wire
    cache         frames a layer that stay on the device after a question, for the next one
    prefetch      fetch ahead for the next layer (VII-B), by `predictor`: "query", the paper's: this layer's query in the
                  next one's index; "projected": the next layer's query of the hidden states that enter this one, moved as
                  far as at the last question (`Drift`); "frames": the next layer's clusters of the frames that this one
                  retrieved. `slack`: so many times the budget
    clip          units that go through the vision tower together; None: as the recipe's chunk says (VII-A)
    batch_layers  they go through the language model together too; off: one at a time
    batch_attention, batch_feed  of such a pass, attention is one call under a mask, and a feed-forward block one product;
                  off: unit by unit
    batch_match   looks are compared with all clusters for sixteen units at once, and each at its turn with those that have
                  changed since; off: one at a time with all
    """

    needs: ClassVar[frozenset[str]] = frozenset({"look", "hidden"})
    asks: ClassVar[frozenset[str]] = StoredPolicy.asks | {"rep_bias", "reps_for"}

    positions: Literal["compact", "original"] = "original"
    levels: Levels = "both"
    granularity: Granularity = "frame"
    tile: int = 49
    init: int = 64
    lift: float = 2.0
    visual: int = 16
    semantic: int = 4
    smallest: int = 4
    largest: int = 32
    tau_small: float = 1.25
    tau_large: float = 2.0
    alpha: float = 8.0
    threshold: Mode = "relaxing"
    new_scene: float = 2.0
    gain: float = 0.05
    unmix: float = 0.5
    deferred: bool = True
    buffer: int = 64
    reps: int = 512
    reps_for: Literal["all", "left"] = "all"
    rep_of: Literal["mean", "medoid"] = "mean"
    rep_bias: Literal["none", "log_size"] = "none"
    encode_frames: int = 8
    cache: int = 64
    prefetch: bool = True
    predictor: Predictor = "projected"
    slack: float = 1.25
    clip: int | None = None  # type: ignore[misc]
    batch_layers: bool = True
    batch_attention: bool = True
    batch_feed: bool = True
    batch_match: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                told = ", ".join(map(repr, choices))
                raise RecipeError(f"mosaic: {field} is {shown(getattr(self, field))}; give one of {told}.")
        for field, least in LEAST.items():
            if not getattr(self, field) >= least:
                raise RecipeError(f"mosaic: {field} is {getattr(self, field)}; give at least {least}.")
        for field in ("tau_small", "tau_large", "alpha", "new_scene"):
            if not getattr(self, field) > 0:
                raise RecipeError(f"mosaic: {field} is {getattr(self, field)}; give a positive number.")
        if self.clip is not None and self.clip < 1:
            raise RecipeError(f"mosaic: clip is {self.clip}; give at least 1, or null.")
        for field in ("gain", "unmix"):
            if not 0 <= getattr(self, field) < 1:
                raise RecipeError(f"mosaic: {field} is {getattr(self, field)}; give 0 to 1, 1 not included.")
        if self.largest < self.smallest:
            raise RecipeError(
                f"mosaic: largest is {self.largest}; give at least smallest, which is {self.smallest}."
            )

    def rules(self, init: int) -> Rules:
        """The numbers of the clustering, with `init` in units."""
        own = {field.name: getattr(self, field.name) for field in fields(Rules) if hasattr(self, field.name)}
        return Rules(**{**own, "init": init})

    def stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        parts = {"frame": 1, "token": stream.unit}.get(self.granularity, 0)
        if self.granularity == "tile":
            if stream.unit % self.tile:
                raise RecipeError(
                    f"mosaic: tile is {self.tile}; give a divisor of a unit's {stream.unit} tokens."
                )
            parts = stream.unit // self.tile
        return MosaicMemory(self, parts, stream, geometry, model, device)
