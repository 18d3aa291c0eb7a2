"""The static step: the model's own tokens and logits, one graph for all lengths, and nothing read on the host."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

import mmaccel
from mmaccel.core.adapter import TokenTree
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding import replay
from mmaccel.core.decoding.draft import Proposal
from mmaccel.core.errors import ModelError
from mmaccel.models import decode, step
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Off, Sequential, Tree
from mmaccel.policies.kv import Window
from tests.models.test_arguments import Record
from tests.models.tiny_random import PROMPTS, prompt
from tests.models.tiny_random import model as tiny
from tests.spies import crossed, heard

BUILD = {name: partial(tiny, name) for name in ("qwen", "llava", "glm4v", "internvl", "qwen2_vl", "qwen3_vl")}
pytestmark = pytest.mark.numeric(by="torch")
TREE = Proposal(torch.tensor([5, 6, 7, 8, 9]), parents=torch.tensor([-1, -1, 0, 1, 3])).branches
LATER = TokenTree(torch.tensor([[True, False, True, False, False, False, True]]), torch.tensor([2]))
"""A row behind the tree, and what it sees of it."""


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    """Norms are part of what is about them: their gains are not one."""
    model = BUILD[request.param](layers=3)
    gains = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "norm" in name:
                one.uniform_(0.5, 1.5, generator=gains)
    return request.param, model


def runner(model, rows=(1,)):
    return HFRunner(model, adapter_for(model), DynamicCache(), rows)


def counted(monkeypatch):
    """The shapes of the steps that went through `Part`."""
    return heard(monkeypatch, decode.DeviceDecodeStep, "__call__", lambda part, ids, *_: tuple(ids.shape))


@crossed("family", family=sorted(BUILD), kind=["text", "interleaved", "long"])
@torch.no_grad()
def test_steps_are_the_model_s_own(family, kind, monkeypatch):
    name, model = family
    inputs = prompt(name, PROMPTS[kind])
    plain, static = adapter_for(model).runner(model), runner(model, rows=(1, 4))
    seen = counted(monkeypatch)
    assert torch.equal(plain.prefill(inputs), static.prefill(inputs))
    for ids in ([[7]], [[9, 3, 4]], [[5, 5, 5, 5]], [[11]]):
        ids = torch.tensor(ids)
        assert torch.allclose(plain.step(ids), static.step(ids), atol=1e-4)
        assert plain.length() == static.length()
    plain.truncate(plain.length() - 5)
    static.truncate(static.length() - 5)
    assert torch.allclose(plain.step(torch.tensor([[8, 2]])), static.step(torch.tensor([[8, 2]])), atol=1e-4)
    assert seen == [(1, 1), (1, 4), (1, 4), (1, 1), (1, 4)]
    # More rows than were asked for go through the model, and what follows goes on from there.
    for ids in ([[1, 2, 3, 4, 5, 6]], [[7]]):
        assert torch.allclose(plain.step(torch.tensor(ids)), static.step(torch.tensor(ids)), atol=1e-4)
    assert seen[5:] == [(1, 1)]


@crossed(
    "family",
    family=sorted(BUILD),
    kept=[None, torch.arange(3, 20)],
    open_runner=[lambda m: adapter_for(m).runner(m), runner],
)
def test_a_runner_keeps_no_graph(family, open_runner, kept):
    """Nor does its cache, whose tensors would hold every layer's activations; the caller has not switched gradients off."""
    name, model = family
    assert torch.is_grad_enabled() and all(p.requires_grad for p in model.parameters())
    found = open_runner(model)
    first = found.prefill(prompt(name, PROMPTS["video"]), kept)
    # The second is of more rows than are captured, and goes through the model.
    said = [found.step(torch.tensor([ids])) for ids in ([5], [6, 7, 8])]
    held = [x for layer in found.cache.layers for x in (layer.keys, layer.values)]
    assert len(held) == 6 and not any(x.requires_grad for x in (first, *said, *held))


def test_the_runner_of_an_accelerated_model_keeps_no_graph(family):
    name, model = family
    with mmaccel.accelerate(model) as fast:
        found = fast.view.runner()
        said = found.prefill(prompt(name, PROMPTS["video"])), found.step(torch.tensor([[5]]))
        held = [x for pair in found.cache.state.layer_buffers(1) for x in pair]
    assert len(held) == 6 and not any(x.requires_grad for x in (*said, *held))


