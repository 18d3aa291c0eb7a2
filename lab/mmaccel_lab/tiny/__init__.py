"""Small vision-language models that this project trains itself: two targets and a draft for each, and two smaller targets
of other architectures, a Qwen3-VL and a hybrid Qwen3.5.

They know one synthetic world (`mmaccel_lab.world`): they name the cards a video shows, answer questions about them and
tell the video as a long caption; each folder's README.md says how well. They are for tests, demonstrations and
measurements of what an acceleration does to answers; they know nothing of real video.

`mmaccel.models.shipped` has their names and finds their folders.
"""

from __future__ import annotations

from pathlib import Path

from mmaccel.models.shipped import CAPTION_REQUEST

ROOT = Path(__file__).parent
"""Where the folders of the models are, and where training installs them."""

# Requests that a caption answers; the first is the one to use.
CAPTION_REQUESTS: tuple[str, ...] = (
    CAPTION_REQUEST,
    "describe this video in detail .",
    "what happens in the video ?",
)
EXTRA_WORDS: tuple[str, ...] = tuple(sorted({word for text in CAPTION_REQUESTS for word in text.split()}))

__all__ = ["CAPTION_REQUESTS", "EXTRA_WORDS", "ROOT"]
