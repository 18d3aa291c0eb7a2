"""Turns command-line arguments into a model, processor, recipes and video; defines options shared by several commands."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from rich.progress import Progress
from torch import nn
from typer import Option

from mmaccel.backends import select
from mmaccel.cli.console import plural, remark, show_bar
from mmaccel.core.attach import Accelerated, accelerate, family_of
from mmaccel.core.errors import ModelError, RecipeError, UnknownName, VideoError, VideoStalled, VideoWarning
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.recipe import (
    Recipe,
    list_recipes,
    read_recipe_fields,
    recipe_file_extensions,
    stream_policy,
)
from mmaccel.core.registry import registry
from mmaccel.core.streams.session_io import load_saved_dtype
from mmaccel.core.streams.sources import StreamEvent, clips_with_reconnect
from mmaccel.models import load_processor, loading

if TYPE_CHECKING:
    from mmaccel.core.streams.session import VideoSession
    from mmaccel.media import Video

DTYPES = ("auto", "bfloat16", "float16", "float32")
MAX_FRAMES = 4096
READ_OPTIONS = {"fps": "--fps", "frames": "--frames", "max_frames": "--max-frames", "timeout": "--timeout"}
"""The options of a command that give arguments of `media.read`."""


def choose_device(device: str) -> str:
    """Return an available device; "auto" is the first CUDA device, or else the CPU. Raises `ModelError` for any other."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(loading.check_device(device, "--device"))


def check_dtype_name(name: str) -> str:
    """Check a dtype's name; raises `UnknownName` for an unknown one."""
    if name not in DTYPES:
        raise UnknownName("dtype", name, DTYPES)
    return name


Model = Annotated[str, Option(help="A shipped model's name, a folder, or a hub name.")]
DEVICES, TYPES = "auto, cpu, cuda or cuda:N.", "auto, float32, bfloat16 or float16."
Device = Annotated[str, Option(callback=choose_device, help=DEVICES)]
Dtype = Annotated[str, Option(callback=check_dtype_name, help=TYPES)]
Draft = Annotated[str | None, Option(help="Folder or name of the draft model.")]
Json = Annotated[bool, Option("--json", help="One JSON object on standard output, nothing else.")]
Fps = Annotated[float | None, Option(help="Frames to read per second.")]


def _parse_frames(text: str) -> int | str:
    """Parse --frames: a number or "auto"; raises `VideoError` for anything else."""
    if text != "auto" and not text.isdecimal():
        raise VideoError(f"--frames {text}: give a number, or auto for as many as there is room for.")
    return text if text == "auto" else int(text)


