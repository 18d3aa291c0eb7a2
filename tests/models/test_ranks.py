"""Two processes that share a model give what one gives; what cannot be shared is refused in a sentence."""

import os
import random
import shutil
import socket
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import mmaccel
from mmaccel.core.adapter import tensor_parallel_size
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.prefill.attention import MIN_ROWS
from mmaccel.core.registry import BASES, registry
from mmaccel.models import shards
from tests.models.test_vision_parts import calls as tower_calls
from tests.models.tiny_random import BUILD, EVERY, PROMPTS, batch, prompt
from tests.spies import refusal

RANKS = 2


def _rank(
    rank: int, port: int, device: str, work: Callable[..., Any], given: tuple[Any, ...], folder: str
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=RANKS)
    try:
        torch.save(work(*given), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def on_two_ranks(folder: Path, work: Callable[..., Any], *given: Any, device: str = "cpu") -> list[Any]:
    """What ``work(*given)`` returns in each of two processes, each on a `device`; `work` is a function of a module."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    how = "forkserver" if device == "cpu" else "spawn"  # a server that has imported once what both need
    get_context("forkserver").set_forkserver_preload([__name__, "transformers.models.auto.modeling_auto"])
    mp.start_processes(_rank, (port, device, work, given, str(folder)), nprocs=RANKS, start_method=how)
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(RANKS)]


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
    return EVERY[family]()


def computed(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Logits without a cache and, in the last pass, with one, and the states of all layers."""
    hidden = model(**inputs, use_cache=False).logits
    out = model(**inputs, output_hidden_states=True)
    return [out.logits, hidden, *out.hidden_states]


def asked(model: Any, inputs: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    """All that a caller may ask of an accelerated model; beams, which no pattern plans, of a dense one."""
    with mmaccel.accelerate(model, **recipe) as fast, torch.no_grad():
        first = model.generate(**inputs, **TOLD, return_dict_in_generate=True)
        logits = computed(model, inputs)
        kept, held = fast.report().kept, fast.report().kv["held"]
        more = torch.cat([first.sequences, TURN.expand(len(first.sequences), -1)], 1)
        tokens = [
            first.sequences,
            model.generate(input_ids=more, past_key_values=first.past_key_values, **TOLD),
        ]
        if not recipe.keys() - {"context_mesh"}:
            tokens.append(model.generate(**inputs, **TOLD, num_beams=2))
    return dict(tokens=tokens, logits=logits, kept=kept, held=held)


TOWERS = ("llava", "qwen", "qwen3_vl")
FILM = [("text", 5), ("video", 44), ("text", 3), ("image",), ("text", 9)]


def patches_seen(family: str, mesh: Any = None) -> tuple[list[int], Tensor]:
    """Patches of each call of the vision tower in a prefill, and the prompt's logits."""
    model, inputs = model_of(family), prompt(family, FILM)
    with mmaccel.accelerate(model, context_mesh=mesh), torch.no_grad(), tower_calls(model) as seen:
        return seen, model(**inputs).logits


def twice() -> dict[str, Tensor]:
    return {name: x.repeat(2, *[1] * (x.ndim - 1)) for name, x in prompt("llava", PROMPTS["long"]).items()}


def shared() -> dict[str, Any]:
    """In one of two processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for family, names in WAYS.items():
        model, inputs = model_of(family), prompt(family, PROMPTS["long"])
        found |= {(family, name): asked(model, inputs, **RECIPES[name], context_mesh=mesh) for name in names}
    found["twice"] = asked(model_of("llava"), twice(), sparse=A_SHAPE, context_mesh=mesh)
    deep = model_of("qwen3_vl"), prompt("qwen3_vl", PROMPTS["long"])
    found["deep"] = asked(*deep, sparse=A_SHAPE, context_mesh=mesh)
    found |= {("patches", family): patches_seen(family, mesh) for family in TOWERS}
    model, long = model_of("qwen"), prompt("qwen", PROMPTS["long"])
    found["refused"] = told = {
        name: refusal(lambda recipe=recipe: mmaccel.accelerate(model, **recipe, context_mesh=mesh))
        for name, recipe in WRONG.items()
    }
    told["mesh"] = refusal(lambda: mmaccel.accelerate(model, context_mesh="cpu"))
    told["states"] = refusal(lambda: mmaccel.accelerate(model_of("qwen3_5"), context_mesh=mesh))
    with mmaccel.accelerate(model, context_mesh=mesh), torch.no_grad():
        padded = batch("qwen", [long, prompt("qwen", PROMPTS["video"])])
        told["padded"] = refusal(lambda: model(**padded))
        told["weights"] = refusal(lambda: model(**long, output_attentions=True))
    assert mmaccel.attached(model) is None
    return found


HEADS = {
    layer: {head: dict(name="a_shape", sink=8 * head + 8, window=24) for head in heads}
    for layer, heads in {0: range(4), 1: (1, 3)}.items()
}
SHARDED: dict[str, dict[str, Any]] = {
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
FOUR = dict(max_new_tokens=4, do_sample=False)


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
        found["plain"] = model.generate(**inputs, **FOUR), model(**inputs).logits[0, -1]
        for name, recipe in SHARDED.items():
            with mmaccel.accelerate(model, **recipe) as fast:
                tokens = model.generate(**inputs, **FOUR)
                logits = model(**inputs).logits[0, -1]
                found[name] = tokens, logits, fast.report().kept
        two = batch("qwen", [inputs, prompt("qwen", PROMPTS["video"])])
        with mmaccel.accelerate(model, draft="prompt_lookup") as fast, pytest.warns(MmaccelWarning):
            found["batch"] = model.generate(**two, **FOUR), torch.zeros(1)
            assert any("own clocks" in note for note in fast.report().notes) == sharded
    if sharded:
        assert (tensor_parallel_size(model), len(shards.local_heads(model, 4))) == (2, 2)
        beside = dict(draft=dict(name="parallel", model="beside"))
        wrong = {
            **{name: dict(prune=dict(name=name, **own)) for name, own in PRUNERS.items()},
            "parallel": beside,
        }
        found["refused"] = {
            name: refusal(lambda one=one: mmaccel.accelerate(model, **one), RecipeError)
            for name, one in wrong.items()
        }
        assert mmaccel.attached(model) is None
    other, processor = load(films), mmaccel.load_processor(films)
    frames = torch.randint(0, 255, (12, 3, 56, 56), generator=torch.Generator().manual_seed(3)).byte()
    for memory in MEMORIES:
        with mmaccel.VideoSession(other, processor, memory) as session:
            session.watch(frames, fps=1.0)
            found[f"stream {memory}"] = list(session.ask("What is shown?", max_new_tokens=4).ids)
    if sharded:
        for memory in ("rekv", "mosaic", "livevlm", "streammem"):
            opens = lambda memory=memory: mmaccel.VideoSession(other, processor, memory)  # noqa: E731
            found["refused"][memory] = refusal(opens, RecipeError)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, random_folder: Callable[[str], Path]) -> list[str]:
    """Of a model whose layers are shared, and of one that watches films; none where they cannot be."""
    if find_spec("accelerate") is None:
        return []
    folder = tmp_path_factory.mktemp("sharded")
    BUILD["qwen"](layers=3).save_pretrained(folder / "model")
    shutil.copytree(random_folder("tiny-qwen"), folder / "films")
    # transformers 5.17 runs no model under tensor parallelism whose words are its head.
    films = mmaccel.load_model(folder / "films")
    films.lm_head.weight = torch.nn.Parameter(films.lm_head.weight.detach().clone())
    films.config.tie_word_embeddings = films.config.text_config.tie_word_embeddings = False
    films.save_pretrained(folder / "films")
    return [str(folder / "model"), str(folder / "films")]


def both(*folders: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return shared(), answers(*folders, sharded=True) if folders else {}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, folders: list[str]) -> list[Any]:
    """`shared` and `answers` in each of two processes, which start once: a start costs as much as their work."""
    return on_two_ranks(tmp_path_factory.mktemp("two"), both, *folders)


@pytest.fixture
def ranks(two: list[Any]) -> list[dict[str, Any]]:
    return [rows for rows, _ in two]


@pytest.fixture(scope="module")
def ran(two: list[Any], folders: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`answers` of one process, and of each of two."""
    pytest.importorskip("accelerate")
    return answers(*folders, sharded=False), [layers for _, layers in two]


def agree(one: dict[str, Any], ranks: list[dict[str, Any]], allowed: list[float]) -> None:
    for rank in ranks:
        assert all(map(torch.equal, rank["tokens"], one["tokens"]))
        off = [float((a - b).abs().max()) for a, b in zip(rank["logits"], one["logits"], strict=True)]
        assert all(x <= most for x, most in zip(off, allowed, strict=True)), (off, allowed)
        assert rank["kept"] == one["kept"]
    # Each holds its half, and the last one the columns of passes of few rows.
    held, whole = [rank["held"] for rank in ranks], one["held"]
    assert sum(held) == whole and max(held) < whole / RANKS + MIN_ROWS


def budget(model: Any, inputs: dict[str, Any]) -> list[float]:
    """As `oracle.budget`, of the plain model: twice what float32 is off float64, and one rounding of the largest value."""
    plain = []
    for kind in (torch.float32, torch.float64):
        with mmaccel.accelerate(model.to(kind)), torch.no_grad():
            plain.append(computed(model, inputs))
    model.float()
    return [
        2 * float((a.double() - b).abs().max()) + torch.finfo(a.dtype).eps * float(b.abs().max())
        for a, b in zip(*plain, strict=True)
    ]


@pytest.mark.always(every=True)
@pytest.mark.parametrize("family", sorted(BUILD))
def test_two_processes_give_what_one_gives(family: str, ranks: list[dict[str, Any]]) -> None:
    model, inputs = model_of(family), prompt(family, PROMPTS["long"])
    allowed = budget(model, inputs)
    for name in WAYS[family]:
        agree(asked(model, inputs, **RECIPES[name]), [rank[family, name] for rank in ranks], allowed)
    assert ranks[0][family, "grid" if family == "qwen" else "a_shape"]["kept"] < 0.95


@pytest.mark.parametrize("family", TOWERS)
def test_the_frames_of_a_film_are_shared_too(family: str, ranks: list[dict[str, Any]]) -> None:
    """A film's patches are encoded once, by all processes in even shares; a single image is encoded by each."""
    whole, logits = patches_seen(family)
    seen, found = zip(*(rank["patches", family] for rank in ranks), strict=True)
    assert sum(map(sum, seen)) == sum(whole) + min(whole) and max(map(sum, seen)) < 0.6 * sum(whole)
    allowed = budget(model_of(family), prompt(family, FILM))[0]
    assert max(float((x - logits).abs().max()) for x in found) <= allowed


@pytest.mark.always
def test_a_batch_and_a_model_with_deepstack(ranks: list[dict[str, Any]]) -> None:
    deep = model_of("qwen3_vl"), prompt("qwen3_vl", PROMPTS["long"])
    for name, model, inputs in (("twice", model_of("llava"), twice()), ("deep", *deep)):
        one = asked(model, inputs, sparse=A_SHAPE)
        agree(one, [rank[name] for rank in ranks], budget(model, inputs))


def test_what_is_not_shared_is_refused_in_a_sentence(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["refused"]
    assert told == ranks[1]["refused"] and set(told) == {*WRONG, "mesh", "states", "padded", "weights"}
    assert told["window"].startswith("kv 'window': under context_mesh a process holds a share of the cache")
    assert told["mesh"].startswith("context_mesh: give a DeviceMesh of one dimension")
    assert told["states"].startswith("context_mesh: recurrent layers")
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


@pytest.mark.always
def test_every_recipe_that_runs_gives_the_answer_of_one_process(ran: Any) -> None:
    one, ranks = ran
    for name in ("plain", *SHARDED, "batch"):
        for rank in ranks:
            assert torch.equal(rank[name][0], one[name][0]), name
            assert (rank[name][1] - one[name][1]).abs().max() < 1e-5, name
    assert torch.equal(one["dense"][0], one["plain"][0])
    assert torch.equal(one["prompt_lookup"][0], one["plain"][0])
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
    every = [one for kind in BASES for one in registry(kind).items()]
    declared = {name for name, cls in every if getattr(cls, "no_tensor_parallel", None)}
    assert {*told, "attention"} == declared


def test_a_pruner_that_reads_attention_says_that_it_is_unsharded() -> None:
    for name, cls in registry("prune").items():
        assert ("attention" in cls.needs) == isinstance(cls.no_tensor_parallel, str), name
