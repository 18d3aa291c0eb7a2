"""What a draft promises: it declares how far it looks back, fails nowhere, and leaves the target's text as it is."""

from __future__ import annotations

import torch

from mmaccel.contract.toy import Meter, ToyRunner, alone, bigram, prompt, view
from mmaccel.core.draft import DraftStrategy
from mmaccel.core.errors import RecipeError
from mmaccel.core.generate import speculate

VOCAB, TOKENS = 6, 25
RULE = bigram(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)))
"""Its greedy text goes round in a circle, so that looking back finds what comes."""


def check_draft(strategy: DraftStrategy) -> None:
    """Raise `RecipeError` where the contract is broken, on a toy target of six tokens, decoded greedily."""
    who = f"draft {strategy.name!r}"
    if not strategy.needs <= {"rollback", "memory", "prompt"}:
        raise RecipeError(
            f"{who}: needs is {sorted(strategy.needs)}; give some of 'memory', 'prompt' and 'rollback'."
        )
    if strategy.place not in ("same", "stream", "process"):
        raise RecipeError(f"{who}: place is {strategy.place!r}; give 'same', 'stream' or 'process'.")
    if strategy.lookback < 0 or (strategy.lookback > 0) != ("rollback" in strategy.needs):
        raise RecipeError(
            f"{who}: lookback is {strategy.lookback} and needs {sorted(strategy.needs)}; name 'rollback' in needs where "
            "lookback is more than 0, and there alone."
        )
    if "memory" in strategy.needs:
        # The toy has no memory to read: models alone can try this one.
        return
    draft = strategy.open(view(RULE, VOCAB))
    said, target, meter = prompt([3, 1], max_new_tokens=TOKENS - 2), ToyRunner(RULE), Meter()
    draft.begin(said)
    ids = speculate(
        target, draft, said, target.prefill(said.inputs), stop=lambda ids: ids.shape[1] >= TOKENS, meter=meter
    )
    if meter.failures:
        raise RecipeError(f"{who}: it fails with {meter.failures[0].rstrip('.')}; fix it.")
    if ids[0].tolist() != alone(RULE, [3, 1], lambda ids: ids.shape[1] >= TOKENS):
        raise RecipeError(f"{who}: the text is not the target's own; leave what the target holds as it was.")
    most = max((proposed for proposed, _ in meter.rounds), default=0)
    if most and most + 1 > strategy.lookback:
        raise RecipeError(
            f"{who}: {most} tokens were proposed and lookback is {strategy.lookback}; give one more than the most proposed."
        )
    told = draft.counters()
    if not all(isinstance(value, float) for value in told.values()):
        raise RecipeError(f"{who}: counters gives {told}; give a float for each name.")
    notes = draft.notes()
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise RecipeError(f"{who}: notes gives {notes!r}; give a list of sentences.")
    draft.close()  # a second time does no harm
