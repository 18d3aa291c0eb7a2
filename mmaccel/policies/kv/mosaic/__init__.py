"""Mosaic: the unit of a stream's memory is a cluster of frames that look alike and have like keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmaccel.core.errors import RecipeError, check_choice, check_least, shown
from mmaccel.core.registry import register
from mmaccel.policies.kv._archived import ArchivedPolicy, Former, Prefetch, renamed
from mmaccel.policies.kv._index import IndexPolicy
from mmaccel.policies.kv.mosaic.index import ClusterIndex
from mmaccel.policies.kv.mosaic.split import Rules

if TYPE_CHECKING:
    import torch

    from mmaccel.core.adapter import Geometry
    from mmaccel.core.kv import Stream

LEAST = {"init": 2, "visual": 1, "semantic": 1, "buffer": 0}
SPLIT = dict(smallest=4, largest=32, tau_small=1.25, tau_large=2, alpha=8, new_scene=2, gain=0.05, unmix=0.5)
BATCHED = "attention", "feed", "match"
PREDICTORS = {"query": "query", "projected": "projected", "frames": "query"}
"""What a predictor of earlier versions is now; "frames", which changed no answer either, is none of its own any more."""


@register("index", "clusters")
@dataclass(frozen=True, kw_only=True)
class Clusters(IndexPolicy):
    """Units clustered by look, and inside each visual cluster by key, layer by layer (Mosaic V-B); searches take whole ones.

    Clusters are kept up to date as units come: by their centroid and variance, split when the variance passes a threshold
    that depends on the size, at once where a cluster is on the device, else when it is next retrieved (VI-B). Departures
    from the paper (arXiv 2604.10060): a cluster holds units, found by their mean keys (the paper speaks of tokens, its
    budgets of frames); points are centred and lifted (`split.LIFT`); every unit is written to the host, buffered ones too.

    init          frames before the first clustering; until then units are retrieved one by one
    visual, semantic  units of a cluster at the start, on average, at each level
    buffer        units a layer that may wait for a deferred split
    first_stage   what the visual level is searched by (V-C): "key", the mean keys of its clusters, for a layer's queries and
                  looks have nothing in common; or "look", as the paper has it: the mean visual embeddings, compared with
                  those of a pass's frames, or with a question's words as they enter the first layer
    splits        which retrievals make the splits that are owed (algorithm 1): "passes", those of passes of the stream, so
                  that a question changes nothing of what is stored later (questions do, where passes retrieve nothing); or
                  "all", as the paper has it
    """

    needs: ClassVar[frozenset[str]] = frozenset({"look", "hidden"})

    init: int = 64
    visual: int = 16
    semantic: int = 4
    buffer: int = 64
    first_stage: Literal["key", "look"] = "key"
    splits: Literal["passes", "all"] = "passes"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in LEAST.items():
            check_least(self, least, field)
        check_choice("clusters", "first_stage", self.first_stage, ("key", "look"))
        check_choice("clusters", "splits", self.splits, ("passes", "all"))

    def open(
        self, stream: Stream, geometry: Geometry, device: torch.device, window: int, summaries: bool
    ) -> ClusterIndex:
        rules = Rules(
            init=stream.units(self.init), visual=self.visual, semantic=self.semantic, buffer=self.buffer
        )
        how = {"cosine": self.similarity == "cosine", "by_look": self.first_stage == "look"}
        every = self.splits == "all"
        return ClusterIndex(rules, stream, geometry, device, window, summaries=summaries, every=every, **how)


@register("kv", "mosaic")
@dataclass(frozen=True, kw_only=True)
class Mosaic(ArchivedPolicy):
    """Clusters of frames on the host; a question recalls whole clusters, and sees one summary token of each other one.

    After Mosaic (arXiv 2604.10060), as a composition of three parts that any archived memory takes: the index `clusters`,
    retrieval while the stream is encoded (`encode_frames`), and summary tokens (`reps`). The device keeps the local window,
    one representative a cluster and a cache; the host everything. While a layer computes, what the next will need is
    predicted and fetched; what was missed is fetched before it is used, so that the prediction changes no answer. Exact
    while all units fit into `frames` and `window`, with positions "original" or nothing left out. The preset `mosaic-paper`
    takes the paper's side where the defaults differ.

    positions  as for others, but "original" by default: closed up, summary tokens lose their time
    """

    FORMER: ClassVar[Mapping[str, Former]] = {
        **ArchivedPolicy.FORMER,
        **{name: Former(part="clusters") for name in LEAST},
        "levels": Former("both", "the index is always nested; kv 'rekv' retrieves frame by frame"),
        "granularity": Former("frame", "clusters hold frames"),
        "tile": Former(49, "clusters hold frames"),
        **{
            name: Former(value, "it is a constant of mosaic/split.py (equation 5)")
            for name, value in SPLIT.items()
        },
        "lift": Former(2.0, "it is the constant LIFT of mosaic/split.py (V-B)"),
        "threshold": Former("relaxing", "thresholds relax as clusters grow (equation 5)"),
        "deferred": Former(True, "splits are always deferred (VI-B)"),
        "reps_for": Former("all", "all clusters have summary tokens (V-C)"),
        "rep_of": Former("mean", "a summary token is the mean of its cluster"),
        "rep_bias": Former("none", "a summary token weighs as one token"),
        "slack": Former(1.25, "it is the constant AHEAD of _retrieval.py", speed=(int, float)),
        "clip": Former(None, "the recipe's chunk sets the units of a pass", speed=(int,)),
        **{f"batch_{name}": Former(True, "it is always done (VII-A)", speed=(False,)) for name in BATCHED},
    }

    local: int = 8
    positions: Literal["compact", "original"] = "original"
    index: Any = "clusters"
    encode_frames: int = 8
    reps: int | None = 512
    cache: int = 64
    prefetch: Prefetch = "projected"

    @classmethod
    def upgrade(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        given = dict(fields)
        on = given.get("prefetch")
        if "predictor" in given or type(on) is bool:
            predictor = given.pop("predictor", "projected")
            if not isinstance(predictor, str) or predictor not in PREDICTORS:
                raise RecipeError(f"mosaic: predictor is {shown(predictor)}; leave it out and set prefetch.")
            if type(on) is bool:
                del given["prefetch"]
            told = "predictor, or a prefetch of true or false,"
            renamed("mosaic", given, told, "off" if on is False else PREDICTORS[predictor], "prefetch")
        if "batch_layers" in given:
            if type(together := given.pop("batch_layers")) is not bool:
                raise RecipeError(
                    f"mosaic: batch_layers is {shown(together)}; leave it out and set encode_by."
                )
            renamed("mosaic", given, "batch_layers", "pass" if together else "frame", "encode_by")
        return super().upgrade(given)
