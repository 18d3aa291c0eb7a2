"""Every case of `make bench` has a committed ratio with its reason; `make bench` itself compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"


def test_every_case_has_a_committed_ratio_and_a_reason(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import test_ratios

    committed = json.loads((BENCH / "ratios.json").read_text())
    assert set(committed) == set(test_ratios.CASES)
    assert all(one["ratio"] > 0 and len(one["why"].split()) > 2 for one in committed.values())
    sys.modules.pop("test_ratios")
