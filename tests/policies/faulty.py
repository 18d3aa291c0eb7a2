"""Policies as their writers get them wrong, one fault each; none is registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.prefill.plan import FAR, AttentionPlan, Part, span_by_range, span_from_table
from mmaccel.core.prefill.prune import Stage, TokenPruner, candidates, staying
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.policies.sparse.orders import at_or_before, natural
from mmaccel.policies.sparse.vertical_slash import VerticalSlash


@dataclass(frozen=True, kw_only=True)
class Sound(SparsePattern):
    """Every block of keys before a query; nothing is wrong with it."""

    name: ClassVar[str] = "sound"
    lo: ClassVar[int] = 0
    blocks: ClassVar[int] = 10**6

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        queries, keys = (natural(one, block=self.block) for one in (q_layout, k_layout))
        q_row, q_pos = queries.row[:, None], at_or_before(keys, queries)[:, None]
        rows, blocks = q_row.shape[-1] // self.block, keys.row.shape[-1] // self.block
        table = torch.ones(len(q_row), 1, rows, blocks, dtype=torch.bool)
        order = q_row, keys.row[:, None], q_pos, keys.rank[:, None]
        span = span_from_table(*order, self.lo, FAR, table, self.block, self.block)
        sizes = dict(batch=len(query), heads=query.shape[1], n_query=query.shape[2], n_key=key.shape[2])
        return AttentionPlan((Part(q_row, (span,)),), self.block, self.block, **sizes)

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        return -(-n_query // self.block) * -(-n_key // self.block)


class Twice(Sound):
    """Two spans over the same keys."""

    def plan(self, *given: Any) -> AttentionPlan | None:
        plan = super().plan(*given)
        assert plan is not None
        (part,) = plan.parts
        return replace(plan, parts=(replace(part, spans=part.spans * 2),))


class Ahead(Sound):
    """A range that begins three places too early."""

    lo: ClassVar[int] = -3


class OfPadding(Sound):
    """Padding is taken for tokens."""

    def plan(self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout) -> Any:
        blind = [replace(one, valid=torch.ones_like(one.valid)) for one in (q_layout, k_layout)]
        return super().plan(query, key, *blind)


class OtherSizes(Sound):
    """A plan of the first 64 tokens."""

    def plan(self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout) -> Any:
        few = slice(0, 64)
        return super().plan(query[:, :, few], key[:, :, few], q_layout.take(few), k_layout.take(few))


class FewRows(OtherSizes):
    """The same, which poses as one of all tokens."""

    def plan(self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout) -> Any:
        plan = super().plan(query, key, q_layout, k_layout)
        return replace(plan, n_query=query.shape[2], n_key=key.shape[2])


class NoWholeBlocks(Sound):
    """Rows that are not padded to whole blocks."""

    def plan(self, query: Tensor, *given: Any) -> Any:
        plan = super().plan(query, *given)
        assert plan is not None
        (part,) = plan.parts
        return replace(plan, parts=(replace(part, q_row=part.q_row[..., :-1]),))


class FlatRows(Sound):
    """Rows of sequences, and of no heads."""

    def plan(self, query: Tensor, *given: Any) -> Any:
        plan = super().plan(query, *given)
        assert plan is not None
        (part,) = plan.parts
        return replace(plan, parts=(replace(part, q_row=part.q_row[:, 0]),))


class LowBound(Sound):
    """Lists more than it says."""

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        return 1


class Pooled(Sound):
    """Beside every key the mean of each whole block of keys long before, that counts for all of them."""

    reads_values: ClassVar[bool] = True

    def plan(
        self,
        query: Tensor,
        key: Tensor,
        q_layout: TokenLayout,
        k_layout: TokenLayout,
        value: Tensor | None = None,
    ) -> AttentionPlan | None:
        plan = super().plan(query, key, q_layout, k_layout)
        assert plan is not None and value is not None
        (part,), block = plan.parts, self.block
        n = key.shape[2] // block
        means = [t[:, :, : n * block].unflatten(2, (n, block)).mean(3) for t in (key, value) if n]
        if not means:
            return plan
        number = torch.arange(n + -n % block, dtype=torch.int32)[None, None]
        k_row = torch.where(number < n, number, -1)
        at = torch.where(part.q_row >= 0, part.spans[0].q_pos // block, -1)
        span = span_by_range(part.q_row, k_row, at, number, 2, FAR, block, block)
        bias = torch.full(number.shape, float(block)).log()
        span = replace(span, bias=bias, key=means[0], value=means[1])
        return replace(plan, parts=(replace(part, spans=(*part.spans, span)),))

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        return super().max_blocks_total(n_query, n_key) * 2


class Extra(Sound):
    """A span with something more."""

    extra: ClassVar[dict[str, Tensor]] = {}

    def plan(self, *given: Any) -> AttentionPlan | None:
        plan = super().plan(*given)
        assert plan is not None
        (part,) = plan.parts
        return replace(plan, parts=(replace(part, spans=(replace(part.spans[0], **self.extra),)),))


class WideBias(Extra):
    extra: ClassVar[dict[str, Tensor]] = {"bias": torch.zeros(1, 1, 64, dtype=torch.float64)}


class KeysAlone(Extra):
    extra: ClassVar[dict[str, Tensor]] = {"key": torch.zeros(1, 1, 7, 3)}


class ShortKeys(Extra):
    extra: ClassVar[dict[str, Tensor]] = dict.fromkeys(("key", "value"), torch.zeros(1, 1, 7, 3))


@dataclass(frozen=True, kw_only=True)
class Unsaid(VerticalSlash):
    """It reads queries, and does not say so."""

    name: ClassVar[str] = "unsaid"
    adaptive: ClassVar[bool] = False
    block: int = 16
    vertical: int = 9
    slash: int = 4
    last_q: int = 16


SPARSE = {
    "an unsaid reading of queries": (Unsaid, "set the class field adaptive = True"),
    "two spans": (Twice, "twice"),
    "the future": (Ahead, "comes after"),
    "padding": (OfPadding, "padding"),
    "a part of the tokens": (OtherSizes, "is 64, and the layer's is"),
    "some rows": (FewRows, "the plan's parts hold 64 of"),
    "no whole blocks": (NoWholeBlocks, "in whole blocks of 64"),
    "no heads": (FlatRows, "give [1 or "),
    "a low bound": (LowBound, "max_blocks_total is 1"),
    "a bias of doubles": (WideBias, "in torch.float64; give [1 or "),
    "keys without values": (KeysAlone, "has keys or values of its own alone"),
    "own keys of another size": (ShortKeys, "has keys or values of its own of [1, 1, 7, 3]; give [1 or "),
}
"""What is wrong -> the pattern, and words of the sentence that tells it."""


@dataclass(frozen=True, kw_only=True)
class Half(TokenPruner):
    """Every second candidate; nothing is wrong with it."""

    name: ClassVar[str] = "half"
    stage: ClassVar = "layer"
    at: ClassVar[Stage] = Stage(1)

    def stages(self, depth: int) -> tuple[Stage, ...]:
        return (self.at,)

    def keep(
        self, signals: Mapping[str, Tensor], layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> Tensor:
        return staying(layout, candidates(layout)[::2])


class DropsText(Half):
    """The first column of text goes too."""

    def keep(self, signals: Any, layout: TokenLayout, *rest: Any) -> Tensor:
        columns = super().keep(signals, layout, *rest)
        return columns[~torch.isin(columns, (layout.modality[0] == TEXT).nonzero()[:1])]


class Backwards(Half):
    """The last column comes first."""

    def keep(self, signals: Any, layout: TokenLayout, *rest: Any) -> Tensor:
        return super().keep(signals, layout, *rest).flip(0)


class TooFar(Half):
    """A column behind the last."""

    def keep(self, signals: Any, layout: TokenLayout, *rest: Any) -> Tensor:
        return torch.arange(1, layout.length + 1)


class AMask(Half):
    """A mask for columns."""

    def keep(self, signals: Any, layout: TokenLayout, *rest: Any) -> Tensor:
        return torch.ones(layout.length, dtype=torch.bool)


class Undeclared(Half):
    """Reads what it does not declare."""

    def keep(self, signals: Any, layout: TokenLayout, *rest: Any) -> Tensor:
        return super().keep(signals["hidden"], layout, *rest)


class Misspelt(Half):
    """A signal that there is not."""

    needs: ClassVar[frozenset[str]] = frozenset({"hiden"})


class Unread(Half):
    """A need whose layers no stage names."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})


