"""`mmaccel doctor`: what is installed, what this machine has, what runs on it, and why the rest does not."""

from __future__ import annotations

import platform
import re
import warnings
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Option

from mmaccel import models
from mmaccel.backends import measure, select
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.select import package_version
from mmaccel.cli.console import echo, print_json
from mmaccel.models import shipped

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "flash-attn": "flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
    "av": "av",
    "torchvision": "torchvision",
}
"""Distribution -> the module by which it is used. flash-attn is version 2; torchvision is what stock processors need."""

DRIVERS = {"/proc/driver/nvidia/version": r"\s(\d+\.[\d.]+)\s", "/sys/module/amdgpu/version": r"([\d.]+)"}
"""Where a kernel driver says its version, and what of that file it is."""

DENSE = {"flash_4": "flash-attn-4", "flash_3": "flash-attn-3", "flash_2": "flash-attn"}
"""Dense kernels of `operators.KERNELS` -> the distribution that brings them."""


def _system_report() -> dict[str, Any]:
    """All that `mmaccel doctor --json` prints; what cannot be determined is None and listed under "problems".

    kernels, video  component -> why it is not used here, or None if it is
    costs           where measured costs are cached, and how many measurements there are
    """
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        versions = {"mmaccel": package_version("mmaccel"), "python": platform.python_version()}
        versions |= {name: package_version(name) for name in PACKAGES}
        for name, module in PACKAGES.items():
            try:
                # Each is imported, since one that was built for another PyTorch cannot be.
                if versions[name] is not None:
                    import_module(module)
            except Exception as error:  # whatever a broken package raises
                problems.append(f"{name} {versions[name]} cannot be imported: {_line(error)}")
        if versions["torchvision"] is not None and models.DECLARED:
            problems.append(
                f"torchvision {versions['torchvision']} is built for CUDA, and torch for CPUs: it imports only after "
                "mmaccel; import mmaccel before transformers, or install the torchvision of this torch"
            )
        device = _device(problems)
    # PyTorch warns of a driver that is too old or a device that it cannot use.
    problems += [_line(one.message) for one in heard if "CUDA" in str(one.message)]
    problems += _unmet("mmaccel") + _unmet("torch")
    kernels = {}
    for name, what in operators.KERNELS.items():
        kernels[what] = operators.why_kernels_unusable(name, torch.device(device["type"]))
        package = "flash-attn-4" if name == "flash" else DENSE.get(name, "triton")
        if kernels[what] is None and versions[package] is None and name != "captured":
            kernels[what] = f"{package} is not installed"
    broken = next((one for one in problems if one.startswith("av ")), None)
    store: select.CostFile[measure.Costs] = select.CostFile()
    return {
        "problems": list(dict.fromkeys(problems)),
        "versions": versions,
        "device": device,
        "backends": _backends(device["type"], problems),
        "kernels": kernels,
        "video": {
            "PyAV": "it is not installed" if versions["av"] is None else broken,
            "NVDEC": "mmaccel decodes on the CPU",
        },
        "lab": package_version(shipped.LAB),
        "costs": {"file": str(store.path), "measured": len(store)},
    }


def doctor(as_json: Annotated[bool, Option("--json", help="One JSON object.")] = False) -> None:
    """Show what is installed and what runs on this machine: device, versions, backends, and why one is not used."""
    found = _system_report()
    if as_json:
        print_json(found)
        return
    lab, costs = found["lab"], found["costs"]
    sections: dict[str, dict[str, str]] = {
        "problems": {str(i): text for i, text in enumerate(found["problems"], 1)} or {"none": ""},
        "versions": {name: version or "not installed" for name, version in found["versions"].items()},
        "device": {name: str(value) for name, value in found["device"].items() if value is not None},
        'backends ("auto")': {
            name: f"{'used' if one['auto'] else 'not used'}: {one['why']}"
            for name, one in found["backends"].items()
        },
        "kernels": {name: f"no: {why}" if why else "yes" for name, why in found["kernels"].items()},
        "video": {name: f"no: {why}" if why else "yes" for name, why in found["video"].items()},
        "more": {
            "mmaccel-lab": lab or "not installed",
            "measured costs": f"{costs['measured']} in {costs['file']}",
        },
    }
    wide = max(len(name) for rows in sections.values() for name in rows)
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:{wide}}  {text}".rstrip() for name, text in rows.items()), ""]
    echo("\n".join(lines[:-1]))


def _device(problems: list[str]) -> dict[str, Any]:
    """The GPU that PyTorch takes first, or the CPU and why there is no GPU."""
    found: dict[str, Any] = {"type": "cpu", "name": platform.processor() or platform.machine(), "why": None}
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    try:
        if torch.cuda.is_available():
            device = torch.device("cuda")
            here, row = torch.cuda.get_device_properties(device), operators.architecture_of(device)
            has = operators.find_device_limits(device)
            found |= {"type": "cuda", "name": here.name, "gpus": torch.cuda.device_count()}
            found["architecture"] = row.name
            found["tried"] = "run and timed" if row.has_run else "compiled for it, never run"
            if built["hip"] is None:
                found["compute_capability"] = f"{row.name[3:-1]}.{row.name[-1]}"
            found |= {"memory_bytes": has.memory, "shared_memory_bytes": has.shared}
            found["multiprocessors"] = has.processors
        else:
            cpus = built["cuda"] is None and built["hip"] is None
            found["why"] = "this PyTorch is built for CPUs alone" if cpus else "PyTorch sees no GPU"
    except Exception as error:  # a driver may fail in ways of its own
        problems.append(f"the GPU cannot be used: {_line(error)}")
        found |= {"type": "cpu", "why": "the GPU cannot be used"}
    return found | {"driver": _driver(), **built}


def _driver() -> str | None:
    for path, pattern in DRIVERS.items():
        with suppress(OSError):
            if found := re.search(pattern, Path(path).read_text(encoding="utf-8")):
                return found[1]
    return None


def _backends(device: str, problems: list[str]) -> dict[str, dict[str, Any]]:
    """Of each backend whether "auto" takes it, or measures it, and why."""
    reasons = select.why_unusable(device)
    for name in reasons:
        reasons[name] = reasons[name] or next((one for one in problems if one.startswith(f"{name} ")), None)
    able = [name for name in select.PREFERENCE[device] if reasons[name] is None]
    found: dict[str, dict[str, Any]] = {}
    for name, why in reasons.items():
        if device == "cpu":
            auto, reason = name == able[0], f"the first of {', '.join(able)}"
        else:
            auto = name in able and (name != "reference" or len(able) == 1)
            reason = "measured for each model; the fastest serves"
        why = reason if auto else why
        found[name] = {"auto": auto, "why": why or f"{able[0]} comes before it"}
    return found


def _unmet(distribution: str) -> list[str]:
    """What an installed distribution requires and does not find."""
    from packaging.requirements import Requirement

    found = []
    needs = (metadata.requires(distribution) or ()) if package_version(distribution) is not None else ()
    for need in map(Requirement, needs):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            here = package_version(need.name)
            if here is None or not need.specifier.contains(here, prereleases=True):
                there = "it is not installed" if here is None else f"{here} is installed"
                found.append(f"{distribution} needs {need.name}{need.specifier}; {there}")
    return found


def _line(error: object) -> str:
    """The first line of an error, with its kind, or of a warning."""
    has_kind = isinstance(error, Exception) and not isinstance(error, Warning)
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if has_kind else line
