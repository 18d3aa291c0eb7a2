"""Every family keeps its promises on tiny models of transformers' own classes; one that breaks them is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.attach import family_of
from mmaccel.core.errors import ModelError
from mmaccel.core.registry import registry
from mmaccel.models import deepstack
from mmaccel.models.qwen2_5_vl import Qwen25VL
from mmaccel.models.qwen3_vl import Qwen3VL
from tests.models.tiny_random import sampler

KINDS = sorted(kind for family in registry("model").values() for kind in family.model_types)
pytestmark = pytest.mark.numeric(by="torch")


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_its_promises(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = mmaccel.check_family(sampler(kind).kind)
    assert all(kept for _, _, kept in rows) and len(rows) > 20
    assert f"{kind} ({family_of(kind).name})" in capsys.readouterr().out


def _lost(given: Any, columns: Any) -> dict[str, Any]:
    whole = PLAIN(given, columns)
    return {**whole, deepstack.FEATURES: [one * 0 for one in whole[deepstack.FEATURES]]}


def _backwards(self: Any, model: Any, inputs: Any) -> Any:
    made = Qwen25VL.layout(self, model, inputs)
    return replace(made, frame=torch.where(made.frame < 0, made.frame, made.frame.max() - made.frame))


PLAIN = deepstack.of_columns
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "features that chunks lose": (deepstack, "of_columns", _lost, "dense in chunks"),
    "frames that follow each other": (Qwen3VL, "grids", Qwen25VL.grids, "placeholders"),
    "frames from the last to the first": (Qwen3VL, "layout", _backwards, "columns of frames"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, said = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(ModelError, match=said):
        mmaccel.check_family(sampler("qwen3_vl").kind, quiet=True)


def test_a_family_without_a_tiny_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3VL, "tiny", {})
    with pytest.raises(ModelError, match="does not say how a tiny 'qwen3_vl' is made"):
        mmaccel.check_family(sampler("qwen3_vl").kind)
