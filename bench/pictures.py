"""Draws every picture of the documentation from rows of bench/results, in one style, for light and dark pages.

    python bench/pictures.py                 # all of them, into docs/pictures
    python bench/pictures.py speed stream    # some
    python bench/pictures.py --check         # exit status 1 where a picture is not that of its rows

A picture is a function from rows to the figures it shows (`facts`) and one that draws them. Each SVG holds a digest of its
facts, so that a test sees, without matplotlib, that a picture is older than its rows. Colours are variables of the SVG: a
page in dark mode shows dark pictures.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import drawing
import maps
from drawing import COLOURS, MEMORIES, MODELS, ROOT, Figure, note, panel, rounded, rows, tick
from timing import documented_parser

OUT = ROOT / "docs" / "pictures"


# ------------------------------------------------------------------ speed by length

TREES = {"model:128k": "34b8180", "model:512k": "e65eab7", "model:1m": "9eb6263"}
"""Which run of several is the one that the pages state."""


def speed_facts() -> list[dict[str, Any]]:
    """Seconds of a prefill by tokens: dense by cuDNN and by flash-attn 4, and with a recipe."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows("prefill_h200_202611"):
        case = str(row.get("case"))
        if case.startswith("short") and "speedup" in row:
            found[row["tokens"]] = {"cuDNN": row["against_s"], "mmaccel": row["median_s"]}
        if TREES.get(case) == row["tree"] and "median_s" in row:
            name = {"sparse": "mmaccel", "dense": "cuDNN", "dense_flash_attn_4": "flash-attn 4"}.get(
                row["way"]
            )
            if name:
                found.setdefault(row["tokens"], {}).setdefault(name, row["median_s"])
    return [{"tokens": tokens, **rounded(times)} for tokens, times in sorted(found.items())]


def speed(facts: Any) -> Figure:
    drawn, axes = panel(
        8.6, 4.6, "Prefill of a 7B model: 13.4 times as fast at 1M tokens, no gain up to 16k",
        "Qwen2.5-VL-7B's language model, random weights, one H200; factors over PyTorch's fastest dense attention, cuDNN",
    )  # fmt: skip
    for name, colour in (("cuDNN", "muted"), ("flash-attn 4", "ink"), ("mmaccel", "blue")):
        told = [(one["tokens"], one[name]) for one in facts if name in one]
        label = {"cuDNN": "dense, cuDNN", "mmaccel": "mmaccel, sparse where it pays"}.get(
            name, f"dense, {name}"
        )
        axes.plot(*zip(*told, strict=True), marker="o", color=COLOURS[colour], label=label, linewidth=2)
    for one in facts:
        text = f"{one['cuDNN'] / one['mmaccel']:.1f} ×"
        axes.annotate(
            text, (one["tokens"], one["mmaccel"]), (0, -15), textcoords="offset points", ha="center", va="top",
            color=COLOURS["blue"], fontsize=11, fontweight="bold",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="seconds", ylim=(0.03, 900))
    axes.set_xscale("log", base=2)
    axes.set_xticks([one["tokens"] for one in facts], [tick(one["tokens"]) for one in facts])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1 s", "1 s", "10 s", "100 s"])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    return drawn


# ------------------------------------------------------------------ a question by length

STREAM = {"rekv, a copy a frame": "ReKV, one copy a frame", "rekv, coalesced": "ReKV, copies together"}


