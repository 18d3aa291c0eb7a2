"""The site and its pages: navigation, links, reference, tutorials that run, commands as quoted; and what a forge runs.

Pictures are those of their rows, and figures on docs/speed.md and README follow from rows. `make docs` builds the site,
where a warning is an error; nothing here needs its packages.
"""

import argparse
import importlib
import math
import os
import re
import runpy
import shlex
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pictures
import pytest
import yaml
from drawing import rows
from typer.main import get_command

import mmaccel
from mmaccel.cli import app, main
from mmaccel.core.recipe import MAIN_PRESETS
from mmaccel_lab.cli import app as lab
from mmaccel_lab.world import World, write_mp4
from tests.spies import returned

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = [*sorted(path.name for path in (DOCS / "tutorials").glob("*.md")), "../live.md", "../compose.md"]
SITE = runpy.run_path(str(DOCS / "site.py"))
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
WORDS = 1500


def pages(nav: Any) -> Iterator[str]:
    """The files that a navigation names."""
    for one in nav:
        for inner in one.values():
            yield from [inner] if isinstance(inner, str) else pages(inner)


def blocks(page: Path) -> list[str]:
    return re.findall(r"(?s)```python\n(.*?)```", page.read_text(encoding="utf-8"))


def test_every_page_stands_in_the_navigation() -> None:
    named = list(pages(CONFIG["nav"]))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | set(SITE["OUTSIDE"].values())
    assert len(named) == len(set(named)) and set(named) == there
    assert all((ROOT / path).is_file() for path in SITE["OUTSIDE"])


def test_links_stay_on_the_site() -> None:
    linked: Callable[[str, str], str] = SITE["linked"]
    text = "[a](docs/speed.md#b) ![c](docs/pictures/speed.svg) [d](lab/README.md) [e](examples/stock_qwen.py) [f](https://g.h)"
    assert (
        linked(text, "index.md") == "[a](speed.md#b) ![c](pictures/speed.svg) [d](lab.md) e [f](https://g.h)"
    )
    assert (
        linked("[a](../../CONTRIBUTING.md) [b](../speed.md)", "tutorials/x.md")
        == "[a](../contributing.md) [b](../speed.md)"
    )
    assert linked("[a](nowhere.md)", "presets.md") == "[a](nowhere.md)"  # mkdocs says that it leads nowhere


def test_rows_of_a_docstring_are_lists() -> None:
    text = (
        "One.\n\nsink, window  the first\n              and the last\nblock   tokens\n\n    code\nEnd of it."
    )
    assert SITE["listed"](text) == (
        "One.\n\n- **sink, window**: the first\n  and the last\n- **block**: tokens\n\n    code\nEnd of it."
    )
    plain = "Two lines\nof prose, where nothing  is a row? no: `x` is."
    assert SITE["listed"](plain) == plain


def test_the_reference_names_what_is_there() -> None:
    names = re.findall(r"(?m)^::: (\S+)$", (DOCS / "reference.md").read_text(encoding="utf-8"))
    for name in names:
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last, None) or importlib.import_module(name)
        assert found.__doc__, name
    missing = set(mmaccel.__all__) - {name.removeprefix("mmaccel.") for name in names}
    # `attached` is for tools; errors stand on their module's part of the page.
    assert missing == {"MmaccelError", "MmaccelWarning", "__version__", "attached", "models", "policies"}


def test_pages_for_newcomers_and_on_papers_and_speed_are_short() -> None:
    named = ("troubleshooting", "limits", "commands", "speed", "mminference", "mosaic", "parallelvlm")
    paths = [*(DOCS / f"{name}.md" for name in named), *(DOCS / "tutorials").glob("*.md")]
    long = {path.name: count for path in paths if (count := len(path.read_text("utf-8").split())) > WORDS}
    assert TUTORIALS and long == {}


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    write_mp4(World.generate(7, 128), path)
    return path


