"""transformers' own model and generation tests on accelerated models: runs them, and writes the table of docs/stock.md.

    python bench/stock.py run CHECKOUT --source "5.23.0" --out bench/results/stock_cpu_202611.jsonl
    python bench/stock.py page bench/results/stock_cpu_202611.jsonl

CHECKOUT is a tree of transformers with its tests, near the installed version. `run` ends with status 1 where a test that
the plain model passes fails for another reason than those in tests/stock/stock_plugin.py, which also lists the arguments
that a recipe may refuse, or more than 20 fail under the recipe dense.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "stock"))

FILES = [f"tests/models/{name}/test_modeling_{name}.py" for name in ("llava_onevision", "qwen2_5_vl")]
RECIPES = ("dense", "full budget", "window", "prompt_lookup", "sequential")
REASONS = ("no gradient", "static cache", "4-D mask", "private config copy", "class of the exception")
MOST = 20
"""Tests that may fail under the recipe dense."""
BEGIN, END = "<!-- bench/stock.py page -->\n\n", "<!-- end -->\n"


def tried(checkout: Path, recipe: str) -> dict[str, list[str]]:
    """What each test comes to under a recipe: name -> ["passed", "failed" or "skipped", what it raised]."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        paths = [str(ROOT), str(ROOT / "tests" / "stock"), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "stock_plugin"]
        command += ["--stock-recipe", recipe, "--stock-out", str(out), *FILES]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(
                f"error: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        found: dict[str, list[str]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def row(
    recipe: str, source: str, plain: Mapping[str, Sequence[str]], got: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """A recipe's row: of the tests that the plain model passes, how many pass, and why the others do not."""
    import transformers
    from stock_plugin import reason

    whole = [name for name, (outcome, _) in plain.items() if outcome == "passed"]
    failed = [name for name in whole if got.get(name, ["failed", ""])[0] == "failed"]
    why = {name: reason(recipe, name, got.get(name, ["", ""])[1]) for name in failed}
    return {
        "case": "stock",
        "recipe": recipe,
        "transformers": transformers.__version__,
        "source": source,
        "tests": len(whole),
        "passed": len(whole) - len(why),
        "failed": dict(sorted(Counter(why.values()).items())),
        "other": sorted(name for name, told in why.items() if told == "other"),
    }


def run(checkout: Path, source: str, out: Path, recipes: Sequence[str]) -> int:
    """Try every recipe and append its row; the exit status."""
    out.parent.mkdir(parents=True, exist_ok=True)
    plain, bad = tried(checkout, "plain"), False
    for recipe in recipes:
        one = row(recipe, source, plain, tried(checkout, recipe))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(one) + "\n")
        print(line(one), flush=True)
        for name in one["other"]:
            print(f"  without a reason: {name}")
        bad |= bool(one["other"]) or (recipe == "dense" and one["tests"] - one["passed"] > MOST)
    return int(bad)


def line(one: Mapping[str, Any]) -> str:
    """The row of a recipe in the table."""
    failed = one["failed"]
    refused = [
        f"{name.removeprefix('refused: ')} {n}" for name, n in failed.items() if name.startswith("refused")
    ]
    counts = [str(failed.get(name, 0)) for name in REASONS]
    cells = [one["recipe"], str(one["tests"]), str(one["passed"]), *counts, ", ".join(refused) or "none"]
    return f"| {' | '.join([*cells, str(failed.get('other', 0))])} |"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last row of each recipe, as a table with what it is of."""
    last = {one["recipe"]: one for one in rows}
    source = "; ".join(
        dict.fromkeys(
            f"transformers {one['transformers']}, tests of {one['source']}" for one in last.values()
        )
    )
    heads = ["recipe", "tests", "passed", *REASONS, "refused in a sentence", "other"]
    aligned = ["---", *["---:"] * (2 + len(REASONS)), "---", "---:"]
    lines = [
        f"| {' | '.join(heads)} |",
        f"| {' | '.join(aligned)} |",
        *(line(last[name]) for name in RECIPES if name in last),
    ]
    return "\n".join([f"{source}.", "", *lines, ""])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]


def page(path: Path, rows: Path) -> None:
    """Write the table into the page, between its marks."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    path.write_text(before + BEGIN + table(read(rows)) + "\n" + END + rest.split(END)[1], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run the tests under each recipe")
    runs.add_argument("checkout", type=Path)
    runs.add_argument("--source", required=True, help="which version of transformers the tests are of")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    pages = commands.add_parser("page", help="write the table of docs/stock.md")
    pages.add_argument("rows", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        return run(given.checkout.resolve(), given.source, given.out.resolve(), given.recipes)
    page(ROOT / "docs" / "stock.md", given.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
