"""Request schemas of `POST /v1/chat/completions` and of the stream routes, with their checks."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from mmaccel.core.streams.timed_text import LONGEST, make_timed_text

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
ELSEWHERE = {"schema": "response_format"}
"""Fields of `generate` under the names that requests have for them."""


def _as_name(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise ValueError("give 1 to 64 letters, digits, - or _ of ASCII, the first a letter or digit")
    return name


def _in_order(between: tuple[float, float]) -> tuple[float, float]:
    if between[0] > between[1]:
        raise ValueError(f"it begins at {between[0]:g} s and ends before, at {between[1]:g} s; swap the two")
    return between


Name = Annotated[str, AfterValidator(_as_name), Field(json_schema_extra={"pattern": f"^{NAME}$"})]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=240, allow_inf_nan=False)]


class StrictModel(BaseModel):
    """Base model that rejects unknown fields, so that no unsupported option is silently ignored."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        # The first such field ends the check: a body may have millions.
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name in given if isinstance(given, dict) else ():
            if name not in known:
                near = [one for one in [ELSEWHERE.get(name)] if one in known]
                near = near or get_close_matches(str(name)[:64], known, n=1, cutoff=0.85)
                told = (
                    f"there is no such field; take '{near[0]}'" if near else "it is not served; leave it out"
                )
                wrong = PydanticCustomError("unknown_field", "{told}", {"told": told})
                details = InitErrorDetails(type=wrong, loc=(name,), input=None)
                raise ValidationError.from_exception_data(cls.__name__, [details])
        return given


class MediaURL(StrictModel):
    """Where an image or video is: a URL or data URL (OpenAI's `image_url`; `detail` has no effect)."""

    url: str
    detail: str | None = None


def _as_address(given: Any) -> Any:
    if not isinstance(given, str | dict | MediaURL):
        raise ValueError('it is no address; give a text, or {"url": ...}')
    return {"url": given} if isinstance(given, str) else given


Address = Annotated[MediaURL, BeforeValidator(_as_address, json_schema_input_type=str | MediaURL)]
"""An address, by itself or in OpenAI's object."""


class TextPart(StrictModel):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class ImagePart(StrictModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: Address


class VideoPart(StrictModel):
    """A video in a message (vLLM's `video_url`)."""

    type: Literal["video_url"]
    video_url: Address


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise ValueError("it is neither a text nor a list of parts; give one of the two")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(StrictModel):
    """One message of a conversation, as in OpenAI's API."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Part], Field(max_length=256), BeforeValidator(_as_parts, json_schema_input_type=str | list[Part])
    ]
    name: str | None = None


class MmaccelOptions(StrictModel):
    """Request fields beyond OpenAI's.

    recipe      name of one of the server's recipes
    fps         frames per second of videos, or `frames` evenly spaced ones; default: as the model's own processor
    evidence    return the frames that the answer is based on, if the recipe has a KV policy for streams
    thumbnails  return a thumbnail of each of these frames too
    """

    recipe: str | None = None
    fps: Rate | None = None
    frames: Annotated[int, Field(ge=1)] | None = None
    evidence: StrictBool = True
    thumbnails: StrictBool = False


class VideoIOKwargs(StrictModel):
    fps: Rate | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None


class MediaIOKwargs(StrictModel):
    """vLLM's `media_io_kwargs`: options for reading the videos of a request."""

    video: VideoIOKwargs = VideoIOKwargs()


class StreamOptions(StrictModel):
    """OpenAI's `stream_options`: whether a streamed answer ends with its token counts."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class SchemaFormat(StrictModel):
    """A JSON schema; answers always follow it, whatever `strict` is."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class ResponseFormat(StrictModel):
    """Answer format: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self


class SamplingOptions(StrictModel):
    """Sampling options of an answer; greedy without a `temperature`."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stream: StrictBool = False
    response_format: ResponseFormat | None = None

    @property
    def answer_schema(self) -> dict[str, Any]:
        """The JSON schema that the answer must follow, as an argument of `generate`; {} for text."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return {}
        return {"schema": {"type": "object"} if asked.json_schema is None else asked.json_schema.json_schema}

    @property
    def greedy(self) -> bool:
        return not self.temperature

    def options(self) -> dict[str, Any]:
        """The sampling options as arguments of `generate`."""
        if self.greedy:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": 0}


Stop = Annotated[str, Field(max_length=256)]


class ChatRequest(SamplingOptions):
    """A chat completion request as in OpenAI's API. Options with a single supported value, such as `n`, accept no other."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream_options: StreamOptions | None = None
    mmaccel: MmaccelOptions = MmaccelOptions()
    media_io_kwargs: MediaIOKwargs = MediaIOKwargs()
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    # They change nothing of an answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop")
    @classmethod
    def _filled(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop is not None and not all([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop text is empty")
        return stop

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def fps(self) -> float | None:
        return self.mmaccel.fps or self.media_io_kwargs.video.fps

    @property
    def frames(self) -> int | None:
        return self.mmaccel.frames or self.media_io_kwargs.video.num_frames


class SessionRequest(StrictModel):
    """Open a stream, or resume the saved one named `resume`. The client announces that it will send `fps` frames per second
    for `seconds`, for which the server reserves compute time and memory."""

    model: str | None = None
    recipe: str | None = None
    resume: Name | None = None
    fps: Rate = 1.0
    seconds: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 900.0


class TimedTextLine(StrictModel):
    """Text that was said or read from `begin` to `end`, in seconds of the stream. A null `begin` is the time of the stream's
    last frame, and a null `end` is `begin`."""

    text: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=LONGEST)]
    begin: Seconds | None = None
    end: Seconds | None = None

    @model_validator(mode="after")
    def _can_be(self) -> TimedTextLine:
        make_timed_text(*self.resolve_times(0.0), "text")
        return self

    def resolve_times(self, now: float) -> tuple[float, float | None, str]:
        """Return (begin, end, text) in a stream whose last frame is at `now` seconds, which replaces a null `begin`."""
        if self.begin is None:
            return now, max(now, self.end or 0.0), self.text
        return self.begin, self.end, self.text


class FramesRequest(StrictModel):
    """Frames for a stream, each in base64 or as a data URL, with their `times` in seconds or their rate `fps`. Or a video:
    watched at `fps` frames per second, or with `stored` ingested as a whole. Lines of `text` may come with them or alone."""

    text: Annotated[list[TimedTextLine], Field(max_length=256)] = []
    frames: Annotated[list[str], Field(fail_fast=True)] = []
    times: Annotated[list[Seconds], Field(fail_fast=True)] | None = None
    video_url: Address | None = None
    fps: Rate | None = None
    stored: StrictBool = False


class AskRequest(SamplingOptions):
    """A question on all of a stream, or on the seconds `between` two times; with `chat` it continues the conversation."""

    question: str
    chat: StrictBool = False
    between: Annotated[tuple[Seconds, Seconds], AfterValidator(_in_order)] | None = None
    evidence: StrictBool = True
    thumbnails: StrictBool = False
    timeout: Annotated[float, Field(gt=0)] | None = None


class SaveRequest(StrictModel):
    """Save a stream under `name`."""

    name: Name
