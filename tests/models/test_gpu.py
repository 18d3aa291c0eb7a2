"""On a CUDA device: streams through its memory, a target beside its draft, and families whose parts are kernels of ours."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

import mmaccel
from mmaccel.backends.ops import delta, layer_ops
from mmaccel.core.decoding import replay
from mmaccel.core.files import checkpoint_io
from mmaccel.media.preprocess import resize
from mmaccel.policies.draft import Parallel, _draft_decoder
from tests.backends.interpreted import GPU
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, pair
from tests.models.test_check_family import KINDS
from tests.models.tiny_random import BUILD, PROMPTS, prompt, sampler
from tests.spies import beside, broken, finish, heard, returned

pytestmark = GPU


KV = every_stream(positions="original")
TIGHT = every_stream(frames=6, window=8)


def on_gpu(
    name: str, dtype: torch.dtype, kv: Any, device: str = "cuda", **choices: Any
) -> tuple[Any, mmaccel.VideoSession]:
    model, processor = pair(name)
    moved = copy.deepcopy(model).to(device, dtype)
    return moved, mmaccel.VideoSession(moved, processor, None, kv=kv, **choices)


def test_a_frame_goes_through_the_tower_by_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As close to float64 as the modules are, whoever had the frame before; captured once."""
    # A pool's keeper is no work.
    captures = heard(monkeypatch, replay, "capture_graph", lambda work, *_: not isinstance(work, partial))
    model, session = on_gpu("random-ov", torch.bfloat16, KV["full"])
    exact, processor = copy.deepcopy(model).double(), pair("random-ov")[1]
    with session, mmaccel.VideoSession(model, processor, None, kv=KV["rekv"]) as other:
        adapters = [one._stream_adapter for one in (session, other)]
        frames: Any = film(8).split(1)
        found = [adapters[n % 2].features(frame, (42, 70))[0] for n, frame in enumerate(frames)]
        assert sum(captures) == 1
        for frame, rows in zip(frames, found, strict=True):
            inputs = adapters[0]._pixels(frame, (42, 70))  # type: ignore[attr-defined]
            family: Any = adapters[0].family  # type: ignore[attr-defined]
            with torch.no_grad():
                plain = family.encode_frames(model, inputs)[:-1]
                right = family.encode_frames(exact, {name: one.double() for name, one in inputs.items()})[:-1]
            error, own = ((one.double().flatten(0, -2) - right).abs().max() for one in (rows, plain))
            assert error <= 1.1 * own + 1e-6


def of_own_size(frames: torch.Tensor) -> torch.Tensor:
    """Frames that the processor need not resize: devices round the bytes of resized ones differently."""
    return resize(frames, (112, 112))


@pytest.mark.parametrize("kv", TIGHT)
def test_what_comes_back_from_pinned_memory_is_what_the_cpu_recalls(kv: str) -> None:
    """In float64, for in float32 a choice between tokens of nearly equal scores turns on rounding (pixels, TF32 in the
    vision tower's convolution), and logits move by a percent; and in bfloat16 it runs."""
    found = []
    for device in ("cpu", "cuda"):
        with on_gpu("random-ov", torch.float64, TIGHT[kv], device)[1] as session:
            for part in of_own_size(film(25)).split(7):
                session.watch(part, fps=FPS)
            found.append(logits(session).cpu())
    assert found[0].dtype == torch.float64
    # Some means are taken in float32.
    assert (found[0] - found[1]).abs().max() <= 1e-5
    _, session = on_gpu("random-ov", torch.bfloat16, TIGHT[kv])
    with session:
        session.watch(film(25), fps=FPS)
        assert session.ask(QUESTION, 4).ttft_s > 0 and bool(logits(session).isfinite().all())


