"""No draft is a draft that proposes nothing."""

from __future__ import annotations

import torch

from mmaccel.core.decoding.generate import speculate
from mmaccel.policies.draft import Off
from tests.core.toy import Meter, ToyRunner, alone, bigram, prompt, view


def test_off_decodes_one_token_a_step() -> None:
    rule = bigram(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))
    assert not Off().active and Off().max_rollback == 0
    draft, said, target, meter = Off().open(view(rule, 5)), prompt([2]), ToyRunner(rule), Meter()
    draft.begin(said)
    ids = speculate(
        target, draft, said, target.prefill(said.inputs), stop=lambda ids: ids.shape[1] >= 12, meter=meter
    )
    assert ids[0].tolist() == alone(rule, [2], lambda ids: ids.shape[1] >= 12)
    assert meter.rounds == [(0, 0)] * 10 and target.steps == 10
