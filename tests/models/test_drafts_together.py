"""Drafted sequences in steps that they share: drafts propose together, one step judges all, each says what it says alone."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import mmaccel
from mmaccel.core.decoding.batch import AGAIN, Batch, DraftLengthTuner
from mmaccel.core.decoding.draft import DraftStep
from mmaccel.models.together import BatchedDecodeSteps
from tests.models.test_together import CALLS as SOME
from tests.models.test_together import answers as answers_of
from tests.models.tiny_random import PROMPTS, prompt
from tests.models.tiny_random import model as tiny
from tests.spies import beside, crossed, finish, heard

pytestmark = pytest.mark.numeric(by="torch")
KIND = "qwen"
CALLS: list[tuple[str, dict[str, Any]]] = [*SOME[:4], ("image", {"do_sample": False})]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A target, and a draft that is right now and then."""
    target, draft = tiny(KIND, layers=3), tiny(KIND, layers=3)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in draft.parameters():
            one += 0.1 * one.std() * torch.randn(one.shape, generator=noise) if one.numel() > 1 else 0
    return target, draft


def drafts(draft: Any) -> dict[str, dict[str, Any]]:
    return {
        "sequential": {"name": "sequential", "model": draft, "window": 4},
        "unsure": {"name": "sequential", "model": draft, "window": 4, "confidence": 0.02},
        "pruned": {"name": "sequential", "model": draft, "window": 3, "prune": "uv"},
        "text_only": {"name": "text_only", "model": draft, "window": 3},
        "prompt_lookup": {"name": "prompt_lookup"},
        "sparse_to_dense": {"name": "sparse_to_dense", "window": 3},
        "parallel": {"name": "parallel", "model": draft, "window": 3, "process": False},
    }


class Windows(DraftLengthTuner):
    """Of these lengths in turn, whatever the clock says."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.draws = itertools.cycle(lengths)

    def best_length(self, count: int, drafting: int) -> int:
        return next(self.draws)


def answers(model: Any, recipes: list[Any], batch: Batch | None) -> tuple[list[torch.Tensor], list[Any]]:
    """What each of `CALLS` generates with a draft of its own, all at once, and its report; None: one at a time."""
    at_once = batch is not None
    given = model, KIND, batch, CALLS, at_once, recipes, lambda n: 20 + 4 * n
    said, reports = answers_of(*given, abreast=True)
    return said, reports


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """How many rows each sequence has, of each step that is shared."""
    return heard(
        monkeypatch,
        BatchedDecodeSteps,
        "__call__",
        lambda self, runners, ids: tuple(one.shape[1] for one in ids),
    )


@pytest.fixture(scope="module")
def plain(models: tuple[Any, Any]) -> list[torch.Tensor]:
    """What the plain model says to each of `CALLS`."""
    given = [(prompt(KIND, PROMPTS[kind], n), 20 + 4 * n, how) for n, (kind, how) in enumerate(CALLS)]
    return [models[0].generate(**inputs, max_new_tokens=most, **how) for inputs, most, how in given]


@pytest.mark.parametrize("name", drafts(None))
def test_each_says_what_it_says_alone(
    name: str, models: tuple[Any, Any], plain: list[torch.Tensor], rows: list[tuple[int, ...]]
) -> None:
    """Greedy ones are the plain model's whatever the load lets drafts propose; sampled ones draw their own numbers."""
    model, draft = models
    recipe = drafts(draft)[name]
    alone, _ = answers(model, [recipe], None)
    batch = Batch((sizes := list[int]()).append)
    batch.load = Windows(15, 0, 2, *[0] * 9, 1, 4, 15)  # so that drafts rest and catch up
    found, reports = answers(model, [recipe], batch)
    for number, (kind, how) in enumerate(CALLS):
        assert torch.equal(found[number], alone[number]), (kind, how)
        assert how["do_sample"] or torch.equal(plain[number], found[number])
    assert max(sizes) == len(CALLS) and len(batch) == 0
    assert any(len(set(one)) > 1 for one in rows), "targets judge ragged rows in one step"
    if name != "prompt_lookup":  # random words repeat nothing
        assert all(one.draft["accepted"] > 0 and not one.draft.get("failed") for one in reports)


