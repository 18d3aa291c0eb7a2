"""Units as points for clustering, and when and how clusters are split: means, thresholds, spherical k-means, bisection.

Deterministic, for many small sets at once. Mosaic is arXiv 2604.10060. Letters: N units (frames), P tokens of a unit, E size
of a visual feature, L layers, G kv heads, D head size, d = G * D size of a key.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.backends.ops.clusters import copy_units, slab_alignment
from mmaccel.core.memory.buffers import LEAST, grow_buffer, is_too_long
from mmaccel.policies.kv._ingest import unit_means
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.mosaic.clusters import Array, ClusterTable, mean_variance_and_size, pooled_variance

LIFT = 2.0
"""The last coordinate of a point, in root mean square lengths of the first points. Mosaic (V-B) has none (0): angles alone.
A stream that begins with one scene would make directions of that scene's noise; with much of it angles are distances."""
DEEPEST, RAISED = 3, 1.1
"""Bisections of one cluster at a time, after which it is cut by time; and what of its variance is the threshold of a cluster
that no bisection makes more compact."""
FLOOR, CAP, ROUNDED = 1e-3, 0.95, 4
"""A calibrated threshold is FLOOR to CAP; points of unit length have a variance of at most 1. ROUNDED: the least last
coordinate of a point, in rounding errors of the stream's type, so that a still camera's frames are one scene."""
unit_length = partial(normalize, dim=-1, eps=torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class Params:
    """The parameters of the clustering. `visual`, `semantic`, `init` (in units) and `buffer` are fields of the index
    `clusters`; the paper gives no values for the others.

    smallest, largest  units (frames) below which a cluster is not split, and above which a semantic cluster is always split;
                       `largest` is scaled for the visual level
    tau_small, tau_large, alpha  equation 5, in multiples of the layer's mean variance at the start; see `SplitBounds`
    new_scene  a multiple of a visual cluster's threshold: a unit whose squared distance to the nearest one exceeds it opens
               a new cluster; one whose variance exceeds it is split however few units it has
    gain       a split must lower the variance by this share, or it is not made
    unmix      before the first thresholds are set, a cluster is split if that lowers its variance by this share: it mixes
               scenes
    """

    visual: int
    semantic: int
    init: int
    buffer: int
    smallest: int = 4
    largest: int = 32
    tau_small: float = 1.25
    tau_large: float = 2.0
    alpha: float = 8.0
    new_scene: float = 2.0
    gain: float = 0.05
    unmix: float = 0.5

    def calibrate(self, level: ClusterTable, visual: bool, floor: Tensor) -> SplitBounds:
        """Return the bounds for a level from its present clusters; thresholds are at least `floor` [L]."""
        s2, n = level.variance[:, : level.id_bound], level.size[:, : level.id_bound]
        usual = (s2 * n).sum(1) / n.sum(1).clamp_min(1)
        small, large = ((t * usual).maximum(floor).clamp(max=CAP) for t in (self.tau_small, self.tau_large))
        return self.make_split_bounds(small, large, visual)

    def make_split_bounds(self, small: Tensor, large: Tensor, visual: bool) -> SplitBounds:
        """Return the bounds for a level with thresholds `small` and `large` [L]; the visual level's size limit is scaled."""
        most = self.largest * (self.visual if visual else self.semantic) // self.semantic
        apart = self.new_scene if visual else math.inf
        return SplitBounds(small, large, self.alpha, self.smallest, most, apart)


@dataclass(frozen=True, eq=False)
class SplitBounds:
    """Limits beyond which the clusters of one level are split.

    Mosaic's equation 5: the allowed variance of a cluster goes from `small` to `large` [L] as it grows, at rate `alpha`.
    Small clusters have the lower bound, as the equation's symbols say (the paper's prose says the opposite). This only makes
    up for their population variance, which underestimates that of few points by (n - 1) / n.

    A cluster of fewer than `smallest` units is split only if its variance is above `apart` times the threshold: it then
    mixes scenes that occur once each, for lack of clusters in k-means, and its summary token would mix unrelated frames.
    """

    small: Tensor
    large: Tensor
    alpha: float
    smallest: int
    largest: int
    apart: float = math.inf

    def threshold(self, layer: Array | int, n: Array | int) -> Any:
        """Return the variance threshold of clusters of size `n` [...] at layers `layer` [...]."""
        return self._thresholds[layer, np.minimum(n, self._thresholds.shape[1] - 1)]

    @cached_property
    def _thresholds(self) -> Array:
        """[L, n] of sizes 0 to that from which on they are `large` to the last bit."""
        n = torch.arange(2 + math.ceil(40 * self.alpha), dtype=self.small.dtype)
        share = 1 - torch.exp((1 - n) / self.alpha)
        return (self.small[:, None] + (self.large - self.small)[:, None] * share).numpy()

    def must_split_first_layer(self, level: ClusterTable, cluster: int) -> bool:
        """Return whether one cluster at layer 0 must be split: as `exceeds_threshold`, but faster, without tensors."""
        n, s2, limit = (float(row[0, cluster]) for row in (level.size, level.variance, level.limit))
        most = max(float(self.threshold(0, int(n))), limit)
        return s2 > (1.0 if n >= self.smallest else self.apart) * most or n > self.largest

    def exceeds_threshold(self, layer: Array, n: Array, s2: Array, limit: Array) -> Array:
        """Return [b]: whether clusters of size `n`, variance `s2` and own threshold `limit` [b] must be split."""
        most = np.maximum(self.threshold(layer, n), limit)
        often = np.where(n >= self.smallest, 1.0, self.apart)
        return np.asarray((s2 > often * most) | (n > self.largest))


def split_exceeding(
    level: ClusterTable,
    bounds: SplitBounds,
    vectors: Callable[[Tensor, Tensor], Tensor],
    layer: Tensor,
    cluster: Tensor,
    gain: float,
    split: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> int:
    """Bisect the clusters (layer [b], cluster [b]) that exceed their bounds until none does; return the number of splits.

    vectors(layer [b], units [b, m]) returns the vectors [b, m, d] of units (frames); split(layer, cluster, new) is called
    for each round: some units of `cluster` are now in `new`. A bisection that lowers the variance by less than `gain` is not
    made, and the cluster is not tried again until its variance has grown by a tenth; one that is too large is then cut by
    time.
    """
    splits = 0
    for depth in range(64):
        n, s2 = level.size[layer, cluster], level.variance[layer, cluster]
        limit = level.limit[layer, cluster]
        too = torch.from_numpy(bounds.exceeds_threshold(*(row.numpy() for row in (layer, n, s2, limit))))
        layer, cluster, n, s2 = layer[too], cluster[too], n[too], s2[too]
        if not layer.numel():
            break
        members = level.members_of(layer, cluster)
        present = members >= 0
        x = vectors(layer, members)
        label, forced = bisect(x, present) if depth < DEEPEST else split_in_half(present), n > bounds.largest
        (_, s2_a, n_a), (_, s2_b, n_b) = (mean_variance_and_size(x, label == side) for side in (0, 1))
        left = pooled_variance(s2_a, n_a, s2_b, n_b) + torch.finfo(s2.dtype).eps  # rounding is no gain
        weak = (left > (1 - gain) * s2) | (depth >= DEEPEST)
        label = torch.where((weak & forced)[:, None], split_in_half(present), label)
        refused = weak & ~forced
        level.set_field("limit", layer[refused], cluster[refused], RAISED * s2[refused])
        layer, cluster, members, x, label = (t[~refused] for t in (layer, cluster, members, x, label))
        if not layer.numel():
            break
        new = level.allocate_ids(layer, level.parent[layer, cluster])
        both, ids, mine = layer.repeat(2), torch.cat([cluster, new]), torch.cat([label == 0, label == 1])
        level.set_members(both, ids, members.repeat(2, 1).masked_fill(~mine, -1), x.repeat(2, 1, 1))
        level.set_field("limit", both, ids, 0.0)
        if split is not None:
            split(layer, cluster, new)
        splits += layer.numel()
        layer, cluster = both, ids
    return splits


class UnitMeans:
    """Means of the keys, values and visual features of every unit (frame), on the host, from which clusters are made.

    For clustering they become points of unit length: the mean of the first units is subtracted (most of a key is the model's
    bias), and one coordinate (`LIFT`) is added. This is done in float32, or in float64 if the stream is. `key_rows` returns
    keys on the device.
    """

    def __init__(
        self, layers: int, look: int, width: int, dtype: torch.dtype, device: torch.device, lift: float = LIFT
    ) -> None:
        self._device, self.lift, self.units = device, lift, 0
        self.work = torch.float64 if dtype == torch.float64 else torch.float32
        # With room for more behind `units`; the keys are where a device can read them, which may still read the former ones.
        self._look = torch.zeros(0, look, dtype=self.work)
        self.key_buffer = torch.zeros(0, layers, width, dtype=dtype)
        self._value = torch.zeros(0, layers, width, dtype=dtype)
        self._before: Tensor | None = None
        self._inbox: deque[tuple[list[Tensor], torch.cuda.Event | None]] = deque()
        self.centre: tuple[Tensor, Tensor] | None = None
        """Of looks [E + 1] and of keys [L, d + 1]: the mean, and the last coordinate."""
        self._zero = torch.zeros(1, dtype=torch.long, device=device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def start_copy(self, tokens: int, look: Tensor, pairs: Sequence[Pair], retrieved: Tensor | None) -> None:
        """Start to copy the means of a pass's new units, of `tokens` tokens each, to the host. See `Index.add_units`."""
        # [L, n, G * D] to [n, L, G * D].
        kind = pairs[0][0].dtype
        means = (unit_means(pairs, side, tokens).to(kind) for side in (0, 1))
        key, value = (one.transpose(0, 1).contiguous() for one in means)
        event, sent = None, [look, key, value] if retrieved is None else [look, key, value, retrieved]
        if key.is_cuda:
            sent = [t.to("cpu", non_blocking=True) for t in sent]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(key.device))  # the thread's current device may be another
        self._inbox.append((sent, event))

    @property
    def waiting_passes(self) -> int:
        """Number of passes whose unit (frame) means are on their way to the host, from `start_copy` until they are added."""
        return len(self._inbox)

    @property
    def oldest_pass_has_arrived(self) -> bool:
        """Whether the means of the oldest waiting pass are on the host; False also if that pass retrieved older units."""
        if not self._inbox or len(self._inbox[0][0]) > 3:
            return False
        event = self._inbox[0][1]
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def add_oldest_waiting_pass(self) -> Tensor | None:
        """Wait for the oldest waiting pass's means and add them; return the older units [L, k] it retrieved, or None."""
        (look, key, value, *rest), event = self._inbox.popleft()
        if event is not None:
            event.synchronize()
        self.append(look, key, value)
        return rest[0] if rest else None

    def append(self, look: Tensor, key: Tensor, value: Tensor) -> None:
        """Append the means of new units (frames): visual feature [n, E]; key and value [n, L, d]."""
        end, pinned = self.units + len(look), self._device.type == "cuda"
        for name, rows in (("_look", look), ("key_buffer", key), ("_value", value)):
            held = getattr(self, name)
            room = max(end, LEAST)  # whoever holds as many never needs more, and keeps what was captured
            grown = grow_buffer(held, 0, room, fill=0, share=1.0, pinned=pinned and name == "key_buffer")
            if grown is not held and name == "key_buffer":
                self._before = held if pinned else None
            grown[self.units : end] = rows.to(grown)
            setattr(self, name, grown)
        self.units = end

    def forget_from(self, units: int) -> None:
        """Keep the means of the first `units` units (frames) only; forget the later ones, and those of waiting passes."""
        self._inbox.clear()
        self.units = min(self.units, units)

    def keep_rows(self, kept: Tensor) -> None:
        """Keep only the units (frames) at rows `kept` [k], as rows 0 .. k - 1; there must be no waiting passes."""
        rows = self.visuals[kept], self.keys[kept], self.values[kept]
        if is_too_long(len(kept), len(self.key_buffer)):
            self._look, self.key_buffer, self._value = self._look[:0], self.key_buffer[:0], self._value[:0]
        self.units = 0
        self.append(*rows)  # over what the device has read: it has sent the means of all passes

    @property
    def visuals(self) -> Tensor:
        """[N, E]: the mean visual feature of each unit (frame)."""
        return self._look[: self.units]

    @property
    def keys(self) -> Tensor:
        """Mean unrotated key of each unit (frame) and layer, [N, L, d], over tokens; d = kv heads * head size."""
        return self.key_buffer[: self.units]

    @property
    def values(self) -> Tensor:
        """Mean value of each unit (frame) and layer, [N, L, d]."""
        return self._value[: self.units]

    def set_centring_origin(self, units: int) -> tuple[Tensor, Tensor]:
        """Take the mean of the first `units` units (frames) as the origin of all points, from now on; return lower
        limits for the variance thresholds of visual features [1] and keys [L]: twice the variance due to rounding."""
        (look, one), (key, each) = map(self._origin, (self.visuals[:units], self.keys[:units].to(self.work)))
        self.centre = look, key
        return one.view(1), each

    def _origin(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        mean = rows.mean(0)
        spread = (rows - mean).square().sum(-1).mean(0).sqrt()
        noise = (torch.finfo(self.key_buffer.dtype).eps / 2 if self.lift else 0.0) * mean.norm(dim=-1)
        # Points that are all the same are still points of length one.
        least = torch.finfo(self.work).tiny ** 0.5 if self.lift else 0.0
        last = (self.lift * spread).maximum(ROUNDED * noise).clamp_min(least)
        return torch.cat([mean, last[..., None]], -1), (2 * (noise / last).nan_to_num().square()).clamp_min(
            FLOOR
        )

    @staticmethod
    def _points(rows: Tensor, origin: Tensor) -> Tensor:
        points = origin.new_empty(*rows.shape[:-1], origin.shape[-1])
        torch.sub(rows, origin[..., :-1], out=points[..., :-1])
        points[..., -1:] = origin[..., -1:]
        return unit_length(points)

    def centred_looks(self, layer: Tensor, units: Tensor) -> Tensor:
        """Unit vectors [..., E + 1] of the centred visual features of `units` (frames) [...]; all layers share them."""
        assert self.centre is not None
        return self._points(self.visuals[units.clamp_min(0)], self.centre[0])

    def centred_keys(self, layer: Tensor, units: Tensor) -> Tensor:
        """Unit vectors [b, m, d + 1] of the centred keys of `units` (frames) [b, m] at `layer` [b]; unit -1: undefined."""
        assert self.centre is not None
        # Row by row, for a tensor indexed by two others is gathered number by number.
        at = (units.clamp_min(0) * self.keys.shape[1] + layer[:, None]).flatten()
        rows = self.keys.flatten(0, 1).index_select(0, at).view(*units.shape, -1)
        return self._points(rows, self.centre[1][layer][:, None])

    def means(self, rows: Tensor, layer: Tensor, units: Tensor) -> Tensor:
        """Return the mean [b, d] of `rows` (this object's `keys` or `values`) over units [b, m] (-1: none), `layer` [b]."""
        # One after the other, so that what a mean is does not depend on what else is computed beside it.
        row, col = (units >= 0).nonzero(as_tuple=True)
        some = rows[units[row, col], layer[row]].to(self.work)
        total = torch.zeros(len(layer), rows.shape[2], dtype=self.work).index_add_(0, row, some)
        return total / (units >= 0).sum(1, keepdim=True).clamp_min(1)

    def key_rows(self, layer: int, units: Tensor) -> Tensor:
        """Return mean keys [n, d] float32 of `units` (frames) [n] at `layer`, on the device."""
        held = self.key_buffer
        if self._device.type != "cuda":
            return held[units, layer].float()
        # A row is gathered as its two halves are, which a unit's keys and values would be.
        layers, width = held.shape[1:]
        out = torch.empty(2, 1, len(units), width // 2, dtype=held.dtype, device=self._device)
        slab = [held.view(-1, 2, 1, 1, width // 2)]
        copy_units(out, slab, self._zero, units * layers + layer, slab_alignment(slab))
        return out[:, 0].float().transpose(0, 1).flatten(1)

    def nbytes(self) -> int:
        """Return the bytes that the means hold on the host."""
        return sum(one.untyped_storage().nbytes() for one in (self._look, self.key_buffer, self._value))


def kmeans(
    x: Tensor,
    k: int,
    *,
    present: Tensor | None = None,
    seeds: Tensor | None = None,
    iterations: int = 10,
    tolerance: float = 1e-4,
) -> Tensor:
    """Spherical k-means: return labels [B, n] in 0 .. k-1 of the points `x` [B, n, d], in each of `B` sets; -1 if absent.

    A point belongs to the centre with the largest cosine, ties to the lowest label; a centre is the direction of its points'
    mean. The first centres are points at equal steps in the given order (of time), unless `seeds` [B, k, d] are given. No
    label is left empty: it takes the point that is farthest from its own centre, of a label that keeps another. A set must
    have at least `k` points. Points are expected to be of unit length, or zero.
    Mosaic (arXiv 2604.10060), section V-B, names k-means with cosine similarity and no more; equal steps after RetroInfer.
    """
    B, n, _ = x.shape
    here = torch.ones(B, n, dtype=torch.bool, device=x.device) if present is None else present
    if seeds is None:
        rank = (2 * torch.arange(k, device=x.device) + 1) * here.sum(1, keepdim=True) // (2 * k)
        order = torch.argsort(here.logical_not().to(torch.int8), dim=1, stable=True)
        seeds = x.gather(1, order.gather(1, rank)[:, :, None].expand(-1, -1, x.shape[2]))
    centre, label = unit_length(seeds), torch.zeros(B, n, dtype=torch.long, device=x.device)
    rows = torch.arange(B, device=x.device)
    for _ in range(iterations):
        near = x @ centre.mT
        label = near.argmax(2)
        member, size = _members(label, here, k, x.dtype)
        for _ in range(k):
            empty = (size == 0).any(1)
            if not bool(empty.any()):
                break
            own = near.gather(2, label[:, :, None])[:, :, 0]
            free = here & (size.gather(1, label) > 1)
            point = own.masked_fill(~free, torch.inf).argmin(1)
            lowest = (size == 0).to(torch.int8).argmax(1)
            label[rows, point] = torch.where(empty, lowest, label[rows, point])
            near[rows[empty], point[empty], lowest[empty]] = torch.inf
            member, size = _members(label, here, k, x.dtype)
        new = unit_length(member.mT @ x)
        moved, centre = (new - centre).norm(dim=-1).amax() if B else new.new_zeros(()), new
        if bool(moved <= tolerance):
            break
    return label.masked_fill(~here, -1)


def bisect(x: Tensor, present: Tensor) -> Tensor:
    """Return k-means labels [B, n] for k = 2 (-1: absent), seeded by the two points with the smallest cosine."""
    n = x.shape[1]
    pair = (present[:, :, None] & present[:, None, :]).triu(1)
    far = (x @ x.mT).masked_fill(~pair, torch.inf).flatten(1).argmin(1)
    ends = torch.stack([far // n, far % n], 1)
    seeds = x.gather(1, ends[:, :, None].expand(-1, -1, x.shape[2]))
    return kmeans(x, 2, present=present, seeds=seeds)


def split_in_half(present: Tensor) -> Tensor:
    """Return labels [B, n]: 0 for the first half of each set's points, 1 for the rest, -1 for points not `present`."""
    return (present.cumsum(1) > (present.sum(1, keepdim=True) + 1) // 2).long().masked_fill(~present, -1)


def _members(label: Tensor, here: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Membership [B, n, k] of 0 and 1, and the sizes [B, k]."""
    member = (label[:, :, None] == torch.arange(k, device=label.device)) & here[:, :, None]
    return member.to(dtype), member.sum(1)
