"""Films in the folder of a test."""

from pathlib import Path
from typing import Any

import pytest

from tests.media.films import Film, write_film


@pytest.fixture
def film(tmp_path: Path) -> Film:
    """`film("a.mp4", frames=60, ...)` writes a film in the test's folder and gives its path."""

    def make(name: str = "film.mp4", frames: int = 60, **settings: Any) -> Path:
        return write_film(tmp_path / name, frames, **settings)

    return make
