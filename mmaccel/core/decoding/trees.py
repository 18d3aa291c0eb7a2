"""Verification of a token tree with the target's logits; `draft.accept` verifies chains."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.core.decoding.draft import Proposal, Warp, as_probability_dtype, sample_index, validate
from mmaccel.core.errors import DraftError


def accept_tree(
    proposal: Proposal,
    logits: Tensor,
    ids: Tensor,
    warp: Warp | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens to commit, [k + 1] long, and the path [k] of accepted tree tokens among them, from the root down.

    logits [n + 1, V]: row 0 follows the last committed token, row i + 1 the branch that ends in token i. From the root on,
    the target chooses (or samples) its own next token; while a child equals it, the walk continues below that child.
    Sampled tokens have the target's own distribution, and no method accepts more: as children are chosen
    deterministically, rejection sampling would accept with the same probability, the target's mass on all siblings.
    """
    validate(proposal)
    assert proposal.parents is not None
    tokens, parents = proposal.ids.cpu(), proposal.parents.cpu()
    if logits.shape[0] != tokens.numel() + 1:
        raise DraftError(
            f"{tokens.numel()} proposed tokens need {tokens.numel() + 1} rows of logits; {logits.shape[0]} were given."
        )
    if warp is None:
        # Made before the device is waited for, which has the step to do meanwhile.
        tokens, sees = mask_repeated_siblings(tokens, parents), proposal.branches.sees
        best = logits.argmax(-1).cpu()
        path = accepted_tree_tokens(tokens, parents, sees, best).nonzero()[:, 0]
        return best[torch.nn.functional.pad(path + 1, (1, 0))].to(logits.device), path
    said, nodes = ids.to(logits.device), [-1]
    while True:
        said = torch.cat(
            [said, sample_index(as_probability_dtype(warp(said, logits[nodes[-1] + 1])), generator)]
        )
        child = ((parents == nodes[-1]) & (tokens == int(said[-1]))).nonzero()
        if not len(child):
            return said[ids.numel() :], torch.tensor(nodes[1:], dtype=torch.long)
        nodes.append(int(child[0]))


def mask_repeated_siblings(ids: Tensor, parents: Tensor) -> Tensor:
    """Return tree tokens `ids` [n] in which each token that repeats an earlier child of the same parent is replaced by
    -1."""
    equal = (ids[:, None] == ids) & (parents[:, None] == parents)
    return ids.masked_fill(equal.tril(-1).any(-1), -1)


def accepted_tree_tokens(ids: Tensor, parents: Tensor, sees: Tensor, best: Tensor) -> Tensor:
    """Return which tree tokens are accepted, [n] bool: the branch whose tokens are the target's own choices.

    ids [n] (from `mask_repeated_siblings`) and parents [n] are the tree; `sees` [n + 1, n + 1] that of its `TokenTree`; best
    [n + 1]: the target's choice after the last committed token and after each tree token. Static shapes, no device read.
    """
    return ((best[parents + 1] == ids) | ~sees[1:, 1:]).all(-1)
