"""The static step: the model's own tokens and logits, one graph for all lengths, and nothing read on the host."""

import pytest
import torch

from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.core.generate import speculate
from mmaccel.models.decode import StaticRunner, flexible, masked
from mmaccel.policies.draft import Off, Sequential
from tests.core.toy import Meter
from tests.core.toy import prompt as told
from tests.models.tiny_random import BUILD, PROMPTS, prompt


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param](layers=3)
    model.generation_config.eos_token_id = None
    return request.param, model


def runner(model, capacity=512, rows=(1,), **choices):
    choices.setdefault("compiled", False)
    return StaticRunner(model, adapter_for(model), capacity, rows, **choices)


@pytest.mark.parametrize("kind", ["text", "interleaved", "long"])
@torch.no_grad()
def test_steps_are_the_model_s_own(family, kind):
    name, model = family
    inputs = prompt(name, PROMPTS[kind])
    plain, static = adapter_for(model).runner(model), runner(model, rows=(1, 4))
    assert torch.allclose(plain.prefill(inputs), static.prefill(inputs), atol=1e-5)
    for ids in ([[7]], [[9, 3, 4]], [[5, 5, 5, 5]], [[11]]):
        ids = torch.tensor(ids)
        assert torch.allclose(plain.step(ids), static.step(ids), atol=1e-4)
        assert plain.length() == static.length()
    plain.truncate(plain.length() - 5)
    static.truncate(static.length() - 5)
    assert torch.allclose(plain.step(torch.tensor([[8, 2]])), static.step(torch.tensor([[8, 2]])), atol=1e-4)


@pytest.mark.parametrize("drafted", [False, True])
def test_the_loop_over_it_gives_the_plain_tokens(family, drafted):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    want = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    view = __import__("mmaccel").accelerate(model)
    draft = (Sequential(model=BUILD[name](seed=1), window=3) if drafted else Off()).open(view.view)
    view.detach()
    target, length = runner(model, rows=(1, 4)), want.shape[1]
    said = told(inputs["input_ids"][0].tolist(), inputs={k: v for k, v in inputs.items() if k != "input_ids"})
    draft.begin(said)
    ids = speculate(
        target, draft, said, target.prefill(inputs), stop=lambda ids: ids.shape[1] >= length, meter=Meter()
    )
    assert torch.equal(ids, want)


@torch.no_grad()
def test_one_graph_serves_all_lengths(family):
    name, model = family
    torch._dynamo.reset()
    static = runner(model, rows=(1, 3), compiled=True, backend="aot_eager")
    plain = adapter_for(model).runner(model)
    inputs = prompt(name, PROMPTS["video"])
    static.prefill(inputs)
    plain.prefill(inputs)
    for ids in ([[7]], [[9, 3]]):
        static.step(torch.tensor(ids))
        plain.step(torch.tensor(ids))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids in ([[4]], [[5]], [[1, 2, 3]], [[6, 6]], [[8]]):
            ids = torch.tensor(ids)
            assert torch.allclose(static.step(ids), plain.step(ids), atol=1e-4)
    torch._dynamo.reset()


def test_both_ways_to_attend_agree():
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 3, 16, generator=g)
    key, value = (torch.randn(1, 2, 64, 16, generator=g) for _ in range(2))
    columns = torch.tensor([40, 41, 42])
    one, two = (way(query, key, value, columns, 0.25) for way in (masked, flexible))
    assert torch.allclose(one, two, atol=1e-5)
    key[:, :, 43:] = 9.0
    assert torch.equal(masked(query, key, value, columns, 0.25), one), "what lies behind is not seen"


def test_what_does_not_fit_is_told(family):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    with pytest.raises(ModelError, match="room"):
        runner(model, capacity=3, rows=(4,))
    with pytest.raises(ModelError, match="raise capacity"):
        runner(model, capacity=16).prefill(inputs)
    static = runner(model, capacity=inputs["input_ids"].shape[1] + 2)
    static.prefill(inputs)
    static.step(torch.tensor([[5]]))
    static.step(torch.tensor([[5]]))
    with pytest.raises(ModelError, match="full"):
        static.step(torch.tensor([[5]]))
    with pytest.raises(ModelError, match="rows"):
        static.step(torch.tensor([[5, 6]]))


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_step_is_the_written_one(family):
    name, model = family
    model = model.cuda()
    inputs = {k: v.cuda() for k, v in prompt(name, PROMPTS["video"]).items()}
    plain, static = runner(model), runner(model, rows=(1, 4), compiled=True)
    assert torch.allclose(plain.prefill(inputs), static.prefill(inputs), atol=1e-4)
    for ids in ([[7]], [[9]], [[4]]):
        ids = torch.tensor(ids, device="cuda")
        assert torch.allclose(plain.step(ids), static.step(ids), atol=1e-3)
    assert torch.isfinite(static.step(torch.tensor([[1, 2, 3]], device="cuda"))).all()
    model.cpu()
