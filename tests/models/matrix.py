"""Every combination of registered policies: which a recipe refuses, and what shows that each part of one that runs acted."""

import functools
import itertools
import operator
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import mmaccel
from mmaccel.cli import catalog
from mmaccel.core.attach import adapter_for, family_of
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.models.letters import CharProcessor
from mmaccel.models.tiny import TinyModels
from mmaccel_lab.world import World, render
from tests.models.streams import FPS, QUESTION, every_stream, pair, strengthen
from tests.models.test_recipes import SMALL
from tests.models.tiny_random import DRAFTS, often_right, sampler

FRAMES, TOKENS, LAYERS = 40, 5, 4


class Cell(NamedTuple):
    """A choice for each axis; `own` is the pruner of the draft, `use` "generate", a "batch" of three or "session"."""

    family: str
    use: str
    sparse: str
    kv: str
    draft: str
    own: str
    prune: str


SPARSE: dict[str, Any] = {
    "dense": "dense",
    **{name: {"name": name, "block": 16, **fields} for name, fields in SMALL.items()},
}
SPARSE["per_head"] = {
    "name": "per_head",
    "block": 16,
    "table": {0: {0: "dense", 1: SPARSE["grid"]}, 3: {3: SPARSE["sf_fixed"]}},
    "default": SPARSE["a_shape"],
}
KV: dict[str, Any] = {
    "full": "full",
    **every_stream(frames=6, window=8, similar=0.95),
    "window": {"name": "window", "sinks": 4, "window": 160, "margin": 40},
}
KV["streammem"]["frames"] = 10  # passes over what fewer leave would be too short for a pattern
# The prompt of a few would be too short for a pattern.
KV["no_cache"] = {"name": "no_cache", "frames": 24, "kept": 64}
MODELS = ("sequential", "parallel", "tree")
"""Drafts with a pruner of their own."""
DRAFT = {name: functools.partial(one, in_batches="always") for name, one in DRAFTS.items()}
CHOICES = catalog.policy_names_by_field()
PRUNE: dict[str, Any] = {
    **{name: None if name == "none" else name for name in CHOICES["prune"]},
    "fastv": {"name": "fastv", "retention": 0.3},
    # What they leave of a clip of a memory is long enough for a pattern.
    "visionzip": {"name": "visionzip", "retention": 0.85},
    "dycoke": {"name": "dycoke", "drop": 0.2, "forget": 0},
}
AXES: dict[str, list[str]] = {
    "family": ["random-ov", "random-qwen"],
    "use": ["generate", "batch", "session"],
    **{kind: CHOICES[kind] for kind in ("sparse", "kv", "draft", "own", "prune")},
}
OTHERS = ("qwen3_vl", "qwen3_5", "glm46v", "glm4v_moe", "internvl")
"""A model type of each other family with streams; `llava_onevision` and `qwen2_5_vl` are on the axis."""
SERVES = {"generate": "generate", "batch": "generate", "session": "VideoSession"}
"""The word of the catalogue for each use."""


def draft_of(cell: Cell, model: torch.nn.Module) -> Any:
    """The draft of a cell, by `model`."""
    own = {} if cell.own == "none" else {"prune": {"name": cell.own, "retention": 0.3}}
    return DRAFT[cell.draft](model, **own)


BUILT = {
    "sparse": {name: policy("sparse", one) for name, one in SPARSE.items()},
    "kv": {name: policy("kv", one) for name, one in KV.items()},
    "prune": {name: one and policy("prune", one) for name, one in PRUNE.items()},
}


def parts_of(cell: Cell, draft: Any) -> dict[str, Any]:
    """What the recipe of a cell is made of."""
    made = {**{kind: BUILT[kind][getattr(cell, kind)] for kind in BUILT}, "draft": draft}
    if cell.family in OTHERS and cell.kv == "no_cache":
        # Their frames are of a few tokens.
        made["kv"] = replace(made["kv"], frames=64 if cell.prune == "dycoke" else 36, kept=128)
    return made


@functools.cache
def _any_draft(draft: str, own: str) -> Any:
    return draft_of(Cell("", "", "", "", draft, own, ""), torch.nn.Linear(1, 1))


@functools.cache
def _refusal(cell: Cell) -> str | None:
    told = catalog.why_use_refused(cell.use, **parts_of(cell, _any_draft(cell.draft, cell.own)))
    return None if told == catalog.YES else told


@functools.cache
def _family_refusal(family: str, **one: str) -> str | None:
    cell = Cell(family, "generate", "dense", "full", "off", "none", "none")._replace(**one)
    recipe = Recipe(**parts_of(cell, _any_draft(cell.draft, cell.own)))
    try:
        family_of(family).check_recipe(models(family)[0], recipe)
    except RecipeError as error:
        return str(error)
    return None


def refusal(cell: Cell) -> str | None:
    """Why a cell is refused, by a rule of recipes, or of its family where that is one of `OTHERS`; None: it runs."""
    told = _refusal(cell._replace(family="", use=SERVES[cell.use]))
    if cell.family in OTHERS:
        told = told or _family_refusal(cell.family, draft=cell.draft, own=cell.own)
        told = told or _family_refusal(cell.family, kv=cell.kv, prune=cell.prune)
    return told


