"""What goes to a draft's process with the prompt, and that it arrives as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mmaccel.core.decoding.worker import Blob, Message
from mmaccel.core.errors import MmaccelWarning
from mmaccel.policies.draft import _remote_drafter
from mmaccel.policies.draft._remote_drafter import ALIGN, SMALL, pack, unpack
from tests.policies.draft.toy_service import VOCAB


def test_what_travels_with_the_prompt() -> None:
    """Seconds of frames, which some processors give as a list, place the draft's frames as the target's are."""

    class Listening:
        def drain(self) -> list[Message]:
            return []

        def post(self, kind: int, *numbers: int, blob: Callable[[], Sequence[Blob]]) -> None:
            self.inputs, self.warp = unpack(bytearray(b"".join(blob())))

    worker: Any = Listening()
    ids = torch.tensor([[1, 2]])
    given = {"input_ids": ids, "second_per_grid_ts": [0.5, 1.0], "streamer": object(), "use_cache": None}
    _remote_drafter.Remote(worker, VOCAB).begin(given, Halved(torch.tensor([2.0])), False, False, 0)
    assert worker.inputs.keys() == {"input_ids", "second_per_grid_ts"}
    assert worker.inputs["second_per_grid_ts"] == [0.5, 1.0]
    warp = _remote_drafter._unpacked(worker, worker.warp, "meta")
    assert isinstance(warp, Halved) and warp.by.is_meta, "its tensors are where the draft's logits are"
    with pytest.warns(MmaccelWarning, match="give logits processors that can be pickled"):
        _remote_drafter.Remote(worker, VOCAB).begin(given, lambda ids, logits: logits, False, False, 0)
    assert _remote_drafter._unpacked(worker, worker.warp, "cpu") is None


def test_a_prompt_arrives_as_it_was_sent() -> None:
    """All types, views, tensors of no size and of no axes; large ones are not copied out, and begin where they should."""
    g = torch.Generator().manual_seed(0)
    large = torch.randn(2, SMALL // 2, generator=g).to(torch.bfloat16)
    given = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "mask": torch.tensor([True, False, True]),
        "large": large,
        "view": torch.randn(5, 7, generator=g).half()[:, ::2],
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "seconds": [0.1, 2],
        "also": large[:, 1:],
    }
    blob = bytearray(b"".join(pack(given, b"more")))
    inputs, more = unpack(blob)
    assert more == b"more" and list(inputs) == list(given) and inputs["seconds"] == [0.1, 2]
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            assert inputs[name].dtype == x.dtype and torch.equal(inputs[name], x)
    base = torch.frombuffer(blob, dtype=torch.uint8).data_ptr()
    for name in ("large", "also"):
        place = inputs[name].data_ptr() - base
        assert 0 < place < len(blob) and place % ALIGN == 0
    assert not 0 <= inputs["input_ids"].data_ptr() - base < len(blob), "it would hold the whole prompt"


@dataclass
class Halved:
    """A warp that holds a tensor, as some processors do."""

    by: torch.Tensor

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.by
