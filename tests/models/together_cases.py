"""A shared step by its kernels, interpreted, as on a device. `tests/backends/test_triton.py` runs this."""

from contextlib import ExitStack

import pytest
import torch

from mmaccel.backends.ops import operator
from mmaccel.core.decoding import replay
from mmaccel.models.together import BatchedDecodeSteps
from tests.models.test_together import BUILD, opened


@pytest.mark.parametrize("name", ["qwen", pytest.param("qwen3_vl", marks=pytest.mark.slow), "qwen3_5"])
@torch.no_grad()
def test_the_table_alone_says_where_memories_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works = replay.CudaGraphCache.__init__

    def captured(self: replay.CudaGraphCache, device: torch.device) -> None:
        works(self, device)
        self.works = True

    monkeypatch.setattr(replay.CudaGraphCache, "__init__", captured)
    monkeypatch.setattr(replay.CudaGraphCache, "__call__", lambda self, name, work, **how: work())
    monkeypatch.setattr("mmaccel.core.memory.buffers.ROOM_MIN", 9)
    model = BUILD[name](layers=2)
    with ExitStack() as stack:
        ours, theirs = opened(stack, model, ["text", "video", "image"], name)
        # The plain rows are the model's own, for it has no kernels here.
        monkeypatch.setattr(operator, "why_triton_unusable", lambda device: None)
        together = BatchedDecodeSteps.find_or_create(ours[0][0])
        for some, sizes in (((0, 1, 2), (1, 1, 1)), ((2, 0), (3, 1)), ((1,), (5,)), ((1, 2, 0), (1, 1, 1))):
            ids = [torch.arange(3 + n, 3 + n + size)[None] for n, size in zip(some, sizes, strict=True)]
            found = together([ours[n][0] for n in some], ids)
            assert all(not caches.pairs for part in together._parts for caches, _ in part.buffers)
            with monkeypatch.context() as plainly:
                plainly.setattr(operator, "why_triton_unusable", lambda device: "not here")
                for n, own, logits in zip(some, ids, found, strict=True):
                    torch.testing.assert_close(logits, theirs[n][0].step(own), atol=2e-4, rtol=1e-4)
