"""Every pruner against its definition, written out token by token from its paper."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from mmaccel.contract.prefill import random_pruner_inputs
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import Stage, kept_layout
from mmaccel.models.signals import mean_received_attention
from mmaccel.policies import prune
from tests.policies.prune.by_hand import LAYOUTS, asked, frames_of, layout_of, looking, top, visual, whole
from tests.spies import Ops


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> TokenLayout:
    return layout_of(LAYOUTS[request.param])


def down(share: float, count: int) -> int:
    """`share` of `count`, rounded down, the share read as the decimal it was written as."""
    return math.floor(Fraction(repr(share)) * count)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("depth, layer", [(28, 9), (64, 20), (80, 20), (8, 3), (3, 1)])
def test_uv_reads_the_default_layer(depth: int, layer: int) -> None:
    (stage,) = prune.UVPrune().pruning_stages(depth)
    assert (stage.layer, stage.hidden, stage.attention) == (layer, (min(1, layer - 1), layer), ())


@pytest.mark.parametrize("variation", [True, False])
@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("contrast", [False, True])
def test_uv_is_equation_three(layout: TokenLayout, variation: bool, base: int, contrast: bool) -> None:
    """The double sum over layers and words, as printed; only two of the layers are given to the pruner."""
    L, g = 4, torch.Generator().manual_seed(3)
    states = torch.randn(L + 1, layout.length, 8, generator=g, dtype=torch.float64)
    words = asked(layout)

    def likeness(layer: int, i: int) -> float:
        return sum(cosine(states[layer, i], states[layer, j]) for j in words)

    score = {}
    for i in visual(layout):
        steps = [likeness(layer, i) - likeness(layer - 1, i) for layer in range(base + 1, L + 1)]
        score[i] = sum(steps) if variation else likeness(L, i)
    if contrast:
        means = {c: sum(score[d] for d in frame) / len(frame) for frame in frames_of(layout) for c in frame}
        # A frame of one token has nothing beyond its mean, in exact arithmetic.
        score = {c: s - means[c] if s != means[c] else 0.0 for c, s in score.items()}
    pruner = prune.UVPrune(retention=0.3, layer=L, base=base, variation=variation, contrast=contrast)
    (stage,) = pruner.pruning_stages(8)
    got = pruner.keep({"hidden": states[list(stage.hidden)].float()}, layout, stage)
    assert got.tolist() == whole(layout, top(score, down(0.3, len(score))))


@pytest.mark.parametrize(
    "retention, mass", [(0.3, 0.4), (0.5, 0.1), (0.4, 1.0), (0.6, 0.9), (0.0, 0.4), (0.7, 0.0)]
)
def test_attention_takes_a_share_of_the_mass_then_spreads(
    layout: TokenLayout, retention: float, mass: float
) -> None:
    pruner = prune.AttentionPrune(retention=retention, mass=mass)
    (stage,) = pruner.pruning_stages(4)
    assert stage.attention == ((0, 1, 2, 3),)
    signals = random_pruner_inputs(layout, stage, asked=5)
    score = {c: float(signals["attention"][0, :, c].mean()) for c in visual(layout)}
    quota, total = down(retention, len(score)), sum(score.values())
    taken: list[int] = []
    held = 0.0
    for c in sorted(score, key=lambda c: (-score[c], c)):
        # The token that crosses the line is the last of the first part; at least one is taken.
        if len(taken) == quota or (taken and mass < 1 and held >= mass * total):
            break
        taken.append(c)
        held += score[c]
    rest = [c for c in score if c not in taken]
    n = quota - len(taken)
    taken += [rest[math.floor((Fraction(k) + Fraction(1, 2)) * len(rest) / n)] for k in range(n)]
    assert pruner.keep(signals, layout, stage).tolist() == whole(layout, taken)


def test_attention_by_variation_is_the_gain_from_first_to_last_layer(layout: TokenLayout) -> None:
    pruner = prune.AttentionPrune(retention=0.4, mass=1.0, variation=True)
    (stage,) = pruner.pruning_stages(6)
    assert stage.attention == ((0,), (5,))
    a = (signals := random_pruner_inputs(layout, stage, asked=3))["attention"]
    score = {c: float(a[1, :, c].mean() - a[0, :, c].mean()) for c in visual(layout)}
    assert pruner.keep(signals, layout, stage).tolist() == whole(layout, top(score, down(0.4, len(score))))


@pytest.mark.parametrize("retention", [0.0, 0.1, 0.29, 0.5, 0.9, 1.0])
def test_uniform_takes_the_middles_of_equal_stretches(layout: TokenLayout, retention: float) -> None:
    pruner = prune.UniformPrune(retention=retention)
    (stage,) = pruner.pruning_stages(4)
    columns = visual(layout)
    n, m = down(retention, len(columns)), len(columns)
    middles = [columns[math.floor((Fraction(k) + Fraction(1, 2)) * m / n)] for k in range(n)]
    assert pruner.keep({}, layout, stage).tolist() == whole(layout, middles)


def test_random_is_a_fair_lot_of_its_seed() -> None:
    layout = layout_of(LAYOUTS["one video"])
    (stage,) = prune.RandomPrune(retention=0.5).pruning_stages(4)
    draws = torch.zeros(layout.length)
    for seed in range(600):
        pruner = prune.RandomPrune(retention=0.5, seed=seed)
        kept = pruner.keep({}, layout, stage)
        assert torch.equal(kept, pruner.keep({}, layout, stage))
        draws[kept] += 1
    share = draws[visual(layout)] / 600
    # 21 of 42 each time; six standard deviations of one token's share
    assert float((share - 0.5).abs().max()) < 6 * math.sqrt(0.25 / 600)
    assert len({tuple(prune.RandomPrune(seed=s).keep({}, layout, stage).tolist()) for s in range(9)}) == 9


def test_fastv_averages_what_it_is_asked_to() -> None:
    pruner = prune.FastV.averaging(0.1, depth=80)
    assert (2 + 78 * pruner.retention) / 80 == pytest.approx(0.1)
    with pytest.raises(ValueError, match="smaller layer"):
        prune.FastV.averaging(0.1, depth=8)


def test_pyramid_drop_halves_the_prompt_s_count_at_every_stage(layout: TokenLayout) -> None:
    pruner = prune.PyramidDrop()
    stages = pruner.pruning_stages(32)
    assert [(s.layer, s.attention) for s in stages] == [(8, ((8,),)), (16, ((16,),)), (24, ((24,),))]
    m, left, names = len(visual(layout)), layout, list(range(layout.length))
    for rank, stage in enumerate(stages, 1):
        signals = random_pruner_inputs(left, stage, seed=rank, asked=3)
        score = {c: float(signals["attention"][0, -1, c]) for c in visual(left)}
        want = whole(left, top(score, m // 2**rank))
        kept = pruner.keep(signals, left, stage, m)
        assert kept.tolist() == want
        names = [names[c] for c in want]
        left = kept_layout(left, kept)
        assert left.frame[0].tolist() == layout.frame[0, names].tolist()
    assert len(visual(left)) == m // 8


def sparse_by_hand(signals: dict[str, Tensor], layout: TokenLayout, count: int, recycle: float) -> tuple:
    """SparseVLM's stage: raters, scores, the kept, and recycling by density peaks: (columns, {column: state})."""
    base, states, attention = signals["hidden"][0], signals["hidden"][-1], signals["attention"][0]
    words, columns = looking(layout), visual(layout)
    if count >= len(columns):
        return list(range(layout.length)), {}
    relation = dict.fromkeys(words, 0.0)
    for i in columns:
        products = torch.tensor([float(base[i] @ base[j]) for j in words], dtype=torch.float64)
        for j, share in zip(words, products.softmax(0).tolist(), strict=True):
            relation[j] += share / len(columns)
    mean = sum(relation.values()) / len(words)
    raters = [n for n, j in enumerate(words) if relation[j] > mean + 1e-9]
    if not raters or not set(words) & set(asked(layout)):
        raters = list(range(len(words)))
    score = {c: sum(float(attention[n, c]) for n in raters) / len(raters) for c in columns}
    kept = top(score, count)
    dropped = {c: score[c] for c in columns if c not in kept}
    pool = top(dropped, math.floor(Fraction(repr(recycle)) * len(dropped)))
    if not pool:
        return whole(layout, kept), {}
    centres = len(pool) // 10 + 1
    apart = {
        (a, b): float((states[a] - states[b]).norm()) / states.shape[1] ** 0.5 for a in pool for b in pool
    }
    density = {}
    for a in pool:
        near = sorted(apart[a, b] for b in pool)[:5]
        density[a] = math.exp(-sum(d * d for d in near) / len(near))
    peak = {}
    for a in pool:
        above = [apart[a, b] for b in pool if (density[b], -b) > (density[a], -a)]
        peak[a] = density[a] * (min(above) if above else max(apart.values()))
    chosen = top(peak, centres)
    groups: dict[int, list[int]] = {c: [] for c in chosen}
    for a in pool:
        groups[a if a in groups else min(chosen, key=lambda c: apart[a, c])].append(a)
    merged = {c: torch.stack([states[a] for a in group]).mean(0) for c, group in groups.items()}
    return whole(layout, [*kept, *chosen]), merged


