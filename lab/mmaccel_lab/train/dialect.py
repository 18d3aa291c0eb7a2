"""From words to token ids, cut out of the tokenizer's own chat template.

Training never spells the template again: the pieces around a video, a question and an answer are read off a rendered
conversation, so what a model was trained on is what the packaged prompt gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmaccel_lab import world
from mmaccel_lab.tiny import EXTRA_WORDS
from mmaccel_lab.tiny.configs import PATCH, Spec
from mmaccel_lab.tiny.tokenizer import SPECIAL, build_tokenizer

Ids = NDArray[np.int64]

# The temporal step of one frame in M-RoPE positions, and how often it is drawn. The step is tokens_per_second times
# the seconds of a frame: 1 at a frame a second. Versions of transformers differ for other rates, and some truncate
# the seconds to an integer, which makes the step 0; a model must not depend on it.
INTERVALS: tuple[tuple[float, float], ...] = ((1.0, 0.8), (0.0, 0.05), (2.0, 0.1), (0.5, 0.05))


def words() -> tuple[str, ...]:
    """Every word that is one token: those of the world and those of caption requests."""
    return tuple(sorted({*world.vocabulary(), *EXTRA_WORDS}))


@dataclass(frozen=True)
class Span:
    """A part of a prompt: text ids, or `frames` frames of video."""

    ids: Ids | None = None
    frames: int = 0


class Dialect:
    """Token ids of prompts and answers for one tiny model.

    `opening` stands before the first piece of content, `closing` between a question and its answer, `turn` between
    an answer and the next question; `video_open` and `video_close` around the tokens of a video.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.tokenizer = build_tokenizer(words(), spec.model_type)
        vocabulary = self.tokenizer.get_vocab()
        self._id = {token[1:]: place for token, place in vocabulary.items() if token.startswith("Ġ")}
        self.video = SPECIAL.index("<|video_pad|>" if spec.mrope else "<video>")
        self.end = SPECIAL.index("<|im_end|>")
        self.pad = SPECIAL.index("<|endoftext|>")
        question, answer = "star", "moon"
        self._begin, self._end = ([SPECIAL.index(f"<|vision_{side}|>")] for side in ("start", "end"))
        said: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
        text = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        first, last = (i for i, token in enumerate(ids) if token == self._id[question])
        reply = ids.index(self._id[answer])
        pad = ids.index(self.video)
        wrapped = spec.model_type == "qwen2_5_vl"
        self.opening = self._array(ids[: pad - wrapped])
        self.video_open = self._array(ids[pad - wrapped : pad])
        self.video_close = self._array(ids[pad + 1 : first])
        self.closing = self._array(ids[first + 1 : reply])
        # An answer ends with the end-of-turn token, which the model itself has to say.
        self.turn = self._array(ids[reply + 2 : last])
        assert ids[reply + 1] == self.end and ids[last + 1 :] == ids[first + 1 : reply]

    @staticmethod
    def _array(ids: Sequence[int]) -> Ids:
        return np.array(ids, dtype=np.int64)

    def encode(self, text: str) -> Ids:
        """Ids of text in the world's spelling (lower case, words and marks separated by spaces)."""
        return self._array([self._id[word] for word in text.split()])

    def spans(self, pieces: Sequence[tuple[Any, ...]]) -> list[Span]:
        """The spans of a prompt up to its question: content pieces `("video", start, stop)` and `("text", words)`."""
        spans = [Span(self.opening)]
        for piece in pieces:
            if piece[0] == "text":
                spans.append(Span(self.encode(piece[1])))
            else:
                spans += [Span(self.video_open), Span(frames=piece[2] - piece[1]), Span(self.video_close)]
        return spans

    def stamp(self, seconds: float) -> Ids:
        """The time that stands before a frame."""
        return self.encode(" ".join((*f"<{seconds:.1f}", "seconds", ">")))

    def _apart(self, spans: Sequence[Span], interval: float) -> Iterator[Span]:
        """The spans with each frame one of its own, behind its time, where a model has them so."""
        for span in spans:
            if span.ids is not None or not self.spec.stamped:
                yield span
                continue
            for frame in range(span.frames):
                yield Span(np.append(self.stamp(frame * (interval or 1.0)), self._begin))
                yield Span(frames=1)
                yield Span(self._array(self._end))

    def lay(self, spans: Sequence[Span], interval: float) -> tuple[Ids, Ids, int]:
        """Ids [S] and positions [S] (LLaVA) or [3, S] (M-RoPE) of a prompt, and the position of the token after it."""
        ids, places, start = [], [], 0
        for span in self._apart(spans, interval):
            if span.ids is not None:
                ids.append(span.ids)
                places.append(np.broadcast_to(np.arange(start, start + len(span.ids)), (3, len(span.ids))))
                start += len(span.ids)
                continue
            count = span.frames * self.spec.tokens_per_frame + self.spec.newline
            ids.append(np.full(count, self.video, dtype=np.int64))
            if not self.spec.mrope:
                places.append(np.broadcast_to(np.arange(start, start + count), (3, count)))
                start += count
            else:
                rows, columns = self.spec.height // PATCH // 2, self.spec.width // PATCH // 2
                frame = np.floor(np.arange(span.frames) * interval).astype(np.int64)
                grid = np.meshgrid(frame, np.arange(rows), np.arange(columns), indexing="ij")
                places.append(np.stack(grid).reshape(3, -1) + start)
                # The text after a video goes on from its first frame's grid, as Qwen2.5-VL has it.
                start += max(rows, columns)
        laid = np.concatenate(places, axis=1)
        return np.concatenate(ids), laid if self.spec.mrope else laid[0], start