@pytest.mark.always
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_as_it_stands(
    name: str,
    film: Path,
    shipped: Callable[[str], str],
    forgotten: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped("tiny-ov"), shipped("tiny-ov-draft")
    if name == "stock-script.md":
        shipped("tiny-qwen"), pytest.importorskip("torchvision"), pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    for video in ("film.mp4", "camera.mp4"):
        (tmp_path / video).symlink_to(film)
    found = blocks(DOCS / "tutorials" / name)
    assert found
    module = ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)  # where dataclasses look names up
    space = vars(module)
    for number, block in enumerate(found):
        exec(compile(block, f"{name}, block {number}", "exec", dont_inherit=True), space)
    if name == "own-policy.md":
        with pytest.raises(mmaccel.MmaccelError, match="powers: base is 1; give at least 2"):
            space["Powers"](base=1)  # whose plan would never end
    if name == "long-video.md":
        assert space["answer"] == "orange" and "orange" in Path("page.html").read_text()
    if name == "stock-script.md":
        text = (DOCS / "tutorials" / name).read_text("utf-8")
        told = re.search(r"```text\n(\w+)\n.*\n.*prefill ([\d.]+)% of causal", text)
        kept = pytest.approx(100 * space["report"].kept, abs=1)
        assert told and told[1] == space["answer"] and float(told[2]) == kept
    if name == "../compose.md":
        assert space["answer"].strip() == "purple"
        assert space["ids"].shape[1] == len(space["inputs"]["input_ids"][0]) + 13
    if name in ("stream.md", "../live.md"):
        assert space["answer"].text == "pink"
        assert name != "stream.md" or Path("page.html").read_text().count("<img") > 2


