"""Modules are known again only as long as nothing in them has been exchanged, moved or listened to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mmaccel.models.fingerprint import ModuleFingerprint


class Other(nn.Linear):
    pass


def layers() -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3, bias=False)) for _ in range(2)
    )


def exchanged(all_: nn.ModuleList) -> None:
    all_[1][2] = nn.Linear(3, 3, bias=False)


def added(all_: nn.ModuleList) -> None:
    all_[0][0].add_module("more", nn.Linear(3, 3))


def reclassed(all_: nn.ModuleList) -> None:
    all_[0][2].__class__ = Other


def another_weight(all_: nn.ModuleList) -> None:
    all_[0][0].weight = nn.Parameter(all_[0][0].weight.detach().clone())


def moved(all_: nn.ModuleList) -> None:
    weight = all_[0][0].weight
    weight.data = weight.data.clone()


def another_layer(all_: nn.ModuleList) -> None:
    all_[0] = nn.Sequential(*all_[0])


@pytest.mark.parametrize("change", [exchanged, added, reclassed, another_weight, moved, another_layer])
def test_a_change_is_seen(change: Callable[[nn.ModuleList], None]) -> None:
    some = layers()
    watched, other = ModuleFingerprint(some), layers()
    assert watched.same(list(some)) and not watched.same(list(other)) and not watched.same(list(some)[:1])
    with torch.no_grad():
        some[0][0].weight.mul_(2)
    assert watched.same(list(some))
    change(some)
    assert not watched.same(list(some))
    assert ModuleFingerprint(some).same(list(some))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_listener_is_heard_wherever_it_is(kind: str) -> None:
    some = layers()
    watched = ModuleFingerprint(some)
    for module in some.modules():
        if module is some:
            continue
        assert not watched.hooked()
        hook = getattr(module, kind)(lambda *_: None)
        assert watched.hooked() and watched.same(list(some))
        hook.remove()
    assert not watched.hooked()