def test_a_planned_question_shows_no_hidden_column(name: str = "random-ov") -> None:
    """A captured question has places for clusters to come, which nobody sees; a pattern plans columns that are all seen."""
    found = []
    for sparse in ({"name": "a_shape", "sink": 16, "window": 1 << 16, "block": 16}, "dense"):
        how: dict[str, Any] = {"sparse": sparse, "backend": "reference", "dense_tail": 16}
        _, session = on_gpu(name, torch.float64, TIGHT["mosaic"], **how)
        with session:
            session.watch(of_own_size(film(25)), fps=FPS)
            long = " ".join([QUESTION] * 20)
            found.append(torch.stack([logits(session, one) for one in (long, QUESTION, long, QUESTION)]))
            session.ask(long, 2)
            assert (session.report().kept is None) == (sparse == "dense")
    assert (found[0] - found[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("kv", ["rekv", "recent", "no_cache"])
def test_the_device_holds_no_more_of_a_longer_stream(kv: str) -> None:
    _, session = on_gpu("random-ov", torch.bfloat16, TIGHT[kv])
    with session:
        held = []
        for _ in range(8):
            session.watch(film(25).repeat(4, 1, 1, 1), fps=FPS)
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated() - session.counters().get("index_bytes", 0))
        # What is captured, and is allocated once in a process, has come by then.
        assert held[-1] - held[3] <= 1 << 16


def test_ways_across_the_wire_bring_the_same() -> None:
    found = []
    for way in ("auto", "pieces"):
        _, session = on_gpu("random-ov", torch.float32, TIGHT["rekv"])
        with session:
            for part in film(25).split(3):
                session.watch(part, fps=FPS)
                session._live.state.store._default = way  # type: ignore[union-attr]
            found.append(logits(session))
            assert session.counters()["host_bytes_in"] > 0
    assert torch.equal(*found)


INDEX = {"name": "clusters", "init": 8, "visual": 4, "semantic": 2}
CLUSTERED = {"name": "mosaic", "frames": 6, "window": 8, "local": 2, "index": INDEX}


def test_clusters_on_the_device_recall_what_they_do_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        with on_gpu("random-ov", torch.float64, CLUSTERED, device)[1] as session:
            session.watch(of_own_size(film(25)), fps=FPS)
            # The second question finds a cache, and a guess that the first one taught.
            answers = [session.ask(QUESTION, 2) for _ in range(2)]
            found.append([{one.frames: one.recalled for one in answer.evidence} for answer in answers])
            told = answers[1].counters
            assert told["fetch_cached"] > 0 and told["fetch_needed"] > told["fetch_missing"] > 0
    assert found[0] == found[1] and found[0][0] == found[0][1]


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_a_question_waits_for_nothing_before_its_first_token(kv: str, monkeypatch) -> None:
    _, session = on_gpu("random-ov", torch.bfloat16, CLUSTERED if kv == "mosaic" else TIGHT[kv])
    prefill = mmaccel.core.streams.asking.QuestionRunner.prefill

    def watched(self: Any, *args: Any, **named: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return prefill(self, *args, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with session:
        session.watch(of_own_size(film(25)), fps=FPS)
        for _ in range(2):
            session.ask(QUESTION, 1)
        monkeypatch.setattr(mmaccel.core.streams.asking.QuestionRunner, "prefill", watched)
        assert session.ask(QUESTION, 1).counters["host_bytes_in"] > 0


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
@pytest.mark.parametrize("positions", ["original", "compact"])
def test_replayed_questions_say_what_questions_launched_one_by_one_say(
    name: str, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the stream grows, so that what replays read is written anew, and now and then moved."""
    kv = {**TIGHT["mosaic"], "positions": positions}
    # In float64, for a choice between nearly equal scores turns on rounding.
    _, plain = on_gpu(name, torch.float64, kv)
    _, replayed = on_gpu(name, torch.float64, kv)
    made = heard(monkeypatch, replay, "capture_graph", lambda *_: 1)
    with plain, replayed:
        for part in film(25).repeat(8, 1, 1, 1).split(20):
            found = []
            for session in (plain, replayed):
                session.watch(part, fps=FPS)
                live: Any = session._live
                for one in (live.state.replays, *live.adapter._few._graphs):
                    one.works = session is replayed
                found.append(torch.stack([logits(session) for _ in range(3)]))
            assert (found[0] - found[1]).abs().max() <= 1e-5
    assert made


def test_a_thread_that_ran_no_product_captures_one_after_a_capture_that_failed() -> None:
    """Each thread has a handle of cuBLAS of its own, and calls of a server are a thread each."""
    one = torch.eye(8, device="cuda")
    buffers, found = replay.GraphBuffers(one.device), [one @ one]
    given = one.device, buffers.pool
    with pytest.raises(RuntimeError):
        replay.capture_graph(one.cpu, *given)
    finish(beside(lambda: found.extend(replay.capture_graph(lambda: 2 * one @ one, *given))))
    found[1].replay()
    assert torch.equal(found[2], 2 * one)


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    model = BUILD[request.param](layers=3).cuda()
    return request.param, model


def question(name: str, kind: str) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in prompt(name, PROMPTS[kind]).items()}


@pytest.mark.parametrize("prune", [None, {"name": "uv", "retention": 0.3}, {"name": "attention"}])
@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("kind", ["video", "long"])
def test_two_streams_say_what_the_target_says(
    family: tuple[str, Any], prune: Any, window: int | None, kind: str
) -> None:
    """fp32; captured steps of both models, again and again, so that what one overwrote too early would be seen."""
    name, model = family
    inputs = question(name, kind)
    want = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    draft = Parallel(
        model=BUILD[name](seed=1, layers=2).cuda(), window=window, prune=prune, process=False, most=4
    )
    with mmaccel.accelerate(model, draft=draft) as fast:
        for _ in range(3):
            assert torch.equal(fast.generate(**inputs, max_new_tokens=48, do_sample=False), want)
            told = fast.report().draft
            assert told["failed"] is None and told["counters"]["drafted"] > 0


def test_the_draft_works_on_a_stream_of_its_own(family: tuple[str, Any], monkeypatch) -> None:
    """A twin is right wherever it is asked, and neither reads nor writes on the stream that the target verifies on."""
    name, model = family
    inputs = question(name, "video")
    seen = [
        heard(monkeypatch, _draft_decoder.DraftDecoder, name, lambda *_, **__: torch.cuda.current_stream())
        for name in ("read_prompt", "draft_tokens")
    ]
    draft = Parallel(model=copy.deepcopy(model), window=4, process=False)
    with mmaccel.accelerate(model, draft=draft) as fast:
        fast.generate(**inputs, max_new_tokens=32, do_sample=False)
        told = fast.report().draft
    assert told["failed"] is None and told["accepted"] == told["proposed"] > 0
    assert all(seen) and len(streams := {one for part in seen for one in part}) == 1
    assert torch.cuda.current_stream() not in streams


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_its_promises_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In true float32: products in TF32 would be off by more than is allowed."""
    if kind == "perception_lm" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its tower needs a newer timm under earlier transformers")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    mmaccel.check_family(sampler(kind).kind, device="cuda")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "qwen3_vl"])
def test_fused_modules_of_a_prompt_are_as_exact_as_the_models(kind: str, monkeypatch) -> None:
    """In bfloat16, also in chunks, which go on from a running state; and they are what runs."""
    ran, inputs = list[str](), question(kind, "long")
    for where, name in ((delta, "convolve_silu"), (delta, "gated_rms_norm"), (layer_ops, "rms_norm")):
        heard(monkeypatch, where, name, lambda *_, name=name: ran.append(name))
    exact = sampler(kind).model().cuda().double()
    model = copy.deepcopy(exact).bfloat16()
    truth, plain = exact(**inputs).logits, model(**inputs).logits
    for chunk in (None, 64):
        with mmaccel.accelerate(model, "dense", chunk=chunk):
            found = model(**inputs).logits
        assert (found - truth).abs().max() <= 1.5 * (plain - truth).abs().max()
    assert {*ran} == {"rms_norm"} | ({"convolve_silu", "gated_rms_norm"} if kind == "qwen3_5" else set())


def test_a_save_holds_what_was_there_when_it_left_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device copies behind what it has to do, and before what is asked of it next."""
    waits = returned(monkeypatch, checkpoint_io, "_copy", lambda made, *_: len(made[1]))
    busy = torch.randn(4096, 4096, device="cuda")
    kept = {str(n): torch.full((1 << 20,), float(n), device="cuda") for n in range(8)}
    kept["across"] = torch.arange(1 << 20, device="cuda", dtype=torch.float32).view(1024, 1024).T
    want = {name: one.cpu() for name, one in kept.items()}
    with checkpoint_io.defer_writes():
        for _ in range(50):
            busy = (busy @ busy).clamp_(-1, 1)
        for one in kept.values():
            one.add_(busy[0, 0] * 0)
        checkpoint_io.write_tensors(tmp_path / "whole.safetensors", kept)
        for one in kept.values():
            one.zero_()
        kept.clear()
        torch.full((16 << 20,), -1.0, device="cuda")
    found = load_file(tmp_path / "whole.safetensors")
    assert all(torch.equal(found[name], one) for name, one in want.items()) and found.keys() == want.keys()
    assert waits == [1]


@pytest.mark.parametrize("kv", ["mosaic", "rekv", "full"])
def test_a_stream_saved_beside_another_s_passes_goes_on_as_it_was(kv: str, tmp_path: Path) -> None:
    model, session = on_gpu("random-ov", torch.bfloat16, TIGHT[kv])
    second = mmaccel.VideoSession(model, pair("random-ov")[1], None, kv=TIGHT[kv])
    with session, second, ThreadPoolExecutor(1) as threads:
        for part in film(25).split(5):
            session.watch(part, fps=FPS)
            watching = threads.submit(lambda: [second.watch(film(9), fps=FPS) for _ in range(3)])
            session.save(tmp_path / "one")
            watching.result()
        with mmaccel.VideoSession(model, pair("random-ov")[1], None, kv=TIGHT[kv]) as other:
            other.load(tmp_path / "one")
            assert torch.equal(logits(other), logits(session))


@pytest.mark.parametrize("full", [False, True])
def test_a_save_copies_to_the_host_where_the_device_has_no_room(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its memory is full, or other saves have copied as much as they may."""
    kept = {"one": torch.arange(9.0, device="cuda")}
    if full:
        broken(monkeypatch, torch.Tensor, "clone", torch.OutOfMemoryError("none"))
    monkeypatch.setattr(checkpoint_io, "_on_devices", room := BoundedSemaphore(1))
    if not full:
        room.acquire()
    waits = returned(monkeypatch, checkpoint_io, "_copy", lambda made, *_: len(made[1]))
    with checkpoint_io.defer_writes():
        checkpoint_io.write_tensors(tmp_path / "one.safetensors", kept)
        kept["one"].zero_()
    assert torch.equal(load_file(tmp_path / "one.safetensors")["one"], torch.arange(9.0))
    assert waits == [0] and room.acquire(blocking=False) is full
