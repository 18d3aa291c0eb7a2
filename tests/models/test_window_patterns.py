"""Sparse patterns beside the `window` memory, on both families: the pattern within the window, and nothing else."""

import pytest
import torch

import mmaccel
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.registry import registry
from tests.models.test_exact import TOLERANCE, logits
from tests.models.test_recipes import PIECES, SPARSE, small
from tests.models.tiny_random import BUILD, batch, prompt
from tests.products import product

SINKS, WINDOW, TAIL = 4, 90, 8
KV = {"name": "window", "sinks": SINKS, "window": WINDOW, "margin": 8}
pytestmark = [pytest.mark.numeric(by="torch"), pytest.mark.in_turn("family", 1)]


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param](layers=3)
    model.generation_config.eos_token_id = None
    return request.param, model


def written_out(run, layer, query, key, value, scale):
    """`ForwardPass.attend` of a whole prompt: the element masks of the plan that the pattern makes and of the window."""
    n = query.shape[2]
    if n < 64:
        return ATTEND(run, layer, query, key, value, scale)
    view = run.state.view(layer, query)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    window = (distance >= 0) & ((distance < WINDOW) | (torch.arange(n) < SINKS))
    plan = run.config.recipe.sparse.at(layer).plan(query, view.key, run.layout, run.layout)
    tail = (torch.arange(n) >= n - TAIL)[:, None]
    mask = (plan.to_mask() | tail) & window
    return torch.nn.functional.scaled_dot_product_attention(
        query, view.key, view.value, attn_mask=mask, scale=scale, enable_gqa=True
    )


ATTEND = ForwardPass.attend


@pytest.mark.parametrize(("name", "family"), product(SPARSE, sorted(BUILD)), indirect=["family"])
def test_a_pattern_and_a_window_are_dense_attention_under_both_masks(family, name, monkeypatch):
    kind, model = family
    inputs = prompt(kind, PIECES)
    how = {"max_new_tokens": 6, "do_sample": False}
    with mmaccel.accelerate(model, kv=KV, sparse=small(name), dense_tail=TAIL) as fast:
        ours, text = logits(model, inputs), model.generate(**inputs, **how)
        report = fast.report()
        assert report.kept < 0.8 and "dense" not in report.heads()
        assert report.kv["held"] < report.kv["seen"]
        monkeypatch.setattr(ForwardPass, "attend", written_out)
        exact = logits(model, inputs)
        assert torch.equal(model.generate(**inputs, **how), text)
    assert (ours - exact).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("name", "family"), product(SPARSE, sorted(BUILD)), indirect=["family"])
def test_a_chunked_prompt_goes_on_over_what_the_window_holds(family, name):
    """Later pieces see a view that lacks columns: the pattern runs there too, in a batch as in one sequence."""
    kind, model = family
    inputs = [prompt(kind, PIECES, seed=seed) for seed in (0, 1)]
    found = []
    for some in (*inputs, batch(kind, inputs)):
        with mmaccel.accelerate(model, kv=KV, sparse=small(name), chunk=100, dense_tail=0) as fast:
            found.append(logits(model, some))
            last = some["input_ids"].shape[1] % 100
            (told, *_) = fast.report().heads()
            assert ("dense" in told) == (last < 64) and fast.report().kept < 0.8
    assert (found[2] - torch.cat(found[:2])).abs().max() <= TOLERANCE


def test_every_registered_pattern_may_stand_beside_a_window():
    for name in registry("sparse"):
        assert mmaccel.Recipe.load(sparse=name, kv="window").sparse.name == name
