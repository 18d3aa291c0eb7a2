"""The laws of the house: imports, counts, lengths of files, names of policies; and what `make test-numeric` says."""

import ast
import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmaccel
from mmaccel.core.adapter import ModelAdapter, ModelView
from mmaccel.core.decoding.draft import DraftState, Proposal
from mmaccel.core.memory import kv as core_kv
from mmaccel.core.registry import BASES, registry
from tests import house, numeric
from tests.house import (
    FILES,
    LAB,
    LAB_FILES,
    LAB_WALLS,
    PACKAGE,
    ROOT,
    WALLS,
    imported,
    module_name,
    python_files,
)

pytestmark = pytest.mark.always(every=True)
SHIPPED = [*FILES, *LAB_FILES]
ALL_FILES = [*SHIPPED, *python_files(ROOT / "tests", ROOT / "bench")]

# The only file of mmaccel that looks for the lab, by its name and when a shipped model is asked for.
LOOKS_FOR_THE_LAB = "models/shipped.py"
# Optional or heavy packages, and the only places that may name them.
ONLY_IN = {
    "triton": ("backends/triton/",),
    "flash_attn": ("backends/",),
    "cutlass": ("backends/flash/",),
    "transformers": ("models/", "lab/tiny/", "lab/train/"),
    "tokenizers": ("models/", "lab/tiny/"),
    "av": ("media/", "lab/world/"),
    "PIL": ("media/",),
    "rich": ("cli/", "lab/cli/"),
    "typer": ("cli/", "lab/cli/"),
    "matplotlib": ("figure.py", "search/", "cli/draw.py", "lab/eval/"),
    "torchvision": (),
    "lmms_eval": ("lmms.py",),
    "ray": ("serve/replicas.py",),
    **dict.fromkeys(
        ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "httpcore2"), ("serve/",)
    ),
}
LONGEST, LONGEST_OF_KERNELS = 400, 600


def room(path: Path, package: Path) -> str:
    parts = path.relative_to(package).parts
    return parts[0] if len(parts) > 1 else path.stem


def admits(name: str, allowed: set[str], package: str = "mmaccel") -> bool:
    inner = name.removeprefix(package + ".")
    return any(inner == one or inner.startswith(one + ".") for one in allowed)


def trespasses(path: Path) -> Iterator[str]:
    """Imports of a file that its room's walls forbid."""
    lab = path.is_relative_to(LAB)
    inside = f"lab/{path.relative_to(LAB)}" if lab else str(path.relative_to(PACKAGE))
    ours, labs = LAB_WALLS[room(path, LAB)] if lab else (WALLS[room(path, PACKAGE)], set())
    for name in imported(path):
        top = name.split(".")[0]
        places = ONLY_IN.get(top)
        wrong = places is not None and not inside.startswith(places)
        if top == "mmaccel_lab":
            wrong = not admits(name, labs, top)
        elif top.startswith("mmaccel"):
            wrong = not admits(name, ours)
        if wrong:
            yield f"{inside} imports {name}"


def test_imports_run_one_way() -> None:
    assert [told for path in SHIPPED for told in trespasses(path)] == []


def test_walls_catch_a_hole() -> None:
    assert not admits("mmaccel.models.hf", WALLS["policies"])
    assert not admits("mmaccel.backends.reference", WALLS["policies"])
    assert not admits("mmaccel.core.errors_of_another_kind", WALLS["media"])
    assert admits("mmaccel.core.errors.WorldError", WALLS["media"])
    assert not admits("mmaccel_lab.eval.cases", LAB_WALLS["train"][1], "mmaccel_lab")


def test_the_page_s_arrows_are_the_walls() -> None:
    assert house.page_arrows() == house.arrows(), "run `make house-write`"


def test_no_count_of_the_text_is_over_its_ceiling() -> None:
    """A ceiling only falls, by `make house-write`; those of calls are held by `make house`, which CI runs."""
    tops, counts = house.ceilings(), house.text_counts()
    assert [c for c in counts if tops[c.name] < c.mark] == []
    assert house.over(counts) == {}, "`python -m tests.house --files` names the files"
    raised = dataclasses.replace(counts[0], value=tops[counts[0].name] + 1)
    assert house.over([raised, *counts[1:]]) == {raised.name: (raised.value, raised.value - 1, raised.detail)}


