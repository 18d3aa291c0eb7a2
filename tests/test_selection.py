"""What stays of the tests by default, and that shards are all of them, each once."""

import json
from pathlib import Path

import pytest

from tests import selection

pytest_plugins = ["pytester"]
CASES = "import pytest\n{}@pytest.mark.parametrize('n', range({}))\ndef test_it(n):\n    pass\n"


def run(pytester: pytest.Pytester, *options: str) -> list[str]:
    """Cases that run, of `test_it` and by these options."""
    told = pytester.runpytest(
        "-v", "-p", "tests.selection", "-p", "no:cacheprovider", "-m", "not slow", *options
    )
    return [line.split("[")[1].split("]")[0] for line in told.outlines if " PASSED " in line]


PLAIN = ([0.2, 9, 0], "02"), ([1, 9], "0"), ([1.01], ""), ([0.21, 0.21, 1], "0")
MARKED = ("always", [9, 9], "1"), ("always(every=True)", [9, 9], "01"), ("slow", [0, 0], "")


@pytest.mark.parametrize(("mark", "seconds", "some"), [*(("", *one) for one in PLAIN), *MARKED])
def test_short_cases_stay_and_what_is_marked(
    mark: str, seconds: list[float], some: str, pytester: pytest.Pytester, monkeypatch, tmp_path: Path
) -> None:
    name = pytester.makepyfile(CASES.format(f"@pytest.mark.{mark}\n" if mark else "", len(seconds))).name
    rows = {name: {f"test_it[{n}]": each for n, each in enumerate(seconds)}}
    monkeypatch.setattr(selection, "MEASURED", tmp_path / "seconds.json")
    selection.MEASURED.write_text(json.dumps(rows))
    assert "".join(run(pytester)) == some
    assert len(run(pytester, "--long")) == len(seconds) * (mark != "slow")


def test_shards_are_all_of_the_tests_each_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES.format("", 20))
    found = [case for n in (4, 5, 6) for case in run(pytester, f"--shard={n}/3")]
    assert sorted(found, key=int) == [str(n) for n in range(20)]
