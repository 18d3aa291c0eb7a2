"""`make test-numeric` says in a sentence what it did under each setting."""

import re
import sys
from pathlib import Path

from tests import numeric


def test_a_setting_in_which_nothing_is_found_fails_with_a_sentence(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass\n")
    monkeypatch.setattr(
        numeric,
        "SETTINGS",
        [("torch", "ATEN_CPU_CAPABILITY", "default", "DEFAULT"), ("torch", "NO", "SUCH", "AVX1024")],
    )
    monkeypatch.setattr(numeric, "LEVELS", ["DEFAULT", "AVX2", "AVX512", "AVX1024"])
    monkeypatch.setattr(sys, "argv", ["numeric", str(tmp_path)])
    assert numeric.main() == 1
    said = capfd.readouterr().out
    assert "ATEN_CPU_CAPABILITY=default: failed, no test marked `numeric` was found" in said
    assert "NO=SUCH: left out, this processor has" in said
    (tmp_path / "test_other.py").write_text(
        "import pytest\n@pytest.mark.numeric(by='torch')\ndef test_it():\n    pass\n"
    )
    assert numeric.main() == 0 and "default: passed, " in capfd.readouterr().out


def test_every_test_marked_numeric_names_its_library():
    """Without one it would run under no setting."""
    here = Path(__file__)
    lines = [
        line
        for path in here.parent.rglob("test_*.py")
        if path != here
        for line in path.read_text().splitlines()
        if re.search(r"mark\.numeric\b", line)
    ]
    assert len(lines) > 8
    assert all(re.search(r"mark\.numeric\(by=\"(numpy|torch)\"\)", line) for line in lines)
