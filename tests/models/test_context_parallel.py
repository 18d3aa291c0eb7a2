"""Two processes that share the rows of a prompt give what one gives; what they cannot is refused in a sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mmaccel
from mmaccel.core.errors import MmaccelError
from mmaccel.core.prefill.attention import MIN_ROWS
from tests.models.tiny_random import BUILD, EVERY, PROMPTS, batch, prompt
from tests.models.two_ranks import RANKS, on_two_ranks

A_SHAPE = dict(name="a_shape", block=16, sink=4, window=32)
RECIPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "a_shape": dict(sparse=A_SHAPE, dense_tail=16),
    "grid": dict(sparse=dict(name="grid", block=16), dense_layers=(1,)),
    "boundary_2d": dict(sparse="boundary_2d"),
    "per_head": dict(
        sparse=dict(name="per_head", block=16, table={0: {1: A_SHAPE, 2: A_SHAPE}}, default="dense")
    ),
    "in chunks": dict(sparse=dict(name="grid", block=16), chunk=100),
    "long-video": dict(recipe="long-video"),
}
WAYS = {"qwen": list(RECIPES)[::2], "llava": ["dense", *list(RECIPES)[1::2]]}
"""The recipes that are tried on each family."""
TURN = prompt("qwen", [("text", 70)])["input_ids"]
TOLD = dict(max_new_tokens=3, do_sample=False)
WRONG = {
    "window": dict(kv=dict(name="window", window=32)),
    "fastv": dict(prune=dict(name="fastv", layer=1)),
    "prompt_lookup": dict(draft="prompt_lookup"),
}


def model_of(family: str) -> Any:
    model = EVERY[family]()
    model.generation_config.eos_token_id = None
    return model


def asked(model: Any, inputs: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    """All that a caller may ask of an accelerated model."""
    with mmaccel.accelerate(model, **recipe) as fast, torch.no_grad():
        tokens = model.generate(**inputs, **TOLD)
        out = model(**inputs, output_hidden_states=True)
        kept = fast.report().kept
        held = fast.report().kv
        hidden = model(**inputs, use_cache=False).logits
        first = model.generate(**inputs, **TOLD, return_dict_in_generate=True)
        more = torch.cat([first.sequences, TURN.expand(len(first.sequences), -1)], 1)
        turn = model.generate(input_ids=more, past_key_values=first.past_key_values, **TOLD)
        beams = model.generate(**inputs, **TOLD, num_beams=2)
    return dict(
        tokens=[tokens, turn, beams],
        logits=[out.logits, hidden, *out.hidden_states],
        kept=kept,
        held=held["held"],
    )


def shared() -> dict[str, Any]:
    """In one of two processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {"refused": {}}
    for family in sorted(BUILD):
        model, inputs = model_of(family), prompt(family, PROMPTS["long"])
        for name in WAYS[family]:
            found[family, name] = asked(model, inputs, **RECIPES[name], context_mesh=mesh)
    twice = {name: x.repeat(2, *[1] * (x.ndim - 1)) for name, x in prompt("llava", PROMPTS["long"]).items()}
    found["twice"] = asked(model_of("llava"), twice, sparse=A_SHAPE, context_mesh=mesh)
    deep = model_of("qwen3_vl")
    found["deep"] = asked(deep, prompt("qwen3_vl", PROMPTS["long"]), sparse=A_SHAPE, context_mesh=mesh)
    model, long = model_of("qwen"), prompt("qwen", PROMPTS["long"])

    def told(name: str, run: Any) -> None:
        with pytest.raises(MmaccelError) as caught:
            run()
        found["refused"][name] = str(caught.value)

    for name, recipe in WRONG.items():
        told(name, lambda recipe=recipe: mmaccel.accelerate(model, **recipe, context_mesh=mesh))
    told("mesh", lambda: mmaccel.accelerate(model, context_mesh="cpu"))
    told("states", lambda: mmaccel.accelerate(model_of("qwen3_5"), context_mesh=mesh))
    with mmaccel.accelerate(model, context_mesh=mesh), torch.no_grad():
        told("padded", lambda: model(**batch("qwen", [long, prompt("qwen", PROMPTS["video"])])))
        told("weights", lambda: model(**long, output_attentions=True))
    assert mmaccel.attached(model) is None
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_ranks(tmp_path_factory.mktemp("shared"), shared)


