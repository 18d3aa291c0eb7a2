"""A stream over the WebSocket: frames go in while the answer to a question comes out."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
from typing import Any

import httpx2
from PIL import Image
from websockets.asyncio.client import connect

from mmaccel import media


async def talk(server: str, source: str, question: str, at: float) -> dict[str, Any]:
    """Watch `source` at a frame a second, ask at second `at`, go on watching; the answer."""
    async with httpx2.AsyncClient(base_url=server, trust_env=False) as client:
        opened = await client.post("/v1/streaming/sessions", json={})
        number = opened.raise_for_status().json()["id"]
    url = f"ws{server.removeprefix('http')}/v1/streaming/sessions/{number}/socket"
    async with connect(url) as socket:

        async def watch() -> None:
            asked = False
            for clip in media.clips(source, fps=1, frames_per_clip=1):
                second = float(clip.clock[0])
                Image.fromarray(clip.frames[0].permute(1, 2, 0).numpy()).save(file := io.BytesIO(), "JPEG")
                data = base64.b64encode(file.getvalue()).decode()
                await socket.send(json.dumps({"type": "frame", "data": data, "time": second}))
                while json.loads(await taken.get())["frames"] <= second:
                    pass
                if second >= at and not asked:
                    asked = True
                    await socket.send(json.dumps({"type": "ask", "id": "1", "question": question}))

        taken: asyncio.Queue[str | bytes] = asyncio.Queue()
        watching = asyncio.create_task(watch())
        async for message in socket:
            heard = json.loads(message)
            if heard["type"] == "event" and heard["name"] == "taken":
                taken.put_nowait(message)
            elif heard["type"] == "delta":
                print(heard["text"], end="", flush=True)
            elif heard["type"] == "answer":
                print(f"\n{heard['tokens']} tokens, the first after {heard['ttft_s']:.2f} s")
                await watching
                return dict(heard)
    raise RuntimeError("the server closed the connection")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("question")
    parser.add_argument("--at", type=float, default=10.0)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    asyncio.run(talk(given.server, given.source, given.question, given.at))
