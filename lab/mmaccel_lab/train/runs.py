"""What the commands do: one run, all of them side by side, evaluation, export."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from mmaccel.core.errors import ModelError
from mmaccel.models.loading import load_model
from mmaccel_lab import tiny
from mmaccel_lab.tiny.configs import SPECS, Spec, build_model, spec_of
from mmaccel_lab.tiny.package import export
from mmaccel_lab.train import evaluate
from mmaccel_lab.train.card import write_card
from mmaccel_lab.train.dialect import Dialect, words
from mmaccel_lab.train.loop import Journal, Options, Trainer

CPU = {"budget": 48, "longest": 24, "workers": 0}
GPU = {"budget": 2048, "longest": 4096, "workers": 12}


def device_of(asked: str | None) -> str:
    """The device to use: what was asked, else a GPU where there is one."""
    if asked is not None and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", asked):
        raise ModelError(f"--device: {asked!r} is not a device; give cpu, cuda or cuda:1.")
    if asked is not None and asked.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError("--device cuda was asked, but torch sees no GPU; leave it out to train on the CPU.")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def train(options: argparse.Namespace, began: float) -> None:
    """One run from start to export. What a broken run had learnt is exported too, before its error is raised."""
    device = device_of(options.device)
    names = {one.name for one in fields(Options)}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    own: dict[str, Any] = {"name": options.command, "began": began, "device": device}
    fuse = device.startswith("cuda") and not options.eager
    usual = GPU if device.startswith("cuda") else CPU
    trainer = Trainer(Options(**{**usual, **given, **own, "fuse": fuse}))
    error: Exception | None = None
    try:
        trainer.run()
    except Exception as caught:
        traceback.print_exc()
        error = caught
    # What is shipped is measured: weights rounded to bf16. The checkpoint above keeps the full ones.
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    ends = began + options.seconds - min(25.0, 0.12 * options.seconds)
    done = not (trainer.stopped or error or options.stop_at < 1)
    scores = trainer.measure(evaluate.FULL, deadline=ends) if done else None
    trainer.journal.save(options.out)
    folder = options.out / "export"
    _export(trainer.model, trainer.spec, folder, scores, trainer.journal.head)
    (folder / "curve.json").write_bytes((options.out / "curve.json").read_bytes())
    if options.pack is not None:
        options.pack.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.pack / f"{options.command}.tar", "w") as pack:
            pack.add(folder, arcname=options.command)
    print(f"[{options.command}] done in {time.monotonic() - began:.0f} s: {folder}", flush=True)
    if error is not None:
        raise error


def _export(
    model: Any, spec: Spec, folder: Path, scores: evaluate.Scores | None, head: dict[str, Any]
) -> None:
    export(model, spec, words(), folder, write_card(spec, model.num_parameters(), scores, head))


def export_run(run: Path, folder: Path) -> None:
    """Write the folder of a run's checkpoint, without evaluating it."""
    file = run / "checkpoint.pt"
    if not file.is_file():
        raise ModelError(f"There is no {file}; give the --out folder of a run.")
    state = torch.load(file, map_location="cpu", weights_only=True)
    spec = spec_of(state["name"])
    model: Any = build_model(spec)
    model.load_state_dict(state["model"])
    _export(model, spec, folder, _last(state["evals"]), state["head"])
    Journal(state["head"], state["losses"], state["evals"]).save(folder)


def _last(evals: list[dict[str, Any]]) -> evaluate.Scores | None:
    return evals[-1]["scores"] if evals else None


def card(folder: Path, rows: Path | None) -> None:
    """Write the card of an exported folder again: its own curve.json, and the table that `mmaccel-lab eval table` wrote."""
    curve = _object(folder / "curve.json", "give the export folder of a run")
    spec = spec_of(curve["model"])
    told = None
    if rows is not None:
        found = _object(rows, "give the file that `mmaccel-lab eval table --out` wrote")
        measured = Path(str(found.get("model")))
        if spec.name not in (measured.name, measured.parent.name) or not found.get("markdown"):
            raise ModelError(
                f"{rows} holds no table of {spec.name}; write one with `mmaccel-lab eval table --out`."
            )
        told = str(found["markdown"])
    model: Any = load_model(folder, dtype=torch.float32)
    text = write_card(spec, model.num_parameters(), _last(curve["evals"]), curve, told)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _object(file: Path, mend: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({type(error).__name__}); {mend}.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds no object; {mend}.")
    return found


def install(runs: Path) -> None:
    """Copy the exported folders of `runs` to where the package looks for its models; each is there whole or not at all."""
    found = [name for name in SPECS if (runs / name / "export" / "model.safetensors").is_file()]
    if not found:
        raise ModelError(f"there is no <name>/export in {runs}; give the --out folder of `all`.")
    for name in found:
        place, fresh = tiny.ROOT / name, tiny.ROOT / f"{name}.part"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(runs / name / "export", fresh)
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
        print(f"{name}: {place}")


def test(folder: Path, quick: bool, lossy: float, asked: str | None) -> None:
    """Print the accuracy table of an exported folder, whose spec is known by its sizes."""
    model: Any = load_model(folder, dtype=torch.float32, device=device_of(asked))
    sizes = model.config.model_type, model.config.text_config.hidden_size
    spec = next((one for one in SPECS.values() if (one.model_type, one.hidden) == sizes), None)
    if spec is None:
        raise ModelError(f"{folder} is none of the tiny models.")
    cases = evaluate.QUICK if quick else evaluate.FULL
    print(evaluate.table(evaluate.evaluate(model, spec, Dialect(spec), cases, lossy=lossy)))


def train_all(options: argparse.Namespace, began: float) -> int:
    """Every model: side by side, one a GPU where there are several; one after another otherwise."""
    device = device_of(options.device)
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    lanes = max(1, min(gpus, len(options.only)))
    rounds = -(-len(options.only) // lanes)
    seconds = (began + options.seconds - time.monotonic()) / rounds
    options.out.mkdir(parents=True, exist_ok=True)
    status = 0
    for first in range(0, len(options.only), lanes):
        running = [
            _launch(options, name, seconds, lane if gpus else None)
            for lane, name in enumerate(options.only[first : first + lanes])
        ]
        for name, process in running:
            code = process.wait()
            print(f"{name}: {'done' if code == 0 else f'failed with status {code}'}", flush=True)
            status = status or code
    return status


def _launch(
    options: argparse.Namespace, name: str, seconds: float, gpu: int | None
) -> tuple[str, subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mmaccel_lab.train", name, "--out", str(options.out / name)]
    command += ["--seconds", f"{seconds:.0f}", *(["--eager"] if options.eager else [])]
    for flag in ("seed", "rate", "stop_at", "begin_at", "workers", "budget", "longest", "pack", "device"):
        value = getattr(options, flag)
        if value is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    if options.resume is not None:
        command += ["--resume", str(options.resume / name)]
    environment = dict(os.environ)
    if gpu is not None:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = devices[gpu]
    log = options.out / f"{name}.log"
    script = subprocess.Popen(command, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    print(f"{name}: process {script.pid}, log {log}", flush=True)
    return name, script
