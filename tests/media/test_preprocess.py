"""Pixels against references written another way; `tests/models/test_processor.py` holds them to the stock processors."""

import math
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.errors import VideoError
from mmaccel.media.preprocess import (
    PixelSettings,
    best_tiling_resolution,
    load_frames,
    load_image,
    normalise,
    resize,
    resize_in_float,
    resized_size,
    smart_resize,
    to_frames,
    to_patches,
    to_tiles,
)
from mmaccel.models.llava_onevision import tiled_token_grid

PATCHES = PixelSettings(
    size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
)
TILES = PixelSettings(
    size={"height": 56, "width": 56}, image_grid_pinpoints=[[56, 112], [112, 56], [112, 112], [168, 56]]
)
# Rescaling and normalising in two steps rounds differently in the last bits; a pixel one grey level away would
# differ by more than 0.01.
CLOSE = {"rtol": 0, "atol": 1e-5}


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Bytes with both fine grain and wide areas."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (*shape[:-2], 3, 3), generator=generator, dtype=torch.uint8)
    wide = torch.nn.functional.interpolate(coarse.view(-1, 3, 3, 3), size=shape[-2:]).view(shape)
    grain = torch.randint(0, 64, shape, generator=generator, dtype=torch.uint8)
    return (wide // 2 + grain).to(torch.uint8)


@pytest.mark.parametrize("size", [(84, 140), (56, 56), (200, 30), (97, 130)])
def test_bicubic_on_bytes_is_that_of_pillow_to_a_grey_level(size: tuple[int, int]) -> None:
    frame = noise(1, 3, 97, 130)
    picture = as_pil(frame[0]).resize(size[::-1], PIL.Image.Resampling.BICUBIC)
    steps = resize(frame, size)[0].int() - torch.from_numpy(np.array(picture)).permute(2, 0, 1).int()
    assert steps.abs().max() <= 1


def test_bytes_off_the_cpu_round_to_the_same_levels() -> None:
    frame = noise(2, 3, 97, 130)
    for number, mode in ((2, "bilinear"), (3, "bicubic")):
        steps = resize(frame, (60, 60), number).int() - resize_in_float(frame, (60, 60), mode).int()
        assert steps.abs().max() <= 1


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([28, 32, 14]))
def test_smart_resize_keeps_its_promises(height: int, width: int, factor: int) -> None:
    least, most = 128 * factor**2, 768 * factor**2
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(VideoError, match="too narrow"):
            smart_resize(height, width, factor, least, most)
        return
    rows, columns = smart_resize(height, width, factor, least, most)
    assert rows % factor == columns % factor == 0
    thin = min(rows, columns) == factor
    assert thin or least <= rows * columns <= most
    if not thin and 0.2 < height / width < 5:
        assert abs(math.log((rows / columns) / (height / width))) < factor * (1 / rows + 1 / columns)


