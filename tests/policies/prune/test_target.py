"""Pruners at work on a target: the same numbers as layers run by hand, in prefill and token by token, for both families."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import NOTE, ForwardPassInfo, ForwardProbe, PrefillPass, candidate_columns
from mmaccel.policies.prune import DyCoke, FastV, PyramidDrop, SparseVLM, VisionZip
from tests.models.tiny_random import PROMPTS, prompt
from tests.models.tiny_random import model as tiny
from tests.policies.prune import by_hand
from tests.policies.prune.by_hand import looking, top, videos, visual, whole
from tests.policies.prune.conftest import WITH_HYBRID
from tests.policies.prune.test_meaning import sparse_by_hand
from tests.spies import heard, product

WRITTEN = 6
PRUNERS: dict[str, Any] = {
    "fastv": FastV(retention=0.4),
    "pyramid_drop": PyramidDrop(stages_at=(0.34, 0.5, 0.7)),
    "sparsevlm": SparseVLM(retention=(0.6, 0.3), layers=(1, 3)),
    "dycoke": DyCoke(drop=0.5, forget=0.5, layer=2),
    "visionzip": VisionZip(retention=0.5, contextual=0.4),
}


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    return by_hand.eager(model)


def layout_in(model: Any, inputs: dict[str, Tensor]) -> TokenLayout:
    return mmaccel.core.attach.adapter_for(model).layout(model, inputs)


def written(fast: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens [n] written greedily, and the logits [n, V] they were chosen from."""
    out = fast.generate(
        **inputs,
        max_new_tokens=WRITTEN,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, -WRITTEN:], torch.cat(out.logits)


@pytest.mark.parametrize("name, kind", [*((name, "text") for name in PRUNERS), ("dycoke", "image")])
def test_a_prompt_without_visual_tokens_is_left_alone_and_it_says_so(
    family: str, model: Any, name: str, kind: str
) -> None:
    inputs = prompt(family, PROMPTS[kind])
    with torch.no_grad(), mmaccel.accelerate(model, prune=PRUNERS[name]) as fast:
        with pytest.warns(MmaccelWarning, match=f"{name}' did nothing: the prompt has no .*video tokens"):
            got = fast(**inputs).logits
        assert f"prune '{name}' did nothing" in str(fast.report())
    torch.testing.assert_close(got, model(**inputs).logits, atol=1e-5, rtol=0)


def hand_cuts(pruner: Any, layout: TokenLayout) -> dict[int, Any]:
    """The cuts of fastv, pyramid_drop and sparsevlm, by the attention an eager layer tells."""
    total = len(visual(layout))

    def left(told: dict[str, Any]) -> TokenLayout:
        return layout.select_tokens(told["columns"])

    def by_last_word(weights: str, count: int) -> Any:
        def cut(told: dict[str, Any]) -> tuple[Tensor, Tensor]:
            here = left(told)
            row = told[weights].mean(0)[-1]
            stay = torch.tensor(whole(here, top({c: float(row[c]) for c in visual(here)}, count)))
            return stay, told["hidden"][stay]

        return cut

    def by_raters(share: float) -> Any:
        def cut(told: dict[str, Any]) -> tuple[Tensor, Tensor]:
            here = left(told)
            signals = {
                "hidden": torch.stack([told["start"], told["hidden"]]),
                "attention": told["before"].mean(0)[looking(here)][None],
            }
            columns, merged = sparse_by_hand(signals, here, int(share * total), 0.3)
            states = told["hidden"].clone()
            for c, state in merged.items():
                states[c] = state
            return torch.tensor(columns), states[columns]

        return cut

    if isinstance(pruner, FastV):
        return {pruner.layer: by_last_word("before", int(pruner.retention * total))}
    if isinstance(pruner, PyramidDrop):
        return {layer: by_last_word("here", total // share) for layer, share in ((2, 2), (3, 4), (4, 8))}
    assert isinstance(pruner, SparseVLM) and pruner.layers is not None
    return {layer + 1: by_raters(s) for layer, s in zip(pruner.layers, pruner.retention, strict=True)}


@WITH_HYBRID
@pytest.mark.parametrize(
    ("name", "kind"), product(["fastv", "pyramid_drop", "sparsevlm"], ["two videos", "interleaved", "video"])
)
def test_between_layers(family: str, model: Any, plain: Any, name: str, kind: str) -> None:
    inputs, compact = prompt(family, PROMPTS[kind], seed=3), kind == "video"
    pruner = type(PRUNERS[name])(**{**vars(PRUNERS[name]), "compact": compact})
    with mmaccel.accelerate(model, prune=pruner) as fast:
        tokens, logits = written(fast, inputs)
        told = fast.report().kv
    layout = layout_in(model, inputs)
    want = by_hand.run(plain, inputs, tokens[:-1], hand_cuts(pruner, layout), compact=compact)
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)
    assert told["visual"] == len(visual(layout))
    last = [count for name, count in told.items() if name.startswith("visual from layer")][-1]
    assert last < told["visual"] / 2


@pytest.mark.parametrize("layer", [1, 2])
def test_between_layers_that_get_features_of_the_tower(layer: int) -> None:
    """DeepStack adds some behind layers 0 and 1: those of what is left."""
    model, inputs = tiny("qwen3_vl", layers=4, seed=5), prompt("qwen3_vl", PROMPTS["interleaved"], seed=3)
    pruner = FastV(retention=0.4, layer=layer)
    with mmaccel.accelerate(model, prune=pruner) as fast:
        tokens, logits = written(fast, inputs)
    cuts = hand_cuts(pruner, layout_in(model, inputs))
    want = by_hand.run(by_hand.eager(model), inputs, tokens[:-1], cuts)
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)


