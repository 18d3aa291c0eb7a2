"""`mmaccel-lab eval haystack` and `stream` from their command lines."""

import json
from pathlib import Path

import pytest

from tests.cli import Call


def test_the_command_goes_on_where_it_stopped(call: Call, ov: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["eval", "haystack", "--model", ov, "--recipe", "dense", "--recipe", "a_shape-short"]
    words += ["--rival", "tri_shape", "--frames", "48", "--depths", "2", "--samples", "1", "--out", str(rows)]
    told = call.object(*words, "--picture", tmp_path / "maps.svg", "--json")
    assert told["complete"] and "<svg" in (tmp_path / "maps.svg").read_text()
    assert [(row["recipe"], row["asked"]) for row in told["rows"]] == [
        ("dense", [1, 1]),
        ("a_shape-short", [1, 1]),
        ("tri_shape", [1, 1]),
    ]
    assert told["against"]["dense"]["recipe"] == "a_shape-short" and told["missed"] == []
    lines = rows.read_text().splitlines()
    # Cut as a full disk would leave it: what is whole is kept, the rest is asked again.
    rows.write_text("\n".join([*lines[:-1], lines[-1][:10]]))
    assert [call.object(*words, "--json")["rows"] for _ in range(2)] == [told["rows"]] * 2
    assert rows.read_text().splitlines() == lines
    assert call(*words, "--json", "--seed", 5)[2].startswith("error: --out:")


def test_a_rival_that_misses_its_share_is_told(call: Call, ov: str, tmp_path: Path) -> None:
    words = f"eval haystack --model {ov} --recipe a_shape-short --rival sf_strided --rival tri_shape".split()
    words += ["--frames", "48", "--depths", "1", "--samples", "1", "--out", str(tmp_path / "rows.jsonl")]
    (missed,) = call.object(*words, "--json")["missed"]
    assert (missed["rival"], missed["frames"], missed["budget"]) == ("sf_strided", 48, False)
    assert missed["share"] < 0.9 * missed["wanted"]
    # The second time both shares come out of the file.
    share, wanted = f"{missed['share']:.1%}", f"{missed['wanted']:.1%}"
    told = f"sf_strided computes {share} of the first prompt of 48 frames, and a_shape-short {wanted}: it has no budget."
    out = call(*words)[1]
    assert told in out.splitlines() and "tri_shape computes" not in out
    assert "the mean share of attention computed over the prompts" in " ".join(out.split())
    # The name is that of the run in which the share was set, and a rival's answers stay with it.
    again = [word if word != "a_shape-short" else "dense" for word in words]
    err = call.error(*again)
    assert err.startswith("error: --level:") and "at the share of a_shape-short" in err
    assert told in call("eval", "haystack", "--rows", words[-1], "--level", "dense")[1].splitlines()


def test_the_level_of_each_file_is_told(call: Call, ov: str, tmp_path: Path) -> None:
    words = ["eval", "haystack", "--model", ov, "--recipe", "a_shape-short", "--rival", "sf_strided"]
    words += ["--frames", "48", "--depths", "1", "--samples", "1"]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for seed, file in enumerate(files):
        assert call(*words, "--seed", 10 * seed, "--out", file)[0] == 0
    # Rivals of the second run are further away.
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    (level,) = (row for row in rows if "level" in row)
    level["share"] /= 2
    files[1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["eval", "haystack", "--rows", files[0], "--rows", files[1], "--rows", files[0]]
    missed = call.object(*given, "--json")["missed"]
    assert [(one["rival"], one["seed"]) for one in missed] == [("sf_strided", 0), ("sf_strided", 10)]
    assert missed[1]["share"] == level["share"]
    told = [line for line in call(*given)[1].splitlines() if "computes" in line]
    assert [line.split(", and")[0] for line in told] == [
        f"sf_strided computes {one['share']:.1%} of the first prompt of 48 frames (--seed {one['seed']})"
        for one in missed
    ]
    assert "--seed" not in call(*given[:4])[1]


def test_only_what_is_asked_is_shown(call: Call, ov: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["eval", "haystack", "--model", ov, "--depths", "1", "--out", str(rows), "--recipe", "dense"]
    more = ["--recipe", "a_shape-short", "--rival", "sf_strided", "--frames", "32,48", "--samples", "2"]
    assert call(*words, *more)[0] == 0
    told = call.object(*words, "--frames", "48", "--samples", "1", "--json")
    assert [(row["recipe"], row["frames"], row["asked"]) for row in told["rows"]] == [("dense", 48, [1])]
    assert told["missed"] == [] and told["against"] == {}
    recipes = ["dense", "a_shape-short", "sf_strided"]
    assert told["not_asked"] == {"answers": 11, "recipes": recipes, "frames": [32, 48]}
    out = call(*words, "--frames", "48", "--samples", "1")[1]
    assert out.splitlines()[-1] == (
        f"{rows} also holds 11 answers not asked for here (dense, a_shape-short, sf_strided; 32, 48 frames): "
        f"--rows {rows} shows all."
    )
    assert "sf_strided" not in "".join(out.splitlines()[:-1]) and "computes" not in out
    assert len(call.object("eval", "haystack", "--rows", rows, "--json")["rows"]) == 6


@pytest.mark.parametrize("content", ["{\n}", '{"seed": 7}', "[1]\n[2]", "\x80\n"])
@pytest.mark.parametrize("option", ["--rows", "--out"])
def test_another_file_is_told_and_left_as_it_is(
    content: str, option: str, call: Call, ov: str, tmp_path: Path
) -> None:
    path = tmp_path / "clip.json"
    path.write_bytes(content.encode("latin-1"))
    err = call.error("eval", "haystack", "--model", ov, "--recipe", "dense", option, path)
    assert err.startswith(f"error: {option}: {path} ")
    assert "holds no haystack" in err and path.read_bytes() == content.encode("latin-1")


def test_processes_share_the_work(call: Call, ov: str, tmp_path: Path) -> None:
    words = ["eval", "haystack", "--model", ov, "--recipe", "dense", "--recipe", "a_shape-short"]
    words += ["--frames", "48", "--depths", "1", "--samples", "1", "--compress", "visionzip"]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for seed, file in enumerate(files):
        assert call(*words, "--seed", 10 * seed, "--out", file)[0] == 0
    first = json.loads(files[0].read_text().splitlines()[0])
    assert set(first["environment"]) >= {"command", "device", "dtype", "torch"}
    assert first["settings"]["compress"] == "visionzip"
    given = ["--rows", files[0], "--rows", files[1], "--level", "a_shape-short"]
    told = call.object("eval", "haystack", *given, "--picture", tmp_path / "maps.svg", "--json")
    assert [(row["recipe"], row["asked"]) for row in told["rows"]] == [("dense", [2]), ("a_shape-short", [2])]
    assert told["against"]["dense"]["asked"] == 2 and "<svg" in (tmp_path / "maps.svg").read_text()
    # Two thirds of the video tokens are dropped before both.
    assert all(row["kept"] < 0.3 for row in told["rows"])
    # One file after the other is a file too; answers that stand in it twice count once.
    both = tmp_path / "both.jsonl"
    both.write_text("".join(file.read_text() for file in [*files, files[0]]))
    assert call.object("eval", "haystack", *given[4:], "--rows", both, "--json")["rows"] == told["rows"]
    other = tmp_path / "other.jsonl"
    assert call(*words[:-2], "--out", other)[0] == 0
    err = call.error("eval", "haystack", *given, "--rows", other)
    assert err.startswith("error: --rows:") and "other settings" in err


def test_a_searched_recipe_is_asked_without_its_boundaries(call: Call, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["eval", "haystack", "--recipe", "searched", "--frames", "32", "--depths", "1", "--samples", "1"]
    for name in ("without_boundaries", "without_tail"):
        words += ["--rival", name]
    told = json.loads(call.text(*words, "--documents", "--out", rows, "--json"))
    found = {row["recipe"]: row["kept"] for row in told["rows"]}
    assert abs(found["without_boundaries"] / found["searched"] - 1) < 0.05
    assert found["without_tail"] < found["searched"] - 0.01
    levels = {row["level"]: row for row in map(json.loads, rows.read_text().splitlines()) if "level" in row}
    patterns = levels["without_boundaries"]["fields"]["sparse"]["table"]
    names = {pattern["name"] for heads in patterns.values() for pattern in heads.values()}
    assert names <= {"grid", "a_shape", "vertical_slash"}
    assert levels["without_tail"]["fields"]["sparse"]["table"] != patterns


@pytest.mark.always
def test_the_command(call: Call, ov: str, tmp_path: Path) -> None:
    base = ("eval", "stream", "--model", ov, "--frames", 20, "--worlds", 1, "--window", 6)
    memory = tmp_path / "few.yaml"
    memory.write_text("kv: {name: rekv, frames: 3}\n")
    options = ("--budgets", "4", "--memory", "recent", "--memory", memory, "--kind", "needle")
    told = call.object(*base, *options, "--json", "--out", tmp_path / "shots.jsonl")
    assert told["complete"] and {row["memory"] for row in told["rows"]} == {"recent", "few"}
    assert told["paired"][0]["memory"] == "recent" and told["paired"][0]["rival"] == "few"
    lines = (tmp_path / "shots.jsonl").read_text().splitlines()
    assert len(lines) == sum(row["questions"] for row in told["rows"] if row["kind"] == "all")
    equal = ("--memory", "mosaic local=0 reps=0", "--memory", "rekv")
    told = call.object(*base, "--budgets", "4", *equal, "--kind", "needle", "--json")
    same = [row for row in told["rows"] if row["kind"] == "all"]
    assert [row["memory"] for row in same] == ["mosaic local=0 reps=0", "rekv"]
    assert same[0]["seen"] == pytest.approx(same[1]["seen"]), "what a question sees is as much for both"
    assert all(row["device_bytes"] > 0 and row["host_bytes"] > 0 for row in same)
    status, out, _ = call(*base, "--budgets", "4", "--memory", "recent", "--kind", "needle")
    assert status == 0 and all(word in out for word in ("recent", "mean of", "kinds"))
    assert {"budget (frames)", "right (95% interval)", "evidence seen", "evidence named"} <= set(heads(out))
    assert {"seen (frames)", "gone or on the host", "device and host (MiB)"} <= set(heads(out))
    assert "keep tokens" not in out
    _, out, _ = call(*base, "--budgets", "4", "--memory", "livevlm", "--kind", "needle")
    assert "keep tokens" in out
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
        assert match in call.error(*base, *wrong)


def heads(out: str) -> list[str]:
    """The heads of a table, whose words may stand in several lines."""
    lines = out.splitlines()
    (begin,) = (n for n, line in enumerate(lines) if line.startswith("┏"))
    (end,) = (n for n, line in enumerate(lines) if line.startswith("┡"))
    cells = zip(*(line.split("┃") for line in lines[begin + 1 : end]), strict=True)
    return [" ".join(" ".join(cell).split()) for cell in cells]
