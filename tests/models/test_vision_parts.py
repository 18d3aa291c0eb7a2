"""The vision tower sees some patches at a time and finds what it finds of all at once; and as a CUDA graph."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding import replay
from mmaccel.core.layout import IMAGE
from mmaccel.core.recipe import Recipe
from mmaccel.models import modules, step
from mmaccel.models.drafting import split_batch
from mmaccel.models.runner import HFRunner
from mmaccel_lab.eval.encoded import Encoded
from tests.core.test_replay import Repeated
from tests.models.streams import film, pair
from tests.models.tiny_random import BUILD, IMG, PROMPTS, VE, VID, VS, batch, prompt
from tests.spies import crossed

KEPT = ("get_image_features", "get_video_features")


@contextmanager
def calls(model: Any) -> Iterator[list[int]]:
    """Patches of each call of the tower."""
    tower = getattr(model.model, "visual", None) or model.model.vision_tower
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["pixel_values"]
        seen.append(len(x) if x.ndim == 2 else len(x) * 16)

    handle = tower.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def mixed_qwen() -> dict[str, Tensor]:
    """Two videos and two images, all of other sizes; frames of several windows and of one."""
    generator = torch.Generator().manual_seed(5)
    grids = {"video": [[7, 4, 6], [3, 10, 8]], "image": [[1, 12, 6], [1, 4, 4]]}
    token = {"video": VID, "image": IMG}
    ids = [5, 6]
    for kind, at in (("video", 0), ("image", 0), ("video", 1), ("image", 1)):
        t, h, w = grids[kind][at]
        ids += [VS, *[token[kind]] * (t * h * w // 4), VE, 9]
    kinds = [2 if i == VID else 1 if i == IMG else 0 for i in ids]

    def pixels(kind: str) -> Tensor:
        count = sum(t * h * w for t, h, w in grids[kind])
        return torch.randn(count, 3 * 2 * 14 * 14, generator=generator)

    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([kinds], dtype=torch.int),
        "pixel_values_videos": pixels("video"),
        "video_grid_thw": torch.tensor(grids["video"]),
        "pixel_values": pixels("image"),
        "image_grid_thw": torch.tensor(grids["image"]),
    }


def pictures() -> dict[str, Tensor]:
    """LLaVA-OneVision: a prompt with one tiled picture, one with three that are not, and one with one."""
    one = prompt("llava", [("text", 3), ("image",), ("text", 2)], seed=1)
    ids, pixels, sizes = one["input_ids"][0].tolist(), one["pixel_values"], one["image_sizes"]
    more = [4, *[IMG] * 17, 5, *[IMG] * 17, 6, *[IMG] * 17]
    rows = [ids, more + [7] * (len(ids) - len(more)), ids]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.ones(3, len(ids), dtype=torch.long),
        "pixel_values": torch.cat([pixels, pixels.flip(1), pixels * 2, pixels - 1, pixels / 2]),
        "image_sizes": sizes.repeat(5, 1),
        "batch_num_images": torch.tensor([1, 3, 1]),
    }


def cases() -> dict[str, tuple[str, dict[str, Tensor]]]:
    found = {
        f"{family}, {kind}": (family, prompt(family, PROMPTS[kind]))
        for family in BUILD
        for kind in ("video", "two videos", "interleaved", "long")
    }
    for family in BUILD:
        rows = [prompt(family, [("text", 2 + n), ("video", 6), ("text", 4)], seed=n) for n in range(3)]
        found[f"{family}, batch"] = family, batch(family, rows)
    return {**found, "qwen, sizes": ("qwen", mixed_qwen()), "llava, pictures": ("llava", pictures())}


CASES = cases()


@crossed(name=CASES, most=[1, 40, 100, 300])
def test_calls_are_bounded_and_features_the_same(name: str, most: int, monkeypatch) -> None:
    family, inputs = CASES[name]
    model = BUILD[family]()
    with torch.no_grad(), calls(model) as seen:
        want = model(**inputs).logits
        whole = sum(seen)
        features = [entry.clone() for entry in _features(model, inputs)]
        del seen[:]
        monkeypatch.setattr(modules, "PATCHES", most)
        with mmaccel.accelerate(model) as fast:
            got = fast(**inputs).logits
            assert sum(seen) == whole
            # A step of time, or an image with its tiles, is not cut.
            least = 80 if name == "qwen, sizes" else 48 if "llava" in name else 24
            assert max(seen) <= max(most, least) and (len(seen) > 2 or most > whole // 3)
            for one, other in zip(_features(model, inputs), features, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_images_side_by_side_are_several() -> None:
    """Of a prompt with several, which have no tiles; and a batch of such prompts is split."""
    model, inputs = BUILD["llava"](), pictures()
    adapter, ids = adapter_for(model), inputs["input_ids"].tolist()
    apart, between = adapter.layout(model, inputs), {5, 6}

    def images(rows: list[list[int]], **more: Any) -> list[int]:
        long = max(map(len, rows))
        given = {**inputs, **more, "input_ids": torch.tensor([row + [7] * (long - len(row)) for row in rows])}
        layout = adapter.layout(model, given)
        assert int((layout.row >= 0).sum()) == int((apart.row >= 0).sum())
        return [
            len(one[kind == IMAGE].unique())
            for one, kind in zip(layout.segment, layout.modality, strict=True)
        ]

    beside = [token for token in ids[1] if token not in between]
    assert images([ids[0], beside, ids[2]]) == [1, 3, 1]
    # Tiled ones too; and the groups need not be of a row each.
    tiled = ids[0][: 1 + ids[0].index(IMG)][:-1] + [IMG] * (2 * ids[0].count(IMG)) + [7]
    assert images([beside, tiled], batch_num_images=torch.tensor([3, 1, 1])) == [3, 2]
    split = split_batch(
        adapter, model, {**inputs, "input_ids": torch.tensor([ids[0], [*beside, 5, 6], ids[2]])}
    )
    assert [int(one["batch_num_images"]) for one in split] == [1, 3, 1]


def _features(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    grids = {n: inputs[n] for n in ("image_grid_thw", "image_sizes", "batch_num_images") if n in inputs}
    if "pixel_values" in inputs:
        found += model.get_image_features(inputs["pixel_values"], **grids).pooler_output
    if "pixel_values_videos" in inputs:
        told = [inputs["video_grid_thw"]] if "video_grid_thw" in inputs else []
        found += list(model.get_video_features(inputs["pixel_values_videos"], *told).pooler_output)
    return found


@pytest.mark.parametrize("family", list(BUILD))
def test_in_bfloat16_parts_are_as_near_to_float32_as_one_call(family: str, monkeypatch) -> None:
    inputs = prompt(family, PROMPTS["long"])
    exact = BUILD[family]()
    low = BUILD[family]().bfloat16()
    with torch.no_grad():
        want = torch.stack(_features(exact, inputs))
        told = {n: x.bfloat16() if x.is_floating_point() else x for n, x in inputs.items()}
        one = (torch.stack(_features(low, told)) - want).norm()
        monkeypatch.setattr(modules, "PATCHES", 70)
        with mmaccel.accelerate(low):
            parts = (torch.stack(_features(low, told)) - want).norm()
    assert 0 < parts <= 1.02 * one


@pytest.mark.parametrize("family", list(BUILD))
def test_no_trace_and_one_call_where_it_is_asked_for(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = BUILD[family](), prompt(family, PROMPTS["long"])
    monkeypatch.setattr(modules, "PATCHES", 64)
    grid = {n: inputs[n] for n in ("video_grid_thw",) if n in inputs}
    pixels = inputs["pixel_values_videos"]
    with mmaccel.accelerate(model), calls(model) as seen:
        assert set(KEPT) <= set(model.model.__dict__)
        with torch.no_grad():
            states = model.get_video_features(pixels, **grid, output_hidden_states=True)
            assert states.hidden_states is not None and len(seen) == 1
            assert isinstance(model.model.get_video_features(pixels, **grid, return_dict=False), tuple)
            assert len(seen) == 2
        # Gradients reach the tower as they did.
        out = model.get_video_features(pixels, **grid).pooler_output
        torch.cat(list(out)).sum().backward()
        assert len(seen) == 3 and all(p.grad is None for p in model.model.language_model.parameters())
        model.requires_grad_(False)
        cut = model.get_video_features(pixels, **grid)
        assert len(seen) > 6 and cut.get("last_hidden_state") is None
    assert not set(KEPT) & set(model.model.__dict__)


@pytest.mark.parametrize("family", list(BUILD))
def test_what_listens_to_the_tower_hears_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = BUILD[family](), prompt(family, PROMPTS["long"])
    told = []
    for most in (1 << 12, 70):
        monkeypatch.setattr(modules, "PATCHES", most)
        with mmaccel.accelerate(model, prune={"name": "visionzip", "retention": 0.4}) as fast:
            out = fast.generate(
                **inputs, max_new_tokens=3, do_sample=False, output_scores=True, return_dict_in_generate=True
            )
            told.append((out.past_key_values.state.kept[0].clone(), torch.stack(out.scores)))
    assert 0 < told[0][0].numel() < inputs["input_ids"].shape[1]
    assert torch.equal(told[0][0], told[1][0])
    torch.testing.assert_close(told[0][1], told[1][1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", list(BUILD))
def test_a_draft_s_prompt_and_what_recipes_share_are_seen_in_parts_too(family: str, monkeypatch) -> None:
    model, inputs = BUILD[family](), prompt(family, PROMPTS["long"])
    fam = adapter_for(model)
    length = inputs["input_ids"].shape[1]
    for keep in (None, torch.arange(0, length, 2)):
        monkeypatch.setattr(modules, "PATCHES", 1 << 12)
        want = HFRunner.open(model, fam, None).prefill(inputs, keep=keep)
        monkeypatch.setattr(modules, "PATCHES", 64)
        with calls(model) as seen:
            got = HFRunner.open(model, fam, None).prefill(inputs, keep=keep)
        assert max(seen) <= 64 and len(seen) >= 10
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    # So is what recipes share, once.
    encoded = Encoded()
    with torch.no_grad(), calls(model) as seen:
        for recipe in (Recipe(), Recipe.load("a_shape-short"), Recipe.load({"prune": "visionzip"})):
            with encoded.shared(model, recipe), mmaccel.accelerate(model, recipe) as fast:
                fast(**inputs)
    assert max(seen) <= 64 and sum(seen) == {"qwen": 40 * 24, "llava": 40 * 16}[family]
    assert not set(KEPT) & set(model.model.__dict__)


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_a_session_s_frames_are_seen_in_parts_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = pair(name)
    adapter = mmaccel.VideoSession(model, processor, "full")._stream_adapter
    monkeypatch.setattr(modules, "PATCHES", 1 << 20)
    with calls(model) as seen:
        want, marks = adapter.features(film(20), (42, 70))
        monkeypatch.setattr(modules, "PATCHES", 1)
        got, again = adapter.features(film(20), (42, 70))
    assert len(seen) == 1 + len(got) > 10, "a call for all, then one for each unit"
    torch.testing.assert_close((got, again), (want, marks), rtol=0, atol=1e-5)
    assert not set(KEPT) & set(model.model.__dict__)


class Kept(Repeated):
    """Results lie in fixed places also where no others are given, as those of a graph do."""

    made = calls = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Kept.made += 1

    def __call__(self) -> Any:
        Kept.calls += 1
        self.out = self.out or tuple(torch.empty_like(one) for one in self.work())
        return super().__call__()


def adapters(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """A model, and streams on it whose tower is captured as on a device."""
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "_Replay", Kept)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    Kept.made = Kept.calls = 0
    model, processor = copy.deepcopy(pair(name)[0]), pair(name)[1]
    made = [adapter_for(model).stream_adapter(model, processor) for _ in range(2)]  # type: ignore[attr-defined]
    for one in made:
        step.shared_captured_steps(one).tower._replays.works = True
    return model, made


def test_the_tower_of_a_frame_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all streams of a model, of which each keeps what it was given; of more frames the modules are called."""
    model, both = adapters("random-ov", monkeypatch)
    frames, size, family = film(8), (42, 70), both[0].family
    wanted = [family.encode_frames(model, both[0]._pixels(frame, size)).clone() for frame in frames.split(1)]
    found = [both[n % 2].features(frame, size) for n, frame in enumerate(frames.split(1))]
    assert Kept.made == 1
    for (features, marks), right in zip(found, wanted, strict=True):
        assert torch.equal(torch.cat([features.flatten(0, 1), marks]), right)
    both[1].features(frames[:5], size)
    assert both[0].features(frames[:2], size)[0].shape[0] == 2 and Kept.made == 1
    assert len(step.shared_captured_steps(both[0]).tower._replays._held["tower"]) == 2


