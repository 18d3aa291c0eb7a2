"""Wraps transformers' own processor: its code makes ids and pixels; prompts, video files and limits are as in `Processor`.
Where torchvision is missing, `Processor` makes the same tensors, bit for bit."""

from __future__ import annotations

import copy
import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, one_line_error, quoted
from mmaccel.core.registry import registry
from mmaccel.models import shipped
from mmaccel.models.chat import ChatText, as_messages, tokenize
from mmaccel.models.loading import (
    check_model_type,
    find_or_download_folder,
    read_config,
    read_json,
    resolve_model_name,
)
from mmaccel.models.processor import Processor, processor_specs

TEXT = -1
"""The number of a placeholder that is no token: stock code replaces its text before it is tokenized."""


class HFProcessor(Processor):
    """A transformers processor (`stock`) with the methods of `Processor`, also for families without a `ProcessorSpec`.

    `image`, `video` and `extra` (settings) are None for a family without a `ProcessorSpec`.
    `guessed`: whether the model type is inferred from the class of `stock`, which several types may share.
    """

    guessed = False

    def __init__(self, stock: Any, model_type: str, *, special_tokens: bool = True) -> None:
        self.stock, self.model_type, self.tokenizer = stock, model_type, stock.tokenizer
        self.special_tokens = special_tokens
        template = getattr(stock, "chat_template", None)
        if model_type in processor_specs():
            told = stock.to_dict().items()
            settings = {k: v for k, v in told if not isinstance(v, dict) and k != "processor_class"}
            image, video = stock.image_processor.to_dict(), stock.video_processor.to_dict()
            super().__init__(
                model_type,
                stock.tokenizer,
                image=image,
                video=video,
                extra=settings,
                chat_template=template,
                special_tokens=special_tokens,
            )
            return
        self.own_video_settings = True
        self.style = self.image = self.video = self.extra = None  # type: ignore[assignment]
        self.chat_template = template or getattr(stock.tokenizer, "chat_template", None)
        for kind in ("image", "video"):
            token = getattr(stock, f"{kind}_token", None)
            number = None if token is None else stock.tokenizer.convert_tokens_to_ids(token)
            known = number is not None and number != getattr(stock.tokenizer, "unk_token_id", None)
            setattr(self, f"{kind}_token", token)
            setattr(self, f"{kind}_token_id", number if known else TEXT)

    @property
    def video_processor(self) -> Any:
        """The stock video processor; raises `ModelError` where the stock processor takes images alone."""
        found = getattr(self.stock, "video_processor", None)
        if found is None:
            raise ModelError(
                f"models of type {self.model_type!r} take no videos; give the frames of the video as images."
            )
        return found

    def template_ids(self, content: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.video_token_id != TEXT:
            return super().template_ids(content)
        text, special = self._written(as_messages(content), {"video", "text"})
        before, after = (ChatText(part) for part in text.split(self.video_token or "", 1))
        before.plain = after.plain = text.plain
        ids = tokenize(self.tokenizer, before, add_special_tokens=special)
        return [*ids, TEXT, *tokenize(self.tokenizer, after, add_special_tokens=False)]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that transformers' `AutoProcessor` reads."""
        self.stock.save_pretrained(folder)

    def prepare_pixels(
        self, frames: Tensor, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        given = {"videos": [frames], "video_metadata": [_metadata(frames, None)], "do_sample_frames": False}
        made = self._run(self.video_processor, return_tensors="pt", **given, **_on(device))
        return {name: _as(value, dtype, device) for name, value in made.items()}

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
        stock = self.stock
        plain = {
            mark: word for text in texts if isinstance(text, ChatText) for mark, word in text.plain.items()
        }
        given: dict[str, Any] = {**_on(where["device"]), "padding": len(texts) > 1, "padding_side": side}
        if pictures:
            given["images"] = pictures
        if videos:
            told = [_metadata(frames, rate) for frames, rate in zip(videos, rates, strict=True)]
            # Lists of each text's own: SmolVLM's processor counts these in transformers 5.17, and takes a clip for one.
            counts = [text.count(self.video_token) for text in texts] if self.video_token else []
            own = [slice(end - n, end) for n, end in zip(counts, itertools.accumulate(counts), strict=True)]
            nested = sum(counts) == len(videos)
            given["videos"] = [videos[some] for some in own] if nested else videos
            given["video_metadata"] = [told[some] for some in own] if nested else told
            given["do_sample_frames"] = False
        kinds = (("image", self.image_token, pictures), ("video", self.video_token, videos))
        words = {kind: token for kind, token, visuals in kinds if token and not visuals}
        stray = {kind: token for kind, token in words.items() if any(token in text for text in texts)}
        if self.style is None:
            # Frames of such a family may be made of the token of images, which has to stay.
            for token in stray.values():
                mark = f"\ue000{secrets.token_hex(8)}\ue001"
                plain, texts = {**plain, mark: token}, [text.replace(token, mark) for text in texts]
            stray = {}
        if plain or stray:
            stock = copy.copy(stock)
            stock.tokenizer = _Marking(stock.tokenizer, plain)
            for kind in stray:
                # A placeholder of nothing is a word; stock refuses it.
                setattr(stock, f"{kind}_token", None)
        made = self._run(stock, text=list(texts), add_special_tokens=special, return_tensors="pt", **given)
        return {name: _as(value, where["dtype"], where["device"]) for name, value in made.items()}

    def _run(self, call: Any, **given: Any) -> dict[str, Tensor]:
        try:
            made = call(**given)
        except torch.OutOfMemoryError:  # not the input's fault
            raise
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            step = getattr(getattr(self.stock, "video_processor", None), "temporal_patch_size", None) or 1
            least = f" (of {step} frames or more)" if step > 1 else ""
            raise ModelError(
                f"{type(self.stock).__name__} cannot process these inputs ({one_line_error(error)}); give other images, "
                f"videos{least} or texts; for several videos give frames=, the same number for each."
            ) from error
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}


class _Marking:
    """Wraps a tokenizer so that marks of special tokens are read as the plain text they stand for."""

    def __init__(self, tokenizer: Any, plain: Mapping[str, str]) -> None:
        self._tokenizer, self._plain = tokenizer, plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: list[str], **how: Any) -> Any:
        rows = []
        for one in text:
            whole = ChatText(one)
            whole.plain = self._plain
            rows.append(
                tokenize(self._tokenizer, whole, add_special_tokens=how.get("add_special_tokens", True))
            )
        padding = {name: how[name] for name in ("padding", "padding_side", "return_tensors") if name in how}
        return self._tokenizer.pad({"input_ids": rows}, **padding)


