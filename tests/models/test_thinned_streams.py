"""A pruner of frames on a stream: each frame is pruned before it is stored, and the answer is the plain pruned model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import PositionIds, TokenLayout
from mmaccel.core.prefill.prune import Signals, Stage, TokenPruner
from mmaccel.core.recipe import Recipe, stream_policy
from mmaccel.core.registry import registry
from mmaccel.policies.prune import DyCoke, VisionZip
from tests.models.streams import FPS, QUESTION, film
from tests.models.test_recalled import (
    CLOSE,
    FAMILIES,
    FRAMES,
    ROOM,
    SHARP,
    TIGHT,
    TOKENS,
    answer,
    prompt,
    said,
)
from tests.products import product

pytestmark = pytest.mark.in_turn("kv", 4)

ZIP = VisionZip(retention=0.5, contextual=0.4)
PLAIN = replace(ZIP, compact=True)
"""What `ZIP` is on a stream, and what it is compared with."""
KINDS: dict[str, TokenPruner] = {
    "visionzip": ZIP,
    "dycoke": DyCoke(drop=0.6, forget=0.0),
    "dycoke that forgets": DyCoke(drop=0.4, forget=0.7, layer=2, refresh=1.0),
}


@pytest.mark.parametrize(("kv", "kind", "name"), product(ROOM, KINDS, FAMILIES))
def test_with_room_for_all_it_is_the_pruned_model(kv: str, kind: str, name: str) -> None:
    """Of a film of whole groups of four frames, or of as many pairs."""
    inputs, prune = prompt(name), KINDS[kind]
    ids, logits, report = said(name, {"prune": replace(prune, compact=True)}, inputs)
    bare = said(name, {}, inputs)[0]
    assert ids.tolist() != bare.tolist() and len(ids.unique()) > 1
    own = answer(name, {"kv": ROOM[kv], "prune": prune}, "ingest")
    assert own[0] == ids.tolist()
    torch.testing.assert_close(own[1], logits[0], **CLOSE)  # type: ignore[arg-type]
    names = [one for one in report.kv if one.startswith("visual")]
    assert len(names) == 2 + ("forgets" in kind)
    assert [own[2][one] for one in names] == [report.kv[one] for one in names]
    assert own[2]["visual from layer 0"] < 0.8 * own[2]["visual"]
    if kv not in ("full", "window"):  # whose prompts go another way
        called = said(name, {"kv": ROOM[kv], "prune": prune}, inputs)
        assert torch.equal(called[0], ids)
        assert [called[2].kv[one] for one in names] == [report.kv[one] for one in names]
        torch.testing.assert_close(called[1], logits, **CLOSE)  # type: ignore[arg-type]


def test_four_frames_are_a_unit_and_the_last_fill_up(tmp_path: Path) -> None:
    model, prune = SHARP["random-ov"], KINDS["dycoke that forgets"]
    with mmaccel.VideoSession(*model, kv=TIGHT["rekv"], prune=prune) as session:
        for begin, end in ((0, 3), (3, 10), (10, 22)):
            session.watch(film(FRAMES)[begin:end], fps=FPS)
        want = session.ask(QUESTION, TOKENS)
        assert want.counters["units"] == 5 and len(session.shown) == 5
        assert all(one.frames[1] - one.frames[0] == 3 for one in want.evidence) and want.evidence
        session.save(tmp_path / "saved")
    with mmaccel.VideoSession.resume(*model, tmp_path / "saved") as again:
        assert again.ask(QUESTION, TOKENS).ids == want.ids
    filled = torch.cat([film(FRAMES)[:22], film(FRAMES)[21:22].expand(2, -1, -1, -1)])
    with mmaccel.VideoSession(*model, kv="full", prune=prune) as whole:
        whole.watch(filled, fps=FPS)
        answers = [list(whole.ask(QUESTION, TOKENS).ids)]
    with mmaccel.VideoSession(*model, kv="full", prune=replace(prune, forget=0.0)) as whole:
        whole.watch(filled, fps=FPS)
        answers.append(list(whole.ask(QUESTION, TOKENS).ids))
    with mmaccel.VideoSession(*model, kv="full", prune=replace(prune, forget=0.0)) as part:
        part.watch(filled[:22], fps=FPS)
        assert list(part.ask(QUESTION, TOKENS).ids) == answers[1] != answers[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_watch_and_a_frame_too_few_do_not_matter(name: str) -> None:
    """The random Qwen takes two frames a unit: of the last one comes."""
    film_, count = film(FRAMES), FRAMES - 1
    content = [{"type": "video", "video": film_[:count]}, {"type": "text", "text": QUESTION}]
    ids = said(name, {"prune": PLAIN}, SHARP[name][1].chat(content, fps=FPS))[0]
    with mmaccel.VideoSession(*SHARP[name], kv="full", prune=ZIP) as session:
        for begin, end in ((0, 5), (5, 6), (6, count)):
            session.watch(film_[begin:end], fps=FPS)
        assert list(session.ask(QUESTION, TOKENS).ids) == ids.tolist()


def test_the_store_holds_what_is_left() -> None:
    kv = {"name": "offload"}
    whole, left = (answer("random-qwen", {"kv": kv, **more})[2] for more in ({}, {"prune": ZIP}))
    share = left["visual from layer 0"] / left["visual"]
    assert 0.3 < share <= 0.5
    assert (
        whole["seen"] - left["seen"] == left["visual"] - left["visual from layer 0"] and "visual" not in whole
    )


def test_all_that_stays_is_as_it_was() -> None:
    """LLaVA's places are numbers in a row already."""
    for kv in (TIGHT["rekv"], TIGHT["livevlm"]):
        bare, pruned = (
            answer("random-ov", {"kv": kv, **more}) for more in ({}, {"prune": VisionZip(retention=1.0)})
        )
        assert bare[0] == pruned[0]
        torch.testing.assert_close(bare[1], pruned[1], rtol=0, atol=0)