def test_drafts_of_one_model_take_their_steps_together(
    models: tuple[Any, Any], rows: list[tuple[int, ...]]
) -> None:
    """A draft's step has one row or two, a window of three no more than three steps: all drafts are in each."""
    model, draft = models
    batch = Batch((judged := list[int]()).append)
    batch.load = Windows(3)
    answers(model, [drafts(draft)["text_only"]], batch)
    whole = [one for one in rows if len(one) == len(CALLS)]
    assert len(whole) > 2 * sum(count == len(CALLS) for count in judged) > 0


def test_a_draft_that_fails_in_a_shared_step_ends_alone(models: tuple[Any, Any], monkeypatch) -> None:
    """Its sequence goes on without it, and says the same; the others draft on."""
    model, draft = models
    recipe = drafts(draft)["sequential"]
    alone, _ = answers(model, [recipe], None)
    call, failed = BatchedDecodeSteps.__call__, list[Any]()

    def failing(self: BatchedDecodeSteps, runners: Any, ids: Any) -> Any:
        mine = [one for one in runners if one.model is draft]
        if len(mine) == len(CALLS) and not failed:
            failed.append(mine[2])
        if any(one in failed for one in mine):
            raise torch.OutOfMemoryError("no room")
        return call(self, runners, ids)

    monkeypatch.setattr(BatchedDecodeSteps, "__call__", failing)
    batch = Batch()
    batch.load = Windows(4)
    with pytest.warns(mmaccel.MmaccelWarning, match="the draft failed"):
        found, reports = answers(model, [recipe], batch)
    dropped = ["failed" in str(one.draft) and bool(one.draft.get("failed")) for one in reports]
    assert failed and sum(dropped) == 1
    # One that is sampled has the same distribution without a draft, by other random numbers.
    same = [torch.equal(a, b) for a, b in zip(found, alone, strict=True)]
    assert all(
        one or (gone and CALLS[n][1]["do_sample"])
        for n, (one, gone) in enumerate(zip(same, dropped, strict=True))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_that_are_never_said_are_those_in_every_type(dtype: torch.dtype) -> None:
    """Ids above 65,536 have no value of their own in these types; one beyond the draft's vocabulary is none of its."""
    step = DraftStep(None, torch.zeros(1).long(), 151_700, (151_655, 151_999), greedy=False)  # type: ignore[arg-type]
    said = step.reduce_logits(torch.zeros(1, 151_700, dtype=dtype))
    assert (said[0] == -torch.inf).nonzero()[:, 0].tolist() == [151_655]


class Stand:
    """A sequence of so many rounds in `Batch`, whose draft's logits end in an error if it is `bad`."""

    may_adapt_draft_length, needs_draft_prefill, judged, together = False, False, (0, 0), None

    def __init__(self, rounds: int, bad: bool = False, begun: Callable[[], object] = lambda: None) -> None:
        self.left, self.bad, self.ended, self.target, self.dropped = rounds, bad, False, self, 0
        self.begun = begun

    def rows_to_verify(self, most: int | None) -> Any:
        self.begun()
        kind = DraftStep(self, torch.zeros(1).long(), 8, ("?",) if self.bad else ())  # type: ignore[arg-type]
        try:
            yield kind
        except TypeError:
            self.dropped += 1
        return (torch.zeros(1, 1).long(),)

    def length(self) -> int:
        return 0

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, ids.shape[1], 8)

    def verify_logits(self, logits: torch.Tensor) -> None:
        self.left -= 1
        self.ended = self.left <= 0

    def close(self) -> None:
        pass


