"""Options of `make bench`: see `test_ratios.py`."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ratios")
    group.addoption("--write", metavar="WHY", help="commit the ratios measured now, with the reason for it")
    group.addoption(
        "--plant", type=float, default=1.0, help="slow each case down so many times; it must then be caught"
    )
    group.addoption(
        "--ratios", type=Path, default=Path(__file__).with_name("ratios.json"), help="the committed ratios"
    )