def _metadata(frames: Tensor, rate: float | None) -> dict[str, Any]:
    count, (height, width) = len(frames), frames.shape[-2:]
    told: dict[str, Any] = {"total_num_frames": count, "fps": rate, "frames_indices": list(range(count))}
    return {**told, "duration": rate and count / rate, "height": height, "width": width}


def _on(device: torch.device | str | None) -> dict[str, Any]:
    """The argument by which stock code works on a device; on the CPU it needs none."""
    return {} if device is None or torch.device(device).type == "cpu" else {"device": device}


def _as(value: Tensor, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    # Seconds stay as they are; pixels alone have several axes.
    return value.to(device, dtype if value.is_floating_point() and value.ndim > 1 else value.dtype)


def wrap_processor(
    processor: Any, model_type: str | None = None, *, special_tokens: bool = True
) -> Processor:
    """Return `processor` as a `Processor`: one of ours unchanged, one of transformers as a `HFProcessor` of the model
    type `model_type` (None: inferred from its class). Raises `ModelError` for anything else."""
    if isinstance(processor, HFProcessor) and processor.guessed and model_type is not None:
        special_tokens, processor = special_tokens and processor.special_tokens, processor.stock
    if isinstance(processor, Processor):
        if special_tokens or not processor.special_tokens:
            return processor
        guarded = copy.copy(processor)
        guarded.special_tokens = False
        return guarded
    if not all(hasattr(processor, name) for name in ("tokenizer", "apply_chat_template", "save_pretrained")):
        raise ModelError(
            f"processor: {quoted(processor)} is not a processor; give the model's own, by load_processor or AutoProcessor."
        )
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = type(processor).__name__
    guessed = model_type is None
    if model_type is None or PROCESSOR_MAPPING_NAMES.get(model_type) != name:
        served = {one for family in registry("model").values() for one in getattr(family, "model_types", ())}
        mine = [one for one, kind in PROCESSOR_MAPPING_NAMES.items() if kind == name]
        model_type = next((one for one in mine if one in served), mine[0] if mine else name)
    made = HFProcessor(processor, model_type, special_tokens=special_tokens)
    made.guessed = guessed
    return made


def load_processor(
    source: str | Path, revision: str | None = None, *, special_tokens: bool = True
) -> Processor:
    """Load the processor of a model folder or hub name: transformers' own where torchvision is installed, else ours."""
    place = find_or_download_folder(resolve_model_name(source), revision)
    stock = _stock(place) if find_spec("torchvision") is not None else None
    if stock is None:
        found = Processor.from_pretrained(place, special_tokens=special_tokens)
    else:
        found = wrap_processor(
            stock, str(read_config(place).get("model_type")), special_tokens=special_tokens
        )
        whole = read_json(place / "processor_config.json") or {}
        apart = (place / "video_preprocessor_config.json").is_file()
        found.own_video_settings = apart or bool(whole.get("video_processor"))
    found.tiny = str(source) if str(source) in shipped.NAMES else None
    return found


def _stock(place: Path) -> Any:
    """What stock `AutoProcessor` reads of a folder; None where ours serves its model type instead. Raises `ModelError`."""
    from transformers import AutoProcessor

    config = read_config(place)
    found, cause, ours = None, None, str(config.get("model_type")) in processor_specs()
    try:
        found = AutoProcessor.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # whatever a broken file or package raises
        cause = error
    if hasattr(found, "tokenizer") and (hasattr(found, "video_processor") or not ours):
        return found
    if ours:  # ours says what is wrong, where it is the folder
        return None
    check_model_type(config)
    why = f"it is a {type(found).__name__}" if cause is None else one_line_error(cause)
    raise ModelError(
        f"{place}: transformers cannot load its processor ({why}); install the package that is named, or fix the folder."
    ) from cause
