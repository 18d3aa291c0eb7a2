"""The table of pattern, memory and draft, alone and together, from the rows of `memories.py --plan systems`, as Markdown.

A share right is the mean over films of a film's share, its 95% interval a bootstrap over films; a difference is that of the
same films. Times and memory are medians of the rows that the fewest processes wrote; quote those by one process alone.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mmaccel_lab.eval.stream import KINDS

Row = Mapping[str, Any]
Shares = dict[str, dict[str, dict[int, float]]]
"""By system, kind of question ("all": their mean) and film, by its seed: the share right."""

NOTHING, EVERYTHING, MEMORY, PLUS = "nothing", "sparse + memory + draft", "memory", " + draft"
REQUIRED = {500: -2.0, 4000: -4.0}
"""By the frames of a film, from so many on: how many points the lower bound may be below the best memory alone, and on order
below nothing."""


def paired(
    one: Mapping[int, float], other: Mapping[int, float], draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """The mean of `one` less `other`, film by film, and its 95% interval by bootstrap over films."""
    gaps = torch.tensor([of_one - other[film] for film, of_one in one.items()], dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    again = gaps[torch.randint(len(gaps), (draws, len(gaps)), generator=g)].mean(1)
    low, high = torch.quantile(again, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(gaps.mean()), low, high


def markdown(rows: Iterable[Row]) -> str:
    """Tables for each length; only films count that every system was asked about."""
    found = sorted(rows, key=lambda row: row.get("place", 0))
    watched = [row for row in found if row.get("what") == "watch"]
    names = list(dict.fromkeys(row["memory"] for row in watched))
    films = defaultdict[tuple[int, int], set[str]](set)
    for row in watched:
        films[row["frames"], row["seed"]].add(row["memory"])
    whole = {film for film, asked in films.items() if len(asked) == len(names)}
    lines: list[str] = []
    for frames in sorted({length for length, _ in whole}):
        some = [
            row for row in found
            if row.get("what") in ("answer", "watch") and row["frames"] == frames and (frames, row["seed"]) in whole
        ]  # fmt: skip
        lines += [*_length(frames, some, names), ""]
    return "\n".join(lines)


def _length(frames: int, rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    by = {(row["memory"], row["seed"], row["question"]): row for row in rows if row["what"] == "answer"}
    shares = _shares(by.values())
    kinds = [kind for kind in (*KINDS, "all") if kind in shares[names[0]]]
    per = [sum(row["kind"] == kind for row in by.values()) // len(names) for kind in kinds[:-1]]
    count = len({row["seed"] for row in rows})
    asked = [f"{kind} ({n})" for kind, n in zip(kinds, [*per, sum(per)], strict=True)]
    yield f"{count} films of {frames:,} frames; share right (95%), how many questions in brackets:\n"
    yield from _table(asked, ((name, [_share(shares[name][kind]) for kind in kinds]) for name in names))
    yield f"\nThe same films, points of *{EVERYTHING}* over each other:\n"
    gaps = {
        name: [paired(shares[EVERYTHING][kind], shares[name][kind]) for kind in kinds]
        for name in names
        if name != EVERYTHING
    }
    told = "{:+.1f} ({:+.1f} to {:+.1f})".format
    yield from _table(kinds, ((name, [told(*gap) for gap in some]) for name, some in gaps.items()))
    yield ""
    best = max(
        (name for name in names if name.startswith(MEMORY) and " + " not in name),
        key=lambda name: statistics.fmean(shares[name]["all"].values()),
    )
    least = next((REQUIRED[length] for length in sorted(REQUIRED, reverse=True) if frames >= length), None)
    for against, kind in ((best, "all"), (NOTHING, "order")):
        low = gaps[against][kinds.index(kind)][1]
        mark = "" if least is None else f"; {least:+.0f} required: {'met' if low >= least else 'missed'}"
        yield f"- Over *{against}*, {kind}: lower bound {low:+.1f} points{mark}."
    for name in names:
        if name + PLUS in names:
            same = [
                by[name + PLUS, *key]["said"] == row["said"] for (who, *key), row in by.items() if who == name
            ]
            yield f"- *{name + PLUS}* and *{name}* gave the same text to {sum(same)} of {len(same)} questions."
    yield from _costs(rows, names)


def _shares(answers: Iterable[Row]) -> Shares:
    right: dict[tuple[str, str, int], list[bool]] = defaultdict(list)
    for row in answers:
        right[row["memory"], row["kind"], row["seed"]].append(row["right"])
    shares: Shares = defaultdict(lambda: defaultdict(dict))
    for (name, kind, film), some in right.items():
        shares[name][kind][film] = 100 * sum(some) / len(some)
    for name in list(shares):
        own = shares[name]
        for film in {film for some in own.values() for film in some}:
            own["all"][film] = statistics.fmean(some[film] for some in list(own.values()) if film in some)
    return shares


def _costs(rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    """Times and memory."""
    few = min(row["processes"] for row in rows)
    heads = (
        "film in, s",
        "first token, ms",
        "tokens/s",
        "target steps/token",
        "pairs kept",
        "device, MiB",
        "host, MiB",
    )
    yield f"\nMedians by {few} process{'es' if few > 1 else ''} at a time; memory beside the models' and the frames':\n"

    def told(name: str) -> list[str]:
        own = [row for row in rows if row["memory"] == name and row["processes"] == few]
        watched = [row for row in own if row["what"] == "watch"]
        return [
            _middle((row["seconds"] for row in watched), "{:.2f}"),
            _middle((1e3 * row["ttft_s"] for row in own if row["what"] == "answer"), "{:.1f}"),
            _middle((row["tokens_per_s"] for row in watched), "{:.0f}"),
            _middle((row["steps"] for row in watched), "{:.2f}"),
            _middle((row["kept"] for row in watched), "{:.1%}"),
            _middle((row["device_bytes"] and row["device_bytes"] / 2**20 for row in watched), "{:.0f}"),
            _middle((row["host_bytes"] / 2**20 for row in watched), "{:.0f}"),
        ]

    yield from _table(heads, ((name, told(name)) for name in names))


def _middle(values: Iterable[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if known else ""


def _share(films: Mapping[int, float]) -> str:
    mean, low, high = paired(films, dict.fromkeys(films, 0.0))
    return f"{mean:.1f}% ({low:.1f} to {high:.1f})"


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    yield "| | " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * len(heads)
    for name, cells in rows:
        yield f"| {name} | " + " | ".join(cells) + " |"
