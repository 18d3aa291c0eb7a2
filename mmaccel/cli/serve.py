"""`mmaccel serve`: serve a model over HTTP to OpenAI clients, with streams and a web page."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mmaccel.cli import choices
from mmaccel.cli.choices import Device, Draft, Dtype, KeepSeconds, Model
from mmaccel.core.errors import MmaccelError, RecipeError

if TYPE_CHECKING:
    from mmaccel.core.recipe import Recipe
    from mmaccel.serve.engine import Engine
    from mmaccel.serve.settings import Settings

KEY = "MMACCEL_KEY"
DEFAULT = ("dense", "mosaic")
"""Recipes without --recipe: the plain model, and a memory for streams."""


def serve(
    model: Model = "tiny-ov",
    recipe: Annotated[
        list[str] | None,
        Option(help="A recipe that requests may name; repeatable, the first is the default (dense, mosaic)."),
    ] = None,
    draft: Draft = None,
    host: Annotated[
        str, Option(help="Where to listen; anything but this machine needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8000,
    keys: Annotated[
        Path | None, Option(help=f"A file with a key on each line; else {KEY} in the environment.")
    ] = None,
    files: Annotated[Path | None, Option(help="The folder of file: addresses.")] = None,
    saves: Annotated[
        Path | None,
        Option(help="The folder into which streams are saved. --ray needs one that all machines see."),
    ] = None,
    private: Annotated[
        bool, Option("--private", help="Read http addresses of private networks and of this machine too.")
    ] = False,
    origin: Annotated[
        list[str] | None, Option(help="A page elsewhere that may call, as https://host; repeatable.")
    ] = None,
    keep_seconds: KeepSeconds = None,
    host_bytes: Annotated[
        str | None, Option(help="Host memory of all streams, as 24GB; the oldest frames are dropped.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    ray: Annotated[
        bool, Option("--ray", help="Run on Ray Serve: when a replica stops, its streams move to another.")
    ] = False,
    replicas: Annotated[str, Option(help="With --ray: how many, or a range by load, such as 1-8.")] = "1",
    gpus: Annotated[
        float | None, Option(min=0, help="With --ray: GPUs per replica (1, or 0 on a CPU).")
    ] = None,
    draft_gpus: Annotated[
        float,
        Option(min=0, max=1, help="With --ray: extra GPUs per replica for its draft process, 0 to 1."),
    ] = 0,
) -> None:
    """Serve a model over HTTP: POST /v1/chat/completions, /v1/streaming/sessions, /metrics, and a web page at /."""
    try:
        from mmaccel.serve.app import run_server
        from mmaccel.serve.settings import Settings

        if ray:
            from mmaccel.serve.replicas import serve_on_ray
    except ImportError as error:
        extra = "ray" if ray else "serve"
        raise MmaccelError(
            f"serve needs {error.name}: install it with pip install 'mmaccel[{extra}]'."
        ) from error
    if not ray and (replicas != "1" or gpus is not None or draft_gpus):
        raise RecipeError("--replicas, --gpus, --draft-gpus: they go with --ray; add it, or leave them out.")
    if saves is not None:
        _check_saves(saves, shared=ray)
    settings = Settings(
        host=host,
        port=port,
        keys=_keys(keys),
        folder=_folder(files, "--files"),
        saves=saves and saves.resolve(),
        private=private,
        origins=tuple(origin or ()),
    )
    if not ray:
        _check_port(host, port)
    chosen = choices.load_recipes(recipe or list(DEFAULT), draft)
    lets_go = [name for name, one in chosen.items() if hasattr(one.kv, "keep_seconds")]
    for name in lets_go or list(chosen):
        chosen[name] = choices.set_frame_retention(chosen[name], keep_seconds, host_bytes, "process_bytes")
    for one in chosen.values():
        choices.check_recipe_on_model(one, model, device)
    if device == "cpu" and gpus:
        raise RecipeError("--gpus: replicas on --device cpu use none; leave it out, or give --device cuda.")
    gpus = float(device != "cpu") if gpus is None else gpus
    if draft_gpus:
        _check_drafts(chosen, gpus)
    make = partial(_engine, model, device, dtype, chosen, settings)
    if ray:
        serve_on_ray(make, settings, replicas, gpus, draft_gpus)
    else:
        run_server(make())


def _check_drafts(chosen: Mapping[str, Recipe], gpus: float) -> None:
    """Raise `RecipeError` where no draft would work on a GPU that --draft-gpus reserves."""
    drafts: list[Any] = [one.draft for one in chosen.values() if getattr(one.draft, "process", False)]
    if not drafts:
        raise RecipeError(
            "--draft-gpus: no recipe drafts in a process of its own; give one whose draft is 'parallel', or leave it out."
        )
    if named := [draft.device for draft in drafts if draft.device]:
        raise RecipeError(
            f"--draft-gpus: a recipe's draft names device {named[0]!r} itself; set that to null, or leave the option out."
        )
    if gpus < 1:
        raise RecipeError(
            "--draft-gpus: a draft's GPU is one beside the replica's own; give that a whole one (--device cuda, --gpus 1), "
            "or leave it out."
        )


def _check_saves(folder: Path, shared: bool) -> None:
    """Raise `RecipeError` where nothing can be saved, before a model is loaded; one that machines share must be there."""
    try:
        if not shared:
            folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RecipeError(
            f"--saves: {folder} cannot be written ({error.strerror or error}); name a folder that this user may write."
        ) from error


def _check_port(host: str, port: int) -> None:
    """Raise `MmaccelError` where nothing can listen, before a model is loaded."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        why = str(error.strerror).partition(" (")[0].lower()  # Python adds the address
        raise MmaccelError(
            f"--port: {host}:{port} cannot be served ({why}); free it, or give another --port."
        ) from error


def _engine(model: str, device: str, dtype: str, chosen: Mapping[str, Recipe], settings: Settings) -> Engine:
    from mmaccel.serve.engine import Engine

    processor = choices.load_supported_processor(model)
    return Engine(Path(model).name, choices.load_cli_model(model, device, dtype), processor, chosen, settings)


def _keys(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return tuple(os.environ.get(KEY, "").split())
    try:
        found = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--keys: {file} cannot be read; name a text file.") from error
    if not found:
        raise RecipeError(f"--keys: {file} has no key; write one on a line.")
    return found


def _folder(folder: Path | None, option: str) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise RecipeError(f"{option}: there is no folder {folder}; name one.")
    return folder
