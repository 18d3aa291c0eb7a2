"""What `Processor.chat` is given, as conversations in the form that chat templates take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mmaccel.core import errors, outside
from mmaccel.core.errors import ModelError


def conversations(content: Any, images: Any, videos: Any) -> list[list[dict[str, Any]]]:
    """The messages of each prompt: one for a text, pieces or messages, or one for each of a list of these.

    `images` and `videos` stand before what the user says; of several prompts they are lists with an entry for each: one, a
    list of them, or None. Raises `ModelError` in one sentence.
    """
    if not (_listed(content) and content and all(isinstance(one, str) or _listed(one) for one in content)):
        return [_messages(content, image_list(images), video_list(videos))]
    told = len(content)
    shown = zip(content, _each("images", images, told), _each("videos", videos, told), strict=True)
    return [_messages(one, image_list(pictures), video_list(clips)) for one, pictures, clips in shown]


def bared(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any], list[Any]]:
    """Messages as a template may see them, and the images and videos that are taken out of them, in order."""
    shown: dict[str, list[Any]] = {"image": [], "video": []}
    bare = [
        {**message, "content": [_without(piece, shown) for piece in message["content"]]}
        for message in messages
    ]
    return bare, shown["image"], shown["video"]


def image_rows(images: Any) -> list[list[Any]]:
    """The images of each text; in a plain list every image stands for itself."""
    if images is None:
        return []
    if not _listed(images):
        return [[images]]
    nested = any(_listed(row) for row in images)
    return [list(row) for row in images if row] if nested else [[image] for image in images]


def image_list(images: Any) -> list[Any]:
    """The images in order."""
    return [image for row in image_rows(images) for image in row]


def video_list(videos: Any) -> list[Any]:
    """The videos in order. A list of images is one video; a list of videos may stand for each text."""
    if videos is None:
        return []
    if not _listed(videos) or (videos and all(map(_is_frame, videos))):
        return [videos]
    flat: list[Any] = []
    for item in videos:
        flat.extend(item if _listed(item) and not all(map(_is_frame, item)) else [item])
    return flat


def is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _listed(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_frame(value: Any) -> bool:
    return hasattr(value, "getbands") or getattr(value, "ndim", 0) == 3


def _each(name: str, given: Any, count: int) -> list[Any]:
    """What is given for each of `count` prompts."""
    if given is None:
        return [None] * count
    if not _listed(given) or len(given) != count:
        told = f"{len(given)} entries" if _listed(given) else "one, not a list,"
        raise ModelError(
            f"{name}: {told} for {count} prompts; give a list with an entry for each, None where there is none."
        )
    return list(given)


def _messages(content: Any, images: list[Any], videos: list[Any]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        if not content.strip():
            raise ModelError("content: the question is empty; ask something.")
        content = [{"type": "text", "text": content}]
    ahead = [{"type": "image", "image": item} for item in images] + [
        {"type": "video", "video": item} for item in videos
    ]
    if not _listed(content) or any(not isinstance(piece, Mapping) for piece in content):
        raise ModelError(
            f"content: {errors.shown(content)} is not a prompt; give a text, or a list of pieces or messages; for a batch a "
            "list of these, and videos=[...] with an entry for each."
        )
    if not content and not ahead:
        raise ModelError("content: it is an empty list; ask something.")
    if not content or "role" not in content[0]:
        return [{"role": "user", "content": [*ahead, *content]}]
    if ahead:
        raise ModelError(
            "images and videos of a conversation belong in its messages: give them as pieces there."
        )
    listed = []
    for message in content:
        inside = message.get("content")
        if not isinstance(inside, str) and not _listed(inside):
            raise ModelError(
                f"content: a message holds {errors.shown(inside)}; give it a text or pieces as 'content'."
            )
        listed.append(
            {**message, "content": [{"type": "text", "text": inside}] if isinstance(inside, str) else inside}
        )
    return listed


def _without(piece: Mapping[str, Any], shown: dict[str, list[Any]]) -> dict[str, Any]:
    """The piece as the template may see it; its image or video is put aside, in order."""
    if not isinstance(piece, Mapping):
        raise ModelError(f"content: {errors.shown(piece)} is not a piece; give a mapping with its type.")
    kind = piece.get("type")
    if kind == "text":
        return {"type": "text", "text": outside.words(piece.get("text"), "content")}
    if not isinstance(kind, str) or kind not in shown:
        raise ModelError(
            f"a piece of type {errors.shown(kind)} is not known: use 'text', 'image' or 'video'."
        )
    held = [piece[name] for name in (kind, "path", "url") if name in piece]
    if not held:
        raise ModelError(
            f"a piece of type {errors.shown(kind)} holds no {kind}: give it under {errors.shown(kind)}."
        )
    shown[kind].append(held[0])
    return {"type": kind}
