"""Two processes that talk through gloo, or nccl: each runs one function, and gives what it returns."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def _rank(
    rank: int, port: int, device: str, work: Callable[..., Any], given: tuple[Any, ...], folder: str
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=RANKS)
    try:
        torch.save(work(*given), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def on_two_ranks(folder: Path, work: Callable[..., Any], *given: Any, device: str = "cpu") -> list[Any]:
    """What ``work(*given)`` returns in each of two processes, each on a `device`; `work` is a function of a module."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    mp.spawn(_rank, (port, device, work, given, str(folder)), nprocs=RANKS)
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(RANKS)]
