"""`make test-numeric` says in a sentence what it did under each setting."""

import sys

from tests import numeric


def test_a_setting_in_which_nothing_is_found_fails_with_a_sentence(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass\n")
    monkeypatch.setattr(
        numeric, "SETTINGS", [("ATEN_CPU_CAPABILITY", "default", "DEFAULT"), ("NO", "SUCH", "AVX1024")]
    )
    monkeypatch.setattr(numeric, "LEVELS", ["DEFAULT", "AVX2", "AVX512", "AVX1024"])
    monkeypatch.setattr(sys, "argv", ["numeric", str(tmp_path)])
    assert numeric.main() == 1
    said = capfd.readouterr().out
    assert "ATEN_CPU_CAPABILITY=default: failed, no test marked `numeric` was found" in said
    assert "NO=SUCH: left out, this processor has" in said
    (tmp_path / "test_other.py").write_text("import pytest\n@pytest.mark.numeric\ndef test_it():\n    pass\n")
    assert numeric.main() == 0 and "default: passed, " in capfd.readouterr().out
