"""The files of a model: what its folder says of the processor, in every layout that transformers has saved; and names that
lead to no folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmaccel.core import outside
from mmaccel.core.errors import ModelError
from mmaccel.models.processor_style import style_of
from mmaccel.models.shipped import NAMES

UNREACHED = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}
)
"""Errors of the hub's client, and of what it sends by, that say nothing of the name."""
UNKNOWN = frozenset({"RepositoryNotFoundError", "HFValidationError"})


@dataclass(frozen=True)
class ProcessorFiles:
    """What a folder says. `image` and `video` are None where it says nothing of them."""

    model_type: str
    config: dict[str, Any]
    tokenizer: Any
    image: dict[str, Any] | None
    video: dict[str, Any] | None
    extra: dict[str, Any]
    chat_template: str | None


def read_folder(name: str | os.PathLike[str]) -> ProcessorFiles:
    """Read a folder, or fetch the small files of a model named on the hub.

    New layout: processor_config.json holds image_processor and video_processor. Older:
    preprocessor_config.json, video_preprocessor_config.json (the image's file stands in for it), and
    processor_config.json with the rest.
    """
    folder = folder_of(name)
    config = config_of(folder)
    whole = _json(folder / "processor_config.json") or {}
    image = whole.get("image_processor") or _json(folder / "preprocessor_config.json")
    video = whole.get("video_processor") or _json(folder / "video_preprocessor_config.json") or image
    style_of(str(config.get("model_type")))
    if image is None and video is None:
        raise ModelError(
            f"{folder} has neither processor_config.json nor preprocessor_config.json: save them there."
        )
    extra = {
        key: value
        for key, value in whole.items()
        if key not in ("image_processor", "video_processor", "processor_class", "chat_template", "auto_map")
    }
    return ProcessorFiles(
        model_type=str(config.get("model_type")),
        config=config,
        tokenizer=_tokenizer(folder),
        image=image,
        video=video,
        extra=extra,
        chat_template=whole.get("chat_template") or _template(folder),
    )


def write_folder(folder: Path, tokenizer: Any, chat_template: str | None, whole: dict[str, Any]) -> None:
    """Write the layout that transformers saves now."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json says; raises `ModelError` where there is none."""
    config = _json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder} has no config.json: name the folder of a saved model.")
    return config


def folder_of(name: str | os.PathLike[str]) -> Path:
    """A folder as it is; of a model on the hub that with its small files, which are fetched. Raises `ModelError`."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or os.fspath(name).count("/") != 1:
        raise ModelError(f"{os.fspath(name)} is not a folder: name the folder of a saved model.")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(os.fspath(name), allow_patterns=["*.json", "*.txt", "*.jinja", "*.model"])
        )
    except Exception as error:
        told = absent(os.fspath(name), error)
        raise ModelError(
            told
            or f"model {os.fspath(name)!r} cannot be fetched from the hub ({' '.join(str(error).split())[:200]})."
        ) from error


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    content = outside.read_json(path, str(path), ModelError, fix="save it again")
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold one JSON object.")
    return content


def _tokenizer(folder: Path) -> Any:
    # Without these AutoTokenizer may give an empty tokenizer instead of an error.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise ModelError(f"{folder} has no tokenizer.json: save the tokenizer there.")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        # The library raises errors of many kinds for a file that is not as it should be.
        raise ModelError(f"{folder} has no tokenizer that can be read: save it there.") from error


def _template(folder: Path) -> str | None:
    old = _json(folder / "chat_template.json")
    if old is not None:
        return old.get("chat_template")
    new = folder / "chat_template.jinja"
    return outside.read_text(new, str(new), ModelError, fix="save it again") if new.is_file() else None


def absent(name: str, error: BaseException) -> str | None:
    """The sentence for a name that neither a folder nor the hub gave; None for an error of another kind."""
    told = {kind.__name__ for one in _causes(error) for kind in type(one).__mro__}
    if told & UNREACHED:
        return (
            f"model {name!r} is not on this machine, and the hub, which may have it, cannot be reached; go online (and "
            f"leave HF_HUB_OFFLINE unset), or give a folder or one of {', '.join(NAMES)}."
        )
    if told & UNKNOWN:
        return f"model {name!r} is neither a folder here nor a model that the hub gives; check the name."
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def own_code(name: str, error: Exception) -> str | None:
    """What is said of a model whose code comes with it, and is not run; None for another error."""
    if "trust_remote_code" not in str(error):
        return None
    return f"model {name!r} brings code of its own, which is not run; give a model of a family that transformers has."
