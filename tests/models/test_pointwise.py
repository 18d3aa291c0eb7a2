"""What is put in the place of norms, gates and rotations computes what they do, and goes away again."""

from __future__ import annotations

import pytest
import torch

import mmaccel
from mmaccel.backends.ops import layer_ops
from tests.models.tiny_random import BUILD, prompt


@pytest.mark.parametrize("family", list(BUILD))
def test_a_model_says_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operators, in their plain form here, in the place of a model's own steps."""
    model = BUILD[family](layers=2)
    inputs = prompt("llava", [("text", 200)])
    with torch.no_grad():
        wanted = model(**inputs).logits
    calls: dict[str, int] = {}

    def counted(name: str):
        op = getattr(layer_ops, name)

        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            return op(*args)

        return call

    for name in ("rms_norm", "silu_times_", "rotate_"):
        monkeypatch.setattr(layer_ops, name, counted(name))
    monkeypatch.setattr(layer_ops, "fusible", lambda x: True)
    attention = model.model.language_model.layers[0].self_attn
    with mmaccel.accelerate(model, "dense"):
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
        assert calls == {"rms_norm": 5, "silu_times_": 2, "rotate_": 4}
        # Where gradients are wanted nothing is done in place.
        calls.clear()
        torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
        assert calls == {} and "forward" in attention.__dict__
    assert "forward" not in attention.__dict__
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, wanted)
    assert calls == {}