def test_a_saved_session_goes_on_as_before_under_its_own_pruner_alone(tmp_path: Path) -> None:
    model, recipe = SHARP["random-qwen"], {"kv": TIGHT["mosaic"], "prune": ZIP}
    with mmaccel.VideoSession(*model, recipe) as session:
        session.watch(film(12), fps=FPS)
        session.save(tmp_path / "saved")
        session.watch(film(FRAMES)[12:], fps=FPS)
        want = session.ask(QUESTION, TOKENS)
    with mmaccel.VideoSession.resume(*model, tmp_path / "saved") as again:
        assert again.counters()["visual from layer 0"] > 0
        again.watch(film(FRAMES)[12:], fps=FPS)
        assert again.ask(QUESTION, TOKENS).ids == want.ids
    with (
        mmaccel.VideoSession(*model, kv=TIGHT["mosaic"]) as other,
        pytest.raises(ModelError, match="open it with the prune that it was saved with"),
    ):
        other.load(tmp_path / "saved")


def test_a_tower_is_as_before_afterwards() -> None:
    model, processor = SHARP["random-ov"]
    inner: Any = model.model
    before = inner.get_video_features, dict(inner._forward_pre_hooks)
    with mmaccel.VideoSession(model, processor, kv="rekv", prune=ZIP) as session:
        session.watch(film(4), fps=FPS)
        assert (inner.get_video_features, dict(inner._forward_pre_hooks)) == before
    assert "get_video_features" not in vars(inner)


class Uneven(VisionZip):
    """Keeps one more of the first frame than its share says."""

    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def on_stream(self) -> Uneven:
        return self

    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        return torch.arange(layout.length)

    def cut(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Any:
        return super(VisionZip, self).cut(signals, layout, stage, total)


def test_what_gives_frames_unlike_numbers_is_refused() -> None:
    with pytest.raises(
        RecipeError, match="prune 'visionzip' works on the states of a whole prompt, and kv 'rekv'"
    ):
        Recipe(kv="rekv", prune=VisionZip(carry=True))
    model = SHARP["random-ov"]
    for prune, told in (
        (VisionZip(retention=0.001), "keeps none of the"),
        (Uneven(compact=True), "does not leave .* tokens of each unit, as it says"),
    ):
        with (
            mmaccel.VideoSession(*model, kv="rekv", prune=prune) as session,
            pytest.raises(RecipeError, match=told),
        ):
            session.watch(film(4), fps=FPS)
    assert stream_policy(Recipe(kv="rekv", prune=PLAIN)).name == "rekv"


def test_places_anew_are_numbers_in_a_row_on_every_axis() -> None:
    for axes in (1, 3):
        head = torch.arange(4).expand(axes, -1)
        unit = torch.arange(4, 10).expand(axes, -1).clone()
        made = PositionIds(head, unit, torch.arange, 9, 1, 1000).anew(2)
        flat = (lambda x: x) if axes == 1 else (lambda x: x.expand(3, -1))
        line = torch.arange(100)
        assert made.tokens == 2 and made.even and made.limit == 1000
        for got, begin, end in (
            (made.head(), 0, 4),
            (made.units(0, 5), 4, 14),
            (made.own(3, 2), 10, 14),
            (made.chosen(torch.tensor([1, 2]), 5), 6, 10),
            (made.cells(torch.tensor([2, 3, 4]), 3), 6, 9),
            (made.after(5, 0, 0, 3), 14, 17),
            (made.after(5, 2, 0, 5), 14, 19),
        ):
            assert torch.equal(got, flat(line[begin:end])), (axes, begin)
        assert made.ends(5, 0, 3) == (16, 17)


def test_every_pruner_of_the_target_has_a_part_in_a_stream_or_is_refused() -> None:
    acts = {name: registry("prune").build(name, {}).on_stream() for name in registry("prune")}
    told = {name for name, one in acts.items() if one is not None}
    assert told == {"dycoke", "fastv", "pyramid_drop", "sparsevlm", "visionzip"}
