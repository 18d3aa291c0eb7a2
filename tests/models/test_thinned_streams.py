"""Pruners on memories: of frames before they are stored, of what a decoded token sees, on a memory that lets columns go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.core.prefill.prune import Signals, Stage, TokenPruner, top_indices
from mmaccel.core.prefill.recalled import RetrievedTokenPruning
from mmaccel.core.recipe import Recipe, stream_policy
from mmaccel.core.registry import registry
from mmaccel.core.streams.asking import run_question as asked_of
from mmaccel.policies.kv import Window
from mmaccel.policies.prune import DyCoke, FastV, PyramidDrop, SparseVLM, VisionZip
from tests.models.streams import FPS, QUESTION, film
from tests.models.test_recalled import (
    CLOSE,
    DEPTH,
    FAMILIES,
    FRAMES,
    ROOM,
    SHARP,
    TIGHT,
    TOKENS,
    answer,
    paid,
    prompt,
    said,
    session,
    watched,
)
from tests.spies import crossed, heard, returned

ZIP = VisionZip(retention=0.5, contextual=0.4)
PLAIN = replace(ZIP, compact=True)
"""What `ZIP` is on a stream, and what it is compared with."""
KINDS: dict[str, TokenPruner] = {
    "visionzip": ZIP,
    "dycoke": DyCoke(drop=0.6, forget=0.0),
    "dycoke that forgets": DyCoke(drop=0.4, forget=0.7, layer=2, refresh=1.0),
}


@crossed(kv=ROOM, kind=KINDS, name=FAMILIES)
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
    answers = []
    for count, one in ((24, prune), (24, replace(prune, forget=0.0)), (22, replace(prune, forget=0.0))):
        with mmaccel.VideoSession(*model, kv="full", prune=one) as whole:
            whole.watch(filled[:count], fps=FPS)
            answers.append(whole.ask(QUESTION, TOKENS).ids)
    assert answers[2] == answers[1] != answers[0]


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
    assert whole["seen"] - left["seen"] == left["visual"] - left["visual from layer 0"]
    assert "visual" not in whole


def test_all_that_stays_is_as_it_was() -> None:
    """LLaVA's positions are numbers in a row already."""
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

    def for_stream(self) -> Uneven:
        return self

    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        return torch.arange(layout.length)

    def prune(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Any:
        return super(VisionZip, self).prune(signals, layout, stage, total)


def test_what_gives_frames_unlike_numbers_is_refused() -> None:
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


def test_every_pruner_of_the_target_has_a_part_in_a_stream_or_is_refused() -> None:
    acts = {name: registry("prune").build(name, {}).for_stream() for name in registry("prune")}
    told = {name for name, one in acts.items() if one is not None}
    assert told == {"dycoke", "fastv", "pyramid_drop", "sparsevlm", "visionzip"}


@dataclass(frozen=True, kw_only=True)
class Both(FastV):
    """Drops between layers, and of what is left a decoded token sees a part; every other one chooses anew."""

    @property
    def scoring_layer(self) -> int:
        return 1

    def recalled_columns(self, attention: Tensor, columns: Tensor, before: Tensor | None) -> Tensor | None:
        LOOKS.append((attention, columns, before))
        if len(attention) and len(LOOKS) % 2 == 0:
            return None
        return columns[top_indices(attention, len(columns) // 2)]


LOOKS: list[tuple[Tensor, Tensor, Tensor | None]] = []


@pytest.mark.parametrize("kv", ("full", "rekv", "mosaic"))
def test_a_decoded_token_sees_what_it_looked_at(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its attention in the scoring layer, or in each layer that shows units of its own."""
    views: list[tuple[int, KVView, KVView, int]] = []

    def see(pruning: RetrievedTokenPruning, layer: int, whole: KVView, left: KVView) -> None:
        if pruning._pass.kind == "answer":
            views.append(
                (layer, whole, left, pruning._stream.head + pruning.state.count_summary_columns(layer))
            )

    watched(monkeypatch, see)
    LOOKS.clear()
    steps = 5
    with session("random-ov", {"kv": TIGHT[kv], "prune": Both(layer=2, retention=0.5)}) as one:
        live = one._live
        with asked_of(live, QUESTION, 8) as asked:
            kept = {layer: columns.clone() for layer, columns in asked.state._columns.items()}  # type: ignore[attr-defined]
            start = asked.length()
            for n in range(steps):
                asked.step(torch.tensor([[5 + n]]))
            rows = start - asked.state._start  # type: ignore[attr-defined]
    unlike = kv != "full"
    assert len(views) == steps * DEPTH and sorted(kept) == [2, 3]
    told, chosen, past = iter(LOOKS), {}, {}
    for number, (layer, whole, left, first) in enumerate(views):
        base = whole.key.shape[2] - rows - 1 - number // DEPTH
        own = kept.get(layer, torch.arange(base))
        at = own[own >= first]
        looks = layer > 1 if unlike else layer == 1
        if looks:
            attention, columns, before = next(told)
            assert whole.query is not None and torch.equal(columns, at)
            torch.testing.assert_close(attention, paid(whole.query, whole.key)[at])
            assert (before is None) == (layer not in past)
            assert before is None or torch.equal(before, past[layer])
            past[layer] = attention
            index = next(i for i, one in enumerate(LOOKS) if one[0] is attention)
            if index % 2 == 0:
                chosen[layer] = columns[top_indices(attention, len(columns) // 2)]
        seen = chosen.get(layer if unlike else 1) if layer > 1 else None
        shown = own if seen is None else torch.cat([torch.arange(first), seen[torch.isin(seen, own)]])
        shown = torch.cat([shown, torch.arange(base, whole.key.shape[2])])
        assert torch.equal(left.key, whole.key[:, :, shown])
        assert torch.equal(left.value, whole.value[:, :, shown])
    assert next(told, None) is None and len(past) == (2 if unlike else 1)


PRUNERS: dict[str, TokenPruner] = {
    "fastv": FastV(retention=0.2),
    "pyramid_drop": PyramidDrop(),
    "sparsevlm": SparseVLM(layers=(0, 1), retention=(0.5, 0.2)),
    "visionzip": VisionZip(retention=0.5),
    "dycoke": DyCoke(layer=2, forget=0.6, refresh=1.0),
    "dycoke that drops nothing": DyCoke(layer=2, drop=0.0, forget=0.6, refresh=1.0),
}


@crossed(kind=PRUNERS, name=FAMILIES)
def test_a_window_with_room_for_all_is_the_pruned_model_and_what_goes_is_gone(kind: str, name: str) -> None:
    """A window that is shorter than what is left of the prompt holds less, and says something else."""
    kvs = ("full", Window(window=4096), Window(window=40, margin=8))
    full, roomy, tight = (said(name, {"kv": kv, "prune": PRUNERS[kind]}, prompt(name)) for kv in kvs)
    assert torch.equal(full[0], roomy[0]) and len(full[0].unique()) > 1
    torch.testing.assert_close(roomy[1], full[1], **CLOSE)  # type: ignore[arg-type]
    for at in ("visual", "held_mean"):
        assert roomy[2].kv[at] == full[2].kv[at]
    assert tight[2].kv["held"] <= 4 + 40 + 8 + 1 < full[2].kv["held"] and tight[2].kv["visual"] > 0
    assert not torch.equal(full[1], tight[1])


def test_a_decoded_token_chooses_among_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DyCoke forgets, on a window: of the tokens that the window still shows, and at each step of those."""
    asked = heard(monkeypatch, DyCoke, "recalled_columns", lambda self, *given: given)

    def told(made: Any, self: Any, layer: Any, query: Any) -> Any:
        return layer, query, made

    views: list[tuple[int, Tensor, KVView]] = returned(monkeypatch, PrunedKVState, "view", told)
    prune = DyCoke(layer=2, drop=0.0, forget=0.5, refresh=1.0)
    kv, inputs = Window(window=70, margin=30), prompt("random-qwen")
    model = SHARP["random-qwen"][0]
    with mmaccel.accelerate(model, kv=kv, prune=prune) as fast:
        layout = fast.adapter.layout(model, inputs)
        fast.generate(**inputs, max_new_tokens=5, do_sample=False)
    visual, seen = prune.candidates(layout), [one for one in views if one[1].shape[2] == 1]
    assert len(asked) == 4 == len(seen) // DEPTH
    for step, (attention, columns, before) in enumerate(asked):
        last = layout.length + step
        line = torch.arange(last + 1)
        within = line[(line < 4) | (line > last - 70)]
        want = visual[torch.isin(visual, within)]
        assert torch.equal(columns, want) and 0 < len(want) < len(visual)
        glance, later = (seen[step * DEPTH + layer] for layer in (1, 2))
        assert (glance[0], later[0]) == (1, 2) and glance[2].column is not None
        unseen = ~torch.isin(glance[2].column, within)
        assert bool(unseen.any()) and torch.isin(within, glance[2].column).all()
        looked = paid(glance[1], glance[2].key, unseen=unseen)
        torch.testing.assert_close(attention, looked[torch.isin(glance[2].column, want)])
        if before is not None:
            old = asked[step - 1]
            torch.testing.assert_close(before, old[0][torch.isin(old[1], want)])
        chosen = want[attention.topk(int(0.5 * len(want) + 1e-9)).indices]
        shown = later[2].column
        inside = shown[torch.isin(shown, within)]
        text = within[~torch.isin(within, visual)]
        assert torch.equal(inside, torch.cat([text, chosen]).sort().values)
        assert not torch.isin(shown, visual[~torch.isin(visual, chosen)]).any()
