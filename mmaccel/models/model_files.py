"""Folders of models, here and on the hub, and what is said where a name leads to none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmaccel.core import outside
from mmaccel.core.errors import ModelError
from mmaccel.models.shipped import NAMES

UNREACHED = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}
)
"""Errors of the hub's client, and of what it sends by, that say nothing of the name."""
UNKNOWN = frozenset({"RepositoryNotFoundError", "HFValidationError"})


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json says; raises `ModelError` where there is none."""
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder} has no config.json: name the folder of a saved model.")
    return config


def folder_of(name: str | os.PathLike[str]) -> Path:
    """A folder as it is; of a model on the hub that with its small files, which are fetched. Raises `ModelError`."""
    text = os.fspath(name)
    if Path(text).is_dir():
        return Path(text)
    if Path(text).exists() or text.count("/") != 1:
        raise ModelError(f"{text} is not a folder: name the folder of a saved model.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=["*.json", "*.txt", "*.jinja", "*.model"]))
    except Exception as error:
        unfetched = f"model {text!r} cannot be fetched from the hub ({reason_of(error)})."
        raise ModelError(absent(text, error) or unfetched) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object that a JSON file holds; None where there is no file. Raises `ModelError`."""
    if not path.is_file():
        return None
    content = outside.read_json(path, str(path), ModelError, fix="save it again")
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold one JSON object.")
    return content


def reason_of(error: Exception) -> str:
    """What an error says, in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def absent(name: str, error: BaseException) -> str | None:
    """The sentence for a name that neither a folder nor the hub gave; None for an error of another kind."""
    kinds = {kind.__name__ for cause in causes(error) for kind in type(cause).__mro__}
    if kinds & UNREACHED:
        return (
            f"model {name!r} is not on this machine, and the hub, which may have it, cannot be reached; go online (and "
            f"leave HF_HUB_OFFLINE unset), or give a folder or one of {', '.join(NAMES)}."
        )
    if kinds & UNKNOWN:
        return f"model {name!r} is neither a folder here nor a model that the hub gives; check the name."
    return None


def own_code(name: str, error: Exception) -> str | None:
    """What is said of a model whose code comes with it, and is not run; None for another error."""
    if "trust_remote_code" not in str(error):
        return None
    return f"model {name!r} brings code of its own, which is not run; give a model of a family that transformers has."
