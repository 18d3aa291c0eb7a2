"""Pictures are those of their rows, and figures on docs/speed.md and README follow from rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pictures
import pytest
from drawing import rows

ROOT = Path(__file__).parents[1]
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


def test_pages_on_papers_and_speed_are_short() -> None:
    for name in ("speed", "mminference", "mosaic", "parallelvlm"):
        count = len((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())
        assert count <= 1500, f"docs/{name}.md has {count} words"


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
