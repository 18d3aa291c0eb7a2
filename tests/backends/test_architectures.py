"""What each architecture runs: the table, its page, and every kernel compiled for every row without a device."""

import ast
import dataclasses
import json
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.backends import flex, measure, reference, select
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.operator import ARCHITECTURES, KERNELS
from mmaccel.core.errors import RecipeError, UnknownName
from tests.backends.oracle import drawn
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


@pytest.mark.always
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
    named = re.findall(r"^\| (\w+) \|", found, re.MULTILINE)
    assert sorted(named) == sorted({way.split()[0] for way in WAYS})


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
    assert select.default_backend(CUDA) == ("triton" if why is None else "flex")
    if why is not None:
        with pytest.raises(
            RecipeError, match=f"'triton' cannot run on cuda: {why}; choose 'auto' or one of .*'flex'"
        ):
            select.get_op("triton", CUDA)
    flash = f"'flash' cannot run on cuda: {operators.architecture_of(CUDA).lacks['flash']}; choose"
    with pytest.raises(RecipeError, match=flash):
        select.get_op("flash", CUDA)


def test_resources_are_the_device_s_own(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has them where PyTorch does not tell them, as on ROCm."""
    device.gcnArchName = "gfx942"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert operators.find_device_limits(CUDA) == operators.DeviceLimits(64 << 10, 64 << 10, 16, 60, 9 << 30)
    operators.find_device_limits.cache_clear()
    device.shared_memory_per_block_optin, device.shared_memory_per_multiprocessor = 70, 80
    assert operators.find_device_limits(CUDA) == operators.DeviceLimits(70, 80, 16, 60, 9 << 30)


def test_stages_fit_shared_memory() -> None:
    """One stage is in registers; there is always one."""
    here = operators.DeviceLimits(shared=100, resident=0, columns=8, processors=1, memory=1)
    found = [here.max_pipeline_stages(4, each, 10) for each in (22, 30, 31, 45, 90, 91, 1000)]
    assert found == [4, 4, 3, 3, 2, 1, 1]


def test_reference_runs_everywhere() -> None:
    for device in ("cpu", "cuda", "meta"):
        assert select.why_unusable(device)["reference"] is None
    assert set(select.why_unusable("cpu")) == set(select.BACKENDS)


def test_a_named_backend_is_that_backend() -> None:
    assert select.get_op("reference", "cpu") is reference.op
    assert select.get_op("flex", "cpu") is flex.op


def test_auto_is_one_that_runs() -> None:
    name = select.default_backend("cpu")
    assert select.why_unusable("cpu")[name] is None
    assert select.get_op("auto", "cpu") is select.get_op(name, "cpu")
    assert select.default_backend("meta") == "reference"


def test_an_unknown_name_tells_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown backend 'referense': did you mean 'reference'\?"):
        select.get_op("referense", "cpu")


def test_what_cannot_run_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RecipeError, match=r"'flex' cannot run on meta: .*; choose 'auto' or one of 'reference'"
    ):
        select.get_op("flex", torch.device("meta"))
    monkeypatch.setitem(select.BACKENDS, "absent", "mmaccel.backends.no_such_kernel")
    assert select.why_unusable("cpu")["absent"] == "it needs mmaccel.backends.no_such_kernel"
    with pytest.raises(RecipeError, match="backend 'absent' cannot run on cpu: it needs"):
        select.get_op("absent", "cpu")


SHAPE = measure.AttentionShape(heads=2, groups=1, size=16, dtype=torch.float32)
SMALL = dict(lengths=(256, 1024))


class Stopwatch:
    """A bench that runs nothing and gives the times it was told, in the order things are asked; a clock that it moves."""

    def __init__(self, *seconds: float, each: float = 0.0) -> None:
        self.seconds, self.each, self.now, self.asked = list(seconds), each, 0.0, 0

    def __call__(self, run: Any, device: torch.device) -> float:
        self.now += self.each
        self.asked += 1
        return self.seconds.pop(0)

    def clock(self) -> float:
        return self.now


def decided(tmp_path: Path, watch: Stopwatch, **named: Any) -> select.BackendChoice:
    store = select.CostFile(tmp_path / "deep" / "costs.json")
    how = dict(SMALL, bench=watch, clock=watch.clock)
    return select.resolve_backend("auto", "cpu", SHAPE, measure=True, store=store, **how, **named)


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backends on the CPU that are worth measuring."""
    monkeypatch.setitem(select.BACKENDS, "rival", "mmaccel.backends.reference")
    monkeypatch.setitem(select.PREFERENCE, "cpu", ("rival", "flex", "reference"))
    monkeypatch.setitem(measure.STARTS, "flex", 2.0)


def test_auto_takes_the_cheapest(rivals: None, tmp_path: Path) -> None:
    """Dense, then each backend, a short prompt and a long one."""
    choice = decided(tmp_path, Stopwatch(1, 16, 2, 20, 1, 15))
    assert choice.backend == "flex" and choice.costs is not None
    assert set(choice.costs.sparse) == {"rival", "flex"} and choice.costs.untried == {}
    told = r"flex \(measured: blocks by rival .* TFLOP/s, flex .* TFLOP/s; dense .* TFLOP/s\)"
    assert re.fullmatch(told, choice.describe())
    assert decided(tmp_path / "other", Stopwatch(1, 16, 1, 15, 2, 20)).backend == "rival"


def test_costs_are_measured_once(rivals: None, tmp_path: Path) -> None:
    """By device, shape, dtype, versions and what is planned; a file that cannot be read is written anew."""
    first = decided(tmp_path, Stopwatch(1, 16, 2, 20, 1, 15))
    again = decided(tmp_path, Stopwatch())
    assert (again.backend, again.costs) == (first.backend, first.costs) and "measured before" in again.why
    assert decided(tmp_path, Stopwatch(1, 16, 1, 15, 2, 20), label="other").backend == "rival"
    other = dataclasses.replace(SHAPE, groups=2)
    watch = Stopwatch(1, 16, 1, 15, 2, 20)
    select.resolve_backend(
        "auto",
        "cpu",
        other,
        measure=True,
        store=select.CostFile(tmp_path / "deep" / "costs.json"),
        bench=watch,
        **SMALL,
    )
    assert watch.asked == 6
    keys = {
        select.cost_key(torch.device("cpu"), s, ("a",), "b")
        for s in (SHAPE, other, dataclasses.replace(SHAPE, dtype=torch.half))
    }
    assert len(keys) == 3 and all(f"torch {version('torch')} " in key for key in keys)
    (tmp_path / "deep" / "costs.json").write_text('{"half')
    assert decided(tmp_path, Stopwatch(1, 16, 1, 15, 2, 20)).backend == "rival"
    assert decided(tmp_path, Stopwatch()).backend == "rival"


def test_a_place_that_cannot_be_written_is_no_fault(rivals: None, tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file where a folder should be")
    assert decided(tmp_path, Stopwatch(1, 16, 2, 20, 1, 15)).backend == "flex"


def test_measuring_ends_in_time(rivals: None, tmp_path: Path) -> None:
    """What would take too long to start is left untried, and the reason says so; the first is always tried."""
    choice = decided(tmp_path, Stopwatch(1, 16, 2, 20, each=2.5))
    assert choice.backend == "rival" and choice.costs is not None
    assert choice.costs.untried == {"flex": "it takes about 2 s to start"} and "flex not tried" in choice.why


def test_what_fails_is_passed_over(rivals: None, tmp_path: Path) -> None:
    class Broken(Stopwatch):
        def __call__(self, run: Any, device: torch.device) -> float:
            if self.asked == 2:
                self.asked += 1
                raise RuntimeError("out of resource: shared memory")
            return super().__call__(run, device)

    choice = decided(tmp_path, Broken(1, 16, 2, 20))
    assert choice.backend == "flex" and "rival not tried: it failed with RuntimeError" in choice.why


def test_dense_wherever_a_pattern_would_not_win(rivals: None, tmp_path: Path) -> None:
    """Dense: 1 us a pair. Blocks: 2 us a pair and 1 s. A plan: 1 ms a token."""
    causal = [2 * n * (n + 1) / 2 for n in (256, 1024)]
    listed = [64**2 * 2 * 4, 64**2 * 2 * (1 + 2 * 15)]
    times = [1e-6 * w for w in causal] + [0.256, 1.024] + [1 + 2e-6 * w for w in listed] + [9, 99]
    choice = decided(tmp_path, Stopwatch(*times), plan=lambda n: lambda: None, label="p")
    costs = choice.costs
    assert choice.backend == "rival" and costs is not None
    assert [costs.dense.each, costs.planning.each, costs.sparse["rival"].each] == pytest.approx(
        [1e-6, 1e-3, 2e-6]
    )
    assert costs.sparse["rival"].fixed == pytest.approx(1.0)
    assert costs.dense.fixed == pytest.approx(0, abs=1e-9)
    assert choice.beats_dense(listed=1e6, causal=4.1e6, tokens=1000)
    assert not choice.beats_dense(listed=1e6, causal=3.9e6, tokens=1000)
    assert not choice.beats_dense(listed=1e6, causal=4.1e6, tokens=2000)
    assert dataclasses.replace(choice, costs=None).beats_dense(listed=9e9, causal=1, tokens=1)


def test_dense_wins_a_tie() -> None:
    line = measure.LinearCost(1.0, 2.0)
    choice = select.BackendChoice("rival", "", measure.Costs(line, {"rival": line}))
    assert not choice.beats_dense(5.0, 5.0, 7.0) and choice.beats_dense(4.9, 5.0, 7.0)


def test_a_line_through_noise_stays_a_cost() -> None:
    assert measure.LinearCost.fit_two_points((10, 3.0), (20, 2.0)) == measure.LinearCost(0.0, 0.1)
    assert measure.LinearCost.fit_two_points((10, 1.0), (20, 4.0)).fixed == 0.0


def test_nothing_is_measured_on_the_cpu_or_for_a_name(tmp_path: Path) -> None:
    store = select.CostFile(tmp_path / "costs.json")
    choice = select.resolve_backend("auto", "cpu", SHAPE, store=store, bench=Stopwatch())
    assert choice.backend == select.default_backend("cpu") and choice.beats_dense(1e9, 1, 1)
    assert "nothing was measured" in choice.why
    assert select.resolve_backend("flex", "cpu", SHAPE, store=store).describe() == "flex (asked for by name)"
    with pytest.raises(RecipeError, match="'triton' cannot run on cpu"):
        select.resolve_backend("triton", "cpu", SHAPE)
    assert not store.path.exists()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_real_times_make_a_choice(tmp_path: Path) -> None:
    """The parts that are timed are attention: their rows see the nearest eighth of the blocks."""
    choice = select.resolve_backend(
        "auto", "cpu", SHAPE, measure=True, store=select.CostFile(tmp_path / "c.json"), **SMALL
    )
    assert choice.backend in ("reference", "flex") and choice.costs is not None
    assert choice.costs.dense.each > 0
    listed, part = measure.build_nearest_blocks_part(1024, 2, torch.device("cpu"))
    assert listed == 2 * (1 + 2 * 15)
    query, key, value = drawn(1, (2, 1), 1024, 1024, 16)
    out, _ = reference.op(query, key, value, *part.pack(), 64, 64, 0.25)
    at = torch.arange(1024)
    seen = (at[:, None] >= at) & (at[:, None] // 64 - at // 64 < 2)
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(out, want)
