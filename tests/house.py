"""The walls of the house and its counts: `python -m tests.house` prints them beside their marks, `--write` records them.

`--write` lowers each ceiling of `house.json` to today's count, and writes the arrows of docs/architecture.md from `WALLS`
and `LAB_WALLS`. Whoever raises a ceiling does so by hand, and says why in the commit.
"""

import ast
import cProfile
import dataclasses
import functools
import gc
import importlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mmaccel"
LAB = ROOT / "lab" / "mmaccel_lab"
PAGE = ROOT / "docs" / "architecture.md"
CEILINGS = Path(__file__).with_suffix(".json")

# What each room may import of this package. A dotted entry admits that module alone.
WALLS = {
    "__init__": {"_stop", "contract", "core", "models", "policies"},
    "__main__": {"mmaccel_command"},
    "_stop": set(),
    "backends": {"backends", "core.errors"},
    "core": {"core", "backends.measure", "backends.ops", "backends.select"},
    "contract": {"contract", "core", "backends.ops"},
    "policies": {"policies", "core", "backends.ops"},
    "models": {"models", "core", "media", "backends.ops"},
    "media": {"media", "core.errors", "core.memory.buffers"},
    "figure": {"core.errors"},
    "lmms": {"core", "media", "models"},
    "search": {"search", "core", "policies", "backends", "figure"},
    "serve": {"serve", "core", "models", "media"},
    "cli": {
        *("__version__", "cli", "serve", "search", "figure", "core", "models"),
        *("policies", "backends", "media"),
    },
}
# The same of the lab: of mmaccel, and of the lab itself. mmaccel imports nothing of the lab.
LAB_WALLS: dict[str, tuple[set[str], set[str]]] = {
    "__init__": (set(), set()),
    "__main__": ({"mmaccel_command"}, set()),
    "world": ({"core.errors"}, {"world"}),
    "tiny": ({"core", "models"}, {"tiny"}),
    "train": ({"core", "models"}, {"train", "tiny", "world"}),
    "eval": ({"cli.answer", "core", "figure", "media", "models", "policies"}, {"eval", "world"}),
    "cli": ({"backends", "cli", "core", "figure", "models", "policies", "search"}, {"cli", "eval", "world"}),
}


# Modules that cannot be imported without a package that few have.
OPTIONAL = {"mmaccel.lmms": "lmms_eval", "mmaccel.serve.replicas": "ray"}


def python_files(*folders: Path) -> list[Path]:
    """All Python files below the folders, sorted."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


FILES = python_files(PACKAGE)
LAB_FILES = python_files(LAB)


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Full names of all that a file imports, inside functions and for type checking too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno} imports relatively; give the full name"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def module_name(path: Path) -> str:
    """`mmaccel.core.prefill.plan` for its file; a package's `__init__` has the package's name."""
    root = LAB.parent if path.is_relative_to(LAB) else ROOT
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


# --- Counts of the text -----------------------------------------------------------------------------------------------


def lines(files: Iterable[Path]) -> int:
    """Lines as `wc -l` counts them."""
    return sum(path.read_bytes().count(b"\n") for path in files)


# What is called with the name of a module of kernels.
NAMING = ("operator", "Operator", "import_on_first_call")


@functools.cache
def kernels_of(path: Path) -> tuple[str, ...]:
    """The modules of kernels that a file names, as an operator does, to be imported at the first call on a GPU."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in NAMING:
            told = [one.value for one in node.args if isinstance(one, ast.Constant)]
            texts = [one for one in told if isinstance(one, str)]
            names |= {one if "mmaccel." in one else f"mmaccel.backends.triton.{one}" for one in texts[:1]}
    return tuple(sorted(names))


