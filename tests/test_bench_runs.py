"""The scripts of bench/ run on a CPU, by one process and by several; what was written stays, and a run goes on from it."""

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import memories
import pytest
import timing
import torch

from mmaccel.backends.ops import dense_attend as dense
from mmaccel.core.rows import read_rows
from tests import SOURCES, python
from tests.benches import begin, ran
from tests.models.streams import CLUSTERS
from tests.spies import until

Row = dict[str, Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A script of bench/ by name, told these words."""

    def named(name: str, *words: str) -> Any:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        return importlib.import_module(name)

    return named


def run(name: str, out: Path, *words: str) -> list[Row]:
    """Its rows, the first of them the conditions; none failed."""
    first, *rows = ran(name, out, *words)
    assert "torch" in first["environment"]
    assert [row for row in rows if "failed" in row] == []
    return rows


ATTEND = shlex.split("--tokens 512 --repeats 2 --warmup 0 --size 16 --heads 4 2 --dtype float32")


def test_every_case_of_attention(tmp_path: Path) -> None:
    rows = run("attend", tmp_path / "rows.jsonl", *ATTEND)
    cases = {row["case"] for row in rows}
    assert cases >= {"a_shape", "vertical_slash_near", "vertical_slash_frames", "grid", "q_boundary"}
    assert "boundary_2d_single" in cases
    for case in cases:
        ways = {row["way"]: row for row in rows if row["case"] == case}
        assert set(ways) == {"dense_flash", "index", "index_first", "reference", "reference and index"}
        assert 0 < ways["reference"]["kept"] < 1.2 and ways["reference"]["median_s"] > 0
        assert ways["reference"]["against_s"] == ways["dense_flash"]["median_s"]


def test_attention_of_others_is_timed_beside(tmp_path: Path) -> None:
    """They get the tensors, and what ours computes; their rows stand among ours."""
    other = tmp_path / "other.py"
    other.write_text(
        "def ways(query, key, value, facts):\n"
        "    if 'columns' not in facts:\n"
        "        return\n"
        "    columns, diagonals = facts['columns'], facts['diagonals']\n"
        "    assert columns.shape[:2] == diagonals.shape[:2] == query.shape[:2]\n"
        "    assert facts['tokens'] == query.shape[2] == key.shape[2] == value.shape[2]\n"
        "    kept = facts['plan'].to_mask()\n"
        "    assert kept[0, 0, -1, columns[0, 0]].all() and kept[0, 1, -1, facts['tokens'] - 1 - diagonals[0, 1]].all()\n"
        "    yield 'the other', lambda: query + 1\n"
    )
    cases = ("--cases", "vertical_slash_frames", "a_shape", "--no-dense", "--beside", str(other))
    rows = run("attend", tmp_path / "rows.jsonl", *cases, *ATTEND)
    told = [(row["case"], row["way"]) for row in rows if row["way"] == "the other"]
    assert told == [("vertical_slash_frames", "the other")]


def prefill(out: Path, *only: str) -> list[Row]:
    few = "--shrink 2048 --quick --dtype float32 --heads 4 2 --size 16"
    return run("prefill", out, *few.split(), "--only", *only)


def test_steps_of_prefill_are_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = prefill(out, "layer:grid_128k", "model:128k")
    assert [row["done"] for row in rows if "done" in row] == ["layer:grid_128k", "model:128k"]
    ways = {row["way"]: row for row in rows if row.get("case") == "model:128k"}
    assert set(ways) == {"sparse", "dense", "dense_flash_2"} and 0 < ways["sparse"]["kept"] < 1
    assert ways["dense"]["median_s"] > 0 and ways["dense"]["layers_timed"] == 8
    again = prefill(out, "layer:grid_128k", "layer:a_shape_128")
    assert [row["done"] for row in again if "done" in row][2:] == ["layer:a_shape_128"]


def test_the_tower_alone_is_timed(tmp_path: Path) -> None:
    rows = prefill(tmp_path / "rows.jsonl", "vision:")
    done = ["vision:128k", "vision:512k", "vision:1m", "vision:hour"]
    assert [row["done"] for row in rows if "done" in row] == done
    ways = [(row["case"], row["way"], row["most"], row["patches"]) for row in rows if "way" in row]
    # Frames of 196 tokens, of four patches each: two of them at least, and a call has at most 16 384.
    assert ways == [
        ("vision:128k", "parts", 16384, 2 * 784),
        ("vision:128k", "whole", None, 2 * 784),
        ("vision:512k", "parts", 16384, 2 * 784),
        ("vision:1m", "parts", 16384, 2 * 784),
        *[("vision:hour", way, 16384, 2 * 288) for way in ("modules", "parts") * 3],
    ]
    assert all(row["median_s"] > 0 for row in rows if "way" in row)


def test_every_way_of_dense_attention_can_be_taken(script: Callable[..., Any]) -> None:
    """Also that by flash-attn 4, which no CPU has: what is changed is taken back."""
    before, taken = (dense.FLASH_FROM, dense.FASTEST), {}
    for way, changed in script("prefill").DENSE.items():
        with patch.multiple(dense, **changed):
            taken[way] = dense.FLASH_FROM, dense.FASTEST
    assert taken["dense_flash_attn_4"] == before == (dense.FLASH_FROM, dense.FASTEST)
    # In the two others no prompt is long enough.
    assert all(taken[way][0] > 1 << 40 for way in ("dense", "dense_flash_2"))
    assert taken["dense"][1] == before[1] != taken["dense_flash_2"][1]


def test_a_ratio_and_where_it_may_lie(script: Callable[..., Any]) -> None:
    ratio_of = script("prefill").ratio_of
    same = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.0]
    middle, low = ratio_of(same, same)
    assert middle == 1 and 0.97 < low <= 1
    middle, low = ratio_of([2 * s for s in same], same)
    assert middle == pytest.approx(2) and 1.9 < low <= 2
    # One run that was disturbed says little of the ratio.
    assert ratio_of(same, [*same[:-1], 9.0])[1] > 0.95


@pytest.mark.slow
def test_settings_of_recommend_run_and_their_memory_is_predicted(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    few = ("--device", "cpu", "--shrink", "12", "--limit", "9000", "--out", str(out))
    only = ("--only", "exact:llava-onevision-7b:3:1", "exact:llava-onevision-7b:8:5")
    done = python("bench/recommend.py", *few, *only)
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if row.get("case") == "recommend"]
    assert [(row["frames"], row["questions"]) for row in rows] == [(7, 1), (20, 5)], done.stdout
    # Seconds depend on who else uses the machine; bytes do not.
    assert all(row["peak_reached"] and row["predicted_s"] > 0 for row in rows), rows


KILLED = {"name": "mosaic", "window": 6, "local": 2, "frames": 4, "index": CLUSTERS, "keep_seconds": 5.0}


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)], ids=["some", "many"])
def test_what_a_killed_process_saved_is_whole(count: int, script: Callable[..., Any]) -> None:
    row = script("kills").killed(count, 0.3, KILLED)
    print(row)
    assert row["damaged"] == [] and row["kills"] == count and row["frames"] > 0
    assert 0 < row["in_a_save"] <= count and row["lost_s_most"] <= row["bound_s"]


@pytest.mark.slow
def test_a_day_goes_on_where_it_ended(tmp_path: Path, script: Callable[..., Any]) -> None:
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name)
    out = tmp_path / "rows.jsonl"
    words = "--folder", str(tmp_path / "day"), "--out", str(out), "--fps", "0.1", "--keep-seconds", "1200"
    for hours in (1, 2):
        with pytest.raises(SystemExit) as ended:
            script("day", "--hours", str(hours), *words).main()
        assert not ended.value.code
    rows = [row for row in read_rows([out]) if "hour" in row]
    assert [row["hour"] for row in rows] == [1, 2] and rows[1]["frames"] == 2 * 360
    assert all(row["same"] == row["questions"] > 0 and row["same_held"] for row in rows)
    assert rows[1]["let_go"] == 2 * 360 - 121


RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["0", pytest.param("2", marks=RAY)])
def test_streams_are_served_by_replicas(
    shipped: Callable[[str], str], tmp_path: Path, script: Callable[..., Any], replicas: str
) -> None:
    pytest.importorskip("httpx2")
    shipped("tiny-ov")
    out = tmp_path / "rows.jsonl"
    script("replicas", "--replicas", replicas, "--streams", "3", "--seconds", "3", "--out", str(out)).main()
    first, row = map(json.loads, out.read_text().splitlines())
    assert first["environment"]["torch"] and row["replicas"] == int(replicas) and row["streams"] == 3
    assert row["questions"] > 2 and row["frames_per_s"] >= row["clip"] * row["questions_per_s"] > 0
    assert 0 < row["question_median_s"] <= row["question_p95_s"] < 30


ROOT = Path(__file__).parent.parent
OPTIONS = argparse.Namespace(device="cpu", more="more")


def stat(path: Path) -> list[str]:
    """State, parent, group, ... of a process in /proc; one that is gone is dead and of no group."""
    try:
        return (path / "stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "", ""]


def alive(pid: int) -> bool:
    """Whether there is such a process that is not dead but for its parent's notice."""
    return stat(Path("/proc", str(pid)))[0] not in ("Z", "X")


def held_back(pid: int) -> bool:
    """Whether interrupts wait at a process, which never takes them."""
    told = Path("/proc", str(pid), "status").read_text()
    (mask,) = (int(line.split()[1], 16) for line in told.splitlines() if line.startswith("SigBlk:"))
    return bool(mask >> (signal.SIGINT - 1) & 1)


def group(number: int) -> list[int]:
    """The processes of a group."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if stat(path)[2] == str(number)]


@pytest.mark.usefixtures("forkserver")
def test_jobs_are_done_by_several_processes_and_by_this_one() -> None:
    found = [row for row in jobs.rows(begin, OPTIONS, range(8), 2) if row is not None]
    assert sorted(job for job, *_ in found) == list(range(8)) and {told for *_, told in found} == {"cpu more"}
    pids = {pid for _, pid, _ in found}
    assert os.getpid() not in pids and len(pids) <= 2
    until(lambda: not any(map(alive, pids)), 5)
    here = list(jobs.rows(begin, OPTIONS, [4, 5], 1))
    assert here == [(4, os.getpid(), "cpu more"), (5, os.getpid(), "cpu more")]
    assert not list(jobs.rows(begin, OPTIONS, [], 2))


@pytest.mark.usefixtures("forkserver")
def test_a_process_that_fails_or_dies_ends_all_in_a_sentence() -> None:
    """Beside one that is at work for ever."""
    for job, told in ((-1, "ValueError: minus one"), (-2, "a process died; give fewer")):
        found = []
        with pytest.raises(SystemExit, match=told):
            found += [row for row in jobs.rows(begin, OPTIONS, [-3, job], 2) if row is not None]
        assert not jobs.multiprocessing.active_children()


def test_devices_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert jobs.devices("cuda", 5) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert jobs.devices("cuda:1", 2) == ["cuda:1"] * 2 and jobs.devices("cpu", 2) == ["cpu"] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert jobs.devices("cuda", 2) == ["cuda"] * 2


@contextmanager
def started(*words: str, cwd: Path = ROOT, path: str = SOURCES) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own, which is ended."""
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    streams: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(words, cwd=cwd, env=env, start_new_session=True, **streams)
    try:
        yield process
    finally:
        process.kill()


SCRIPT = """
import argparse, contextlib, sys
from pathlib import Path
import jobs
from tests.benches import begin

if __name__ == "__main__":
    with jobs.interruptible(Path("rows")):
        with contextlib.closing(jobs.rows(begin, argparse.Namespace(device="cpu", more=""), [-3] * 4, 2)) as coming:
            for row in coming:
                if row is not None:
                    print(row[1], flush=True)
"""


@pytest.mark.parametrize(
    "way", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_nothing_outlives_the_parent(way: signal.Signals, tmp_path: Path) -> None:
    """An interrupt of the whole group, as a terminal sends it, also where it was ignored; or the parent alone is ended."""
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([SOURCES, str(ROOT / "bench")])
    words = ("sh", "-c", 'trap "" INT; exec "$0" script.py', sys.executable)
    with started(*words, cwd=tmp_path, path=path) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids)) and all(map(held_back, pids))
        (os.killpg if way == signal.SIGINT else os.kill)(process.pid, way)
        _, told = process.communicate(timeout=10)
    assert process.returncode == (130 if way == signal.SIGINT else -way)
    assert ("interrupted; rows has what was measured" in told) == (way == signal.SIGINT)
    assert "Traceback" not in told
    until(lambda: not any(map(alive, pids)), 5)


def broken_off(command: list[str], out: Path, what: str) -> list[dict[str, Any]]:
    """The rows of a benchmark that is interrupted, its whole group as by a terminal, once there is a row of `what`."""
    with started(sys.executable, *command, "--out", str(out)) as process:
        until(lambda: out.exists() and f'"what": "{what}"' in out.read_text(), 120)
        assert process.poll() is None and process.pid in group(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=10)
    assert process.returncode == 130 and f"interrupted; {out} has what was measured" in told
    until(lambda: not any(map(alive, group(process.pid))), 5)
    return timing.read_rows([out])


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_memories_end_at_an_interrupt(processes: str, shipped: Callable[[str], str], tmp_path: Path) -> None:
    command = ["bench/memories.py", "--model", shipped("tiny-qwen"), "--device", "cpu", "--frames", "24"]
    command += ["--budgets", "4", "--window", "6", "--memory", "mosaic init=8", "rekv", "--worlds", "4000"]
    found = broken_off([*command, "--processes", processes], tmp_path / "rows", "answer")
    answers = [memories.Shot(**memories._fields(row)) for row in found if row.get("what") == "answer"]
    assert "environment" in found[0] and {shot.frames for shot in answers} == {24}
