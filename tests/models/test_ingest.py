"""A stored video taken in by `ingest`: frames see all before them, whatever the window, or what the pattern lists."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import mmaccel
from mmaccel import media
from mmaccel.core.errors import MmaccelWarning, ModelError, RecipeError
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.prefill import attention
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.core.streams import sources
from mmaccel.core.streams.sources import Clip, regroup_clips_by_pass
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.models import chat
from mmaccel.policies.kv._ingest import IngestState
from tests.media.films import write_film
from tests.models.streams import CLUSTERS, FPS, QUESTION, film, logits, open_session, pair, plain, said
from tests.spies import crossed, heard, returned

pytestmark = pytest.mark.numeric(by="torch")


EQUAL = 1e-5
FRAMES = 22
ARCHIVED: dict[str, Any] = {"frames": 64, "window": 6, "local": 3, "positions": "original"}
ROOMY: dict[str, dict[str, Any]] = {
    # Windows are small: what is encoded under them alone is another.
    "rekv": {"name": "rekv", **ARCHIVED},
    "mosaic": {"name": "mosaic", **ARCHIVED, "index": CLUSTERS, "encode_frames": 0},
    "mosaic retrieving": {"name": "mosaic", **ARCHIVED, "index": CLUSTERS, "encode_frames": 2},
    "recent": {"name": "recent", "window": 64, "local": 64, "positions": "original"},
    "window": {"name": "window", "window": 1 << 16},
    "livevlm": {"name": "livevlm", "frames": 64, "recall": 1.0},
    "streammem": {"name": "streammem", "frames": 64, "similar": None},
    "offload": {"name": "offload"},
    "full": {"name": "full"},
    "no_cache": {"name": "no_cache"},
}
NAMES = ("random-ov", "random-qwen")


def test_every_memory_that_ingests_is_here() -> None:
    streams = {name: cls for name, cls in registry("kv").items() if issubclass(cls, StreamPolicy)}
    assert {one["name"] for one in ROOMY.values()} == {name for name, cls in streams.items() if cls.ingests}


@crossed(name=NAMES, kv=ROOMY, chunk=[None, 64])
def test_with_room_for_all_an_ingested_film_is_the_plain_model_s(
    name: str, kv: str, chunk: int | None
) -> None:
    with open_session(name, "full") as whole, open_session(name, ROOMY[kv], chunk=chunk) as session:
        whole.watch(film(FRAMES), fps=FPS)
        assert session.ingest(film(FRAMES), fps=FPS) == FRAMES
        assert (logits(session) - logits(whole)).abs().max() <= EQUAL
        assert session.ask(QUESTION, 4).text == whole.ask(QUESTION, 4).text == said(name, FRAMES, 4)
        assert (logits(session) - plain(name, FRAMES)).abs().max() <= 1e-4


@crossed(kv=ROOMY, name=NAMES)
def test_the_passes_of_a_film_do_not_hang_on_how_its_frames_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str, name: str
) -> None:
    """A path, iterators of clips and one tensor have the same passes under a pattern, and leave the same bits."""
    path = write_film(tmp_path / "film.mp4", 18, fps=2, height=42, width=70)
    shown = media.read(path, fps=FPS).frames
    monkeypatch.setattr(chat, "READ_FRAMES", 4)
    passes = heard(monkeypatch, StreamRunner, "encode_frames", lambda self, frames: len(frames))

    def ingested(video: Any, begun: int = 0) -> tuple[list[int], dict[str, Tensor]]:
        how: dict[str, Any] = {"sparse": FEW["a_shape"], "chunk": 64, "backend": "reference"}
        with open_session(name, ROOMY[kv], begun, **how) as session:
            passes.clear()
            assert session.ingest(video, fps=FPS) == len(shown) - begun
            session.save(folder := tmp_path / str(len(list(tmp_path.iterdir()))))
            files = sorted(folder.glob("data-*/memory/**/*.safetensors"))
            return list(passes), {f"{one.name} {n}": x for one in files for n, x in load_file(one).items()}

    whole = ingested(shown)
    assert len(whole[0]) > 2 and whole[1]
    cuts = iter(shown.split(3)), (list(part) for part in shown.split([1, 1, 5, len(shown) - 7]))
    clips = (
        replace(one, clock=one.clock - one.clock[0]) for one in media.clips(path, fps=FPS, frames_per_clip=5)
    )
    for video in (path, clips, *cuts):
        found = ingested(video)
        assert found[0] == whole[0] and found[1].keys() == whole[1].keys()
        assert all(torch.equal(x, whole[1][n]) for n, x in found[1].items())
    # A unit that was begun before is a part of the first pass.
    rest = shown[3:]
    assert ingested(rest, 3)[0] == ingested(iter(rest.split(5)), 3)[0]
    # What waits for its pass is bounded: a pass takes fewer units then, of a tensor as well.
    monkeypatch.setattr(sources, "WAITING", 4 * shown[0].numel())
    assert max(ingested(shown)[0]) == max(ingested(path)[0]) == 4


def test_frames_of_another_size_or_rate_begin_a_pass_of_their_own() -> None:
    def clip(count: int, fps: float = FPS, wide: int = 8, known: bool = False) -> Clip:
        times = [n / fps for n in range(count)] if known else None
        return Clip(torch.zeros(count, 3, 8, wide, dtype=torch.uint8), times, fps, part=True)

    def cut(*clips: Clip) -> list[int]:
        given = (one for one in clips)
        return [len(one.frames) for one in regroup_clips_by_pass(given, lambda one: 4, lambda one: None)]

    assert cut(clip(3), clip(3), clip(3)) == [4, 4, 1] and cut(clip(9)) == [4, 4, 1]
    assert cut(clip(3), clip(3, wide=9), clip(2, wide=9)) == [3, 4, 1]
    assert cut(clip(3), clip(3, fps=3.0)) == [3, 3] and cut(clip(3), clip(3, known=True)) == [3, 3]
    joined = [
        *regroup_clips_by_pass((clip(2, known=True) for _ in range(2)), lambda one: 4, lambda one: None)
    ]
    assert joined[0].times == [0.0, 0.5, 1.0, 1.5], "times that begin anew go on"


@pytest.mark.parametrize("none", [film(9)[:0], [], iter([film(9)[:0]]), iter([film(3), []])])
def test_no_frames_are_refused_by_the_name_of_the_call(none: Any) -> None:
    with open_session("random-ov", "rekv") as session:
        with pytest.raises(ModelError, match="ingest: the clip has no frames"):
            session.ingest(none)
        with pytest.raises(ModelError, match="watch: the clip has no frames"):
            session.watch(film(9)[:0])
        assert len(session) == 0


@pytest.mark.parametrize("kv", ["rekv", "mosaic retrieving"])
def test_live_frames_go_on_under_the_window(kv: str, name: str = "random-ov") -> None:
    """After an ingestion the window is what it would be after any other: how the rest is cut changes nothing."""
    fields = {**ROOMY[kv], "encode_frames": 0}
    found = []
    for cuts in ([8], [1, 3, 4]):
        with open_session(name, fields) as session:
            session.ingest(film(14), fps=FPS)
            told = session.counters()
            assert told["window"] == 6 and told["units"] == 14 and told["host_units"] == 2 * 8
            assert told["ingested"] == 14 and told["ingest_seen"] == 1
            for part in film(FRAMES)[14:].split(cuts):
                session.watch(part, fps=FPS)
            found.append(logits(session))
    assert (found[0] - found[1]).abs().max() <= EQUAL


@pytest.mark.parametrize("kv", ["rekv", "mosaic retrieving", "recent"])
def test_frames_see_no_further_than_they_are_told_to(kv: str, name: str = "random-ov") -> None:
    """Of `ingest_frames` frames and of what is retrieved: that differs from all."""
    fields = {**ROOMY[kv], "ingest_frames": 8}
    with open_session(name, fields, chunk=64) as session, open_session(name, "full") as whole:
        for one in (session, whole):
            one.ingest(film(FRAMES), fps=FPS)
        told = session.counters()
        assert 0.3 < told["ingest_seen"] < 0.8 and told["ingested"] == FRAMES
        assert (logits(session) - logits(whole)).abs().max() > 100 * EQUAL
        if kv == "mosaic retrieving":
            assert told["host_bytes_in"] > 0
    with open_session(name, {**fields, "ingest_frames": FRAMES}, chunk=64) as session:
        session.ingest(film(FRAMES), fps=FPS)
        assert session.counters()["ingest_seen"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_film_longer_than_the_positions_keeps_its_positions_within_them(name: str, monkeypatch) -> None:
    """Two ways to the same view: a base is taken from positions, or the film is seen `ingest_frames` at a time."""
    from mmaccel.core.layout import PositionIds

    taken: list[int] = returned(monkeypatch, PositionIds, "positions_by_time", lambda out, *_: int(out.max()))
    model, _ = pair(name)
    config = model.config.text_config
    monkeypatch.setattr(config, "max_position_embeddings", 150 if name == "random-ov" else 24)
    kv = {"name": "rekv", "frames": 2, "window": 2, "local": 1, "encode_frames": 1}
    with open_session(name, kv, chunk=64) as session:
        session.ingest(film(25).repeat(2, 1, 1, 1), fps=FPS)
        live = session._live
        assert live is not None
        assert live.stream.positions.largest_position(live.state.units()) > live.stream.positions.limit
        assert 0 < session.counters()["ingest_seen"] < 1
        assert max(taken) < live.stream.positions.limit
        session.ask(QUESTION, 2)


@pytest.mark.parametrize("kv", ROOMY)
def test_an_ingestion_that_fails_or_is_cancelled_leaves_the_stream_as_it_was(kv: str) -> None:
    fields = {**ROOMY[kv], **({"ingest_frames": 12} if kv in ("rekv", "mosaic retrieving") else {})}
    with open_session("random-ov", fields, 9, chunk=64) as session:
        before, told = logits(session), session.counters()

        def stop(done: int, total: int | None) -> None:
            if done > 10:
                raise KeyError("stopped")

        def cancel(done: int, total: int | None) -> None:
            if done > 10:
                session.cancel()

        with pytest.raises(KeyError, match="stopped"):
            session.ingest(film(25)[9:].repeat(2, 1, 1, 1), progress=stop)
        assert len(session) == 9 and torch.equal(logits(session), before)
        with pytest.warns(MmaccelWarning, match="ingest: it was cancelled; it took in 0 frames"):
            assert session.ingest(film(25)[9:].repeat(2, 1, 1, 1), progress=cancel) == 0
        assert len(session) == 9 and torch.equal(logits(session), before)
        for name in ("units", "window", "resident", "host_units"):
            assert session.counters().get(name) == told.get(name)
        with open_session("random-ov", fields, 9, chunk=64) as other:
            for one in (session, other):
                one.ingest(film(25)[9:])
            assert torch.allclose(logits(session), logits(other), atol=EQUAL)


@pytest.mark.parametrize("kv", [kv for kv in ROOMY if kv != "no_cache"])  # which runs no layer
def test_a_cancelled_ingestion_breaks_off_within_its_pass(kv: str) -> None:
    """Behind the layer that runs: no other layer of the pass begins, and the stream is as it was."""
    layers = list[int]()
    with open_session("random-ov", ROOMY[kv], 9) as session:
        before = logits(session)

        def cancel(done: int, total: int | None) -> None:
            layers.append(done)
            session.cancel()

        with pytest.warns(MmaccelWarning, match="ingest: it was cancelled; it took in 0 frames"):
            assert session.ingest(film(25), progress=cancel) == 0
        assert len(layers) == 1 and len(session) == 9 and torch.equal(logits(session), before)
        assert session.ingest(film(25)) == 25


def test_a_store_that_is_full_when_the_film_ends_leaves_the_stream_as_it_was() -> None:
    with open_session("random-ov", {**ROOMY["rekv"], "store": {"host_bytes": 0}}, 4) as session:
        before = logits(session)
        with pytest.raises(mmaccel.core.errors.StoreError, match="cap"):
            session.ingest(film(FRAMES)[4:])
        assert len(session) == 4 and torch.equal(logits(session), before)
    # A first ingestion that fails leaves no stream.
    with open_session("random-ov", "rekv") as session:
        with pytest.raises(ZeroDivisionError):
            session.ingest(film(9), progress=lambda done, total: 1 / 0)  # type: ignore[arg-type,return-value]
        assert len(session) == 0 and session.counters() == {}


def test_progress_and_bad_input_are_those_of_watch() -> None:
    told: list[tuple[int, int | None]] = []
    with open_session("random-ov", "rekv", chunk=64) as session:
        session.ingest(film(20), fps=FPS, progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (20, 20) and len(told) > 1
        told.clear()
        session.ingest(
            iter(film(18).split(2)), fps=FPS, progress=lambda done, total: told.append((done, total))
        )
        passes = session._stream_adapter.view.geometry.layers * 5
        assert told == sorted(told, key=lambda one: one[0]) and told[0] == (1, None)
        assert told[-1] == (18, None)
        assert len(told) > passes, "a frame counts as it is decoded, and as layers run"
        with pytest.raises(mmaccel.core.errors.ModelError, match="fps: -1; give a positive number"):
            session.ingest(film(3), fps=-1)
        with pytest.raises(mmaccel.core.errors.ModelError, match=r"ingest: frames are torch\.float32"):
            session.ingest(film(3).float())
        assert len(session) == 38


def test_a_memory_that_does_not_ingest_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session("random-ov", "rekv") as session:
        monkeypatch.setattr(type(session._kv), "ingests", False)
        with pytest.raises(RecipeError, match=r"kv 'rekv' does not ingest .*; use watch\."):
            session.ingest(film(3))


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_sees_at_least_what_it_would_under_the_window(name: str, monkeypatch) -> None:
    """At the borders of passes too; and a question in the midst of an ingestion is refused."""
    passes = heard(monkeypatch, IngestState, "_took", lambda self, held, one: (one.first, self._first))
    with open_session(name, {"name": "recent", "window": 8, "local": 4, "ingest_frames": 12}) as session:

        def ask(done: int, total: int | None) -> None:
            with pytest.raises(ModelError, match="a video is being ingested; ask when that call has ended"):
                session.ask(QUESTION, 2)

        session.ingest(film(FRAMES), fps=FPS, progress=ask)
        window = session._live.state.window
    assert len(passes) > 1
    assert all(unit - first >= min(window - 1, unit) for unit, first in passes)


ALL: dict[str, Any] = {"name": "a_shape", "sink": 16, "window": 1 << 16, "block": 16}
FEW: dict[str, dict[str, Any]] = {
    "a_shape": {"name": "a_shape", "sink": 16, "window": 64, "block": 16},
    "grid": {"name": "grid", "block": 16},
    "vertical_slash": {"name": "vertical_slash", "vertical": 16, "slash": 32, "block": 16},
    "block_topk": {"name": "block_topk", "top": 3, "sink": 0, "block": 16},
}
KEPT = [kv for kv in ROOMY if kv != "no_cache"]


def by_mask(plan: Any, query: Any, key: Any, value: Any, scale: float, backend: Any) -> Any:
    """What a plan lists, computed as dense attention under its mask."""
    mask, group = plan.to_mask(), query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
    scores = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return scores @ value.repeat_interleave(group, 1), None


@crossed(pattern=FEW, kv=KEPT)
def test_a_pattern_that_lists_less_is_its_mask(
    pattern: str, kv: str, monkeypatch: pytest.MonkeyPatch, name: str = "random-ov"
) -> None:
    """What the plan lists, computed as dense attention under its mask, gives the same stream."""
    how: dict[str, Any] = {"backend": "reference", "sparse": FEW[pattern], "chunk": 128}
    with open_session(name, ROOMY[kv], chunk=128) as session:
        session.ingest(film(FRAMES), fps=FPS)
        dense = logits(session)
    with open_session(name, ROOMY[kv], **how) as session:
        session.ingest(film(FRAMES), fps=FPS)
        found = logits(session)
        session.ask(QUESTION, 2)
        report = session.report()
    assert report.kept is not None and report.kept < 1
    assert (found - dense).abs().max() > 100 * EQUAL, "the pattern did not act"
    monkeypatch.setattr(attention, "attend_plan", by_mask)
    masked = heard(monkeypatch, attention, "attend_plan", lambda *_: 1)
    with open_session(name, ROOMY[kv], **how) as session:
        session.ingest(film(FRAMES), fps=FPS)
        assert masked and (logits(session) - found).abs().max() <= EQUAL


def test_live_frames_stay_as_they_are_and_the_report_says_so() -> None:
    with open_session("random-ov", ROOMY["rekv"], sparse=FEW["a_shape"], backend="reference") as sparse:
        with open_session("random-ov", ROOMY["rekv"]) as dense:
            for session in (sparse, dense):
                session.watch(film(FRAMES), fps=FPS)
            assert torch.equal(logits(sparse), logits(dense))
        sparse.ask(QUESTION, 2)
        report = sparse.report()
    assert "a_shape acted on no part of it, see below" in str(report)
    assert report.kept is None and "the pattern acts on those given to ingest" in report.notes[0]


def test_dense_layers_stay_dense() -> None:
    how: dict[str, Any] = {"sparse": FEW["a_shape"], "backend": "reference", "dense_layers": (0,)}
    with open_session("random-ov", ROOMY["rekv"], **how) as session:
        session.ingest(film(FRAMES), fps=FPS)
        first, second = session.report().patterns
    assert set(first) == {"dense"} and set(second) == {"a_shape"}


def test_bad_layers_and_memories_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="dense_layers: there is no layer 9"):
        open_session("random-ov", "rekv", sparse=FEW["grid"], dense_layers=(9,))
    monkeypatch.setattr("mmaccel.policies.kv.rekv.ReKV.ingests", False)
    with pytest.raises(RecipeError, match="sparse 'grid' cannot stand beside kv 'rekv'"):
        Recipe.load(sparse="grid", kv={"name": "rekv", **ARCHIVED})
