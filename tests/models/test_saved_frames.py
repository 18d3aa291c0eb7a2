"""A session's save writes each frame once; sessions of earlier versions, which did not, are read."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmaccel.core.streams import session_io
from tests.models.streams import FPS, film, logits
from tests.models.test_saved_folder import tree
from tests.models.test_session_faults import begun
from tests.policies.kv.store.test_saved import make_former


@pytest.mark.parametrize("loaded", [False, True])
def test_a_save_writes_new_frames_alone(tmp_path: Path, loaded: bool) -> None:
    """Also the first one after a load; and frames that were in the window are not written again when they leave it."""

    def stored() -> dict[int, int]:
        found = {one.stat().st_ino: one.stat().st_size for one in place.rglob("store-*.safetensors")}
        assert found
        return found

    place = tmp_path / "stream"
    with begun("mosaic", 12) as session:
        session.save(place)
        before = stored()
        if loaded:
            session.load(place)
        session.watch(film(4), fps=FPS)
        session.save(place)
        state: Any = session._live.state  # type: ignore[union-attr]
        unit = state.store.shape.layers * state.store.shape.nbytes
        assert before.keys() < stored().keys()
        assert sum(stored().values()) - sum(before.values()) <= 4 * unit + 400
        window = (place / "data-2" / "memory" / "window.safetensors").stat().st_size
        assert window < unit * state.stream.head // state.stream.tokens_per_unit + 2000, "the head alone"
        want = logits(session)
        session.load(place)
        assert torch.equal(logits(session), want)


def older(place: Path, memory: Any) -> None:
    """Turn a saved session into one of version 3, whose files were in the folder itself; those of the store were of one
    layer, and the window had a file of its own."""
    facts = json.loads((place / "session.json").read_text())
    data = place / facts.pop("data")
    make_former(data / "memory" / "store", 3, memory._first)
    path = data / "memory" / "window.safetensors"
    rings = enumerate(memory._rings)
    sides = {
        f"window.{n}.{side}": getattr(ring, side).clone() for n, ring in rings for side in ("key", "value")
    }
    save_file({**load_file(path), **sides}, path)
    for one in data.iterdir():
        one.rename(place / one.name)
    data.rmdir()
    found = [(name, one) for name, one in tree(place).items() if name != "session.json"]
    files = {name: [len(one), None if "store/" in name else zlib.crc32(one)] for name, one in found}
    (place / "session.json").write_text(
        json.dumps(session_io.add_checksum({**facts, "version": 3, "files": files}))
    )


def test_a_session_of_the_version_before_is_read_and_gives_way(tmp_path: Path) -> None:
    place = tmp_path / "stream"
    with begun("mosaic", 12) as session, begun("mosaic", 3) as other:
        session.save(place)
        older(place, session._live.state)  # type: ignore[union-attr]
        other.load(place)
        assert torch.equal(logits(session), logits(other))
        (place / "notes.txt").write_text("mine")
        other.save(place)
        assert sorted(p.name for p in place.iterdir()) == ["data-1", "notes.txt", "session.json"]
        session.load(place)
        assert torch.equal(logits(session), logits(other))
