"""What there is by name: the page of pairs, the JSON schema of recipes, and policies of a user's own file."""

import dataclasses
import itertools
import json
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mmaccel import check_policy, list_policies
from mmaccel.cli import catalog as pairs
from mmaccel.cli.catalog import DESCRIBED, recipe_schema
from mmaccel.cli.program import import_plugin
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.recipe import VERSION, Recipe, list_recipes, presets
from mmaccel.core.registry import policy, registry
from mmaccel.core.streams.session import VideoSession
from mmaccel.policies.prune.uv import UVPrune
from tests import sentence
from tests.cli import Call
from tests.models.streams import QUESTION, pair

PAGE = Path(__file__).parent.parent.parent / "docs" / "compose.md"
MARK = "<!-- mmaccel list --pairs -->\n\n"


def test_the_page_is_what_recipes_say(call: Call) -> None:
    told = PAGE.read_text(encoding="utf-8").split(MARK)[1]
    status, out, err = call("list", "--pairs")
    assert (status, err) == (0, "") and out == told, "write the page anew with mmaccel list --pairs"
    assert all(f"`{name}`" in told for slot in pairs.SLOTS for name in registry(slot))


def test_a_refused_pruner_of_a_draft_names_both_and_what_runs() -> None:
    for draft, prune in itertools.product(registry("draft"), registry("prune")):
        told = pairs.recipe_error_or_yes(partial(pairs.build_default_policy, "draft", draft, prune=prune))
        if told == pairs.YES:
            assert draft in ("sequential", "tree", "parallel")
            assert prune in ("attention", "random", "uniform", "uv")
            continue
        assert f"draft {draft!r}" in told and f"prune {prune!r}" in told, told
        rest = told.partition(";")[2]
        first = next(one for one in re.findall(r"'(\w+)'", rest) if one != prune)
        mended = (first, prune) if "take draft" in rest else (draft, first)
        own = mended[1] if mended[1] not in pairs.policy_names_by_field()["prune"] else "uv"
        assert pairs.why_pruner_refused(mended[0], own) == pairs.YES, told
    for field, part in (("prune", "uv"), ("kv", "rekv"), ("prune", UVPrune())):
        with pytest.raises(
            RecipeError, match=f"draft 'text_only' cannot use {field} '(uv|rekv)'; leave it out"
        ):
            policy("draft", {"name": "text_only", "model": "a-draft", field: part})


@pytest.fixture(scope="module")
def admits() -> Callable[[Any], bool]:
    jsonschema: Any = pytest.importorskip("jsonschema")
    found = json.loads(json.dumps(recipe_schema(), allow_nan=False))
    jsonschema.Draft7Validator.check_schema(found)
    return jsonschema.Draft7Validator(found).is_valid  # type: ignore[no-any-return]


def test_presets_and_policies_are_admitted(admits: Callable[[Any], bool]) -> None:
    for name in presets():
        text = resources.files("mmaccel").joinpath("recipes", f"{name}.yaml").read_text()
        assert admits(yaml.safe_load(text)), name
    whole = 0
    for name in list_recipes():
        try:
            fields = Recipe.load(name).to_dict()
        except RecipeError:  # a pruner of drafts is no recipe by itself
            assert registry("prune")[name].stage == "draft"
            continue
        whole += 1
        assert admits(json.loads(json.dumps(fields))), name
        assert admits(yaml.safe_load(Recipe.load(name).to_yaml())), name
    assert whole > 40


