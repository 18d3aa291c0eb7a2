"""A camera to alerts: watch a source through a server, ask the same every few seconds, and tell when the answer turns."""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Iterator

import httpx2
from PIL import Image

from mmaccel import media


def alerts(
    server: str, source: str, question: str, fps: float = 1.0, every: int = 5
) -> Iterator[tuple[float, str]]:
    """The second and the answer, whenever it is another one than before; `every` frames are taken in between."""
    with httpx2.Client(base_url=server, timeout=120, trust_env=False) as client:
        path = f"/v1/streaming/sessions/{client.post('/v1/streaming/sessions', json={}).raise_for_status().json()['id']}"
        last = None
        for clip in media.clips(source, fps=fps, frames_per_clip=every):
            frames = []
            for frame in clip.frames:
                Image.fromarray(frame.permute(1, 2, 0).numpy()).save(file := io.BytesIO(), "JPEG")
                frames.append(base64.b64encode(file.getvalue()).decode())
            client.post(
                f"{path}/frames", json={"frames": frames, "times": clip.clock.tolist()}
            ).raise_for_status()
            answer = (
                client.post(f"{path}/ask", json={"question": question, "max_tokens": 8})
                .raise_for_status()
                .json()
            )
            if answer["text"] != last:
                last = answer["text"]
                yield float(clip.clock[-1]), last
        client.delete(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="A file, an address or a camera that PyAV opens.")
    parser.add_argument("question")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    for second, text in alerts(given.server, given.source, given.question):
        print(f"{second:.0f} s: {text}", flush=True)
