"""The shipped pair in two processes: the plain model's captions, also when the draft's process is killed."""

import os
import signal

import pytest
import torch

import mmaccel
from mmaccel.cli.answer import prompt
from mmaccel.core.errors import MmaccelWarning
from mmaccel.policies.draft import Parallel
from mmaccel.policies.draft.parallel import Pipeline
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.eval.cases import Film

TOKENS = 48


@pytest.fixture(scope="module", params=["tiny-ov", pytest.param("tiny-qwen", marks=pytest.mark.slow)])
def spoken(request, shipped):
    """A trained target, a video's inputs, and what it says of them."""
    name = shipped(request.param)
    model, processor = mmaccel.load_model(name, dtype=torch.float32), mmaccel.load_processor(name)
    (case,) = caption_cases(24, 1, 7)
    with Film() as film:
        video = film.watch(case.world)
    inputs = prompt(processor, case.content(video), model)
    return model, inputs, model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)


def three(inputs, want):
    """Prompts of unequal length, as one batch: what was said so far is part of the later ones. They end at three times."""
    start = inputs["input_ids"].shape[1]
    said = want[0, start:].tolist()
    more_said = (0, 12, 5)
    width = start + max(more_said)
    rows = {name: torch.cat([x] * 3) for name, x in inputs.items()}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in inputs:
            whole = torch.zeros(3, width, dtype=inputs[name].dtype)
            for row, count in zip(whole, more_said, strict=True):
                more = {"input_ids": want[0, start : start + count], "attention_mask": torch.ones(count)}
                row[width - start - count :] = torch.cat(
                    [inputs[name][0], more.get(name, torch.zeros(count)).to(whole.dtype)]
                )
            rows[name] = whole
    ahead = [said[count : count + 24] for count in more_said]
    end = next(
        token
        for token in said
        if all(token in row[3:] and token not in row[:3] for row in ahead)
        and len({row.index(token) for row in ahead}) == 3
    )
    rows |= {"max_new_tokens": 24, "do_sample": False, "eos_token_id": end}
    return rows, [row.index(end) + 1 for row in ahead]


def test_captions_are_the_plain_ones_and_a_killed_draft_loses_none(spoken, monkeypatch):
    """One, and three of one process."""
    model, inputs, want = spoken
    rows, counts = three(inputs, want)
    plain = model.generate(**rows)

    def say() -> torch.Tensor:
        return model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)

    choice = Parallel(
        in_batches="always", model="beside", window=4, threads=1, prune={"name": "uniform", "retention": 0.5}
    )
    with mmaccel.accelerate(model, draft=choice) as fast:
        assert torch.equal(say(), want)
        told = fast.report().draft
        assert told["failed"] is None and told["accepted"] > 0 and told["counters"]["drafted"] > 0
        assert told["counters"]["streak_max"] >= 2
        assert torch.equal(model.generate(**rows), plain)
        told = fast.report().draft
        assert told["failed"] is None and len(told["sequences"]) == 3 and told["accepted"] > 0
        assert [one["new_tokens"] for one in told["sequences"]] == counts
        (worker,) = fast.view._held.values()

        # In mid-window: the draft is at work when the target's third step ends.
        rounds, tail = [], Pipeline.tail

        def kill(self):
            rounds.append(self._busy)
            if len(rounds) == 3:
                os.kill(worker.process.pid, signal.SIGKILL)
            return tail(self)

        with monkeypatch.context() as patch, pytest.warns(MmaccelWarning, match="went|ended|reached"):
            patch.setattr(Pipeline, "tail", kill)
            assert torch.equal(say(), want)
        assert fast.report().draft["failed"] and "DraftError" in fast.report().draft["failed"]
        assert fast.report().new_tokens == want.shape[1] - inputs["input_ids"].shape[1]

        # In the prompt's pass: a new process, killed as soon as it has been told what to read.
        keep = Pipeline.keep

        def kill_reading(self, columns):
            keep(self, columns)
            os.kill(next(iter(fast.view._held.values())).process.pid, signal.SIGKILL)

        with monkeypatch.context() as patch, pytest.warns(MmaccelWarning):
            patch.setattr(Pipeline, "keep", kill_reading)
            assert torch.equal(say(), want)
        assert fast.report().draft["failed"] and fast.report().draft["accepted"] == 0
        last = next(iter(fast.view._held.values()), None)
    assert last is None or last.process.poll() is not None, "off with the recipe, gone is the process"
