"""The page from ParallelVLM to the code: its table is what the simulator says, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from mmaccel.core.registry import registry
from mmaccel_lab.eval import self_draft, simulate

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "parallelvlm.md").read_text(encoding="utf-8")
LOG = (ROOT / "lab" / "LOG.md").read_text(encoding="utf-8")


def test_the_table_is_the_simulator_s() -> None:
    told = LOG.split("<!-- mmaccel_lab.eval.simulate.table -->\n\n")[1]
    assert told == simulate.markdown(simulate.table([0.6, 0.7, 0.81, 0.9], [3.0, 5.0, 9.0])) + "\n"


def test_why_self_speculation_is_not_used_is_computed() -> None:
    rows = self_draft.gains()
    assert (
        self_draft.markdown(rows) + "\n\n## Theorems" in PAGE.split("<!-- mmaccel_lab.eval.self_draft -->")[1]
    )
    short = rows[0]
    assert short.columns == 25_088 and not short.worth and all(row.worth for row in rows[1:])
    told = f"T_p / T_q is {short.ratio:.2f}, and the simulator's best window is worth {short.speedup:.2f} x at 90% kept"
    assert told in " ".join(PAGE.split())


def test_what_is_named_is_there() -> None:
    files = re.findall(r"`((?:mmaccel|bench|tests)/[\w/.]+)", PAGE)
    assert len(files) > 20 and all((ROOT / name).exists() for name in files)
    parts = re.findall(r"decode_gpu\.py ((?:\w+ ?)+)", PAGE)
    source = (ROOT / "bench" / "decode_gpu.py").read_text(encoding="utf-8")
    assert parts and all(f'    "{part}": ' in source for words in parts for part in words.split())


def test_every_table_and_figure_of_a_measurement_has_its_counterpart() -> None:
    rows = PAGE.split("## Figures and tables")[1].split("## Theorems")[0]
    tables = {int(n) for told in re.findall(r"Tables? ([\d and,]+)", rows) for n in re.findall(r"\d+", told)}
    figures = {
        int(n) for told in re.findall(r"Figures? ([\dab and,]+)", rows) for n in re.findall(r"\d+", told)
    }
    assert tables == set(range(1, 8)) and figures == {1, 3, 4, 6, 7, 8, 9, 10, 11}
    assert all(
        f"`{name}" in PAGE or f"/{name}.py" in PAGE or f"{name}.py" in PAGE
        for name in set(registry("draft")) - {"off", "prompt_lookup"}
    )
