"""The memory of a pruned prompt: the layers after a cut hold fewer columns, and outside nobody has to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVState, KVView
from mmaccel.core.prefill.prune import TokenPruner, others, thin


class PrunedKVState(KVState):
    """One memory for each stretch of layers between two cuts, each counting its own columns.

    Columns of the whole sequence are what `length` and `truncate` speak of; part k holds those of the prompt in `kept[k]`
    (None: all) and everything after the prompt. Of one sequence.
    """

    def __init__(self, pruner: TokenPruner, depth: int, part: Callable[[int], KVState]) -> None:
        self.pruner = pruner
        self.starts = sorted({0, *(stage.layer for stage in pruner.stages(depth))})
        ends = [*self.starts[1:], depth]
        self._parts = [part(end - start) for start, end in zip(self.starts, ends, strict=True)]
        self._owner = [k for k, start in enumerate(self.starts) for _ in range(ends[k] - start)]
        self.in_place = all(one.in_place for one in self._parts)
        self._forget()

    def _forget(self) -> None:
        self.kept: list[Tensor | None] = [None] * len(self._parts)
        self.prompt = 0
        self._visual: list[int] = [0]
        self._seen = self._coming = self._last = 0
        self._watched: Tensor | None = None
        self._shown: Tensor | None = None
        self._before: Tensor | None = None

    def expect(self, count: int) -> None:
        """Told before a pass: the columns of the sequence it brings, those that will be dropped included."""
        self._coming = count

    def begin(self, layout: TokenLayout) -> None:
        """A prompt of this layout is about to be cut."""
        self.prompt = layout.length
        self._visual = [self.pruner.candidates(layout).numel()]

    def keep_columns(self, part: int, columns: Tensor | None, layout: TokenLayout) -> None:
        """Layers from ``starts[part]`` on hold `columns` of what the part before holds (None: all), which are `layout`."""
        if columns is not None:
            before = self.kept[part - 1] if part else None
            held = columns if before is None else before[columns]
            self.kept[part:] = [held] * (len(self.kept) - part)
        at = self.pruner.candidates(layout)
        self._visual.append(at.numel())
        if self.pruner.scoring_layer is not None:
            self._watched = at

    def part_of(self, layer: int) -> int:
        """The part that holds `layer`."""
        return self._owner[layer]

    def size(self, part: int, length: int) -> int:
        """How many of the first `length` columns of the sequence `part` holds."""
        kept = self.kept[part]
        if kept is None:
            return length
        inside = kept.numel() if length >= self.prompt else int((kept < length).sum())
        return inside + max(length - self.prompt, 0)

    def held_by(self, part: int, length: int) -> Tensor | None:
        """The columns of the first `length` of the sequence that `part` holds; None: all."""
        kept = self.kept[part]
        if kept is None:
            return None
        if length < self.prompt:
            return kept[kept < length]
        return torch.cat([kept, torch.arange(self.prompt, length, device=kept.device)])

    def thinned(self, part: int, layout: TokenLayout) -> TokenLayout:
        """The part of a whole sequence's layout that `part` still holds."""
        held = self.held_by(part, layout.length)
        return layout if held is None else thin(layout, held)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        if layer == 0 and self._coming:
            self._seen, self._last, self._coming = self._seen + self._coming, self._coming, 0
        part = self._owner[layer]
        self._parts[part].append(layer - self.starts[part], key, value)

    def view(self, layer: int, query: Tensor) -> KVView:
        part = self._owner[layer]
        view = self._parts[part].view(layer - self.starts[part], query)
        if self._watched is None or query.shape[2] > 1 or self._seen <= self.prompt:
            return view
        if layer == self.pruner.scoring_layer:
            if view.column is None and view.window is None:
                self.recall(query, view.key)
            else:
                line = torch.arange(view.key.shape[2], device=query.device)
                column = line if view.column is None else view.column
                if view.window is not None:
                    line = line[(column < view.sinks) | (column > column[-1] - view.window)]
                self.recall(query, view.key.index_select(2, line), column[line])
        elif self._shown is not None and layer > (self.pruner.scoring_layer or 0):
            prompt, end = self.size(part, self.prompt), self.size(part, self._seen)
            columns = torch.cat([self._shown, torch.arange(prompt, end, device=self._shown.device)])
            held = columns
            if view.column is not None:
                held = torch.isin(view.column, columns).nonzero()[:, 0]
                columns = view.column[held]
            key, value = (t.index_select(2, held) for t in (view.key, view.value))
            return replace(view, key=key, value=value, column=columns)
        return view

    def recall(self, query: Tensor, key: Tensor, column: Tensor | None = None) -> Tensor | None:
        """[n] ascending: the columns of the prompt that a decoded token sees after `scoring_layer`; None: all.

        query [1, H, 1, D] and key [1, G, N, D], the token's own among them, are those of that layer. column [N], ascending:
        what the token sees of a memory that lets columns go (None: all); the choice, and its share, are of these.
        """
        if self._watched is None:
            return None
        groups = key.shape[1]
        rows = torch.unflatten(query[0, :, 0].float(), 0, (groups, -1))
        scores = (rows @ key[0].float().mT) / query.shape[-1] ** 0.5
        attention, watched, before = scores.softmax(-1).mean((0, 1)), self._watched, self._before
        if column is None:
            attention = self._before = attention[watched]
        else:
            seen = torch.isin(watched, column)
            before, watched = None if before is None else before[seen], watched[seen]
            attention = attention[torch.searchsorted(column, watched)]
            self._before = torch.zeros(len(seen), device=seen.device).masked_scatter(seen, attention)
        chosen = self.pruner.recall(attention, watched, before)
        if chosen is not None:
            rest = others(self._watched, self.size(0, self.prompt))
            self._shown = torch.cat([rest, chosen]).sort().values
        return self._shown

    def lacks(self, layer: int) -> int:
        kept = self.kept[self._owner[layer]]
        return 0 if kept is None else self.prompt - kept.numel()

    def renumbers(self, layer: int) -> bool:
        """Whether the columns that `layer` holds have the positions 0, 1, 2, ..."""
        return self.pruner.compact and self.kept[self._owner[layer]] is not None

    def buffers(self, room: int) -> list[tuple[Tensor, Tensor]]:
        return [pair for part in self._parts for pair in part.buffers(room)]

    def wrote(self, count: int) -> None:
        for part in self._parts:
            part.wrote(count)
        self._seen, self._last = self._seen + count, count

    def accept(self, keep: int | Tensor) -> None:
        count = keep if isinstance(keep, int) else keep.numel()
        for part in self._parts:
            part.accept(keep)
        self._seen, self._last = self._seen - self._last + count, count

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._seen:
            raise ModelError(f"kv: the memory has {self._seen} columns; it cannot be cut to {length}.")
        gone = self._seen - length
        for k, part in enumerate(self._parts):
            part.truncate(min(self.size(k, length), part.length()))
        if length < self.prompt:
            # What is looked at was chosen by a video of which a part is gone.
            self._watched = self._shown = self._before = None
            self.kept = [None if kept is None else kept[kept < length] for kept in self.kept]
            self.prompt = length
        self._seen, self._last = length, max(0, self._last - gone)

    def length(self) -> int:
        return self._seen

    def held_columns(self) -> int:
        return max(part.held_columns() for part in self._parts)

    def reset(self) -> None:
        for part in self._parts:
            part.reset()
        self._forget()

    def reorder(self, rows: Tensor) -> None:
        if rows.numel() != 1:
            raise ModelError(
                "prune: a pruned prompt is one sequence; set num_beams and num_return_sequences to 1."
            )

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self._parts)

    def counters(self) -> dict[str, float]:
        """Beside the usual ones: `held_mean` over the layers (`held` is the most of one), `visual`, the tokens of the
        prompt that may go, and those left from each cut's layer on."""
        mean = sum(self._parts[part].held_columns() for part in self._owner) / len(self._owner)
        counters = {**super().counters(), "held_mean": mean, "visual": float(self._visual[0])}
        cuts = [stage.layer for stage in self.pruner.stages(len(self._owner))]
        for layer, count in zip(cuts, self._visual[1:], strict=False):
            counters[f"visual from layer {layer}"] = float(count)
        if self._shown is not None and self._watched is not None:
            counters["visual seen decoding"] = float(torch.isin(self._watched, self._shown).sum())
        return counters
