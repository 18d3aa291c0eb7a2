"""Completions under several recipes, kept videos and streams at once, also on a GPU; and memory that runs out."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
import torch

import mmaccel
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.recipe import Recipe
from mmaccel.serve.settings import Limits, Settings
from tests.serve.conftest import QUESTION, frames_url, jpegs, recipes, running, text, video

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CHAT, SESSIONS = "/v1/chat/completions", "/v1/streaming/sessions"


@pytest.mark.parametrize(("device", "times"), [("cpu", 3), pytest.param("cuda", 12, marks=GPU)])
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
            "max_tokens": 24,
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
