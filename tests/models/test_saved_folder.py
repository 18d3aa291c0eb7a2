"""A save touches what a save wrote and nothing else, whenever it is killed."""

import hashlib
import json
import os
import shutil
import signal
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path
from threading import BoundedSemaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import mmaccel
from mmaccel.core.errors import MmaccelError, ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.streams import session_io
from mmaccel.models import shards
from tests.models.streams import FPS, film, logits
from tests.models.test_session_faults import begun


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FOREIGN: dict[str, str | None] = {
    "another program's": '{"a": 1}',
    "no JSON": "session",
    "a list": "[]",
    "empty": "",
    "another format": '{"format": "sheet", "version": 3, "files": {"thesis.txt": [1, 1]}}',
    "a version to come": '{"format": "mmaccel session", "version": 99, "files": {}}',
    "none": None,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path, name: str) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "main.py").write_text("pass")
    (project / "thesis.txt").write_text("four years")
    if FOREIGN[name] is not None:
        (project / "session.json").write_text(FOREIGN[name] or "")
    before = tree(tmp_path)
    with begun("recent", 3) as session:
        for path in (project, project / "thesis.txt"):
            with pytest.raises(ModelError, match=r"is not a saved session.*another path\."):
                session.save(path)
    assert tree(tmp_path) == before


def test_what_a_user_puts_into_a_saved_session_stays(tmp_path: Path) -> None:
    place = tmp_path / "stream"
    mine = ["notes.txt", "data-1/notes.txt", "memory/notes.txt", "pictures/a.png", "data-x/old.safetensors"]
    with begun("recent", 3) as session:
        session.save(place)
        for name in mine:
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(name)
        (tmp_path / "stream.old").mkdir()
        for _ in range(2):
            session.save(place)
        assert all((place / name).read_text() == name for name in mine)
        files = json.loads((place / "session.json").read_text())["files"]
        assert set(tree(place)) == {*mine, *files, "session.json"}
        assert all(n.startswith("data-3/") for n in files)
        assert {p.name for p in tmp_path.iterdir()} == {"stream", "stream.old"}
        session.load(place)


def test_others_may_use_the_model_while_a_save_reads_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device is read once for all weights of a type; and the checksum is that of weight after weight."""
    with begun() as session:
        adapter: Any = session._stream_adapter
        busy, reads, cpu = list[bool](), list[int](), torch.Tensor.cpu

        def checksum(model: Any) -> str:
            busy.append(adapter.turns._holder is not None)
            with monkeypatch.context() as counting:
                counting.setattr(torch.Tensor, "cpu", lambda one: (reads.append(one.numel()), cpu(one))[1])
                return whole(model)

        whole = shards.weights_checksum
        monkeypatch.setattr(shards, "weights_checksum", checksum)
        session.save(tmp_path / "one")
    assert busy == [False]
    weights = adapter.model.state_dict()
    assert len(reads) == len({one.dtype for one in weights.values()}) < len(weights)
    each = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        sample = weight.flatten()[:: max(1, weight.numel() // 16)][:16].double().tolist()
        each.update(f"{name} {list(weight.shape)} {sample}".encode())
    assert json.loads((tmp_path / "one" / "session.json").read_text())["model"] == each.hexdigest()[:32]


class OnDevice(torch.Tensor):
    """Says that it lies on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(("others", "pinned"), [(0, 0), (0, 16), (8, 16)])
