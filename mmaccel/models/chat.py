"""Turns chats into token ids: inputs of `Processor.chat` into messages, these into text by chat templates, text into ids by
tokenizers. Also yields the clips of the videos given to a session.

Chat templates are code from a model's folder, so they run with limits. Users' special tokens can be made plain text.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from mmaccel.core import errors
from mmaccel.core.errors import ModelError, check_text
from mmaccel.core.files import outside
from mmaccel.core.streams.sources import Clip
from mmaccel.models.taking import warn_tiny_model_video

SECONDS = 5.0
"""Seconds that a template may run."""
NUMBER = 1_000_000
"""Largest number in a template."""
READ_FPS = 0.5
"""Frames a second of a file whose rate is not asked for, as in the papers on streams."""
READ_FRAMES = 64
"""Frames of a file that are read at a time."""
ANSWER = "\ue002"
"""Stands for an answer whose ids are known, where a chat template is rendered for what follows it."""
QUIET_S = 0.5
"""Seconds without a frame after which the model reads what a live source has sent."""
GROWTH, FRAME = 4, 1 << 16
"""A template may write this many times the characters it is given, plus this many."""


Conversation = tuple[list[dict[str, Any]], list[Any], list[Any]]
"""Messages as a template may see them, and the images and videos that are taken out of them, in order."""


def split_into_prompts(content: Any, images: Any, videos: Any) -> list[Conversation]:
    """Turn the arguments of `Processor.chat` into prompts (messages, images, videos): one, or one for each entry of a list.

    `images` and `videos` are placed before the user's text. For several prompts each is a list with an entry (one, a list or
    None) for each prompt. Raises `ModelError` for malformed content.
    """
    if not (_listed(content) and content and all(isinstance(one, str) or _listed(one) for one in content)):
        return [_conversation(content, images, videos)]
    given = _each("images", images, len(content)), _each("videos", videos, len(content))
    return [_conversation(*one) for one in zip(content, *given, strict=True)]


def as_messages(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `content` as messages: unchanged if it is a list of messages; content pieces become one user turn."""
    if "role" in content[0]:
        return [dict(one) for one in content]
    return [{"role": "user", "content": list(content)}]


def images_per_text(images: Any) -> list[list[Any]]:
    """Group `images` by the text they belong to, one list for each text; a flat list gives one image to each text."""
    if images is None:
        return []
    if not _listed(images):
        return [[images]]
    nested = any(_listed(row) for row in images)
    return [list(row) for row in images if row] if nested else [[image] for image in images]


def flatten_videos(videos: Any) -> list[Any]:
    """Flatten `videos` to a list of videos. A list of images is one video; a nested list has the videos of each text."""
    if videos is None:
        return []
    if not _listed(videos) or (videos and all(map(_is_frame, videos))):
        return [videos]
    flat: list[Any] = []
    for item in videos:
        flat.extend(item if _listed(item) and not all(map(_is_frame, item)) else [item])
    return flat