def test_logits_that_one_draft_cannot_take_are_nothing_to_the_others() -> None:
    """It is told by itself, and may go on without a draft."""
    some: list[Any] = [Stand(3), Stand(3, bad=True), Stand(3)]
    Batch().run(some)
    assert [one.dropped for one in some] == [0, 3, 0] and all(one.ended for one in some)


class Adapts(Stand):
    """One whose draft reads its prompt in the first round in which it drafts."""

    may_adapt_draft_length, needs_draft_prefill = True, True

    def rows_to_verify(self, most: int | None) -> Any:
        self.asked = most
        self.needs_draft_prefill = self.needs_draft_prefill and not most
        yield from ()
        return (torch.zeros(1, 1).long(),)


def test_one_draft_a_round_reads_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the others' tokens wait for one of them at most; and the seconds of such a round tell nothing of windows."""
    batch, seen, took = Batch(), list[list[int]](), list[int]()
    some: list[Any] = [Adapts(6) for _ in range(4)]
    batch.load = Windows(3)
    monkeypatch.setattr(batch.load, "add_round", lambda count, window, *rest: took.append(window))
    offers = batch._offers
    monkeypatch.setattr(
        batch, "_offers", lambda works: (offers(works), seen.append([one.asked for one in works]))[0]
    )
    batch.run(some)
    assert seen == [[3, 0, 0, 0], [3, 3, 0, 0], [3, 3, 3, 0], *[[3, 3, 3, 3]] * 3]
    assert took == [3, 3]


def test_what_one_memory_cannot_take_back_ends_its_sequence_alone() -> None:
    class Together:
        def __call__(self, runners: Any, ids: Any) -> Any:
            if len(runners) > 1:
                raise torch.OutOfMemoryError("no room")
            return [one.step(rows) for one, rows in zip(runners, ids, strict=True)]

    class Stuck(Stand):
        def truncate(self, length: int) -> None:
            if self.bad:
                raise ValueError("it is stuck")

    some: list[Any] = [Stuck(3), Stuck(3), Stuck(3)]
    some[1].bad, together = True, Together()
    for one in some:
        one.together = together
        one.rows_to_verify = lambda most: iter_of((torch.zeros(1, 1).long(),))
    with pytest.raises(ValueError, match="it is stuck"):
        Batch().run(some)
    assert [one.left for one in some] == [0, 3, 0]


def iter_of(offer: Any) -> Any:
    yield from ()
    return offer


class Cold:
    """Steps together, of which so many are the first of their shape."""

    def __init__(self, cold: int) -> None:
        self.cold, self.warm = cold, True

    def __call__(self, runners: Any, ids: Any) -> list[torch.Tensor]:
        self.cold, self.warm = self.cold - 1, self.cold <= 0
        return [torch.zeros(1, one.shape[1], 8) for one in ids]


