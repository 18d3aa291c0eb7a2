"""What a memory promises. Every column is a serial number that its keys tell, and a query sees a set of them.

B batch, G key/value heads, n columns, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.contract.stream import check_stream
from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.kv import KVPolicy, KVState, KVView, StreamPolicy

LAYERS, GROUPS, SIZE = 3, 2, 4
GEOMETRY = Geometry(layers=LAYERS, heads=4, kv_heads=GROUPS, head_dim=SIZE, hidden=16, vocab=32)
CPU = torch.device("cpu")


def check_memory(policy: KVPolicy) -> None:
    """Raise `RecipeError` where the contract is broken."""
    who = f"kv {policy.name!r}"
    if policy.exact and policy.reach is not None:
        raise RecipeError(
            f"{who}: exact is True and reach {policy.reach}; a memory that keeps all can roll all back."
        )
    if policy.reach is not None and policy.reach < 0:
        raise RecipeError(
            f"{who}: reach is {policy.reach}; give a number of columns, 0 or more, or None for all."
        )
    if isinstance(policy, StreamPolicy):
        check_stream(policy)
    if policy.sequences:
        check_lengths(policy)
        check_cuts(policy)
        check_questions(policy)
        check_beams(policy)


def check_lengths(policy: KVPolicy) -> None:
    """Columns in, rolled back, a window's accepted ones kept; counts after each."""
    state, who = policy.open(GEOMETRY, None, CPU), f"kv {policy.name!r}"
    _count(who, state, 0, "when it is opened")
    step(who, state, 0, 50)
    _count(who, state, 50, "after 50 columns")
    for serial in range(50, 90):
        step(who, state, serial, 1)
    back = 30 if policy.reach is None else min(policy.reach, 30)
    state.truncate(90 - back)
    _count(who, state, 90 - back, f"after 90 columns and truncate({90 - back})")
    step(who, state, 200, 7)
    state.accept(3)
    _count(who, state, 93 - back, "after 7 more and accept(3)")
    step(who, state, 300, 5)
    state.accept(torch.tensor([0, 2, 4]))
    _count(who, state, 96 - back, "after 5 more and accept of three of them")
    if not 0 < state.held() <= state.length() or state.nbytes() <= 0:
        raise RecipeError(
            f"{who}: held is {state.held()} and nbytes {state.nbytes()}; count columns and bytes that are held."
        )
    if not all(isinstance(value, float) for value in state.counters().values()):
        raise RecipeError(f"{who}: counters gives {state.counters()}; give a float for each name.")
    for name in ("truncate", "accept"):
        try:
            getattr(state, name)(1000)
        except ModelError:
            continue
        raise RecipeError(f"{who}: {name}(1000) of fewer columns is taken; raise ModelError.")
    state.reset()
    _count(who, state, 0, "after reset")
    step(who, state, 0, 4)


def check_cuts(policy: KVPolicy) -> None:
    """What comes after a cut is as if what was cut had never been."""
    who = f"kv {policy.name!r}"
    plain, cut = (policy.open(GEOMETRY, None, CPU) for _ in range(2))
    for state in (plain, cut):
        step(who, state, 0, 40)
    step(who, cut, 500, 6)
    cut.accept(0)
    with cut.question_scope():
        step(who, cut, 600, 100)
        step(who, cut, 700, 1)
    ours, theirs = step(who, cut, 40, 3), step(who, plain, 40, 3)
    if (
        not (torch.equal(ours.key, theirs.key) and torch.equal(ours.value, theirs.value))
        or cut.length() != 43
    ):
        raise RecipeError(
            f"{who}: columns that were taken back leave a trace; let accept and turn drop them."
        )


def check_questions(policy: KVPolicy) -> None:
    """A question that breaks off in the middle of a pass is dropped."""
    who = f"kv {policy.name!r}"
    state = policy.open(GEOMETRY, None, CPU)
    step(who, state, 0, 10)
    try:
        with state.question_scope():
            state.append(0, *written([[10, 11]], 0))
            raise ZeroDivisionError
    except ZeroDivisionError:
        _count(who, state, 10, "after a question that broke off")
    step(who, state, 10, 2)


def check_beams(policy: KVPolicy) -> None:
    """Rows are reordered, multiplied and dropped."""
    state = policy.open(GEOMETRY, None, CPU)
    for layer in range(LAYERS):
        state.append(layer, *written([[1, 2], [3, 4]], layer))
    state.reorder(torch.tensor([1, 1, 0]))
    for layer in range(LAYERS):
        state.append(layer, *written([[5], [6], [7]], layer))
        seen, want = (
            state.view(layer, torch.empty(3, 4, 1, SIZE)),
            written([[3, 4, 5], [3, 4, 6], [1, 2, 7]], layer),
        )
        if not torch.equal(seen.key, want[0]):
            raise RecipeError(
                f"kv {policy.name!r}: reorder([1, 1, 0]) gives other rows; take those rows of every layer."
            )
    state.reorder(torch.tensor([2]))
    step(f"kv {policy.name!r}", state, 8, 1)


def written(serials: list[list[int]], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, G, n, D] whose numbers tell serial, layer, group and place in the head; values are negative."""
    base = 1000.0 * torch.tensor(serials, dtype=torch.float64)[:, None, :, None] + 100 * layer
    key = base + 10 * torch.arange(GROUPS)[None, :, None, None] + torch.arange(SIZE)
    return key, -key - 0.5


def step(who: str, state: KVState, first: int, count: int) -> KVView:
    """One run of columns with serials from `first` on; the view of the last layer."""
    for layer in range(LAYERS):
        newest, values = written([list(range(first, first + count))], layer)
        state.append(layer, newest, values)
        view = state.view(layer, torch.empty(1, 4, count, SIZE))
        if not torch.equal(view.key[:, :, -count:], newest) or not torch.equal(
            view.value[:, :, -count:], values
        ):
            raise RecipeError(f"{who}: a view lacks the columns of its queries; put the newest last.")
        if view.key.shape != view.value.shape or (
            view.column is not None and view.column.shape != view.key.shape[2:3]
        ):
            raise RecipeError(
                f"{who}: key, value and column of a view are of different lengths; give one for each key."
            )
    return view


def _count(who: str, state: KVState, want: int, when: str) -> None:
    if state.length() != want or (not want and state.held()):
        raise RecipeError(
            f"{who}: length is {state.length()} and held {state.held()} {when}; length is to be {want}."
        )
