"""Which backend one gets, and what one is told instead of it."""

from __future__ import annotations

import pytest
import torch

from mmaccel.backends import flex, ops, select
from mmaccel.core.errors import RecipeError, UnknownName


def test_reference_runs_everywhere() -> None:
    for device in ("cpu", "cuda", "meta"):
        assert select.usable(device)["reference"] is None
    assert set(select.usable("cpu")) == set(select.BACKENDS)


def test_a_named_backend_is_that_backend() -> None:
    assert select.get("reference", "cpu") is ops.block_attend
    assert select.get("flex", "cpu") is flex.op


def test_auto_is_one_that_runs() -> None:
    name = select.choose("cpu")
    assert select.usable("cpu")[name] is None
    assert select.get("auto", "cpu") is select.get(name, "cpu")
    assert select.choose("meta") == "reference"


def test_an_unknown_name_tells_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown backend 'referense': did you mean 'reference'\?"):
        select.get("referense", "cpu")


def test_what_cannot_run_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RecipeError, match=r"'flex' cannot run on meta: .*; choose 'auto' or one of 'reference'"
    ):
        select.get("flex", torch.device("meta"))
    monkeypatch.setitem(select.BACKENDS, "absent", "mmaccel.backends.no_such_kernel")
    assert select.usable("cpu")["absent"] == "it needs mmaccel.backends.no_such_kernel"
    with pytest.raises(RecipeError, match="backend 'absent' cannot run on cpu: it needs"):
        select.get("absent", "cpu")