def imports_between(files: Iterable[Path], kernels: bool = False) -> dict[str, set[str]]:
    """For each module of `files`, those that it imports, lazily or for types too; with `kernels`, its operators' as well."""
    names = {module_name(path): path for path in files}

    def module(name: str) -> str:
        return name if name in names else name.rpartition(".")[0]

    named = {one: [*imported(path), *(kernels_of(path) if kernels else ())] for one, path in names.items()}
    found = {one: {module(name) for name in some} for one, some in named.items()}
    return {one: (others & names.keys()) - {one} for one, others in found.items()}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other by imports, the largest first."""

    @functools.cache
    def reached(name: str) -> frozenset[str]:
        seen: set[str] = set()
        left = [name]
        while left:
            new = edges[left.pop()] - seen
            seen |= new
            left += new
        return frozenset(seen)

    found = {frozenset(b for b in reached(a) if a in reached(b)) for a in edges if a in reached(a)}
    return sorted((sorted(one) for one in found), key=lambda one: (-len(one), one))


def with_one_importer() -> tuple[list[str], int]:
    """Modules of mmaccel that exactly one other module imports and that register nothing; and the number of modules."""
    edges = imports_between([*FILES, *LAB_FILES])
    importers = {module_name(path): 0 for path in FILES}
    for others in edges.values():
        for name in others & importers.keys():
            importers[name] += 1
    registers = re.compile(r'^@register\("', re.MULTILINE)
    policies = {module_name(p) for p in FILES if registers.search(p.read_text(encoding="utf-8"))}
    return sorted(name for name, n in importers.items() if n == 1 and name not in policies), len(FILES)


# --- Files that a call enters -----------------------------------------------------------------------------------------


def load_all() -> None:
    """Import all that a call may import later, so that imports are not counted as its steps."""
    heavy = ("mmaccel.cli", "mmaccel.backends.triton", "mmaccel.backends.flash.within", "mmaccel.__main__")
    for name in map(module_name, FILES):
        if not name.startswith((*heavy, *OPTIONAL)):
            importlib.import_module(name)


@functools.cache
def caches() -> list[Any]:
    """Every `functools.cache` of mmaccel."""
    load_all()
    kind = functools._lru_cache_wrapper
    gc.unfreeze()  # what is frozen is not listed
    found = [one for one in gc.get_objects() if type(one) is kind and one.__module__.startswith("mmaccel.")]
    gc.freeze()
    return found


def entered(call: Callable[[], object]) -> set[str]:
    """Files of mmaccel, relative to it, in which a function runs during the call, in any thread; caches start empty."""
    for one in caches():
        one.cache_clear()
    codes: set[CodeType] = set()

    def see(frame: Any, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    main = cProfile.Profile(subcalls=False, builtins=False)
    threading.setprofile(see)
    try:
        main.runcall(call)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    codes.update(entry.code for entry in main.getstats() if isinstance(entry.code, CodeType))
    top = f"{PACKAGE}/"
    return {code.co_filename.removeprefix(top) for code in codes if code.co_filename.startswith(top)}


@contextmanager
def without_collection() -> Iterator[None]:
    """No cyclic collection: a finalizer of what an earlier call left is no step of this one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


PIECES = [("text", 6), ("video", 20), ("text", 1), ("image",), ("text", 3), ("video", 20), ("text", 9)]


@without_collection()
def files_of_calls() -> dict[str, set[str]]:
    """Files that each call enters, on random models and a CPU: "dense", "mosaic watch + ask", and each recipe by name."""
    import torch

    import mmaccel
    from tests.house_recipes import recipes, streamed
    from tests.models.streams import CLUSTERS, QUESTION, film, pair
    from tests.models.tiny_random import BUILD, prompt

    found: dict[str, set[str]] = {}

    def generate(model: Any, inputs: dict[str, torch.Tensor], recipe: dict[str, Any]) -> None:
        with mmaccel.accelerate(model, recipe) as fast:
            model.generate(**inputs, max_new_tokens=6, do_sample=False)
            fast.report()

    for family, build in BUILD.items():
        model, draft = build(layers=6), build(layers=2, seed=1)
        model.generation_config.eos_token_id = draft.generation_config.eos_token_id = None
        inputs = prompt(family, PIECES)
        # Both families for the dense call, one for the recipes: what a recipe adds is the same in both.
        for name, recipe in (recipes(draft) | streamed(draft) if not found else {"dense": {}}).items():
            seen = entered(functools.partial(generate, model, inputs, recipe))
            found[name] = max(found.get(name, set()), seen, key=len)

    def watch_and_ask(name: str) -> None:
        model, processor = pair(name)
        kv = {"name": "mosaic", "frames": 8, "window": 16, "local": 4, "index": CLUSTERS}
        with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
            session.watch(film(40), fps=2.0)
            session.ask(QUESTION, max_new_tokens=4)

    for name in ("random-ov", "random-qwen"):
        pair(name), film(40)
        seen = entered(functools.partial(watch_and_ask, name))
        found["mosaic watch + ask"] = max(found.get("mosaic watch + ask", set()), seen, key=len)
    return found


# --- Counts beside marks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """A count of the house, the mark that it must come to, and what it counted, for the page."""

    name: str
    value: float
    mark: float
    detail: str = ""


def text_counts() -> list[Count]:
    """Counts that need no call."""
    import mmaccel
    from mmaccel.core.registry import registry

    assert mmaccel.accelerate  # the front door registers all policies
    alone, modules = with_one_importer()
    rings = circles(imports_between(FILES))
    with_kernels = circles(imports_between(FILES, kernels=True))
    share = round(100 * len(alone) / modules, 1)
    sizes, more = (", ".join(str(len(r)) for r in some) for some in (rings, with_kernels))
    return [
        Count("lines of mmaccel", lines(FILES), 36000),
        Count("lines of lab and bench", lines(python_files(ROOT / "lab", ROOT / "bench")), 10000),
        Count("percent of modules with one importer", share, 25, f"{len(alone)} of {modules}"),
        Count("modules in circles of imports", sum(map(len, rings)), 0, sizes),
        Count("modules in circles, with operators' kernels", sum(map(len, with_kernels)), 0, more),
        Count("fields of mosaic", len(dataclasses.fields(registry("kv")["mosaic"])), 15),
    ]