def cells(families: Sequence[str] = AXES["family"]) -> Iterator[Cell]:
    """All of them, but for the pruners of drafts that take none: these are fields that are not there."""
    for values in itertools.product(*{**AXES, "family": families}.values()):
        cell = Cell(*values)
        if cell.own == "none" or cell.draft in MODELS:
            yield cell


@functools.cache
def running(*families: str) -> tuple[Cell, ...]:
    """Those that are not refused, of the families of the axis by default."""
    some = [cell for cell in cells([""]) if refusal(cell) is None]
    every = (Cell(family, *cell[1:]) for family in families or AXES["family"] for cell in some)
    return tuple(cell for cell in every if cell.family not in OTHERS or refusal(cell) is None)


RUNS = {"generate": 1, "session": 1, "batch": 4}
"""How much longer a cell of each use takes than one of "generate"."""


def covering(strength: int, fine: Iterable[Cell] | None = None, seed: int = 18) -> list[Cell]:
    """Cells of `fine` (None: all that run, of the families of the axis) holding all choices of `strength` axes that any of
    them holds, found greedily: those that hold most for the time they take."""
    fine = list(running() if fine is None else fine)
    axes = [operator.itemgetter(*some) for some in itertools.combinations(range(len(AXES)), strength)]
    left = {(n, choices(cell)) for n, choices in enumerate(axes) for cell in fine}

    def gain(cell: Cell) -> int:
        return sum((n, choices(cell)) in left for n, choices in enumerate(axes))

    def best(some: list[Cell]) -> Cell:
        # The best of some: the array is a little longer than the best of all would give, and found in a second.
        some = random.Random(seed + len(chosen)).sample(some, min(400, len(some)))
        return max(some, key=lambda cell: gain(cell) / RUNS[cell.use])

    chosen: list[Cell] = []
    while left:
        one = best(fine)
        if not gain(one):
            n, choice = min(left)
            one = best([cell for cell in fine if axes[n](cell) == choice])
        chosen.append(one)
        left -= {(n, choices(one)) for n, choices in enumerate(axes)}
    return chosen


QUESTIONS = (QUESTION, "what ?", "what colour ?")
"""Those of a batch, of unlike lengths."""


@functools.cache
def film(number: int = 0, frames: int = FRAMES) -> torch.Tensor:
    """[frames, 3, 56, 70] uint8, of so many tokens that a pass of any memory is long enough for a pattern. Frames come in
    any order, so that none is like the one before, but for those of a still scene, as long as two of the longest units."""
    moving = render(World.generate(3 + number, frames).table(), 56, 70)
    moving = moving[torch.randperm(frames, generator=torch.Generator().manual_seed(number))]
    moving[8:24] = moving[8]
    return moving


