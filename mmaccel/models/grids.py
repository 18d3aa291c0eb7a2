"""Writes the frames, cells and marks of images and videos into the fields of a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, TEXT


@dataclass(frozen=True)
class Grid:
    """The tokens of one image or video: `frames` x `rows` x `columns` in order, then `marks` tokens of no frame.

    tiles  the rows and columns of what finer tiles of an image make together; they are the marks, with one more at each
           row's end, which has no cell. None: no mark has
    """

    frames: int
    rows: int
    columns: int
    marks: int = 0
    tiles: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns + self.marks


def fill(b: int, modality: Tensor, queue: dict[int, Iterator[Grid]], fields: dict[str, Tensor]) -> None:
    """Write the segments, frames and cells of sequence `b`, taking its images and videos from `queue` in order."""
    kinds = modality.tolist()
    device = modality.device
    column, segment, frame = 0, 0, 0
    while column < len(kinds):
        kind = kinds[column]
        if kind == TEXT:
            stop = column
            while stop < len(kinds) and kinds[stop] == TEXT:
                stop += 1
        else:
            grid = next(queue[kind], None)
            if grid is None or kinds[column : column + grid.tokens].count(kind) != grid.tokens:
                what = "image" if kind == IMAGE else "video"
                raise ModelError(
                    f"input_ids has {what} placeholders that do not match the pixels given; "
                    "build the inputs with the model's processor."
                )
            stop = column + grid.tokens
            cells = torch.arange(grid.tokens - grid.marks, device=device)
            inside = slice(column, stop - grid.marks)
            fields["frame"][b, inside] = frame + cells // (grid.rows * grid.columns)
            fields["row"][b, inside] = cells // grid.columns % grid.rows
            fields["column"][b, inside] = cells % grid.columns
            if grid.tiles is not None:
                columns = grid.tiles[1]
                place = torch.arange(grid.marks, device=device)
                celled, row = place % (columns + 1) < columns, place // (columns + 1)
                outside = slice(stop - grid.marks, stop)
                fields["row"][b, outside] = torch.where(celled, row, -1)
                fields["column"][b, outside] = torch.where(celled, place % (columns + 1), -1)
            frame += grid.frames
        fields["segment"][b, column:stop] = segment
        segment += 1
        column = stop
