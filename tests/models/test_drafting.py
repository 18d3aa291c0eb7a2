"""Every draft on both families: the plain model's tokens, whatever the draft sees; and what it sees is what it should."""

import copy
from unittest.mock import Mock

import pytest
import torch
import transformers

import mmaccel
from mmaccel.core.errors import DraftError
from mmaccel.core.report import Report
from mmaccel.policies.draft import Sequential, SparseToDense
from mmaccel.policies.draft.sparse_to_dense import _Sparse
from tests.models.tiny_random import BUILD, DRAFTS, PROMPTS, prompt
from tests.spies import crossed

LAYERS = 3


# A video of more frames than a frame has rows or columns: rotary positions of text then lie below the video's last.
PIECES = {**PROMPTS, "many frames": [("text", 4), ("video", 30), ("text", 5)]}


class Letters:
    """A tokenizer as far as stop strings go: token n is the letter n."""

    def get_vocab(self):
        return {chr(1000 + n): n for n in range(200)}

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def decode(self, ids, **_):
        return "".join(chr(1000 + int(n)) for n in ids)

    def batch_decode(self, rows, **_):
        return [self.decode(row) for row in rows]

    def __call__(self, text, **_):
        return {"input_ids": [-1]}

    def _convert_id_to_token(self, number):
        return "abcdef"

    def __len__(self):
        return 200


def test_stop_strings_are_the_plain_ones(family):
    name, model = family
    inputs = prompt(name, PIECES["video"])
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    start = inputs["input_ids"].shape[1]
    word = Letters().decode(plain[0, start + 4 : start + 6])
    options = {"stop_strings": [word], "tokenizer": Letters()}
    want = model.generate(**inputs, max_new_tokens=24, do_sample=False, **options)
    ids, _ = drafted(model, inputs, Sequential(model=copy.deepcopy(model), window=5), **options)
    assert torch.equal(ids, want) and ids.shape[1] < plain.shape[1]
    with pytest.raises(ValueError, match="tokenizer"):
        drafted(model, inputs, Sequential(model=copy.deepcopy(model)), stop_strings=[word])


@pytest.mark.parametrize("where", ["call", "model", "config"])
def test_lengths_of_a_padded_prompt_count_its_padding(family, where):
    """As `generate` alone does: `max_length` is that of the padded sequence."""
    name, model = family
    inputs, pads = prompt(name, PIECES["video"]), 3
    mask = torch.ones_like(inputs["input_ids"])
    inputs = {**inputs, "attention_mask": mask}
    for field in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if field in inputs:
            inputs[field] = torch.nn.functional.pad(inputs[field], (pads, 0))
    length = inputs["input_ids"].shape[1]
    limits = {"max_length": length + 9, "min_length": length + 6}
    config = copy.deepcopy(model.generation_config)
    # A token that is said soon ends the sequence, once that is allowed.
    free = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, length:].tolist()
    config.eos_token_id = free[2]
    options = {"do_sample": False, **limits}
    if where != "call":
        config.update(**options)
        options = {"generation_config": config} if where == "config" else {}
    before = model.generation_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "generation_config", before if where == "config" else config)
        plain = model.generate(**inputs, **options)
        with mmaccel.accelerate(model, draft=Sequential(model=copy.deepcopy(model), window=4)) as fast:
            ids = model.generate(**inputs, **options)
            assert fast.report().draft["failed"] is None
    assert length + 6 <= plain.shape[1] <= length + 9
    assert torch.equal(ids, plain)


@pytest.mark.parametrize("given", ["guidance_scale", "watermarking_config", "logits_processor"])
def test_a_processor_that_counts_its_calls_is_refused(family, given):
    """It would be asked about tokens that are taken back; where nothing drafts it is what it is."""
    name, model = family
    inputs = prompt(name, PIECES["text"])
    mark = transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 11])
    options = {"max_new_tokens": 4, "do_sample": True}
    if given == "guidance_scale":
        options["guidance_scale"] = 1.5
    elif given == "watermarking_config":
        options["watermarking_config"] = mark
    else:
        own = mark.construct_processor(200, "cpu")
        options["logits_processor"] = transformers.LogitsProcessorList([own])
        given = "watermarking_config"
    with mmaccel.accelerate(model, draft="prompt_lookup"), pytest.raises(DraftError, match=given):
        model.generate(**inputs, **options)
    if given == "watermarking_config":
        with mmaccel.accelerate(model):
            assert model.generate(**inputs, **options).shape[1] == inputs["input_ids"].shape[1] + 4


def drafted(model, inputs, draft, **options) -> tuple[torch.Tensor, Report]:
    with mmaccel.accelerate(model, draft=draft) as fast:
        return model.generate(**inputs, max_new_tokens=24, do_sample=False, **options), fast.report()


@pytest.mark.parametrize("strategy", ["parallel", "tree"])
def test_sampling_runs_under_every_warper(family, strategy):
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    with mmaccel.accelerate(model, draft=DRAFTS[strategy](copy.deepcopy(model))) as fast:
        torch.manual_seed(0)
        one = model.generate(**inputs, max_new_tokens=20, **options)
        report = fast.report()
        torch.manual_seed(0)
        assert torch.equal(one, model.generate(**inputs, max_new_tokens=20, **options))
    assert report.new_tokens == 20 and report.draft["accepted"] > 0 and report.draft["failed"] is None