@pytest.mark.parametrize("temporal", [1, 2, 3])
@pytest.mark.parametrize("merge", [1, 2])
def test_patches_hold_the_pixels_of_their_place(temporal: int, merge: int) -> None:
    pixels = PixelSettings(
        size={"shortest_edge": 1, "longest_edge": 10**6},
        patch_size=4,
        temporal_patch_size=temporal,
        merge_size=merge,
        image_mean=(0.5, 0.4, 0.3),
        image_std=(0.2, 0.3, 0.4),
    )
    frames = noise(5, 3, 16, 24)
    flat, (steps, rows, columns) = to_patches(frames, pixels, chunk=3)
    assert (steps, rows, columns) == (-(-5 // temporal), 4, 6)
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    floats = (frames.double() / 255 - mean) / std
    places = [
        (step, top + row, left + column)
        for step in range(steps)
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for row in range(merge)
        for column in range(merge)
    ]
    assert len(places) == len(flat)
    for patch, (step, row, column) in zip(flat, places, strict=True):
        block = [
            floats[min(step * temporal + ahead, 4), :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            for ahead in range(temporal)
        ]
        torch.testing.assert_close(patch.double(), torch.stack(block, 1).flatten(), **CLOSE)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_chunks_change_nothing(chunk: int) -> None:
    frames = noise(9, 3, 60, 90)
    whole, grid = to_patches(frames, PATCHES, chunk=1000)
    part, again = to_patches(frames, PATCHES, chunk=chunk)
    assert torch.equal(whole, part) and grid == again
    assert torch.equal(to_frames(frames, TILES, chunk=1000), to_frames(frames, TILES, chunk=chunk))
    merged = TILES.with_changes({"merge_size": 2})  # says nothing of whole frames
    assert torch.equal(to_frames(frames, merged), to_frames(frames, TILES))
    low, _ = to_patches(frames, PATCHES, dtype=torch.bfloat16, chunk=chunk)
    assert torch.equal(low, whole.bfloat16())


def test_the_budget_of_a_whole_video() -> None:
    capped = PATCHES.with_changes(
        {
            "size": {"shortest_edge": 4 * 784, "longest_edge": 768 * 784},
            "cap_pixels_per_frame": True,
            "max_video_tokens": 1000,
        }
    )
    height, width = 720, 1280
    sizes = {count: resized_size(capped, count, height, width) for count in (1, 2, 20, 200, 2000)}
    for count, (rows, columns) in sizes.items():
        share = max(min(768 * 784, 900 * 784 * 2 // count), int(4 * 784 * 1.05))
        assert rows * columns <= share
    assert sizes[1] == resized_size(capped, 2000, height, width, False)
    assert sizes[1] > sizes[20] > sizes[2000]


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_whole_frames(mode: int) -> None:
    frames = noise(3, 3, 90, 70)
    pixels = TILES.with_changes({"resample": mode})
    small = resize(frames, (56, 56), mode)
    assert small.dtype == torch.uint8
    mean = torch.tensor(pixels.image_mean).double().view(3, 1, 1)
    std = torch.tensor(pixels.image_std).double().view(3, 1, 1)
    torch.testing.assert_close(
        to_frames(frames, pixels).double(), (small.double() / 255 - mean) / std, **CLOSE
    )
    narrow = TILES.with_changes({"size": {"shortest_edge": 35}}).with_changes({})
    assert to_frames(frames, narrow).shape == (3, 3, 45, 35)


def test_parts_of_the_recipe_can_be_left_out() -> None:
    frames = noise(2, 3, 56, 56)
    bare = TILES.with_changes({"do_normalize": False})
    assert torch.equal(to_frames(frames, bare), frames * (1 / 255))
    assert torch.equal(
        to_frames(frames, TILES.with_changes({"do_normalize": False, "do_rescale": False})), frames
    )
    plain = normalise(frames, TILES.with_changes({"do_rescale": False}))
    torch.testing.assert_close(plain[:, 0], (frames[:, 0].float() - TILES.image_mean[0]) / TILES.image_std[0])


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 9))
def test_anyres_tokens_are_those_of_the_unpadded_features(height: int, width: int, most: int) -> None:
    """The count against the unpadding done on a real grid of features."""
    side = 4
    down, across = (edge // 56 for edge in best_tiling_resolution(TILES, height, width))
    found = tiled_token_grid((down, across), side, (height, width), most)
    rows, columns = side * down, side * across
    grid = torch.zeros(rows, columns)
    if width / height > columns / rows:
        pad = (rows - int(round(height * (columns / width), 7))) // 2
        grid = grid[pad : rows - pad]
    else:
        pad = (columns - int(round(width * (rows / height), 7))) // 2
        grid = grid[:, pad : columns - pad]
    ratio = math.sqrt(grid.numel() / (most * side**2))
    shape = [int(edge // ratio) for edge in grid.shape] if ratio > 1.1 else list(grid.shape)
    assert list(found) == shape


DEEP, AS_IT_IS = TILES.with_changes({"size": {"depth": 3}}), PATCHES.with_changes({"do_resize": False})
UNSET = "patch_size, merge_size and temporal_patch_size must be set"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: PATCHES.with_changes({"resample": 1}), "resample=1 is not supported"),
        (lambda: to_frames(noise(1, 3, 9, 9), DEEP), "must have 'height' and 'width'"),
        (lambda: to_patches(noise(1, 3, 60, 60), TILES), UNSET),
        (lambda: to_patches(noise(1, 3, 60, 61), AS_IT_IS), "do not divide into patches"),
        (lambda: to_patches(noise(1, 3, 2, 500), PATCHES), "frames of 500x2 are too narrow"),
        (lambda: to_tiles(noise(3, 60, 60), PATCHES), "image_grid_pinpoints is empty"),
        (lambda: load_frames(torch.zeros(3, 4)), r"not an array of shape \(3, 4\)"),
        (lambda: load_frames(7), "not a int"),
        (lambda: load_frames(torch.zeros(3, 4, 5, 6)), "must have 1 or 3 colour channels"),
        (lambda: load_frames([noise(3, 4, 4), noise(3, 5, 4)]), "must all be of one size"),
        (lambda: load_frames(torch.rand(2, 3, 4, 4)), "video: floating-point pixels must go from 0 to 255"),
        (lambda: load_frames([torch.rand(3, 4, 4)] * 2), "video: .* multiply what goes from 0 to 1 by 255"),
        (lambda: load_image(torch.randn(3, 4, 4).clamp(-2, 2)), "image: floating-point pixels"),
        (lambda: load_image(torch.rand(4, 4, 4)), "image: .* multiply what goes from 0 to 1 by 255"),
        (lambda: load_image(torch.full((3, 4, 4), torch.nan)), "they go from nan to nan"),
        (lambda: load_image(torch.zeros(2, 5, 5)), "must have 1, 3 or 4 channels"),
        (lambda: load_image("none.png"), "there is no file none.png"),
    ],
)
def test_wrong_settings_and_inputs_are_told(wrong: Any, told: str) -> None:
    with pytest.raises(VideoError, match=told):
        wrong()


def test_what_counts_as_a_video_or_an_image(tmp_path: Any) -> None:
    frames = noise(2, 3, 20, 30)
    pictures = [as_pil(frame) for frame in frames]
    for given_ in (frames, frames.numpy(), frames.permute(0, 2, 3, 1), list(frames), pictures):
        assert torch.equal(load_frames(given_, 2.0)[0], frames) and load_frames(given_, 2.0)[1] == 2.0
    assert torch.equal(load_frames(frames[:, :1])[0], frames[:, :1].expand(-1, 3, -1, -1))
    image = frames[0]
    as_pil(image).save(tmp_path / "image.png")
    for shown in (image, image.numpy(), image.permute(1, 2, 0), as_pil(image), tmp_path / "image.png"):
        assert torch.equal(load_image(shown), image)
    clear = torch.cat([image, torch.zeros(1, 20, 30, dtype=torch.uint8)])
    assert (load_image(clear) == 255).all() and (load_image(as_pil(clear)) == 255).all()
    assert (load_image(clear.float()) == 255).all()
    faded = [frames[0].float() / 255, frames[1].float()]  # a dark frame among others is a dark frame
    assert torch.equal(load_frames(faded)[0], torch.stack(faded))


def as_pil(image: Tensor) -> PIL.Image.Image:
    return PIL.Image.fromarray(image.permute(1, 2, 0).numpy())


def test_what_is_kept_of_a_mean_is_float32_whatever_the_default_is() -> None:
    frames = torch.arange(3 * 4 * 4, dtype=torch.uint8).view(1, 3, 4, 4)
    means = {"image_mean": (0.25, 0.5, 0.75)}  # of no other test: they are kept by value
    torch.set_default_dtype(torch.float64)
    try:
        normalise(frames, TILES.with_changes(means))
    finally:
        torch.set_default_dtype(torch.float32)
    assert normalise(frames, TILES.with_changes(means)).dtype == torch.float32
