"""One attention layer, against attention written out: which rows follow the pattern, which are dense, what is counted.

And a window as a plan: the pairs that the dense operator computes, and no pair twice.
"""

import weakref
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mmaccel.backends import reference, select
from mmaccel.backends.ops import dense_attend
from mmaccel.core.adapter import TokenTree
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill import attention
from mmaccel.core.prefill.attention import MIN_ROWS, AttentionConfig, ForwardPass
from mmaccel.core.prefill.sparse import sliding_window_kernel, window_plan
from mmaccel.core.recipe import Recipe
from tests.backends.oracle import drawn, masked

HEADS, GROUPS, SIZE = 4, 2, 16
SINK, WINDOW, BLOCK = 16, 24, 16
N = 160
PATTERN = {"name": "a_shape", "sink": SINK, "window": WINDOW, "block": BLOCK}


def tensors(rows: int, keys: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, H, rows, D], key and value [B, G, keys, D]."""
    query, key, value = drawn(batch, (HEADS, GROUPS), rows, keys, SIZE, rows * keys)
    return query, key, value


def written_out(
    query: Tensor, key: Tensor, value: Tensor, sees: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Attention where `sees` [B, n, N], in float64; `bias` [m] is added to the scores of the first keys."""
    more = None if bias is None else torch.nn.functional.pad(bias, (0, key.shape[2] - len(bias)))
    return masked(query.double(), key.double(), value.double(), sees[:, None], SIZE**-0.5, more)


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def a_shape(n: int) -> Tensor:
    """[n, n] what A-shape shows: the window, and the first keys."""
    distance = torch.arange(n)[:, None] - torch.arange(n)
    return causal(n) & ((distance < WINDOW) | (torch.arange(n) < SINK))


@dataclass(frozen=True)
class Layer:
    """A configuration, and its layers one call each."""

    config: AttentionConfig

    def attend(
        self, layout: TokenLayout, inputs: tuple[Tensor, Tensor, Tensor], layer: int = 0, **run: Any
    ) -> Tensor:
        start = layout.length - inputs[0].shape[2]
        made = ForwardPass(**{"config": self.config, "layout": layout, "start": start, "state": None, **run})
        return made.attend(layer, *inputs, SIZE**-0.5)

    def counted(self) -> Any:
        return self.config.meter.report({}, "reference", {}, torch.device("cpu"))


def layer(**choices: Any) -> Layer:
    recipe = Recipe.load(**{"sparse": PATTERN, "dense_tail": 0, **choices})
    return Layer(AttentionConfig(recipe, "reference", select.get_op("reference", torch.device("cpu"))))


def shown(view: KVView) -> Any:
    """A memory that shows this."""
    return SimpleNamespace(view=lambda *_: view)


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def agrees(at: Layer, inputs: tuple[Tensor, Tensor, Tensor], sees: Tensor, **run: Any) -> None:
    """A text of N columns is attended to as `sees` [n, N] says."""
    close(at.attend(TokenLayout.text(1, N), inputs, **run), written_out(*inputs, sees[None]))


@pytest.mark.parametrize("tail", [0, 1, 40, N, 4 * N])
def test_the_last_rows_of_a_prompt_are_dense(tail: int) -> None:
    at, inputs = layer(dense_tail=tail), tensors(N, N)
    late = torch.arange(N)[:, None] >= N - tail
    agrees(at, inputs, a_shape(N) | (late & causal(N)))


def test_each_sequence_has_a_tail_of_its_own_behind_padding_on_either_side() -> None:
    """The second is padded on the left, the third on the right; rows of padding say nothing."""
    valid = torch.ones(3, N, dtype=torch.bool)
    valid[1, :30], valid[2, -50:] = False, False
    layout = TokenLayout.build(torch.zeros(3, N, dtype=torch.long), valid=valid)
    at, inputs = layer(dense_tail=20), tensors(N, N, batch=3)
    found = at.attend(layout, inputs)
    for b, (begin, end) in enumerate([(0, N), (30, N), (0, N - 50)]):
        own = tuple(x[b : b + 1, :, begin:end] for x in inputs)
        late = torch.arange(end - begin)[:, None] >= end - begin - 20
        sees = a_shape(end - begin) | (late & causal(end - begin))
        close(found[b : b + 1, :, begin:end], written_out(*own, sees[None]))


