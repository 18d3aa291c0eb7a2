"""What goes wrong in a draft costs the draft, never the answer; STD drafts from what its paper says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.layout import VIDEO
from mmaccel.core.prefill.prune import observers
from mmaccel.policies.draft import PromptLookup, SparseToDense
from mmaccel.policies.draft.prompt_lookup import _Finder
from mmaccel.policies.draft.sparse_to_dense import _Memory
from mmaccel.policies.kv.full import FullState
from tests.models.tiny_random import BUILD, PROMPTS, prompt
from tests.policies.prune import by_hand

pytestmark = pytest.mark.in_turn("family", 1)


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A model, a prompt, and what the plain model says to it."""
    model = BUILD[request.param](layers=3)
    model.generation_config.eos_token_id = None
    inputs = prompt(request.param, PROMPTS["video"])
    return model, inputs, model.generate(**inputs, max_new_tokens=12, do_sample=False)


class Uncounted(_Finder):
    def counters(self) -> dict[str, float]:
        raise RuntimeError("out of cheese")


@dataclass(frozen=True, kw_only=True)
class Lookup(PromptLookup):
    """A draft of somebody else's, whose counters fail."""

    def open(self, target: Any) -> Uncounted:
        return Uncounted(self.window, self.ngram)


def test_counters_that_fail_lose_no_answer(family) -> None:
    model, inputs, plain = family
    with mmaccel.accelerate(model, draft=Lookup()) as fast:
        with pytest.warns(MmaccelWarning, match="report lacks its counters.*out of cheese"):
            assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
        report = fast.report()
    assert report.draft["failed"] is None and report.draft["counters"] == {}
    assert report.draft["target_steps"] > 0 and "out of cheese" in str(report)


def test_columns_that_cannot_be_taken_lose_no_answer(family, monkeypatch) -> None:
    """The memory runs out in the second layer that the sparse draft copies its columns from."""
    model, inputs, plain = family
    gather, taken = torch.Tensor.gather, []

    def full(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        if self.ndim == 4 and dim == 2:
            taken.append(self)
            if len(taken) == 3:
                raise torch.OutOfMemoryError("out of memory")
        return gather(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "gather", full)
    with mmaccel.accelerate(model, draft=SparseToDense(window=4)) as fast:
        with pytest.warns(MmaccelWarning, match="dropped.*out of memory"):
            assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
        assert "out of memory" in fast.report().draft["failed"]


BETWEEN = [("text", 4), ("video", 5), ("text", 6), ("video", 5)]


@pytest.mark.parametrize("pieces", [PROMPTS["long"], BETWEEN], ids=["after the video", "between two"])
def test_sparse_to_dense_keeps_the_video_that_the_question_attends_to(family, monkeypatch, pieces) -> None:
    """Against eager attention of the rows that see all of the video: the text after it, or the last row."""
    model, _, _ = family
    inputs = prompt("qwen" if "Qwen" in type(model).__name__ else "llava", pieces)
    taken: list[torch.Tensor] = []
    take = _Memory.take

    def seen(self: _Memory, dense: Any, chosen: list[torch.Tensor], length: int) -> None:
        taken.extend(chosen)
        take(self, dense, chosen, length)

    monkeypatch.setattr(_Memory, "take", seen)
    with mmaccel.accelerate(model, draft=SparseToDense(window=4, retention=0.5)) as fast:
        model.generate(**inputs, max_new_tokens=6, do_sample=False)
        layout = fast.adapter.layout(model, inputs)
    with torch.no_grad():
        attention = by_hand.eager(model)(**inputs, output_attentions=True).attentions
    asked, video = observers(layout), (layout.modality[0] == VIDEO).nonzero()[:, 0]
    assert len(taken) == len(attention) == 3
    for columns, weights in zip(taken, attention, strict=True):
        paid = weights[0].unflatten(0, (2, -1))[:, :, asked].mean((1, 2))[:, video]
        for mine, score in zip(columns, paid, strict=True):
            least = score.topk(len(video) // 2).values[-1]
            left = torch.isin(video, mine)
            # Scores that rounding alone tells apart may change places.
            assert int(left.sum()) == len(video) // 2 and score[left].min() >= least - 1e-7


def test_a_drafted_row_is_written_where_it_is_seen() -> None:
    """A step copies its own row, and not what is shown of the video; what follows a verification takes its place."""
    dense, memory, columns = FullState(1), _Memory(1), torch.arange(0, 40, 2)
    whole, drafted = torch.randn(2, 1, 2, 42, 4), torch.randn(3, 2, 1, 2, 1, 4)
    dense.append(0, *whole[..., :40, :])
    memory.take(dense, [columns.expand(2, -1)], 40)
    seen = []
    for row in drafted:
        memory.append(0, *row)
        seen.append(memory.view(0, row[0]))
    assert len({view.value.data_ptr() for view in seen}) == 1 and memory.held_columns() == 23
    want = torch.cat([whole[..., columns, :], *drafted], 3)
    assert torch.equal(torch.stack([seen[-1].key, seen[-1].value]), want)
    dense.append(0, *whole[..., 40:, :])
    memory.follow(dense, dense.length())
    now = memory.view(0, drafted[0, 0])
    assert torch.equal(torch.stack([now.key, now.value]), whole[..., [*columns, 40, 41], :])


@pytest.mark.parametrize(
    "prune", ["visionzip", "fastv", "pyramid_drop", "sparsevlm", {"name": "dycoke", "forget": 0}]
)
def test_of_a_pruned_prompt_each_layer_chooses_among_what_it_holds(prune: Any) -> None:
    """Where all of that is chosen the draft is the target: every token is kept."""
    for name, build in BUILD.items():
        model = build(layers=6)
        model.generation_config.eos_token_id = None
        for weight in (
            w for n, w in model.named_parameters() if "language_model.layers" in n and w.ndim == 2
        ):
            weight.data *= 6  # what it says hangs on what it sees
        inputs = prompt(name, [("text", 6), ("video", 40), ("text", 10)])
        with mmaccel.accelerate(model, prune=prune):
            plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        for share in (1.0, 0.3):
            draft = SparseToDense(window=3, retention=share)
            with mmaccel.accelerate(model, prune=prune, draft=draft) as fast:
                assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
                told = fast.report().draft
            assert told["failed"] is None and told["proposed"] > 0
            assert share < 1 or told["accepted"] == told["proposed"]