@pytest.mark.parametrize("recycle", [0.3, 0.0, 1.0])
def test_sparsevlm_raters_scores_and_recycling(layout: TokenLayout, recycle: float) -> None:
    pruner = prune.SparseVLM(retention=(0.5,), layers=(2,), recycle=recycle)
    (stage,) = pruner.pruning_stages(8)
    assert (stage.layer, stage.hidden, stage.attention) == (3, (0, 3), ((2,),))
    signals = random_pruner_inputs(layout, stage, asked=len(looking(layout)))
    columns, merged = sparse_by_hand(signals, layout, down(0.5, len(visual(layout))), recycle)
    kept = pruner.prune(signals, layout, stage)
    assert kept.columns.tolist() == columns and pruner.keep(signals, layout, stage).tolist() == columns
    want = signals["hidden"][-1].clone()
    for c, state in merged.items():
        want[c] = state
    assert merged or kept.states is None
    torch.testing.assert_close(want[columns] if kept.states is None else kept.states, want[columns])


def test_sparsevlm_cuts_where_its_paper_does() -> None:
    stages = prune.SparseVLM().pruning_stages(32)
    assert [s.layer for s in stages] == [3, 7, 16]
    layout = layout_of([("video", [(24, 24)]), ("text", 1)])
    signals = random_pruner_inputs(layout, stages[0])
    counts = []
    for stage in stages:
        kept = prune.SparseVLM(recycle=0.0).keep(signals, layout, stage, 576)
        counts.append(len(kept) - 1)
    assert counts == [300, 200, 110]


