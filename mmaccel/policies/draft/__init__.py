"""Drafts: who guesses the next tokens for the target to verify. One idea a file; a new one is a file and a line here."""

from mmaccel.policies.draft.off import Off
from mmaccel.policies.draft.sequential import Sequential

__all__ = ["Off", "Sequential"]
