"""Units on their way to the clustering: their means leave the device without a wait, and are kept on the host for good.

Letters: N units, P tokens of a unit, E size of a look, L layers, G kv heads, D head size, d = G * D size of a key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.backends.ops.gather import gather_units
from mmaccel.core.buffers import grow_buffer
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.mosaic.split import unit
from mmaccel.policies.kv.store.transfer import in_units

LIFT = 2.0
"""The last coordinate of a point, in root mean square lengths of the first points. Mosaic (V-B) has none (0): angles alone.
A stream that begins with one scene would make directions of that scene's noise; with much of it angles are distances."""


class Rows:
    """Rows [n, ...] on the host that only grow at the end, or are cut there; `pinned`: where a device can read them."""

    def __init__(self, *shape: int, dtype: torch.dtype, pinned: bool = False) -> None:
        self.all = torch.zeros(0, *shape, dtype=dtype)
        """The rows so far, and room for more."""
        self._pinned = pinned
        self._before: Tensor | None = None
        self.length = 0

    def append(self, rows: Tensor) -> None:
        end = self.length + rows.shape[0]
        grown = grow_buffer(self.all, 0, end, fill=0, share=1.0, pinned=self._pinned)
        if grown is not self.all:
            # The device may still be reading the former rows.
            self._before = self.all if self._pinned else None
            self.all = grown
        self.all[self.length : end] = rows.to(self.all)
        self.length = end

    def cut(self, length: int) -> None:
        self.length = min(self.length, length)

    @property
    def rows(self) -> Tensor:
        """The rows so far; a view."""
        return self.all[: self.length]


