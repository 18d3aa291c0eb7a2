"""Train, evaluate and export the tiny models: `python -m mmaccel_lab.train --help`."""

from __future__ import annotations

import time

_BEGAN = time.monotonic()

import argparse  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from mmaccel.core.errors import MmaccelError  # noqa: E402
from mmaccel_lab.tiny.configs import SPECS  # noqa: E402


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mmaccel_lab.train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in (*SPECS, "all"):
        told = "train every tiny model, one a GPU" if name == "all" else f"train {name}"
        one = commands.add_parser(name, help=told, description=told)
        add = one.add_argument
        add("--out", type=Path, required=True, help="folder of checkpoint.pt, curve.json and export/")
        add("--seconds", type=float, default=540.0, help="wall clock of the whole run (default 540)")
        add("--device", help="cuda or cpu (default: cuda where there is one)")
        add("--seed", type=int, default=0)
        add("--workers", type=int, help="processes that make samples (default: 12, on the CPU 0)")
        add("--eager", action="store_true", help="do not compile (a GPU run compiles)")
        add("--budget", type=int, help="frames a step (default: 2048, on the CPU 48)")
        add("--longest", type=int, help="longest video in frames (default: 4096, on the CPU 24)")
        add("--rate", type=float, default=1e-3, help="peak learning rate (default 0.001)")
        add("--stop-at", type=float, default=1.0, help="fraction of the schedule this run ends at")
        add("--begin-at", type=float, help="fraction of the schedule this run begins at")
        add("--resume", type=Path, help="--out folder of the run to continue (of 'all': its --out)")
        add("--pack", type=Path, help="also write <folder>/<name>.tar of the exported model")
        if name != "all":
            add("--initial", type=Path, help="exported folder whose weights to start from")
            add("--steps", type=int, help="a schedule of so many steps instead of the clock")
        else:
            add("--only", nargs="+", choices=list(SPECS), default=list(SPECS), help="which models")
    test = commands.add_parser("test", help="evaluate an exported folder")
    test.add_argument("folder", type=Path)
    test.add_argument("--quick", action="store_true")
    test.add_argument("--lossy", type=float, default=0.0, help="strength of a codec loss, 0 to 1")
    test.add_argument("--device")
    export = commands.add_parser("export", help="write the folder of a checkpoint")
    export.add_argument("run", type=Path, help="--out folder of a run")
    export.add_argument("folder", type=Path)
    card = commands.add_parser("card", help="write the model card of an exported folder again")
    card.add_argument("folder", type=Path)
    card.add_argument("--rows", type=Path, help="file that `mmaccel-lab eval table --out` wrote")
    install = commands.add_parser("install", help="copy the exported models to where the package finds them")
    install.add_argument("runs", type=Path, help="--out folder of `all`")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        from mmaccel_lab.train import runs

        if options.command == "all":
            return runs.train_all(options, _BEGAN)
        if options.command == "test":
            runs.test(options.folder, options.quick, options.lossy, options.device)
        elif options.command == "card":
            runs.card(options.folder, options.rows)
        elif options.command == "install":
            runs.install(options.runs)
        elif options.command == "export":
            runs.export_run(options.run, options.folder)
        else:
            runs.train(options, _BEGAN)
    except MmaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
