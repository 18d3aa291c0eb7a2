"""What is put in the place of a model's modules computes what they do, in fewer kernels, and goes away again."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import mmaccel
from mmaccel.backends.ops import layer_ops
from mmaccel.core.attach import adapter_for
from mmaccel.models import llava_onevision, modules
from mmaccel.models.fingerprint import ModuleFingerprint
from tests.models.streams import pair
from tests.models.test_vision_windows import pixels_of
from tests.models.tiny_random import BUILD, prompt, qwen
from tests.spies import heard, returned


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each of three operators is called."""
    found: dict[str, int] = {}

    def counted(name: str) -> None:
        op = getattr(layer_ops, name)
        monkeypatch.setattr(
            layer_ops, name, lambda *given: (found.__setitem__(name, found.get(name, 0) + 1), op(*given))[1]
        )

    for name in ("rms_norm", "silu_multiply_", "rotate_"):
        counted(name)
    return found


@pytest.mark.parametrize("family", list(BUILD))
def test_a_model_says_the_same(family: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operators, in their plain form here, in the place of a model's own steps."""
    model = BUILD[family](layers=2)
    inputs = prompt("llava", [("text", 200)])
    with torch.no_grad():
        wanted = model(**inputs).logits
    monkeypatch.setattr(layer_ops, "can_fuse", lambda x: True)
    attention = model.model.language_model.layers[0].self_attn
    with mmaccel.accelerate(model, "dense"):
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
        assert calls == {"rms_norm": 5, "silu_multiply_": 2, "rotate_": 4}
        # Where gradients are wanted nothing is done in place.
        calls.clear()
        torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
        assert calls == {} and "forward" in attention.__dict__
    assert "forward" not in attention.__dict__
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, wanted)
    assert calls == {}


GRID = [[5, 10, 14], [1, 4, 4]]
INNER = 62
"""Of the tower's feed-forward blocks: no multiple of 16 bytes in any type."""


