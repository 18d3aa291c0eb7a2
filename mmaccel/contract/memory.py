"""Contract tests of KV memories, for sequences and for streams.

B batch, G key/value heads, n columns, D head size; P tokens a unit (frame) of a stream, E hidden size.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mmaccel.contract.prefill import check_counters_are_floats, raise_unless
from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import PositionIds, TokenLayout
from mmaccel.core.memory.frames import FrameMemory
from mmaccel.core.memory.kv import KVPolicy, KVState, KVView, Stream, StreamPass, StreamPolicy, StreamState

LAYERS, HEADS, GROUPS, SIZE, TOKENS, HEAD = 3, 4, 2, 8, 6, 3
GEOMETRY = Geometry(layers=LAYERS, heads=HEADS, kv_heads=GROUPS, head_dim=SIZE, hidden=32, vocab=9)
CPU = torch.device("cpu")
UNITS = 120
"""Longer than the windows that memories have by default."""


def check_memory(policy: KVPolicy) -> None:
    """Test a KV memory; raises `RecipeError` if it violates its contract."""
    who, rollback_limit = f"kv {policy.name!r}", policy.rollback_limit
    raise_unless(
        not policy.exact or rollback_limit is None,
        f"{who}: exact is True and rollback_limit is {rollback_limit}; a memory that keeps all can roll all back.",
    )
    raise_unless(
        rollback_limit is None or rollback_limit >= 0,
        f"{who}: rollback_limit is {rollback_limit}; give a number of columns, 0 or more, or None for all.",
    )
    if isinstance(policy, StreamPolicy):
        _check_stream(policy)
    if policy.sequences:
        _check_lengths(policy)
        _check_cuts(policy)
        _check_beams(policy)


# Sequences. Every column is a serial number that its keys tell, and a query sees a set of them.


def _check_lengths(policy: KVPolicy) -> None:
    """Test the column counts of a memory after appends, rollback and `accept`."""
    state, who = policy.open(GEOMETRY, None, CPU), f"kv {policy.name!r}"
    _count(who, state, 0, "when it is opened")
    append_to_layers(who, state, 0, 50)
    _count(who, state, 50, "after 50 columns")
    for serial in range(50, 90):
        append_to_layers(who, state, serial, 1)
    back = 30 if policy.rollback_limit is None else min(policy.rollback_limit, 30)
    state.truncate(90 - back)
    _count(who, state, 90 - back, f"after 90 columns and truncate({90 - back})")
    append_to_layers(who, state, 200, 7)
    state.accept(3)
    _count(who, state, 93 - back, "after 7 more and accept(3)")
    append_to_layers(who, state, 300, 5)
    state.accept(torch.tensor([0, 2, 4]))
    _count(who, state, 96 - back, "after 5 more and accept of three of them")
    raise_unless(
        0 < state.held_columns() <= state.length() and state.nbytes() > 0,
        f"{who}: held_columns is {state.held_columns()} and nbytes {state.nbytes()}; count columns and bytes that are held.",
    )
    check_counters_are_floats(who, state.counters())
    for name in ("truncate", "accept"):
        with suppress(ModelError):
            getattr(state, name)(1000)
            raise_unless(False, f"{who}: {name}(1000) of fewer columns is taken; raise ModelError.")
    state.reset()
    _count(who, state, 0, "after reset")
    append_to_layers(who, state, 0, 4)


def _check_cuts(policy: KVPolicy) -> None:
    """Test that columns that were rolled back have no effect on later ones, also after a question that failed in a pass."""
    who = f"kv {policy.name!r}"
    plain, cut, broken = (policy.open(GEOMETRY, None, CPU) for _ in range(3))
    for state in (plain, cut):
        append_to_layers(who, state, 0, 40)
    append_to_layers(who, cut, 500, 6)
    cut.accept(0)
    with cut.question_scope():
        append_to_layers(who, cut, 600, 100)
        append_to_layers(who, cut, 700, 1)
    ours, theirs = append_to_layers(who, cut, 40, 3), append_to_layers(who, plain, 40, 3)
    same = torch.equal(ours.key, theirs.key) and torch.equal(ours.value, theirs.value)
    raise_unless(
        same and cut.length() == 43,
        f"{who}: columns that were taken back leave a trace; let accept and question_scope drop them.",
    )
    append_to_layers(who, broken, 0, 10)
    with suppress(ZeroDivisionError), broken.question_scope():
        broken.append(0, *encode_kv([[10, 11]], 0))
        raise ZeroDivisionError
    _count(who, broken, 10, "after a question that broke off")
    append_to_layers(who, broken, 10, 2)


def _check_beams(policy: KVPolicy) -> None:
    """Test that batch rows can be reordered, repeated and dropped."""
    state, who = policy.open(GEOMETRY, None, CPU), f"kv {policy.name!r}"
    for layer in range(LAYERS):
        state.append(layer, *encode_kv([[1, 2], [3, 4]], layer))
    state.select_sequences(torch.tensor([1, 1, 0]))
    for layer in range(LAYERS):
        state.append(layer, *encode_kv([[5], [6], [7]], layer))
        seen = state.view(layer, torch.empty(3, HEADS, 1, SIZE))
        raise_unless(
            torch.equal(seen.key, encode_kv([[3, 4, 5], [3, 4, 6], [1, 2, 7]], layer)[0]),
            f"{who}: select_sequences([1, 1, 0]) gives other rows; take those rows of every layer.",
        )
    state.select_sequences(torch.tensor([2]))
    append_to_layers(who, state, 8, 1)


def encode_kv(serials: list[list[int]], layer: int) -> tuple[Tensor, Tensor]:
    """Return distinct keys [B, G, n, D], whose elements encode column number (`serials`), layer, group and index, and
    values, their negatives less 0.5."""
    base = 1000.0 * torch.tensor(serials, dtype=torch.float64)[:, None, :, None] + 100 * layer
    key = base + 10 * torch.arange(GROUPS)[None, :, None, None] + torch.arange(SIZE)
    return key, -key - 0.5


def append_to_layers(who: str, state: KVState, first: int, count: int) -> KVView:
    """Append `count` columns numbered from `first` on to all layers; check and return the view of the last layer."""
    for layer in range(LAYERS):
        newest, values = encode_kv([list(range(first, first + count))], layer)
        state.append(layer, newest, values)
        view = state.view(layer, torch.empty(1, HEADS, count, SIZE))
        raise_unless(
            torch.equal(view.key[:, :, -count:], newest) and torch.equal(view.value[:, :, -count:], values),
            f"{who}: a view lacks the columns of its queries; put the newest last.",
        )
        columns = view.key.shape[2:3] if view.column is None else view.column.shape
        raise_unless(
            view.key.shape == view.value.shape and columns == view.key.shape[2:3],
            f"{who}: key, value and column of a view are of different lengths; give one for each key.",
        )
    return view


def _count(who: str, state: KVState, want: int, when: str) -> None:
    length, held = state.length(), state.held_columns()
    raise_unless(
        length == want and (want or not held),
        f"{who}: length is {length} and held {held} {when}; length is to be {want}.",
    )


# Streams: positions of rows, questions that leave no trace, the way back to a checkpoint.


class RotaryModel:
    """Stands for a model of which a memory needs only RoPE. Each element i < D/2 is rotated with element i + D/2: by the
    position on axis 0, but the last such pair by the position on the last axis."""

    def rope_angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        axes = positions if positions.ndim == 2 else positions[None].expand(3, -1)
        speed = 10.0 ** -torch.arange(SIZE // 2, dtype=torch.float64)
        angle = axes[0].double()[:, None] * speed
        angle[:, -1] = axes[-1].double() * 0.3
        both = torch.cat([angle, angle], -1)[None, None]
        return both.cos().to(dtype), both.sin().to(dtype)

    def apply_rope(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
        return x * angles[0] + half * angles[1]

    def apply_rope_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        x.copy_(self.apply_rope(x, angles))

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def project_query(self, layer: int, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def _check_stream(policy: StreamPolicy) -> None:
    """Test a stream memory on random keys; raises `RecipeError` if it violates its contract."""
    who = f"kv {policy.name!r}"
    raise_unless(
        policy.needs <= {"hidden", "look", "proxy"},
        f"{who}: needs is {sorted(policy.needs)}; give some of 'hidden', 'look' and 'proxy'.",
    )
    head, unit = torch.arange(HEAD)[None], HEAD + torch.arange(TOKENS)[None]
    positions = PositionIds(head, unit, lambda n: TOKENS * torch.arange(n), HEAD + TOKENS, TOKENS, 10**6)
    stream = Stream(
        tokens_per_unit=TOKENS, head=HEAD, frames_per_unit=1, positions=positions, dtype=torch.float64
    )
    model: Any = RotaryModel()
    state = policy.open_stream(stream, GEOMETRY, model, CPU)
    if isinstance(state, FrameMemory):
        return state.close()  # no pass goes through it: a session alone can try it
    trial = _Trial(who, state, policy.needs)
    trial.run(StreamPass(kind="head", rows=HEAD))
    trial.watch(UNITS)
    first = trial.ask()
    trial.same(
        first, trial.ask(), "a question leaves a trace; let question_scope drop all that was appended in it"
    )
    mark = state.checkpoint()
    state.set_query_fields(policy)
    trial.watch(UNITS)
    state.restore(mark)
    units = state.units()
    raise_unless(
        units == UNITS,
        f"{who}: after restore there are {units} units; give back the {UNITS} of the checkpoint.",
    )
    trial.same(first, trial.ask(), "what came after a checkpoint leaves a trace; let restore take it back")
    mark = state.checkpoint()

    def asked(meanwhile: Callable[[], object] = lambda: None) -> list[KVView] | None:
        taken = state.snapshot(replace(stream, positions=copy.copy(positions)), lambda: None)
        return None if taken is None else _Trial(who, taken, policy.needs).ask(meanwhile)

    if (beside := asked(asked if state.several else lambda: None)) is not None:
        fault = "a question of a snapshot sees something else; let snapshot copy all that a question reads"
        if state.several:
            fault = "a question meanwhile changes an answer that has begun; leave several False"
        trial.same(first, beside, fault)
        trial.same(
            first,
            asked(lambda: trial.watch(20)) or [],
            "units that come change an answer that has begun; let snapshot copy what they change",
        )
        state.restore(mark)
        trial.same(first, trial.ask(), "what a snapshot was asked leaves a trace; let it keep that to itself")
    with TemporaryDirectory() as name:
        try:
            state.save(name)
        except ModelError:
            pass  # a memory that cannot be saved says so
        else:
            loaded = policy.open_stream(stream, GEOMETRY, model, CPU)
            loaded.load(name)
            told = "a loaded memory shows a question something else; let _save and _load keep all that a question reads"
            trial.same(first, _Trial(who, loaded, policy.needs).ask(), told)
            loaded.close()
    check_counters_are_floats(who, state.counters())
    state.close()


class _Trial:
    """A memory, and passes through it as a session makes them."""

    def __init__(self, who: str, state: StreamState, needs: frozenset[str]) -> None:
        self.who, self.state, self.needs = who, state, needs

    def run(self, stream_pass: StreamPass, name: int = 0) -> list[KVView]:
        """Run one forward pass through the memory under test; return the views of all layers."""
        state, views = self.state, []
        state.begin_pass(stream_pass)
        for layer in range(LAYERS):
            query, key, value = (
                randn((stream_pass.kind, stream_pass.first, name, layer, i), 1, h, stream_pass.rows, SIZE)
                for i, h in enumerate((HEADS, GROUPS, GROUPS))
            )
            if "hidden" in self.needs:
                state.receive_hidden(layer, query.transpose(1, 2).flatten(2))
            state.append(layer, key, value.clone())
            view = state.view(layer, query)
            raise_unless(
                view.query is not None and view.query.shape == query.shape,
                f"{self.who}: a view has no queries of its pass; turn them, and give them as query.",
            )
            raise_unless(
                torch.equal(view.value[:, :, -stream_pass.rows :], value),
                f"{self.who}: a view lacks the columns of its queries; put the newest last.",
            )
            raise_unless(
                view.layout is None or (view.bias is None and view.layout.length == view.key.shape[2]),
                f"{self.who}: the layout of a view is not of its columns, or it has a bias too; tell of each column.",
            )
            views.append(view)
        state.end_pass()
        return views

    def watch(self, count: int) -> None:
        """Run `count` units (frames) as a session does, eight at a time."""
        end = self.state.units() + count
        while (first := self.state.units()) < end:
            n = self.state.units_that_fit(first, min(8, end - first))
            look = randn(("look", first), n, 32).float() if "look" in self.needs else None
            times = tuple(float(t) for t in range(first, first + n))
            self.run(StreamPass(kind="units", rows=n * TOKENS, first=first, count=n, times=times, look=look))
            if "proxy" in self.needs:
                self.run(StreamPass(kind="proxy", rows=2))
            units = self.state.units()
            raise_unless(
                units == first + n,
                f"{self.who}: units is {units} after {first + n} came; count those taken in.",
            )
        self.state.end_ingest()

    def ask(self, meanwhile: Callable[[], object] = lambda: None) -> list[KVView]:
        """Run a question and, after `meanwhile`, a token of its answer; return copies of all views."""
        state, before = self.state, self.state.length()
        with state.question_scope():
            rows = TokenLayout.text(1, 5)
            views = self.run(StreamPass(kind="question", rows=5, words=(1, 4), room=4, layout=rows))
            seen = [KVView(view.key.clone(), view.value.clone(), query=view.query) for view in views]
            meanwhile()
            views = self.run(StreamPass(kind="answer", rows=1), name=1)
            seen += [KVView(view.key.clone(), view.value.clone(), query=view.query) for view in views]
            length = state.length()
            raise_unless(
                length == before + 6,
                f"{self.who}: length is {length} in a turn; count its 6 tokens after {before}.",
            )
            for unit in state.evidence():
                raise_unless(
                    0 <= unit < state.units(),
                    f"{self.who}: evidence names unit {unit}; name units of the stream.",
                )
        length = state.length()
        raise_unless(
            length == before, f"{self.who}: length is {length} after a turn; it was {before} before."
        )
        return seen

    def same(self, one: list[KVView], other: list[KVView], told: str) -> None:
        """Raise `RecipeError` unless two questions have seen the same keys and values."""
        for a, b in zip(one, other, strict=True):
            # `equal` of tensors of two shapes is False.
            raise_unless(torch.equal(a.key, b.key) and torch.equal(a.value, b.value), f"{self.who}: {told}.")


def randn(name: tuple[Any, ...], *shape: int) -> Tensor:
    """Return random float64 numbers of the given shape; the same `name` gives the same numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(name).encode()))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)
