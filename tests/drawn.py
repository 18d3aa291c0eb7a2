"""Draws public docstrings and names of the package for a reader who has not seen the code.

    python -m tests.drawn [--seed COMMIT] [--count 60]

The seed is the commit's hash, so that nobody can choose the draw. The reader marks each docstring and each name as
understood or not.
"""

import argparse
import ast
import subprocess
from pathlib import Path
from random import Random

PACKAGE = Path(__file__).parents[1] / "mmaccel"


def public() -> tuple[list[tuple[str, str]], list[str]]:
    """(place, docstring) of public modules, classes, functions and methods of public classes, and their names.

    A module whose name begins with one underscore is not public.
    """
    docstrings, names = [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem.startswith("_") and not path.stem.startswith("__"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
        inner = [(f"{node.name}.", member) for node in classes for member in node.body]
        for owner, node in (*(("", node) for node in (tree, *tree.body)), *inner):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = getattr(node, "name", "")
            if name.startswith("_"):
                continue
            place = f"{path.relative_to(PACKAGE.parent)} {owner}{name}".strip()
            names += [place] if name else []
            if text := ast.get_docstring(node):
                docstrings.append((place, text))
    return docstrings, names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", help="default: the hash of the commit that is checked out")
    parser.add_argument("--count", type=int, default=60)
    given = parser.parse_args()
    head = ["git", "-C", str(PACKAGE), "rev-parse", "HEAD"]
    dice = Random(
        given.seed or subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    )
    docstrings, names = public()
    for number, (place, text) in enumerate(dice.sample(docstrings, given.count), 1):
        print(f"{number}. {place}\n    " + text.replace("\n", "\n    ") + "\n")
    for number, name in enumerate(dice.sample(names, given.count), 1):
        print(f"{number}. {name}")


if __name__ == "__main__":
    main()
