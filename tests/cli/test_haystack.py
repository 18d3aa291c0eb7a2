"""`mmaccel eval haystack` from its command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., tuple[int, str, str]]


def test_the_command_goes_on_where_it_stopped(call: Call, ov: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["eval", "haystack", "--model", ov, "--recipe", "dense", "--recipe", "a_shape-short"]
    words += ["--rival", "tri_shape", "--frames", "48", "--depths", "2", "--samples", "1", "--out", str(rows)]
    status, out, _ = call(*words, "--picture", tmp_path / "maps.svg", "--json")
    told: dict[str, Any] = json.loads(out)
    assert status == 0 and told["complete"] and "<svg" in (tmp_path / "maps.svg").read_text()
    assert [(row["recipe"], row["asked"]) for row in told["rows"]] == [
        ("dense", [1, 1]),
        ("a_shape-short", [1, 1]),
        ("tri_shape", [1, 1]),
    ]
    assert told["against"]["dense"]["recipe"] == "a_shape-short" and told["missed"] == []
    lines = rows.read_text().splitlines()
    # Cut as a full disk would leave it: what is whole is kept, the rest is asked again.
    rows.write_text("\n".join([*lines[:-1], lines[-1][:10]]))
    assert [json.loads(call(*words, "--json")[1])["rows"] for _ in range(2)] == [told["rows"]] * 2
    assert rows.read_text().splitlines() == lines
    assert call(*words, "--json", "--seed", 5)[2].startswith("error: --out:")


def test_a_rival_that_misses_its_share_is_told(call: Call, ov: str, tmp_path: Path) -> None:
    words = [
        "eval",
        "haystack",
        "--model",
        ov,
        "--recipe",
        "a_shape-short",
        "--rival",
        "sf_fixed",
        "--rival",
        "tri_shape",
    ]
    words += ["--frames", "48", "--depths", "1", "--samples", "1", "--out", str(tmp_path / "rows.jsonl")]
    (missed,) = json.loads(call(*words, "--json")[1])["missed"]
    assert (missed["rival"], missed["frames"], missed["budget"]) == ("sf_fixed", 48, False)
    assert missed["share"] < 0.9 * missed["wanted"]
    # The second time both shares come out of the file.
    share, wanted = f"{missed['share']:.1%}", f"{missed['wanted']:.1%}"
    told = f"sf_fixed computes {share} at 48 frames, and a_shape-short {wanted}: it has no budget."
    out = call(*words)[1]
    assert told in out.splitlines() and "tri_shape computes" not in out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rival", "a_shap"], "unknown rival 'a_shap'"),
        (["--recipe", "a_shape", "--rival", "a_shape"], "is a --recipe too"),
        (["--level", "grid"], "unknown recipe of --level 'grid'"),
        (["--documents", "--frames", "33"], "33 does not divide into 4 segments"),
        (["--out", "no/where.jsonl"], "--out: no/where.jsonl is no place for a file"),
    ],
)
def test_errors_are_one_sentence(more: list[str], words: str, call: Call, ov: str) -> None:
    status, out, err = call("eval", "haystack", "--model", ov, *more)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and words in err