class UnitMeans:
    """What is kept of every unit on the host: its look [N, E], and its mean raw key and value [N, L, d].

    To be clustered they become points: less the mean of the first units, which all have in common (a model's key bias
    is most of a key), with one more coordinate, the same for all (`LIFT`), scaled to length one. Statistics are kept in
    float32, or in float64 where the stream is. `device` is where `key_rows` is asked for.
    """

    def __init__(
        self, layers: int, look: int, width: int, dtype: torch.dtype, device: torch.device, lift: float = LIFT
    ) -> None:
        self._device, self.lift = device, lift
        self.work = torch.float64 if dtype == torch.float64 else torch.float32
        self._look = Rows(look, dtype=self.work)
        self._key = Rows(layers, width, dtype=dtype, pinned=device.type == "cuda")
        self._value = Rows(layers, width, dtype=dtype)
        self._inbox: deque[tuple[list[Tensor], torch.cuda.Event | None]] = deque()
        self.centre: tuple[Tensor, Tensor] | None = None
        """Of looks [E + 1] and of keys [L, d + 1]: the mean, and the last coordinate."""
        self._zero: Tensor | None = None

    # Units come in.

    @torch.inference_mode(False)
    @torch.no_grad()
    def arrived(self, tokens: int, look: Tensor, pairs: Sequence[Pair], retrieved: Tensor | None) -> None:
        """New units of `tokens` tokens: see `Index.arrived`. Their means leave for the host."""
        means = [
            torch.stack([in_units(pair[side][0].float(), tokens).mean(2) for pair in pairs])
            for side in (0, 1)
        ]
        # [L, G, n, D] to [n, L, G * D].
        key, value = (mean.permute(2, 0, 1, 3).flatten(2).to(pairs[0][0].dtype) for mean in means)
        event, sent = None, [look, key, value] if retrieved is None else [look, key, value, retrieved]
        if key.is_cuda:
            sent = [t.to("cpu", non_blocking=True) for t in sent]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # The current device of the thread may be another.
            event.record(torch.cuda.current_stream(key.device))
        self._inbox.append((sent, event))

    @property
    def waiting(self) -> int:
        """Passes that have arrived and are not taken in."""
        return len(self._inbox)

    def take(self) -> Tensor | None:
        """Take in the first of the passes that are `waiting`; the units [L, k] that it retrieved, if any."""
        (look, key, value, *rest), event = self._inbox.popleft()
        if event is not None:
            event.synchronize()
        self.append(look, key, value)
        return rest[0] if rest else None

    def append(self, look: Tensor, key: Tensor, value: Tensor) -> None:
        """Of new units: look [n, E]; key, value [n, L, d]."""
        self._look.append(look)
        self._key.append(key)
        self._value.append(value)

    def cut(self, units: int) -> None:
        """Forget all but the first `units` units, and those that wait."""
        self._inbox.clear()
        for rows in (self._look, self._key, self._value):
            rows.cut(units)

    # What there is.

    @property
    def units(self) -> int:
        return self._look.length

    @property
    def look(self) -> Tensor:
        return self._look.rows

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

    def settle(self, units: int) -> None:
        """Take the mean of the first `units` units as the origin, for good."""
        self.centre = self._origin(self.look[:units]), self._origin(self.key[:units].to(self.work))

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
        return self._points(self.look[units.clamp_min(0)], self.centre[0])

    def look_points(self, layer: Tensor, units: Tensor) -> Tensor:
        """`looks`, asked as `key_points` is."""
        return self.looks(units)

    def key_points(self, layer: Tensor, units: Tensor) -> Tensor:
        """The points [b, m, d + 1] of `units` [b, m] at `layer` [b]; anything where a unit is -1."""
        assert self.centre is not None
        # Row by row, for a tensor indexed by two others is gathered number by number.
        at = (units.clamp_min(0) * self.key.shape[1] + layer[:, None]).flatten()
        rows = self.key.flatten(0, 1).index_select(0, at).view(*units.shape, -1)
        return self._points(rows, self.centre[1][layer][:, None])

    def means(self, rows: Tensor, layer: Tensor, units: Tensor) -> Tensor:
        """Of `key` or `value` the mean [b, d] over `units` [b, m] (-1: none) at `layer` [b], in the working precision."""
        # One after the other, so that what a mean is does not depend on what else is computed beside it.
        row, col = (units >= 0).nonzero(as_tuple=True)
        some = rows[units[row, col], layer[row]].to(self.work)
        total = torch.zeros(len(layer), rows.shape[2], dtype=self.work).index_add_(0, row, some)
        return total / (units >= 0).sum(1, keepdim=True).clamp_min(1)

    def key_mean(self, units: Tensor) -> Tensor:
        """[L, d]: the mean key over `units` [m] at every layer, in the working precision."""
        return self.key[units].to(self.work).sum(0) / max(1, len(units))

    def key_rows(self, layer: int, units: Tensor) -> Tensor:
        """[n, d] float32: the mean keys at `layer` of `units` [n], which are on the device and unknown to the host."""
        held = self._key.all
        if self._device.type != "cuda":
            return held[units, layer].float()
        # A row is gathered as its two halves are, which a unit's keys and values would be.
        layers, width = held.shape[1:]
        out = torch.empty(2, 1, len(units), width // 2, dtype=held.dtype, device=self._device)
        if self._zero is None:
            self._zero = torch.zeros(1, dtype=torch.long, device=self._device)
        gather_units(out, [held.view(-1, 2, 1, 1, width // 2)], self._zero, units * layers + layer)
        return out[:, 0].float().transpose(0, 1).flatten(1)

    def tensors(self) -> dict[str, Tensor]:
        """What there is to save."""
        kept = {"look": self.look, "key": self.key, "value": self.value}
        if self.centre is not None:
            kept |= {"centre_look": self.centre[0], "centre_key": self.centre[1]}
        return kept

    def load(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors` gave, into empty means."""
        self.append(tensors["look"], tensors["key"], tensors["value"])
        if "centre_look" in tensors:
            self.centre = tensors["centre_look"], tensors["centre_key"]

    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(one.all.untyped_storage().nbytes() for one in (self._look, self._key, self._value))
