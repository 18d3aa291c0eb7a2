"""Both plain memories: what a query sees, what is held and taken back, and any order of runs, cuts and questions."""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmaccel.contract.memory import LAYERS, encode_kv
from mmaccel.core.errors import ModelError
from mmaccel.core.memory.buffers import ROOM_MAX, as_words
from mmaccel.core.memory.kv import KVPolicy, KVState
from mmaccel.policies.kv import Full, Window
from tests.policies.kv.token_streams import open_state, read, seen, visible


class Machine(RuleBasedStateMachine):
    """`sequences` [B] of serials is what the memory ought to hold; `last` columns were run last."""

    policy: KVPolicy
    sinks, window, margin = 0, None, 0

    @initialize(batch=st.integers(1, 2))
    def begin(self, batch: int) -> None:
        self.state = open_state(self.policy)
        self.sequences: list[list[int]] = [[] for _ in range(batch)]
        self.serial = self.last = self.high = 0
        self.runs = [0] * LAYERS
        self.question: Any = None

    @property
    def length(self) -> int:
        return len(self.sequences[0])

    def append(self, count: int, layers: int = LAYERS) -> None:
        """One run; `high` is the longest memory a run began with, or its question: then the window lets go of columns."""
        new = [[self.serial + b * count + i for i in range(count)] for b in range(len(self.sequences))]
        self.serial += count * len(new)
        self.high = max(self.high, self.length if self.question is None else self.asked)
        for sequence, more in zip(self.sequences, new, strict=True):
            sequence.extend(more)
        for layer in range(layers):
            self.state.append(layer, *encode_kv(new, layer))
            assert self.state.length() == self.length, "right in the middle of a run"
            view = self.state.view(layer, torch.empty(len(new), 4, count, 4))
            expected = [visible(sequence, count, self.sinks, self.window) for sequence in self.sequences]
            assert seen(view, layer, count, self.length) == expected
            self.runs[layer] = count if self.question is None else max(count, self.runs[layer])
        self.last = count

    def columns(self) -> set[int]:
        """The columns held by the first layer, which is never behind the others in letting go."""
        view = self.state.view(0, torch.empty(len(self.sequences), 4, 1, 4))
        return set(range(view.key.shape[2]) if view.column is None else view.column.tolist())

    def own_run(self) -> bool:
        """Whether the last run is not of the time before an open question, which must leave that time alone."""
        return self.question is None or self.length - self.last >= self.asked

    def forget(self, length: int) -> None:
        for sequence in self.sequences:
            del sequence[length:]

    @rule(count=st.one_of(st.integers(1, 3), st.integers(1, 40)))
    def step(self, count: int) -> None:
        self.append(count)

    @rule(count=st.integers(1, 12), layers=st.integers(1, LAYERS - 1))
    def break_off(self, count: int, layers: int) -> None:
        start = self.length
        self.append(count, layers)
        if count > 1:
            self.state.accept(torch.tensor([count - 1]))
        self.state.truncate(start)
        self.forget(start)
        self.last = 0

    @precondition(lambda self: self.own_run())
    @rule(data=st.data())
    def accept_some(self, data: st.DataObject) -> None:
        keep = data.draw(st.integers(0, self.last))
        self.state.accept(keep)
        self.forget(self.length - self.last + keep)
        self.last = keep

    @precondition(lambda self: self.own_run())
    @rule(data=st.data())
    def accept_path(self, data: st.DataObject) -> None:
        path = sorted(data.draw(st.sets(st.integers(0, self.last - 1)))) if self.last else []
        self.state.accept(torch.tensor(path, dtype=torch.long))
        for sequence in self.sequences:
            tail = sequence[len(sequence) - self.last :]
            sequence[len(sequence) - self.last :] = [tail[i] for i in path]
        self.last = len(path)

    @precondition(lambda self: self.question is None)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(max(0, self.length - 20), self.length))
        # Possible exactly when nothing the next query sees has gone, and surely within the margin.
        needed = visible([*range(length), -1], 1, self.sinks, self.window)[0][:-1]
        possible = length == self.length or set(needed) <= self.columns()
        assert possible or (self.policy.rollback_limit is not None and length < self.high - self.margin)
        if possible:
            self.state.truncate(length)
            self.last = max(0, self.last - (self.length - length))
            self.forget(length)
        else:
            with pytest.raises(ModelError, match="margin"):
                self.state.truncate(length)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        if not self.length:
            return
        rows = data.draw(st.lists(st.integers(0, len(self.sequences) - 1), min_size=1, max_size=3))
        self.state.select_sequences(torch.tensor(rows))
        self.sequences = [list(self.sequences[row]) for row in rows]

    @precondition(lambda self: self.question is None)
    @rule()
    def reset(self) -> None:
        self.state.reset()
        self.begin(len(self.sequences))

    @precondition(lambda self: self.question is None)
    @rule()
    def ask(self) -> None:
        self.question = self.state.question_scope()
        self.question.__enter__()
        self.asked = self.length

    @precondition(lambda self: self.question is not None)
    @rule()
    def answered(self) -> None:
        self.question.__exit__(None, None, None)
        self.question = None
        self.last = max(0, self.last - (self.length - self.asked))
        self.forget(self.asked)

    def teardown(self) -> None:
        if getattr(self, "question", None) is not None:
            self.answered()

    @invariant()
    def figures(self) -> None:
        state = self.state
        assert state.length() == self.length
        assert state.counters()["held"] == state.held_columns() <= max(self.length, 0)
        self.bound()

    def bound(self) -> None:
        assert self.state.held_columns() == self.length


class FullMachine(Machine):
    policy = Full()


