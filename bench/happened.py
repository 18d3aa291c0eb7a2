"""What must have happened in a stream that is measured, and frames to lengthen it with."""

from __future__ import annotations

import torch
from timing import Log

import mmaccel

MUST = ("recalled", "host_bytes_in")
"""Of any memory that retrieves from the host."""
MUST_PUT_OFF = ("deferred", "singletons")
"""Of mosaic besides; after many questions, which make owed ones, `deferred_splits` too. And `splits` wherever they are
made."""
OFF = 0.9
"""Of a stream's units, at least so many are not on the device."""


def length(window: int) -> int:
    """Frames of a stream of which enough are off the device, under a window of so many."""
    return int(window / (1 - OFF)) + 1


def happened(session: mmaccel.VideoSession, name: str, many: bool) -> dict[str, float]:
    """What shows that a stream was worth measuring, after `many` questions or few; raises `RuntimeError` for what did not
    happen. `name`: of the memory."""
    told = session.counters()
    told["splits"] = sum(told.get(one, 0.0) for one in ("eager_splits", "deferred_splits", "visual_splits"))
    must = ["host_bytes_in"] if name == "offload" else [*MUST]
    if name == "mosaic":
        must += ["splits", *MUST_PUT_OFF, *(["deferred_splits"] if many else [])]
    missing = [one for one in must if not told[one]]
    off = 1 - told["resident"] / told["units"]
    if off < OFF:
        missing.append(f"{OFF:.0%} of the stream off the device, but {off:.1%}")
    if missing:
        raise RuntimeError(f"{name}, a stream that shows too little: no {', no '.join(missing)}")
    return {one: told[one] for one in must} | {"off": off}


def log_happened(log: Log, way: str, session: mmaccel.VideoSession, name: str, many: bool = False) -> None:
    """A row of `happened`."""
    log.row(case="happened", way=way, **happened(session, name, many))


def noise(side: int, count: int, device: torch.device) -> torch.Tensor:
    """[count, 3, side, side] uint8 frames with nothing in them."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randint(256, (count, 3, side, side), generator=draw, device=device, dtype=torch.uint8)