Frames = Annotated[
    Any, Option(parser=_parse_frames, metavar="N|auto", help="Sample N frames evenly; auto: as many as fit.")
]
Timeout = Annotated[float | None, Option(help="Seconds that an address or a pipe may be silent (30).")]
Longest = Annotated[int, Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")]


def policy_has_field(kind: str, name: str, field: str) -> bool:
    """Return whether the policy `name` of `kind` has the field `field`."""
    return any(one.name == field for one in dataclasses.fields(registry(kind)[name]))


def load_recipe(text: str, draft: str | None = None) -> Recipe:
    """Load a recipe by its name, or from a YAML file or a table of head patterns.

    `draft` is the name or folder of a draft model. It becomes the `model` of the recipe's draft strategy, if that takes one;
    a recipe without a draft gets sequential drafting with this model.
    """
    fields = read_recipe_fields(text)
    if draft is None:
        return Recipe.load(fields)
    wanted = fields.get("draft")
    chosen: dict[str, Any] = dict(wanted) if isinstance(wanted, dict) else {"name": wanted or "off"}
    name = chosen.get("name")
    if name == "off":
        chosen = {"name": "sequential", "model": draft}
    elif isinstance(name, str) and name in registry("draft") and policy_has_field("draft", name, "model"):
        chosen["model"] = draft
    return Recipe.load({**fields, "draft": chosen})


def load_recipes(texts: Sequence[str], draft: str | None = None) -> dict[str, Recipe]:
    """Load recipes, keyed by the name they are shown under: the text given, or a file's name without its suffix."""
    found: dict[str, Recipe] = {}
    for text in texts:
        name = Path(text).stem if text.endswith(recipe_file_extensions()) else text
        if name in found:
            raise RecipeError(f"recipe {name!r} is given twice; give each once, or rename one of the files.")
        found[name] = load_recipe(text, draft)
    return found


KeepSeconds = Annotated[
    float | None, Option(help="Drop frames that are older than so many seconds.", show_default=False)
]


def set_frame_retention(
    recipe: Recipe, keep_seconds: float | None, host_bytes: str | None, field: str
) -> Recipe:
    """Set in a recipe for streams how many seconds of frames are kept, and the memory cap `field` ("host_bytes" or
    "process_bytes") beyond which the oldest are dropped; raises `RecipeError` for a KV policy that cannot drop frames."""
    kv: Any = recipe.kv
    if keep_seconds is None and host_bytes is None:
        return recipe
    if not {"keep_seconds", "store"} <= {one.name for one in dataclasses.fields(kv)}:
        option = "--keep-seconds" if keep_seconds is not None else "--host-bytes"
        raise RecipeError(
            f"{option}: kv {recipe.kv.name!r} lets nothing go for it; choose rekv or mosaic, or leave it out."
        )
    if keep_seconds is not None:
        kv = dataclasses.replace(kv, keep_seconds=keep_seconds)
    if host_bytes is not None:
        own: dict[str, Any] = {field: parse_size(host_bytes, "--host-bytes"), "spill": "drop_oldest"}
        kv = dataclasses.replace(kv, store=dataclasses.replace(kv.store, **own))
    return dataclasses.replace(recipe, kv=kv)


SHARES = {"": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str, option: str) -> int:
    """Return the bytes of a size such as 24GB or 22.5GiB. Raises `RecipeError`, also for a small number without a unit."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    least = 1 if found and found[2] else 1 << 20
    if not found or found[2].upper() not in SHARES or float(found[1]) * SHARES[found[2].upper()] < least:
        raise RecipeError(f"{option}: {text!r} is not a size; give one such as 24GB or 22.5GiB.")
    return int(float(found[1]) * SHARES[found[2].upper()])


def load_session(session: VideoSession, folder: Path, asked: list[tuple[float | None, str]]) -> None:
    """Load the session saved in `folder`; raises `ModelError` if a question of `asked` is for a time before its end."""
    session.load(folder)
    for at, text in asked:
        if at is not None and at < session.seconds:
            end = f"the saved session is at {session.seconds:g} s"
            raise ModelError(f"--question: {text!r} is for {at:g} s, and {end}; leave out @{at:g}.")


def load_stream_recipe(text: str) -> Recipe:
    """Load a recipe for streams, by name or YAML file; raises `RecipeError` if its KV policy does not support streams."""
    streams = [name for name, kv in registry("kv").items() if issubclass(kv, StreamPolicy)]
    if not text.endswith((".yaml", ".yml")) and text not in list_recipes():
        raise UnknownName("memory of streams", text, streams, own=True)
    found = load_recipe(text)
    stream_policy(found)
    return found


def check_recipe_on_model(recipe: Recipe, model: str, device: str) -> None:
    """Raise `RecipeError` if `recipe` cannot run prompts of `model` on `device`; loads no weights."""
    if recipe.backend != "auto":
        select.get_op(recipe.backend, device)
    loading.check_recipe(recipe, model)


def load_supported_processor(model: str) -> Any:
    """Load the processor of a model by name or folder; raises `ModelError` for an unsupported family."""
    found = load_processor(model)
    family_of(found.model_type)
    return found


def load_cli_model(model: str, device: str, dtype: str, saved: Path | None = None) -> nn.Module:
    """Load a model on a device. `dtype` "auto": that of the saved session in `saved`, or else float32 on the CPU and the
    checkpoint's own dtype on other devices. Raises `ModelError` if `dtype` differs from that of the saved session."""
    if saved is not None and (own := load_saved_dtype(saved)) in DTYPES:
        if dtype not in ("auto", own):
            raise ModelError(
                f"--dtype: {saved} was saved from a model in {own}, not {dtype}; give {own}, or leave --dtype out."
            )
        dtype = own
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    return loading.load_model(model, "auto" if dtype == "auto" else getattr(torch, dtype), device)


def attach_recipe(model: nn.Module, recipe: Recipe, progress: Progress) -> Accelerated:
    """Accelerate the model by a recipe; shows a progress bar while a draft model loads or its process starts."""
    task = progress.add_task("draft", total=1, unit="started", visible=recipe.draft.active)
    try:
        return accelerate(model, recipe)
    finally:
        progress.remove_task(task)


def read_video(
    path: str,
    processor: Any,
    progress: Progress,
    *,
    fps: float | None = None,
    frames: int | str | None = None,
    max_frames: int | None = None,
    timeout: float | None = None,
    model: nn.Module | None = None,
    recipe: Recipe | None = None,
) -> Video:
    """Read a video's frames for a model: as many as the options ask for ("auto": as many as `model` can hold under
    `recipe`), or else as the model's default `VideoBudget` says."""
    from mmaccel.models.taking import max_frames_that_fit, read_sampled_video

    if frames is not None and (fps is not None or max_frames is not None):
        raise VideoError(
            "--frames says how many frames, --fps and --max-frames bound them; give one or the other."
        )
    if fps is not None and max_frames is None:
        max_frames = MAX_FRAMES
    if frames == "auto":
        assert model is not None
        frames, told = max_frames_that_fit(processor, model, path, recipe)
        remark(told.replace("frames='auto'", "--frames auto"))
    how: dict[str, Any] = {"fps": fps, "frames": frames, "max_frames": max_frames, "timeout": timeout}
    with name_options_in_errors():
        return read_sampled_video(
            processor, path, **how, faster=fps is None, progress=show_bar(progress, "decode", "frames")
        )


def load_model_and_video(
    load: Callable[[], nn.Module], recipe: Recipe, path: str, processor: Any, progress: Progress, **how: Any
) -> tuple[nn.Module, Video]:
    """Load the model by `load()`, the frames by `read_video`: frames first, unless their number depends on the model."""
    early = load() if how["frames"] == "auto" else None
    seen = read_video(path, processor, progress, **how, model=early, recipe=recipe)
    return load() if early is None else early, seen


@contextmanager
def name_options_in_errors() -> Iterator[None]:
    """Context in which errors and warnings of `media.read` name command-line options instead of the function's arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", VideoWarning)
        try:
            yield
        except VideoError as error:
            raise VideoError(error.to_text(READ_OPTIONS)) from error
    for one in caught:
        told = one.message.to_text(READ_OPTIONS) if isinstance(one.message, VideoWarning) else one.message
        warnings.warn(told, one.category, stacklevel=3)


def format_frame_rate(fps: float, own: float | None) -> str:
    """Return the line that tells how many frames per second are read; `own` is the source's mean rate, None if unknown."""
    if own is not None and fps > 1.001 * own:
        return (
            f"reads {fps:g} frames a second (--fps); the source has {own:g} on average, and what stands is taken as --gaps "
            "says."
        )
    if own is not None and fps > 0.999 * own:
        return f"reads every frame, {own:g} a second (--fps)."
    of = "" if own is None else f" of {own:g}"
    return (
        f"reads {fps:g}{of} frames a second (--fps); what is shown for less than {1 / fps:g} s may be missed."
    )


def reconnecting_clips(
    opens: Callable[[], Any], note: Callable[[StreamEvent], None]
) -> Generator[Video, None, None]:
    """Yield clips of a camera or URL, which `opens` reopens whenever it ends; each break is printed and given to `note`."""

    def told(event: StreamEvent) -> None:
        note(event)
        why = f" ({event.why.rstrip('.')})" if event.why else ""
        remark(f"{event.kind} at {event.seconds:g} s{why}: it is opened again until frames come")

    def shifted(clip: Video, seconds: float) -> Video:
        return dataclasses.replace(clip, clock=clip.clock + seconds)

    return clips_with_reconnect(opens, lambda: None, told, 0.0, lambda clip: clip.clock.tolist(), shifted)


def clips_until_error(
    clips: Iterator[Video], video: str, fps: float, broken: list[VideoError], *, guess: bool, quiet: bool
) -> Iterator[Video]:
    """Yield clips until the source ends, stalls or fails. Its error is appended to `broken`, or raised if no clip has come.

    Unless `quiet`, first prints `fps`, the rate at which frames are read, and the source's mean rate. Raises `VideoError` if
    `fps` exceeds both that mean rate and `FASTEST`. `guess`: the source's rate is only a guess, and counts as unknown.
    """
    from mmaccel.media.sampling import FASTEST

    begun = False
    try:
        for part in clips:
            if not begun:
                own = None if guess or not part.source_fps > 0 else part.source_fps
                if fps > max(FASTEST, 1.001 * (own or 0.0)):
                    raise VideoError(
                        f"--fps: {fps:g} is more than the {max(FASTEST, own or 0.0):g} frames a second that can be read "
                        f"of {video}; give no more."
                    )
                if not quiet:
                    remark(format_frame_rate(fps, own))
            begun = True
            yield part
    except VideoError as error:
        told = error
        if isinstance(error, VideoStalled):
            name, frames = str(error).partition(" stalled:")[0], plural(error.frames, "frame")
            told = VideoError(
                f"{name} stalled: nothing came for {error.seconds:g} s after {frames}, and it has not ended; "
                "raise --timeout."
            )
            told.__cause__ = error
        if not begun:
            raise told from told.__cause__
        broken.append(told)
