"""Recipes of three and of four parts, run: what is accepted acts, each part of it, and a draft changes no token."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.policies.draft import Parallel, PromptLookup, Sequential, SparseToDense, TextOnly, Tree
from tests.models.tiny_random import BUILD, prompt

# Long enough that what a pruner leaves is no prompt of less than a block, which would be dense.
PIECES = [("text", 6), ("video", 70), ("text", 10)]
SPARSE: dict[str, Any] = {
    "dense": "dense",
    "a_shape": {"name": "a_shape", "block": 16, "window": 32, "sink": 16},
    "grid": {"name": "grid", "block": 16},
}
KV: dict[str, Any] = {"full": "full", "window": {"name": "window", "sinks": 4, "window": 64, "margin": 40}}
PRUNE: dict[str, Any] = {
    "none": None,
    **{name: name for name in ("pyramid_drop", "sparsevlm", "visionzip")},
    "fastv": {"name": "fastv", "retention": 0.3},
    "dycoke": {"name": "dycoke", "forget": 0},
}
MODELS = {
    "sequential": lambda model, **more: Sequential(model=model, window=3, **more),
    "parallel": lambda model, **more: Parallel(model=model, window=3, process=False, **more),
    "tree": lambda model, **more: Tree(model=model, **more),
}
OWN = [None, *sorted(name for name, cls in registry("prune").items() if cls.stage == "draft")]
DRAFTS = ["off", "prompt_lookup", "text_only", "sparse_to_dense", *itertools.product(MODELS, OWN)]


def draft_of(kind: Any, model: torch.nn.Module) -> Any:
    if isinstance(kind, tuple):
        name, own = kind
        return MODELS[name](model, **({} if own is None else {"prune": {"name": own, "retention": 0.3}}))
    plain = {
        "off": lambda: "off",
        "prompt_lookup": lambda: PromptLookup(),
        "text_only": lambda: TextOnly(model=model, window=3),
        "sparse_to_dense": lambda: SparseToDense(window=3, retention=0.5),
    }
    return plain[kind]()


def accepted(parts: tuple[Any, ...]) -> bool:
    sparse, kv, prune, draft = parts
    try:
        Recipe(
            sparse=SPARSE[sparse],
            kv=KV[kv],
            prune=PRUNE[prune],
            draft=draft_of(draft, torch.nn.Linear(1, 1)),
        )
    except RecipeError:
        return False
    return True


def others(parts: tuple[Any, ...]) -> int:
    """How many parts are no default; a draft's own pruner is one."""
    draft = parts[3]
    chosen = [draft != "off", isinstance(draft, tuple) and draft[1] is not None]
    return sum(a != b for a, b in zip(parts, ("dense", "full", "none"), strict=False)) + sum(chosen)


# Drafts over memories of a dense, whole prompt are those of test_lossless.
MANY = [
    p
    for p in itertools.product(SPARSE, KV, PRUNE, DRAFTS)
    if others(p) >= 3 and (p[0], p[2]) != ("dense", "none") and accepted(p)
]
SAMPLE = [
    *random.Random(28).sample(MANY, 8),
    ("grid", "full", "fastv", ("parallel", "uv")),
    ("a_shape", "full", "visionzip", ("sequential", "attention")),
    ("grid", "window", "none", ("parallel", "uv")),
    ("a_shape", "window", "none", "text_only"),
    ("grid", "window", "none", ("tree", None)),
]


@pytest.fixture(scope="module", params=sorted(BUILD))
def pair(request):
    """A family, a target with layers after each cut, a draft that is right now and then, and the texts known so far."""
    target = BUILD[request.param](layers=6)
    target.generation_config.eos_token_id = None
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    weight = draft.get_output_embeddings().weight
    weight.data += 0.01 * torch.randn_like(weight)
    return request.param, target, draft, prompt(request.param, PIECES), {}


def acts(pair, parts: tuple[Any, ...]) -> None:
    _, target, model, inputs, texts = pair
    sparse, kv, prune, draft = parts

    def run(chosen: Any) -> tuple[torch.Tensor, mmaccel.Report]:
        recipe = {"sparse": SPARSE[sparse], "kv": KV[kv], "prune": PRUNE[prune], "draft": chosen}
        with warnings.catch_warnings():
            warnings.simplefilter("error", MmaccelWarning)
            with mmaccel.accelerate(target, **recipe) as fast:
                ids = target.generate(**inputs, max_new_tokens=8, do_sample=False)
                return ids, fast.report()

    rest = (sparse, kv, prune)
    if rest not in texts:
        texts[rest] = run("off")[0]
    ids, report = run(draft_of(draft, model))
    assert torch.equal(ids, texts[rest])
    assert not report.notes
    assert sparse in report.heads()
    assert (report.kv.get("visual", 0) > 0) == (prune != "none")
    if kv == "window":
        assert report.kv["held"] < report.kv["seen"]
    if draft != "off":
        assert report.draft["failed"] is None
    if draft not in ("off", "prompt_lookup"):  # which proposes nothing where no token comes twice
        assert report.draft["rounds"] > 0 and report.draft["proposed"] > 0


@pytest.mark.parametrize("parts", SAMPLE, ids=str)
def test_each_part_of_a_recipe_acts(pair, parts: tuple[Any, ...]) -> None:
    acts(pair, parts)


@pytest.mark.slow
def test_each_part_of_every_recipe_acts(pair) -> None:
    assert len(MANY) > 200
    for parts in MANY:
        acts(pair, parts)
