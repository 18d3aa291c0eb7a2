"""A camera to alerts: `camera_alerts.py SOURCE QUESTION [SERVER]` tells when the answer to a question turns."""

import base64
import sys
from collections.abc import Iterator

import httpx2

from mmaccel import media
from mmaccel.media.video import write_jpeg


def alerts(server: str, source: str, question: str, every: int = 5) -> Iterator[tuple[float, str]]:
    """The second and the answer, whenever it is another one than before; `every` frames are taken in between."""
    path, last = "/v1/streaming/sessions", None
    with httpx2.Client(base_url=server, timeout=120, trust_env=False) as client:
        path += "/" + client.post(path, json={}).raise_for_status().json()["id"]
        for clip in media.clips(source, fps=1.0, frames_per_clip=every):
            frames = [base64.b64encode(write_jpeg(frame, 1 << 20)).decode() for frame in clip.frames]
            told = {"frames": frames, "times": clip.clock.tolist()}
            client.post(f"{path}/frames", json=told).raise_for_status()
            asked = client.post(f"{path}/ask", json={"question": question, "max_tokens": 8})
            if (text := asked.raise_for_status().json()["text"]) != last:
                yield float(clip.clock[-1]), (last := text)
        client.delete(path)


if __name__ == "__main__":
    for second, text in alerts((sys.argv[3:] or ["http://127.0.0.1:8000"])[0], *sys.argv[1:3]):
        print(f"{second:.0f} s: {text}", flush=True)
