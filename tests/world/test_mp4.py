"""Worlds as H.264 files: count, likeness, and cards that survive the codec."""

from __future__ import annotations

from pathlib import Path

import av
import pytest
import torch
from torch import Tensor

from mmaccel.core.errors import WorldError
from mmaccel_lab.world import COLOURS, SHAPES, World, render, write_mp4


def decode(path: Path) -> Tensor:
    with av.open(str(path)) as container:
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def world() -> World:
    return World.generate(12, 70, "caption", max_words=200)


@pytest.fixture(scope="module")
def decoded(world: World, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    path = tmp_path_factory.mktemp("mp4") / "world.mp4"
    write_mp4(world, path, 84, 140)
    return decode(path)


def test_round_trip(world: World, decoded: Tensor) -> None:
    drawn = render(world.table(), 84, 140)
    assert decoded.shape == drawn.shape
    error = (decoded.float() - drawn.float()).square().flatten(1).mean(1)
    assert error.max() < 255**2 / 10**2.4, "below 24 dB"


def test_cards_survive(world: World, decoded: Tensor) -> None:
    """Of all colours and of all shapes, the true one is nearest to the decoded frame."""
    table = world.table()
    for card in world.cards:
        for column, names, true in (
            ("colour", list(COLOURS), card.colour),
            ("shape", list(SHAPES), card.shape),
        ):
            row = {name: c[card.frame].expand(len(names), *c.shape[1:]) for name, c in table.items()}
            row[column] = torch.arange(len(names))
            gap = (render(row, 84, 140).float() - decoded[card.frame]).square().flatten(1).mean(1)
            assert names[int(gap.argmin())] == true, card
            # Clearly, not by chance: the runner-up is at least twice as far.
            nearest, second = gap.topk(2, largest=False).values.tolist()
            assert second > 2 * nearest, (card, column)


def test_rate_and_codec(world: World, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = tmp_path / "a name with spaces.mp4"
    write_mp4(world, path, 32, 48, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 70), (70, 70)]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == 1
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height) == (48, 32)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_one_frame(tmp_path: Path) -> None:
    write_mp4(World.generate(0, 1), tmp_path / "one.mp4", 20, 20)
    assert len(decode(tmp_path / "one.mp4")) == 1


def test_nothing_is_left_of_a_broken_run(world: World, tmp_path: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_mp4(world, tmp_path / "world.mp4", 20, 20, progress=stop)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"height": 83}, "height and width of an mp4 must be even and positive, not 83x280."),
        ({"width": 281}, "height and width of an mp4 must be even and positive, not 168x281."),
        ({"height": 0}, "height and width of an mp4 must be even and positive, not 0x280."),
        ({"crf": 52}, "crf must lie between 0 and 51, not 52."),
        ({"path": "missing/world.mp4"}, "the folder {0}/missing does not exist; create it first."),
        ({"path": "world.txt"}, "{0}/world.txt is to be an mp4 file; give a name that ends in .mp4."),
        ({"path": ""}, "{0} is a folder; give the name of a file in it."),
    ],
)
def test_bad_request(world: World, tmp_path: Path, arguments: dict[str, object], sentence: str) -> None:
    arguments = dict(arguments)
    path = tmp_path / str(arguments.pop("path", "world.mp4"))
    with pytest.raises(WorldError) as caught:
        write_mp4(world, path, **arguments)  # type: ignore[arg-type]
    assert str(caught.value) == sentence.format(tmp_path)
