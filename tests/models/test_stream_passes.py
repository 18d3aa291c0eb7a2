"""Frames on their way into a stream: it is the same however many come a call; nothing is read back from the device."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.backends.ops import clusters
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.prefill import attention
from mmaccel.policies.kv.mosaic import ClusterIndex
from mmaccel.policies.kv.mosaic.split import UnitMeans
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, open_session, pair, resumed
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt
from tests.policies.kv.test_fields import Counted
from tests.spies import crossed, heard

TIGHT = every_stream(frames=6, window=8)
NAMES = sorted(TIGHT)
HOW = ("host_", "fetch_", "prefetch_", "bytes", "index_bytes", "summary_bytes")
"""Counters of how keys cross the wire and where they lie, which may hang on the calls."""


def stills(count: int = 48) -> Tensor:
    """Frames of a world, each shown one to four times."""
    frames = torch.cat([film(25), film(25, 4)])
    times = torch.tensor([1, 3, 2, 4, 1, 2])[torch.arange(len(frames)) % 6]
    return frames.repeat_interleave(times, 0)[:count]


def fields(kv: str) -> dict[str, Any]:
    """A memory with small budgets; where passes retrieve, what they store depends on the budgets by design."""
    own = {name: value for name, value in TIGHT[kv].items() if name != "similar"}
    return {**own, **({"encode_frames": 0} if kv == "mosaic" else {})}


def watched(session: mmaccel.VideoSession, frames: Tensor, call: int) -> mmaccel.VideoSession:
    for part in frames.split(call):
        session.watch(part, fps=FPS)
    return session


def kept(session: mmaccel.VideoSession) -> dict[str, Any]:
    """What a session tells of what it keeps."""
    live: Any = session._live
    told = {name: n for name, n in session.counters().items() if not name.startswith(HOW)}
    columns = [one.column.tolist() for one in getattr(live.state, "_held", []) if hasattr(one, "column")]
    picked = (
        [number for number, _ in live.state.choose_units({})] if hasattr(live.state, "choose_units") else []
    )
    return told | dict(spans=list(live.info.spans), columns=columns, picked=picked, shown=session.shown)


@crossed(kv=NAMES, name=["random-ov", "random-qwen"])
def test_one_frame_a_call_keeps_what_sixteen_do(name: str, kv: str) -> None:
    """In passes of another size, too."""
    frames = stills()
    with open_session(name, fields(kv), chunk=64) as one, open_session(name, fields(kv)) as many:
        watched(one, frames, 1), watched(many, frames, 16)
        assert kept(one) == kept(many)
        assert (logits(one) - logits(many)).abs().max() <= 1e-4
        answers = [session.ask(QUESTION, 3) for session in (one, many)]
        assert answers[0].ids == answers[1].ids
        assert [e.frames for e in answers[0].evidence] == [e.frames for e in answers[1].evidence]
        told = kept(many)
    if kv == "streammem":
        assert told["merged"] > 8 and told["pruned"] > 0 and told["prototypes"] > 0


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_frames_that_wait_to_be_merged_are_seen_saved_and_taken_back(name: str, tmp_path: Path) -> None:
    """In the middle of a run of frames that look alike."""
    frames = torch.cat([film(11), film(11)[-1:].expand(6, -1, -1, -1), film(25)[12:]])
    kv = {"name": "streammem", "frames": 64}
    with open_session(name, kv) as session, open_session(name, kv) as other:
        watched(session, frames[:14], 5)
        waiting = session._live.state.waiting_features()  # type: ignore[union-attr]
        assert waiting is not None and waiting.shape[0] == 1 and session.frames == 14
        blind = frames[:14].clone()
        blind[10:] = 0
        watched(other, blind, 5)
        assert (logits(session) - logits(other)).abs().max() > 1e-3, "a question sees the frames that wait"
        before = logits(session)
        with resumed(session, tmp_path / "stream") as again:
            with pytest.raises(KeyboardInterrupt):
                session.watch(frames[14:19], fps=FPS, progress=Mock(side_effect=KeyboardInterrupt))
            assert torch.equal(logits(session), before)
            for one in (session, again):
                watched(one, frames[14:], 1)
            assert kept(again) == kept(session) and torch.equal(logits(again), logits(session))


MOSAIC = {"name": "mosaic", "frames": 4, "window": 6, "local": 2, "index": {"name": "clusters", "init": 8}}


def switched(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[torch.Tensor, dict[str, int]]:
    """Logits of a question after 25 frames, and the most frames of a call: vision, attention, feed-forward."""
    chunk = fields.pop("chunk", None)
    with (
        open_session("random-ov", {**MOSAIC, **fields}, chunk=chunk) as session,
        monkeypatch.context() as patch,
    ):
        adapter = session._stream_adapter
        gate = adapter.family.layers(adapter.model)[0].mlp.gate_proj  # type: ignore[attr-defined]
        plain, fed = gate.forward, list[int]()
        vision = heard(patch, adapter, "features", lambda frames, size: len(frames))
        attended = heard(patch, attention, "dense_attend", lambda query, *_, **__: query.shape[2])
        patch.setitem(gate.__dict__, "forward", lambda x: (fed.append(x.shape[1]), plain(x))[1])
        session.watch(film(25), fps=FPS)
        unit = session._live.info.tokens_per_unit  # type: ignore[union-attr]
        told = {"vision": max(vision), "attention": max(attended) // unit, "feed": max(fed) // unit}
    with open_session("random-ov", {**MOSAIC, **fields}, 25, chunk=chunk) as session:
        return logits(session), told


@pytest.mark.parametrize(
    ("choices", "fewer", "few"),
    [({"chunk": 64}, ("vision", "attention", "feed"), 4), ({"encode_by": "frame"}, ("attention", "feed"), 1)],
    ids=str,
)
def test_few_at_a_time_it_is_the_same_stream(
    choices: dict[str, Any], fewer: tuple[str, ...], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where passes retrieve, what is stored depends on how many frames go in one.
    whole, together = switched(monkeypatch, encode_frames=0)
    found, most = switched(monkeypatch, encode_frames=0, **choices)
    assert min(together.values()) > few
    for name, count in most.items():
        assert count == (few if name in fewer else together[name]), (name, count)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)


MEMORIES: dict[str, tuple[dict[str, Any], int]] = {
    # Of a clip, however long: a tower of one layer, and two layers of which each gives units to the store.
    "mosaic, retrieving": (MOSAIC, 240),
    "mosaic, window alone": ({**MOSAIC, "encode_frames": 0}, 200),
    "rekv": ({"name": "rekv", "frames": 4, "window": 6}, 200),
}
"""Each with the launches of a pass at most."""
KERNELS = [
    (clusters, name)
    for name in (
        "score_keys",
        "mark_clusters_beyond_budget",
        "mask_and_count_better",
        "select_entries",
        "mean_query",
    )
]


def unseen(work: Any) -> Any:
    """`work` of the host alone, whose tensors are none of a device's."""

    def done(*given: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return work(*given)

    return done


@pytest.mark.parametrize("kind", sorted(BUILD))
def test_features_of_frames_are_those_that_the_model_puts_in_their_places(kind: str) -> None:
    model = BUILD[kind]()
    inputs = batch(kind, [prompt(kind, PROMPTS["video"], seed=seed) for seed in (0, 1)])
    family = adapter_for(model)
    with torch.no_grad():
        placed = family.embed(model, inputs)[inputs["input_ids"] == model.config.video_token_id]
        assert torch.equal(family.encode_frames(model, inputs), placed)


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_pixels_without_a_text_are_those_with_one(name: str) -> None:
    _, processor = pair(name)
    frames = film(4)
    whole = processor(processor.video_token, videos=[frames], add_special_tokens=False)
    alone = processor.prepare_pixels(frames)
    assert alone and all(torch.equal(whole[each], value) for each, value in alone.items())


@pytest.mark.parametrize("memory", sorted(MEMORIES))
def test_watching_reads_nothing_back_and_launches_little(memory: str, monkeypatch) -> None:
    """All but the clustering and its tables, which are the host's own: it is given what has arrived, and gives them once."""
    fields, most = MEMORIES[memory]
    with open_session("random-ov", fields) as session:
        # The addresses of places on the host are told to the device when they are new.
        for some in (film(16), film(16)[8:]):
            session.watch(some, fps=FPS)
        live: Any = session._live
        monkeypatch.setattr(UnitMeans, "waiting_passes", 0)
        for name in ("refresh", "_survey"):
            monkeypatch.setattr(ClusterIndex, name, unseen(getattr(ClusterIndex, name)))
        monkeypatch.setattr(type(live.state), "end_ingest", lambda self: None)
        before = live.state.units()
        frames = film(24)[16:]
        counted = Counted(monkeypatch)
        # Each of these is one kernel.
        for of, name in KERNELS:
            monkeypatch.setattr(of, name, counted.as_one(getattr(of, name)))
        with counted:
            live.add_frames(frames, [100.0 + i for i in range(8)], lambda count: None, Deadline())
        assert live.state.units() == before + 8
        launched = sum(counted.launched.values())
        assert 100 < launched <= most, counted.launched.most_common()
        assert (counted.launched["copy_units"] > 0) == (memory == "mosaic, retrieving")
