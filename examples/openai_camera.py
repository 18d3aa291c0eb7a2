"""The `openai` package asks a server about a camera: of each few seconds, what is to be seen."""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Iterator

from openai import OpenAI
from PIL import Image

from mmaccel import media


def looks(
    client: OpenAI, source: str, question: str, seconds: int = 8, fps: float = 1.0
) -> Iterator[tuple[float, str]]:
    """The second at which each piece of the camera's film ends, and the answer about it."""
    model = client.models.list().data[0].id
    for clip in media.clips(source, fps=fps, frames_per_clip=round(seconds * fps)):
        frames = []
        for frame in clip.frames:
            Image.fromarray(frame.permute(1, 2, 0).numpy()).save(file := io.BytesIO(), "JPEG")
            frames.append(base64.b64encode(file.getvalue()).decode())
        content = [
            {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(frames)}},
            {"type": "text", "text": question},
        ]
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
            max_tokens=32,
            extra_body={"mmaccel": {"fps": fps}},
        )
        yield float(clip.clock[-1]), answer.choices[0].message.content or ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="A file, an address or a camera that PyAV opens.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()
    for second, text in looks(OpenAI(base_url=given.url, api_key=given.key), given.source, given.question):
        print(f"{second:.0f} s: {text}", flush=True)