@pytest.mark.parametrize("drop", [0.7, 0.5, 1.0])
def test_dycoke_thins_what_repeats(layout: TokenLayout, drop: float) -> None:
    pruner = prune.DyCoke(drop=drop)
    (stage,) = pruner.pruning_stages(8)
    signals = random_pruner_inputs(layout, stage)
    states, frames = signals["hidden"][0], frames_of(layout)
    segment = [int(layout.segment[0, f[0]]) for f in frames]
    kept: list[int] = []
    for video in sorted(set(segment)):
        own = [f for f, s in zip(frames, segment, strict=True) if s == video]
        for begin in range(0, len(own), 4):
            window = own[begin : begin + 4]
            left = {n: list(f) for n, f in enumerate(window)}
            for now, before in ((1, 0), (3, 2), (2, 0)):
                if now >= len(window):
                    continue
                a, b = window[now], window[before]
                cells = [[(int(layout.row[0, c]), int(layout.column[0, c])) for c in f] for f in (a, b)]
                if cells[0] == cells[1]:
                    unlike = {c: -cosine(states[c], states[d]) for c, d in zip(a, b, strict=True)}
                    left[now] = top(unlike, math.floor((1 - Fraction(repr(drop))) * len(a)))
            kept += [c for f in left.values() for c in f]
    assert pruner.keep(signals, layout, stage).tolist() == whole(layout, kept)


