"""Jobs of benchmarks by several processes: all is told, none outlives an interrupt or the parent, what was written stays."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import memories
import pytest
import timing
import torch

from tests import SOURCES
from tests.benches import begin

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


def until(told: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not told() and time.monotonic() < end:
        time.sleep(0.05)
    return told()


def test_jobs_are_done_by_several_processes_and_by_this_one() -> None:
    found = [row for row in jobs.rows(begin, OPTIONS, range(8), 2) if row is not None]
    assert sorted(job for job, *_ in found) == list(range(8)) and {told for *_, told in found} == {"cpu more"}
    pids = {pid for _, pid, _ in found}
    assert os.getpid() not in pids and len(pids) <= 2 and until(lambda: not any(map(alive, pids)), 5)
    here = list(jobs.rows(begin, OPTIONS, [4, 5], 1))
    assert here == [(4, os.getpid(), "cpu more"), (5, os.getpid(), "cpu more")]
    assert not list(jobs.rows(begin, OPTIONS, [], 2))


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
    """An interrupt of the whole group, as a terminal sends it, and where it was ignored, as it is in the background of a
    shell; or the parent alone is ended."""
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([SOURCES, str(ROOT / "bench")])
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$0" script.py', sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids)) and all(map(held_back, pids))
        (os.killpg if way == signal.SIGINT else os.kill)(process.pid, way)
        _, told = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == (130 if way == signal.SIGINT else -way)
    assert ("interrupted; rows has what was measured" in told) == (way == signal.SIGINT)
    assert "Traceback" not in told and until(lambda: not any(map(alive, pids)), 5)


def broken_off(command: list[str], out: Path, what: str) -> list[dict[str, Any]]:
    """The rows of a benchmark that is interrupted, its whole group as by a terminal, once there is a row of `what`."""
    process = subprocess.Popen(
        [sys.executable, *command, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        written = until(lambda: out.exists() and f'"what": "{what}"' in out.read_text(), 120)
        assert written and process.poll() is None and process.pid in group(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130 and f"interrupted; {out} has what was measured" in told
    assert until(lambda: not any(map(alive, group(process.pid))), 5)
    return timing.read_rows([out])


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_memories_end_at_an_interrupt(processes: str, shipped: Callable[[str], str], tmp_path: Path) -> None:
    command = ["bench/memories.py", "--model", shipped("tiny-qwen"), "--device", "cpu", "--frames", "24"]
    command += ["--budgets", "4", "--window", "6", "--memory", "mosaic init=8", "rekv", "--worlds", "4000"]
    found = broken_off([*command, "--processes", processes], tmp_path / "rows", "answer")
    answers = [memories.Shot(**memories._fields(row)) for row in found if row.get("what") == "answer"]
    assert "environment" in found[0] and {shot.frames for shot in answers} == {24}