RIGHT = [("sequential", kind) for kind in PIECES] + [("parallel", "many frames"), ("tree", "many frames")]


@crossed("family", case=RIGHT, family=sorted(BUILD))
def test_a_same_weights_draft_is_always_right(family, case):
    name, model = family
    strategy, kind = case
    inputs = prompt(name, PIECES[kind])
    ids, report = drafted(model, inputs, DRAFTS[strategy](copy.deepcopy(model)))
    told = report.draft
    if strategy == "tree":
        # Each tree holds the target's path down to its deepest level.
        assert all(length == 5 for length in told["lengths"][:-1])
    else:
        assert told["accepted"] == told["proposed"] > 0
    if strategy == "parallel":
        assert told["counters"]["streak_max"] >= 15 and told["counters"]["ready_at_start"] == 3
    assert strategy != "sequential" or told["target_steps"] <= 24 // 4 + 1
    assert report.new_tokens == 24 == ids.shape[1] - inputs["input_ids"].shape[1]


@pytest.mark.parametrize("strategy", ["tree", "parallel", "sequential"])
def test_the_target_may_be_its_own_draft(family, strategy):
    """The report is of the target's memory then."""
    name, model = family
    inputs = prompt(name, PIECES["video"])
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    ids, report = drafted(model, inputs, DRAFTS[strategy](model))
    assert torch.equal(ids, plain) and report.draft["failed"] is None
    assert max(report.draft["lengths"]) >= 3
    assert strategy != "sequential" or report.draft["accepted"] == report.draft["proposed"] > 0
    assert report.kv["seen"] == inputs["input_ids"].shape[1] + 24 - 1
    assert report.prompt_tokens == inputs["input_ids"].shape[1]


@pytest.mark.parametrize("compact", [False, True])
def test_what_a_pruned_draft_sees(family, compact):
    """A kept token stands at its own rotary place, or where it now is; nothing kept away is seen."""
    name, model = family
    inputs = prompt(name, PIECES["many frames"])
    with mmaccel.accelerate(model) as fast:
        view = fast.view
    keep = torch.cat([torch.arange(4), torch.arange(7, inputs["input_ids"].shape[1] - 20, 3),
                      torch.arange(inputs["input_ids"].shape[1] - 20, inputs["input_ids"].shape[1])])  # fmt: skip
    seen = {}

    def note(module, args, kwargs):
        seen["positions"] = kwargs["position_ids"]

    hook = view.adapter.text_model(model).register_forward_pre_hook(note, with_kwargs=True)
    runner = view.runner()
    with torch.no_grad():
        plain = {k: v for k, v in inputs.items() if k != "attention_mask"}
        runner.prefill(inputs, keep, compact)
        first = seen.pop("positions")
        runner.step(torch.tensor([[5]]))
        after = seen.pop("positions")
    hook.remove()
    assert runner.length() == keep.numel() + 1
    if compact:
        want = torch.arange(keep.numel()).expand_as(first)
    else:
        want = view.adapter.positions(model, plain)[..., keep].expand_as(first)
    assert torch.equal(first, want)
    assert bool((after == want.flatten(0, -2)[-1, -1] + 1).all())


@pytest.mark.parametrize("broken", [{"backend": "triton"}, {"prune": {"name": "fastv", "layer": 9}}])
def test_a_recipe_that_is_refused_keeps_nothing_of_its_draft(family, monkeypatch, broken):
    """A draft's process is started when the draft is checked; what is refused after that must not leave it running."""
    _, model = family
    start = Mock()
    monkeypatch.setattr(
        Sequential, "check_target", lambda self, target: target.get_or_create("process", start)
    )
    with pytest.raises(mmaccel.core.errors.RecipeError):
        mmaccel.accelerate(model, draft=Sequential(model=copy.deepcopy(model)), **broken)
    assert start.return_value.close.call_count == start.call_count and mmaccel.attached(model) is None


UNSCORED = "DraftError: sparse_to_dense: the prompt's columns were not scored: out of cheese"


@pytest.mark.parametrize(
    ("owner", "fails", "told"),
    [(Sequential, "open", "RuntimeError: out of cheese"), (_Sparse, "_score", UNSCORED)],
)
def test_a_draft_that_fails_before_it_drafts_leaves_the_plain_tokens(family, monkeypatch, owner, fails, told):
    """It cannot even be opened; or scores fail, which are made within the target's own pass, that must not end with them."""
    name, model = family
    inputs = prompt(name, PROMPTS["video"])
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    draft = SparseToDense(window=4) if owner is _Sparse else Sequential(model=copy.deepcopy(model))
    with mmaccel.accelerate(model, draft=draft) as fast, monkeypatch.context() as patch:
        patch.setattr(owner, fails, Mock(side_effect=RuntimeError("out of cheese")))
        with pytest.warns(mmaccel.core.errors.MmaccelWarning, match="out of cheese"):
            assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), plain)
        assert fast.report().draft["failed"] == told and "cheese" in str(fast.report())