def call_counts(calls: dict[str, set[str]]) -> list[Count]:
    """Counts of the files that calls enter."""
    apart = ("dense", "mosaic watch + ask")
    rest = {name: len(files) for name, files in calls.items() if name not in apart}
    streams = {name: rest.pop(name) for name in calls if name.startswith("stream ")}
    worst, longest = (max(some, key=lambda name: some[name]) for some in (rest, streams))
    told = ", ".join(f"{name.removeprefix('stream ')} {count}" for name, count in streams.items())
    return [
        Count("files of a dense generate", len(calls["dense"]), 28),
        Count("files of the longest recipe", rest[worst], 40, worst),
        Count("files of the longest generate on a stream", streams[longest], 40, told),
        Count("files of mosaic watch + ask", len(calls["mosaic watch + ask"]), 48),
    ]


def ceilings() -> dict[str, float]:
    """What each count may be at most: committed, and lowered whenever a count falls, down to its mark."""
    return dict(json.loads(CEILINGS.read_text(encoding="utf-8")))


def over(counts: list[Count]) -> dict[str, tuple[float, float, str]]:
    """Each count that is above its ceiling, by its name: the count, the ceiling, and what was counted."""
    tops = ceilings()
    return {c.name: (c.value, tops[c.name], c.detail) for c in counts if c.value > tops[c.name]}


def lower(counts: list[Count]) -> None:
    """Lower the ceilings to the counts; a ceiling never rises, nor falls below its mark."""
    old = ceilings() if CEILINGS.exists() else {}
    new = {c.name: max(c.mark, min(c.value, old.get(c.name, c.value))) for c in counts}
    CEILINGS.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")


# --- Arrows -----------------------------------------------------------------------------------------------------------


def _admitted(names: set[str], own: str) -> str:
    """`core, backends.{ops, select}`: names of one room together, the room itself left out."""
    rooms: dict[str, list[str]] = {}
    for name in sorted(names - {own}):
        top, _, inner = name.partition(".")
        rooms.setdefault(top, []).extend([inner] if inner else [])
    return ", ".join(
        top if not inner else f"{top}.{inner[0]}" if len(inner) == 1 else f"{top}.{{{', '.join(inner)}}}"
        for top, inner in rooms.items()
    )


def arrows() -> str:
    """The arrows of docs/architecture.md: what each room may import, besides itself."""
    told = [f"{one:<10} -> {_admitted(names, one) or 'nothing'}" for one, names in WALLS.items()]
    told.append("")
    for one, (ours, labs) in LAB_WALLS.items():
        inner = ", ".join(f"lab.{name}" for name in sorted(labs - {one}))
        told.append(f"lab.{one:<8} -> {', '.join(filter(None, (inner, _admitted(ours, '')))) or 'nothing'}")
    return "\n".join(told)


_ARROWS = re.compile(r"(?<=<!-- arrows: make house-write -->\n```\n).*?(?=\n```)", re.DOTALL)


def page_arrows() -> str:
    """The arrows that stand in docs/architecture.md."""
    found = _ARROWS.search(PAGE.read_text(encoding="utf-8"))
    assert found, f"{PAGE.name} has no block of arrows"
    return found[0]


def main(arguments: list[str]) -> int:
    """The exit status: 1 where a count is over its ceiling."""
    counts = text_counts() + call_counts(calls := files_of_calls())
    if "--write" in arguments:
        lower(counts)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_ARROWS.sub(lambda _: arrows(), page), encoding="utf-8")
    tops = ceilings()
    print(f"{'count':<40} {'today':>8} {'ceiling':>8} {'mark':>8}")
    for c in counts:
        print(f"{c.name:<40} {c.value:>8g} {tops[c.name]:>8g} {c.mark:>8g}  {c.detail}")
    print("\nwalls\n" + arrows())
    if "--files" in arguments:  # the files of each call, what is in circles, and what has one importer
        print(json.dumps({name: sorted(files) for name, files in calls.items()}, indent=1))
        rest = {"circles": circles(imports_between(FILES)), "alone": with_one_importer()[0]}
        print(json.dumps(rest, indent=1))
    assert {c.name: c.mark <= tops[c.name] for c in counts} == dict.fromkeys(tops, True), (
        "a ceiling without its count"
    )
    for name, (value, top, _) in (high := over(counts)).items():
        print(
            f"error: {name}: {value:g} is over its ceiling of {top:g}; `python -m tests.house --files` names files."
        )
    return 1 if high else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
