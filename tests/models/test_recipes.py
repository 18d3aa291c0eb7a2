"""Whatever a recipe admits runs on each family, says what it did, and never falls back to dense in silence; a warning
names the user's line; beside the `window` memory a pattern acts within the window."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.registry import registry
from tests.models.streams import FPS, open_session, pair
from tests.models.test_exact import TOLERANCE, logits
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt
from tests.spies import crossed

pytestmark = pytest.mark.in_turn("family", 1)
LAYERS = 3
PIECES = [("text", 6), ("video", 36), ("text", 1), ("image",), ("text", 3), ("video", 36), ("text", 9)]
SMALL = {
    "a_shape": {"sink": 16, "window": 32},
    "tri_shape": {"sink": 16, "window": 32, "bottom": 24},
    "sf_fixed": {"summary": 2},
    "sf_strided": {},
    "block_topk": {"budget": 0.5, "sink": 16},
    "vertical_slash": {"vertical": 12, "slash": 4, "last_q": 16},
    "grid": {"stride": "frame", "min_stride": 2, "last_q": 16},
    "boundary_2d": {"default": {"name": "a_shape", "sink": 8, "window": 24}},
    "q_boundary": {
        "text": {"name": "a_shape", "sink": 8, "window": 24},
        "image": {"name": "vertical_slash", "vertical": 12, "slash": 4, "last_q": 16},
        "video": {"name": "grid", "min_stride": 2, "last_q": 16},
    },
    "k_boundary": {
        "text": {"name": "a_shape", "sink": 8, "window": 24},
        "image": {"name": "a_shape", "sink": 2, "window": 4},
        "video": {"name": "vertical_slash", "vertical": 12, "slash": 4, "last_q": 16},
    },
}
WITHIN = {"boundary_2d": "a_shape", "q_boundary": "grid", "k_boundary": "vertical_slash"}
"""What the videos of a boundary follow in it."""
SPARSE = sorted(set(registry("sparse")) - {"dense", "per_head"})


def small(name: str) -> dict:
    """A budget small enough for a prompt of a few hundred tokens."""
    return {"name": name, "block": 16, **SMALL[name]}


def test_every_pattern_has_a_small_budget_here():
    assert sorted(SMALL) == SPARSE


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_a_pattern_runs_and_kept_is_the_listed_share_of_causal_pairs(family, name, monkeypatch):
    """Counted again by hand from the plans of the run, the tail's rows and a dense layer."""
    kind, model = family
    inputs = prompt(kind, PIECES)
    length, tail = inputs["input_ids"].shape[1], 8
    plans = []
    pattern = registry("sparse")[name]
    plain = pattern.plan
    monkeypatch.setattr(pattern, "plan", lambda self, *a: plans.append(plain(self, *a)) or plans[-1])
    with mmaccel.accelerate(model, sparse=small(name), dense_layers=[1], dense_tail=tail) as fast:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        report = fast.report()
    told = f"{name}({WITHIN[name]})" if name in WITHIN else name
    assert report.patterns == ((told,) * 4, ("dense",) * 4, (told,) * 4)
    assert report.heads() == {told: 8, "dense": 4}
    assert 1 / 3 < report.kept < 0.9 and len(plans) == 2
    causal = length * (length + 1) / 2
    shares = [1.0]
    for plan in plans:
        listed = torch.zeros(4, dtype=torch.float64)
        for part in plan.parts:
            own = listed[part.for_heads(4)]
            h = len(own)
            rows = ((part.q_row >= 0) & (part.q_row < length - tail)).expand(1, h, -1)[0]
            for span in part.spans:
                keys = (span.k_row >= 0).expand(1, h, -1)[0]
                table = span.lists.table().expand(1, h, -1, -1)[0] >= 0
                nq, nk = (x.unflatten(-1, (-1, 16)).sum(-1).double() for x in (rows, keys))
                own += torch.einsum("hm,hmn,hn->h", nq, table.double(), nk)
        listed += sum(range(length - tail + 1, length + 1))
        shares.append(float((listed / causal).mean()))
    assert report.kept == pytest.approx(sum(shares) / 3, rel=1e-6)


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_padding_behind_a_prompt_takes_none_of_its_dense_rows(family, name):
    kind, model = family
    prompts = [prompt(kind, [("text", 6), ("video", 36), ("text", n)], seed=n) for n in (110, 30)]
    right = batch(kind, prompts)
    width = right["input_ids"].shape[1]
    for told in right.keys() & {"input_ids", "attention_mask", "mm_token_type_ids"}:
        rows = [torch.nn.functional.pad(p[told], (0, width - p[told].shape[1])) for p in prompts]
        right[told] = torch.cat(rows)
    with mmaccel.accelerate(model, sparse=small(name), dense_tail=40) as fast, torch.no_grad():
        together, kept = model(**right).logits, torch.tensor(fast.report().kept_by_head)
        shares = []
        for row, inputs in enumerate(prompts):
            alone = model(**inputs).logits[0]
            assert (together[row, : len(alone)] - alone).abs().max() <= 1e-4
            shares.append(torch.tensor(fast.report().kept_by_head))
    torch.testing.assert_close(kept, sum(shares) / 2)
    if name == "a_shape":  # others look at each chunk's own last queries
        for chunk in (width - 10, width - 70):
            with mmaccel.accelerate(model, sparse=small(name), dense_tail=40, chunk=chunk), torch.no_grad():
                pieces = model(**right).logits
            assert (pieces - together)[right["attention_mask"].bool()].abs().max() <= 1e-4


