"""Questions and answers whose layers are computed without their modules: the same words, and only where that is sound."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import mmaccel
from mmaccel.models import layers
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, pair

KV = every_stream(frames=6, window=8)


def opened(name: str, kv: Any) -> mmaccel.VideoSession:
    model, processor = pair(name)
    session = mmaccel.VideoSession(copy.deepcopy(model), processor, None, kv=kv)
    session.watch(film(25), fps=FPS)
    return session


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
@pytest.mark.parametrize("kv", ["mosaic", "rekv", "full", "livevlm"])
def test_few_rows_say_what_the_modules_say(name: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, by_hand = [], layers.FewRows.run

    def noted(seam: Any, run: Any, embeds: Any, hidden: bool) -> Any:
        passes.append(len(embeds))
        return by_hand(seam, run, embeds, hidden)

    monkeypatch.setattr(layers.FewRows, "run", noted)
    with opened(name, KV[kv]) as session:
        wanted, said = logits(session), session.ask(QUESTION, 6)
        assert not passes
        monkeypatch.setattr(layers, "DEVICES", ("cpu",))
        found, again = logits(session), session.ask(QUESTION, 6)
    assert (found - wanted).abs().max() <= 1e-4 and again.ids == said.ids
    # A question, twice, and the words of an answer one by one.
    assert len(passes) >= 3 and max(passes) <= layers.WIDTHS[-1] and min(passes) == 1


def test_listeners_and_long_questions_go_through_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(layers, "DEVICES", ("cpu",))
    monkeypatch.setattr(layers.FewRows, "run", never)
    with opened("random-ov", KV["rekv"]) as session:
        with pytest.raises(AssertionError):
            logits(session)
        heard = []
        layer: Any = session._seam.family.layers(session._seam.model)[0]
        hook = layer.register_forward_pre_hook(lambda *_: heard.append(1))
        logits(session)
        hook.remove()
        assert heard
        monkeypatch.setattr(layers, "WIDTHS", (1, 4))
        logits(session)
