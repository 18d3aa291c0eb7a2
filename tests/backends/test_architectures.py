"""What each architecture runs: the table, its page, and every kernel compiled for every row without a device."""

import ast
import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.backends import select
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.operator import ARCHITECTURES, KERNELS
from mmaccel.core.errors import RecipeError
from tests.house import FILES, PACKAGE

from .architectures_page import PAGE, between, declared
from .compiled import WAYS
from .test_triton import run

pytest.importorskip("triton")
CUDA = torch.device("cuda")
GROUPS = ("attend", "hopper", "decode", "carried", "project", "index", "stream", "pointwise")


def compiled(*arguments: str) -> list[str]:
    return run("tests.backends.compiled", *arguments, TRITON_INTERPRET="0").splitlines()


@cache
def kernels() -> set[str]:
    """Every kernel of the package, by file."""
    found = set()
    for path in (PACKAGE / "backends" / "triton").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert any("jit" in ast.unparse(one) for one in node.decorator_list), node.name
                found.add(f"{path.stem}.{node.name}")
    return found


def judge(row: dict[str, Any]) -> None:
    """It fits shared memory. On NVIDIA products run on the matrix units, and what is hot spills nothing to memory."""
    name, way = row["architecture"], row["way"]
    kernel = row["kernel"].split(".")[1].removesuffix("_kernel").removeprefix("_")
    assert row["shared"] <= operators.find_architecture(name).shared, row
    product = kernel in ("attend", "flash_decode", "project", "enter", "hopper", "shared_key_blocks")
    product |= kernel in ("totals", "lines", "classes")
    if "fp32" not in way:
        assert (row["products"] > 0) == product, row
    if way.startswith("large"):
        return
    spills = {"index": 64, "hopper": 32, "pointwise": 32}.get(way.split()[0], 0)
    if name == "gfx942":
        assert row["stack"] == 0, row
        return
    if name not in ("sm_80", "sm_90") or (name == "sm_80" and ("placed" in way or "runs" in way)):
        spills = max(spills, 96)
    assert row["stack"] <= spills or "fp32" in way, row
    if product and kernel != "lines":
        assert row["copies"] > 0, row
    if name == "sm_90" and kernel == "piece":
        assert 2 * row["shared"] <= 231424, f"two programs share a multiprocessor: {row}"
    if kernel == "gather":
        # Heads that begin at 16 bytes are read in pieces of 16, so that no sector crosses the wire twice; others are not.
        wide = row["stores"] if "196" in way else 0
        assert row["wide"] == [wide, wide] and row["stores"] > 0, row


def test_every_kernel_compiles_for_hopper() -> None:
    """In one way each; in all ways, and for the other architectures, in the slow test."""
    rows = [json.loads(line) for line in compiled("sm_90", "--once", "--only", *GROUPS)]
    assert {row["kernel"] for row in rows} == kernels() and len(rows) == len(kernels())
    for row in rows:
        judge(row)


@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in ARCHITECTURES])
def test_compiles_everything(name: str) -> None:
    rows = [json.loads(line) for line in compiled(name)]
    assert len(rows) > 60
    for row in rows:
        judge(row)


def test_others_have_every_kernel_but_those_of_hopper() -> None:
    found = {line.split()[1] for line in compiled("gfx942", "--list")}
    assert found == {name for name in kernels() if not name.startswith("hopper")}


def test_the_page_has_the_table() -> None:
    assert between(PAGE.read_text(encoding="utf-8"), "what runs where") == declared(), (
        "run architectures_page"
    )


def test_the_page_has_every_group_that_is_compiled() -> None:
    """A group of ways that came later is compiled for every architecture, and told: run compiled and architectures_page."""
    found = between(PAGE.read_text(encoding="utf-8"), "what was compiled")
    assert sorted(re.findall(r"^\| (\w+) \|", found, re.MULTILINE)) == sorted(
        {way.split()[0] for way in WAYS}
    )


def test_no_other_file_asks_what_a_device_is() -> None:
    """All ask the table; `mmaccel doctor` prints what PyTorch was built for."""
    asked = re.compile(r"get_device_capability|gcnArchName|version\.hip|shared_memory_per")
    found = {
        str(path.relative_to(PACKAGE)) for path in FILES if asked.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"backends/ops/operator.py", "cli/doctor.py"}


def test_a_row_names_what_it_lacks() -> None:
    assert all(row.lacks.keys() <= KERNELS.keys() and all(row.lacks.values()) for row in ARCHITECTURES)
    assert len({row.name for row in ARCHITECTURES}) == len(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "like"), [("sm_86", "sm_80"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("sm_130", "sm_120")]
)
def test_one_without_a_row_runs_what_the_one_before_runs(name: str, like: str) -> None:
    found, row = operators.find_architecture(name), operators.find_architecture(like)
    assert found.name == name and not found.has_run
    assert (found.lacks, found.shared, found.cudnn) == (row.lacks, row.shared, row.cudnn)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gfx1100", "it is compiled for gfx942, not for gfx1100"),
        ("sm_75", "it needs compute capability 8.0"),
        ("gfx942:sramecc+:xnack-", None),
        ("sm_89", None),
    ],
)
def test_what_does_not_run_is_said_in_a_sentence(
    name: str, why: str | None, device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.gcnArchName = name
    monkeypatch.setattr(torch.version, "hip", None if name.startswith("sm_") else "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(int(name[3:]), 10))
    assert select.why_unusable(CUDA)["triton"] == why
    assert select.choose(CUDA) == ("triton" if why is None else "flex")
    if why is not None:
        with pytest.raises(
            RecipeError, match=f"'triton' cannot run on cuda: {why}; choose 'auto' or one of .*'flex'"
        ):
            select.get("triton", CUDA)
    flash = f"'flash' cannot run on cuda: {operators.architecture_of(CUDA).lacks['flash']}; choose"
    with pytest.raises(RecipeError, match=flash):
        select.get("flash", CUDA)


def test_resources_are_the_device_s_own(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has them where PyTorch does not tell them, as on ROCm."""
    device.gcnArchName = "gfx942"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert operators.resources(CUDA) == operators.DeviceResources(64 << 10, 64 << 10, 16, 60, 9 << 30)
    operators.resources.cache_clear()
    device.shared_memory_per_block_optin, device.shared_memory_per_multiprocessor = 70, 80
    assert operators.resources(CUDA) == operators.DeviceResources(70, 80, 16, 60, 9 << 30)


def test_stages_fit_shared_memory() -> None:
    """One stage is in registers; there is always one."""
    here = operators.DeviceResources(shared=100, resident=0, columns=8, processors=1, memory=1)
    assert [here.pipeline_stages(4, each, 10) for each in (22, 30, 31, 45, 90, 91, 1000)] == [
        4,
        4,
        3,
        3,
        2,
        1,
        1,
    ]
