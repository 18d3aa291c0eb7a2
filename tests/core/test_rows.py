"""Files of rows, and what a sentence says of arguments."""

from pathlib import Path

import pytest

from mmaccel.core.errors import ArgumentNames, VideoError, VideoWarning
from mmaccel.core.rows import JsonlFile, measurement_conditions, read_rows, write_atomically


def test_a_run_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    rows = JsonlFile(path, "about")
    assert rows.rows == [] and not path.exists()
    assert rows.add({"about": (1, 2)}) == {"about": [1, 2]}  # as it will be read
    rows.add({"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'not json\n{"n": 2}\n{"n": 3')
    again = JsonlFile(path, "about")
    assert again.rows == [{"about": [1, 2]}, {"n": 1}, {"n": 2}] == read_rows([path])
    assert path.read_bytes().endswith(b'{"n": 3')  # reading writes nothing
    again.add({"n": 4})
    assert path.read_bytes() == whole + b'not json\n{"n": 2}\n{"n": 4}\n'


@pytest.mark.parametrize("other", [b"a user's own", b'{"abou": 1}\n', b'\xff{"about": 1}\n'])
def test_another_file_is_refused_and_stays(tmp_path: Path, other: bytes) -> None:
    path = tmp_path / "rows"
    path.write_bytes(other)
    with pytest.raises(ValueError, match="does not begin with about"):
        JsonlFile(path, "about")
    assert path.read_bytes() == other
    path.write_bytes(b'{"abo')  # of a run that was killed in its first line
    assert JsonlFile(path, "about").add({"about": 1}) and path.read_bytes() == b'{"about": 1}\n'


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_atomically(path, "one\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "one\n" and list(tmp_path.iterdir()) == [path]
    found = measurement_conditions(dtype="float32")
    assert found["dtype"] == "float32" and found["torch"] and found["threads"] >= 1


def test_a_sentence_names_arguments_or_the_options_of_a_command() -> None:
    options = {"fps": "--fps", "frames": "--frames"}
    error = VideoError(
        ArgumentNames("frames", value=9),
        " is more than the 6 of frames=.mp4: give ",
        ArgumentNames("fps", "size"),
        ".",
    )
    assert str(error) == "frames=9 is more than the 6 of frames=.mp4: give fps= or size=."
    assert repr(error.args[0]) == "frames=9" and "frames=9" in repr(error)
    assert error.to_text(options) == "--frames 9 is more than the 6 of frames=.mp4: give --fps."
    told = VideoWarning("shrunk", ArgumentNames("max_side", "size", within="; {} sets another"), ".")
    assert str(told) == "shrunk; max_side= or size= sets another." and told.to_text(options) == "shrunk."
    assert ArgumentNames("fps", "frames", "size").to_text() == "fps=, frames= or size="