class WindowMachine(Machine):
    sinks, window, margin = 3, 5, 4
    policy = Window(sinks=sinks, window=window, margin=margin)

    def bound(self) -> None:
        # A question may grow beyond it; it is dropped as a whole.
        if self.question is None:
            assert self.state.held_columns() <= self.sinks + self.window + self.margin + max(self.runs)


class BareWindowMachine(WindowMachine):
    sinks, window, margin = 0, 1, 0
    policy = Window(sinks=sinks, window=window, margin=margin)


TestFull = FullMachine.TestCase
TestWindow = WindowMachine.TestCase
TestBareWindow = BareWindowMachine.TestCase
for case in (TestFull, TestWindow, TestBareWindow):
    case.settings = settings(max_examples=50, stateful_step_count=40)
del case


def test_they_declare_what_they_are() -> None:
    assert Full().exact and Full().rollback_limit is None and Full().allows_sparse
    policy = Window(margin=9)
    assert policy.rollback_limit == 9 and not policy.exact and policy.allows_sparse


def test_a_view_is_a_slice_of_the_buffer() -> None:
    state = open_state(Full(), layers=1)
    key = torch.randn(1, 2, 5, 4)
    state.append(0, key, key)
    first = state.view(0, key).key
    state.append(0, key, key)
    second = state.view(0, key).key
    assert first.data_ptr() == second.data_ptr() and second.shape[2] == 10
    assert torch.equal(first, key), "an older view is left alone"
    state = open_state(Full(), layers=1)
    key = torch.randn(1, 1, 20_000, 2)
    state.append(0, key, key)
    moves, at = 0, 0
    for _ in range(6000):
        state.append(0, key[:, :, :1], key[:, :, :1])
        here = state.view(0, key[:, :, :1]).key.data_ptr()
        moves, at = moves + (here != at), here
    assert moves <= 4
    used = 2 * 26_000 * 2 * 4
    assert used <= state.nbytes() <= used + 2 * ROOM_MAX * 2 * 4
    assert torch.equal(state.view(0, key).key[:, :, :20_000], key)


def test_keys_and_values_may_differ_in_size_and_layers_in_heads() -> None:
    state = open_state(Full(), layers=2)
    for layer, heads in enumerate((2, 3)):
        key, value = torch.randn(1, heads, 7, 6), torch.randn(1, heads, 7, 4)
        state.append(layer, key, value)
        view = state.view(layer, key)
        assert torch.equal(view.key, key) and torch.equal(view.value, value)
    state = open_state(Full(), layers=1)
    for batch in (1, 3):
        key = torch.randn(batch, 2, 4, 4)
        state.append(0, key, key)
        state.reset()
    assert state.nbytes() == 0


ROW = torch.empty(1, 4, 1, 4)


def feed(state: KVState, first: int, count: int) -> None:
    state.append(0, *encode_kv([list(range(first, first + count))], 0))


def test_all_is_seen_and_unlimited_as_long_as_it_fits() -> None:
    state = open_state(Window(sinks=2, window=6), layers=1)
    feed(state, 0, 5)
    feed(state, 5, 3)
    view = state.view(0, ROW)
    assert view.window is None and view.column is None and view.key.shape[2] == 8


def test_a_long_prompt_is_let_go_at_the_next_run() -> None:
    state = open_state(Window(sinks=4, window=16, margin=8), layers=1)
    feed(state, 0, 1000)
    assert state.held_columns() == 1000
    full = state.nbytes()
    feed(state, 1000, 1)
    assert state.held_columns() == 4 + 16 + 8 + 1
    assert state.nbytes() == full * 29 // 1000
    view = state.view(0, ROW)
    assert view.column is not None and view.column.tolist() == [0, 1, 2, 3, *range(976, 1001)]
    assert read(view, 0)[0] == view.column.tolist()
    assert (view.sinks, view.window) == (4, 16)


def test_a_question_longer_than_the_window_leaves_no_trace() -> None:
    state = open_state(Window(sinks=1, window=4, margin=2), layers=1)
    for serial in range(40):
        feed(state, serial, 1)
    with state.question_scope():
        for serial in range(100, 150):
            feed(state, serial, 1)
            with state.question_scope():
                feed(state, serial, 1)
        sequence = [*range(40), *range(100, 150)]
        feed(state, 150, 1)
        assert seen(state.view(0, ROW), 0, 1, 91) == [visible([*sequence, 150], 1, 1, 4)]
    assert state.length() == 40 and state.held_columns() <= 1 + 4 + 2 + 1
    feed(state, 40, 1)
    assert seen(state.view(0, ROW), 0, 1, 41) == [visible(list(range(41)), 1, 1, 4)]


def test_it_holds_nothing_but_its_own_columns() -> None:
    state = open_state(Window(), layers=1)
    large = torch.zeros(1, 2, 1000, 4)
    state.append(0, large[:, :, :3], large[:, :, 3:6])
    large.fill_(1.0)
    assert state.nbytes() == 2 * 2 * 3 * 4 * 4
    assert state.view(0, ROW).key.sum() == 0


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_words_are_the_same_bytes_where_all_rows_are_whole_words(kind: torch.dtype) -> None:
    rows = torch.randn(2, 3, 8, 32, generator=torch.Generator().manual_seed(0)).to(kind)
    rows[0, 0, 0, 0] = torch.nan
    cases = {(rows[:, :, 3:], rows): True, (rows[..., 8:24],): True, (rows[..., ::2],): False}
    for parts, fits in {**cases, (rows, rows[..., 1:]): False, (rows[..., 1:17],): False}.items():
        for one, word in zip(parts, as_words(*parts), strict=True):
            assert (word.dtype == torch.complex128) == fits
            torch.testing.assert_close(word.clone().view(kind), one, rtol=0, atol=0, equal_nan=True)
