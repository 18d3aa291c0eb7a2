"""Converts what a user passes as a video or image to uint8 frames, and these to a model's float pixels, bit for bit as the
processors of transformers do.

Frames stay uint8 through the resize; rescaling and normalising are one subtraction and one division by precomputed
constants. Frames are processed in chunks, so that temporary copies are bounded; results are written in place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.core.errors import VideoError
from mmaccel.media.reader import read
from mmaccel.media.sampling import evenly_spaced_frames
from mmaccel.media.video import Video, read_image

CHUNK = 64
"""Frames resized and normalised at a time."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MODES = {0: "nearest-exact", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """How frames become pixels; fields have the names and meanings of `preprocessor_config.json`.

    `size` is {height, width}, {shortest_edge} or, for patches, the pixel budget {shortest_edge: minimum, longest_edge:
    maximum}. `resample` is PIL's number (0 nearest, 2 bilinear, 3 bicubic). `cap_pixels_per_frame`: frames of a long video
    shrink further, so that all of them together fit `max_video_tokens`.
    """

    size: Mapping[str, int]
    do_resize: bool = True
    resample: int = 3
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: Sequence[float] = CLIP_MEAN
    image_std: Sequence[float] = CLIP_STD
    do_convert_rgb: bool = True
    patch_size: int | None = None
    temporal_patch_size: int | None = None
    merge_size: int | None = None
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int | None = None
    image_grid_pinpoints: Sequence[Sequence[int]] | None = None
    do_pad: bool | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None

    def __post_init__(self) -> None:
        if self.do_resize and self.resample not in MODES:
            raise VideoError(f"resample={self.resample} is not supported: choose one of {MODES}.")

    def with_changes(self, settings: Mapping[str, Any]) -> PixelSettings:
        """A copy of the settings, changed by those in `settings`; unknown and null entries are ignored.

        `min_pixels` and `max_pixels`, from older checkpoints, set the edges of `size`.
        """
        known = {field.name for field in fields(self)}
        changes = {key: value for key, value in settings.items() if key in known and value is not None}
        size = dict(changes.get("size", self.size))
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if settings.get(old) is not None:
                size[new] = settings[old]
        return replace(self, **{**changes, "size": {k: v for k, v in size.items() if v is not None}})

    def to_dict(self) -> dict[str, Any]:
        """The settings as a JSON-ready mapping, without those that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def resize(frames: Tensor, size: tuple[int, int], resample: int = 3) -> Tensor:
    """Resize `[T, 3, H, W]` to (height, width), antialiased, uint8 to uint8; as torchvision's v2 `resize`."""
    if tuple(frames.shape[-2:]) == tuple(size):
        return frames
    mode = MODES[resample]
    smooth = mode != "nearest-exact"
    options: dict[str, Any] = {"align_corners": False, "antialias": True} if smooth else {}
    # The CPU interpolates bytes directly; elsewhere bytes are rounded after interpolating floats.
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    native = frames.device.type == "cpu" and (mode != "bilinear" or fast)
    if frames.is_floating_point() or native or not smooth:
        return F.interpolate(frames, size=size, mode=mode, **options)
    return resize_in_float(frames, size, mode)


