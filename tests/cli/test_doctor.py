"""`mmaccel doctor` on machines that have everything, nothing or something broken; `mmaccel recommend` of one."""

import functools
import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel import models
from mmaccel.backends import flash, select
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.operator import KERNELS
from mmaccel.cli.choices import parse_size
from mmaccel.core import costs, rates
from mmaccel.models import recommend, rehearsal
from tests import SOURCES, python
from tests.cli import Call
from tests.spies import broken


@pytest.fixture
def examined(call: Call) -> Callable[[], dict[str, Any]]:
    return functools.partial(call.object, "doctor", "--json")


@pytest.fixture
def gpu(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An L4, as far as PyTorch tells."""
    device.name, device.total_memory, device.multi_processor_count = "NVIDIA L4", 22 << 30, 58
    device.shared_memory_per_block_optin, device.shared_memory_per_multiprocessor = 99 << 10, 100 << 10
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu(examined: Callable[[], dict[str, Any]], call: Call) -> None:
    found = examined()
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["device"]["type"] == "cpu" and found["device"]["why"]
    assert set(found["backends"]) == set(select.BACKENDS) and set(found["kernels"]) == set(KERNELS.values())
    assert {name for name, one in found["backends"].items() if one["auto"]} == {select.default_backend("cpu")}
    assert (
        found["backends"]["triton"]["why"] == "it needs a CUDA device" == found["kernels"][KERNELS["hopper"]]
    )
    assert found["video"]["PyAV"] is None and found["lab"] == found["versions"]["mmaccel"]
    assert Path(found["costs"]["file"]).name == "costs.json"
    status, told, err = call("doctor")
    assert status == 0 and err == ""
    assert all(
        title in told for title in ("problems", "versions", "device", "backends", "kernels", "video", "more")
    )
    assert "not used: it needs a CUDA device" in told
    assert all(name in told for name in (*found["versions"], *found["kernels"]))


def test_with_a_gpu(gpu: None, examined: Callable[[], dict[str, Any]], monkeypatch) -> None:
    found = examined()
    device = {"name": "NVIDIA L4", "gpus": 2, "architecture": "sm_89", "compute_capability": "8.9"}
    device |= {"memory_bytes": 22 << 30, "shared_memory_bytes": 99 << 10, "cuda": "13.0"}
    assert device.items() <= found["device"].items()
    used = {name for name, one in found["backends"].items() if one["auto"]}
    assert used == {
        name for name, why in select.why_unusable("cuda").items() if why is None and name != "reference"
    }
    assert {"triton", "flex"} <= used and "triton comes before it" in found["backends"]["reference"]["why"]
    row = operators.find_architecture("sm_89")
    assert found["backends"]["flash"] == {"auto": False, "why": row.lacks["flash"]}
    for name, what in KERNELS.items():
        assert found["kernels"][what] == row.lacks.get(name, found["kernels"][what])
    assert found["kernels"][KERNELS["triton"]] is None

    broken(monkeypatch, torch.cuda, "get_device_properties", RuntimeError("CUDA driver error\nmore of it"))
    operators.find_device_limits.cache_clear()
    found = examined()
    assert found["device"]["type"] == "cpu" and found["backends"]["reference"]["auto"]
    assert "the GPU cannot be used: RuntimeError: CUDA driver error" in found["problems"]


def test_what_is_not_installed_is_said(
    gpu: None, examined: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in ("triton", "mmaccel_lab", "flash-attn"):
            raise metadata.PackageNotFoundError(name)
        return "99.0" if name == "av" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["triton>=3.6", "av<20", "nothing; extra == 'dev'"]
    )
    monkeypatch.setattr(operators, "find_spec", lambda name: None)
    monkeypatch.setattr(flash, "is_installed", lambda: False)
    found = examined()
    assert found["versions"]["triton"] is None and found["lab"] is None
    assert found["backends"]["triton"] == {"auto": False, "why": "it needs triton"}
    assert found["kernels"][KERNELS["triton"]] == "triton is not installed"
    assert found["kernels"][KERNELS["flash_2"]] == "flash-attn is not installed"
    assert "mmaccel needs triton>=3.6; it is not installed" in found["problems"]
    assert "mmaccel needs av<20; 99.0 is installed" in found["problems"]


def test_a_torchvision_of_another_torch_is_a_problem(
    examined: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99.0" if name == "torchvision" else real(name))
    for declared, count in (["nms"], 1), ([], 0):
        monkeypatch.setattr(models, "DECLARED", declared)
        assert sum("import mmaccel before transformers" in one for one in examined()["problems"]) == count


def test_what_is_broken_is_said(tmp_path: Path) -> None:
    """A Triton that was built for something else: everything but that is still told."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(
        "raise ImportError('undefined symbol: x')", encoding="utf-8"
    )
    paths = os.pathsep.join([str(tmp_path), SOURCES])
    found = json.loads(python("-m", "mmaccel", "doctor", "--json", PYTHONPATH=paths).stdout)
    told = f"triton {metadata.version('triton')} cannot be imported: ImportError: undefined symbol: x"
    assert told in found["problems"]
    assert not found["backends"]["triton"]["auto"] and found["backends"]["reference"]["why"]