def test_a_tower_that_is_changed_or_heard_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (one, _) = adapters("random-ov", monkeypatch)
    frame, size, heard = film(1), (42, 70), list[int]()
    plain = [one.features(frame, size)[0] for _ in range(3)]
    assert torch.equal(plain[0], plain[2]) and Kept.made == 1
    replayed = Kept.calls
    block: Any = one._tower[0]
    hook = block.register_forward_hook(lambda *given: heard.append(1))
    for _ in range(3):
        assert torch.equal(one.features(frame, size)[0], plain[0])
    hook.remove()
    assert len(heard) == 3
    block.forward = lambda hidden, *rest, whole=block.forward, **more: whole(hidden + 1, *rest, **more)
    assert not torch.equal(one.features(frame, size)[0], plain[0])
    assert Kept.calls == replayed  # a graph would neither call a hook nor a module's own `forward`
    del block.forward
    assert torch.equal(one.features(frame, size)[0], plain[0]) and Kept.calls == replayed + 1
    # Other weights in the same place are read, and those that lie elsewhere captured anew.
    weight = block.mlp.fc1.weight
    for change in (lambda: weight.data.mul_(2), lambda: setattr(weight, "data", weight.data * 2)):
        with torch.no_grad():
            change()
        found = [one.features(frame, size)[0] for _ in range(3)]
        wanted = one.family.encode_frames(model, one._pixels(frame, size))[:-1]
        assert all(torch.equal(some.flatten(0, 1), wanted) for some in found)
        assert not torch.equal(found[0], plain[0])
    assert Kept.made == 2
    # Nor is a weight of the model itself, which stands outside of the tower.
    model.model.image_newline = torch.nn.Parameter(model.model.image_newline.detach() + 1)
    marks = [one.features(frame, size)[1] for _ in range(3)]
    assert Kept.made == 3 and all(torch.equal(some, marks[0]) for some in marks)
    model.model.vision_tower.set_attn_implementation("eager")
    for _ in range(3):
        one.features(frame, size)
    assert Kept.made == 4


def test_a_tower_that_needs_more_than_pixels_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (one, _) = adapters("random-qwen", monkeypatch)
    for _ in range(3):
        one.features(film(2), (42, 70))
    assert not Kept.made and not step.shared_captured_steps(one).tower._replays._held
