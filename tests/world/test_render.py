"""What a world looks like: pixels follow the table alone, show what the records say, and survive a film's codec."""

from pathlib import Path
from unittest.mock import Mock

import av
import pytest
import torch
from torch import Tensor

from mmaccel.core.errors import WorldError
from mmaccel_lab.world import COLOURS, SCENES, SHAPES, World, render, write_mp4
from mmaccel_lab.world.drawing import ASPECT, CARD_WIDTH, CHUNK_PIXELS, PAPER
from mmaccel_lab.world.scenery import wave
from mmaccel_lab.world.shapes import POLYGONS, REACH, SIZE, atlas, polygon_distance
from tests.spies import refusal

Table = dict[str, Tensor]


def pick(table: Table, rows: Tensor | slice) -> Table:
    return {name: column[rows] for name, column in table.items()}


@pytest.fixture(scope="module")
def table() -> Table:
    return World.generate(21, 40, "caption").table()


@pytest.mark.parametrize("size", [(84, 140), (112, 112), (37, 61), (1, 1), (5, 300)])
def test_any_size(table: Table, size: tuple[int, int]) -> None:
    frames = render(pick(table, slice(0, 6)), *size)
    assert frames.dtype == torch.uint8
    assert frames.shape == (6, 3, *size)


def test_a_frame_does_not_depend_on_its_neighbours(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = render(table, 50, 70)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert render(pick(table, order), 50, 70).equal(whole[order])
    for i in range(0, 40, 7):
        assert render(pick(table, slice(i, i + 1)), 50, 70)[0].equal(whole[i])
    for pixels in (1, 50 * 70 * 3):
        monkeypatch.setitem(CHUNK_PIXELS, "cpu", pixels)
        assert render(table, 50, 70).equal(whole)


def test_tables_of_several_worlds_concatenate() -> None:
    tables = [World.generate(seed, 5, style).table() for seed, style in ((1, "needle"), (2, "caption"))]
    joined = {name: torch.cat([t[name] for t in tables]) for name in tables[0]}
    expected = torch.cat([render(t, 28, 28) for t in tables])
    assert render(joined, 28, 28).equal(expected)


def test_an_empty_table_gives_no_frames(table: Table) -> None:
    assert render(pick(table, slice(0, 0)), 20, 20).shape == (0, 3, 20, 20)


def test_only_card_frames_have_cards() -> None:
    world = World.generate(3, 50)
    table = world.table()
    bare = {**table, "shape": torch.full_like(table["shape"], -1)}
    changed = (render(table, 40, 60) != render(bare, 40, 60)).flatten(1).any(1)
    assert changed.nonzero()[:, 0].tolist() == [card.frame for card in world.cards]


def test_card_pixels_have_the_named_colour(table: Table) -> None:
    height, width = 168, 280
    rows = (table["shape"] >= 0).nonzero()[:, 0]
    frames = render(pick(table, rows), height, width).float()
    for i, row in enumerate(rows.tolist()):
        x, y, half = table["place"][row].tolist()
        assert 2 * half >= 0.5
        left, right = ((x + s * half * CARD_WIDTH * 0.8) * width / ASPECT for s in (-1, 1))
        top, bottom = ((y + s * half * 0.8) * height for s in (-1, 1))
        inner = frames[i, :, round(top) : round(bottom), round(left) : round(right)].flatten(1)
        ink = torch.tensor(list(COLOURS.values())[int(table["colour"][row])]).float()
        inked = ((inner - ink[:, None]).abs().amax(0) <= 1).float().mean()
        paper = ((inner - PAPER).abs().amax(0) <= 1).float().mean()
        # Nothing but ink, paper and the blend on the outline between them.
        assert inked > 0.12, row
        assert paper > 0.12, row
        assert inked + paper > 0.8, row


def test_scenes_are_told_apart(table: Table) -> None:
    """The mean colours of the frame's upper and lower half differ more between scenes than within one."""
    rows = torch.arange(40)
    means = []
    for scene in range(len(SCENES)):
        one = {**table, "scene": torch.full_like(rows, scene), "shape": torch.full_like(rows, -1)}
        halves = render(one, 112, 112).float().reshape(40, 3, 2, 56, 112)
        means.append(halves.mean((3, 4)).flatten(1))
    features = torch.stack(means)
    centre = features.mean(1)
    within = (features - centre[:, None]).norm(dim=2).max()
    between = torch.pdist(centre).min()
    assert between > 2 * within


def test_shapes_differ_at_84_by_140() -> None:
    world = World.generate(0, 1)
    table = pick(world.table(), torch.zeros(len(SHAPES), dtype=torch.long))
    table["shape"] = torch.arange(len(SHAPES))
    table["colour"] = torch.full((len(SHAPES),), list(COLOURS).index("black"))
    table["place"] = torch.tensor([0.8, 0.5, 0.33]).expand(len(SHAPES), 3)
    ink = render(table, 84, 140).float().mean(1)[:, 21:63, 46:88] < 128
    for a in range(len(SHAPES)):
        for b in range(a):
            overlap = (ink[a] & ink[b]).sum() / (ink[a] | ink[b]).sum()
            assert overlap < 0.82, (SHAPES[a], SHAPES[b])


def test_neighbouring_frames_are_alike_and_cuts_are_not() -> None:
    world = World.generate(8, 120)
    table = world.table()
    table["shape"] = torch.full_like(table["shape"], -1)
    step = render(table, 40, 60).float().diff(dim=0).abs().flatten(1).mean(1)
    cuts = [s.start - 1 for s in world.segments[1:]]
    calm = [i for i in range(119) if i not in cuts]
    assert step[calm].max() < 0.6 * step[cuts].min()
    assert step[calm].min() > 0


def test_polygon_distance_matches_a_square_by_hand() -> None:
    at = torch.tensor([[0.0, 0.0], [0.5, 0.2], [2.0, 0.0], [2.0, 2.0], [-1.0, 3.0]], dtype=torch.float64)
    square = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    expected = torch.tensor([-1.0, -0.5, 1.0, 2**0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(polygon_distance(square, at), expected)
    torch.testing.assert_close(polygon_distance(square[::-1], at), expected)


def test_atlas_covers_every_shape_inside_its_box() -> None:
    layers = atlas(torch.device("cpu"))
    assert tuple(POLYGONS) == SHAPES
    assert layers.shape == (len(SHAPES), SIZE, SIZE)
    assert layers[:, [0, -1]].min() > 0 and layers[:, :, [0, -1]].min() > 0
    area = (layers < 0).float().mean((1, 2)) * (2 * REACH) ** 2
    assert area.min() > 0.5


def test_wave_is_close_to_a_sine() -> None:
    turns = torch.linspace(-3, 3, 501)
    assert (wave(turns) + torch.sin(2 * torch.pi * turns)).abs().max() < 0.06


def test_long_drift_does_not_jump() -> None:
    table = World.generate(5, 4096).table()
    assert table["drift"].min() >= 0 and table["drift"].max() <= 1
    step = table["drift"].diff(dim=0)[table["scene"].diff() == 0]
    turned = (step.abs() + 0.5).frac() - 0.5
    assert turned.abs().max() < 0.02


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (-1, 5)])
def test_sides_below_one_pixel(table: Table, size: tuple[int, int]) -> None:
    told = refusal(lambda: render(table, *size), WorldError)
    assert told == f"height and width must be at least 1 pixel, not {size[0]}x{size[1]}."


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_draws_exactly_what_the_cpu_draws(table: Table) -> None:
    on_gpu = {name: column.cuda() for name, column in table.items()}
    assert render(on_gpu, 112, 112).cpu().equal(render(table, 112, 112))


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
    with pytest.raises(KeyboardInterrupt):
        write_mp4(world, tmp_path / "world.mp4", 20, 20, progress=Mock(side_effect=KeyboardInterrupt))
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
    assert refusal(lambda: write_mp4(world, path, **arguments), WorldError) == sentence.format(tmp_path)
