"""`Processor`: text, images and videos to model inputs, equal to those of transformers' processors, without torchvision.

`transformers` has no video processor where torchvision is missing. This one reads and writes the same files and gives the
same tensors. A family describes its processors in `Family.processors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.core import errors
from mmaccel.core.errors import ModelError, check_question, check_text, warn
from mmaccel.core.files import outside
from mmaccel.core.registry import registry
from mmaccel.media.preprocess import PixelSettings, load_frames, load_image
from mmaccel.models.chat import (
    ANSWER,
    ChatText,
    append_turn,
    as_messages,
    flatten_videos,
    images_per_text,
    load_tokenizer,
    render_chat_template,
    split_into_prompts,
    tokenize,
)
from mmaccel.models.loading import find_or_download_folder, read_config, read_json
from mmaccel.models.prompt_layout import ProcessorSpec
from mmaccel.models.taking import read_prompt_video


class Processor:
    """Makes the inputs of one model by its tokenizer, its image and video settings and its chat template.

    `processor(text, videos=...)` takes a text with placeholders; `processor.chat(content)` inserts the placeholders itself.
    Create one by `from_pretrained`; or from its parts, and write them to a folder with `save_pretrained`.
    """

    tiny: str | None = None
    """The name of the shipped tiny model that it belongs to, until a warning has said what that model was trained on."""

    def __init__(
        self,
        model_type: str,
        tokenizer: Any,
        *,
        image: Mapping[str, Any] | None = None,
        video: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        special_tokens: bool = True,
    ) -> None:
        """`image` and `video` hold what differs from the stock settings, `extra` the entries of
        processor_config.json.

        `config` (that of the model) fills what these leave open. Raises `ModelError` for a model type
        without a style and for a tokenizer that lacks the placeholders. `special_tokens` says what `chat` and a session do
        with special tokens written in the texts they are given: True, the default, takes them as such, as stock does;
        False takes them as text, so that nobody who only asks a question can end a turn or begin another.
        """
        self.model_type, self.style, self.tokenizer = model_type, _style_of(model_type), tokenizer
        self.own_video_settings = video is not None
        config = dict(config or {})
        (cuts, implied), video = _implied(config), video if video is not None else image
        self.image = PixelSettings(**self.style.image_settings).with_changes(cuts).with_changes(image or {})
        self.video = PixelSettings(**self.style.video_settings).with_changes(cuts).with_changes(video or {})
        given = {name: value for name, value in (extra or {}).items() if value is not None}
        self.extra = {**implied, **given}
        self.special_tokens = special_tokens
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.image_token, self.image_token_id = self._token("image", config)
        self.video_token, self.video_token_id = self._token("video", config)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, special_tokens: bool = True) -> Processor:
        """Load from a model folder (or from the hub, without weights), in any layout that transformers saves.

        New layout: processor_config.json holds image_processor and video_processor. Older: preprocessor_config.json,
        video_preprocessor_config.json (default: the image's file), and processor_config.json for the rest. Raises
        `ModelError` naming the file that is missing or broken.
        """
        place = find_or_download_folder(folder)
        config, whole = read_config(place), read_json(place / "processor_config.json") or {}
        image = whole.pop("image_processor", None) or read_json(place / "preprocessor_config.json")
        video = whole.pop("video_processor", None) or read_json(place / "video_preprocessor_config.json")
        model_type = str(config.get("model_type"))
        _style_of(model_type)
        if image is None and video is None:
            raise ModelError(
                f"{place} has neither processor_config.json nor preprocessor_config.json: save them there."
            )
        template = whole.pop("chat_template", None)
        if not template and (old := read_json(place / "chat_template.json")) is not None:
            template = old.get("chat_template")
        elif not template and (new := place / "chat_template.jinja").is_file():
            template = outside.read_text(new, str(new), ModelError, fix="save it again")
        return cls(
            model_type,
            load_tokenizer(place),
            image=image,
            video=video,
            extra={key: x for key, x in whole.items() if key not in ("processor_class", "auto_map")},
            config=config,
            chat_template=template,
            special_tokens=special_tokens,
        )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer, chat template and processor_config.json, also readable by transformers' `AutoProcessor`."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(place)
        whole = {
            **self.extra,
            "processor_class": self.style.processor,
            "image_processor": {**self.image.to_dict(), "image_processor_type": self.style.image},
            "video_processor": {**self.video.to_dict(), "video_processor_type": self.style.video},
        }
        text = json.dumps(whole, indent=2, sort_keys=True) + "\n"
        (place / "processor_config.json").write_text(text, encoding="utf-8")
        if self.chat_template is not None:
            (place / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    def __call__(
        self,
        text: str | Sequence[str],
        images: Any = None,
        videos: Any = None,
        fps: float | Sequence[float | None] | None = None,
        padding_side: str = "left",
        *,
        frames: int | str | None = None,
        model: Any = None,
        add_special_tokens: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Inputs for `model(**inputs)` and `model.generate(**inputs)`.

        `text` holds one placeholder for each image and video, in order. `images` and `videos` are one or a
        list, or a list for each text (for LLaVA several images of one text are then not cut into tiles). A
        video is a path, a `media.Video`, frames `[T, 3, H, W]` or a list of images. `fps`, one number or one
        a video, is the rate to sample a path at, and the rate of bare frames. `frames` takes so many of each
        video, evenly spaced; with "auto" as many of a path as `model` has room for (several share it), told by a warning.
        Without either, a path gives what the folder's files name, else what the model's own users take (`VideoBudget`).

        `input_ids` and `attention_mask` are `[B, S]`, padded on `padding_side`. Pixels are made on `device`
        in `dtype`, and all tensors lie there.

        Raises `ModelError` when placeholders and visuals do not match.
        """
        texts = [check_text(one, "text") for one in ([text] if isinstance(text, str) else text)]
        if not texts:
            raise ModelError("text is an empty list: give at least one text.")
        if padding_side not in ("left", "right"):
            raise ModelError(f"padding_side={padding_side!r} must be 'left' or 'right'.")
        pictures = [[load_image(image) for image in row] for row in images_per_text(images)]
        shown, rates = self._read(flatten_videos(videos), fps, frames, model)
        self._match(texts, {"image": sum(map(len, pictures)), "video": len(shown)})
        where = {"device": device, "dtype": dtype}
        made = self._inputs(texts, pictures, shown, rates, padding_side, add_special_tokens, where)
        return {name: value.to(device) for name, value in made.items()} if device is not None else made

    def _inputs(
        self,
        texts: list[str],
        pictures: list[list[Tensor]],
        videos: list[Tensor],
        rates: list[float | None],
        side: str,
        special: bool,
        where: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """The inputs, of images [3, H, W] of each text and of videos [T, 3, H, W] at `rates`; see the call."""
        result: dict[str, Any] = {}
        counts: dict[int, list[int]] = {}
        if pictures:
            made, counts[self.image_token_id] = self.style.images(self.image, self.extra, pictures, where)
            result.update(made)
        if videos:
            made, counts[self.video_token_id] = self.style.videos(self.video, self.extra, videos, where)
            result.update(made)
            if self.style.seconds:
                # Without a rate the stock processor takes 24 frames a second.
                step = self.video.temporal_patch_size or 1
                result["second_per_grid_ts"] = torch.tensor([step / (rate or 24) for rate in rates])
        return {**self._pad(self._expand(texts, counts, special), side), **result}

    def prepare_pixels(
        self, frames: Tensor, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Make the pixel inputs of one video's `frames` [T, 3, H, W], without text: pixel values, and the patch grid if the
        model takes one."""
        made, _ = self.style.videos(self.video, self.extra, [frames], {"device": device, "dtype": dtype})
        return {name: value.to(device) for name, value in made.items()} if device is not None else made

    def chat(
        self,
        content: str | Sequence[Any],
        images: Any = None,
        videos: Any = None,
        fps: float | Sequence[float | None] | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Make model inputs for one user turn or a conversation, by the chat template.

        `content` is a text, content pieces in order (`{"type": "video", "video": ...}`, `{"type": "image", "image": ...}`,
        `{"type": "text", "text": ...}`) or messages (`{"role": ..., "content": pieces}`). `images` and `videos` come before
        `content`. A list of texts, piece lists or conversations is a batch, one prompt each; `images` and `videos` are then
        lists with an entry (one, a list, or None) for each. `options` go to `__call__`, such as `frames`: how many
        to take of each video (in a batch, LLaVA-OneVision needs one number for all videos).

        Raises `ModelError`, also if the chat template fails. Special tokens inside texts: see `load_processor`.
        """
        prompts = split_into_prompts(content, images, videos)
        rows = [pictures for _, pictures, _ in prompts]
        clips = [clip for _, _, shown in prompts for clip in shown]
        kinds = {kind for kind, given in (("image", any(rows)), ("video", bool(clips))) if given}
        texts = []
        for bare, _, _ in prompts:
            text, special = self._written(bare, kinds)
            options.setdefault("add_special_tokens", special)
            texts.append(text)
        return self(texts, images=rows, videos=clips or None, fps=fps, **options)

    def template_ids(self, content: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return token ids of messages, or of the content pieces of one user turn, by the chat template. Each video and
        image stays one placeholder, so pieces of type "video" and "image" need no other field."""
        messages = as_messages(content)
        kinds = {piece["type"] for one in messages for piece in one["content"]}
        text, special = self._written(messages, kinds)
        return tokenize(self.tokenizer, text, add_special_tokens=special)

    def next_turn(self, ids: Tensor, question: str) -> Tensor:
        """Return token ids [1, m] for a conversation's next turn: `ids` [1, n] (all turns so far, as `generate` returned
        them), then the user's `question` in the chat template. On the device of `ids`. `generate` needs with them only the
        `past_key_values` of the turn before. Raises `ModelError` for several rows."""
        turns = (("user", "-"), ("assistant", ANSWER), ("user", check_question(question)))
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        return append_turn(self.tokenizer, ids, self._written(messages, ("image", "video"))[0])

    def _written(self, messages: list[dict[str, Any]], shown: Collection[str]) -> tuple[ChatText, bool]:
        """A conversation as text up to where the answer begins, and whether the tokenizer has to add special tokens; `shown`
        has the kinds of visuals in the call."""
        if self.chat_template is None:
            raise ModelError(
                "this folder has no chat template: add chat_template.jinja, or call the processor with text."
            )
        # Beside a video a text that names its placeholder does not mean another video.
        tokens = {"image": self.image_token, "video": self.video_token}
        words = [token for kind, token in tokens.items() if token and kind in shown]
        text = render_chat_template(
            self.tokenizer, self.chat_template, messages, special_tokens=self.special_tokens, words=words
        )
        start = getattr(self.tokenizer, "bos_token", None)
        return text, not (start and text.startswith(start))

    def decode(self, ids: Tensor | Sequence[Any], skip_special_tokens: bool = True) -> Any:
        """Return the text of one row of token ids, or a list of texts for several rows."""
        rows = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if rows and isinstance(rows[0], (list, tuple, Tensor)):
            return [self.decode(row, skip_special_tokens) for row in rows]
        return self.tokenizer.decode(rows, skip_special_tokens=skip_special_tokens)

    def _token(self, kind: str, config: Mapping[str, Any]) -> tuple[str, int]:
        name = f"{kind}_token"
        token = getattr(self.tokenizer, name, None) or self.extra.get(name) or getattr(self.style, name)
        number = self.tokenizer.convert_tokens_to_ids(token)
        if number is None or number == getattr(self.tokenizer, "unk_token_id", None):
            raise ModelError(f"the tokenizer has no token {token!r}: add it as a special token.")
        other = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index", number))
        if other != number:
            raise ModelError(
                f"{token!r} is token {number} of the tokenizer, but {kind}_token_id is {other} in config.json."
            )
        return token, number

    def _read(
        self, videos: list[Any], fps: Any, frames: Any, model: Any
    ) -> tuple[list[Tensor], list[float | None]]:
        rates = list(fps) if isinstance(fps, (list, tuple)) else [fps] * len(videos)
        if len(rates) != len(videos):
            raise ModelError(
                f"fps has {len(rates)} entries for {len(videos)} videos: give one number, or one a video."
            )
        for rate in rates:
            if rate is not None and not (isinstance(rate, Real) and 0 < float(rate) < float("inf")):
                raise ModelError(
                    f"fps: {rate!r}; give a positive number of frames a second, or leave it out."
                )
        if frames is not None and frames != "auto" and (not isinstance(frames, Integral) or int(frames) < 1):
            raise ModelError(
                f"frames: {frames!r}; give the number of frames to take of each video, at least 1, or 'auto'."
            )
        if frames == "auto" and model is None:
            raise ModelError("frames: 'auto' takes what a model has room for; give it as model=.")
        pairs = [
            read_prompt_video(self, video, rate, frames, model, len(videos))
            if isinstance(video, str | os.PathLike)
            else load_frames(video, rate, frames=None if frames == "auto" else frames)
            for video, rate in zip(videos, rates, strict=True)
        ]
        return [shown for shown, _ in pairs], [rate for _, rate in pairs]

    def _match(self, texts: list[str], given: Mapping[str, int]) -> None:
        """Raise `ModelError` where the placeholders are not as many as the visuals `given` of each kind."""
        for kind, token in (("image", self.image_token), ("video", self.video_token)):
            asked = 0 if token is None else sum(text.count(token) for text in texts)
            if given[kind] and token is None:
                raise ModelError(f"models of type {self.model_type!r} take no {kind}s; leave them out.")
            if asked and not given[kind]:
                # As transformers has it.
                warn(
                    f"the text has {asked} placeholders {token!r} and no {kind} is given: each is read as a word."
                )
            elif asked != given[kind]:
                raise ModelError(
                    f"the text has {asked} placeholders {token!r} for {given[kind]} {kind}s: write one for each."
                )

    def _expand(self, texts: list[str], counts: dict[int, list[int]], special: bool) -> list[Tensor]:
        """Token ids of each text, each placeholder repeated as often as its visual has tokens.

        Repeating the id gives what tokenising the repeated placeholder gives, as it is a token of its own,
        and spares the tokenizer a text of megabytes.
        """
        rows = [
            torch.tensor(tokenize(self.tokenizer, text, add_special_tokens=special), dtype=torch.long)
            for text in texts
        ]
        empty = next((number for number, row in enumerate(rows, 1) if not len(row)), None)
        if empty is not None:
            raise ModelError(f"text: number {empty} of {len(rows)} is empty; write a word, or leave it out.")
        for token, number in (
            (self.image_token, self.image_token_id),
            (self.video_token, self.video_token_id),
        ):
            if sum(text.count(token) for text in texts) != sum(int((row == number).sum()) for row in rows):
                raise ModelError(f"the tokenizer splits {token!r}: add it as a special token.")
        left = {number: iter(values) for number, values in counts.items()}
        times = [[next(left[number]) if number in left else 1 for number in row.tolist()] for row in rows]
        return [row.repeat_interleave(torch.tensor(each)) for row, each in zip(rows, times, strict=True)]

    def _pad(self, rows: list[Tensor], side: str) -> dict[str, Tensor]:
        pad = self.tokenizer.pad_token_id
        if pad is None and len({len(row) for row in rows}) > 1:
            raise ModelError(
                "the tokenizer has no pad token, so texts of unequal length make no batch: set pad_token."
            )
        ids = pad_sequence(rows, True, pad or 0, side)
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, side)
        result = {"input_ids": ids, "attention_mask": mask}
        if self.style.type_ids:
            image, video = ids == self.image_token_id, ids == self.video_token_id
            result["mm_token_type_ids"] = image.long() + 2 * video.long()
        return result


def _implied(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json implies: the sizes of patches, where the vision tower cuts frames into them; and, where images have
    tiles, their tokens and how features are chosen."""
    vision, cuts, extra = config.get("vision_config") or {}, {}, {}
    if "spatial_merge_size" in vision:
        cuts = {name: vision.get(name) for name in ("patch_size", "temporal_patch_size")}
        cuts["merge_size"] = vision["spatial_merge_size"]
    if "vision_feature_select_strategy" in config:
        names = ("vision_feature_select_strategy", "vision_aspect_ratio")
        extra = {name: config[name] for name in names if name in config}
        if vision.get("image_size") and vision.get("patch_size"):
            extra["num_image_tokens"] = (vision["image_size"] // vision["patch_size"]) ** 2
    return cuts, extra


def processor_specs() -> dict[str, ProcessorSpec]:
    """Return model type -> `ProcessorSpec`, of all registered families."""
    known: dict[str, ProcessorSpec] = {}
    for family in registry("model").values():
        known.update(getattr(family, "processors", {}))
    return known


def _style_of(model_type: str) -> ProcessorSpec:
    """The style of a model type; raises `ModelError` where no family has one."""
    if model_type not in (known := processor_specs()):
        raise ModelError(
            f"model type {errors.quoted(model_type)} is not one of {', '.join(sorted(known))}, which mmaccel's own "
            "processor serves, and transformers' cannot be loaded; install torchvision, or fix the folder."
        )
    return known[model_type]
