"""The `streammem` memory: fixed size; keeps the tokens to which the chat template's own words attend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.kv import KVView, Stream, StreamPass, StreamState
from mmaccel.core.registry import in_range, limited, register
from mmaccel.policies.kv._tokens import HeldTokens, TokenMemory, TokenPolicy, attention_shares

MERGED = 8
"""Units of the clips within which units are merged."""


@register("kv", "streammem")
@dataclass(frozen=True, kw_only=True)
class StreamMem(TokenPolicy):
    """Keeps the tokens that the template's words between question and answer attend to, and one prototype of each frame.

    After Yang et al., "StreamMem" (2508.15717). Frames similar to the one before are merged with it. After each clip of 8
    frames the template's words stand in for the question, which is not known yet (passes of kind "proxy"); if a layer holds
    more than the budget, the tokens that they attend to most are kept, of older tokens and the new clip alike, and every new
    frame leaves a prototype: the means of its keys and of its values, weighted by that attention, at the position of its
    middle token. A question sees all that is held. Exact, with ``similar = None``, as long as the stream fits the budget.

    Our choices where the paper is open: attention is averaged over the template's words and all heads; prototypes are part
    of the budget, and compete like other tokens from the next clip on. The paper stretches positions by YaRN; here tokens
    get compact positions once original ones pass the model's limit.

    frames      budget of a layer, in frames' worth of tokens: 64 are 12 544 of LLaVA-OneVision (paper: 6 000 to 24 000)
    similar     consecutive frames are merged if the cosine of their features is above this; None: never. They are merged
                within clips of 8, counted from the start of the stream. The newest are held back until it is known which
                frames they are merged with; until then a question sees them after all others
    prototypes  whether each new frame leaves a prototype, the weighted mean of its tokens
    positions   of kept tokens: "original" as long as the model's limit allows, then compact; or "compact" always
    """

    needs: ClassVar[frozenset[str]] = frozenset({"proxy"})
    clip: ClassVar[int | None] = 8

    similar: float | None = limited(0.95, in_range(-1, 1, "-1 to 1"))
    prototypes: bool = True

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return StreamMemState(self, stream, geometry, model, device)


class StreamMemState(TokenMemory):
    """The stream memory of `streammem`: selects tokens anew after each clip, by the attention of the template's words.

    chosen, whole       number of units at the last selection; number of the first unit that has lost no token yet
    merged, prototypes  how many units were merged with another; how many tokens are prototypes, as a mean over layers
    """

    FACTS: ClassVar = {"chosen": int, "whole": int, "merged": float, "prototypes": float}

    @property
    def parts(self) -> bool:  # type: ignore[override]
        return self.policy.similar is None  # what comes may take the place of units that wait

    # Units that have come, and the last of them [n, P, E], one like the other, with which the next may be merged.
    _come = 0
    _open: Tensor | None = None

    def merge_units(self, features: Tensor) -> tuple[Tensor, list[int]]:
        if self.policy.similar is None:
            return super().merge_units(features)
        whole = features if self._open is None else torch.cat([self._open.to(features), features])
        first = self._come - (whole.shape[0] - features.shape[0])
        self._come += features.shape[0]
        flat = whole.flatten(1).float()
        near = torch.cosine_similarity(flat[1:], flat[:-1], dim=1) > self.policy.similar
        counts = [1]
        for number, same in enumerate(near.tolist(), first + 1):
            if same and number % MERGED:
                counts[-1] += 1
            else:
                counts.append(1)
        parts = list(torch.split(whole, counts))
        # Copied: a slice would keep the whole.
        self._open = parts.pop().clone() if self._come % MERGED else None
        self._facts["merged"] += sum(part.shape[0] - 1 for part in parts)
        return torch.stack([_mean(part) for part in parts]) if parts else features[:0], counts[: len(parts)]

    def waiting_features(self) -> Tensor | None:
        return None if self._open is None else _mean(self._open)[None]

    def end_pass(self) -> None:
        scores = dict(self._scores)
        super().end_pass()
        if scores and self._count // self.clip > self._facts["chosen"] // self.clip:
            # Every layer holds the same number.
            chosen = [self._choose(layer, score) for layer, score in scores.items()]
            self._facts["chosen"] = self._count
            self._facts["whole"] = self._count if all(chosen) else self._facts["whole"]

    def _answer(
        self, layer: int, query: Tensor, stream_pass: StreamPass, key: Tensor, value: Tensor
    ) -> KVView:
        view = super()._answer(layer, query, stream_pass, key, value)
        held = self._held[layer]
        if stream_pass.kind == "proxy" and held is not None:
            assert view.query is not None
            head = self.stream.head
            self._scores[layer] = attention_shares(view.query, view.key)[head : head + held.column.shape[0]]
        return view

    def _choose(self, layer: int, score: Tensor) -> bool:
        """Cut a layer down to the budget; False when it holds no more than that."""
        held = self._held[layer]
        if held is None or held.column.shape[0] <= self.budget:
            return False
        made = self._prototypes(held, score) if self.policy.prototypes else None
        count = 0 if made is None else made.column.shape[0]
        best = torch.sort(score, descending=True, stable=True).indices
        self._keep(layer, best[: self.budget - count])
        if made is not None:
            kept = self._held[layer]
            assert kept is not None
            whole = kept.followed_by(made)
            self._held[layer] = whole.select_tokens(torch.sort(whole.column, stable=True).indices)
            self._facts["prototypes"] += count / self.geometry.layers
        return True

    def _prototypes(self, held: HeldTokens, score: Tensor) -> HeldTokens:
        """One token of each unit that has lost none yet: the last ones held."""
        P = self.stream.tokens_per_unit
        count = min(self._count - self._facts["whole"], self.budget)
        weight = score[-count * P :].view(count, P)
        weight = (weight / weight.sum(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny))[..., None]
        sides = []
        for side in (held.key, held.value):
            last = side[:, :, -count * P :].reshape(*side.shape[:2], count, P, side.shape[3]).float()
            sides.append((last * weight).sum(3).to(side.dtype))
        units = torch.arange(self._count - count, self._count, device=held.column.device)
        return HeldTokens(sides[0], sides[1], units * P + P // 2)

    def _pick(self, layer: int, query: Tensor, held: HeldTokens) -> tuple[Tensor | None, int]:
        return None, self._count

    def checkpoint(self) -> Any:
        return super().checkpoint(), self._come, self._open

    def restore(self, mark: Any) -> None:
        tokens, self._come, self._open = mark
        super().restore(tokens)

    def counters(self) -> dict[str, float]:
        return {**super().counters(), **{name: self._facts[name] for name in ("merged", "prototypes")}}

    def nbytes(self) -> int:
        return super().nbytes() + (0 if self._open is None else self._open.nbytes)

    def _save(self, folder: Path) -> bool:
        with_window = super()._save(folder)
        rows = 0 if self._open is None else self._open.shape[0]
        checkpoint_io.write_json(folder / "open.json", {"come": self._come, "rows": rows})
        if self._open is not None:
            checkpoint_io.write_tensors(folder / "open.safetensors", {"features": self._open})
        return with_window

    def _load(self, folder: Path) -> None:
        super()._load(folder)
        if not (folder / "open.json").is_file():
            return  # of a version that merged within one call of `watch`
        told = checkpoint_io.read_json(folder / "open.json", {"come": int, "rows": int})
        self._come = told["come"]
        if told["rows"]:
            # Visual tokens alone, and what a model adds to layers beside them.
            wanted = {"features": ((told["rows"], -1, -1), self.stream.dtype)}
            self._open = checkpoint_io.read_tensors(folder / "open.safetensors", wanted, self.device)[
                "features"
            ]


def _mean(features: Tensor) -> Tensor:
    """[P, E]: the mean over units [n, P, E]."""
    return features.float().mean(0).to(features.dtype)