@pytest.mark.parametrize("cut", [(96,), (64, 128), (100,)])
def test_a_prompt_in_chunks_gives_the_rows_of_the_whole(cut: tuple[int, ...]) -> None:
    """Each chunk sees the keys up to its end; the tail is the prompt's, not the chunk's."""
    whole, inputs = layer(dense_tail=40), tensors(N, N)
    layout = TokenLayout.text(1, N)
    want = whole.attend(layout, inputs)
    parted = layer(dense_tail=40)
    run = ForwardPass(config=parted.config, layout=layout, start=0, state=None)
    bounds, rows = (0, *cut, N), []
    for begin, end in pairwise(bounds):
        query, key, value = (x[:, :, :end] for x in inputs)
        rows.append(run.slice_new_columns(begin, end).attend(0, query[:, :, begin:], key, value, SIZE**-0.5))
    # A last chunk of fewer than `MIN_ROWS` rows is dense.
    sees = a_shape(N) | (
        torch.arange(N)[:, None] >= min(N - 40, bounds[-2] if N - bounds[-2] < MIN_ROWS else N)
    ) & causal(N)
    close(torch.cat(rows, 2), written_out(*inputs, sees[None]))
    if N - bounds[-2] >= MIN_ROWS:
        close(torch.cat(rows, 2), want.double())


@pytest.mark.parametrize(
    "choices, run, rows",
    [
        ({}, {"prefill": False}, N),
        ({"dense_layers": [0]}, {}, N),
        ({"sparse": "dense"}, {}, N),
        ({}, {}, MIN_ROWS - 1),
        ({}, {"prefill": False}, 1),
    ],
    ids=["tokens to verify", "a dense layer", "the dense pattern", "few rows", "a decoded token"],
)
def test_what_is_dense_sees_every_column_before_it(
    choices: dict[str, Any], run: dict[str, Any], rows: int
) -> None:
    at, inputs = layer(**choices), tensors(rows, N)
    agrees(at, inputs, causal(N)[-rows:], **run)
    # What is decoded or verified is not counted; a dense prompt keeps everything.
    assert at.counted().kept == (None if run else 1.0)


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
"""A committed token with two children, of which the first has one: 4 rows behind N - 4 columns."""


def test_rows_of_a_tree_see_the_prompt_and_their_own_branch() -> None:
    at, inputs = layer(), tensors(4, N)
    run = {"prefill": False, "branches": TokenTree(TREE, torch.tensor([0, 1, 1, 2]))}
    before = torch.ones(4, N - 4, dtype=torch.bool)
    agrees(at, inputs, torch.cat([before, TREE], 1), **run)


def test_rows_of_a_tree_see_a_window_from_their_depth() -> None:
    """Of a memory that gave up columns 8 .. 29: 8 first columns, and a window of 48 that ends at the row's depth."""
    column = torch.cat([torch.arange(8), torch.arange(30, N)])
    query, key, value = tensors(4, N)
    key, value = key[:, :, column], value[:, :, column]
    view = KVView(key, value, column=column, sinks=4, window=48)
    depth = torch.tensor([0, 1, 1, 2])
    at = layer()
    run = {"prefill": False, "branches": TokenTree(TREE, depth), "state": shown(view)}
    before = column[:-4]
    near = (N - 4 + depth)[:, None] - before < 48
    sees = torch.cat([near | (before < 4), TREE], 1)
    agrees(at, (query, key, value), sees, **run)


@pytest.mark.parametrize("gone", [0, 30])
@pytest.mark.parametrize("tail", [0, 24])
def test_a_pattern_runs_within_the_window_of_a_memory(gone: int, tail: int) -> None:
    """Of a memory that shows 8 first columns and a window of 41, and gave up `gone` columns behind the first: the pattern
    over what is there, in which each query sees what the window shows; the last rows are dense under the same window."""
    column = torch.cat([torch.arange(8), torch.arange(8 + gone, N)])
    rows, held = 80, N - gone
    query, key, value = tensors(rows, N)
    view = KVView(key[:, :, column], value[:, :, column], column=column if gone else None, sinks=8, window=41)
    at = layer(dense_tail=tail, dense_layers=[1])
    given = TokenLayout.text(1, N), (query, key, value)
    found = [at.attend(*given, number, state=shown(view)) for number in (0, 1)]
    distance = torch.arange(N - rows, N)[:, None] - column
    window = (distance >= 0) & ((distance < 41) | (column < 8))
    sees = a_shape(held)[-rows:] | (torch.arange(rows) >= rows - tail)[:, None]
    close(found[0], written_out(query, view.key, view.value, (sees & window)[None]))
    close(found[1], written_out(query, view.key, view.value, window[None]))
    report = at.counted()
    assert report.patterns == (("a_shape",) * HEADS, ("dense",) * HEADS)
    causal_pairs = sum(range(N - rows + 1, N + 1))
    (sparse, *_), (dense, *_) = report.kept_by_head
    assert dense == pytest.approx(int(window.sum()) / causal_pairs)
    assert int((sees & window).sum()) / causal_pairs <= sparse < 1