def test_dycoke_looks_again_when_attention_turns() -> None:
    pruner = prune.DyCoke(forget=0.6, refresh=0.9)
    columns = torch.tensor([3, 4, 7, 8, 9])
    first = torch.tensor([0.1, 0.5, 0.2, 0.05, 0.15])
    assert pruner.recalled_columns(first, columns, None).tolist() == [4, 7]
    near, far = first + 0.01, torch.tensor([0.5, 0.1, 0.05, 0.2, 0.15])
    assert pruner.recalled_columns(near, columns, first) is None
    assert pruner.recalled_columns(far, columns, first).tolist() == [3, 8]


@pytest.mark.parametrize("retention, contextual", [(0.5, 0.4), (0.34, 1.0), (0.7, 0.0), (64 / 196, 10 / 64)])
def test_visionzip_dominant_and_contextual(layout: TokenLayout, retention: float, contextual: float) -> None:
    pruner = prune.VisionZip(retention=retention, contextual=contextual)
    (stage,) = pruner.pruning_stages(8)
    signals = random_pruner_inputs(layout, stage)
    states, score, key = signals["hidden"][0], signals["vision_attention"], signals["vision_key"]
    kept: list[int] = []
    want = states.clone()
    for frame in frames_of(layout):
        n = math.floor(Fraction(repr(retention)) * len(frame) + Fraction(1, 10**9))
        merged = round(n * contextual)
        dominant = top({c: float(score[c]) for c in frame}, n - merged)
        rest = [c for c in frame if c not in dominant]
        middles = [
            rest[math.floor((Fraction(k) + Fraction(1, 2)) * len(rest) / merged)] for k in range(merged)
        ]
        groups: dict[int, list[int]] = {c: [] for c in middles}
        for c in rest if merged else []:
            near = {m: cosine(key[c], key[m]) for m in middles}
            groups[c if c in groups else max(middles, key=lambda m: near[m])].append(c)
        for middle, group in groups.items():
            want[middle] = states[group].mean(0)
        kept += [*dominant, *middles]
    got = pruner.prune(signals, layout, stage)
    assert got.columns.tolist() == whole(layout, kept) == pruner.keep(signals, layout, stage).tolist()
    assert got.states is not None
    torch.testing.assert_close(got.states, want[got.columns])


def test_visionzip_counts_as_its_paper_does() -> None:
    layout = layout_of([("video", [(14, 14)] * 2, 1), ("text", 2)])
    pruner = prune.VisionZip()
    (stage,) = pruner.pruning_stages(8)
    signals = random_pruner_inputs(layout, stage)
    kept = pruner.prune(signals, layout, stage)
    assert len(kept.columns) == 2 * 64 + 1 + 2
    assert kept.states is not None
    changed = (kept.states != signals["hidden"][0][kept.columns]).any(-1)
    assert int(changed.sum()) == 2 * 10


def test_visionzip_carries_what_rounding_takes() -> None:
    layout = layout_of([("video", [(4, 4)] * 10, 1), ("text", 2)])
    pruner = prune.VisionZip(retention=0.1, carry=True)
    (stage,) = pruner.pruning_stages(8)
    kept = pruner.keep(random_pruner_inputs(layout, stage), layout, stage)
    each = [len(set(frame) & set(kept.tolist())) for frame in frames_of(layout)]
    assert sum(each) == 16 == sum(pruner.kept_tokens_per_frame(10, 16))
    assert each == pruner.kept_tokens_per_frame(10, 16)
    assert set(each) == {1, 2} and prune.VisionZip(retention=0.1).kept_tokens_per_frame(10, 16) == [1] * 10


def test_visionzip_takes_all_frames_at_once() -> None:
    """On a GPU every operation is a launch, and a frame of sixteen tokens is nothing."""
    pruner = prune.VisionZip(retention=0.5, contextual=0.4)
    (stage,) = pruner.pruning_stages(8)
    counts = []
    for many in (4, 400):
        layout = layout_of([("video", [(4, 4)] * many, 1), ("text", 2)])
        signals = random_pruner_inputs(layout, stage)
        with Ops() as ops:
            pruner.prune(signals, layout, stage)
        query, key = torch.randn(2, many, 2, 16, 8)
        with ops:
            mean_received_attention(query, key, 0.3)
        counts.append(ops.count)
    assert counts[0] == counts[1]


def test_stage_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Stage(1).layer = 2  # type: ignore[misc]