@functools.cache
def models(family: str, layers: int = LAYERS) -> tuple[Any, Any, Any]:
    """A random target with layers after each cut, a draft that is right now and then, and their processor."""
    if family in OTHERS:
        made = sampler(family)
        # As many of attention, where others are between.
        less = made.model(layers)
        target = made.model(layers**2 // adapter_for(less).geometry(less).layers)
        strengthen(target)
        processor = made.processor(target.config)
    else:
        target, processor = pair(family, layers=layers, wide=64)
    return target, often_right(target, 0.002, seed=1), processor


def inputs_of(target: Any, processor: Any, prompts: Any) -> dict[str, torch.Tensor]:
    """What a model is given for `prompts`, each a video and a question."""
    if not isinstance(processor, CharProcessor):
        return processor.chat(prompts, fps=FPS)  # type: ignore[no-any-return]
    adapter = adapter_for(target).stream_adapter(target, processor)
    made = []
    for shown, asked in prompts:
        times = [n / FPS for n in range(len(shown["video"]))]
        tail = adapter.question_ids(asked["text"])[0].tolist()
        made.append(adapter.prompt(shown["video"], FPS, times, tail))
    made = [{**one, "attention_mask": torch.ones_like(one["input_ids"])} for one in made]
    return TinyModels.pad_and_stack(made) if len(made) > 1 else made[0]


Said = tuple[tuple[int, ...], ...]


def answers(
    target: Any, processor: Any, recipe: Recipe, use: str, prompts: Any, tokens: int
) -> tuple[list[list[int]], mmaccel.Report]:
    """The new ids for each of `prompts`, to a session for the first's film and question, and the report; no warning."""
    with warnings.catch_warnings(action="error", category=MmaccelWarning):
        if use == "session":
            with mmaccel.VideoSession(target, processor, recipe) as session:
                take = session.watch if recipe.sparse.dense else session.ingest
                take(prompts[0][0]["video"], fps=FPS)
                return [list(session.ask(QUESTION, tokens).ids)], session.report()
        inputs = inputs_of(target, processor, prompts)
        with mmaccel.accelerate(target, recipe) as fast:
            ids = target.generate(**inputs, max_new_tokens=tokens, do_sample=False)
            return ids[:, inputs["input_ids"].shape[1] :].tolist(), fast.report()


@functools.cache
def run(cell: Cell, rows: tuple[int, ...]) -> tuple[Said, mmaccel.Report]:
    """The ids of a cell's answers to the prompts numbered `rows`, and its report."""
    target, draft, processor = models(cell.family)
    recipe = Recipe(**parts_of(cell, draft_of(cell, draft)))
    # The frames of the others are of a few tokens.
    frames = 2 * FRAMES if cell.family in OTHERS and cell.prune == "dycoke" else FRAMES
    shown = [(film(n, frames), QUESTIONS[n]) for n in rows]
    prompts = [[{"type": "video", "video": video}, {"type": "text", "text": text}] for video, text in shown]
    said, report = answers(target, processor, recipe, cell.use, prompts, TOKENS)
    end = target.generation_config.eos_token_id
    return tuple(tuple(one[: one.index(end) + 1] if end in one else one) for one in said), report


def alone(cell: Cell, batch: int) -> Said:
    """What a cell has to say: what its prompts, of a batch so many, get one by one, without a draft."""
    plain = cell._replace(draft="off", own="none")
    if cell.use != "batch":
        return run(plain, (0,))[0]
    each = [run(plain._replace(use="generate"), (n,))[0] for n in range(batch)]
    return tuple(said for (said,) in each)


ACTS: dict[str, tuple[str, ...]] = {
    "full": ("held",),
    "livevlm": ("pruned", "pages", "gone"),
    "mosaic": ("recalled", "clusters", "visual_clusters", "host_units", "gone"),
    "no_cache": ("recalled", "passed over"),
    "offload": ("host_units", "host_fetches"),
    "recent": ("gone",),
    "rekv": ("recalled", "host_units", "gone"),
    "streammem": ("pruned", "prototypes", "merged", "gone"),
    "window": ("gone",),
}
"""What is more than 0 for each memory that did its work: counters of it, `gone` (units, or columns, that it has had and no
longer holds on the device) and `passed over` (units that a question did not read)."""


def idle(kv: str, report: mmaccel.Report) -> list[str]:
    """What a memory should have done by now and, by its report, has not."""
    found = report.kv
    had, held = ("units", "resident") if "units" in found else ("seen", "held")
    left = LAYERS * found.get("units", 0) - found.get("recalled", 0)
    figures = {**found, "gone": found[had] - found[held], "passed over": left}
    return [name for name in ACTS[kv] if not figures.get(name, 0) > 0]


def check_acted(cell: Cell, batch: int = len(QUESTIONS)) -> None:
    """Assert that each part of a cell acted, and that neither its draft nor its company, of so many, changed a token."""
    said, report = run(cell, (*range(batch),) if cell.use == "batch" else (0,))
    cut, other = cell.prune == "dycoke", cell.family in OTHERS
    few = cell.kv == "streammem" and ((other and cut) or cell.family == "glm4v_moe")
    # A random model may say nothing that stands in its prompt.
    looked = [note for note in report.notes if not note.startswith("draft: prompt_lookup was asked for")]
    told = [note for note in looked if not (few and "fewer than 64 tokens at a time" in note)]
    assert all(said) and not told, report.notes
    if cell.sparse != "dense":
        # What dycoke leaves of a clip of streammem is four blocks, which some patterns list whole; of the smaller units of
        # others it is too few for any pattern, and that of livevlm is four blocks. A clip of glm4v_moe is always too few.
        # Of the 217 tokens of no_cache the blocks of sf_strided are all.
        short = few or (cut and (cell.kv == "streammem" or (other and cell.kv == "livevlm")))
        short |= cut and cell[2:4] == ("sf_strided", "no_cache")
        assert report.kept is not None and (report.kept < 1 or short), report.kept
        shown = SHOWN.get(cell.sparse, cell.sparse)
        assert few or any(shown in name for name in report.heads()), report.heads()
    still = idle(cell.kv, report)
    if other and cut and "merged" in still:  # what is left of units is their times, of which no two are alike
        still.remove("merged")
    assert not still, (still, report.kv)
    if cell.prune != "none":
        left = [count for name, count in report.kv.items() if name.startswith("visual from layer")]
        assert left and min(left) < report.kv["visual"], report.kv
    if cell.draft != "off":
        assert report.draft["failed"] is None
    if cell.draft not in ("off", "prompt_lookup"):  # which proposes nothing where no token comes twice
        assert report.draft["rounds"] > 0 and report.draft["proposed"] > 0
    if cell.draft in MODELS:
        pruned = {one["counters"]["pruned"] > 0 for one in report.draft["sequences"]}
        assert pruned == {cell.own != "none"}, report.draft
    if cell.draft != "off" or cell.use == "batch":
        assert said == alone(cell, batch)


SHOWN = {"per_head": "a_shape"}
"""What a report calls a pattern that has none of its own name."""
