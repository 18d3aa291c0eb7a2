"""Several prompts under a draft: each sequence is what it is alone, whatever the others are, however far they have come."""

import itertools
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import DynamicCache

import mmaccel
from mmaccel.core.errors import DraftError, MmaccelWarning, ModelError
from mmaccel.models import decode, step
from mmaccel.models.drafting import split_batch
from mmaccel.policies.draft import Parallel, PromptLookup, Sequential, Tree
from mmaccel.policies.draft.sequential import SequentialDraftState
from tests.core.toy import g_test
from tests.models.tiny_random import BUILD, DRAFTS, PROMPTS, batch, often_right, prompt
from tests.spies import crossed, heard

KINDS = ("two videos", "text", "interleaved")
TOKENS = 24
ALWAYS = {"in_batches": "always"}


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    """A target, a draft that is often right, three prompts of unequal length, and how each ends at another time."""
    name = request.param
    model = BUILD[name](layers=3)
    model.generation_config.pad_token_id = 0
    other = often_right(model, 0.01)
    prompts = [prompt(name, PROMPTS[kind], seed=n) for n, kind in enumerate(KINDS)]
    free = [new(model.generate(**one, max_new_tokens=TOKENS, do_sample=False), one) for one in prompts]
    # Each answer ends at another time, none at once, the last one at the limit or before.
    ends = next(
        pair
        for pair in itertools.combinations(sorted({*free[0], *free[1], *free[2]}), 2)
        if len(counts := {length(said, pair) for said in free}) == 3 and min(counts) >= 6
    )
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": [*ends]}
    return name, model, other, prompts, options


def length(said: list[int], ends: tuple[int, ...]) -> int:
    """How many of the tokens are said when one of `ends` is the last."""
    return next((n for n, token in enumerate(said, 1) if token in ends), len(said))


def new(ids: torch.Tensor, inputs: dict) -> list[int]:
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def strategies(model) -> dict:
    return {
        **{name: one(model, **ALWAYS) for name, one in DRAFTS.items() if name != "off"},
        "pruned": Sequential(**ALWAYS, model=model, window=3, prune={"name": "uniform", "retention": 0.5}),
        "pruned parallel": Parallel(
            **ALWAYS, model=model, window=4, process=False, prune={"name": "attention", "retention": 0.5}
        ),
        "dynamic": Tree(**ALWAYS, model=model, shape="dynamic", depth=3, width=3, nodes=8),
    }


STRATEGIES = list(strategies(object.__new__(torch.nn.Module)))


@pytest.mark.numeric(by="torch")
@crossed("family", strategy=STRATEGIES, family=sorted(BUILD))
def test_each_sequence_is_what_it_is_alone(family, strategy):
    """Tokens, and the rounds in which they came: nothing of one sequence gets into another."""
    name, model, other, prompts, options = family
    plain = [model.generate(**one, **options) for one in prompts]
    draft = strategies(other)[strategy]
    with mmaccel.accelerate(model, draft=draft) as fast:
        alone = []
        for one, want in zip(prompts, plain, strict=True):
            assert torch.equal(model.generate(**one, **options), want)
            alone.append(fast.report().draft)
        ids = model.generate(**batch(name, prompts), **options)
        report = fast.report()
    width = max(one["input_ids"].shape[1] for one in prompts)
    counts = [want.shape[1] - one["input_ids"].shape[1] for one, want in zip(prompts, plain, strict=True)]
    assert len(set(counts)) == 3, "some end together: less is tested"
    assert ids.shape == (3, width + max(counts)) and report.new_tokens == max(counts)
    assert report.prompt_tokens == sum(one["input_ids"].shape[1] for one in prompts)
    for row, want, count in zip(ids, plain, counts, strict=True):
        pads = width + count - want.shape[1]
        assert row[pads : width + count].tolist() == want[0].tolist()
        assert not row[:pads].any() and not row[width + count :].any()
    told = report.draft["sequences"]
    assert [one["new_tokens"] for one in told] == counts and report.draft["failed"] is None
    for one, single in zip(told, alone, strict=True):
        for field in ("lengths", "windows", "target_steps", "failed"):
            assert one[field] == single[field]
    assert report.draft["lengths"]
    assert sorted(report.draft["lengths"]) == sorted(length for one in told for length in one["lengths"])
    if strategy == "parallel":
        modes = {(one["counters"]["pre_verify"], one["counters"]["post_verify"]) for one in told}
        assert len(modes) > 1, "the sequences were never in different modes"


@pytest.mark.parametrize("captured", [False, True])
def test_each_sequence_has_a_window_and_steps_of_its_own(family, captured, monkeypatch):
    """Windows follow each sequence's own measure of time. As on a GPU each has buffers of its own, and so has its draft."""
    name, model, other, prompts, options = family
    plain = model.generate(**batch(name, prompts), **options)
    steps = heard(monkeypatch, decode.SequenceDecodeSteps, "build_steps", lambda one, *_: one)
    if captured:
        monkeypatch.setattr(step, "DEVICES", ("cpu",))
        draft = Sequential(**ALWAYS, model=other, window=3)
    else:
        draft = Parallel(**ALWAYS, model=other, process=False)
    with mmaccel.accelerate(model, draft=draft) as fast:
        assert torch.equal(model.generate(**batch(name, prompts), **options), plain)
        assert all(one["rounds"] and one["accepted"] > 0 for one in fast.report().draft["sequences"])
    assert len(set(steps)) == 2 * len(prompts) * captured


