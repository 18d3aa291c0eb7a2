"""The `tree` draft: a draft model proposes a tree of tokens; the target verifies it in one pass and keeps one path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView, TokenTree
from mmaccel.core.decoding.draft import DraftState, Proposal
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.draft._draft_model import DraftModelState, VideoDraftStrategy

STATIC = (
    ((0,), (1,), (2,), (3,)),
    ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    ((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The 25 nodes of the static tree, by level; a node is the ranks of the tokens on its way from the root."""


@register("draft", "tree")
@dataclass(frozen=True, kw_only=True)
class Tree(VideoDraftStrategy):
    """A smaller model drafts a tree of likely continuations; the target verifies all branches with a tree attention mask.

    Children are the most likely tokens, chosen without randomness. So sampling stays exact: the target draws its own token,
    and verification continues at the child with the same token. With an `attention` pruner this is SpecVLM (arXiv
    2508.16201); without, the paper's SD-Tree. After EAGLE's trees (arXiv 2401.15077, 2406.16858). Serves one
    beam, and on `past_key_values` of an earlier turn one sequence.

    On a stream the memory must accept trees (`StreamPolicy.allows_branches`), as all of ours do.

    model  folder or shipped name of the draft model, "beside" (the target's folder plus ``-draft``), or the loaded module
    shape  "static": EAGLE's 25 nodes in 5 levels; "dynamic": the `nodes` likeliest of `depth` levels of `width` nodes each
    depth, width, nodes  of a dynamic tree
    prune  a pruner of stage "draft": the draft reads only what it keeps
    kv     in a session, the memory of the draft's own stream; null: one like the target's
    """

    needs: ClassVar[frozenset[str]] = VideoDraftStrategy.needs | {"branches"}

    shape: Literal["static", "dynamic"] = "static"
    depth: int = limited(5, at_least(1))
    width: int = limited(4, at_least(1))
    nodes: int = limited(25, at_least(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes < self.depth:
            raise RecipeError(
                f"tree: nodes is {self.nodes} for a depth of {self.depth}; give at least a node a level."
            )

    @property
    def max_rollback(self) -> int:
        return (self.nodes if self.shape == "dynamic" else sum(map(len, STATIC))) + 1

    def open(self, target: ModelView) -> DraftState:
        peer = self.peer(target)
        return _Gardener(peer.runner(), peer.device, self, target.geometry.vocab)


class _Gardener(DraftModelState):
    """The state of a draft that proposes trees. What it ran of a tree is rolled back at once; `_run` has the nodes of the
    current tree that were run, in their order."""

    _choice: Tree
    _trees = 0

    def propose(self) -> Proposal:
        runner = self._open()
        root = self._logits(runner.step(self._pending.to(self._device)[None]))[-1]
        self._pending = self._pending[:0]
        self._trees += 1
        mark = runner.length()
        self._run: list[int] = []
        try:
            grow = self._static if self._choice.shape == "static" else self._dynamic
            tokens, parents = grow(root)
        finally:
            runner.truncate(mark)
        return Proposal(torch.tensor(tokens), parents=torch.tensor(parents))

    def observe_committed(self, committed: Tensor, kept: int) -> None:
        committed = committed.to(self._pending.device)
        self._pending = torch.cat([self._pending, committed])
        self._said = torch.cat([self._said, committed])

    def _static(self, root: Tensor) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        number: dict[tuple[int, ...], int] = {(): -1}
        rows: dict[tuple[int, ...], Tensor] = {(): root}
        for level, paths in enumerate(STATIC):
            ranked = {way: row.topk(min(4, row.numel())).indices.tolist() for way, row in rows.items()}
            for path in paths:
                number[path] = len(tokens)
                tokens.append(ranked[path[:-1]][path[-1]])
                parents.append(number[path[:-1]])
            if level + 1 < len(STATIC):
                ways = list(dict.fromkeys(path[:-1] for path in STATIC[level + 1]))
                rows_of_level = self._step([number[way] for way in ways], tokens, parents)
                rows = dict(zip(ways, rows_of_level, strict=True))
        return tokens, parents

    def _dynamic(self, root: Tensor) -> tuple[list[int], list[int]]:
        choice = self._choice
        tokens: list[int] = []
        parents: list[int] = []
        worth: list[float] = []
        frontier: list[tuple[int, float, Tensor]] = [(-1, 0.0, root)]
        for level in range(choice.depth):
            born = []
            for node, base, row in frontier:
                best = torch.log_softmax(row.float(), -1).topk(min(choice.width, row.numel()))
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    born.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    worth.append(base + value)
            chosen = sorted(sorted(born, key=lambda n: -worth[n])[: choice.width])
            if level + 1 < choice.depth:
                rows = self._step(chosen, tokens, parents)
                frontier = [(n, worth[n], row) for n, row in zip(chosen, rows, strict=True)]
        # A child is never worth more than its parent and comes after it, so what is left is a tree.
        left = sorted(sorted(range(len(tokens)), key=lambda n: -worth[n])[: choice.nodes])
        place = {-1: -1, **{node: i for i, node in enumerate(left)}}
        return [tokens[n] for n in left], [place[parents[n]] for n in left]

    def _step(self, nodes: list[int], tokens: list[int], parents: list[int]) -> list[Tensor]:
        """Logits [V] after each of `nodes`, all of one level, whose ancestors have been run."""
        self._run += nodes
        row = {node: n for n, node in enumerate(self._run)}
        sees = torch.zeros(len(nodes), len(row), dtype=torch.bool)
        depth = []
        for n, node in enumerate(nodes):
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            sees[n, [row[one] for one in path]] = True
            depth.append(len(path) - 1)
        ids = torch.tensor([[tokens[n] for n in nodes]], device=self._device)
        return list(self._logits(self._open().step(ids, TokenTree(sees, torch.tensor(depth)))))

    def _logits(self, logits: Tensor) -> Tensor:
        self._steps += 1
        return logits[0, :, : self._vocab]

    def counters(self) -> dict[str, float]:
        return {"trees": float(self._trees), **super().counters()}
