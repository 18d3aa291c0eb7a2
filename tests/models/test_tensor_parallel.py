"""Two processes under transformers' tensor parallelism: what runs gives the plain answer, the rest is refused by what it
declares."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.adapter import shard_count
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.registry import BASES, registry
from mmaccel.models import shards
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt
from tests.models.two_ranks import RANKS, on_two_ranks

HEADS = {
    layer: {head: dict(name="a_shape", sink=8 * head + 8, window=24) for head in heads}
    for layer, heads in {0: range(4), 1: (1, 3)}.items()
}
RECIPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "a_shape": dict(sparse=dict(name="a_shape", block=16, window=32, sink=4)),
    "grid": dict(sparse=dict(name="grid", block=16)),
    "boundary_2d": dict(sparse="boundary_2d"),
    "long-video": dict(recipe="long-video"),
    "per_head": dict(
        sparse=dict(name="per_head", block=16, table=HEADS, default=dict(name="a_shape", sink=4, window=40))
    ),
    "window": dict(kv=dict(name="window", window=32)),
    "dycoke": dict(prune=dict(name="dycoke", forget=0.0)),
    "visionzip": dict(prune="visionzip"),
    "prompt_lookup": dict(draft="prompt_lookup"),
    "sparse_to_dense": dict(draft="sparse_to_dense"),
}
PRUNERS: dict[str, dict[str, Any]] = {
    "fastv": dict(layer=1),
    "pyramid_drop": dict(stages_at=(0.5,)),
    "dycoke": dict(layer=1),
    "sparsevlm": dict(layers=(1,), retention=(0.5,)),
}
MEMORIES = ("full", "offload", "recent", "no_cache", "window")
TOLD = dict(max_new_tokens=4, do_sample=False)


def answers(folder: str, films: str, sharded: bool) -> dict[str, Any]:
    """Of each recipe the tokens, the logits and, by head, the share of pairs; of each memory the answer's tokens; of what is
    refused the sentence. `sharded`: in one of two processes that share each layer."""
    from transformers import AutoModelForImageTextToText
    from transformers.distributed import DistributedConfig

    def load(name: str) -> Any:
        more = {"distributed_config": DistributedConfig(tp_size=RANKS)} if sharded else {}
        model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.float32, **more).eval()
        model.generation_config.eos_token_id = None
        return model

    found: dict[str, Any] = {}
    model, inputs = load(folder), prompt("qwen", PROMPTS["long"])
    with torch.no_grad():
        found["plain"] = model.generate(**inputs, **TOLD), model(**inputs).logits[0, -1]
        for name, recipe in RECIPES.items():
            with mmaccel.accelerate(model, **recipe) as fast:
                tokens = model.generate(**inputs, **TOLD)
                logits = model(**inputs).logits[0, -1]
                found[name] = tokens, logits, fast.report().kept
        two = batch("qwen", [inputs, prompt("qwen", PROMPTS["video"])])
        with mmaccel.accelerate(model, draft="prompt_lookup") as fast, pytest.warns(MmaccelWarning):
            found["batch"] = model.generate(**two, **TOLD), torch.zeros(1)
            assert any("own clocks" in note for note in fast.report().notes) == sharded
    if sharded:
        assert (shard_count(model), len(shards.own(model, 4))) == (2, 2)
        found["refused"] = refusals(model)
    other, processor = load(films), mmaccel.load_processor(films)
    frames = torch.randint(0, 255, (12, 3, 56, 56), generator=torch.Generator().manual_seed(3)).byte()
    for memory in MEMORIES:
        with mmaccel.VideoSession(other, processor, memory) as session:
            session.watch(frames, fps=1.0)
            found[f"stream {memory}"] = list(session.ask("What is shown?", max_new_tokens=4).ids)
    if sharded:
        for memory in ("rekv", "mosaic", "livevlm", "streammem"):
            with pytest.raises(RecipeError, match="does not run under tensor parallelism") as caught:
                mmaccel.VideoSession(other, processor, memory)
            found["refused"][memory] = str(caught.value)
    return found


def refusals(model: Any) -> dict[str, str]:
    told = {}
    for name, fields in PRUNERS.items():
        with pytest.raises(RecipeError) as caught:
            mmaccel.accelerate(model, prune=dict(name=name, **fields))
        told[name] = str(caught.value)
    with pytest.raises(RecipeError) as caught:
        mmaccel.accelerate(model, draft=dict(name="parallel", model="beside"))
    told["parallel"] = str(caught.value)
    assert mmaccel.attached(model) is None
    return told


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, random_folder: Callable[[str], Path]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`answers` of one process, and of each of two."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("sharded")
    BUILD["qwen"](layers=3).save_pretrained(folder / "model")
    shutil.copytree(random_folder("tiny-qwen"), folder / "films")
    # transformers 5.17 runs no model under tensor parallelism whose words are its head.
    films = mmaccel.load_model(folder / "films")
    films.lm_head.weight = torch.nn.Parameter(films.lm_head.weight.detach().clone())
    films.config.tie_word_embeddings = films.config.text_config.tie_word_embeddings = False
    films.save_pretrained(folder / "films")
    given = str(folder / "model"), str(folder / "films")
    return answers(*given, False), on_two_ranks(folder, answers, *given, True)


def test_every_recipe_that_runs_gives_the_answer_of_one_process(ran: Any) -> None:
    one, ranks = ran
    for name in ("plain", *RECIPES, "batch"):
        for rank in ranks:
            assert torch.equal(rank[name][0], one[name][0]), name
            assert (rank[name][1] - one[name][1]).abs().max() < 1e-5, name
    assert torch.equal(one["dense"][0], one["plain"][0]) and torch.equal(
        one["prompt_lookup"][0], one["plain"][0]
    )
    # The patterns do act, and a process counts those of its own heads.
    assert one["a_shape"][2] < 0.9 and one["per_head"][2] < 0.9
    assert sum(rank["per_head"][2] for rank in ranks) / RANKS == pytest.approx(one["per_head"][2])
    assert ranks[0]["per_head"][2] != ranks[1]["per_head"][2]


def test_memories_of_streams_that_look_at_no_head_give_the_answer_of_one_process(ran: Any) -> None:
    one, ranks = ran
    for memory in MEMORIES:
        assert all(rank[f"stream {memory}"] == one[f"stream {memory}"] for rank in ranks), memory


def test_what_chooses_by_all_heads_or_by_the_clock_is_refused_in_a_sentence(ran: Any) -> None:
    told = ran[1][0]["refused"]
    assert told == ran[1][1]["refused"]
    assert all("does not run under tensor parallelism" in one for one in told.values())
    assert told["fastv"] == (
        "prune 'fastv': it judges tokens by the attention of all heads, so it does not run under tensor parallelism; choose "
        "another prune, or load the model without distributed_config."
    )
    assert told["mosaic"].startswith("kv 'mosaic': it chooses frames by the keys of all heads")
    declared = {
        name for kind in BASES for name, cls in registry(kind).items() if getattr(cls, "unsharded", None)
    }
    assert {*told, "attention"} == declared


def test_a_pruner_that_reads_attention_says_that_it_is_unsharded() -> None:
    for name, cls in registry("prune").items():
        assert ("attention" in cls.needs) == isinstance(cls.unsharded, str), name