def question_facts() -> dict[str, Any]:
    """p50 and p95 seconds to the first token of a question, by frames watched; and without a memory."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows("stream_h200_202611"):
        if row.get("case") in ("lengths", "whole"):
            whole = row["case"] == "whole"
            name = "no memory (the video again)" if whole else STREAM.get(row["way"], row["way"])
            # Of a length that was timed again the last times count.
            told = [round(row[key], 5) for key in ("p50_s", "p95_s")]
            found.setdefault(name, {})[row["frames"]] = [row["frames"], *told]
    return {name: sorted(told.values()) for name, told in found.items()}


def question(facts: Any) -> Figure:
    drawn, axes = panel(
        8.6, 4.4, "A question takes 25 ms, however long the stream has been",
        "time to the first token, median and 95th percentile; LLaVA-OneVision-7B's shape, 64 frames retrieved, one H200",
    )  # fmt: skip
    colours = dict(zip((*STREAM.values(), "mosaic"), ("orange", "green", "blue"), strict=True))
    for name, told in facts.items():
        frames, middle, late = (list(column) for column in zip(*told, strict=True))
        colour = COLOURS[colours.get(name, "muted")]
        axes.plot(frames, [1e3 * s for s in middle], marker="o", linewidth=2, color=colour, label=name)
        axes.vlines(
            frames, [1e3 * s for s in middle], [1e3 * s for s in late], color=colour, linewidth=4, alpha=0.4
        )
    axes.set(xscale="log", yscale="log", xlabel="frames watched before the question")
    lengths = sorted({int(one[0]) for told in facts.values() for one in told if one[0] not in (256, 512)})
    axes.set_xticks(lengths, [f"{n:,}".replace(",", " ") for n in lengths])
    axes.set_yticks([20, 100, 1000, 10000], ["20 ms", "100 ms", "1 s", "10 s"])
    axes.set_ylim(12, 20000)
    axes.minorticks_off()
    axes.legend(loc="upper right")
    return drawn


# ------------------------------------------------------------------ memories

BUDGETS = (16, 64, 128)


def memories_facts() -> list[dict[str, Any]]:
    """Share right with its interval, over all kinds of question and lengths, by memory and frames retrieved."""
    found = []
    for model in MODELS:
        for row in rows(f"memories_{model}_202611"):
            told = row.get("what") == "mean" and row["length"] == "all" and row["memory"] in MEMORIES
            if told and row["kind"] == "all" and row["budget"] in (None, *BUDGETS):
                found.append({"model": model, **{k: row[k] for k in ("memory", "budget", "questions")}})
                found[-1] |= {k: round(row[k], 4) for k in ("accuracy", "low", "high")}
    return found


def memories(facts: Any) -> Figure:
    drawn, plots = panel(
        8.6, 4.7, "Right answers by memory: mosaic with 16 frames is close to keeping everything",
        "share of questions answered right, with 95% intervals; four kinds, streams of 500 to 2 000 frames, tiny models",
        columns=2,
    )  # fmt: skip
    order = [n for n in dict.fromkeys(MEMORIES) if any(one["memory"] == n for one in facts)]
    colours = dict(zip((None, *BUDGETS), ("muted", "orange", "green", "blue"), strict=True))
    for axes, model in zip(plots, MODELS, strict=True):
        of = [one for one in facts if one["model"] == model]
        for one in of:
            alone = sum(other["memory"] == one["memory"] for other in of) == 1
            place = order.index(one["memory"]) + (0 if alone else 0.24 * (BUDGETS.index(one["budget"]) - 1))
            colour = COLOURS[colours[None if alone else one["budget"]]]
            axes.hlines(place, 100 * one["low"], 100 * one["high"], color=colour, linewidth=2.5)
            axes.plot(100 * one["accuracy"], place, "o", color=colour, markersize=6)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_xlim(0, 102)
        axes.set_yticks(range(len(order)), [MEMORIES[n] for n in order] if model == MODELS[0] else [])
        axes.set_title(
            f"{model}, {of[0]['questions']} questions", fontsize=11, loc="left", color=COLOURS["ink"]
        )
        axes.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100%"])
    for budget in BUDGETS:
        plots[0].plot([], [], "o-", color=COLOURS[colours[budget]], label=f"{budget} frames a question")
    plots[0].plot([], [], "o-", color=COLOURS["muted"], label="one budget only")
    note(drawn, plots[0])
    return drawn


PICTURES: dict[str, tuple[Callable[[], Any], Callable[[Any], Figure]]] = {
    "speed": (speed_facts, speed),
    "question": (question_facts, question),
    "memories": (memories_facts, memories),
    "hard": (maps.hard_facts, maps.hard),
    "needles": (maps.needles_facts, maps.needles),
    "heads": (maps.heads_facts, maps.heads),
    "stream": (maps.stream_facts, maps.stream),
    "architecture": (maps.architecture_facts, maps.architecture),
}


def digest(facts: Any) -> str:
    """What names the figures that a picture shows."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def stale() -> list[str]:
    """Pictures that are missing, or not those of their rows."""
    found = []
    for name, (facts, _) in PICTURES.items():
        path = OUT / f"{name}.svg"
        held = re.search(r"<!-- facts (\w+) -->", path.read_text(encoding="utf-8")) if path.exists() else None
        if held is None or held[1] != digest(facts()):
            found.append(name)
    return found


def write(name: str, folder: Path, png: bool = False) -> Path:
    """Draw one picture into `folder`; as PNG it has the colours of a light page."""
    facts, draw = PICTURES[name]
    told = facts()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{'png' if png else 'svg'}"
    with drawing.style(name):
        drawn = draw(told)
        if png:
            drawn.savefig(path, dpi=110)
            return path
        text = io.StringIO()
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text(drawing.themed(text.getvalue(), digest(told)), encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="which; all by default")
    parser.add_argument("--out", type=Path, default=OUT, help="folder")
    parser.add_argument("--png", action="store_true", help="PNG, light, in place of SVG")
    parser.add_argument(
        "--check", action="store_true", help="draw nothing; name pictures that are not those of their rows"
    )
    given = parser.parse_args(argv)
    if given.check:
        if old := stale():
            sys.exit(f"pictures: {', '.join(old)}: not those of their rows; run python bench/pictures.py.")
        return
    for name in given.names or PICTURES:
        print(write(name, given.out, given.png))


if __name__ == "__main__":
    main()
