"""Policies as their writers get them wrong, one fault each; none is registered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import Part
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Proposal
from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.memory.kv import StreamPass
from mmaccel.core.prefill.plan import FAR, AttentionPlan, span_by_range, span_from_table
from mmaccel.core.prefill.prune import Stage, TokenPruner, candidate_columns, with_unprunable_columns
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.policies.draft.prompt_lookup import PromptLookup
from mmaccel.policies.kv import StreamMemory, WindowedPolicy
from mmaccel.policies.kv.full import Full, FullStream
from mmaccel.policies.sparse.orders import rank_at_or_before, sequence_order
from mmaccel.policies.sparse.vertical_slash import VerticalSlash


@dataclass(frozen=True, kw_only=True)
class Sound(SparsePattern):
    """Every block of keys before a query; nothing is wrong with it."""

    name: ClassVar[str] = "sound"
    lo: ClassVar[int] = 0

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        queries, keys = (sequence_order(one, block=self.block) for one in (q_layout, k_layout))
        q_row, q_pos = queries.row[:, None], rank_at_or_before(keys, queries)[:, None]
        rows, blocks = q_row.shape[-1] // self.block, keys.row.shape[-1] // self.block
        table = torch.ones(len(q_row), 1, rows, blocks, dtype=torch.bool)
        order = q_row, keys.row[:, None], q_pos, keys.rank[:, None]
        span = span_from_table(*order, self.lo, FAR, table, self.block, self.block)
        sizes = dict(batch=len(query), heads=query.shape[1], n_query=query.shape[2], n_key=key.shape[2])
        return AttentionPlan((Part(q_row, (span,)),), self.block, self.block, **sizes)

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        return -(-n_query // self.block) * -(-n_key // self.block)


def wrong(base: type, **members: Any) -> type:
    """Like `base`, with these in place of its own members."""
    return type("Wrong", (base,), members)


def changed(change: Callable[[Part], dict[str, Any]]) -> type:
    """A plan of which one part has other fields."""

    def plan(self: Sound, *given: Any) -> AttentionPlan | None:
        made = Sound.plan(self, *given)
        assert made is not None
        (part,) = made.parts
        return replace(made, parts=(replace(part, **change(part)),))

    return wrong(Sound, plan=plan)


def with_span(**fields: Tensor) -> type:
    """A plan whose span has something more."""
    return changed(lambda part: {"spans": (replace(part.spans[0], **fields),)})


def of_padding(self: Sound, query: Tensor, key: Tensor, *layouts: TokenLayout) -> Any:
    """Padding is taken for tokens."""
    return Sound.plan(self, query, key, *(replace(one, valid=torch.ones_like(one.valid)) for one in layouts))


def of_few(self: Sound, query: Tensor, key: Tensor, *layouts: TokenLayout) -> Any:
    """The first 64 tokens."""
    few = slice(0, 64)
    return Sound.plan(self, query[:, :, few], key[:, :, few], *(one.select_tokens(few) for one in layouts))


def of_few_rows(self: Sound, query: Tensor, key: Tensor, *layouts: TokenLayout) -> Any:
    """The same, which poses as a plan of all tokens."""
    return replace(of_few(self, query, key, *layouts), n_query=query.shape[2], n_key=key.shape[2])


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


@dataclass(frozen=True, kw_only=True)
class Unsaid(VerticalSlash):
    """It reads queries, and does not say so."""

    name: ClassVar[str] = "unsaid"
    adaptive: ClassVar[bool] = False
    block: int = 16
    vertical: int = 9
    slash: int = 4
    last_q: int = 16


SHORT = torch.zeros(1, 1, 7, 3)
SPARSE = {
    "an unsaid reading of queries": (Unsaid, "set the class field adaptive = True"),
    "two spans": (changed(lambda part: {"spans": part.spans * 2}), "twice"),
    "the future": (wrong(Sound, lo=-3), "comes after"),
    "padding": (wrong(Sound, plan=of_padding), "padding"),
    "a part of the tokens": (wrong(Sound, plan=of_few), "is 64, and the layer's is"),
    "some rows": (wrong(Sound, plan=of_few_rows), "the plan's parts hold 64 of"),
    "no whole blocks": (changed(lambda part: {"q_row": part.q_row[..., :-1]}), "in whole blocks of 64"),
    "no heads": (changed(lambda part: {"q_row": part.q_row[:, 0]}), "give [1 or "),
    "a low bound": (wrong(Sound, max_blocks_total=lambda *sizes: 1), "max_blocks_total is 1"),
    "a negative number": (wrong(Sound, expected_blocks=lambda *sizes: -5), "expected_blocks is -5"),
    "a mask": (wrong(Sound, plan=lambda self, query, *_: query > 0), "plan returns a Tensor"),
    "a bias of doubles": (with_span(bias=torch.zeros(1, 1, 64).double()), "in torch.float64; give [1 or "),
    "keys without values": (with_span(key=SHORT), "has keys or values of its own alone"),
    "own keys of another size": (
        with_span(key=SHORT, value=SHORT),
        "has keys or values of its own of [1, 1, 7, 3]; give [1 or ",
    ),
}
"""What is wrong -> the pattern, and words of the sentence that tells it."""


@dataclass(frozen=True, kw_only=True)
class Half(TokenPruner):
    """Every second candidate; nothing is wrong with it."""

    name: ClassVar[str] = "half"
    stage: ClassVar = "layer"
    at: ClassVar[Stage] = Stage(1)

    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        return (self.at,)

    def keep(
        self, signals: Mapping[str, Tensor], layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> Tensor:
        return with_unprunable_columns(layout, candidate_columns(layout)[::2])


def keeping(change: Callable[[Tensor, TokenLayout], Tensor]) -> type:
    """Other columns than `Half` keeps."""

    def keep(self: Half, signals: Any, layout: TokenLayout, *rest: Any) -> Tensor:
        return change(Half.keep(self, signals, layout, *rest), layout)

    return wrong(Half, keep=keep)


def of_hidden(self: Half, signals: Any, *rest: Any) -> Tensor:
    """Reads what it does not declare."""
    return Half.keep(self, signals["hidden"], *rest)


ATTENTION = frozenset({"attention"})
PRUNE = {
    "text": (
        keeping(lambda kept, layout: kept[~torch.isin(kept, (layout.modality[0] == TEXT).nonzero()[:1])]),
        "drops columns that are not visual",
    ),
    "order": (keeping(lambda kept, layout: kept.flip(0)), "do not ascend"),
    "range": (keeping(lambda kept, layout: torch.arange(1, layout.length + 1)), "a column that is not there"),
    "a mask": (
        keeping(lambda kept, layout: torch.ones(layout.length, dtype=torch.bool)),
        "torch.bool; give columns [n], long",
    ),
    "undeclared": (wrong(Half, keep=of_hidden), "keep reads 'hidden', which is not there; put it in needs"),
    "misspelt": (wrong(Half, needs=frozenset({"hiden"})), "'hiden': did you mean 'hidden'?"),
    "unread": (wrong(Half, needs=ATTENTION), "needs has 'attention'; name the layers of it in a stage"),
    "unneeded": (wrong(Half, at=Stage(1, hidden=(1,))), "a stage reads 'hidden'; put it in needs"),
    "later": (
        wrong(Half, needs=ATTENTION, at=Stage(1, attention=((2,),))),
        "the stage at layer 1 reads attention of layer 2; give layers from 0 to 1.",
    ),
    "before": (wrong(Half, at=Stage(0)), "a stage is at layer 0; give layers from 1 to"),
    "vision": (
        wrong(Half, needs=frozenset({"vision_key"})),
        "needs has 'vision_key', which stage 'layer' is not given",
    ),
}
"""What is wrong -> the pruner, and words of the sentence that tells it."""


class _Patched(Full):
    """A sound memory of which one method is replaced."""

    wrong: ClassVar[dict[str, Any]] = {}

    def open(self, *given: Any) -> Any:
        state = super().open(*given)
        for name, method in self.wrong.items():
            object.__setattr__(state, name, lambda *told, method=method: method(state, *told))
        return state


class _Streams(WindowedPolicy):
    """A sound memory of the last frames, with another state."""

    name: ClassVar[str] = "faulty"
    state: ClassVar[type] = StreamMemory

    def open_stream(self, stream: Any, geometry: Any, model: Any, device: Any) -> Any:
        return self.state(stream, geometry, model, device, window=8, local=4)


class _Remembers(StreamMemory):
    def question_scope(self) -> Any:
        self.local += 1
        return super().question_scope()


class _Forgets(StreamMemory):
    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        if stream_pass.kind == "units":
            self._rings = [None] * len(self._rings)
            self._count = 0


class Forgets(_Streams):
    """Only the units of the last pass are counted."""

    state: ClassVar[type] = _Forgets

    def open_stream(self, *given: Any) -> Any:
        state = super().open_stream(*given)
        state.units = lambda: 0 if state._count == 0 else state._count - 1
        return state


class _Lends(FullStream):
    def snapshot(self, *given: Any) -> Any:
        taken: Any = super().snapshot(*given)
        self._state._lent.clear()
        return taken


class _SeesMore(StreamMemory):
    several = False

    def snapshot(self, *given: Any) -> Any:
        taken: Any = super().snapshot(*given)
        taken.local += 1
        return taken


class _OneQuestion(StreamMemory):
    several = True
    last: Any = None

    def snapshot(self, *given: Any) -> Any:
        for asked in () if self.last is None else self.last._asked.values():
            asked.value.zero_()
        self.last = super().snapshot(*given)
        return self.last


def _one_column_less(state: StreamMemory, columns: int, few: int = 0) -> Any:
    return StreamMemory._layout(state, columns - 1, few)


def _shows_fewer(unit: int) -> Any:
    """Sees to it that questions see fewer units once `unit` has left the window, which nothing restores or saves."""

    def gone(state: StreamMemory, layers: Any, first: int, count: int, pairs: Any) -> None:
        state.local = 3 if first >= unit else state.local

    return gone


MEMORIES = {
    "length": (
        wrong(_Patched, wrong={"length": lambda state: type(state).length(state) + 1}),
        "length is 1 and held 0 when it is opened",
    ),
    "beams": (
        wrong(
            _Patched,
            wrong={"select_sequences": lambda state, rows: type(state).select_sequences(state, rows.flip(0))},
        ),
        "select_sequences([1, 1, 0]) gives other rows",
    ),
    "cuts": (
        wrong(
            _Patched,
            wrong={"truncate": lambda state, n: type(state).truncate(state, n) if n < 1000 else None},
        ),
        "truncate(1000) of fewer columns is taken; raise ModelError.",
    ),
    "a trace": (wrong(_Streams, state=_Remembers), "a question leaves a trace"),
    "no way back": (
        wrong(_Streams, state=wrong(StreamMemory, restore=lambda state, mark: None)),
        "after restore there are 240 units",
    ),
    "more units": (
        wrong(_Streams, state=wrong(StreamMemory, _gone=_shows_fewer(130))),
        "what came after a checkpoint leaves a trace",
    ),
    "a save": (
        wrong(_Streams, state=wrong(StreamMemory, _gone=_shows_fewer(50), _save=lambda state, folder: False)),
        "a loaded memory shows a question something else",
    ),
    "units": (Forgets, "units is "),
    # What comes while an answer lasts is written over its columns.
    "a snapshot": (
        wrong(Full, open_stream=lambda policy, *given: _Lends(*given)),
        "units that come change an answer that has begun",
    ),
    "another snapshot": (
        wrong(_Streams, state=_SeesMore),
        "a question of a snapshot sees something else; let snapshot copy all that a question reads",
    ),
    "several snapshots": (
        wrong(_Streams, state=_OneQuestion),
        "a question meanwhile changes an answer that has begun; leave several False",
    ),
    "a layout": (
        wrong(_Streams, state=wrong(StreamMemory, _layout=_one_column_less)),
        "the layout of a view is not of its columns",
    ),
}
"""What is wrong -> the memory, and words of the sentence that tells it."""


class _Raises(DraftState):
    def begin(self, prompt: Any) -> None:
        pass

    def propose(self) -> Proposal:
        raise KeyError("nothing")

    def observe_committed(self, committed: Any, kept: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Raises(DraftStrategy):
    """Its proposals end in an error."""

    name: ClassVar[str] = "raises"

    def open(self, target: Any) -> DraftState:
        return _Raises()


DRAFTS = {
    "an error": (Raises, "it fails with KeyError: 'nothing'; fix it."),
    "floats": (
        wrong(Raises, open=lambda draft, target: wrong(_Raises, propose=lambda _: Proposal(torch.ones(2)))()),
        "Proposal.ids must be [n] long",
    ),
    "undeclared": (wrong(PromptLookup, needs=frozenset()), "name 'rollback' in needs"),
    "too little": (wrong(PromptLookup, max_rollback=2), "tokens were proposed and max_rollback is 2"),
}
"""What is wrong -> the draft, and words of the sentence that tells it."""
