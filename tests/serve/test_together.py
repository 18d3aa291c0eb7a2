"""Requests of many clients at once: plain ones, several recipes, kept videos and streams; also when memory runs out."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import torch

import mmaccel
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.recipe import Recipe
from mmaccel.models.together import BatchedDecodeSteps
from mmaccel.policies.kv.full import FullState
from mmaccel.serve.settings import Limits, Settings
from tests.serve.conftest import (
    CHAT,
    QUESTION,
    SESSIONS,
    Served,
    frames_url,
    jpegs,
    recipes,
    running,
    text,
    video,
)
from tests.serve.test_load import without_end
from tests.spies import broken, heard

BODIES = [
    {
        "model": "tiny-ov@dense",
        # A question on a video alone would be one to the memory that is kept of it.
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [video(frames_url(2 + n)), text("Describe the video.")]},
        ],
        "max_tokens": 8 + 4 * n,
        **({"temperature": 1.3, "seed": n} if n % 2 else {}),
    }
    for n in range(6)
]


async def answers(served: Served, bodies: list[dict[str, Any]], at_once: bool = True) -> list[Any]:
    async with httpx2.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as client:
        if at_once:
            return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        return [await client.post(CHAT, json=body) for body in bodies]


def slowly(sizes: list[int], seconds: float = 0.03) -> Callable[[int], None]:
    """Notes how many share each step, and makes it last, so that others come meanwhile."""
    return lambda count: (sizes.append(count), time.sleep(seconds))[1]


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """The answers to `BODIES`, one after another."""
    with running(Settings(), model=without_end()) as served:
        return asyncio.run(answers(served, BODIES, at_once=False))


@pytest.mark.always
def test_answers_share_steps_and_are_those_of_each_alone(plain: list[Any]) -> None:
    """Of six that come at once two prompts are read at a time, and all are decoded together; seeds give the same again."""
    with running(Settings(), model=without_end()) as served:
        sizes = list[int]()
        served.engine.batch._told = slowly(sizes)
        found = asyncio.run(answers(served, BODIES))
        assert list(map(said, found)) == list(map(said, plain))
        assert max(sizes) > 2 and len(served.engine.batch) == 0
        assert all(one.json()["mmaccel"]["alone"] is None for one in found)
        assert [one.json()["usage"]["completion_tokens"] for one in found] == [8 + 4 * n for n in range(6)]


def test_what_shares_no_step_says_why() -> None:
    tree = Recipe.load(None, draft={"name": "tree", "model": "tiny-ov-draft"})
    with running(chosen={**recipes(), "tree": tree}) as served:
        for recipe, why in (("tree", "draft 'tree'"), ("fastv", "pruned")):
            how = {"max_tokens": 4, "temperature": 0.5, "mmaccel": {"recipe": recipe}}
            told = served.chat([video(frames_url(3)), text()], **how)
            assert why in told.json()["mmaccel"]["alone"]
        with served.client() as client:
            assert "mmaccel_alone_answers_total 2.0" in client.get("/metrics").text


@pytest.mark.parametrize(
    "draft",
    [pytest.param("prompt_lookup", marks=pytest.mark.slow), {"name": "sequential", "model": "tiny-ov-draft"}],
)
def test_drafts_share_steps_and_answers_are_those_of_each_alone(draft: Any) -> None:
    """Also sampled ones, by their seeds; of a draft model the weights are held once."""
    chosen = {"drafted": Recipe.load(None, draft=draft)}
    bodies = [{**body, "model": "tiny-ov@drafted"} for body in BODIES]
    with running(Settings(), chosen, without_end()) as served:
        alone = [said(one) for one in asyncio.run(answers(served, bodies, at_once=False))]
        sizes = list[int]()
        served.engine.batch._told = slowly(sizes)
        found = asyncio.run(answers(served, bodies))
        assert [said(one) for one in found] == alone
        assert max(sizes) > 2 and all(one.json()["mmaccel"]["alone"] is None for one in found)
        if draft != "prompt_lookup":
            assert any(one.json()["mmaccel"]["report"]["draft"]["accepted"] for one in found)
            copies = list(served.engine.copies._idle["drafted"].queue)
            places = {next(one.recipe.draft.model.parameters()).data_ptr() for one in copies}  # type: ignore[attr-defined]
            assert len(copies) > 2 and len(places) == 1


def test_no_more_share_steps_than_the_limit() -> None:
    sizes = list[int]()
    limits = Limits(at_once=1, together=2)
    with running(Settings(limits=limits), model=without_end()) as served:
        served.engine.batch._told = slowly(sizes, 0.1)
        for one in asyncio.run(answers(served, BODIES[:5])):
            said(one)
        assert max(sizes) == limits.at_once + limits.together
        with served.client() as client:
            assert "mmaccel_alone_answers_total 0.0" in client.get("/metrics").text


def test_one_that_finds_no_memory_in_a_step_leaves_the_others(plain: list[Any], monkeypatch) -> None:
    bad, alone = 3, list(map(said, plain))
    with running(Settings(), model=without_end()) as served:
        prompts = [one.json()["usage"]["prompt_tokens"] for one in plain]
        full = torch.OutOfMemoryError("CUDA out of memory.")

        def mine(state: Any, room: int) -> bool:
            return prompts[bad] + 7 <= state.length() < prompts[bad] + 40 and state.first == prompts[bad]

        def noted(state: Any, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            if not state._counts[layer]:
                state.first = key.shape[2]

        heard(monkeypatch, FullState, "_put", noted)
        broken(monkeypatch, FullState, "layer_buffers", full, mine)
        monkeypatch.setattr("mmaccel.core.memory.buffers.ROOM_MIN", 2)
        heard(monkeypatch, BatchedDecodeSteps, "_laid", lambda self, runner, _: setattr(runner, "laid", None))
        found = asyncio.run(answers(served, BODIES))
        assert found[bad].status_code == 503 and found[bad].json()["error"]["code"] == "out_of_memory"
        assert [said(one) for n, one in enumerate(found) if n != bad] == alone[:bad] + alone[bad + 1 :]


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize(("device", "times"), [("cpu", 2), pytest.param("cuda", 12, marks=GPU)])
def test_all_kinds_of_requests_at_once(device: str, times: int) -> None:
    """Each is answered as it is alone: copies of the model are made, and recipes attached, while streams run."""
    model = mmaccel.load_model("tiny-ov", dtype=torch.float32, device=device)
    draft = {"sequential": Recipe.load(None, draft={"name": "sequential", "model": "tiny-ov-draft"})}
    chosen = {**recipes(), **draft}
    kinds = [
        {
            "model": "tiny-ov",
            "messages": [
                {"role": "user", "content": [video(frames_url(3 + n)), text("Describe the video.")]}
            ],
            "max_tokens": 12,
            "mmaccel": {"recipe": name},
            "stream": False,
        }
        for n, name in enumerate([*chosen, "fastv", "fastv"])
    ]

    async def stream(client: Any, count: int) -> str:
        opened = await client.post(SESSIONS, json={"recipe": "mosaic"})
        path = f"{SESSIONS}/{opened.json()['id']}"
        for at in range(0, count, 4):
            some = {"frames": list(jpegs()[at : at + 4]), "times": [float(n) for n in range(at, at + 4)]}
            assert (await client.post(f"{path}/frames", json=some)).status_code == 200
        told = await client.post(f"{path}/ask", json={"question": QUESTION, "max_tokens": 16})
        await client.delete(path)
        return str(told.json()["text"])

    async def chat(client: Any, body: dict[str, Any]) -> str:
        answer = await client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def talk(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
            alone = [await chat(client, one) for one in kinds]
            seen = [await stream(client, count) for count in (8, 24)]
            work = [chat(client, one) for one in kinds * times] + [
                stream(client, 8 + 16 * (n % 2)) for n in range(times)
            ]
            assert await asyncio.gather(*work) == alone * times + (seen * times)[:times]

    settings = Settings(limits=Limits(at_once=3))
    with running(settings, chosen, model) as served:
        asyncio.run(talk(served.url))


def test_a_copy_is_of_a_model_that_is_never_called() -> None:
    """A pass of a stream lends the model's modules other functions, which a copy made meanwhile would keep for good."""
    with running() as served:
        model = served.engine.model
        model.lent = True
        try:
            with served.engine._copy_of("fastv", Deadline()) as fast:
                assert fast.model is not model and not hasattr(fast.model, "lent")
                pairs = zip(fast.model.parameters(), model.parameters(), strict=True)
                assert all(ours is theirs for ours, theirs in pairs)
        finally:
            del model.lent


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_of_the_device_that_runs_out() -> None:
    """Nearly all memory is taken: a long request is refused, a short one is answered, and so is the long one afterwards."""
    model = mmaccel.load_model("tiny-ov", dtype=torch.float32, device="cuda")
    with running(model=model) as served:
        short = [video(frames_url(2)), text()]
        long = [video(frames_url(40))] * 12 + [text()]
        plain = {"recipe": "fastv"}
        assert served.chat(short, max_tokens=2, mmaccel=plain).status_code == 200
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        taken = torch.empty(free - (96 << 20), dtype=torch.uint8, device="cuda")
        refused = served.chat(long, max_tokens=2, mmaccel=plain)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "out_of_memory", refused.text
        assert served.chat(short, max_tokens=2, mmaccel=plain).status_code == 200
        del taken
        torch.cuda.empty_cache()
        assert served.chat(long, max_tokens=2, mmaccel=plain).status_code == 200