@WITH_HYBRID
def test_dropped_columns_leave_the_cache_and_the_layers(family: str, model: Any) -> None:
    """Not masked, gone: later layers run and hold fewer columns."""
    inputs = prompt(family, PROMPTS["long"])
    rows: dict[int, tuple[int, int]] = {}

    class Rows(ForwardProbe):
        def read_attention_inputs(
            self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, *rest: Any
        ) -> None:
            rows[layer] = query.shape[2], key.shape[2]

    with torch.no_grad(), mmaccel.accelerate(model, prune=FastV(retention=0.25, layer=3)) as fast:
        logits = fast(**inputs, **{NOTE: ForwardPassInfo(probes=(Rows(),))}).logits
        out = fast(**inputs, logits_to_keep=1)
        last = out.logits
        held = out.past_key_values.state.held_indices(1, inputs["input_ids"].shape[1])
    S = inputs["input_ids"].shape[1]
    m = len(videos(layout_in(model, inputs)))
    left = S - m + m // 4
    assert rows == {0: (S, S), 1: (S, S), 2: (S, S), 3: (left, left), 4: (left, left), 5: (left, left)}
    assert logits.shape[1] == S
    torch.testing.assert_close(logits[:, -1:], last, atol=1e-5, rtol=0)
    gone = [c for c in range(S) if c not in held.tolist()]
    assert len(gone) == m - m // 4 and not logits[:, gone].any() and logits[0, held].any(-1).all()


@WITH_HYBRID
@pytest.mark.parametrize("kind, compact", [("two videos", False), ("video", True)])
def test_before_the_language_model(family: str, model: Any, plain: Any, kind: str, compact: bool) -> None:
    """DyCoke's first part: what is left, at its own positions, or numbered anew."""
    inputs = prompt(family, PROMPTS[kind], seed=4)
    pruner = DyCoke(drop=0.5, forget=0.0, compact=compact)
    with mmaccel.accelerate(model, prune=pruner) as fast:
        tokens, logits = written(fast, inputs)
        told = fast.report().kv
    layout = layout_in(model, inputs)
    (stage,) = pruner.pruning_stages(6)

    def cut(told: dict[str, Any]) -> tuple[Tensor, Tensor]:
        stay = pruner.keep({"hidden": told["start"][None]}, layout, stage)
        return stay, told["hidden"][stay]

    want = by_hand.run(plain, inputs, tokens[:-1], {0: cut}, compact=compact)
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)
    assert told["held"] == told["seen"] - told["visual"] + told["visual from layer 0"] == told["held_mean"]
    assert told["visual from layer 0"] < told["visual"]


