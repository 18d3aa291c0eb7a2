"""Creates and saves matplotlib figures, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmaccel.core.errors import MmaccelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def create_figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure of `width` x `height` inches. Raises `MmaccelError` if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MmaccelError("pictures need matplotlib; pip install matplotlib.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(drawn: Figure, path: Path) -> None:
    """Write a figure to `path`, in the format of its suffix. Raises `MmaccelError` for a format that matplotlib lacks."""
    told = f"{path}: the picture cannot be written so; end the name in .svg, .png or .pdf."
    if not path.suffix:
        raise MmaccelError(told)
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        drawn.savefig(part, dpi=120)
        part.replace(path)
    except ValueError as error:
        raise MmaccelError(told) from error
    finally:
        part.unlink(missing_ok=True)