class Unneeded(Half):
    """A stage that reads what needs leaves out."""

    at: ClassVar[Stage] = Stage(1, hidden=(1,))


class Later(Half):
    """A stage that reads a layer after it."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    at: ClassVar[Stage] = Stage(1, attention=((2,),))


class BeforeTheLayers(Half):
    """A cut between layers that is before them."""

    at: ClassVar[Stage] = Stage(0)


class VisionBetween(Half):
    """Signals of the vision tower where none come."""

    needs: ClassVar[frozenset[str]] = frozenset({"vision_key"})


PRUNE = {
    "text": (DropsText, "drops columns that are not visual"),
    "order": (Backwards, "do not ascend"),
    "range": (TooFar, "a column that is not there"),
    "a mask": (AMask, "torch.bool; give columns [n], long"),
    "undeclared": (Undeclared, "keep reads 'hidden', which is not there; put it in needs"),
    "misspelt": (Misspelt, "'hiden': did you mean 'hidden'?"),
    "unread": (Unread, "needs has 'attention'; name the layers of it in a stage"),
    "unneeded": (Unneeded, "a stage reads 'hidden'; put it in needs"),
    "later": (Later, "the stage at layer 1 reads attention of layer 2; give layers from 0 to 1."),
    "before": (BeforeTheLayers, "a stage is at layer 0; give layers from 1 to"),
    "vision": (VisionBetween, "needs has 'vision_key', which stage 'layer' is not given"),
}
