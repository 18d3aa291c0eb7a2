"""Finds the tiny models that mmaccel-lab ships; the only file that imports mmaccel-lab."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mmaccel.core.errors import ModelError

NAMES: tuple[str, ...] = (
    *("tiny-ov", "tiny-ov-draft", "tiny-qwen", "tiny-qwen-draft"),
    *("tiny-qwen3", "tiny-hybrid"),
)
CAPTION_REQUEST = "describe the video ."
"""What a tiny model answers with a caption."""
WORLD = "mmaccel world"
"""The comment in the metadata of a file that `mmaccel-lab world` wrote: a tiny model knows nothing of others."""
LAB = "mmaccel_lab"
INSTALL = "`pip install mmaccel-lab`, or `make install` in a checkout"
"""How a user gets mmaccel-lab."""


def tiny_model_folder(name: str) -> Path:
    """Return the folder of a tiny model, in `from_pretrained` layout.

    Raises `ModelError` for an unknown name, if mmaccel-lab is not installed, or if its weights are missing.
    """
    if name not in NAMES:
        raise ModelError(f"There is no tiny model {name!r}; choose one of {', '.join(NAMES)}.")
    try:
        tiny = import_module(f"{LAB}.tiny")
    except ModuleNotFoundError as error:
        if error.name not in (LAB, f"{LAB}.tiny"):
            raise
        raise ModelError(
            f"model {name!r} comes with mmaccel-lab, which is not installed; run {INSTALL}."
        ) from error
    folder: Path = tiny.ROOT / name
    if not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"The weights of {name} are not in {folder}; `make train`, in a checkout, trains and installs them."
        )
    return folder