@WITH_HYBRID
@pytest.mark.parametrize("kind, refresh", [("two videos", 0.9), ("video", 1.0), ("video", -1.0)])
def test_dycoke_while_decoding(family: str, model: Any, plain: Any, kind: str, refresh: float) -> None:
    """The second part: later layers see the tokens that the layer before attended to, chosen anew when it turns."""
    inputs = prompt(family, PROMPTS[kind], seed=6)
    pruner = DyCoke(drop=0.0, forget=0.6, layer=3, refresh=refresh)
    with mmaccel.accelerate(model, prune=pruner) as fast:
        tokens, logits = written(fast, inputs)
    layout = layout_in(model, inputs)
    S, columns = layout.length, videos(layout)
    count = int(0.4 * len(columns) + 1e-9)
    masks: dict[int, Tensor] = {}

    def see(layer: int, weights: Tensor, mask: Tensor) -> Tensor:
        if layer == 3:
            before = chosen = None
            for row in range(S, mask.shape[0]):
                now = weights[:, row].mean(0)[columns]
                near = before is not None and torch.cosine_similarity(now, before, dim=0) >= refresh
                if not near:
                    chosen = top(dict(zip(columns, now.tolist(), strict=True)), count)
                before = now
                mask[row, [c for c in columns if c not in chosen]] = False
            masks[0] = mask
        return masks[0] if layer >= 3 else mask

    want = by_hand.run(plain, inputs, tokens[:-1], {}, see=see)
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)


def spied(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Attention [H, P, P] and keys [H, P, D] of each call of the vision tower's last layer, from its own kernel's inputs."""
    from transformers import AttentionInterface

    seen: list[tuple[int, Tensor, Tensor]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        scaling = named["scaling"]
        weights = (query @ key.mT * scaling).softmax(-1)
        seen.extend((id(module), w, k) for w, k in zip(weights, key, strict=True))
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("spy", spy)
    model = by_hand.eager(model)
    model.set_attn_implementation({"vision_config": "spy"})
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    name = "video_grid_thw" if "video_grid_thw" in inputs else None
    with torch.no_grad():
        if "pixel_values_videos" in inputs:
            model.model.get_video_features(inputs["pixel_values_videos"], *([inputs[name]] if name else []))
        else:
            model.model.get_image_features(inputs["pixel_values"], vision_feature_layer=-1)
    assert tower is not None
    last = seen[-1][0]
    return [(w, k) for module, w, k in seen if module == last]  # type: ignore[return-value]


def tower_by_hand(family: str, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """[S, 1 + D]: attention received in the tower and key of each token of a video, zeros for other tokens."""
    told = []
    for weights, key in spied(model, inputs):
        paid = weights.mean(0)
        frame = torch.cat([(paid[0] if family == "internvl" else paid.mean(0))[:, None], key.mean(0)], 1)
        if family == "llava":  # 4 x 4 patches, bilinear to 2 x 2: the mean of the middle of each corner
            grid = frame.unflatten(0, (4, 4))
            told.append(
                torch.stack([grid[r : r + 2, c : c + 2].mean((0, 1)) for r in (0, 2) for c in (0, 2)])
            )
        elif family == "internvl":  # a class token, then 4 x 4 patches, of which 2 x 2 are a token
            grid = frame[1:].unflatten(0, (2, 2, 2, 2)).mean((1, 3))
            told.append(grid.flatten(0, 1))
        else:  # 2 x 3 tokens of four patches each, side by side; of "qwen" in the order of windows of 2 x 2 tokens
            order = [0, 1, 4, 2, 3, 5] if family == "qwen" else [0, 1, 2, 3, 4, 5]
            told.append(frame.unflatten(0, (-1, 4)).mean(1)[order])
    layout = layout_in(model, inputs)
    signals = torch.zeros(layout.length, told[0].shape[1])
    signals[candidate_columns(layout)] = torch.cat(told)
    return signals


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "qwen3_5", "glm46v", "glm4v_moe", "internvl"])
def test_towers_without_windows_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny(kind), prompt(kind, PROMPTS["two videos"], seed=8)
    seen = heard(monkeypatch, VisionZip, "prune", lambda _, signals, *rest: signals)
    with mmaccel.accelerate(model, prune=PRUNERS["visionzip"]) as fast:
        written(fast, inputs)
    ((score, key),) = [(one["vision_attention"], one["vision_key"]) for one in seen]
    want = tower_by_hand(kind, model, inputs)
    torch.testing.assert_close(torch.cat([score[:, None], key], 1), want, atol=1e-6, rtol=0)


@WITH_HYBRID
@pytest.mark.parametrize("kind", ["two videos"])
def test_visionzip_reads_the_vision_tower(family: str, model: Any, plain: Any, kind: str) -> None:
    """Scores and keys from what the tower's own kernel was given, pooled by hand; then the language model by hand."""
    inputs = prompt(family, PROMPTS[kind], seed=8)
    pruner = PRUNERS["visionzip"]
    with mmaccel.accelerate(model, prune=pruner) as fast:
        tokens, logits = written(fast, inputs)
        with torch.no_grad():
            once = fast(**inputs).logits[0, -1]
    torch.testing.assert_close(once, logits[0], atol=1e-5, rtol=0)
    layout, signals = layout_in(model, inputs), tower_by_hand(family, model, inputs)
    (stage,) = pruner.pruning_stages(6)

    def cut(told: dict[str, Any]) -> tuple[Tensor, Tensor]:
        given = {"hidden": told["start"][None]}
        given |= {"vision_attention": signals[:, 0], "vision_key": signals[:, 1:]}
        kept = pruner.prune(given, layout, stage)
        return kept.columns, kept.states

    want = by_hand.run(plain, inputs, tokens[:-1], {0: cut})
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)


