"""Small vision-language models that this project trains itself and ships, two targets and a draft for each.

They know one synthetic world (`mmaccel.world`): they name the cards a video shows, answer questions about them and
tell the video as a long caption; each folder's README.md says how well. They are for tests, demonstrations and
measurements of what an acceleration does to answers; they know nothing of real video.
"""

from __future__ import annotations

from pathlib import Path

from mmaccel.core.errors import ModelError

ROOT = Path(__file__).parent
NAMES: tuple[str, ...] = ("tiny-ov", "tiny-ov-draft", "tiny-qwen", "tiny-qwen-draft")

# Requests that a caption answers; the first is the one to use.
CAPTION_REQUESTS: tuple[str, ...] = (
    "describe the video .",
    "describe this video in detail .",
    "what happens in the video ?",
)
CAPTION_REQUEST = CAPTION_REQUESTS[0]
EXTRA_WORDS: tuple[str, ...] = tuple(sorted({word for text in CAPTION_REQUESTS for word in text.split()}))


def path(name: str) -> Path:
    """The folder of a shipped model, in the layout of `from_pretrained`.

    Raises `ModelError` for an unknown name, or where the weights were not installed.
    """
    if name not in NAMES:
        raise ModelError(f"There is no tiny model {name!r}; choose one of {', '.join(NAMES)}.")
    folder = ROOT / name
    if not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"The weights of {name} are not in {folder}; `make train`, in a checkout, trains and installs them."
        )
    return folder


__all__ = ["CAPTION_REQUEST", "CAPTION_REQUESTS", "EXTRA_WORDS", "NAMES", "ROOT", "path"]
