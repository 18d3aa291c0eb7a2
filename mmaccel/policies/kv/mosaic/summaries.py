"""What is kept of every unit on the host, whatever becomes of its clusters: its look, and its mean key and value a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.policies.kv.mosaic.buffers import Series
from mmaccel.policies.kv.mosaic.kmeans import unit


class Summaries:
    """Letters: N units, T entries of a unit, E size of a look, L layers, d = G * D size of a key.

    look [N, E]; key, value [N * T, L, d], the means of an entry's tokens, keys before rotation. As points to be clustered
    they are taken from the mean of the first units, which is what all have in common (a model's key bias is most of a key),
    get one more coordinate, and are scaled to length one. The coordinate is the same for all, `lift` times the root mean
    square length of the first points; without it (0) a stream that begins with one scene would make directions of that
    scene's noise, and with much of it angles are distances. Statistics are kept in float32, or in float64 when the
    summaries are. `device` is where `key_rows` is asked for.
    """

    def __init__(
        self,
        layers: int,
        look: int,
        width: int,
        parts: int,
        dtype: torch.dtype,
        lift: float,
        device: torch.device | None = None,
    ) -> None:
        self.parts, self.lift = parts, lift
        self._device = torch.device("cpu") if device is None else device
        self.work = torch.float64 if dtype == torch.float64 else torch.float32
        self._look = Series(look, dtype=self.work)
        self._key = Series(layers, width, dtype=dtype, pinned=self._device.type == "cuda")
        self._value = Series(layers, width, dtype=dtype)
        self.centre: tuple[Tensor, Tensor] | None = None
        """Of looks [E + 1] and of keys [L, d + 1]: the mean, and the last coordinate."""

    @property
    def units(self) -> int:
        return self._look.length

    @property
    def key(self) -> Tensor:
        return self._key.rows

    @property
    def all_keys(self) -> Tensor:
        """`key` and the room behind it."""
        return self._key.all

    @property
    def value(self) -> Tensor:
        return self._value.rows

    def append(self, look: Tensor, key: Tensor, value: Tensor) -> None:
        """Of new units: look [n, E]; key, value [n * T, L, d]."""
        self._look.append(look)
        self._key.append(key)
        self._value.append(value)

    def cut(self, units: int) -> None:
        """Forget all but the first `units` units."""
        self._look.cut(units)
        self._key.cut(units * self.parts)
        self._value.cut(units * self.parts)

    def settle(self, units: int) -> None:
        """Take the mean of the first `units` units as the origin, for good."""
        self.centre = (
            self._origin(self._look.rows[:units]),
            self._origin(self.key[: units * self.parts].to(self.work)),
        )

    def _origin(self, rows: Tensor) -> Tensor:
        mean = rows.mean(0)
        spread = (rows - mean).square().sum(-1).mean(0).sqrt()
        # Points that are all the same are still points of length one.
        least = torch.finfo(self.work).tiny ** 0.5 if self.lift else 0.0
        return torch.cat([mean, (self.lift * spread).clamp_min(least)[..., None]], -1)

    @staticmethod
    def _points(rows: Tensor, origin: Tensor) -> Tensor:
        points = origin.new_empty(*rows.shape[:-1], origin.shape[-1])
        torch.sub(rows, origin[..., :-1], out=points[..., :-1])
        points[..., -1:] = origin[..., -1:]
        return unit(points)

    def looks(self, units: Tensor) -> Tensor:
        """The points [..., E + 1] of the looks of `units` [...]."""
        assert self.centre is not None
        return self._points(self._look.rows[units.clamp_min(0)], self.centre[0])

    def look_points(self, layer: Tensor, units: Tensor) -> Tensor:
        """`looks`, asked as `key_points` is."""
        return self.looks(units)

    def key_points(self, layer: Tensor, entries: Tensor) -> Tensor:
        """The points [b, m, d + 1] of `entries` [b, m] at `layer` [b]; anything where an entry is -1."""
        assert self.centre is not None
        # Row by row, for a tensor indexed by two others is gathered number by number.
        at = (entries.clamp_min(0) * self.key.shape[1] + layer[:, None]).flatten()
        rows = self.key.flatten(0, 1).index_select(0, at).view(*entries.shape, -1)
        return self._points(rows, self.centre[1][layer][:, None])

    def means(self, rows: Tensor, layer: Tensor, entries: Tensor) -> Tensor:
        """Of `key` or `value` the mean [b, d] over `entries` [b, m] (-1: none) at `layer` [b], in the working precision."""
        # One after the other, so that what a mean is does not depend on what else is computed beside it.
        row, col = (entries >= 0).nonzero(as_tuple=True)
        some = rows[entries[row, col], layer[row]].to(self.work)
        total = torch.zeros(len(layer), rows.shape[2], dtype=self.work).index_add_(0, row, some)
        return total / (entries >= 0).sum(1, keepdim=True).clamp_min(1)

    def key_mean(self, entries: Tensor) -> Tensor:
        """[L, d]: the mean key over `entries` [m] at every layer, in the working precision."""
        return self.key[entries].to(self.work).sum(0) / max(1, len(entries))

    def key_rows(self, layer: int, entries: Tensor) -> Tensor:
        """[n, d] float32: the mean keys at `layer` of `entries` [n], which are on the device and unknown to the host."""
        held = self._key.all
        if self._device.type != "cuda":
            return held[entries, layer].float()
        # A row is gathered as its two halves are, which a unit's keys and values would be.
        layers, width = held.shape[1:]
        out = torch.empty(2, 1, len(entries), width // 2, dtype=held.dtype, device=self._device)
        if self._zero is None:
            self._zero = torch.zeros(1, dtype=torch.long, device=self._device)
        ops.gather_units(out, [held.view(-1, 2, 1, 1, width // 2)], self._zero, entries * layers + layer)
        return out[:, 0].float().transpose(0, 1).flatten(1)

    _zero: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What there is to save."""
        kept = {"look": self._look.rows, "key": self.key, "value": self.value}
        if self.centre is not None:
            kept |= {"centre_look": self.centre[0], "centre_key": self.centre[1]}
        return kept

    def load(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors` gave, into empty summaries."""
        self.append(tensors["look"], tensors["key"], tensors["value"])
        if "centre_look" in tensors:
            self.centre = tensors["centre_look"], tensors["centre_key"]

    def nbytes(self) -> int:
        return self._look.nbytes() + self._key.nbytes() + self._value.nbytes()