@WITH_HYBRID
@pytest.mark.parametrize("pattern", ["grid", "vertical_slash", "q_boundary"])
def test_a_sparse_prefill_of_what_is_left(family: str, model: Any, pattern: str) -> None:
    """The pattern is told the true frame and cell of every token that is left; with chunks too."""
    inputs = prompt(family, PROMPTS["long"])
    layout = layout_in(model, inputs)
    seen: dict[int, TokenLayout] = {}

    class Seen(ForwardProbe):
        def read_attention_inputs(self, run: PrefillPass, layer: int, *rest: Any) -> None:
            seen[layer] = run.layout

    pruner = VisionZip(retention=0.5)
    with torch.no_grad(), mmaccel.accelerate(model, prune=pruner, sparse=pattern, dense_tail=8) as fast:
        fast(**inputs, **{NOTE: ForwardPassInfo(probes=(Seen(),))})
        out = fast.generate(**inputs, max_new_tokens=3, do_sample=False)
        report = fast.report()
    assert out.shape[1] == inputs["input_ids"].shape[1] + 3
    told = "q_boundary(a_shape)" if pattern == "q_boundary" else pattern
    assert report.patterns == ((told,) * 4,) * 6
    told = seen[5]
    m = len(videos(layout))
    assert report.kv["visual from layer 0"] == len(videos(told)) < m
    cells = {
        (int(f), int(r), int(c))
        for f, r, c in zip(layout.frame[0], layout.row[0], layout.column[0], strict=True)
    }
    left = [(int(told.frame[0, c]), int(told.row[0, c]), int(told.column[0, c])) for c in videos(told)]
    assert len(set(left)) == len(left) and set(left) <= cells
    assert told.position[0].tolist() == list(range(told.length))
    with torch.no_grad():
        with mmaccel.accelerate(model, prune=pruner) as fast:
            want = fast(**inputs).logits
        with mmaccel.accelerate(model, prune=pruner, chunk=64) as fast:
            torch.testing.assert_close(fast(**inputs).logits, want, atol=2e-5, rtol=0)
        wide = {"name": "a_shape", "sink": 128, "window": 4096}
        with mmaccel.accelerate(model, prune=pruner, sparse=wide, dense_tail=0) as fast:
            torch.testing.assert_close(fast(**inputs).logits, want, atol=2e-5, rtol=0)


@WITH_HYBRID
def test_a_second_turn_keeps_its_words(family: str, model: Any) -> None:
    """What follows the first prompt on the same cache is all kept, in every layer."""
    inputs = prompt(family, PROMPTS["video"])
    more = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), mmaccel.accelerate(model, prune=FastV(retention=0.4)) as fast:
        runner = fast.view.runner()
        runner.prefill(inputs)
        one = torch.cat([runner.step(more[:, k : k + 1]) for k in range(4)], 1)
        runner.truncate(inputs["input_ids"].shape[1] + 1)
        again = runner.step(more[:, 1:])
    torch.testing.assert_close(again, one[:, 1:], atol=1e-5, rtol=0)


@WITH_HYBRID
@pytest.mark.parametrize("name", ["fastv", "dycoke", "visionzip"])
def test_what_it_cannot_do_is_told(family: str, model: Any, name: str) -> None:
    from transformers import DynamicCache

    inputs = prompt(family, PROMPTS["video"])
    with mmaccel.accelerate(model, prune=PRUNERS[name]) as fast:
        assert len(fast.generate(**inputs, max_new_tokens=2, num_return_sequences=2, do_sample=True)) == 2
        with pytest.raises(ModelError, match="cache of its own"):
            fast(**inputs, past_key_values=DynamicCache())
        with pytest.raises(ModelError, match="output_hidden_states"):
            fast(**inputs, output_hidden_states=True)
        ids = fast.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert ids.shape[1] == inputs["input_ids"].shape[1] + 2
    assert "generate" not in model.__dict__ and "get_video_features" not in model.model.__dict__
