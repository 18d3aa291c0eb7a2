"""`mmaccel recommend`: which preset to take for a video and its questions, with predicted seconds and memory."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from mmaccel.cli.choices import Json, parse_size
from mmaccel.cli.console import echo, out, print_json, remark
from mmaccel.core import costs
from mmaccel.core.errors import RecipeError
from mmaccel.core.memory.buffers import total_host_bytes


def recommend(
    minutes: Annotated[float, Option(help="Length of the video, or of the stream kept.", min=0.01)] = 10.0,
    questions: Annotated[int, Option(help="Questions about it.", min=1)] = 1,
    memory: Annotated[str | None, Option(help="Memory of the device, as 24GB (all of it).")] = None,
    host_memory: Annotated[str | None, Option(help="Memory of the host, as 64GB (this one's).")] = None,
    fps: Annotated[float, Option(help="Frames to read per second.", min=0.001)] = 0.5,
    frames: Annotated[int | None, Option(help="So many frames, in place of minutes and fps.", min=1)] = None,
    frame_size: Annotated[str, Option(help="Height x width of frames, as 252x448.")] = "252x448",
    model: Annotated[
        str, Option(help="A folder, a shipped or hub name, or a shape; no weights are read.")
    ] = "qwen2.5-vl-7b",
    draft: Annotated[str | None, Option(help="A draft model; presets with a draft need it.")] = None,
    device: Annotated[
        str, Option(help="cpu, cuda or cuda:N, measured once, in a minute; or h100, h200.")
    ] = "auto",
    live: Annotated[bool, Option("--live/--stored", help="Frames of a camera, or of a file.")] = False,
    answer_tokens: Annotated[int, Option(help="Tokens of an answer.", min=1)] = 64,
    lossless: Annotated[bool, Option("--lossless", help="Only lossless presets.")] = False,
    as_json: Json = False,
) -> None:
    """Which preset to take for a video and its questions: predicted seconds and memory of each, and whether it fits."""
    import torch

    from mmaccel.core.rates import DEVICES as KNOWN
    from mmaccel.models.recommend import candidate_recipes, device_rates_of, format_seconds, model_sizes_of
    from mmaccel.models.recommend import recommend as run
    from mmaccel.models.rehearsal import add_measured_overheads
    from mmaccel.models.shapes import SHAPES

    given = re.fullmatch(r"(\d+)x(\d+)", frame_size)
    if not given:
        raise RecipeError(f"--frame-size: {frame_size!r} is not HEIGHTxWIDTH; give one such as 252x448.")
    height, width = int(given[1]), int(given[2])
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device == "auto" and name == "cpu" and not as_json:
        remark(
            f"assumes {model} on this machine's CPU; --model and --device name others, and h100 or h200 need not be here."
        )
    dtype = torch.float32 if name == "cpu" else torch.bfloat16
    sizes = model_sizes_of(model, (height, width), dtype)
    if model not in SHAPES and not as_json:
        remark(
            f"counts {sizes.tokens} tokens a step of time, as in a short video; where the folder's processor caps the "
            "pixels of a whole video, a long one has fewer."
        )
    other = None if draft is None else model_sizes_of(draft, (height, width), dtype)
    rates = device_rates_of(name, sizes)
    work = costs.Workload(
        frames=frames or max(1, round(minutes * 60 * fps)),
        questions=questions,
        answer=answer_tokens,
        live=live,
        memory=rates.memory if memory is None else parse_size(memory, "--memory"),
        host=total_host_bytes() if host_memory is None else parse_size(host_memory, "--host-memory"),
    )
    if name not in KNOWN:
        what = model, (height, width), candidate_recipes(sizes, work, lossless=lossless, draft=other), work
        told: dict[str, Any] = {} if as_json else {"say": remark}
        rates = add_measured_overheads(rates, torch.device(name), sizes, *what, **told)
    found = run(sizes, work, rates, lossless=lossless, draft=other)
    if as_json:
        presets: dict[str, Any] = {
            name: _told(one) | _fits(found.lacks[name]) for name, one in found.costs.items()
        }
        told = {"take": found.name, "why": found.why, "device": rates.name, "frames": work.frames}
        told |= {} if frames else {"minutes": minutes, "fps": fps}
        print_json({**told, "presets": presets, "cannot": found.unfit})
        return
    taken = "" if frames else f" ({minutes:g} minutes at {fps:g} a second; --fps takes another number)"
    echo(f"{model} on {rates.name}, {work.frames} frames of {frame_size} pixels{taken}:\n")
    table = Table(box=None, pad_edge=False)
    memories = ("device", "host") if rates.cuda else ("memory",)  # a CPU has one memory
    for title in ("preset", "first token", "of a later question", "tokens/s", *memories, ""):
        table.add_column(title, justify="left" if title in ("preset", "") else "right")
    for preset, one in found.costs.items():
        parts = zip(memories, found.lacks[preset], strict=False)
        lacks = " and ".join(f"{n / 1e9:.1f} GB of {where}" for where, n in parts if n)
        asked = format_seconds(one.question_s) if one.session else ""
        held = [f"{n / 1e9:.1f} GB" for n in (one.device_bytes, one.host_bytes)][: len(memories)]
        times = format_seconds(one.first_s), asked, f"{1 / one.token_s:.3g}"
        table.add_row(preset, *times, *held, f"lacks {lacks}" if lacks else "fits")
    out().print(table)
    for preset, why in found.unfit.items():
        echo(f"{preset}: no, for {why}.")
    echo(f"\ntake {found.name}: {found.why}" if found.name else f"\n{found.why}")


def _told(one: costs.PredictedCost) -> dict[str, Any]:
    fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "work"}
    return {"first_s": one.first_s, **fields, "total_s": one.total_s}


def _fits(lacks: tuple[int, int]) -> dict[str, Any]:
    return {"fits": lacks == (0, 0), "lacks_device_bytes": lacks[0], "lacks_host_bytes": lacks[1]}