def test_what_a_device_copied_goes_to_the_host_when_the_model_is_free(
    others: int, pinned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of its own, behind the copy, in parts of pinned memory where there is some; at once where other saves have
    all the room. Room is given back at the end, also of a save that fails."""
    done, path = list[str](), tmp_path / "one.safetensors"
    event = SimpleNamespace()
    now = SimpleNamespace(record_event=lambda: done.append("copied") or event)
    own = SimpleNamespace(wait_event=lambda one: done.append("waited" if one is event else "another"))
    own.synchronize = lambda: done.append("part")
    room_of_parts = torch.empty(pinned, dtype=torch.uint8) if pinned else None
    monkeypatch.setattr(checkpoint_io, "_staging_room", lambda: room_of_parts)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda one: nullcontext(done.append("read" if one is own else ""))
    )
    monkeypatch.setattr(checkpoint_io, "_on_devices", room := BoundedSemaphore(8))
    for _ in range(others):
        room.acquire()
    kept = torch.arange(6.0).view(2, 3).T.as_subclass(OnDevice)
    with pytest.raises(ZeroDivisionError), checkpoint_io.defer_writes():
        checkpoint_io.write_tensors(path, {"one": kept})
        raise ZeroDivisionError
    assert not path.exists() and room._value == 8 - others
    done.clear()
    with checkpoint_io.defer_writes():
        checkpoint_io.write_tensors(path, {"one": kept})
        kept.zero_()
        assert done == ([] if others else ["copied"])
    assert done == (
        [] if others else ["copied", "waited", "read", *["part"] * (-(-24 // pinned) if pinned else 0)]
    )
    assert torch.equal(load_file(path)["one"], torch.arange(6.0).view(2, 3).T) and room._value == 8 - others


def test_only_the_owner_may_read_a_saved_session(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with begun("mosaic", 6) as session:
            session.save(tmp_path / "stream")
    finally:
        os.umask(before)
    found = [tmp_path / "stream", *(tmp_path / "stream").rglob("*")]
    assert len(found) > 6
    assert {p.stat().st_mode & 0o777 for p in found if p.is_file()} == {0o600}
    assert {p.stat().st_mode & 0o777 for p in found if p.is_dir()} == {0o700}


@pytest.mark.parametrize(("kv", "other"), [("rekv", {"frames": 2, "local": 1}), ("recent", {"local": 1})])
def test_what_matters_at_a_question_alone_may_be_another(
    kv: str, other: dict[str, Any], tmp_path: Path
) -> None:
    tight: dict[str, Any] = {"name": kv, "window": 6, "local": 4}
    with begun(tight) as session, begun({**tight, **other}) as asks_other:
        session.save(tmp_path / "a")
        asks_other.load(tmp_path / "a")
        assert asks_other.frames == session.frames and not torch.equal(logits(asks_other), logits(session))
        with begun({**tight, **other}) as anew:
            assert torch.equal(logits(asks_other), logits(anew))
    with begun({**tight, "window": 7}) as wider, pytest.raises(ModelError, match="saved with kv"):
        wider.load(tmp_path / "a")


@pytest.mark.parametrize(
    "name", ["../letter.txt", "/letter.txt", "letter.txt", "memory/link/letter.txt", "data-1"]
)
def test_a_list_names_nothing_that_no_save_writes(tmp_path: Path, name: str) -> None:
    """Who hands out a session may write what they like into its list."""
    place = tmp_path / "home" / "stream"
    with begun("recent", 3) as session:
        session.save(place)
        facts = json.loads((place / "session.json").read_text())
        for folder in (place, place.parent):
            (folder / "letter.txt").write_text("dear")
        (place / "memory").mkdir()
        (place / "memory" / "link").symlink_to(place.parent)
        facts["files"][name] = [4, None]
        (place / "session.json").write_text(json.dumps(session_io.add_checksum(facts)))
        if name != "memory/link/letter.txt":
            with pytest.raises(ModelError, match="damaged"):
                session.load(place)
        session.save(place)
        for folder in (place, place.parent):
            assert (folder / "letter.txt").read_text() == "dear"
        session.load(place)


def killed(session: mmaccel.VideoSession, place: Path, at: int) -> bool:
    """Save in a process that is killed at its `at`-th change of the file system; whether it came so far."""
    child = os.fork()
    if child == 0:
        left = [at]

        def strike(event: str, arguments: tuple[Any, ...]) -> None:
            written = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wxa")
            if written or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(strike)
            session.save(place)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.always
def test_a_save_that_is_killed_leaves_a_whole_session(tmp_path: Path) -> None:
    """At each of its steps: what was there, or what was to be; and the next save ends what it left."""
    place, at, seen = tmp_path / "stream", 0, []
    with begun("recent", 4) as first, begun("recent", 4) as second, begun("recent", 3) as reader:
        second.watch(film(5)[4:], fps=FPS)
        first.save(place)
        (place / "notes.txt").write_text("mine")
        while killed(second, place, at):
            reader.load(place)
            seen.append(len(reader))
            first.save(place)
            files = json.loads((place / "session.json").read_text())["files"]
            assert set(tree(place)) == {"notes.txt", "session.json", *files}, at
            at += 1
        assert at > 12 and seen == sorted(seen) and set(seen) == {4, 5}
        assert len([p for p in place.iterdir() if p.is_dir()]) == 1


def test_a_first_save_that_is_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    at = 0
    with begun("recent", 3) as session:
        while killed(session, tmp_path / f"{at}", at):
            session.save(tmp_path / f"{at}")
            assert [p.name[:4] for p in sorted((tmp_path / f"{at}").iterdir())] == ["data", "sess"], at
            at += 1
    assert at > 10


@pytest.mark.parametrize("files", [None, 5, [1, None], "abc", {"data-1/../a": 1}])
def test_a_list_that_is_damaged_is_written_anew(tmp_path: Path, files: Any) -> None:
    place = tmp_path / "stream"
    with begun("recent", 3) as session:
        session.save(place)
        facts = json.loads((place / "session.json").read_text())
        (place / "session.json").write_text(json.dumps({**facts, "files": files}))
        (place / ".mmaccel-saving.json").write_text(json.dumps({**facts, "files": files, "part": 3}))
        session.save(place)
        session.load(place)


@pytest.mark.parametrize("name", ["loop", "file/stream", "nul\0", "n" * 300])
def test_what_can_be_no_folder_is_told_before_anything_is_watched(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match=r"cannot be written \(.*\); give another path\.$"):
        session_io.check_session_path(tmp_path / name)
    session_io.check_session_path(tmp_path / "new" / "stream")
    assert not (tmp_path / "new").exists()


def resealed(place: Path) -> None:
    """Who changes a file on purpose changes its checksum."""
    facts = json.loads((place / "session.json").read_text())
    for name, (_, checksum) in facts["files"].items():
        data = (place / name).read_bytes()
        facts["files"][name] = [len(data), checksum and zlib.crc32(data)]
    (place / "session.json").write_text(json.dumps(session_io.add_checksum(facts)))


NUMBERS: list[tuple[str, str, Any]] = [
    ("rekv", "index.json", {"gone": [[1]]}),
    ("rekv", "index.json", {"gone": [12]}),
    ("mosaic", "clusters.json", {"absent": [None]}),
    ("mosaic", "clusters.json", {"absent": [10**6]}),
    ("mosaic", "clusters.json", {"buffer": [5, 5]}),
    ("mosaic", "clusters.json", {"buffer": [[-1], []]}),
    ("mosaic", "clusters.json", {"counters": {"splits": "many"}}),
    ("mosaic", "clusters.safetensors", {"semantic.parent": -1}),
    ("mosaic", "clusters.safetensors", {"semantic.size": -1}),
    ("mosaic", "clusters.safetensors", {"visual.members": 0}),
    ("mosaic", "clusters.safetensors", {"semantic.owner": 0}),
    ("rekv", "store/store.json", {"units": [2**31]}),
    ("rekv", "store/store.json", {"layers": float("inf")}),
    ("rekv", "store/store.json", {"crc": 2**63}),
    ("rekv", "store/store.json", {"file": "x" * 5000}),
]


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_numbers_of_nothing_are_refused(tmp_path: Path, kv: str) -> None:
    with begun(kv, 12) as session:
        session.save(tmp_path / "whole")
        before = logits(session)
        for number, (name, wrong) in enumerate((name, wrong) for own, name, wrong in NUMBERS if own == kv):
            place = tmp_path / f"{number}"
            shutil.copytree(tmp_path / "whole", place)
            path, ((field, value),) = place / "data-1" / "memory" / name, wrong.items()
            if path.suffix == ".safetensors":
                tensors = load(path.read_bytes())
                save_file({**tensors, field: torch.full_like(tensors[field], value)}, path)
            else:
                facts = json.loads(path.read_text())
                inner = facts["pieces"][0] if "pieces" in facts else facts
                inner[field] = value * len(inner[field]) if field == "units" else value
                path.write_text(json.dumps(facts))
            resealed(place)
            with pytest.raises(MmaccelError, match=r"damaged\.$|save it again\.$") as caught:
                session.load(place)
            assert len(str(caught.value)) < 500 and torch.equal(logits(session), before), (name, wrong)


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_means_of_other_units_are_refused(tmp_path: Path, kv: str) -> None:
    place = tmp_path / "stream"
    with begun(kv, 12) as session:
        session.save(place)
        before, path = logits(session), place / "data-1/memory/store/store.json"
        told = json.loads(path.read_text())
        (rows,) = (piece for piece in told["pieces"] if not piece["layers"])
        rows["gone"] = rows["units"][-1:]
        path.write_text(json.dumps(told))
        resealed(place)
        with pytest.raises(ModelError, match=r"rows of other units than the stream; it is damaged\.$"):
            session.load(place)
        assert torch.equal(logits(session), before)


def test_a_list_of_a_store_has_a_checksum(tmp_path: Path) -> None:
    """It says whose keys a file has; earlier versions had none."""
    place = tmp_path / "stream"
    with begun("mosaic", 12) as session:
        session.save(place)
        before, path = logits(session), place / "data-1/memory/store/store.json"
        text = path.read_text()
        path.write_text(text.replace('"units": [0, 1', '"units": [8, 1', 1))
        assert path.read_text() != text
        with pytest.raises(ModelError, match=r"store.json is not what was written"):
            session.load(place)
        path.write_text(text)
        facts = json.loads((place / "session.json").read_text())
        for name, known in facts["files"].items():
            known[1] = None if "/store/" in name else known[1]
        (place / "session.json").write_text(json.dumps(session_io.add_checksum(facts)))
        session.load(place)
        assert torch.equal(logits(session), before)


@pytest.mark.parametrize("name", ["spans", "times", "size"])
def test_a_film_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    place = tmp_path / "stream"
    with begun("mosaic", 4) as session:
        session.save(place)
        facts = json.loads((place / "session.json").read_text())
        film, path = load_file(place / "data-1/film.safetensors"), place / "data-1/film.safetensors"
        if name == "size":
            facts["size"] = [10**6, 10**6]
        else:
            save_file({**film, name: film[name] + (9 if name == "spans" else float("nan"))}, path)
        (place / "session.json").write_text(json.dumps(session_io.add_checksum(facts)))
        resealed(place)
        with pytest.raises(ModelError, match=f"{name}.* damaged, save it again"):
            session.load(place)
        assert len(session) == 4