def test_circles_are_found() -> None:
    edges = house.imports_between(FILES, kernels=True)
    named = {"ops.clusters": "stream", "ops.lines": "prefill.estimate", "triton": "prefill.attend"}
    for one, kernels in named.items():
        assert f"mmaccel.backends.triton.{kernels}" in edges[f"mmaccel.backends.{one}"]
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert house.circles(edges) == [["a", "b", "c"], ["d", "e"]]


def test_mmaccel_looks_for_the_lab_in_one_place() -> None:
    """An import is caught by the walls; here also a name in a string, which `importlib` could take."""
    name = re.compile(r"^\s*mmaccel_lab\b")
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name.match(node.value)
    }
    assert found == {LOOKS_FOR_THE_LAB}


def test_every_room_has_its_walls() -> None:
    for package, walls in ((PACKAGE, set(WALLS)), (LAB, set(LAB_WALLS))):
        rooms = {p.name for p in package.iterdir() if p.is_dir() and any(p.glob("*.py"))}
        assert rooms <= walls, "a new room needs a line in WALLS"


def test_no_file_is_too_long() -> None:
    lines = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in ALL_FILES}
    kernels = "mmaccel/backends/triton/"
    assert {
        name: count
        for name, count in lines.items()
        if count > (LONGEST_OF_KERNELS if name.startswith(kernels) else LONGEST)
    } == {}


def test_every_file_says_what_it_is() -> None:
    sources = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in ALL_FILES}
    docstring = re.compile(r'(?:#.*\n|\n)*r?"""\s*\S')
    assert [name for name, text in sources.items() if text.strip() and not docstring.match(text)] == []


def test_nothing_is_left_undone() -> None:
    left = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError|breakpoint\(\))")
    assert [
        str(path.relative_to(ROOT)) for path in SHIPPED if left.search(path.read_text(encoding="utf-8"))
    ] == []


def public_names() -> set[str]:
    """Policies and their fields, what the package exports, and the members of its contracts."""
    contracts = [
        *BASES.values(),
        *(getattr(core_kv, name) for name in ("KVState", "KVView", "StreamPolicy", "StreamState")),
    ]
    contracts += [DraftState, Proposal, ModelAdapter, ModelView]
    contracts += [mmaccel.Recipe, mmaccel.Report, mmaccel.VideoSession]
    found = {*mmaccel.__all__, *(cls.__name__ for cls in contracts)}
    for cls in contracts:
        found |= {
            name for name in (*vars(cls), *vars(cls).get("__annotations__", {})) if not name.startswith("_")
        }
    for kind in BASES:
        for name, cls in registry(kind).items():
            found |= {name, *(field.name for field in dataclasses.fields(cls))}
    return found


def test_public_names_are_of_the_glossary() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    table, _, standard = page.partition("## Standard terms")
    ours = {
        term for row in re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE) for term in row.split(", ")
    } - {"term"}
    word = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")
    used = {part.lower() for name in public_names() for part in word.findall(name)}
    assert used - ours - set(standard.split()) == set(), "put these words into docs/glossary.md"
    texts = " ".join(path.read_text(encoding="utf-8") for path in FILES)
    assert {term for term in ours if not re.search(rf"(?<![a-z]){term}(?![a-z])", texts)} == set(), (
        "nobody uses these"
    )