def test_what_a_memory_leaves_out_of_a_window_is_dense_over_its_view() -> None:
    """A memory that gave up columns 20 .. 39 and shows 8 first columns and a window of 48: the pattern does not run."""
    column = torch.cat([torch.arange(20), torch.arange(40, N)])
    query, key, value = tensors(100, N)
    view = KVView(key[:, :, column], value[:, :, column], column=column, sinks=8, window=48)
    at = layer()
    found = at.attend(TokenLayout.text(1, N), (query, key, value), state=shown(view))
    distance = torch.arange(N - 100, N)[:, None] - column
    sees = (distance >= 0) & ((distance < 48) | (column < 8))
    close(found, written_out(query, key[:, :, column], value[:, :, column], sees[None]))
    assert at.counted().patterns == (("dense",) * HEADS,)


def test_probes_read_what_each_layer_computes_from() -> None:
    seen = []
    probe = SimpleNamespace(
        read_attention_inputs=lambda run, number, *tensors: seen.append((number, *tensors[:3]))
    )
    at, inputs = layer(), tensors(N, N)
    at.attend(TokenLayout.text(1, N), inputs, layer=3, probes=(probe,))
    assert seen[0][0] == 3 and all(torch.equal(a, b) for a, b in zip(seen[0][1:], inputs, strict=True))


def stream_pass(state: Any, kernel: Any = None, **run: Any) -> ForwardPass:
    return ForwardPass(
        AttentionConfig(Recipe(), "auto", kernel), state=state, prefill=False, stream=True, **run
    )


def stream(view: KVView, inputs: tuple[Tensor, Tensor, Tensor], **run: Any) -> Tensor:
    return stream_pass(shown(view), **run).attend(0, *inputs, SIZE**-0.5)


def test_a_stream_s_rows_are_the_last_of_its_view_whose_first_keys_may_have_a_bias() -> None:
    """The queries that count are the memory's own."""
    inputs = query, key, value = tensors(30, 90)
    view = KVView(key, value, sinks=4, window=20, query=-query)
    distance = torch.arange(60, 90)[:, None] - torch.arange(90)
    sees = (distance >= 0) & ((distance < 20) | (torch.arange(90) < 4))
    close(stream(view, inputs), written_out(-query, key, value, sees[None]))
    inputs = _, key, value = tensors(3, 50)
    bias = torch.linspace(-1, 2, 10)
    close(stream(KVView(key, value, bias=bias), inputs), written_out(*inputs, causal(50)[None, -3:], bias))


def test_a_stream_s_check_breaks_off_before_the_memory_is_asked() -> None:
    def over() -> None:
        raise TimeoutError

    state = SimpleNamespace(view=lambda *_: pytest.fail("the memory was asked"))
    with pytest.raises(TimeoutError):
        stream_pass(state, check=over).attend(0, *tensors(3, 50), SIZE**-0.5)


CPU = torch.device("cpu")
SHAPES = [
    # rows, keys, sinks, window: a full window, one that has yet to fill, sinks in reach, none, one block and less.
    (300, 900, 14, 500),
    (300, 300, 14, 200),
    (130, 700, 40, 690),
    (128, 512, 0, 256),
    (64, 70, 3, 5),
    (257, 1030, 129, 1),
]


@pytest.mark.parametrize(("rows", "keys", "sinks", "window"), SHAPES, ids=str)
def test_its_pairs_are_those_of_the_window(rows: int, keys: int, sinks: int, window: int) -> None:
    plan = window_plan(rows, keys, sinks, window, 2, CPU)
    gap = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    seen = (gap >= 0) & ((gap < window) | (torch.arange(keys) < sinks))
    count = plan.spans_per_pair()
    assert count.max() == 1
    assert torch.equal(count[0, 0] > 0, seen) and torch.equal(count[0, 1] > 0, seen)
    # Blocks, of which two at either end of a window are not whole, are all that is computed beside it.
    assert plan.count_listed_pairs()[0, 0] <= seen.sum() + rows * 4 * 128


