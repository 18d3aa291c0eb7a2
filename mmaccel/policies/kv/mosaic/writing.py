"""Units on their way from the device: their means to the clustering, their keys and values to the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy
from mmaccel.policies.kv.store import HostStore
from mmaccel.policies.kv.store.wire import in_units


class Writer:
    """What comes waits to be clustered until it is asked for, so that the host need not wait for the device."""

    def __init__(self, store: HostStore, tree: Hierarchy) -> None:
        self._store, self._tree = store, tree
        self._inbox: deque[tuple[list[Tensor], torch.cuda.Event | None]] = deque()

    @torch.inference_mode(False)
    @torch.no_grad()
    def arrived(self, look: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], retrieved: Tensor | None) -> None:
        """Looks [n, E] of new units, and of each layer their raw keys and values [1, G, n * P, D]; the entries [L, k] that
        their pass `retrieved`."""
        tokens = self._store.shape.tokens
        means = [
            torch.stack([in_units(pair[side][0].float(), tokens).mean(2) for pair in pairs])
            for side in (0, 1)
        ]
        # [L, G, entries, D] to [entries, L, G * D].
        key, value = (mean.permute(2, 0, 1, 3).flatten(2).to(pairs[0][0].dtype) for mean in means)
        event, device = None, key.device
        told = [look, key, value] if retrieved is None else [look, key, value, retrieved]
        if key.is_cuda:
            told = [t.to("cpu", non_blocking=True) for t in told]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # The current device of the thread may be another.
            event.record(torch.cuda.current_stream(device))
        self._inbox.append((told, event))

    @torch.inference_mode(False)
    @torch.no_grad()
    def digest(self, window: int, keep: int, batched: bool) -> bool:
        """Cluster what has arrived but for the last `keep` passes; whether there was anything."""
        some = False
        while len(self._inbox) > keep:
            (look, key, value, *told), event = self._inbox.popleft()
            if event is not None:
                event.synchronize()
            self._tree.summaries.append(look, key, value)
            retrieved = told[0] if told else None
            if retrieved is not None:
                self._tree.resolve(retrieved)
            self._tree.insert(window, retrieved, batched)
            some = True
        return some

    def gone(self, layer: int, entries: range, key: Tensor, value: Tensor) -> list[int]:
        """`entries` leave the window, keys and values [1, G, k * p, D]; the entries that the store forgot to make room.

        Those of a visual cluster lie together in the store. So do buffered ones: what their splits go by is their mean keys.
        """
        tree, groups = self._tree, None
        if tree.started:
            units = torch.arange(entries.start, entries.stop) // tree.summaries.parts
            groups = tree.visual.owner[0, units].tolist()
        return self._store.put(layer, entries, key, value, groups)

    def clear(self) -> None:
        """Forget what has not been clustered."""
        self._inbox.clear()