WRONG: list[dict[str, Any]] = [
    {"sparse": "gird"},
    {"sparce": "grid"},
    {"sparse": {"name": "grid", "strid": 3}},
    {"sparse": {"name": "grid", "stride": "row"}},
    {"sparse": {"stride": "frame"}},
    {"sparse": None},
    {"kv": {"name": "mosaic", "frames": "8"}},
    {"kv": {"name": "mosaic", "index": {"name": "nothing"}}},
    {"kv": {"name": "mosaic", "index": {"visual": 8}}},
    {"kv": {"name": "mosaic", "store": {"spil": "disk"}}},
    {"draft": {"name": "sequential", "prune": {"name": "uv", "retentoin": 0.1}}},
    {"draft": {"name": "sequential", "window": 2.5}},
    {"backend": "cuda"},
    {"chunk": "all"},
    {"dense_layers": 3},
    {"version": VERSION + 1},
    {"version": "1"},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_recipes_refuse_is_refused(fields: dict[str, Any], admits: Callable[[Any], bool]) -> None:
    assert not admits(fields)
    with pytest.raises(RecipeError):
        Recipe.load(fields)


def test_every_field_is_there_with_what_is_said_of_it(call: Call) -> None:
    found = recipe_schema()
    for kind in DESCRIBED:
        policies = {
            one["properties"]["name"]["const"]: one for one in found["definitions"][kind]["anyOf"][1:]
        }
        assert policies.keys() == registry(kind).keys()
        for name, cls in registry(kind).items():
            fields = {field.name for field in dataclasses.fields(cls) if field.init}
            assert policies[name]["properties"].keys() == fields | {"name"} and policies[name]["description"]
    assert found["properties"].keys() == {"version", *(field.name for field in dataclasses.fields(Recipe))}
    patterns = found["definitions"]["sparse"]["anyOf"][1:]
    grid = next(one for one in patterns if one["properties"]["name"]["const"] == "grid")
    assert grid["properties"]["score"]["enum"] == ["contrast", "mean", "sum"]
    assert grid["properties"]["score"]["default"] == "contrast"
    assert grid["properties"]["score"]["description"].startswith('score "mean": a class of lines')
    assert call.object("schema") == json.loads(json.dumps(recipe_schema()))


ROOT = Path(__file__).parents[2]

MINE = '''
"""A pattern, and a memory of streams."""
from dataclasses import dataclass

from mmaccel import register
from mmaccel.policies.kv.recent import Recent
from mmaccel.policies.sparse.a_shape import AShape


@register("sparse", "mine")
@dataclass(frozen=True, kw_only=True)
class Mine(AShape):
    """A sink, and a window of my own."""

    window: int = 96


@register("kv", "my_memory")
@dataclass(frozen=True, kw_only=True)
class MyMemory(Recent):
    """The last two frames."""

    local: int = 2
'''


@pytest.fixture(autouse=True)
def module(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module of a test is gone after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_policies", None)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_policies.py"
    path.write_text(MINE, encoding="utf-8")
    return path


EXAMPLES = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
SMALL: dict[str, dict[str, Any]] = {
    "every_fourth": {"block": 16},
    "every_tenth": {"window": 6, "local": 2, "step": 3},
    "echo": {},
    "longest": {"retention": 0.5},
}


@pytest.fixture
def examples(own: Path) -> Path:
    """The policies of CONTRIBUTING.md in one file."""
    own.write_text("\n\n".join(EXAMPLES), encoding="utf-8")
    return own


def test_the_examples_keep_the_contract(examples: Path) -> None:
    before = {kind: set(names) for kind, names in list_policies().items()}
    import_plugin(str(examples))
    new = {name: kind for kind, names in list_policies().items() for name in set(names) - before[kind]}
    assert new.keys() == SMALL.keys() and sorted(new.values()) == ["draft", "kv", "prune", "sparse"]
    for name, kind in new.items():
        check_policy(registry(kind).build(name, SMALL[name]))
        check_policy(registry(kind).build(name))


def test_the_example_of_a_memory_shows_its_window(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question sees the units that are kept and the whole window, whatever `local` is, also once it was saved; a memory
    that keeps units and has no `_save` is not saved without them."""
    import_plugin(str(examples))
    model, processor = pair("random-ov")
    frames = torch.randint(0, 256, (16, 3, 28, 28), dtype=torch.uint8)
    kv = {"name": "every_tenth", **SMALL["every_tenth"]}
    with VideoSession(model, processor, kv=kv) as session:
        session.watch(frames, fps=1.0)
        told = session.ask(QUESTION, 4)
        assert sorted(one.frames[0] for one in told.evidence) == [0, 3, 6, 9, *range(10, 16)]
        session.save(tmp_path / "saved")
        with monkeypatch.context() as patch:
            patch.delattr(type(session._live.state), "_save")
            with sentence(ModelError, "kv: TenthsMemory has no _save for its units; write it, and _load."):
                session.save(tmp_path / "another")
    with VideoSession(model, processor, kv=kv) as session:
        session.load(tmp_path / "saved")
        again = session.ask(QUESTION, 4)
    assert (again.text, again.evidence) == (told.text, told.evidence)


def test_the_examples_run_by_name(call: Call, examples: Path, clip: str, ov: str) -> None:
    words = ("--model", ov, "--max-new-tokens", 6, "--json")
    told = {}
    for name in ("dense", "every_fourth", "echo", "longest"):
        told[name] = call.object("--import", examples, "ask", clip, "hi", "--recipe", name, *words)
    assert told["every_fourth"]["kept"] < 0.8 < told["dense"]["kept"] == 1.0
    assert told["echo"]["answer"] == told["dense"]["answer"]
    question = ("--recipe", "every_tenth", "--question", "hi")
    assert "every_tenth" in call.text("--import", examples, "watch", clip, *question, *words)


def test_list_describe_and_the_schema_know_it(
    call: Call, own: Path, clip: str, ov: str, tmp_path: Path
) -> None:
    assert '"mine"' not in call("schema")[1]
    told = call.object("--import", own, "list", "--json")
    assert "mine" in told["sparse"] and "my_memory" in told["kv"]
    out = call.text("--import", own, "describe", "mine")
    assert "a window of my own" in out and "window: int = 96" in out
    assert '"mine"' in call("--import", own, "schema")[1]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"sparse": {"name": "mine", "sink": 32, "window": 64}, "dense_tail": 0}))
    kept = []
    for text in ("dense", "mine", recipe):
        words = ("ask", clip, "hi", "--model", ov, "--recipe", text, "--max-new-tokens", 1, "--json")
        kept.append(call.object("--import", own, *words)["kept"])
    assert kept[0] == 1.0 > kept[1] > kept[2]
    words = ("--model", ov, "--frames", 8, "--samples", 1, "--recipe", "mine", "--json")
    status, _, err = call("--import", own, "eval", "needle", *words)
    assert status in (0, 1) and "error" not in err
    words = f"{clip} --model {ov} --recipe my_memory --max-new-tokens 1 --question hi --json".split()
    assert "hi" in call.text("--import", own, "watch", *words)


FILES = {
    "not there": ("", "there is no file 'none.py'; give an existing Python file"),
    "no module": ("", "there is no module 'no_such.module'"),
    "no Python": ("def f(:\n", "it fails in line 1 with SyntaxError"),
    "an error": ("x = 1\n\ny = x / 0\n", "it fails in line 3 with ZeroDivisionError: division by zero; fix it."),
    "its own import": ("import no_such_thing\n", "it fails in line 1 with ModuleNotFoundError"),
    "an end": ("import sys\nsys.exit(3)\n", "it fails in line 2 with SystemExit: 3; fix it."),
    "a taken name": (MINE.replace('"mine"', '"grid"'), "sparse 'grid' is registered already"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_is_one_sentence(name: str, call: Call, own: Path, monkeypatch) -> None:
    monkeypatch.chdir(own.parent)
    text, words = FILES[name]
    own.write_text(text, encoding="utf-8")
    given = {"not there": "none.py", "no module": "no_such.module"}.get(name, own.name)
    err = call.error("--import", given, "list")
    assert err.startswith("error: --import") and words in err


def test_a_name_that_is_another_modules_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(MINE)
    assert "another module is called 'json'" in call("--import", tmp_path / "json.py", "list")[2]


def test_it_is_told_where_it_is_missed(call: Call, own: Path, clip: str, ov: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("sparse: {name: mine}\n")
    watch = ("watch", clip, "--model", ov, "--recipe", "my_memory")
    for words in (("describe", "mine"), ("ask", clip, "hi", "--recipe", "mine"), watch):
        assert "`mmaccel --import FILE`" in call(*words)[2]
    assert "`mmaccel --import FILE`" in call("ask", clip, "hi", "--model", ov, "--recipe", recipe)[2]
    assert "before the command" in call("list", "--import", own)[2]


def test_a_process_that_is_started_knows_it(own: Path) -> None:
    """As those of `eval table --jobs` are: a recipe arrives there as a pickle."""
    import_plugin(str(own))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(Recipe.to_yaml, (Recipe.load("mine"),)) == Recipe.load("mine").to_yaml()
