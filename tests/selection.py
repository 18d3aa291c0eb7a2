"""Which tests run by default, and which by shards.

The default run skips what is `slow`: what the source marks so, and cases that `seconds.json` says took more than `ANY`
seconds. Of each test's cases of at most `ONE` seconds one runs all the same, picked by a hash of the test's name.
`always` lets one case run however long it takes, `always(every=True)` every case. `--long` leaves `seconds.json` aside.
`--shard K/N` splits the chosen tests into N parts by a hash of their names, and runs part K modulo N: `make test-shard`.
"""

import json
import re
import zlib
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

MEASURED = Path(__file__).with_name("seconds.json")
ONE, ANY = 1.0, 0.2  # seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="leave tests/seconds.json aside")
    parser.addoption("--shard", metavar="K/N", help="run the K-th of N parts of the chosen tests")
    parser.addoption("--write-seconds", action="store_true", help="write tests/seconds.json")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what takes long `slow`, before `-m` is obeyed."""
    seconds = {} if config.getoption("--long") else json.loads(MEASURED.read_text(encoding="utf-8"))
    for (module, _, _), cases in groupby(items, lambda item: item.nodeid.partition("[")[0].partition("::")):
        _leave_long_ones_out(list(cases), seconds.get(module, {}))


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_take_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Obey `--shard`, after `-m` and `-k`."""
    if given := config.getoption("--shard"):
        number, _, shards = given.partition("/")
        mine = [zlib.crc32(item.nodeid.encode()) % int(shards) == int(number) % int(shards) for item in items]
        config.hook.pytest_deselected(items=[item for item, own in zip(items, mine, strict=True) if not own])
        items[:] = [item for item, own in zip(items, mine, strict=True) if own]


def _leave_long_ones_out(cases: list[Any], seconds: dict[str, float]) -> None:
    """Mark long cases of a test `slow`, but for the one that a hash of the test's name picks."""
    takes = {case: seconds.get(case.nodeid.partition("::")[2], 0.0) for case in cases}
    left = [case for case in cases if not case.get_closest_marker("slow")]
    able = [case for case in left if takes[case] <= ONE or case.get_closest_marker("always")]
    stays = able[zlib.crc32(able[0].nodeid.partition("[")[0].encode()) % len(able)] if able else None
    for case in left:
        always = case.get_closest_marker("always")
        if takes[case] > ANY and case is not stays and not (always and always.kwargs.get("every")):
            case.add_marker(pytest.mark.slow)


class Stopwatch:
    """Writes the seconds of each test that passed, without its fixtures: the first test that uses one would pay for all."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = json.loads(MEASURED.read_text(encoding="utf-8"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            module, _, test = report.nodeid.partition("::")
            self.rows.setdefault(module, {}).pop(test, None)
            if report.duration > ANY:
                self.rows[module][test] = round(report.duration, 2)

    def pytest_sessionfinish(self) -> None:
        kept = {module: dict(sorted(each.items())) for module, each in sorted(self.rows.items()) if each}
        MEASURED.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--shard")
    if given and not re.fullmatch(r"\d+/[1-9]\d*", given):
        raise pytest.UsageError(f"--shard: {given!r} is not K/N; give two whole numbers, as 3/12.")
    if config.getoption("--write-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())