def rank(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_public_names_are_sorted() -> None:
    for path in SHIPPED:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "__all__" in text else ():
            if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
                names = list(ast.literal_eval(node.value))
                assert names == sorted(set(names), key=rank), (
                    f"{path.relative_to(ROOT)}: __all__ is not sorted"
                )


def test_front_door_has_what_it_names() -> None:
    assert [name for name in mmaccel.__all__ if not hasattr(mmaccel, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mmaccel.nothing  # noqa: B018


@pytest.mark.parametrize("kind", ["sparse", "kv", "draft", "prune"])
def test_a_policy_lives_in_a_file_of_its_name(kind: str) -> None:
    for name, cls in registry(kind).items():
        parts = cls.__module__.split(".")
        assert parts[:3] == ["mmaccel", "policies", kind] and parts[3] == name, (
            f"{name} is in {cls.__module__}"
        )
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), f"{name} has no docstring"


def test_a_policy_file_is_imported_by_its_room() -> None:
    for kind in ("sparse", "kv", "draft", "prune"):
        folder = PACKAGE / "policies" / kind
        registering = {
            p.relative_to(folder).parts[0].removesuffix(".py")
            for p in folder.rglob("*.py")
            if f'@register("{kind}"' in p.read_text(encoding="utf-8")
        }
        assert registering == set(registry(kind)), f"policies/{kind}/__init__.py lacks an import line"


def test_tests_reach_every_module() -> None:
    for path in SHIPPED:
        if path.stem == "__main__":
            continue
        name = module_name(path)
        if (package := house.OPTIONAL.get(name)) and importlib.util.find_spec(package) is None:
            continue
        if ".triton" not in name and name != "mmaccel.backends.flash.within":
            assert importlib.import_module(name) is sys.modules[name]


def test_the_readme_s_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", readme))
    assert {"demo", "test"} <= named <= targets
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in ci and "make -k lint types" in ci


def test_the_readme_s_links_lead_somewhere() -> None:
    pages = ("README.md", "CONTRIBUTING.md", "bench/README.md", "lab/README.md", "lab/LOG.md")
    for page in (*(ROOT / name for name in pages), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_the_pages_name_files_that_are_there() -> None:
    """Paths of ours in the plan of the house, in the page on contributing and in those on papers."""
    named = re.compile(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?|[a-z_0-9]+\.py)`")
    files = {path.name for path in house.python_files(PACKAGE, LAB, ROOT / "tests", ROOT / "bench")}
    theirs = "minference/"  # the paper's own repository
    for page in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for path in named.findall(page.read_text(encoding="utf-8")):
            rooms = ("", "core", "backends", "policies/kv")
            places = (ROOT, LAB, *(PACKAGE / room for room in rooms))
            there = path in files or any((place / path).exists() for place in places)
            assert there or path.startswith(theirs), f"{page.name} names {path}, which does not exist"


def test_the_lock_fits_the_bounds() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    locked = {pin.name.lower().replace("_", "-"): next(iter(pin.specifier)).version for pin in pins}
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras["dev"], *extras["serve"])]
    for need in wanted:
        name = need.name.lower().replace("_", "-")
        assert name in locked, f"constraints.txt does not pin {name}"
        assert need.specifier.contains(locked[name]), (
            f"constraints.txt pins {name} to {locked[name]}, not {need.specifier}"
        )
    bounds = [(need.name.lower(), bound) for need in wanted for bound in need.specifier]
    lowest = {name: bound.version for name, bound in bounds if bound.operator == ">="}
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    oldest = {pin.name.lower(): Version(next(iter(pin.specifier)).version) for pin in pins}
    assert oldest == {name: Version(bound) for name, bound in lowest.items()}
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == lab["version"] == mmaccel.__version__
    assert lab["dependencies"] == [f"mmaccel=={mmaccel.__version__}"]
    assert f"## [{mmaccel.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_setting_in_which_nothing_is_found_fails_with_a_sentence(monkeypatch, tmp_path, capfd):
    (other := tmp_path / "test_other.py").write_text("def test_it():\n    pass\n")
    settings = ("ATEN_CPU_CAPABILITY", "default", "DEFAULT"), ("NO", "SUCH", "AVX1024")
    monkeypatch.setattr(numeric, "SETTINGS", [("torch", *one) for one in settings])
    monkeypatch.setattr(numeric, "LEVELS", ["DEFAULT", "AVX2", "AVX512", "AVX1024"])
    monkeypatch.setattr(sys, "argv", ["numeric", str(tmp_path)])
    assert numeric.main() == 1
    said = capfd.readouterr().out
    assert "ATEN_CPU_CAPABILITY=default: no test marked `numeric(by='torch')` was found" in said
    assert "NO=SUCH: left out, this processor has" in said
    other.write_text("import pytest\n@pytest.mark.numeric(by='torch')\ndef test_it():\n    pass\n")
    assert numeric.main() == 0 and "default: passed, " in capfd.readouterr().out


def test_every_test_marked_numeric_names_its_library():
    """Without one it would run under no setting."""
    others = {*Path(__file__).parent.rglob("test_*.py")} - {Path(__file__)}
    lines = [one for path in others for one in path.read_text().splitlines() if "mark.numeric" in one]
    assert len(lines) > 8
    assert all(re.search(r"mark\.numeric\(by=\"(numpy|torch)\"\)", line) for line in lines)
