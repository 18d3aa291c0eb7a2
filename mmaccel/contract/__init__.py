"""Contract tests of policies, on small random prompts: for your own policies, and for our tests."""

from __future__ import annotations

from typing import Any

from mmaccel.contract.draft import check_draft
from mmaccel.contract.family import check_family
from mmaccel.contract.memory import check_memory
from mmaccel.contract.prefill import check_pattern, check_pruner
from mmaccel.core.decoding.draft import DraftStrategy
from mmaccel.core.errors import RecipeError, quoted
from mmaccel.core.memory.kv import KVPolicy
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import Policy, check_registered

__all__ = ["check_family", "check_policy"]


def check_policy(policy: Any, *, rounds: int = 12, seed: int = 0) -> None:
    """Test a policy (an instance) against its contract; raises `RecipeError` in one sentence for the first violation.

    Of a sparse pattern it tests the plans: shapes and block lists, that no pair is in the future, in padding or counted
    twice, and that no more blocks are listed than `max_blocks_total` says. Of a KV policy for sequences: column counts,
    rollback, questions that leave no columns behind, and reordered batch rows. Of one for streams: its passes, the positions
    of its columns, that a question changes nothing, restoring a checkpoint, and loading what it saved. Of a draft: that a
    toy target's text does not change and nothing fails. Of a pruner: that it keeps valid columns, the same at each call.

    Prompts are random, `rounds` of them from `seed`, with 20 to 600 tokens: choose the policy's fields small enough that it
    leaves something out of them. It warns if a pattern leaves nothing out of any prompt, or if a row sees no key at all. It
    does not measure how good the policy is.
    """
    if isinstance(policy, Policy):
        check_registered(policy)
    if isinstance(policy, SparsePattern):
        check_pattern(policy, rounds, seed)
    elif isinstance(policy, TokenPruner):
        check_pruner(policy, rounds, seed)
    elif isinstance(policy, KVPolicy):
        check_memory(policy)
    elif isinstance(policy, DraftStrategy):
        check_draft(policy)
    else:
        raise RecipeError(
            f"policy: {quoted(policy)} is not a policy; give an instance of a pattern, a memory, a draft or a pruner."
        )
