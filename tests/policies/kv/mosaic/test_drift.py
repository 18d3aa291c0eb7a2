"""What enters the next layer is foretold by what the last question showed."""

from __future__ import annotations

import torch

from mmaccel.policies.kv._prefetch import QueryPrediction

LAYERS, WORDS = 3, 5
COUNT = torch.tensor([WORDS])


def drifting() -> QueryPrediction:
    return QueryPrediction(LAYERS, 4, torch.device("cpu"))


def states(seed: int) -> torch.Tensor:
    return torch.randn(1, WORDS, 4, generator=torch.Generator().manual_seed(seed))


def foretold(drift: QueryPrediction, layer: int, words: torch.Tensor) -> torch.Tensor:
    """By rows of which the last ones are no words."""
    drift.entered(layer)
    rows = torch.cat([words, torch.full((1, 3, 4), torch.nan)], 1)
    return drift.next(layer, rows, COUNT)[:, :WORDS]


def ask(drift: QueryPrediction, start: torch.Tensor, added: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is foretold at each layer, when layers add `added` to all rows."""
    told = []
    for layer in range(len(added) + 1):
        told.append(foretold(drift, layer, start + sum(added[:layer], torch.zeros(4))))
    drift.settle()
    return told


def test_what_layers_add_alike_is_foretold_from_the_second_question_on() -> None:
    drift, added = drifting(), [torch.arange(4.0), torch.tensor([0.0, -1.0, 2.0, 5.0])]
    first, start = states(1), states(2)
    plain = ask(drift, first, added)
    assert torch.equal(plain[0], first)
    told = ask(drift, start, added)
    for layer in range(2):
        torch.testing.assert_close(told[layer], start + sum(added[: layer + 1], torch.zeros(4)))
    # Nobody saw what comes after the last layer.
    torch.testing.assert_close(told[2], start + sum(added, torch.zeros(4)))


def test_a_layer_s_words_are_moved_by_what_it_added_in_the_mean() -> None:
    drift = drifting()
    before, after = states(3), states(4)
    foretold(drift, 0, before)
    foretold(drift, 1, after)
    drift.settle()
    moved = (after - before).mean(1, keepdim=True)
    torch.testing.assert_close(foretold(drift, 0, before), before + moved)


def test_a_question_that_broke_off_tells_nothing_of_layers_it_did_not_reach() -> None:
    drift = drifting()
    foretold(drift, 0, states(5))
    drift.settle()
    foretold(drift, 1, states(6))
    drift.settle()
    assert torch.equal(foretold(drift, 0, states(7)), states(7))


def test_of_another_stream_nothing_is_known() -> None:
    drift = drifting()
    ask(drift, states(8), [states(9)[0, 0]])
    assert not torch.equal(foretold(drift, 0, states(8)), states(8))
    drift.clear()
    assert torch.equal(foretold(drift, 0, states(8)), states(8))