def resize_in_float(frames: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resize uint8 frames by float interpolation and rounding, as torchvision does for modes without a uint8 kernel."""
    result = F.interpolate(frames.float(), size=size, mode=mode, align_corners=False, antialias=True)
    return result.clamp_(0, 255).round_().to(frames.dtype)


def normalise(frames: Tensor, pixels: PixelSettings) -> Tensor:
    """Rescale and normalise frames to float32, in one step if both are enabled."""
    if pixels.do_normalize:
        scale = pixels.rescale_factor if pixels.do_rescale else None
        means, deviations = tuple(pixels.image_mean), tuple(pixels.image_std)
        mean, std = (_constant(values, scale, frames.device) for values in (means, deviations))
        return (frames.to(torch.float32) - mean).div_(std)
    return frames * pixels.rescale_factor if pixels.do_rescale else frames


@lru_cache(128)
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], scale: float | None, device: torch.device) -> Tensor:
    """Means or deviations [C, 1, 1], in bytes where a `scale` is given; sent to the device once, for it waits for them."""
    constant = torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
    return constant if scale is None else constant * (1.0 / scale)


def smart_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the (height, width) nearest to the given aspect ratio: multiples of `factor`, `least` to `most` pixels."""
    if max(height, width) > 200 * min(height, width):
        raise VideoError(
            f"frames of {width}x{height} are too narrow: no side may be over 200 times the other."
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt((height * width) / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def resized_size(
    pixels: PixelSettings, frames: int, height: int, width: int, video: bool = True
) -> tuple[int, int]:
    """Return the (height, width) to which `frames` frames of `height` x `width` pixels are resized before they are split
    into patches, by the settings `pixels`. `video`: also apply the pixel budget of a whole video. Raises `VideoError` for
    settings without a size."""
    size = pixels.size
    if not pixels.do_resize:
        return height, width
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    if pixels.merge_size is not None:
        patch, merge, temporal = _cuts(pixels)
        if not least or not most:
            raise VideoError(f"size={dict(size)} must have 'shortest_edge' and 'longest_edge', in pixels.")
        factor = patch * merge
        if video and pixels.cap_pixels_per_frame:
            whole = int((pixels.max_video_tokens or 128000) * factor * factor * 0.9)
            most = max(min(most, whole * temporal // frames), int(least * 1.05))
        return smart_resize(height, width, factor, least, most)
    if size.get("height") and size.get("width"):
        return size["height"], size["width"]
    if least and "longest_edge" not in size:
        longer = int(least * max(height, width) / min(height, width))
        return (least, longer) if height <= width else (longer, least)
    raise VideoError(f"size={dict(size)} must have 'height' and 'width', or 'shortest_edge' alone.")


def to_patches(
    frames: Tensor,
    pixels: PixelSettings,
    *,
    video: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    chunk: int = CHUNK,
) -> tuple[Tensor, tuple[int, int, int]]:
    """Split frames `[T, 3, H, W]` into flat patches `[t*h*w, 3 * temporal * patch * patch]`; also return the grid (t, h, w).

    Patches that the model merges into one token are adjacent rows; the last frame is repeated to fill a temporal patch. An
    image is one frame with `video=False`, which skips the budget of a whole video. Computed on `device` (None: that of the
    frames). Source: Qwen2-VL (arXiv 2409.12191), section 2.1.
    """
    patch, merge, temporal = _cuts(pixels)
    device = torch.device(device) if device is not None else frames.device
    dtype = dtype if pixels.do_normalize or pixels.do_rescale else frames.dtype
    count, _, height, width = frames.shape
    size = resized_size(pixels, count, height, width, video)
    rows, columns = size[0] // patch, size[1] // patch
    if size[0] % (patch * merge) or size[1] % (patch * merge):
        raise VideoError(
            f"frames of {size[1]}x{size[0]} do not divide into patches of {patch * merge}: set do_resize."
        )
    steps = -(-count // temporal)
    result = torch.empty((steps, rows * columns, 3 * temporal * patch * patch), dtype=dtype, device=device)
    stride = max(1, chunk // temporal)
    for step in range(0, steps, stride):
        part = frames[step * temporal : (step + stride) * temporal].to(device)
        part = normalise(resize(part, size, pixels.resample), pixels)
        if lack := -len(part) % temporal:
            part = torch.cat([part, part[-1:].expand(lack, -1, -1, -1)])
        groups = part.view(-1, temporal, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        groups = groups.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        result[step : step + len(groups)].view(groups.shape).copy_(groups)
    return result.flatten(0, 1), (steps, rows, columns)


def to_frames(
    frames: Tensor,
    pixels: PixelSettings,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    chunk: int = CHUNK,
) -> Tensor:
    """Resize and normalise frames `[T, 3, H, W]` to `[T, 3, h, w]` on `device` (None: that of the frames)."""
    device = torch.device(device) if device is not None else frames.device
    dtype = dtype if pixels.do_normalize or pixels.do_rescale else frames.dtype
    size = resized_size(replace(pixels, merge_size=None), len(frames), *frames.shape[-2:])
    result = torch.empty((len(frames), 3, *size), dtype=dtype, device=device)
    for first in range(0, len(frames), chunk):
        part = frames[first : first + chunk].to(device)
        result[first : first + chunk] = normalise(resize(part, size, pixels.resample), pixels)
    return result


def to_tiles(image: Tensor, pixels: PixelSettings, **where: Any) -> Tensor:
    """Split an image `[3, H, W]` into an overview and square tiles at its best resolution, `[1 + tiles, 3, h, w]`.

    Source: LLaVA-NeXT "anyres", as in LLaVA-OneVision (arXiv 2408.03326), section 3.2.
    """
    height, width = best_tiling_resolution(pixels, *image.shape[-2:])
    side = pixels.size.get("height") or pixels.size["shortest_edge"]
    scale_x, scale_y = width / image.shape[2], height / image.shape[1]
    if scale_x < scale_y:
        inner = min(math.ceil(image.shape[1] * scale_x), height), width
    else:
        inner = height, min(math.ceil(image.shape[2] * scale_y), width)
    left, top = (width - inner[1]) // 2, (height - inner[0]) // 2
    fitted = resize(image[None], inner, pixels.resample)
    padded = F.pad(fitted, (left, width - inner[1] - left, top, height - inner[0] - top))[0]
    overview = resize(image[None], (side, pixels.size.get("width") or side), pixels.resample)
    tiles = [
        padded[:, row : row + side, column : column + side]
        for row in range(0, height, side)
        for column in range(0, width, side)
    ]
    return torch.cat([to_frames(tile[None], pixels, **where) for tile in (overview[0], *tiles)])


def pad_and_resize_square(image: Tensor, pixels: PixelSettings, **where: Any) -> Tensor:
    """Pad an image `[3, H, W]` to a square of the mean colour and resize it: `[1, 3, h, w]`. Used where a prompt has several
    images."""
    height, width = image.shape[-2:]
    side = max(height, width)
    mean = [int(value * 255) for value in pixels.image_mean]
    square = image.new_tensor(mean).view(-1, 1, 1).repeat(1, side, side)
    top, left = (side - height) // 2, (side - width) // 2
    square[:, top : top + height, left : left + width] = image
    return to_frames(square[None], pixels, **where)


def best_tiling_resolution(pixels: PixelSettings, height: int, width: int) -> tuple[int, int]:
    """The (height, width) of `image_grid_pinpoints` that preserves most pixels of the image, then wastes fewest."""
    if not pixels.image_grid_pinpoints:
        raise VideoError("image_grid_pinpoints is empty: list the resolutions that images may be cut into.")

    def worth(pinpoint: Sequence[int]) -> tuple[int, int]:
        scale = min(pinpoint[1] / width, pinpoint[0] / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        return kept, kept - pinpoint[0] * pinpoint[1]

    best = max(pixels.image_grid_pinpoints, key=worth)
    return best[0], best[1]


def _cuts(pixels: PixelSettings) -> tuple[int, int, int]:
    if pixels.patch_size is None or pixels.merge_size is None or pixels.temporal_patch_size is None:
        raise VideoError(
            "patch_size, merge_size and temporal_patch_size must be set to cut frames into patches."
        )
    return pixels.patch_size, pixels.merge_size, pixels.temporal_patch_size


def load_frames(
    video: Any, fps: float | None = None, max_frames: int | None = None, frames: int | None = None
) -> tuple[Tensor, float | None]:
    """Return frames uint8 `[T, 3, H, W]` and their rate in frames per second (None: unknown). `video`: a path or URL (read
    at `fps`), a `Video`, an array or tensor `[T, 3, H, W]` or `[T, H, W, 3]`, or a list of images; anything else raises
    `VideoError`. All frames, or `frames` evenly spaced ones.

    An array or list has the rate `fps`, lowered in proportion if `frames` leaves some out.
    """
    if isinstance(video, (str, os.PathLike)):
        video = read(video, fps=fps, max_frames=max_frames, frames=frames)
        return video.frames, video.fps
    if isinstance(video, Video):
        whole, fps = video.frames, video.fps
    else:
        whole = _checked(_stack(video), "video")
    if not whole.numel():
        raise VideoError(f"a video of shape {tuple(whole.shape)} is empty; give at least one frame.")
    if frames is None:
        return whole, fps
    if frames > len(whole):
        raise VideoError(f"frames={frames} is more than the {len(whole)} frames of a video: ask for fewer.")
    return whole[evenly_spaced_frames(len(whole), frames)], fps and fps * frames / len(whole)


def _stack(video: Any) -> Tensor:
    """A list of images, or an array, as frames `[T, 3, H, W]`."""
    if isinstance(video, (list, tuple)):
        if not video:
            raise VideoError("a video is an empty list; give at least one frame.")
        images = [_image(frame) for frame in video]
        if len({image.shape for image in images}) > 1:
            raise VideoError("the frames of a video must all be of one size.")
        return torch.stack(images)
    tensor = _tensor(video)
    if tensor is None or tensor.ndim != 4:
        each = "; give each of its clips by itself" if isinstance(video, Iterator) else ""
        wanted = "a path, a Video, frames [T, 3, H, W] or a list of images"
        raise VideoError(f"a video must be {wanted}, not {_kind(video, tensor)}{each}.")
    if tensor.shape[1] not in (1, 3):
        tensor = tensor.permute(0, 3, 1, 2)
    if tensor.shape[1] not in (1, 3):
        raise VideoError(f"a video must have 1 or 3 colour channels, not the shape {tuple(tensor.shape)}.")
    return tensor.expand(-1, 3, -1, -1).contiguous()


def load_image(image: Any) -> Tensor:
    """A uint8 image `[3, H, W]` of a path, a PIL image, or an array or tensor `[3, H, W]`, `[H, W, 3]` or `[H, W]`;
    transparency becomes white."""
    return _checked(_image(image), "image")


def _image(image: Any) -> Tensor:
    if isinstance(image, (str, os.PathLike)) or (hasattr(image, "convert") and hasattr(image, "getbands")):
        return read_image(image)
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
