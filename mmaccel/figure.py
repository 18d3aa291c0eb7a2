"""Pictures, where matplotlib is installed: an empty figure, and how one is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmaccel.core.errors import MmaccelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. Raises `MmaccelError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MmaccelError("pictures need matplotlib; pip install matplotlib.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, path: Path) -> None:
    """Write a figure; the ending of the name says how. Raises `MmaccelError` for an ending that matplotlib cannot write."""
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