@torch.no_grad()
def test_trees_are_the_model_s_own(family):
    """Twice what a tree's rows see and where they stand; then a path of them is kept, and a chain goes on."""
    name, model = family
    inputs = prompt(name, PROMPTS["interleaved"])
    plain, static = adapter_for(model).runner(model), runner(model, rows=(2, 8))
    plain.prefill(inputs)
    static.prefill(inputs)
    wide = Proposal(torch.arange(69), parents=torch.tensor([-1] * 40 + [0] * 29)).branches
    for both in (plain, static):
        both.logits = [
            both.step(torch.tensor([[4, 5, 6, 7, 8, 9]]), TREE),
            both.step(torch.tensor([[3]]), LATER),
        ]
        both.truncate(both.length() - 1)
        both._last = 6
        if both._moved is not None:
            both._moved._last = 6
        both.accept(torch.tensor([0, 2, 4, 5]))
        both.logits.append(both.step(torch.tensor([[7, 8]])))
        # A tree of more rows than a word has bits goes through the model; the path that is kept of it, too.
        both.logits.append(both.step(torch.arange(3, 73)[None], wide))
        both.accept(torch.tensor([0, 1, 69]))
        both.logits.append(both.step(torch.tensor([[9]])))
        assert both.length() == inputs["input_ids"].shape[1] + 4 + 2 + 3 + 1
    assert plain.length() == static.length()
    for one, other in zip(plain.logits, static.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@torch.no_grad()
def test_room_grows(family, monkeypatch):
    """Steps past the end of the buffers: they are laid out anew, with what they held."""
    name, model = family
    monkeypatch.setattr("mmaccel.core.memory.buffers.ROOM_MIN", 3)
    inputs = prompt(name, PROMPTS["text"])
    plain, static = adapter_for(model).runner(model), runner(model, rows=(1, 2))
    plain.prefill(inputs)
    static.prefill(inputs)
    laid = []
    for token in range(12):
        ids = torch.tensor([[token + 3]])
        assert torch.allclose(plain.step(ids), static.step(ids), atol=1e-4)
        laid.append(static.steps.parts[0].held[0].rope.shape[2])
    assert len(set(laid)) > 1 and laid == sorted(laid)


@crossed("family", family=sorted(BUILD), strategy=["off", "sequential", "tree"])
def test_a_recipe_decodes_through_it(family, strategy, monkeypatch):
    """Target and draft of an accelerated model, its own memory; the cache it leaves can be taken up by plain steps."""
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    choice = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    want = model.generate(**inputs, **choice)
    more = {**choice, "max_new_tokens": 4}
    longer = torch.ones(1, want.sequences.shape[1], dtype=torch.long)
    after = model.generate(
        want.sequences, attention_mask=longer, past_key_values=want.past_key_values, **more
    )
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    seen = counted(monkeypatch)
    peer = BUILD[name](seed=1)
    draft = {"off": Off(), "sequential": Sequential(model=peer, window=3), "tree": Tree(model=peer)}[strategy]
    with mmaccel.accelerate(model, draft=draft) as fast:
        got = fast.generate(**inputs, **choice)
        assert torch.equal(got.sequences, want.sequences)
        assert got.past_key_values.sequence.layout.length == got.past_key_values.get_seq_length()
        assert len(seen) == 11 if strategy == "off" else len({shape[1] for shape in seen}) > 1
        monkeypatch.undo()
        plain = HFRunner(model, adapter_for(model), got.past_key_values)
        plain.delta = int(got.past_key_values.sequence.delta)
        again = got.sequences[:, -1:]
        with torch.no_grad():
            for _ in range(4):
                again = torch.cat([again, plain.step(again[:, -1:])[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(again[:, 1:], after.sequences[:, -4:])


def test_without_a_draft_all_is_as_it_was(family, monkeypatch):
    """Sampling draws the same numbers, a streamer hears the same tokens; what asks for more goes the old way."""
    name, model = family
    inputs = prompt(name, PROMPTS["video"])

    def sampled(one, streamer):
        torch.manual_seed(5)
        choice = {"do_sample": True, "temperature": 1.3, "top_k": 30, "repetition_penalty": 1.2}
        return one.generate(**inputs, max_new_tokens=12, streamer=streamer, **choice)

    want = sampled(model, first := Record())
    # Beams of a video are cut from its pixels by transformers, which fails for GLM.
    more = inputs if adapter_for(model).mixes_modalities else prompt(name, PROMPTS["text"])
    beams = model.generate(**more, max_new_tokens=5, num_beams=2, do_sample=False)
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    seen = counted(monkeypatch)
    with mmaccel.accelerate(model) as fast:
        assert torch.equal(sampled(fast, second := Record()), want)
        assert first.shown == second.shown and second.shown[-1] == -1
        assert len(seen) == 11 and fast.report().new_tokens == 12
        assert torch.equal(fast.generate(**more, max_new_tokens=5, num_beams=2, do_sample=False), beams)
        told = fast.generate(**inputs, max_new_tokens=5, output_scores=True, return_dict_in_generate=True)
        assert len(told.scores) == 5 and len(seen) == 11


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_one_graph_serves_all_lengths(backend, monkeypatch, dynamo):
    """A step of all layers is compiled without a break, and no length compiles it anew."""
    model, inputs = BUILD["qwen"](layers=2), prompt("qwen", PROMPTS["video"])
    static, plain = runner(model, rows=(4,)), adapter_for(model).runner(model)
    static.prefill(inputs)
    plain.prefill(inputs)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(decode.DeviceDecodeStep.__call__, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(decode.DeviceDecodeStep, "__call__", compiled)
    for ids in ([[7]], [[9, 3]], [[1, 2, 3]], [[8, 2, 1, 6]]):
        ids = torch.tensor(ids)
        assert torch.allclose(static.step(ids), plain.step(ids), atol=1e-4)
    assert counter.frame_count == 1


class Adapted(torch.nn.Module):
    """A head to which others added something, as adapters do: it has a weight, and is more than that."""

    def __init__(self, head):
        super().__init__()
        self.head, self.weight, self.bias = head, head.weight, None

    def forward(self, hidden):
        return self.head(hidden) + 1


def captured(runner):
    return runner.steps is not None


def test_it_is_chosen_for_models_it_computes(family, monkeypatch):
    """On a CPU never; elsewhere for a plain cache or a memory written in place, not for layers that others changed."""
    _, model = family
    adapter = adapter_for(model)
    assert not captured(adapter.runner(model))
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    assert captured(adapter.runner(model))
    with mmaccel.accelerate(model) as fast:
        assert captured(fast.view.runner())
        state = Window(window=64).open(fast.view.geometry, fast.view, fast.view.device)
        assert not captured(adapter.runner(model, state))
    # Under autocast a plain cache has keys in the type of the angles, and values in that of the products.
    with torch.autocast("cpu", torch.bfloat16):
        mixed = adapter.runner(model)
        mixed.prefill(prompt(family[0], PROMPTS["text"]))
        assert not captured(mixed) and mixed.step(torch.tensor([[9, 3]])).shape[1] == 2
        with mmaccel.accelerate(model) as fast:
            assert captured(fast.view.runner())
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert captured(adapter.runner(model))
    layer = adapter.layers(model)[1]
    handle = layer.mlp.register_forward_hook(lambda *_: None)
    assert not captured(adapter.runner(model))
    handle.remove()
    # transformers leaves hooks that listen only while a call asks for states or attention.
    with torch.no_grad():
        model(**prompt(family[0], PROMPTS["text"]), output_attentions=True, output_hidden_states=True)
    assert layer._forward_hooks and captured(adapter.runner(model))
    own = layer.mlp.down_proj
    layer.mlp.down_proj = torch.nn.Sequential(own)
    assert not captured(adapter.runner(model))
    layer.mlp.down_proj = own
    assert captured(adapter.runner(model))
    # A product of three knows a bias for each, or none.
    with monkeypatch.context() as patch:
        product = layer.self_attn.k_proj
        other = torch.nn.Parameter(product.weight[:, 0].detach()) if product.bias is None else None
        patch.setitem(product._parameters, "bias", other)
        assert not captured(adapter.runner(model))
    assert captured(adapter.runner(model))
    # What stands before the layers and after them is no less the model's own.
    head = model.get_output_embeddings()
    for end in (model.get_input_embeddings(), adapter.text_model(model).norm, head):
        handle = end.register_forward_hook(lambda *_: None)
        assert not captured(adapter.runner(model))
        handle.remove()
    model.set_output_embeddings(Adapted(head))
    assert not captured(adapter.runner(model))
    model.set_output_embeddings(head)
    assert captured(adapter.runner(model))
    with pytest.raises(ModelError, match="rows"):  # more than fit
        runner(model, rows=(1, 65))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["off", "sequential", "tree"])
def test_captured_steps_give_the_plain_tokens(family, strategy, monkeypatch):
    """fp32: the same tokens, and steps were captured on the way."""
    name, model = family
    graphs = heard(monkeypatch, replay, "capture_graph", lambda *_: 1)
    model = model.cuda()
    inputs = {k: v.cuda() for k, v in prompt(name, PROMPTS["video"]).items()}
    want = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    peer = BUILD[name](seed=1).cuda()
    draft = {"off": Off(), "sequential": Sequential(model=peer, window=3), "tree": Tree(model=peer)}[strategy]
    with mmaccel.accelerate(model, draft=draft) as fast:
        assert torch.equal(fast.generate(**inputs, max_new_tokens=40, do_sample=False), want)
    assert graphs
    model.cpu()


def graphs_of(static):
    """The graphs of each number of rows, on all devices, one for each part."""
    held = [one for replays in {part.replays for part in static.steps.parts} for one in replays._held.items()]
    assert all(isinstance(graph, replay._Replay) for _, ways in held for graph in ways.values())
    rows = sorted({(width, tree) for (_, width, tree, _), _ in held})
    return [[number for (number, width, tree, _), _ in held if (width, tree) == one] for one in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_captured_step_is_the_written_one(family, dtype):
    name, model = family
    model = model.to("cuda", dtype)
    inputs = {k: v.cuda() for k, v in prompt(name, PROMPTS["video"]).items()}
    if dtype == torch.bfloat16:
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    plain, static = HFRunner(model, adapter_for(model), DynamicCache()), runner(model, rows=(1, 4))
    assert torch.equal(plain.prefill(inputs), static.prefill(inputs))
    wide = 1e-3 if dtype == torch.float32 else 0.1
    for ids in ([[7]], [[9]], [[4]], [[1, 2, 3]], [[4, 2, 3]], [[1, 9]], [[5]]):
        ids = torch.tensor(ids, device="cuda")
        assert torch.allclose(plain.step(ids), static.step(ids), atol=wide)
    assert [len(of) for of in graphs_of(static)] == [1, 1]
    model.to("cpu", torch.float32)
