"""A process that watches and saves is killed, and what it saved is whole; the script of 200 kills prints it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.models.streams import CLUSTERS

KV = {"name": "mosaic", "window": 6, "local": 2, "frames": 4, "index": CLUSTERS, "keep_seconds": 5.0}


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)], ids=["some", "many"])
def test_what_a_killed_process_saved_is_whole(count: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
    row = importlib.import_module("kills").killed(count, 0.3, KV)
    print(row)
    assert row["damaged"] == [] and row["kills"] == count and row["frames"] > 0
    assert 0 < row["in_a_save"] <= count and row["lost_s_most"] <= row["bound_s"]
