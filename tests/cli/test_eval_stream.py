"""`mmaccel-lab eval stream`: a table or an object, each answer in a file, errors in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmaccel.core.errors import StoreError


def test_the_command(call: Callable[..., tuple[int, str, str]], ov: str, tmp_path: Path) -> None:
    base = ("eval", "stream", "--model", ov, "--frames", 20, "--worlds", 1, "--window", 6)
    memory = tmp_path / "few.yaml"
    memory.write_text("kv: {name: rekv, frames: 3}\n")
    options = ("--budgets", "4", "--memory", "recent", "--memory", memory, "--kind", "needle")
    status, out, err = call(*base, *options, "--json", "--out", tmp_path / "shots.jsonl")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["complete"] and {row["memory"] for row in told["rows"]} == {"recent", "few"}
    assert told["paired"][0]["memory"] == "recent" and told["paired"][0]["rival"] == "few"
    lines = (tmp_path / "shots.jsonl").read_text().splitlines()
    assert len(lines) == sum(row["questions"] for row in told["rows"] if row["kind"] == "all")
    equal = ("--memory", "mosaic local=0 reps=0", "--memory", "rekv")
    status, out, _ = call(*base, "--budgets", "4", *equal, "--kind", "needle", "--json")
    same = [row for row in json.loads(out)["rows"] if row["kind"] == "all"]
    assert status == 0 and [row["memory"] for row in same] == ["mosaic local=0 reps=0", "rekv"]
    assert same[0]["seen"] == pytest.approx(same[1]["seen"]), "what a question sees is as much for both"
    status, out, _ = call(*base, "--budgets", "4", "--memory", "recent", "--kind", "needle")
    assert status == 0 and all(word in out for word in ("recent", "mean of", "kinds"))
    for head in (
        "budget (frames)",
        "right (95% interval)",
        "evidence seen",
        "evidence named",
        "seen (frames)",
        "frames off the device",
    ):
        assert head in heads(out)
    for wrong, match in (
        (("--budgets", "many"), "--budgets: 'many'"),
        (("--memory", "a_shape"), "a_shape"),
        (("--memory", "mosaic reps"), "--memory: 'reps'"),
        (("--memory", "mosaic reps=some"), "reps"),
        (("--memory", "mosaic looks=3"), "looks"),
        (("--still", 2), "--still: 2.0"),
        (("--kind", "count"), "count"),
        (("--out", tmp_path), "--out"),
    ):
        status, out, err = call(*base, *wrong)
        assert status == 2 and out == "" and match in err and err.count("\n") == 1, err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_error_before_the_first_answer_is_told_alone(
    call: Callable[..., tuple[int, str, str]], ov: str, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    from mmaccel_lab.eval import stream

    def broken(*_: object, **__: object) -> Iterator[stream.Shot]:
        raise StoreError("the host's memory is full.")
        yield

    monkeypatch.setattr(stream, "shots", broken)
    status, out, err = call("eval", "stream", "--model", ov, "--frames", 20, "--worlds", 1, *form)
    assert (status, out, err) == (2, "", "error: the host's memory is full.\n")


def heads(out: str) -> list[str]:
    """The heads of a table, whose words may stand in several lines."""
    lines = out.splitlines()
    (begin,) = (n for n, line in enumerate(lines) if line.startswith("┏"))
    (end,) = (n for n, line in enumerate(lines) if line.startswith("┡"))
    cells = zip(*(line.split("┃") for line in lines[begin + 1 : end]), strict=True)
    return [" ".join(" ".join(cell).split()) for cell in cells]
