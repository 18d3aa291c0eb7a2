"""The KV memory of a pruned prompt: layers after a pruning stage hold fewer columns, yet it is used like an ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVState, KVView
from mmaccel.core.prefill.prune import TokenPruner, complement_indices, kept_layout


class PrunedKVState(KVState):
    """The KV cache of one sequence whose prompt is pruned between layers: one memory per run of layers between two stages.

    `length` and `truncate` count columns of the whole sequence. The memory of the k-th run, part k, holds the prompt columns
    `kept[k]` (None: all) and all later columns.
    """

    def __init__(self, pruner: TokenPruner, depth: int, part: Callable[[int], KVState]) -> None:
        self.pruner = pruner
        self.starts = sorted({0, *(stage.layer for stage in pruner.pruning_stages(depth))})
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

    def expect_new_columns(self, count: int) -> None:
        """Announce the next forward pass: the number of its new columns, including those that will be pruned."""
        self._coming = count

    def begin_prompt(self, layout: TokenLayout) -> None:
        """Announce a prompt with this layout, before its columns are pruned."""
        self.prompt = layout.length
        self._visual = [self.pruner.candidates(layout).numel()]

    def keep_columns(self, part: int, columns: Tensor | None, layout: TokenLayout) -> None:
        """Record that layers of `part` and later ones hold only `columns` (None: all) of those of the previous part."""
        if columns is not None:
            before = self.kept[part - 1] if part else None
            held = columns if before is None else before[columns]
            self.kept[part:] = [held] * (len(self.kept) - part)
        at = self.pruner.candidates(layout)
        self._visual.append(at.numel())
        if self.pruner.scoring_layer is not None:
            self._watched = at

    def part_index_of_layer(self, layer: int) -> int:
        """Return the index of the part (run of layers between two pruning stages) that holds `layer`."""
        return self._owner[layer]

    def count_held_columns(self, part: int, length: int) -> int:
        """Return the number of columns that the layers of `part` hold, of the first `length` columns of the sequence."""
        kept = self.kept[part]
        if kept is None:
            return length
        inside = kept.numel() if length >= self.prompt else int((kept < length).sum())
        return inside + max(length - self.prompt, 0)

    def held_indices(self, part: int, length: int) -> Tensor | None:
        """Return which of the first `length` columns of the sequence the layers of `part` hold; None: all."""
        kept = self.kept[part]
        if kept is None:
            return None
        if length < self.prompt:
            return kept[kept < length]
        return torch.cat([kept, torch.arange(self.prompt, length, device=kept.device)])

    def layout_of(self, part: int, layout: TokenLayout) -> TokenLayout:
        """Return the layout of the columns that the layers of `part` hold after pruning, given the layout of all."""
        held = self.held_indices(part, layout.length)
        return layout if held is None else kept_layout(layout, held)

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
                self.choose_visible_columns(query, view.key)
            else:
                line = torch.arange(view.key.shape[2], device=query.device)
                column = line if view.column is None else view.column
                if view.window is not None:
                    line = line[(column < view.sinks) | (column > column[-1] - view.window)]
                self.choose_visible_columns(query, view.key.index_select(2, line), column[line])
        elif self._shown is not None and layer > (self.pruner.scoring_layer or 0):
            prompt, end = (
                self.count_held_columns(part, self.prompt),
                self.count_held_columns(part, self._seen),
            )
            columns = torch.cat([self._shown, torch.arange(prompt, end, device=self._shown.device)])
            held = columns
            if view.column is not None:
                held = torch.isin(view.column, columns).nonzero()[:, 0]
                columns = view.column[held]
            key, value = (t.index_select(2, held) for t in (view.key, view.value))
            return replace(view, key=key, value=value, column=columns)
        return view

    def choose_visible_columns(
        self, query: Tensor, key: Tensor, column: Tensor | None = None
    ) -> Tensor | None:
        """Choose the prompt columns [n], ascending, that a decoded token sees in the layers after `scoring_layer`; None:
        all. The token's attention at that layer decides: `query` [1, H, 1, D] over `key` [1, G, N, D], which includes its
        own key. `column` [N], ascending, are the columns of the keys if the memory evicted some; only these are chosen."""
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
        chosen = self.pruner.recalled_columns(attention, watched, before)
        if chosen is not None:
            rest = complement_indices(self._watched, self.count_held_columns(0, self.prompt))
            self._shown = torch.cat([rest, chosen]).sort().values
        return self._shown

    def count_dropped(self, layer: int) -> int:
        kept = self.kept[self._owner[layer]]
        return 0 if kept is None else self.prompt - kept.numel()

    def has_renumbered_positions(self, layer: int) -> bool:
        """Return whether the columns that `layer` holds have consecutive positions 0, 1, 2, ..."""
        return self.pruner.compact and self.kept[self._owner[layer]] is not None

    def layer_buffers(self, room: int) -> list[tuple[Tensor, Tensor]]:
        return [pair for part in self._parts for pair in part.layer_buffers(room)]

    def record_written(self, count: int) -> None:
        for part in self._parts:
            part.record_written(count)
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
            part.truncate(min(self.count_held_columns(k, length), part.length()))
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

    def select_sequences(self, rows: Tensor) -> None:
        if rows.numel() != 1:
            raise ModelError(
                "prune: a pruned prompt is one sequence; set num_beams and num_return_sequences to 1."
            )

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self._parts)

    def counters(self) -> dict[str, float]:
        """Return the memory's figures. In addition: `held_mean`, the mean over layers of held columns (`held` is that of the
        layer with most); `visual`, the number of prompt tokens that may be dropped; and how many each stage leaves."""
        mean = sum(self._parts[part].held_columns() for part in self._owner) / len(self._owner)
        counters = {**super().counters(), "held_mean": mean, "visual": float(self._visual[0])}
        cuts = [stage.layer for stage in self.pruner.pruning_stages(len(self._owner))]
        for layer, count in zip(cuts, self._visual[1:], strict=False):
            counters[f"visual from layer {layer}"] = float(count)
        if self._shown is not None and self._watched is not None:
            counters["visual seen decoding"] = float(torch.isin(self._watched, self._shown).sum())
        return counters