FILM = ("recommend", "--minutes", "60", "--questions", "5", "--device", "h200", "--host-memory", "64GB")


def test_it_names_one_preset_and_says_what_does_not_fit(call: Call) -> None:
    status, out, err = call(*FILM, "--memory", "24GB", "--model", "llava-onevision-7b")
    assert (status, err) == (0, "")
    assert "take film-many-questions: no other fits: " in out and out.count("lacks") == 2
    assert "captions: no, for it takes a draft model" in out
    told = call.object(*FILM, "--memory", "80GiB", "--draft", "qwen2.5-vl-3b", "--json")
    assert set(told["presets"]) == {"exact", "long-video", "film-many-questions", "captions", "everything"}
    assert told["frames"] == 1800 and told["take"] in told["presets"]
    assert told["presets"][told["take"]]["fits"]
    live = call.object(*FILM, "--live", "--frames", "40", "--json")
    assert live["take"] == "stream" and live["frames"] == 40
    only = call.object(*FILM, "--lossless", "--json")
    assert set(only["presets"]) == {"exact"}
    sizes = [parse_size(text, "") for text in ("24GB", "1.5 gib", "2000000")]
    assert sizes == [24 * 10**9, 3 << 29, 2 * 10**6]


def test_of_a_cpu_it_counts_one_memory(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(rates.DEVICES["h200"], name="cpu", products={256: 1e11, 1024: 2e11})
    monkeypatch.setitem(rates.DEVICES, "slow", slow)
    words = ("recommend", "--minutes", 60, "--questions", 5, "--device", "slow", "--host-memory", "64GB")
    status, out, _ = call(*words, "--memory", "24GB")
    head, _, title, first, *_ = out.splitlines()
    frames = "1800 frames of 252x448 pixels (60 minutes at 0.5 a second; --fps takes another number)"
    assert status == 0 and head == f"qwen2.5-vl-7b on cpu, {frames}:"
    assert "memory" in title and "host" not in title and " h " in first and "Nothing fits" not in first
    lacks = call.object(*words, "--memory", "24GB", "--json")["presets"]["exact"]
    assert lacks["lacks_device_bytes"] > 0 == lacks["lacks_host_bytes"]
    assert f"lacks {lacks['lacks_device_bytes'] / 1e9:.1f} GB of memory" in first


def test_of_a_device_of_this_machine_short_sessions_are_run(call: Call, monkeypatch) -> None:
    """For the presets that may be recommended, and told of while they run, beside the table; of a known device none is."""
    heard: list[Any] = []

    def sessions(
        device: Any, place: Any, sizes: Any, model: Any, size: Any, recipes: Any, work: Any, say: Any = str
    ) -> Any:
        heard.append((place.type, model, size, [one.kv.name for one in recipes], work.questions))
        say("measuring 3 kinds of sessions")
        once = rates.MeasuredOverhead(
            read=(0.0,) * 6, question=(0.0,) * 6, step=(0.0,) * 6, first=((1.5, 0.0),)
        )
        return replace(device, sessions={costs.overhead_key(one, work): once for one in recipes})

    monkeypatch.setattr(recommend, "device_rates_of", lambda name, sizes: rates.DEVICES["h200"])
    monkeypatch.setattr(rehearsal, "add_measured_overheads", sessions)
    words = ("recommend", "--minutes", "60", "--questions", "5", "--host-memory", "64GB")
    status, out, err = call(*words, "--device", "cpu", "--memory", "80GB")
    assert status == 0 and "take " in out and err == "measuring 3 kinds of sessions\n"
    assert heard == [("cpu", "qwen2.5-vl-7b", (252, 448), ["full", "full", "mosaic"], 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assumed = call(*words, "--memory", "80GB")[2].splitlines()[0]
    assert assumed.startswith("assumes qwen2.5-vl-7b on this machine's CPU; --model and --device name others")
    short = call(*words, "--device", "h200", "--model", "tiny-qwen")[2]
    assert "tokens a step of time, as in a short video" in short
    heard.pop()
    told = call.object(*words, "--device", "cpu", "--memory", "80GB", "--json")["presets"]["exact"]
    assert told["once_s"] == [1.5] and told["first_s"] > told["question_s"] + told["read_s"] + 1.4
    assert call(*words, "--device", "h200")[0] == 0 and len(heard) == 2
