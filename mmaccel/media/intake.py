"""Whatever a user calls a video or an image, as uint8 frames `[T, 3, H, W]` or an image `[3, H, W]`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import VideoError
from mmaccel.media.address import is_file
from mmaccel.media.reader import read
from mmaccel.media.sampling import uniform
from mmaccel.media.video import Video

FORMATS = {
    *("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO"),
    *("PCX", "PNG", "PPM", "QOI", "SGI", "TGA", "TIFF", "WEBP"),
}
"""Kinds of image, by Pillow's names, that it decodes by itself."""
PIXELS = 1 << 26
"""Most pixels of an image file."""


def as_frames(
    video: Any, fps: float | None = None, max_frames: int | None = None, frames: int | None = None
) -> tuple[Tensor, float | None]:
    """A path or URL (read at `fps`), a `Video`, an array or tensor `[T, 3, H, W]` or `[T, H, W, 3]`, or a
    list of images; all frames, or `frames` of them, evenly spaced.

    Returns the frames and their rate; the rate of an array is `fps`. Raises `VideoError` for anything else.
    """
    if isinstance(video, (str, os.PathLike)):
        seen = read(video, fps=fps, max_frames=max_frames, frames=frames)
        return seen.frames, seen.fps
    whole, rate = _given(video, fps)
    if not whole.numel():
        raise VideoError(f"a video of shape {tuple(whole.shape)} is empty; give at least one frame.")
    if frames is None:
        return whole, rate
    if frames > len(whole):
        raise VideoError(f"frames={frames} is more than the {len(whole)} frames of a video: ask for fewer.")
    return whole[uniform(len(whole), frames)], rate and rate * frames / len(whole)


def _given(video: Any, fps: float | None) -> tuple[Tensor, float | None]:
    """What is in memory already, as frames and their rate."""
    if isinstance(video, Video):
        return video.frames, video.fps
    if isinstance(video, (list, tuple)):
        if not video:
            raise VideoError("a video is an empty list; give at least one frame.")
        images = [_image(frame) for frame in video]
        if len({image.shape for image in images}) > 1:
            raise VideoError("the frames of a video must all be of one size.")
        return _checked(torch.stack(images), "video"), fps
    tensor = _tensor(video)
    if tensor is None or tensor.ndim != 4:
        each = "; give each of its clips by itself" if isinstance(video, Iterator) else ""
        wanted = "a path, a Video, frames [T, 3, H, W] or a list of images"
        raise VideoError(f"a video must be {wanted}, not {_kind(video, tensor)}{each}.")
    if tensor.shape[1] not in (1, 3):
        tensor = tensor.permute(0, 3, 1, 2)
    if tensor.shape[1] not in (1, 3):
        raise VideoError(f"a video must have 1 or 3 colour channels, not the shape {tuple(tensor.shape)}.")
    return _checked(tensor, "video").expand(-1, 3, -1, -1).contiguous(), fps


def as_image(image: Any) -> Tensor:
    """A path, a PIL image, or an array or tensor `[3, H, W]`, `[H, W, 3]` or `[H, W]`, transparency laid on
    white."""
    return _checked(_image(image), "image")


def _image(image: Any) -> Tensor:
    if isinstance(image, (str, os.PathLike)):
        image = _open(os.fspath(image))
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        return _from_pil(image)
    tensor = _tensor(image)
    if tensor is None or tensor.ndim not in (2, 3):
        wanted = "a path, a PIL image or an array [3, H, W]"
        raise VideoError(f"an image must be {wanted}, not {_kind(image, tensor)}.")
    tensor = tensor[None] if tensor.ndim == 2 else tensor
    if not tensor.numel():
        raise VideoError(f"an image of shape {tuple(tensor.shape)} is empty; give at least one pixel.")
    if tensor.shape[0] not in (1, 3, 4):
        tensor = tensor.permute(2, 0, 1)
    if tensor.shape[0] not in (1, 3, 4):
        raise VideoError(f"an image must have 1, 3 or 4 channels, not the shape {tuple(tensor.shape)}.")
    if tensor.shape[0] == 4:
        # Before it is laid on white, where next to nothing of what goes from 0 to 1 is seen.
        whole = _checked(tensor, "image").float() / 255
        white = whole[:3] * whole[3:] + (1 - whole[3:])
        tensor = white.mul(255 if tensor.is_floating_point() else 255.999).to(tensor.dtype)
    return tensor.expand(3, -1, -1).contiguous()


def _kind(value: object, tensor: Tensor | None) -> str:
    return f"a {type(value).__name__}" if tensor is None else f"an array of shape {tuple(tensor.shape)}"


def _checked(pixels: Tensor, what: str) -> Tensor:
    """`pixels`, which go from 0 to 255 as floats too. Those from 0 to 1, or normalised, a model would see as black."""
    if pixels.is_floating_point() and pixels.numel():
        least, most = pixels.min().item(), pixels.max().item()
        # What is normalised by the means of CLIP or ImageNet stays below 3; interpolation may go a little below 0.
        if not (least == most == 0 or (1 if least >= 0 else 3) < most < float("inf")):
            raise VideoError(
                f"{what}: floating-point pixels must go from 0 to 255, as bytes do, and here they go from {least:.3g} to "
                f"{most:.3g}; give bytes, or multiply what goes from 0 to 1 by 255."
            )
    return pixels


def _tensor(value: Any) -> Tensor | None:
    """What holds numbers, as a tensor of pixels; None for what is no array."""
    if isinstance(value, Tensor):
        tensor = value
    elif type(value).__module__ == "numpy" and hasattr(value, "shape"):
        try:
            tensor = torch.from_numpy(value.copy() if any(step < 0 for step in value.strides) else value)
        except (TypeError, ValueError) as error:
            raise VideoError(f"pixels are numpy {value.dtype}; give bytes (uint8), 0 to 255.") from error
    else:
        return None
    kinds = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        kind = "sparse"
    elif tensor.is_meta:
        kind = "on the meta device, where nothing is stored"
    elif tensor.dtype in kinds:
        return tensor
    raise VideoError(f"pixels are {kind}; give a dense tensor of bytes (uint8), 0 to 255.")


def _open(path: str) -> Any:
    # Pillow reads a photo's own orientation, and its JPEG decoder is the one that models were trained with.
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise VideoError(f"{path} is an image file, and these need Pillow: install pillow.") from error
    try:
        if not is_file(path):
            raise VideoError(f"{path} is not a file: name an image file.")
        with PIL.Image.open(path) as image:
            if image.format not in FORMATS:
                # Some are run by other programs, such as PostScript.
                raise VideoError(
                    f"{path} is an image in a format that mmaccel does not read: {image.format}."
                )
            width, height = image.size
            if width * height > PIXELS:
                raise VideoError(
                    f"{path} has {width} x {height} pixels, more than {PIXELS}: make it smaller."
                )
            image.load()
            return PIL.ImageOps.exif_transpose(image)
    except PIL.Image.DecompressionBombError as error:
        raise VideoError(f"{path} has more than {PIXELS} pixels: make it smaller.") from error
    except VideoError:
        raise
    except Exception as error:
        # Pillow's plugins raise errors of many kinds for a damaged file.
        told = getattr(error, "strerror", None) or "no known format, or damaged"
        raise VideoError(f"{path} cannot be read as an image: {told}.") from error


def _from_pil(image: Any) -> Tensor:
    import numpy
    import PIL.Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
