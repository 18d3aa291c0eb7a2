"""Ask a server (`mmaccel serve`) about a video with the `openai` package."""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

from openai import OpenAI


def ask(client: OpenAI, video: str, question: str, recipe: str | None = None) -> str:
    """The answer, printed as it comes; `video` is a path or an http address."""
    if not video.startswith(("http:", "https:", "file:")):
        video = "data:video/mp4;base64," + base64.b64encode(Path(video).read_bytes()).decode()
    content = [{"type": "video_url", "video_url": {"url": video}}, {"type": "text", "text": question}]
    events = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        max_tokens=128,
        stream=True,
        extra_body={"mmaccel": {"recipe": recipe}} if recipe else None,
    )
    said = ""
    for event in events:
        piece = (event.choices[0].delta.content if event.choices else None) or ""
        print(piece, end="", flush=True)
        said += piece
        if found := (getattr(event, "mmaccel", None) or {}).get("evidence"):
            print("\nfrom", ", ".join(f"{one['seconds']:.0f} s" for one in found[:3]), end="")
    print()
    return said


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("video")
    parser.add_argument("question")
    parser.add_argument("--recipe")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()
    ask(OpenAI(base_url=given.url, api_key=given.key), given.video, given.question, given.recipe)
