"""lmms-eval's own OpenAI model asks the server, which reads the videos itself.

    mmaccel serve --model NAME --recipe mosaic --files ~/.cache/huggingface
    python examples/lmms_openai.py videomme --model NAME@mosaic --frames 64

The server must see the files under the same paths, below the folder of --files. Each video must have --frames frames.
"""

from __future__ import annotations

import argparse
import subprocess
import sys


def evaluate(url: str, model: str, tasks: str, frames: int, key: str = "none", *more: str) -> int:
    """Run the harness on `tasks`; its status. `more` are further words of its command."""
    told = {"base_url": url, "model": model, "api_key": key, "pass_video_url": True, "max_frames_num": frames}
    words = ",".join(f"{name}={value}" for name, value in {**told, "timeout": 600}.items())
    command = [sys.executable, "-m", "lmms_eval", "--model", "openai", "--model_args", words]
    return subprocess.run([*command, "--tasks", tasks, "--batch_size", "1", *more], check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="tiny-ov")
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--key", default="none")
    given, rest = parser.parse_known_args()
    raise SystemExit(evaluate(given.url, given.model, given.tasks, given.frames, given.key, *rest))
