"""What a model gains that drafts for itself over a part of the video: T_p / T_q by the bytes of a step, and the simulator.

A step that is bound by memory reads all weights once, whoever runs it; a pruned draft of the same weights saves its part of
the cache alone. Where that part is small the ratio is near 1, and the pipeline has nothing to hide the draft under.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.models import shapes
from mmaccel_lab.eval import simulate

COLUMNS = (25_088, 100_352, 262_144)
"""Tokens of context at which the paper's self-speculation is asked about."""


@dataclass(frozen=True)
class Gain:
    """Of one length: T_p / T_q, and the best window with its speed-up over decoding alone."""

    columns: int
    ratio: float
    window: int
    speedup: float

    @property
    def worth(self) -> bool:
        """Whether any window is faster than decoding alone."""
        return self.speedup > 1.0 + 1e-6


def gains(
    shape: str = "qwen2.5-vl-7b", keep: float = 0.9, share: float = 0.1, columns: Sequence[int] = COLUMNS
) -> list[Gain]:
    """For each context of `columns` tokens what a model of `shape` in bfloat16 gains that drafts for itself over `share` of
    them, each drafted token kept with chance `keep`; steps take what their bytes take. No weight is made."""
    model = shapes.build_model(shape, vision_layers=1, device="meta")
    form = adapter_for(model).geometry(model)
    column = 2 * form.layers * form.kv_heads * form.head_dim * next(model.parameters()).dtype.itemsize

    def step(length: float) -> float:
        return answer.min_decode_step_s(model, column * length, 1.0)

    found = []
    for count in columns:
        costs = simulate.Costs(step=step(count), draft=step(share * count))
        found.append(Gain(count, costs.ratio, *simulate.best(keep, costs, parallel=True)))
    return found


def markdown(rows: Sequence[Gain]) -> str:
    """The rows as a table, figures to two places."""
    lines = ["| columns | T_p / T_q | best window | speed-up | used |", "| ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        used = "yes" if row.worth else "no"
        lines.append(f"| {row.columns} | {row.ratio:.2f} | {row.window} | {row.speedup:.2f} | {used} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    print(markdown(gains()))


if __name__ == "__main__":
    main()
