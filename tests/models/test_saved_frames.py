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
from tests.models.test_session_faults import TIGHT, begun
from tests.policies.kv.store.test_saved import make_former


@pytest.mark.parametrize("loaded", [False, True])
def test_a_save_writes_new_frames_alone(tmp_path: Path, loaded: bool) -> None:
    """Also the first one after a load; and frames that were in the window are not written again when they leave it."""

    def stored() -> dict[int, int]:
        files = [*place.rglob("store-*.safetensors")]
        assert files
        return {one.stat().st_ino: sum(x.nbytes for x in load_file(one).values()) for one in files}

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
        rows = state.index.rows()
        row = sum(one[0].nbytes for one in rows.values())
        assert sum(stored().values()) - sum(before.values()) == 4 * (unit + row)
        assert not rows.keys() & load_file(place / "data-2" / "memory" / "clusters.safetensors").keys()
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
    folder, rows = data / "memory", {name: one.contiguous() for name, one in memory.index.rows().items()}
    make_former(folder / "store", 3, memory._first)
    path = folder / "window.safetensors"
    rings = enumerate(memory._rings)
    sides = {
        f"window.{n}.{side}": getattr(one, side).clone() for n, one in rings for side in ("key", "value")
    }
    save_file({**load_file(path), **sides}, path)
    if (path := folder / "clusters.safetensors").exists():
        save_file({**load_file(path), **rows}, path)
    else:
        size = -1, memory.geometry.layers, memory.geometry.kv_heads, memory.geometry.head_dim
        each = {name: one.view(size).permute(1, 2, 0, 3)[:, None] for name, one in rows.items()}
        parts = {f"{name}.{n}": one[n].contiguous() for name, one in each.items() for n in range(len(one))}
        save_file(parts, folder / "index.safetensors")
    for one in data.iterdir():
        one.rename(place / one.name)
    data.rmdir()
    found = [(name, one) for name, one in tree(place).items() if name != "session.json"]
    files = {name: [len(one), None if "store/" in name else zlib.crc32(one)] for name, one in found}
    (place / "session.json").write_text(
        json.dumps(session_io.add_checksum({**facts, "version": 3, "files": files}))
    )


@pytest.mark.parametrize("kv", ["mosaic", "rekv", "rekv with summaries"])
def test_a_session_of_the_version_before_is_read_and_gives_way(tmp_path: Path, kv: str) -> None:
    place, given = tmp_path / "stream", {**TIGHT[kv.split()[0]], **({"reps": 4} if " " in kv else {})}
    with begun(given, 12) as session, begun(given, 3) as other:
        session.save(place)
        older(place, session._live.state)  # type: ignore[union-attr]
        other.load(place)
        assert torch.equal(logits(session), logits(other))
        (place / "notes.txt").write_text("mine")
        other.save(place)
        assert sorted(p.name for p in place.iterdir()) == ["data-1", "notes.txt", "session.json"]
        session.load(place)
        assert torch.equal(logits(session), logits(other))