def test_a_round_that_compiles_or_captures_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a window costs later is not what it costs the first time."""
    batch, one = Batch(), cast(Any, Stand(10))
    # Two steps a round: the draft's and the target's.
    one.may_adapt_draft_length, one.together = True, Cold(12)
    counted = heard(monkeypatch, batch.load, "add_round", lambda *_: 1)
    batch.run([one])
    assert len(counted) == 4


def test_a_call_ends_with_its_answer_though_another_comes_in_its_place() -> None:
    """In the round of its last token a third sequence joins, so that there are as many as before."""
    batch, ends = Batch(), dict[str, int]()
    joined = threading.Event()

    def go(name: str, one: Any) -> None:
        batch.run([one])
        ends[name] = long.left

    def come() -> None:
        if short.left == 1 and not joined.is_set():
            joined.set()
            threads.extend(beside(lambda: go("third", third)))
            while len(batch) < 3:
                pass

    short: Any = Stand(5)
    long: Any = Stand(160, begun=lambda: come() or time.sleep(0.005))
    third: Any = Stand(10_000_000)
    threads = beside(lambda: go("long", long))
    while not batch._led:
        pass
    finish(beside(lambda: go("short", short)))
    assert ends["short"] > 40
    third.left = 1
    finish(threads)


def rounds(
    load: DraftLengthTuner, seconds: Callable[[int, int], float], count: int, keep: float, number: int
) -> float:
    """Tokens a second of `number` rounds whose drafted tokens are kept with chance `keep`."""
    draw, said, taken = torch.Generator().manual_seed(count), 0, 0.0
    for _ in range(number):
        window = load.best_length(count, count)
        hits = (torch.rand(count, window, generator=draw) < keep).long().cumprod(1).sum(1).tolist()
        load.add_round(count, window, seconds(count, window), [(window, kept) for kept in hits if window])
        said, taken = said + count + sum(hits), taken + seconds(count, window)
    return said / taken


@crossed(count=[1, 4, 16, 32], keep=[0.3, 0.8], row_s=[0.0, 1e-4, 1e-3], step_s=[1.2e-3, 5e-2])
def test_the_load_decides_what_is_drafted(count: int, keep: float, row_s: float, step_s: float) -> None:
    """Whatever rows and draft steps cost: never slower than plain rounds by 2%, and close to the best window."""

    def seconds(count: int, window: int) -> float:
        return 6e-3 + row_s * count * (window + 1) + window * step_s

    worth = {
        window: count * sum(keep**n for n in range(window + 1)) / seconds(count, window)
        for window in (0, 1, 3, 7, 15)
    }
    load = DraftLengthTuner()
    rounds(load, seconds, count, keep, 64)
    found = rounds(load, seconds, count, keep, 1500)
    assert found >= 0.98 * worth[0]
    assert found >= 0.93 * max(worth.values())


def test_a_load_that_changes_is_noticed() -> None:
    load, slow = DraftLengthTuner(), [0.0]
    price = lambda count, window: 6e-3 + slow[0] * count * (window + 1) + window * 1e-3  # noqa: E731
    rounds(load, price, 8, 0.8, 600)
    assert load.best_length(8, 8) > 1
    slow[0] = 5e-3
    rounds(load, price, 8, 0.8, 1100)
    assert load.best_length(8, 8) == 0
    slow[0] = 0.0
    rounds(load, price, 8, 0.8, 2100)  # at most twice as many as those in which it did not pay
    assert load.best_length(8, 8) > 1


def test_one_slow_round_does_not_end_a_trial() -> None:
    load, slow = DraftLengthTuner(), [45e-3] * 2  # `rounds` asks twice for the seconds of a round
    rounds(load, lambda count, window: 20e-3 if not window else slow.pop() if slow else 23e-3, 1, 1.0, 40)
    assert load.best_length(1, 1) > 0


def test_what_does_not_pay_is_tried_less_and_less_and_again_when_drafting_paid() -> None:
    load, dear = DraftLengthTuner(), [0.05]
    price = lambda count, window: 6e-3 + dear[0] * window  # noqa: E731
    tries = list[int]()

    def take(number: int) -> None:
        for _ in range(number):
            tries.append(load.best_length(4, 4))
            load.add_round(4, tries[-1], price(4, tries[-1]), [(tries[-1], 0)] * 4 * bool(tries[-1]))

    take(30_000)
    began = [n for n, (a, b) in enumerate(itertools.pairwise(tries)) if b > a == 0]
    assert [b - a for a, b in itertools.pairwise(began)][1:] == [2048, 4096, 8192, 8192]
    dear[0] = 0.0
    rounds(load, price, 4, 1.0, 9000)
    assert load.best_length(4, 4) == 15
    dear[0] = 0.05
    tries.clear()
    take(2 * AGAIN)
    assert any(b > a == 0 for a, b in itertools.pairwise(tries)), "the rest is a short one again"
    assert load.best_length(4, 1) == load.best_length(4, 4) == 0