def agree(one: dict[str, Any], ranks: list[dict[str, Any]], allowed: list[float]) -> None:
    for rank in ranks:
        assert all(map(torch.equal, rank["tokens"], one["tokens"]))
        off = [float((a - b).abs().max()) for a, b in zip(rank["logits"], one["logits"], strict=True)]
        assert all(x <= most for x, most in zip(off, allowed, strict=True)), (off, allowed)
        assert rank["kept"] == one["kept"]
    # Each holds its half, and the last one the columns of passes of few rows.
    held = [rank["held"] for rank in ranks]
    assert sum(held) == one["held"] and max(held) < one["held"] / RANKS + MIN_ROWS


def budget(model: Any, inputs: dict[str, Any]) -> list[float]:
    """As `oracle.budget`, of the plain model: twice what float32 is off float64, and one rounding of the largest value."""
    plain = [asked(model, inputs), asked(model.double(), inputs)]
    model.float()
    pairs = zip(*(one["logits"] for one in plain), strict=True)
    return [
        2 * float((a.double() - b).abs().max()) + torch.finfo(a.dtype).eps * float(b.abs().max())
        for a, b in pairs
    ]


@pytest.mark.parametrize("family", sorted(BUILD))
def test_two_processes_give_what_one_gives(family: str, ranks: list[dict[str, Any]]) -> None:
    model, inputs = model_of(family), prompt(family, PROMPTS["long"])
    allowed = budget(model, inputs)
    for name in WAYS[family]:
        agree(asked(model, inputs, **RECIPES[name]), [rank[family, name] for rank in ranks], allowed)
    sparse = "grid" if family == "qwen" else "a_shape"
    assert ranks[0][family, sparse]["kept"] < 0.95


def test_a_batch_and_a_model_with_deepstack(ranks: list[dict[str, Any]]) -> None:
    twice = {name: x.repeat(2, *[1] * (x.ndim - 1)) for name, x in prompt("llava", PROMPTS["long"]).items()}
    for name, model, inputs in (
        ("twice", model_of("llava"), twice),
        ("deep", model_of("qwen3_vl"), prompt("qwen3_vl", PROMPTS["long"])),
    ):
        one = asked(model, inputs, sparse=A_SHAPE)
        agree(one, [rank[name] for rank in ranks], budget(model, inputs))


def test_what_is_not_shared_is_refused_in_a_sentence(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["refused"]
    assert told == ranks[1]["refused"] and set(told) == {*WRONG, "mesh", "states", "padded", "weights"}
    assert told["window"].startswith("kv 'window': under context_mesh a process holds a share of the columns")
    assert told["mesh"].startswith("context_mesh: give a DeviceMesh of one dimension")
    assert told["states"].startswith("context_mesh: layers with a running state")
    assert "give prompts of one length" in told["padded"] and "output_attentions" in told["weights"]


def pieces(seed: int) -> list[tuple[Any, ...]]:
    draw = random.Random(seed)
    return [("text", draw.randint(2, 30)), ("video", 2 * draw.randint(10, 24)), ("text", draw.randint(4, 40))]


def fifty(sharing: bool, device: str) -> list[torch.Tensor]:
    """The greedy answers to fifty prompts, of two families under two recipes in turn."""
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if sharing else None
    models, found = [model_of(family).to(device) for family in sorted(BUILD)], []
    for seed in range(50):
        kind = seed % 2
        recipe = ("a_shape", "grid")[seed // 2 % 2]
        with mmaccel.accelerate(models[kind], sparse=dict(name=recipe, block=16), context_mesh=mesh):
            inputs = prompt(sorted(BUILD)[kind], pieces(seed), seed)
            inputs = {name: x.to(device) for name, x in inputs.items()}
            found.append(models[kind].generate(**inputs, **TOLD).cpu())
    return found


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_fifty_prompts_get_the_same_greedy_tokens(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    one, ranks = fifty(False, device), on_two_ranks(tmp_path, fifty, True, device, device=device)
    assert len(one) == 50 and len(ranks) == RANKS
    for rank in ranks:
        assert all(map(torch.equal, rank, one))