SINKS, WINDOW, TAIL = 4, 90, 8
KV = {"name": "window", "sinks": SINKS, "window": WINDOW, "margin": 8}


def written_out(run, layer, query, key, value, scale):
    """`ForwardPass.attend` of a whole prompt: the element masks of the plan that the pattern makes and of the window."""
    n = query.shape[2]
    if n < 64:
        return ATTEND(run, layer, query, key, value, scale)
    view = run.state.view(layer, query)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    window = (distance >= 0) & ((distance < WINDOW) | (torch.arange(n) < SINKS))
    plan = run.config.recipe.sparse.for_layer(layer).plan(query, view.key, run.layout, run.layout)
    tail = (torch.arange(n) >= n - TAIL)[:, None]
    mask = (plan.to_mask() | tail) & window
    return torch.nn.functional.scaled_dot_product_attention(
        query, view.key, view.value, attn_mask=mask, scale=scale, enable_gqa=True
    )


ATTEND = ForwardPass.attend


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_a_pattern_and_a_window_are_dense_attention_under_both_masks(family, name, monkeypatch):
    kind, model = family
    inputs = prompt(kind, PIECES)
    how = {"max_new_tokens": 6, "do_sample": False}
    with mmaccel.accelerate(model, kv=KV, sparse=small(name), dense_tail=TAIL) as fast:
        ours, text = logits(model, inputs), model.generate(**inputs, **how)
        report = fast.report()
        assert report.kept < 0.8 and "dense" not in report.heads()
        assert report.kv["held"] < report.kv["seen"]
        monkeypatch.setattr(ForwardPass, "attend", written_out)
        exact = logits(model, inputs)
        assert torch.equal(model.generate(**inputs, **how), text)
    assert (ours - exact).abs().max() <= TOLERANCE


@crossed("family", name=SPARSE, family=sorted(BUILD))
def test_a_chunked_prompt_goes_on_over_what_the_window_holds(family, name):
    """Later pieces see a view that lacks columns: the pattern runs there too, in a batch as in one sequence."""
    kind, model = family
    inputs = [prompt(kind, PIECES, seed=seed) for seed in (0, 1)]
    found = []
    for some in (*inputs, batch(kind, inputs)):
        with mmaccel.accelerate(model, kv=KV, sparse=small(name), chunk=100, dense_tail=0) as fast:
            found.append(logits(model, some))
            last = some["input_ids"].shape[1] % 100
            (told, *_) = fast.report().heads()
            assert ("dense" in told) == (last < 64) and fast.report().kept < 0.8
    assert (found[2] - torch.cat(found[:2])).abs().max() <= TOLERANCE


def under(recipe: dict[str, Any], call: Callable[[Any], Any]) -> None:
    model = BUILD["qwen"]()
    with mmaccel.accelerate(model, **recipe), torch.no_grad():
        call(model)


TEXTS = [prompt("qwen", PROMPTS["text"], seed=n) for n in range(2)]
PRUNED = {"prune": {"name": "dycoke", "layer": 1}}
RESTS = {"draft": "prompt_lookup"}
LARGE = torch.zeros(4, 3, 90, 60, dtype=torch.uint8)
WORKS: dict[str, Callable[[], Any]] = {
    "a pruner without a video": lambda: under(PRUNED, lambda one: one.generate(**TEXTS[0], max_new_tokens=2)),
    "the same of a pass": lambda: under(PRUNED, lambda one: one(**TEXTS[0])),
    "a draft that rests": lambda: under(RESTS, lambda one: one.generate(**batch("qwen", TEXTS), max_new_tokens=2)),
    "another size": lambda: open_session("random-qwen", "recent", 2).watch(LARGE, fps=FPS),
    "a bare placeholder": lambda: pair("random-ov")[1](f"what is {pair('random-ov')[1].video_token} ?"),
}  # fmt: skip
"""Each in a line of its own."""


@pytest.mark.parametrize("name", WORKS)
def test_a_warning_names_the_line_that_called(name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        WORKS[name]()
    ours = [(Path(one.filename).name, one.lineno) for one in told if one.category is MmaccelWarning]
    assert ours == [(Path(__file__).name, WORKS[name].__code__.co_firstlineno)], [
        str(one.message) for one in told
    ]
