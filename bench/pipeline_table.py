"""The tables of docs/speed.md from rows of `decode_gpu.py pipeline`, in the order in which they were measured.

    python bench/pipeline_table.py --rows bench/results/pipeline_h200x2_202611.jsonl

Sequences in turns are held against plain steps of a batch of as many (`over_batched`), and against nothing in rows that have
none. Tokens a second are all tokens of a row's draws over all their seconds, with the standard error; where a row has
no draws of its own, what it says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from pair import spread

Row = Mapping[str, Any]
DECODE = ("tree", "way", "window", "draws", "tokens a second", "over alone", "of the simulator's", "kept")
WHOLE = ("tree", "way", "window", "first token", "tokens a second", "over alone", "512 tokens", "end to end")
WAYS = {"parallel": "`parallel`", "sequential": "`sequential`, whole video", "specvlm": "SpecVLM"}
PRUNED = WAYS | {"sequential": "`sequential`"}
"""Of a tenth of the video."""
PAIRS = {
    ("llava-onevision-72b", "llava-onevision-7b"): "7B before 72B",
    ("llava-onevision-7b", "llava-onevision-0.5b"): "0.5B before 7B",
}
"""Of all others it is 7B before 32B."""
THROUGH = ("end", "one device")
"""Cases of whole generations."""


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file, each with the `tree` that was measured."""
    rows, tree = [], None
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tree = row["environment"]["commit"] if "environment" in row else tree
        rows.append({**row, "tree": tree})
    return rows


def alone_per_s(row: Row) -> float:
    """Tokens a second that the target says alone: what the row is held against."""
    return row["tokens_per_s"] / row.get("speedup", 1.0)


def gain(row: Row) -> tuple[float, float | None]:
    """How much faster than the target alone, and the standard error of that."""
    pace, error = spread(row["each_per_s"]) if "each_per_s" in row else (row["tokens_per_s"], None)
    alone = alone_per_s(row)
    return pace / alone, None if error is None else error / alone


def name(row: Row) -> str:
    """What a row of decoding measured."""
    if row["case"] == "self":
        return (
            f"{row['target'].removeprefix('qwen2.5-vl-')} before itself, {row['columns'][0] >> 10}k columns"
        )
    if row["case"] == "batch":
        return f"{row['sequences']} sequences"
    pair = PAIRS.get((row.get("target", ""), row.get("draft", "")))
    return WAYS.get(row["case"], row["case"]) + (f", {pair}" if pair else "")


def window(row: Row) -> str:
    """The window that was asked for, or that it was measured."""
    if "asked" in row and row["asked"] is None:
        return f"measured, {row['window']}"
    return str(row.get("window", ""))


def plus_minus(value: float, error: float | None, places: int) -> str:
    """A figure with its standard error, where there is one."""
    return f"{value:.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")


def decoding(row: Row) -> tuple[str, ...]:
    """The cells of a way of decoding."""
    over, error = gain(row)
    alone = alone_per_s(row)
    held = plus_minus(over, error, 2) + " x"
    if row["case"] == "batch":
        held = f"{row['over_batched']:.2f} x of a plain batch" if "over_batched" in row else ""
    return (
        row["tree"],
        name(row),
        window(row),
        str(len(row["each_per_s"])) if "each_per_s" in row else "",
        plus_minus(over * alone, None if error is None else error * alone, 1),
        held,
        f"{over / row['simulated']:.2f}" if "simulated" in row else "",
        f"{row['kept_share']:.3f}" if "kept_share" in row else "",
    )


def whole(row: Row) -> tuple[str, ...]:
    """The cells of a whole generation."""
    held = row["counters"].get("window")
    here = row["case"] == "one device"
    way = (PRUNED if here else WAYS).get(row["way"], row["way"])
    return (
        row["tree"],
        f"{way}, one device" if here else way,
        f"{held:.0f}" if held else "",
        f"{row['ttft_s']:.2f} s",
        f"{row['tokens_per_s']:.1f}",
        f"{row['speedup']:.2f} x",
        f"{row['seconds']:.2f} s",
        f"{row['end_to_end']:.2f} x",
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    marks = ["---" if place < 3 else "---:" for place in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, marks, *rows))


def tables(rows: Iterable[Row]) -> tuple[str, str]:
    """That of decoding after prompts that are taken to have been read, and that of whole generations."""
    told = [row for row in rows if "tokens_per_s" in row]
    after = [decoding(row) for row in told if row["case"] not in THROUGH]
    through = [whole(row) for row in told if row["case"] in THROUGH and row["way"] != "eager"]
    return markdown(DECODE, after), markdown(WHOLE, through)


def main(argv: Sequence[str] | None = None) -> None:
    """Print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", required=True, help="a file of rows")
    print(*tables(read(parser.parse_args(argv).rows)), sep="\n\n")


if __name__ == "__main__":
    main()
