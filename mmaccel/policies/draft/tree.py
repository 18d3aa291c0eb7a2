"""A draft of many branches: the target verifies a tree of guesses in one pass and keeps one path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.core.adapter import Branches, ModelView, Runner
from mmaccel.core.draft import DraftState, Prompt, Proposal
from mmaccel.core.errors import DraftError, RecipeError, check_choice, check_least
from mmaccel.core.registry import register
from mmaccel.policies.draft._draft_model import PeerStrategy, PrunedReader, Reader, moved

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
class Tree(PeerStrategy):
    """A smaller model drafts a tree of likely continuations; the target checks all branches under a tree mask.

    Children are the likeliest tokens, chosen without chance, which keeps sampling exact: the target draws its own token and
    the walk goes on where a child says the same. With an `attention` pruner this is SpecVLM (arXiv 2508.16201); without, the
    paper's SD-Tree. After EAGLE's trees (arXiv 2401.15077, 2406.16858). One beam, from an empty
    cache.

    model  folder or shipped name of the draft model, "beside" (the target's, with -draft), or the loaded module
    shape  "static": EAGLE's 25 nodes in 5 levels; "dynamic": the `nodes` likeliest of `depth` levels of `width` nodes each
    depth, width, nodes  of a dynamic tree
    prune  a pruner of stage "draft"
    """

    shape: str = "static"
    depth: int = 5
    width: int = 4
    nodes: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tree", "shape", self.shape, ("static", "dynamic"))
        check_least(self, 1, "depth", "width", "nodes")
        if self.nodes < self.depth:
            raise RecipeError(
                f"tree: nodes is {self.nodes} for a depth of {self.depth}; give at least a node a level."
            )

    @property
    def lookback(self) -> int:
        return (self.nodes if self.shape == "dynamic" else sum(map(len, STATIC))) + 1

    def open(self, target: ModelView) -> DraftState:
        peer = self.peer(target)
        return _Gardener(peer.runner(), peer.device, self, target.geometry.vocab)


class _Gardener(DraftState):
    """Between rounds the runner has run every committed token but `_pending`; what a tree ran is taken back."""

    def __init__(self, runner: Runner, device: torch.device, choice: Tree, vocab: int) -> None:
        self._runner: Runner | None = runner
        self._device, self._choice, self._vocab = device, choice, vocab
        self._reader = PrunedReader(choice.prune) if choice.prune is not None else Reader()
        self._steps = self._trees = 0

    def begin(self, prompt: Prompt) -> None:
        self._pending = prompt.ids[0, :0]
        self._reader.begin(self._open(), moved(prompt.inputs, self._device))

    def keep(self, columns: Tensor) -> None:
        self._reader.keep(columns)

    def propose(self) -> Proposal:
        self._reader.read()
        runner = self._open()
        root = self._logits(runner.step(self._pending.to(self._device)[None]))[-1]
        self._pending = self._pending[:0]
        self._trees += 1
        mark = runner.length()
        try:
            grow = self._static if self._choice.shape == "static" else self._dynamic
            tokens, parents = grow(root)
        finally:
            runner.truncate(mark)
        return Proposal(torch.tensor(tokens), parents=torch.tensor(parents))

    def observe(self, committed: Tensor, kept: int) -> None:
        self._pending = torch.cat([self._pending, committed.to(self._pending.device)])

    def _static(self, root: Tensor) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        number: dict[tuple[int, ...], int] = {(): -1}
        rows: dict[tuple[int, ...], Tensor] = {(): root}
        ground = _Ground()
        for level, paths in enumerate(STATIC):
            ranked = {way: row.topk(min(4, row.numel())).indices.tolist() for way, row in rows.items()}
            for path in paths:
                number[path] = len(tokens)
                tokens.append(ranked[path[:-1]][path[-1]])
                parents.append(number[path[:-1]])
            if level + 1 < len(STATIC):
                ways = list(dict.fromkeys(path[:-1] for path in STATIC[level + 1]))
                found = self._run([number[way] for way in ways], tokens, parents, ground)
                rows = dict(zip(ways, found, strict=True))
        return tokens, parents

    def _dynamic(self, root: Tensor) -> tuple[list[int], list[int]]:
        choice = self._choice
        tokens: list[int] = []
        parents: list[int] = []
        worth: list[float] = []
        ground = _Ground()
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
                rows = self._run(chosen, tokens, parents, ground)
                frontier = [(n, worth[n], row) for n, row in zip(chosen, rows, strict=True)]
        # A child is never worth more than its parent and comes after it, so what is left is a tree.
        left = sorted(sorted(range(len(tokens)), key=lambda n: -worth[n])[: choice.nodes])
        place = {-1: -1, **{node: i for i, node in enumerate(left)}}
        return [tokens[n] for n in left], [place[parents[n]] for n in left]

    def _run(self, nodes: list[int], tokens: list[int], parents: list[int], ground: _Ground) -> list[Tensor]:
        """Logits [V] after each of `nodes`, all of one level, whose ancestors have been run."""
        branches = ground.add(nodes, parents)
        ids = torch.tensor([[tokens[n] for n in nodes]], device=self._device)
        return list(self._logits(self._open().step(ids, branches)))

    def _logits(self, logits: Tensor) -> Tensor:
        self._steps += 1
        return logits[0, :, : self._vocab]

    def _open(self) -> Runner:
        if self._runner is None:
            raise DraftError("tree: the draft is closed; open a new one for each sequence.")
        return self._runner

    def close(self) -> None:
        self._runner = None

    def counters(self) -> dict[str, float]:
        return {"trees": float(self._trees), "draft_steps": float(self._steps)}


class _Ground:
    """The nodes of a tree that a runner has run, in their order there."""

    def __init__(self) -> None:
        self._run: dict[int, int] = {}

    def add(self, nodes: list[int], parents: list[int]) -> Branches:
        """The rows of a pass over `nodes`, which are run after what was added before."""
        for node in nodes:
            self._run[node] = len(self._run)
        sees = torch.zeros(len(nodes), len(self._run), dtype=torch.bool)
        depth = []
        for row, node in enumerate(nodes):
            height = 0
            while node >= 0:
                sees[row, self._run[node]] = True
                node, height = parents[node], height + 1
            depth.append(height - 1)
        return Branches(sees, torch.tensor(depth))
