"""A question's way through the layers reads nothing back from the device, and issues few operations."""

from collections import Counter
from typing import Any

import pytest
import torch

from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.memory.kv import StreamPass
from mmaccel.core.prefill import attention
from mmaccel.policies.kv import ReKV
from mmaccel.policies.kv._window import Rope
from tests.policies.kv.mosaic.driven import CPU, GEOMETRY, HEAD, LAYERS, WHEEL, Driven
from tests.policies.sparse.test_plans import NoReads, no_lists

VIEWS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "_unsafe_view", "view",
}  # fmt: skip
"""What launches nothing."""


TOLIST = torch.Tensor.tolist


class Counted(NoReads):
    """Counts what would be launched, too; a rotation in place is one kernel, so are attention and what is replayed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()
        for name, of in (("apply_", Rope), ("__call__", CudaGraphCache), ("dense_attend", attention)):
            patch.setattr(of, name, self.as_one(getattr(of, name)))

    def as_one(self, whole: Any) -> Any:
        def one(*given: Any, **named: Any) -> Any:
            outside, self.launched = self.launched, self.replayed
            try:
                return whole(*given, **named)
            finally:
                self.launched = outside
                self.launched[whole.__qualname__] += 1

        return one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "gather_units":
            # The plain one looks at its index; the kernel of a device does not.
            with torch.utils._python_dispatch._disable_current_modes(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", TOLIST)
                func(*args)
            self.launched[name] += 1
            return None
        self.launched[name] += name not in VIEWS
        return super().__torch_dispatch__(func, types, args, kwargs)


def rekv() -> Driven:
    driven = Driven()
    stream = driven.state.stream
    driven.state = ReKV(frames=8, window=5, local=2).open_stream(stream, GEOMETRY, WHEEL, CPU)  # type: ignore[arg-type, assignment]
    driven.run(StreamPass(kind="head", rows=HEAD), lambda layer: driven.noise((layer, -1), HEAD))
    return driven


MOSAIC: dict[str, dict[str, Any]] = {
    "mosaic": {},
    "query": {"prefetch": "query"},
    "no guess": {"prefetch": "off"},
    "no pseudo tokens": {"reps": 0},
    "compact": {"positions": "compact"},
    "looks": {"first_stage": "look"},
    "frames": {"index": "frames"},
    "cosine": {"similarity": "cosine"},
    "words": {"index": {"name": "clusters", "ask_by": "words"}},
}
MOST = {"looks": 25}


@pytest.mark.parametrize("name", ["rekv", *MOSAIC])
def test_a_question_reads_nothing_and_launches_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = rekv() if name == "rekv" else Driven(**MOSAIC[name])
    driven.watch(80)
    driven.state.finish_intake()
    # The addresses of places on the device are told it when they are new.
    for _ in range(2):
        driven.ask(1)
    driven.state.finish_intake()
    made = [(driven.question(2)(layer), driven.hidden(2)(layer)) for layer in range(LAYERS)]
    monkeypatch.setattr(torch.Tensor, "tolist", no_lists)
    with driven.state.question_scope():
        with Counted(monkeypatch) as counted:
            driven.run(driven.stream_pass(), lambda layer: made[layer][0], lambda layer: made[layer][1])
        monkeypatch.undo()
        evidence = driven.state.evidence()
    assert len(evidence) >= 10
    launched = sum(counted.launched.values()) / LAYERS
    assert 10 < launched <= MOST.get(name, 24), counted.launched.most_common()
