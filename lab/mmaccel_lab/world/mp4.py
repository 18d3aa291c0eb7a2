"""Write a world as an H.264 file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from mmaccel.core.errors import WorldError
from mmaccel_lab.world.drawing import render
from mmaccel_lab.world.world import World

FRAMES_AT_ONCE = 64
COMMENT = "mmaccel world"  # in the file's metadata; the tiny models know it by that (`mmaccel.models.shipped.WORLD`)


def write_mp4(
    world: World,
    path: str | Path,
    height: int = 168,
    width: int = 280,
    crf: int = 20,
    progress: Callable[[int, int | None], None] | None = None,
) -> None:
    """Render `world` and encode it as H.264, yuv420p, at the world's frame rate.

    At most `FRAMES_AT_ONCE` frames are held. `crf` is x264's quality, 0 (lossless) to 51. `progress(done,
    total)` is called after each group of frames. The file appears under its name only when it is complete.
    Raises `WorldError` for an odd side (4:2:0 needs even ones), a `crf` out of range or a place that cannot be written.
    """
    import av

    path = Path(path)
    if height < 2 or width < 2 or height % 2 or width % 2:
        raise WorldError(f"height and width of an mp4 must be even and positive, not {height}x{width}.")
    if not 0 <= crf <= 51:
        raise WorldError(f"crf must lie between 0 and 51, not {crf}.")
    if not path.parent.is_dir():
        raise WorldError(f"the folder {path.parent} does not exist; create it first.")
    if path.is_dir():
        raise WorldError(f"{path} is a folder; give the name of a file in it.")
    if path.suffix.lower() != ".mp4":
        raise WorldError(f"{path} is to be an mp4 file; give a name that ends in .mp4.")

    table = world.table()
    # Two processes may write the same file at once.
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            container.metadata["comment"] = COMMENT
            stream = container.add_stream("libx264", rate=Fraction(world.fps).limit_denominator(1000))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            # x264's macroblock tree reads past a width that 16 does not divide: the same frames gave other files.
            stream.options = {"crf": str(crf), "preset": "veryfast", "x264-params": "no-mbtree=1"}
            for start in range(0, world.frames, FRAMES_AT_ONCE):
                rows = {name: column[start : start + FRAMES_AT_ONCE] for name, column in table.items()}
                for image in render(rows, height, width).permute(0, 2, 3, 1).contiguous().numpy():
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
                if progress is not None:
                    progress(min(start + FRAMES_AT_ONCE, world.frames), world.frames)
            container.mux(stream.encode())
        partial.replace(path)
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise WorldError(f"{path} cannot be written ({why}); give another place.") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
