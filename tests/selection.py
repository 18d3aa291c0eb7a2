"""Which tests run by default, and which by shards.

What is `slow` the default run leaves out: what its source marks so, and what takes long by `seconds.json`. There a case
stays that takes at most `ANY` seconds. Of each test one stays that takes at most `ONE`; however long it takes, where the
source says `always`; and all stay where that says `always(every=True)`. With `--long` all stay that their source does not
mark. `--shard K/N` runs the K-th of N parts of what was chosen: `make test-shard` runs one of all that is slow.
"""

import json
import zlib
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

MEASURED = Path(__file__).with_name("seconds.json")
ONE, ANY = 1.0, 0.2  # seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run too what is slow by tests/seconds.json alone")
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
        if not (number.isdigit() and shards.isdigit() and int(shards)):
            raise pytest.UsageError(f"--shard: {given!r} is not K/N; give two whole numbers, as 3/12.")
        mine = [zlib.crc32(item.nodeid.encode()) % int(shards) == int(number) % int(shards) for item in items]
        config.hook.pytest_deselected(items=[item for item, own in zip(items, mine, strict=True) if not own])
        items[:] = [item for item, own in zip(items, mine, strict=True) if own]


def _leave_long_ones_out(cases: list[Any], seconds: dict[str, float]) -> None:
    """Mark `slow` what takes long of the cases of a test; which one stays hangs on the test's name."""
    takes = {case: seconds.get(case.nodeid.partition("::")[2], 0.0) for case in cases}
    left = [case for case in cases if not case.get_closest_marker("slow")]
    able = [case for case in left if takes[case] <= ONE or case.get_closest_marker("always")]
    stays = able[zlib.crc32(able[0].nodeid.partition("[")[0].encode()) % len(able)] if able else None
    for case in left:
        always = case.get_closest_marker("always")
        if takes[case] > ANY and case is not stays and not (always and always.kwargs.get("every")):
            case.add_marker(pytest.mark.slow)


class Stopwatch:
    """Writes what each test took that passed, without its fixtures: if the first to use one leaves, the next one pays."""

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
    if config.getoption("--write-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())
