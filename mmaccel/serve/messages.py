"""The fields of `POST /v1/chat/completions` and of the calls on streams, and their checks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=240, allow_inf_nan=False)]


class Strict(BaseModel):
    """Fields that are not known are refused: what would not act is not taken in silence."""

    model_config = ConfigDict(extra="forbid")


class Address(Strict):
    url: str
    detail: str | None = None


class Text(Strict):
    type: Literal["text"]
    text: str


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: Address


class VideoPart(Strict):
    type: Literal["video_url"]
    video_url: Address


Part = Annotated[Text | ImagePart | VideoPart, Field(discriminator="type")]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=256)]
    name: str | None = None

    def parts(self) -> list[Text | ImagePart | VideoPart]:
        """The content as parts, in order."""
        return [Text(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Ours(Strict):
    """Fields beyond OpenAI's.

    recipe      one of the server's recipes, by name
    fps         frames a second of videos, or `frames` evenly spaced; else what the model's own users take
    evidence    tell the frames that the answer is based on, where the recipe's memory is one of streams
    thumbnails  with a small picture of each
    """

    recipe: str | None = None
    fps: Rate | None = None
    frames: Annotated[int, Field(ge=1)] | None = None
    evidence: bool = True
    thumbnails: bool = False


class VideoIO(Strict):
    fps: Rate | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None


class MediaIO(Strict):
    video: VideoIO = VideoIO()


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Named(Strict):
    """A JSON schema; an answer is always held to it, `strict` or not."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class Format(Strict):
    """Text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Named | None = None

    @model_validator(mode="after")
    def _whole(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self


class Sampling(Strict):
    """How an answer is drawn: greedily without a `temperature`."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stream: bool = False
    response_format: Format | None = None

    @property
    def form(self) -> dict[str, Any]:
        """The schema that the answer is held to, as a setting of an answer; none for text."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return {}
        return {"schema": {"type": "object"} if asked.json_schema is None else asked.json_schema.json_schema}

    @property
    def greedy(self) -> bool:
        return not self.temperature

    def options(self) -> dict[str, Any]:
        """The options in the form that `generate` takes."""
        if self.greedy:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": 0}


Stop = Annotated[str, Field(max_length=256)]


class ChatRequest(Sampling):
    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream_options: StreamOptions | None = None
    mmaccel: Ours = Ours()
    media_io_kwargs: MediaIO = MediaIO()
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    # They change nothing of an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
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
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def fps(self) -> float | None:
        return self.mmaccel.fps or self.media_io_kwargs.video.fps

    @property
    def frames(self) -> int | None:
        return self.mmaccel.frames or self.media_io_kwargs.video.num_frames


class SessionRequest(Strict):
    """A stream, new or as `save` wrote it under the name `resume`; `fps` frames a second will come, for `seconds`."""

    model: str | None = None
    recipe: str | None = None
    resume: Name | None = None
    fps: Rate = 1.0
    seconds: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 900.0


class FramesRequest(Strict):
    """Frames of a stream, each a data: address or base64, with the seconds at which they were shown or their rate; or a
    video, of which `fps` frames a second are watched, or with `stored` taken in as a whole."""

    frames: list[str] = []
    times: list[Seconds] | None = None
    video_url: Address | None = None
    fps: Rate | None = None
    stored: bool = False


class AskRequest(Sampling):
    """A question on a stream: of all of it, or of what was shown `between` two seconds; with `chat` it goes on with the
    conversation so far."""

    question: str
    chat: bool = False
    between: tuple[Seconds, Seconds] | None = None
    evidence: bool = True
    thumbnails: bool = False
    timeout: Annotated[float, Field(gt=0)] | None = None


class SaveRequest(Strict):
    name: Name