@pytest.mark.parametrize("how", ["max_length", "one token", "returned"])
def test_lengths_and_outputs_of_a_batch(family, how):
    """`max_length` is that of the padded batch, as it is without a draft."""
    name, model, other, prompts, _ = family
    together = batch(name, prompts)
    width = together["input_ids"].shape[1]
    count = 1 if how == "one token" else 7
    options = {"max_length": width + 7} if how == "max_length" else {"max_new_tokens": count}
    options["return_dict_in_generate"] = how == "returned"
    plain = model.generate(**together, do_sample=False, **options)
    with mmaccel.accelerate(model, draft=Sequential(**ALWAYS, model=other, window=3)):
        ids = model.generate(**together, do_sample=False, **options)
    if how == "returned":
        assert ids.past_key_values is None
        plain, ids = plain.sequences, ids.sequences
    assert torch.equal(ids, plain)


def test_a_draft_that_fails_on_one_sequence_goes_on_for_the_others(family, monkeypatch):
    name, model, other, prompts, options = family
    plain = model.generate(**batch(name, prompts), **options)
    states, drafting = [], SequentialDraftState.draft_steps

    def fail(self, most=None):
        if self not in states:
            states.append(self)
        if states.index(self) == 1:
            raise ValueError("out of cheese")
        return drafting(self, most)

    monkeypatch.setattr(SequentialDraftState, "draft_steps", fail)
    with mmaccel.accelerate(model, draft=Sequential(**ALWAYS, model=other, window=3)) as fast:
        with pytest.warns(MmaccelWarning, match="out of cheese"):
            assert torch.equal(model.generate(**batch(name, prompts), **options), plain)
        told = fast.report().draft["sequences"]
    assert [one["failed"] is not None for one in told] == [False, True, False]
    assert told[0]["accepted"] > 0 and told[1]["rounds"] == 0 and told[2]["accepted"] > 0


@pytest.mark.parametrize("strategy", ["sequential", "parallel"])
def test_what_is_drawn_does_not_depend_on_the_neighbours(family, strategy):
    name, model, other, prompts, _ = family
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.2, "top_k": 0}

    def draw(rows: list[dict]) -> list[list[int]]:
        torch.manual_seed(5)
        together = batch(name, rows)
        return model.generate(**together, **options)[:, together["input_ids"].shape[1] :].tolist()

    with mmaccel.accelerate(model, draft=strategies(other)[strategy]):
        first = draw(prompts)
        again = draw([prompts[0], prompts[2], prompts[2]])
        twins = draw([prompts[0]] * 3)
    assert first[0] == again[0] == twins[0] and first[2] == again[2]
    assert twins[0] != twins[1] != twins[2], "each sequence has random numbers of its own"


def test_what_is_drawn_has_the_target_s_distribution():
    """Joint of the first two tokens over a batch of the same prompt many times, against the model's own probabilities."""
    model = BUILD["llava"](layers=2)
    model.get_output_embeddings().weight.data *= 3
    other = often_right(model, 0.03)
    one = prompt("llava", [("text", 6)])
    ids, top = one["input_ids"], 3

    def law(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids).logits[:, -1]
        best = logits.topk(top)
        return torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))

    with torch.no_grad():
        p = law(ids)[0].double()
        firsts = p.nonzero()[:, 0]
        joint = torch.zeros(len(p), len(p), dtype=torch.float64)
        joint[firsts] = p[firsts, None] * law(torch.cat([ids.expand(top, -1), firsts[:, None]], 1)).double()
    draft = Sequential(**ALWAYS, model=other, window=2)
    rows = 300
    with mmaccel.accelerate(model, draft=draft) as fast:
        torch.manual_seed(3)
        drawn = model.generate(**batch("llava", [one] * rows), max_new_tokens=3, do_sample=True, top_k=top)
        told = fast.report().draft
    assert 0 < told["accepted"] < told["proposed"]
    pairs = drawn[:, -3:-1]
    seen = torch.bincount(pairs[:, 0] * len(p) + pairs[:, 1], minlength=len(p) ** 2)
    assert g_test(seen, joint) > 1e-3


def test_what_a_batch_cannot_have_is_told(family):
    name, model, other, prompts, _ = family
    together = batch(name, prompts)
    options = {"max_new_tokens": 4, "do_sample": False}

    streamer = Mock()
    with mmaccel.accelerate(model, draft=Sequential(**ALWAYS, model=other, window=3)):
        with pytest.raises(DraftError, match="streamer"):
            model.generate(**together, **options, streamer=streamer)
        streamer.put.assert_not_called()
        with pytest.raises(DraftError, match="past_key_values"):
            model.generate(**together, **options, past_key_values=DynamicCache())
        with pytest.raises(DraftError, match="num_beams"):
            model.generate(**together, **options, num_beams=2)