def _listed(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_frame(value: Any) -> bool:
    return hasattr(value, "getbands") or getattr(value, "ndim", 0) == 3


def _each(name: str, given: Any, count: int) -> list[Any]:
    if given is None:
        return [None] * count
    if not _listed(given) or len(given) != count:
        amount = f"{len(given)} entries" if _listed(given) else "one, not a list,"
        raise ModelError(
            f"{name}: {amount} for {count} prompts; give a list with an entry for each, None where there is none."
        )
    return list(given)


def _conversation(content: Any, images: Any, videos: Any) -> Conversation:
    ahead = [{"type": "image", "image": item} for row in images_per_text(images) for item in row]
    ahead += [{"type": "video", "video": item} for item in flatten_videos(videos)]
    if isinstance(content, str):
        if not content.strip():
            raise ModelError("content: the question is empty; ask something.")
        content = [{"type": "text", "text": content}]
    if not _listed(content) or any(not isinstance(piece, Mapping) for piece in content):
        raise ModelError(
            f"content: {errors.quoted(content)} is not a prompt; give a text, or a list of pieces or messages; for "
            "a batch a list of these, and videos=[...] with an entry for each."
        )
    if not content and not ahead:
        raise ModelError("content: it is an empty list; ask something.")
    if not content or "role" not in content[0]:
        content = [{"role": "user", "content": [*ahead, *content]}]
    elif ahead:
        raise ModelError(
            "images and videos of a conversation belong in its messages: give them as pieces there."
        )
    shown: dict[str, list[Any]] = {"image": [], "video": []}
    bare = []
    for message in content:
        pieces = message.get("content")
        if isinstance(pieces, str):
            pieces = [{"type": "text", "text": pieces}]
        if not _listed(pieces):
            raise ModelError(
                f"content: a message holds {errors.quoted(pieces)}; give it a text or pieces as 'content'."
            )
        bare.append({**message, "content": [_without(piece, shown) for piece in pieces]})
    return bare, shown["image"], shown["video"]


def _without(piece: Any, shown: dict[str, list[Any]]) -> dict[str, Any]:
    """The piece as the template may see it; its image or video is put aside, in order."""
    if not isinstance(piece, Mapping):
        raise ModelError(f"content: {errors.quoted(piece)} is not a piece; give a mapping with its type.")
    kind = piece.get("type")
    if kind == "text":
        return {"type": "text", "text": check_text(piece.get("text"), "content")}
    if not isinstance(kind, str) or kind not in shown:
        raise ModelError(
            f"a piece of type {errors.quoted(kind)} is not known: use 'text', 'image' or 'video'."
        )
    name = next((name for name in (kind, "path", "url") if name in piece), None)
    if name is None:
        raise ModelError(
            f"a piece of type {errors.quoted(kind)} holds no {kind}: give it under {errors.quoted(kind)}."
        )
    shown[kind].append(piece[name])
    return {"type": kind}


class ChatText(str):
    """Output of a chat template. Markers in it replace special tokens that users wrote, so that these become plain text.

    plain  marker -> text of the special token that it replaces
    """

    plain: Mapping[str, str]


def render_chat_template(
    tokenizer: Any, template: str, messages: list[Any], *, special_tokens: bool, words: Collection[str]
) -> ChatText:
    """Apply a chat template to `messages`, up to the start of the answer; raises `ModelError` if the template fails.

    special_tokens  whether special tokens inside the texts act as such, as in transformers; else they become plain text
    words           special tokens that become plain text in any case
    """
    plain: dict[str, str] = {}
    if not special_tokens:
        messages, plain = _marked(_special(tokenizer), messages)
    elif words:
        messages, plain = _marked(_any_of(words), messages)
    if not isinstance(template, str):
        raise ModelError("chat template: it is not text; fix the model's chat_template.jinja.")
    try:
        _check(template)
        with _deadline():
            text = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
    except ModelError:
        raise
    except Exception as error:
        # A template is a program: it may fail in any way.
        reason = outside.os_reason(error) if str(error) else type(error).__name__
        raise ModelError(
            f"chat template: it fails ({reason}); fix the model's chat_template.jinja."
        ) from error
    given = sum(len(piece.get("text", "")) for one in messages for piece in one["content"])
    if not isinstance(text, str) or len(text) > GROWTH * given + FRAME * len(messages):
        raise ModelError(
            f"chat template: it writes {len(text)} characters from {given}; fix the model's chat_template.jinja."
        )
    whole = ChatText(text)
    whole.plain = plain
    return whole


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder; raises `ModelError` if it has none that can be read."""
    # Without these AutoTokenizer may give an empty tokenizer instead of an error.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise ModelError(f"{folder} has no tokenizer.json: save the tokenizer there.")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        # The library raises errors of many kinds for a file that is not as it should be.
        raise ModelError(f"{folder} has no tokenizer that can be read: save it there.") from error


def tokenize(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenize a text. The special tokens that a `ChatText` marks as plain are tokenized as ordinary text."""
    plain = text.plain if isinstance(text, ChatText) else {}
    if not plain:
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    marks = re.compile("|".join(map(re.escape, plain)))
    ids: list[int] = []
    for place, piece in enumerate(_special(tokenizer).split(text)):
        if place % 2:
            ids.append(tokenizer.convert_tokens_to_ids(piece))
        elif piece:
            ids += tokenize_plainly(tokenizer, marks.sub(lambda found: plain[found[0]], piece))
    if add_special_tokens:
        bare, framed = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
        begin = next(n for n in range(len(framed)) if framed[n : n + len(bare)] == bare)
        ids = [*framed[:begin], *ids, *framed[begin + len(bare) :]]
    return ids


def append_turn(tokenizer: Any, ids: Tensor, text: ChatText) -> Tensor:
    """Append the next user turn to `ids` [1, n], which end with the model's answer; return all token ids [1, m]. `text`:
    the conversation by the chat template, with `ANSWER` in the answer's place; what follows `ANSWER` is appended. Raises
    `ModelError` for several rows, and for a template that leaves answers out."""
    if ids.ndim != 2 or len(ids) != 1:
        raise ModelError(f"ids: they are {list(ids.shape)}; give those of one conversation, [1, n].")
    _, answer, behind = text.partition(ANSWER)
    if not answer:
        raise ModelError("chat template: it leaves answers out; write the next turn's ids yourself.")
    later = ChatText(behind)
    later.plain = text.plain
    token = tokenizer.added_tokens_decoder.get(int(ids[0, -1])) if ids.numel() else None
    # The template ends the answer itself. Other special tokens at its end are its own, as of a box, and in the cache.
    kept = ids[:, :-1] if token is not None and token.special else ids
    return torch.cat([kept, ids.new_tensor([tokenize(tokenizer, later, add_special_tokens=False)])], 1)


def tokenize_plainly(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text in which special tokens are ordinary text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def iterate_video_clips(
    processor: Any, video: Any, fps: float | None, check: Callable[[], None] | None = None
) -> Generator[Clip, None, None]:
    """Yield the clips of a video: of a path as they are read, of an iterator (of frames, of lists of images, or of
    `media.Video`) as they come, else the one clip given. `fps` is the rate at which a path is read (default 0.5), and that
    of frames without times; `check` is called while waiting for frames of a path, and may raise."""
    from mmaccel.media import clips

    if isinstance(video, Iterator):
        for one in video:
            yield _clip(one, fps, part=True)
    elif isinstance(video, str | os.PathLike):
        warn_tiny_model_video(processor, video)
        rate = READ_FPS if fps is None else fps
        read = clips(video, fps=rate, frames_per_clip=READ_FRAMES, check=check, quiet=QUIET_S)
        with closing(read):
            for one in read:
                yield _clip(one, None, part=True)
    else:
        yield _clip(video, fps)


def _clip(video: Any, fps: float | None, part: bool = False) -> Clip:
    from mmaccel.media import Video
    from mmaccel.media.preprocess import load_frames

    if isinstance(video, Video):
        return Clip(video.frames, video.clock.tolist(), video.fps if fps is None else fps, part)
    if hasattr(video, "__len__") and not len(video):
        return Clip(torch.empty(0, 3, 1, 1, dtype=torch.uint8), None, fps, part)  # refused by who takes it in
    return Clip(load_frames(video, fps)[0], None, fps, part)


def prefix_length(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two lists of token ids."""
    odd = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(odd, min(len(one), len(other)))


def _marked(special: re.Pattern[str], messages: list[Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages, with a random mark in place of each of `special` in their texts."""
    plain: dict[str, str] = {}
    secret = secrets.token_hex(8)

    def mark(found: re.Match[str]) -> str:
        name = f"\ue000{secret}{len(plain)}\ue001"
        plain[name] = found[0]
        return name

    def without(piece: Mapping[str, Any]) -> dict[str, Any]:
        return {**piece, "text": special.sub(mark, piece["text"])} if "text" in piece else dict(piece)

    return [{**one, "content": [without(piece) for piece in one["content"]]} for one in messages], plain


def _special(tokenizer: Any) -> re.Pattern[str]:
    return _any_of({str(token) for token in tokenizer.added_tokens_decoder.values() if token.special})


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


@functools.lru_cache(maxsize=16)
def _check(template: str) -> None:
    """Raise `ModelError` for a template that must not run."""
    import jinja2
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        """Parses, without running it, the block that transformers adds to jinja2."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    if len(template) > outside.TEXT_BYTES:
        raise ModelError(f"chat template: it has more than {outside.TEXT_BYTES} characters.")
    tree = jinja2.Environment(extensions=[Generation, jinja2.ext.loopcontrols]).parse(template)
    for number in tree.find_all(jinja2.nodes.Const):
        if isinstance(number.value, int | float) and not -NUMBER <= number.value <= NUMBER:
            raise ModelError(f"chat template: line {number.lineno} has a number above {NUMBER}.")
    if power := tree.find(jinja2.nodes.Pow):
        raise ModelError(
            f"chat template: line {power.lineno} has a power (**), whose result can have any size."
        )


@contextmanager
def _deadline() -> Iterator[None]:
    """Raise `TimeoutError` in what runs inside and is a template for longer than `SECONDS`."""
    if sys.gettrace() is not None:
        yield  # a debugger is at work
        return
    end = time.monotonic() + SECONDS

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {SECONDS:g} s")
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename in ("<template>", "<unknown>") else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)


def ids_around_video(processor: Any, question: str | list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return the token ids before and after the video in a stream's prompt; `question` is a text, or messages as
    `dialogue.question_messages` returns them."""
    content: Any = [{"type": "video"}, {"type": "text", "text": question}]
    ids, video = (
        processor.template_ids(content if isinstance(question, str) else question),
        processor.video_token_id,
    )
    if ids.count(video) != 1:
        raise ModelError(
            "processor: its chat template does not give a video one place; a stream needs one run of tokens."
        )
    at = ids.index(video)
    return ids[:at], ids[at + 1 :]