def test_the_tutorial_s_own_policy_is_known_to_commands(forgotten: None, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(blocks(DOCS / "tutorials" / "own-policy.md")[0])
    monkeypatch.chdir(tmp_path)
    for words in (["describe", "powers"], ["draw", "powers", "--out", "powers.png"]):
        with pytest.raises(SystemExit) as done:
            main(["--import", "mine.py", *words])
        assert not done.value.code
    assert (tmp_path / "powers.png").stat().st_size > 1000


def test_a_forge_runs_what_ci_runs_on_the_pythons_of_the_package() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    check = flow["jobs"]["check"]
    assert {"run": ".ci/run"} in check["steps"] and os.access(ROOT / ".ci" / "run", os.X_OK)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classed = [one.rpartition(" :: ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert check["strategy"]["matrix"]["python"] == classed == ["3.11", "3.12"]
    assert {"run": "make docs"} in flow["jobs"]["docs"]["steps"] and project["authors"]
    pinned = project["optional-dependencies"]["docs"]
    assert pinned and all("==" in one for one in pinned)


LEARNT = ("long-video", "stream", "captions", "own-policy", "own-family", "stock-script")
QUOTING = (
    *("mminference", "mosaic", "speed", "compose", "architecture", "stock", "families", "serving"),
    *("deployment", "troubleshooting", *(f"tutorials/{n}" for n in LEARNT)),
)
PAGES = ["README.md", "lab/README.md", "bench/README.md", *(f"docs/{n}.md" for n in QUOTING)]
ENDS = re.compile(r"\s(?:#|&&|<|>|\|).*")
"""What comes after a command on its line."""


class _Understood(Exception):
    """The words were parsed; nothing is run."""


def quoted(program: str) -> list[tuple[str, str]]:
    """(page, words) of all that follows `program`, in blocks of code and between backticks."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"(?m)^    .+$", text):
            found += [(page, one.strip()) for one in block.split("&&")]
        found += [(page, " ".join(one.split())) for one in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    start = re.compile(rf"(?:python )?{program}")
    return list(dict.fromkeys((page, ENDS.sub("", one)) for page, one in found if start.match(one)))


@pytest.mark.parametrize(("page", "line"), [one for one in quoted(r"bench/\w+\.py") if " " in one[1]])
def test_a_script_takes_what_is_quoted(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *words = shlex.split(line.removeprefix("python "))
    returned(monkeypatch, argparse.ArgumentParser, "parse_args", Mock(side_effect=_Understood))
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(_Understood):
        runpy.run_path(str(ROOT / script))["main"]()


@pytest.mark.parametrize(("page", "line"), [*quoted("mmaccel "), *quoted("mmaccel-lab ")])
def test_the_command_line_takes_what_is_quoted(page: str, line: str) -> None:
    program, *words = shlex.split(line)
    command: Any = get_command(lab if program == "mmaccel-lab" else app)
    context = None
    while hasattr(command, "resolve_command") and words:
        context = command.make_context(command.name or "mmaccel", list(words), parent=context)
        words = [*context._protected_args, *context.args]
        _, command, words = command.resolve_command(context, words)
    assert command is not None and not command.hidden, "a command that moved"
    if words:
        assert command.make_context(command.name, list(words), parent=context).params


def test_quotes_are_found() -> None:
    """A pattern that finds nothing would pass everything."""
    assert len(quoted("mmaccel ")) > 15 and len(quoted("mmaccel-lab ")) > 4
    assert len(quoted(r"bench/\w+\.py")) > 15


BENCH = ROOT / "bench"
SPEED = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_pictures_are_those_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pictures.stale() == [], "run make pictures"
    names = {path.stem for path in pictures.OUT.iterdir()}
    assert names == set(pictures.PICTURES), "a picture that nothing draws"
    facts, draw = pictures.PICTURES["speed"]
    changed = [*facts()[:-1], {**facts()[-1], "mmaccel": 1.0}]
    monkeypatch.setitem(pictures.PICTURES, "speed", (lambda: changed, draw))
    assert pictures.stale() == ["speed"]
    with pytest.raises(SystemExit, match="pictures: speed: not those of their rows"):
        pictures.main(["--check"])


def test_a_page_shows_every_picture() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = set(re.findall(r"pictures/(\w+)\.svg", "".join(page.read_text("utf-8") for page in pages)))
    assert shown == set(pictures.PICTURES)


def test_every_picture_is_drawn_for_light_and_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures.main(["--out", str(tmp_path)])
    for name, (facts, _) in pictures.PICTURES.items():
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert f"<!-- facts {pictures.digest(facts())} -->" in drawn
        assert "prefers-color-scheme:dark" in drawn and drawn.count("var(--ink)") > 3
        # Nothing is printed in a colour that a dark page would hide.
        assert not re.search(r"(?:fill|stroke): #(?:000000|ffffff|1f2329)\b", drawn), name


def one(name: str, **wanted: Any) -> dict[str, Any]:
    """The first row of a file that is so."""
    return next(row for row in rows(name) if wanted.items() <= row.items())


def seconds(value: float) -> str:
    return f"{float(f'{value:.3g}'):g} s"


@pytest.mark.parametrize(("case", "tree"), [("128k", "34b8180"), ("512k", "e65eab7"), ("1m", "9eb6263")])
def test_prefill_on_the_page_is_that_of_the_rows(case: str, tree: str) -> None:
    of = {"case": f"model:{case}", "tree": tree}
    ours = one("prefill_h200_202611", way="sparse", **of)
    cells = [case.upper().replace("K", "k"), f"{ours['kept']:.1%}", seconds(ours["median_s"])]
    for way in ("dense", "dense_flash_attn_4", "dense_flash_2"):
        rival = one("prefill_h200_202611", way=way, **of)
        factor = rival["median_s"] / ours["median_s"]
        cells += [seconds(rival["median_s"]), f"{factor:.2f} ×" if factor < 9.995 else f"{factor:.1f} ×"]
    assert "| " + " | ".join(cells) + " |" in SPEED
    dense = one("prefill_h200_202611", way="dense", **of)["median_s"]
    line = f"| {seconds(dense)} | {seconds(ours['median_s'])} | {dense / ours['median_s']:.1f} × |"
    assert line in SPEED and line in README


def test_short_prompts_on_the_page_are_those_of_the_rows() -> None:
    told = [row["speedup"] for row in rows("prefill_h200_202611") if {"against_s", "speedup"} <= row.keys()]
    assert "{:.3f}, {:.3f} and {:.3f} times".format(*told) in " ".join(SPEED.split())


def test_trained_pairs_on_the_page_are_those_of_the_rows() -> None:
    ratios, errors = list[float](), list[float]()
    for row in (row for row in rows("trained_h200_202611") if "over_plain" in row):
        ways = [[1 / pace for pace in row[way][-row["draws"] :]] for way in ("plain_each", "drafted_each")]
        spreads = [statistics.stdev(way) / statistics.fmean(way) for way in ways]
        ratios.append(row["over_plain"])
        errors.append(row["over_plain"] * math.hypot(*spreads) / math.sqrt(row["draws"]))
    page = " ".join((ROOT / "docs" / "serving.md").read_text(encoding="utf-8").split())
    assert len(ratios) == 12 and f"at {min(ratios):.2f} to {max(ratios):.2f} times" in page
    assert f"errors of {min(errors):.2f} to {max(errors):.2f}" in page


@pytest.mark.parametrize(
    ("wanted", "window", "line"),
    [
        ({"tree": "b315a86", "asked": 4}, "4", "Qwen2.5-VL 32B and 7B"),
        ({"tree": "e65eab7", "asked": 7}, "7", "LLaVA-OneVision 72B and 7B"),
        ({"tree": "e65eab7", "asked": None}, "measured (4)", "LLaVA-OneVision 7B and 0.5B"),
        ({"tree": "17096be", "asked": 2, "case": "self"}, "2", "Qwen2.5-VL 7B and itself, 256k columns"),
    ],
)
def test_drafts_on_the_page_are_those_of_the_rows(wanted: dict[str, Any], window: str, line: str) -> None:
    row = one("pipeline_h200x2_202611", **{"case": "parallel", **wanted})
    each = [1 / pace for pace in row["each_per_s"]]
    mean = sum(each) / len(each)
    spread = (sum((s - mean) ** 2 for s in each) / (len(each) - 1) / len(each)) ** 0.5 / mean
    pace, alone = 1 / mean, row["tokens_per_s"] / row["speedup"]
    cells = [line, window, f"{alone:.1f} tokens/s", f"{pace:.1f} ± {pace * spread:.1f} tokens/s"]
    cells += [f"{pace / alone:.2f} ± {pace / alone * spread:.2f} ×"]
    assert "| " + " | ".join(cells) + " |" in SPEED


def test_figures_of_each_preset_are_those_of_the_rows() -> None:
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    measured = [
        row for row in rows("recommend_h100_202611") if row.get("tree") == "2c009f77" and "preset" in row
    ]
    for row in (row for row in measured if row["model"] == "llava-onevision-7b"):
        parts = row["measured"]
        first = f"{1e3 * parts['question_s']:.0f} ms" if "question_s" in parts else "with the film"
        cells = [f"`{row['preset']}`", f"{row['frames']}", f"{row['questions']}"]
        cells += [f"{parts['read_s']:.2f} s", first, f"{1 / parts['token_s']:.0f}"]
        cells += [f"{row['told']:.1f}", f"{row['peak_bytes'] / 1e9:.1f} GB"]
        assert "| " + " | ".join(cells) + " |" in page
    assert {row["preset"] for row in measured} == set(MAIN_PRESETS)


def test_questions_on_the_page_are_those_of_the_rows() -> None:
    for way, name in {
        "rekv, a copy a frame": "ReKV, one copy for each frame",
        "rekv, coalesced": "ReKV, copies taken together",
        "mosaic": "`mosaic`",
        "mosaic, asked again": "`mosaic`, asked again",
        "mosaic, no prefetch": "`mosaic` without prefetch",
    }.items():
        row = one("stream_h200_202611", case="question", way=way, tree="4a38050")
        late, middle = (1e3 * row[key] for key in ("p95_s", "p50_s"))
        told = f"{middle:.0f} / {late:.0f}" if late > 99.5 else f"{middle:.1f} / {late:.1f}"
        assert f"| {name} | {told} ms |" in SPEED


def test_rows_that_pages_name_are_there() -> None:
    for page in (ROOT / "lab" / "LOG.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`(?:bench/results/)?([\w*-]+_2026\d\d\.jsonl)`", text):
            assert list((BENCH / "results").glob(name)), f"{page.name} names {name}"
        assert not re.search(r"\d\\\*", text), f"{page.name} has a figure that no row holds"


def test_the_share_of_attention_in_the_log_is_that_of_the_rows() -> None:
    page = (ROOT / "lab" / "LOG.md").read_text(encoding="utf-8")
    layer: dict[tuple[int, str], float] = {}
    for row in rows("sweep_h200_202611"):
        if row.get("case") == "dense" and "median_s" in row:
            scale = row["groups"] / row.get("groups_timed", row["groups"])
            layer[row["tokens"], row["way"]] = 28 * scale * row["median_s"]
    whole: dict[tuple[int, str], float] = {}
    kernel = {"dense": "dense_cudnn", "dense_flash_2": "dense_flash", "auto": "dense_cudnn"}
    for row in rows("prefill_h200_202611"):
        if row["tree"] == "77aa10b-dirty" and row.get("way") in ("dense", "dense_flash_2"):
            whole[row["tokens"], kernel[row["way"]]] = row["median_s"]
        elif row["tree"] is None and str(row.get("case")).startswith("short"):
            whole[row["tokens"], "dense_cudnn"] = row["against_s"]
    lines = page.split("### The share of attention in prefill")[1].split("\n\n")[2].splitlines()[2:]
    assert len(lines) == 5
    for line in lines:
        name, *told = (cell.strip() for cell in line.strip("|").split("|"))
        tokens = int(name[:-1]) << {"k": 10, "M": 20}[name[-1]]
        for way, cells in (("dense_cudnn", told[:3]), ("dense_flash", told[3:])):
            if (tokens, way) not in whole:
                assert cells == ["", "", ""]
                continue
            attention, prefill = layer[tokens, way], whole[tokens, way]
            for cell, value in zip(cells[:2], (attention, prefill), strict=True):
                assert float(cell.removesuffix(" s")) == float(f"{value:.3g}")
            assert cells[2] == f"{attention / prefill:.0%}"
