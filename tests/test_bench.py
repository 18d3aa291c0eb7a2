"""How times are taken and written down."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parent.parent / "bench" / "timing.py"


@pytest.fixture(scope="module")
def timing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("timing", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["timing"] = module
    spec.loader.exec_module(module)
    return module


def test_the_median_of_runs_after_a_warm_up(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says how long each call took: the slow first ones do not count, and an outlier moves nothing."""
    clock = [0.0]
    lengths = iter([50.0, 40.0, 1.0, 2.0, 3.0, 4.0, 99.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += next(lengths)

    times = timing.measure(run, warmup=2, repeats=5)
    assert times.seconds == (1.0, 2.0, 3.0, 4.0, 99.0) and times.median == 3.0
    assert times.row() == {"median_s": 3.0, "low_s": 2.0, "high_s": 4.0, "repeats": 5}


def test_what_is_compared_takes_turns(timing: ModuleType) -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = timing.compare(runs, warmup=1, repeats=3)
    assert order == ["a", "b"] * 4 and {len(one.seconds) for one in times.values()} == {3}
    with pytest.raises(ValueError, match="repeats: 1"):
        timing.measure(lambda: None, repeats=1)


def test_a_log_begins_with_its_conditions(timing: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results" / "toy_cpu_202601.jsonl"
    log = timing.Log(path)
    log.row(case="toy", median_s=0.5)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert {"torch", "transformers", "python", "device", "threads", "command", "commit"} <= set(
        first["environment"]
    )
    assert second == {"case": "toy", "median_s": 0.5}
