"""What stays of the tests by default, and that shards are all of them, each once."""

from typing import Any

import pytest

from tests import selection

pytest_plugins = ["pytester"]


class Case:
    """A case of `test_it` in a module `m`, with the marks that its source gives it."""

    def __init__(self, nodeid: str, marks: dict[str, Any]) -> None:
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark


def left(seconds: dict[str, float], **marks: Any) -> list[str]:
    """Cases that are not slow, of as many as have `seconds`."""
    cases = [Case(nodeid=f"m::{name}", marks=dict(marks)) for name in seconds]
    selection._leave_long_ones_out(cases, seconds)
    return [case.nodeid.removeprefix("m::") for case in cases if "slow" not in case.marks]


def test_short_cases_stay_and_one_that_is_not_too_long() -> None:
    assert left({"test_it": selection.ONE}) == ["test_it"] and left({"test_it": selection.ONE + 0.1}) == []
    long = {"test_it[a]": 1.0, "test_it[b]": 1.0, "test_it[c]": 9.0}
    assert len(some := left(long)) == 1 and some != ["test_it[c]"]
    assert "test_it[d]" in (some := left({**long, "test_it[d]": 0.1})) and len(some) <= 2


def test_a_mark_lets_long_ones_stay() -> None:
    long = {"test_it[a]": 9.0, "test_it[b]": 9.0}
    assert len(left(long, always=pytest.mark.always)) == 1
    assert left(long, always=pytest.mark.always(every=True)) == [*long]
    assert left(long, always=pytest.mark.always(every=True), slow=pytest.mark.slow) == []


def test_shards_are_all_of_the_tests_each_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_it(n): pass\n")
    pytester.makeconftest("from tests.selection import pytest_addoption, pytest_take_shard")
    seen = []
    for number in (4, 5, 6):
        result = pytester.runpytest("-v", "-p", "no:cacheprovider", f"--shard={number}/3")
        seen += [line.split()[0] for line in result.outlines if " PASSED " in line]
    assert len(seen) == 20 == len(set(seen))
