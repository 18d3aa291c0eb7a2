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

    A pattern: sizes, lists, no pair of the future or of padding, none counted twice, its upper bound. A memory of sequences:
    lengths, rollback, questions, beams; one of streams: passes, positions of its rows, that a question changes nothing,
    restoring. A draft: that a toy target's text does not change and nothing fails. A pruner: what it declares and keeps.

    Prompts have 20 to 600 tokens: give fields small enough to leave something out of these. `rounds` prompts of `seed` are
    tested; of a pattern, it warns if they leave nothing out of any, and if a row sees no key at all. It does not measure
    how good the policy is.
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
            f"policy: {quoted(policy)} is none; give an instance of a pattern, a memory, a draft or a pruner."
        )
