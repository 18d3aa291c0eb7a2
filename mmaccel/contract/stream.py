"""What a memory of streams promises: places of its rows, questions that leave no trace, the way back to a checkpoint.

P tokens a unit, n rows of a pass, G key/value heads, D head size, E hidden size.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import RecipeError
from mmaccel.core.kv import KVView, Stream, StreamPass, StreamPolicy, StreamState
from mmaccel.core.positions import PositionIds

LAYERS, HEADS, GROUPS, SIZE, TOKENS, HEAD = 2, 4, 2, 8, 6, 3
GEOMETRY = Geometry(layers=LAYERS, heads=HEADS, kv_heads=GROUPS, head_dim=SIZE, hidden=32, vocab=9)
UNITS = 120
"""Longer than the windows that memories have by default."""


class Wheel:
    """A model that only turns: pairs (i, i + D/2) by the position on the first axis, the last pair by the last axis."""

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        axes = positions if positions.ndim == 2 else positions[None].expand(3, -1)
        speed = 10.0 ** -torch.arange(SIZE // 2, dtype=torch.float64)
        angle = axes[0].double()[:, None] * speed
        angle[:, -1] = axes[-1].double() * 0.3
        both = torch.cat([angle, angle], -1)[None, None]
        return both.cos().to(dtype), both.sin().to(dtype)

    def turn(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
        return x * angles[0] + half * angles[1]

    def turn_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        x.copy_(self.turn(x, angles))

    def norm(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def query(self, layer: int, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def check_stream(policy: StreamPolicy) -> None:
    """Raise `RecipeError` where the contract is broken, on a stream of made-up keys."""
    who = f"kv {policy.name!r}"
    if not policy.needs <= {"hidden", "look", "proxy"}:
        raise RecipeError(
            f"{who}: needs is {sorted(policy.needs)}; give some of 'hidden', 'look' and 'proxy'."
        )
    if policy.keeps == "frames":
        # No pass goes through it: a session alone can try it.
        return
    offset = torch.arange(TOKENS)[None]
    places = PositionIds(
        torch.arange(HEAD)[None],
        HEAD + offset,
        lambda n: TOKENS * torch.arange(n),
        HEAD + TOKENS,
        TOKENS,
        10**6,
    )
    stream = Stream(unit=TOKENS, head=HEAD, pace=1, places=places, dtype=torch.float64)
    model: Any = Wheel()
    state = policy.stream(stream, GEOMETRY, model, torch.device("cpu"))
    trial = _Trial(who, state, policy.needs)
    trial.run(StreamPass(kind="head", rows=HEAD))
    trial.watch(UNITS)
    first = trial.ask()
    trial.same(first, trial.ask(), "a question leaves a trace; let turn() drop all that was appended in it")
    mark = state.checkpoint()
    trial.watch(2)
    state.restore(mark)
    if state.units() != UNITS:
        raise RecipeError(
            f"{who}: after restore there are {state.units()} units; give back the {UNITS} of the checkpoint."
        )
    trial.same(first, trial.ask(), "what came after a checkpoint leaves a trace; let restore take it back")
    told = state.counters()
    if not all(isinstance(value, float) for value in told.values()):
        raise RecipeError(f"{who}: counters gives {told}; give a float for each name.")
    state.close()


class _Trial:
    """A memory, and passes through it as a session makes them."""

    def __init__(self, who: str, state: StreamState, needs: frozenset[str]) -> None:
        self.who, self.state, self.needs = who, state, needs

    def run(self, piece: StreamPass, name: int = 0) -> list[KVView]:
        """One pass: the views of all layers."""
        state, views = self.state, []
        state.begin_pass(piece)
        for layer in range(LAYERS):
            query, key, value = (
                draw((piece.kind, piece.first, name, layer, i), 1, h, piece.rows, SIZE)
                for i, h in enumerate((HEADS, GROUPS, GROUPS))
            )
            if "hidden" in self.needs:
                state.ahead(layer, query.transpose(1, 2).flatten(2))
            state.append(layer, key, value.clone())
            view = state.view(layer, query)
            if view.query is None or view.query.shape != query.shape:
                raise RecipeError(
                    f"{self.who}: a view has no queries of its pass; turn them, and give them as query."
                )
            if not torch.equal(view.value[:, :, -piece.rows :], value):
                raise RecipeError(
                    f"{self.who}: a view lacks the columns of its queries; put the newest last."
                )
            views.append(view)
        state.end_pass()
        return views

    def watch(self, count: int) -> None:
        """Units as a session passes them on, eight at a time."""
        end = self.state.units() + count
        while (first := self.state.units()) < end:
            n = self.state.fit(first, min(8, end - first))
            look = draw(("look", first), n, 32).float() if "look" in self.needs else None
            times = tuple(float(t) for t in range(first, first + n))
            self.run(StreamPass(kind="units", rows=n * TOKENS, first=first, count=n, times=times, look=look))
            if "proxy" in self.needs:
                self.run(StreamPass(kind="proxy", rows=2))
            if self.state.units() != first + n:
                raise RecipeError(
                    f"{self.who}: units is {self.state.units()} after {first + n} came; count those taken in."
                )
        self.state.idle()

    def ask(self) -> list[KVView]:
        """The views of a question, copied; a token of the answer follows it."""
        state, before = self.state, self.state.length()
        with state.question_scope():
            views = self.run(StreamPass(kind="question", rows=5, words=(1, 4), room=4))
            seen = [KVView(view.key.clone(), view.value.clone(), query=view.query) for view in views]
            self.run(StreamPass(kind="answer", rows=1), name=1)
            if state.length() != before + 6:
                raise RecipeError(
                    f"{self.who}: length is {state.length()} in a turn; count its {6} tokens after {before}."
                )
            for unit in state.evidence():
                if not 0 <= unit < state.units():
                    raise RecipeError(f"{self.who}: evidence names unit {unit}; name units of the stream.")
        if state.length() != before:
            raise RecipeError(f"{self.who}: length is {state.length()} after a turn; it was {before} before.")
        return seen

    def same(self, one: list[KVView], other: list[KVView], told: str) -> None:
        """Raise unless two questions have seen the same."""
        for a, b in zip(one, other, strict=True):
            if not (
                a.key.shape == b.key.shape and torch.equal(a.key, b.key) and torch.equal(a.value, b.value)
            ):
                raise RecipeError(f"{self.who}: {told}.")


def draw(name: tuple[Any, ...], *shape: int) -> Tensor:
    """Numbers that follow from a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(name).encode()))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)
