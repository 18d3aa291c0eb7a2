"""Greedy drafting changes no token: every strategy, with every pruner that it takes, over every memory that rolls back."""

import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmaccel
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.policies.draft import Parallel, PromptLookup, Sequential, SparseToDense, TextOnly, Tree
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.products import product

PIECES = {**PROMPTS, "long": [("text", 4), ("video", 25), ("text", 6)]}
PRUNERS = [None, *sorted(name for name, cls in registry("prune").items() if cls.stage == "draft")]
STRATEGIES = {
    "parallel": lambda model, window, **more: Parallel(model=model, window=window, process=False, **more),
    "sequential": lambda model, window, **more: Sequential(model=model, window=window, **more),
    "tree": lambda model, window, **more: Tree(model=model, **more),
    "dynamic tree": lambda model, window, **more: Tree(
        model=model, shape="dynamic", depth=window, width=2, nodes=2 * window, **more
    ),
    "text_only": lambda model, window, **more: TextOnly(model=model, window=window, **more),
    "prompt_lookup": lambda model, window, **more: PromptLookup(window=window, **more),
    "sparse_to_dense": lambda model, window, **more: SparseToDense(window=window, retention=0.3, **more),
}
MEMORIES = {"full": "full", "window": {"name": "window", "sinks": 4, "window": 40, "margin": 40}}


@pytest.fixture(scope="module", params=sorted(BUILD))
def pair(request):
    """A family, its target, and a draft that is right now and then, so that rounds end in every way."""
    target = BUILD[request.param](layers=2)
    target.generation_config.eos_token_id = None
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    weight = draft.get_output_embeddings().weight
    weight.data += 0.02 * torch.randn_like(weight)
    return request.param, target, draft


def taken(strategy: str, prune: str | None, kv: object) -> bool:
    """Whether there is such a recipe at all."""
    try:
        more = {} if prune is None else {"prune": prune}
        Recipe(
            draft=STRATEGIES[strategy](
                "tiny-ov-draft" if strategy != "parallel" else torch.nn.Linear(1, 1), 3, **more
            ),
            kv=kv,
        )
    except (RecipeError, TypeError):
        return False
    return True


CASES = product(
    STRATEGIES,
    PRUNERS,
    MEMORIES,
    sorted(BUILD),
    together=2,
    where=lambda strategy, prune, memory, _: taken(strategy, prune, MEMORIES[memory]),
)


def test_no_combination_is_left_out_unseen():
    """What drafts and takes a pruner takes all of them, over both memories; what drafts without a draft model takes none."""
    pruned = {"parallel", "sequential", "tree", "dynamic tree"}
    want = set(itertools.product(pruned, PRUNERS, MEMORIES))
    want |= {(strategy, None, memory) for strategy in ("text_only", "prompt_lookup") for memory in MEMORIES}
    assert {case.values[:3] for case in CASES} == want | {("sparse_to_dense", None, "full")}
    assert {name.replace("dynamic ", "") for name in STRATEGIES} | {"off"} == set(registry("draft"))


@pytest.mark.parametrize(("strategy", "prune", "memory", "pair"), CASES, indirect=["pair"])
@settings(max_examples=2)
@given(
    kind=st.sampled_from(sorted(PIECES)),
    seed=st.integers(0, 99),
    window=st.integers(1, 5),
    tokens=st.integers(1, 14),
    penalty=st.sampled_from([1.0, 1.2]),
)
def test_greedy_tokens_are_those_of_the_target_alone(
    pair, strategy, prune, memory, kind, seed, window, tokens, penalty
):
    name, target, draft = pair
    inputs = prompt(name, PIECES[kind], seed)
    more = {} if prune is None else {"prune": {"name": prune, "retention": 0.3}}
    options = {"max_new_tokens": tokens, "do_sample": False, "repetition_penalty": penalty}
    kv = MEMORIES[memory]
    with mmaccel.accelerate(target, kv=kv):
        alone = target.generate(**inputs, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MmaccelWarning)  # a draft that fails would give the same tokens
        if kind == "text":
            warnings.filterwarnings("ignore", r"prune '\w+' did nothing: ", MmaccelWarning)
        with mmaccel.accelerate(target, kv=kv, draft=STRATEGIES[strategy](draft, window, **more)) as fast:
            assert torch.equal(target.generate(**inputs, **options), alone)
            told = fast.report().draft
    assert told["failed"] is None
    assert tokens < 6 or strategy == "prompt_lookup" or told["proposed"] > 0


@pytest.mark.parametrize(
    ("strategy", "room", "pair"), product(STRATEGIES, [1, 2, 9], sorted(BUILD)), indirect=["pair"]
)
def test_up_to_the_model_s_last_position(pair, strategy, room):
    """A prompt that leaves `room` positions: the answer fills them, and no draft asks for one beyond."""
    name, target, draft = pair
    inputs = prompt(name, PIECES["long"])
    limit = inputs["input_ids"].shape[1] + room
    alone = target.generate(**inputs, max_length=limit, do_sample=False)
    assert alone.shape[1] == limit
    with mmaccel.accelerate(target, draft=STRATEGIES[strategy](draft, 5)) as fast:
        lengths = []
        runner = type(fast.view.runner())
        step = runner.step

        def counted(self, ids, *rest, **named):
            lengths.append(self.length() + ids.shape[1])
            return step(self, ids, *rest, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "step", counted)
            assert torch.equal(target.generate(**inputs, max_length=limit, do_sample=False), alone)
        assert fast.report().draft["failed"] is None
    assert lengths or room == 1
    # The rows of a tree are more than its depth, and stand at positions of their depth.
    assert "tree" in strategy or max(lengths, default=0) <= limit
