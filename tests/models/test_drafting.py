"""`generate` with a sequential draft: the model's own tokens, and a same-weights draft is accepted whole, video and all."""

import copy

import pytest
import torch
import transformers

import mmaccel
from mmaccel.core.errors import DraftError
from mmaccel.core.report import Report
from mmaccel.policies.draft.sequential import Sequential
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.products import product

pytestmark = pytest.mark.in_turn("family", 1)

# A video of more frames than a frame has rows or columns: rotary positions of text then lie below the video's last.
PIECES = {**PROMPTS, "many frames": [("text", 4), ("video", 30), ("text", 5)]}


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param]()
    model.generation_config.eos_token_id = None
    return request.param, model


def drafted(model, inputs, draft, **options) -> tuple[torch.Tensor, Report]:
    with mmaccel.accelerate(model, draft=draft) as fast:
        return model.generate(**inputs, max_new_tokens=24, **options), fast.report()


@pytest.mark.parametrize(("kind", "family"), product(PIECES, sorted(BUILD)), indirect=["family"])
def test_a_same_weights_draft_is_accepted_whole(family, kind):
    name, model = family
    inputs = prompt(name, PIECES[kind])
    ids, report = drafted(model, inputs, Sequential(model=copy.deepcopy(model), window=4), do_sample=False)
    assert report.draft["accepted"] == report.draft["proposed"] > 0
    assert report.draft["target_steps"] <= 24 // 5 + 1
    assert report.new_tokens == 24 == ids.shape[1] - inputs["input_ids"].shape[1]


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
    options = {"do_sample": False, "stop_strings": [word], "tokenizer": Letters()}
    want = model.generate(**inputs, max_new_tokens=24, **options)
    ids, _ = drafted(model, inputs, Sequential(model=copy.deepcopy(model), window=5), **options)
    assert torch.equal(ids, want) and ids.shape[1] < plain.shape[1]
    with pytest.raises(ValueError, match="tokenizer"):
        drafted(model, inputs, Sequential(model=copy.deepcopy(model)), stop_strings=[word])


def test_a_draft_of_another_family_is_refused_when_attached(family, tmp_path):
    name, model = family
    other = next(BUILD[kind]() for kind in BUILD if kind != name)
    with pytest.raises(DraftError, match="family"):
        mmaccel.accelerate(model, draft=Sequential(model=other))
    assert mmaccel.attached(model) is None
    with pytest.raises(DraftError, match=r"no config\.json"):
        mmaccel.accelerate(model, draft={"name": "sequential", "model": str(tmp_path)})


def test_the_report_is_of_the_target_s_memory_when_it_drafts_for_itself(family):
    name, model = family
    inputs = prompt(name, PIECES["video"])
    _, report = drafted(model, inputs, Sequential(model=model, window=4), do_sample=False)
    assert report.draft["accepted"] == report.draft["proposed"] > 0
    assert report.kv["seen"] == inputs["input_ids"].shape[1] + 24 - 1
    assert report.prompt_tokens == inputs["input_ids"].shape[1]


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