@pytest.fixture
def model() -> Any:
    made = qwen()
    for block in made.model.visual.blocks:
        for name, shape in (("gate_proj", (INNER, 32)), ("up_proj", (INNER, 32)), ("down_proj", (32, INNER))):
            setattr(block.mlp, name, torch.nn.Linear(*shape[::-1]))
    for name, one in made.model.visual.named_parameters():
        if "norm" in name:
            one.data.uniform_(0.5, 1.5)
    return made


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators in their plain form, in the place of the modules' own steps."""
    monkeypatch.setattr(layer_ops, "can_fuse", lambda x: True)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights of products that are ours."""
    return heard(monkeypatch, modules, "linear", lambda x, weight, bias=None: tuple(weight.shape))


def encoded(model: Any, grid: list[list[int]] = GRID) -> Tensor:
    pixels, told = pixels_of(grid)
    kind = model.model.visual.get_dtype() if hasattr(model.model.visual, "get_dtype") else model.dtype
    return torch.cat(model.model.get_video_features(pixels.to(kind), told).pooler_output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_features_are_the_same(model: Any, fused: None, products: list[Any], dtype: torch.dtype) -> None:
    exact = encoded(model)
    model.to(dtype)
    plain = encoded(model)
    with mmaccel.accelerate(model, "dense"):
        got = encoded(model)
    wide = 64
    assert products == [(wide, 32), (wide, 32), (32, wide)] * 2
    if dtype == torch.float32:
        torch.testing.assert_close(got, plain, rtol=0, atol=1e-5)
    else:
        assert (got.float() - exact).norm() <= 1.05 * (plain.float() - exact).norm()
    del products[:]
    assert torch.equal(encoded(model), plain) and not products


@torch.no_grad()
def test_each_step_is_one_kernel(model: Any, fused: None, calls: dict[str, int]) -> None:
    with mmaccel.accelerate(model, "dense"):
        encoded(model)
        # Two blocks, and the norm of the merger.
        assert calls == {"rms_norm": 5, "silu_multiply_": 2, "rotate_": 4}
        calls.clear()
        with torch.enable_grad():
            encoded(model)
        assert calls == {}


@torch.no_grad()
def test_the_model_s_weights_are_its_own(model: Any, fused: None, tmp_path: Path) -> None:
    """While attached: where they lie, what is saved, and what is changed in place is heard."""
    before = {name: (one.data_ptr(), one.clone()) for name, one in model.state_dict().items()}
    mlp = model.model.visual.blocks[0].mlp
    with mmaccel.accelerate(model, "dense"):
        first = encoded(model)
        model.save_pretrained(tmp_path)
        now = model.state_dict()
        assert {name: one.data_ptr() for name, one in now.items()} == {n: at for n, (at, _) in before.items()}
        assert all(torch.equal(one, before[name][1]) for name, one in now.items())
        mlp.down_proj.weight.mul_(2)
        changed = encoded(model)
        mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight / 2)
        mlp.up_proj.bias = torch.nn.Parameter(mlp.up_proj.bias / 2)
        back = encoded(model)
    assert not torch.allclose(first, changed, atol=1e-4)
    torch.testing.assert_close(first, back, rtol=0, atol=1e-4)
    saved = load_file(tmp_path / "model.safetensors")
    shapes = {tuple(one.shape) for name, one in saved.items() if "visual.blocks.0.mlp" in name}
    assert shapes == {(INNER, 32), (INNER,), (32, INNER), (32,)}


@torch.no_grad()
def test_the_copies_go_with_the_recipe(model: Any, fused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    def note(found: Any, *_: Any) -> None:
        held.extend(weakref.ref(one) for one in found[:3])

    returned(monkeypatch, modules.PaddedMLP, "weights", note)
    fast = mmaccel.accelerate(model, "dense")
    encoded(model)
    assert len(held) == 6 and all(one() is not None for one in held)
    encoded(model)
    assert all(held[n]() is held[n + 6]() for n in range(6))
    fast.detach()
    gc.collect()
    assert all(one() is None for one in held)
    assert not any("forward" in module.__dict__ for module in model.modules())


@torch.no_grad()
def test_what_others_put_there_stays(model: Any, fused: None, products: list[Any]) -> None:
    """A hook or another module in the place of a product is called."""
    heard: list[int] = []
    first, second = (block.mlp for block in model.model.visual.blocks)
    handle = first.up_proj.register_forward_hook(lambda *_: heard.append(1))
    second.gate_proj = torch.nn.Sequential(second.gate_proj)
    plain = encoded(model)
    del heard[:]
    with mmaccel.accelerate(model, "dense"):
        torch.testing.assert_close(encoded(model), plain, rtol=0, atol=1e-5)
        assert heard == [1] and products == []
    handle.remove()


@torch.no_grad()
def test_without_such_a_device_nothing_changes(model: Any, products: list[Any]) -> None:
    inputs = prompt("qwen", [("text", 5), ("video", 6), ("text", 9)])
    want, features = model(**inputs).logits, encoded(model)
    with mmaccel.accelerate(model, "dense"):
        # Windows of one length are one call, which is another order of the same sums.
        torch.testing.assert_close(model(**inputs).logits, want, rtol=0, atol=1e-5)
        torch.testing.assert_close(encoded(model), features, rtol=0, atol=1e-5)
    assert products == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_on_a_device(model: Any, products: list[Any]) -> None:
    exact = encoded(model)
    model.to("cuda", torch.bfloat16)
    pixels, told = (one.cuda() for one in pixels_of(GRID))
    features = model.model.get_video_features
    plain = torch.cat(features(pixels.bfloat16(), told).pooler_output)
    with mmaccel.accelerate(model, "dense"):
        got = torch.cat(model.model.get_video_features(pixels.bfloat16(), told).pooler_output)
    assert products == [(64, 32), (64, 32), (32, 64)] * 2
    assert (got.cpu().float() - exact).norm() <= 1.05 * (plain.cpu().float() - exact).norm()


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_module_makes_them(name: str, dtype: torch.dtype) -> None:
    model = pair(name)[0]
    family: Any = adapter_for(model)
    places = torch.tensor([0, 1, 7, 900, 352_800])
    positions = places.expand(3, -1) if family.mrope else places
    with mock.patch.object(layer_ops, "rope_angles", wraps=layer_ops.rope_angles) as made:
        found = family.rope_angles(model, positions, dtype)
    assert made.called != family.mrope
    cos, sin = family.rotary_module(model)(torch.empty(0, dtype=dtype), positions[..., None, :])
    for one, turned in zip(found, (cos, sin), strict=True):
        assert torch.equal(one, turned[:, None])


def test_frames_are_pooled_with_the_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BUILD["llava"]()
    features = torch.randn(3, 36, 8, dtype=torch.float64)
    plain = type(model.model).apply_pooling.__get__(model.model)
    model.config.vision_config.image_size = 6 * model.config.vision_config.patch_size
    monkeypatch.setattr(llava_onevision, "_pools_by_element", lambda features: True)
    with mmaccel.accelerate(model, "dense"):
        got = model.model.apply_pooling(features)
        assert model.model.apply_pooling.args[0] == plain and got.shape == (3, 9, 8)
    torch.testing.assert_close(got, plain(features), rtol=0, atol=1e-14)
    assert "apply_pooling" not in vars(model.model)
    # So they are in a session without a recipe, and once in one of a model that has one.
    for recipe in (False, True):
        fast = mmaccel.accelerate(model, "dense") if recipe else contextlib.nullcontext()
        with fast, modules.batched_tower(adapter_for(model), model, fuse=False):
            assert model.model.apply_pooling.args[0] == plain
    assert "apply_pooling" not in vars(model.model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_pooled_frames_have_the_bits_of_the_model_s_own(dtype: torch.dtype) -> None:
    model = BUILD["llava"]()
    model.config.vision_config.image_size = 27 * model.config.vision_config.patch_size
    features = torch.randn(3, 729, 64, device="cuda", dtype=dtype)
    assert torch.equal(llava_onevision.pool_frames(None, features), model.model.apply_pooling(features))


def test_stretched_angles_are_the_module_s_own() -> None:
    model = pair("random-ov")[0]
    family: Any = adapter_for(model)
    rotary = family.rotary_module(model)
    with (
        mock.patch.object(rotary, "rope_type", "dynamic"),
        mock.patch.object(layer_ops, "rope_angles", side_effect=AssertionError),
        mock.patch.object(rotary, "forward", side_effect=lambda x, at: (at.float(), -at.float())) as own,
    ):
        family.rope_angles(model, torch.arange(4), torch.float32)
    assert own.called


class Other(nn.Linear):
    pass


def layers() -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3, bias=False)) for _ in range(2)
    )


def copied(weight: Tensor) -> Tensor:
    return weight.detach().clone()


CHANGES: dict[str, Callable[[Any], object]] = {
    "exchanged": lambda some: setattr(some[1], "2", nn.Linear(3, 3, bias=False)),
    "added": lambda some: some[0][0].add_module("more", nn.Linear(3, 3)),
    "of another class": lambda some: setattr(some[0][2], "__class__", Other),
    "another weight": lambda some: setattr(some[0][0], "weight", nn.Parameter(copied(some[0][0].weight))),
    "moved": lambda some: setattr(some[0][0].weight, "data", copied(some[0][0].weight)),
    "another layer": lambda some: setattr(some, "0", nn.Sequential(*some[0])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    some = layers()
    watched, other = ModuleFingerprint(some), layers()
    assert watched.is_unchanged(list(some))
    assert not watched.is_unchanged(list(other)) and not watched.is_unchanged(list(some)[:1])
    with torch.no_grad():
        some[0][0].weight.mul_(2)
    assert watched.is_unchanged(list(some))
    CHANGES[change](some)
    assert not watched.is_unchanged(list(some))
    assert ModuleFingerprint(some).is_unchanged(list(some))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_listener_is_heard_wherever_it_is(kind: str) -> None:
    some = layers()
    watched = ModuleFingerprint(some)
    for module in some.modules():
        if module is some:
            continue
        assert not watched.has_hooks()
        hook = getattr(module, kind)(lambda *_: None)
        assert watched.has_hooks() and watched.is_unchanged(list(some))
        hook.remove()
    assert not watched.has_hooks()
