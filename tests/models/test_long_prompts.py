"""A long prompt through an accelerated model: no tensor is larger than the hidden states, and pieces change nothing."""

from __future__ import annotations

import pytest
import torch

import mmaccel
from mmaccel.backends import reference
from mmaccel.core.attach import adapter_for
from mmaccel.models import modules
from mmaccel.models.install import Hooks
from tests.models.tiny_random import BUILD, prompt
from tests.spies import Largest

N = 2048
SPARSE = {
    "a_shape": dict(name="a_shape", sink=16, window=64),
    "vertical_slash": dict(name="vertical_slash", vertical=16, slash=8, last_q=16),
    "grid": dict(name="grid", min_stride=8, max_stride=16, last_q=16),
}


@pytest.fixture(params=list(BUILD))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return BUILD[request.param](layers=1)


def text() -> dict[str, torch.Tensor]:
    return prompt("llava", [("text", N)])


@pytest.mark.parametrize("sparse", list(SPARSE))
def test_nothing_is_larger_than_the_hidden_states(
    model: torch.nn.Module, sparse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the feed-forward's inner rows, not the logits of the prompt, not an entry for every pair of tokens."""
    inputs = text()
    monkeypatch.setattr(reference, "BUDGET", 1 << 14)
    hidden = N * 64
    seen = {}
    for rows in (1 << 15, 256):
        monkeypatch.setattr(modules, "ROWS", rows)
        with torch.no_grad(), mmaccel.accelerate(model, sparse=SPARSE[sparse]) as fast, Largest() as largest:
            out = model(**inputs, logits_to_keep=1)
            assert fast.report().kept < 0.6
        seen[rows] = largest.entries, out.logits
    assert seen[1 << 15][0] >= 2 * hidden
    assert seen[256][0] < 1.3 * hidden
    torch.testing.assert_close(seen[256][1], seen[1 << 15][1], rtol=0, atol=1e-5)


def test_pieces_of_a_batch_and_with_gradients(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = model.model.language_model.norm
    hidden = torch.randn(3, 100, 64, generator=torch.Generator().manual_seed(0))
    whole = norm(hidden)
    monkeypatch.setattr(modules, "ROWS", 33)
    hooks = Hooks()
    modules.in_chunks(hooks, [norm], adapter_for(model))  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(norm(hidden), whole, rtol=0, atol=1e-6)
    norm(hidden.requires_grad_()).sum().backward()
    assert hidden.grad is not None and "forward" in norm.__dict__
    hooks.close()
    assert "forward" not in norm.__dict__