def test_plans_are_kept_for_good_where_a_graph_reads_them() -> None:
    """Prompts and streams of ever other lengths do not fill the device."""
    capturing = dict.fromkeys(("is_initialized", "is_current_stream_capturing"), lambda: True)
    for _ in range(2):  # what were made under a capture would hold no values yet
        with mock.patch.multiple(torch.cuda, **capturing), pytest.raises(RuntimeError, match="before"):
            window_plan(1, 5, 0, 1, 1, CPU)
    held = weakref.ref(window_plan(1, 5, 0, 1, 1, CPU))
    with mock.patch.multiple(torch.cuda, **capturing):
        assert held() is window_plan(1, 5, 0, 1, 1, CPU)
    others = [weakref.ref(window_plan(1, 6 + n, 0, 1, 1, CPU)) for n in range(99)]
    assert held() is window_plan(1, 5, 0, 1, 1, CPU) and others[0]() is None


@pytest.mark.parametrize(("rows", "keys", "sinks", "window"), SHAPES, ids=str)
def test_a_kernel_gives_what_the_dense_operator_gives(rows: int, keys: int, sinks: int, window: int) -> None:
    query, key, value = (t.double() for t in tensors(rows, keys))
    state = shown(KVView(key, value, sinks=sinks, window=window))
    expected = stream_pass(state).attend(0, query, key, value, 0.25)
    calls: list[int] = []

    def kernel(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args[0].shape[2])
        return reference.op(*args)

    found = stream_pass(state, kernel).attend(0, query, key, value, 0.25)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert calls == [rows]
    # Few rows, and no window, are the dense operator's.
    calls.clear()
    stream_pass(state, kernel).attend(0, query[:, :, -30:], key, value, 0.25)
    stream_pass(shown(KVView(key, value)), kernel).attend(0, query, key, value, 0.25)
    assert not calls and attention.MIN_ROWS > 30


@pytest.mark.gpu
def test_on_a_device_it_is_as_exact_as_masks() -> None:
    """A clip of 16 frames of 196 tokens under a window of 76, 7 heads a group: nearest to float64 as masks are."""
    g = torch.Generator("cuda").manual_seed(0)
    rows, keys, sinks, window = 16 * 196, 14 + 92 * 196, 14, 76 * 196
    query, key, value = (
        torch.randn(1, heads, n, 128, generator=g, device="cuda", dtype=torch.bfloat16)
        for heads, n in ((14, rows), (2, keys), (2, keys))
    )
    state = shown(KVView(key, value, sinks=sinks, window=window))
    kernel = sliding_window_kernel(query.device, query.dtype)
    assert kernel is not None
    found, masks = (stream_pass(state, how).attend(0, query, key, value, 128**-0.5) for how in (kernel, None))
    one = KVView(key[:, :1].double(), value[:, :1].double(), sinks=sinks, window=window)
    exact = stream_pass(shown(one)).attend(0, query[:, :7].double(), key[:, :1], value[:, :1], 128**-0.5)
    errors = [(out[:, :7].double() - exact).norm() for out in (found, masks)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("most", [1, 3 * 2 * 37, 22 * 37, 2 * 22 * 37, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_all_heads_however_many_are_computed_at_a_time(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of single rows, of three of one key/value head, of one head, of two of three, and of all at once."""
    monkeypatch.setattr(dense_attend, "WEIGHTS", most)
    query, key, _ = (one[0].to(dtype) for one in drawn(1, (6, 3), 11, 37, SIZE, 0))
    at, bias = torch.arange(26, 37), torch.randn(5, generator=torch.Generator().manual_seed(0))
    scores = (query.double() @ key.double().repeat_interleave(2, 0).mT) * SIZE**-0.5
    scores[..., :5] += bias
    hidden = torch.arange(37)[None] > at[:, None]
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(0)
    close(dense_attend.mean_attention_weights(query, key, at, SIZE**-0.5, bias), want)
    none = dense_attend.mean_attention_weights(query[:, :0], key, at[:0], SIZE**-0.5, bias)
    assert none.shape == (0, 37)