def test_what_may_follow_is_asked_of_each_sequence_by_its_number(family):
    name, model, other, prompts, _ = family
    together = batch(name, prompts)
    options = {"max_new_tokens": 6, "do_sample": False}

    def allowed(number, ids):
        return list(range(10 + 50 * number, 40 + 50 * number))

    plain = model.generate(**together, **options, prefix_allowed_tokens_fn=allowed)
    with mmaccel.accelerate(model, draft=Sequential(**ALWAYS, model=other, window=3)):
        assert torch.equal(model.generate(**together, **options, prefix_allowed_tokens_fn=allowed), plain)


@crossed(
    "family", field=["logits_processor", "stopping_criteria"], sample=[False, True], family=sorted(BUILD)
)
def test_what_is_made_for_the_rows_of_a_batch_is_refused(family, field, sample):
    """A mask or an end for each row: every sequence by itself would get that of the first."""
    name, model, other, prompts, _ = family

    class Mask(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            return scores + torch.zeros(len(prompts), 1)

    class Ends(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **more):
            return ids.shape[1] > torch.arange(len(prompts)) + 100

    given = {
        "logits_processor": transformers.LogitsProcessorList([Mask()]),
        "stopping_criteria": transformers.StoppingCriteriaList([Ends()]),
    }
    options = {"max_new_tokens": 4, "do_sample": sample, field: given[field]}
    draft = Sequential(**ALWAYS, model=other, window=3)
    with mmaccel.accelerate(model, draft=draft), pytest.raises(DraftError, match=f"^{field}.* one by one"):
        model.generate(**batch(name, prompts), **options)


@pytest.mark.parametrize("draft", ["prompt_lookup", "tree"])
def test_a_prompt_padded_elsewhere_is_given_back_as_it_was(family, draft):
    """On its right, or within: the answer is that of the prompt alone, behind the prompt that was given."""
    name, model, other, _, _ = family
    strategy = {"prompt_lookup": PromptLookup(**ALWAYS), "tree": Tree(**ALWAYS, model=other)}[draft]
    one = prompt(name, PROMPTS["text"])["input_ids"]
    S = one.shape[1]
    holes = [place for place in range(S + 3) if place not in (2, 7, 12)]
    for places in (list(range(S)), holes):
        ids, mask = torch.zeros(1, S + 3, dtype=torch.long), torch.zeros(1, S + 3, dtype=torch.long)
        ids[:, places], mask[:, places] = one, 1
        with mmaccel.accelerate(model, draft=strategy):
            options = {"max_new_tokens": 6, "do_sample": False}
            out = model.generate(input_ids=ids, attention_mask=mask, **options)
            alone = model.generate(input_ids=one, **options)
        assert torch.equal(out, torch.cat([ids, alone[:, S:]], 1))


@pytest.mark.parametrize("recipe", [{}, {"draft": PromptLookup(**ALWAYS)}, {"sparse": "grid"}], ids=list)
def test_padding_without_a_mask_is_none_of_the_prompt(family, recipe):
    """As transformers infers it: the mask is 0 at the padding token, unless an answer ends with that token."""
    name, model, _, prompts, _ = family
    given = batch(name, prompts)
    bare = {field: value for field, value in given.items() if field != "attention_mask"}
    options = {"max_new_tokens": 6, "do_sample": False}
    with mmaccel.accelerate(model, **recipe):
        assert torch.equal(model.generate(**bare, **options), model.generate(**given, **options))
        ended, ones = {"eos_token_id": [0, 5], **options}, torch.ones_like(given["input_ids"])
        want = model.generate(**bare, attention_mask=ones, **ended)
        assert torch.equal(model.generate(**bare, **ended), want)


def test_a_batch_is_split_into_the_prompts_it_was_made_of(family):
    name, model, _, prompts, _ = family
    from mmaccel.core.attach import adapter_for

    together = batch(name, prompts)
    adapter = adapter_for(model)
    for row, one in zip(split_batch(adapter, model, together), prompts, strict=True):
        length = one["input_ids"].shape[1]
        for field, value in one.items():
            mine = row[field]
            if field in ("input_ids", "attention_mask", "mm_token_type_ids"):
                assert not mine[:, :-length].any()
                mine = mine[:, -length:]
            assert torch.equal(mine, value), field
        assert row.keys() == one.keys()
    # A picture too many: which pixels are whose is not guessed.
    more = dict(together, pixel_values=torch.cat([together["pixel_values"]] * 2))
    for field in ("image_grid_thw", "image_sizes", "batch_num_images"):
        if field in more:
            more[field] = torch.cat([more[field]] * 2)
    with pytest.raises(ModelError, match=r"one by one|pixels"):
        split_batch(adapter, model, more)
