"""A pruner of layers on what a question to a stream recalls: the plain pruned model's answer where both drop alike."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill import prune as prunes
from mmaccel.core.prefill.recalled import RetrievedTokenPruning
from mmaccel.core.recipe import Recipe, stream_policy
from mmaccel.core.streams.asking import run_question as asked_of
from mmaccel.policies.prune import DyCoke, FastV, PyramidDrop, SparseVLM, VisionZip
from tests.models.streams import FPS, QUESTION, every_stream, film, logits, pair
from tests.spies import crossed, heard, refusal

DEPTH, FRAMES, TOKENS = 4, 24, 6
FAMILIES = ("random-ov", "random-qwen")
ROOM, TIGHT = every_stream(), every_stream(4, 4)
CLOSE = {"rtol": 0.0, "atol": 1e-3}
"""Logits are some ten in size."""
LAST: dict[str, prunes.TokenPruner] = {
    "fastv": FastV(layer=DEPTH - 1, retention=0.1),
    "fastv that leaves nothing": FastV(layer=2, retention=0.0),
    "pyramid_drop": PyramidDrop(stages_at=((DEPTH - 1) / DEPTH,), retention=0.1),
    "sparsevlm": SparseVLM(layers=(DEPTH - 2,), retention=(0.1,), recycle=0.0, raters="all"),
    "dycoke": DyCoke(drop=0.0, forget=0.9, layer=2, refresh=1.0),
}
"""What they drop is seen by no later layer, or later layers see words alone: so that what was read before the question knows
as much of it."""
EACH: dict[str, prunes.TokenPruner] = {
    "fastv": FastV(layer=1, retention=0.2),
    "pyramid_drop": PyramidDrop(stages_at=(0.25, 0.5), retention=0.4),
    "sparsevlm": SparseVLM(layers=(0, 1), retention=(0.5, 0.2)),
    "dycoke": LAST["dycoke"],
}


def sharp(name: str) -> tuple[Any, Any]:
    """A model whose attention chooses, so that its texts vary and what is dropped matters."""
    model, processor = pair(name, layers=DEPTH)
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    for layer in model.model.language_model.layers:
        own = layer.self_attn
        rows = (3, own.q_proj, own.k_proj), (8, own.v_proj, own.o_proj), (1, *layer.mlp.children())
        for size, *some in rows:
            for linear in some:
                if isinstance(linear, torch.nn.Linear):
                    linear.weight.data = size * torch.randn_like(linear.weight) * linear.in_features**-0.5
    for words, size in ((model.get_input_embeddings(), 3), (model.get_output_embeddings(), 1)):
        words.weight.data = size * torch.randn_like(words.weight)
    model.generation_config.eos_token_id = None
    return model, processor


SHARP = {name: sharp(name) for name in FAMILIES}


def prompt(name: str, *content: dict[str, Any]) -> dict[str, Any]:
    given = [*(content or [{"type": "video", "video": film(FRAMES)}]), {"type": "text", "text": QUESTION}]
    return SHARP[name][1].chat(given, fps=FPS)  # type: ignore[no-any-return]


def said(name: str, recipe: dict[str, Any], inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """Ids and logits [n, V] of the new tokens of `generate`, and its report."""
    how = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
    with mmaccel.accelerate(SHARP[name][0], recipe) as fast:
        out = fast.generate(**inputs, **how, output_logits=True)
        return out.sequences[0, inputs["input_ids"].shape[1] :], torch.cat(out.logits), fast.report()


def session(name: str, recipe: dict[str, Any], how: str = "ingest") -> mmaccel.VideoSession:
    one = mmaccel.VideoSession(*SHARP[name], recipe)
    getattr(one, how)(film(FRAMES), fps=FPS)
    return one


def answer(
    name: str, recipe: dict[str, Any], how: str = "ingest"
) -> tuple[list[int], Tensor, dict[str, float]]:
    """Ids of a session's answer, the logits [V] of its first token, and its counters."""
    with session(name, recipe, how) as one:
        first = logits(one)
        return list(one.ask(QUESTION, TOKENS).ids), first, one.counters()


def dropped(name: str, kv: Any, pruner: prunes.TokenPruner) -> bool:
    """Whether an answer is another than without the pruner: what a comparison is worth."""
    bare, pruned = (answer(name, {"kv": kv, **more}) for more in ({}, {"prune": pruner}))
    return bare[0] != pruned[0] and bare[0] != [bare[0][0]] * TOKENS


@crossed(kind=LAST, name=FAMILIES)
def test_on_all_that_was_read_it_is_the_pruned_model(kind: str, name: str) -> None:
    ids, logits, report = said(name, {"prune": LAST[kind]}, prompt(name))
    own, first, counts = answer(name, {"kv": "full", "prune": LAST[kind]}, "watch")
    assert own == ids.tolist() and dropped(name, "full", LAST[kind])
    torch.testing.assert_close(first, logits[0], **CLOSE)  # type: ignore[arg-type]
    told = {at: n for at, n in report.kv.items() if at.startswith("visual") and at != "visual from layer 0"}
    assert told == {at: n for at, n in counts.items() if at.startswith("visual")} and counts["visual"] > 0
    assert "nothing" not in kind or counts["visual from layer 2"] == 0


@crossed(kv=[one for one in ROOM if one != "full"], kind=EACH, name=FAMILIES)
def test_with_room_for_all_every_memory_says_the_same(kv: str, kind: str, name: str) -> None:
    want, first, counts = answer(name, {"kv": "full", "prune": EACH[kind]})
    own = answer(name, {"kv": ROOM[kv], "prune": EACH[kind]})
    assert own[0] == want
    torch.testing.assert_close(own[1], first, **CLOSE)  # type: ignore[arg-type]
    for at in counts:
        if at.startswith("visual"):
            assert own[2][at] == counts[at]


@pytest.mark.parametrize("kv", TIGHT)
def test_with_all_left_it_is_the_memory_s_own_answer(kv: str) -> None:
    for prune in (FastV(layer=1, retention=1.0), DyCoke(drop=0.0, forget=0.0, layer=2)):
        bare, pruned = (answer("random-qwen", {"kv": TIGHT[kv], **more}) for more in ({}, {"prune": prune}))
        assert pruned[0] == bare[0] and torch.equal(pruned[1], bare[1])


def paid(query: Tensor, key: Tensor, bias: Tensor | None = None, unseen: Tensor | None = None) -> Tensor:
    """[S] the attention of the last row of `query` [1, H, R, D] to the columns of `key` [1, G, S, D], over all heads."""
    keys = key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)
    scores = (query[0, :, -1:] @ keys.mT)[:, 0] * keys.shape[-1] ** -0.5
    if bias is not None:
        scores[:, : len(bias)] += bias
    return (scores if unseen is None else scores.masked_fill(unseen, -torch.inf)).softmax(-1).mean(0)


def watched(monkeypatch: pytest.MonkeyPatch, see: Callable[..., None]) -> None:
    """`see` is told of each view: who prunes, the layer, the raw query, the memory's own view and the one that is left."""
    inner = RetrievedTokenPruning.view

    def view(self: RetrievedTokenPruning, layer: int, query: Tensor) -> KVView:
        seen: list[KVView] = []
        own = type(self.state).view

        def noted(state: Any, layer: int, query: Tensor) -> KVView:
            seen.append(own(state, layer, query))
            return seen[-1]

        with monkeypatch.context() as patch:
            patch.setattr(type(self.state), "view", noted)
            left = inner(self, layer, query)
        see(self, layer, seen[0], left)
        return left

    monkeypatch.setattr(RetrievedTokenPruning, "view", view)


@crossed(kv=[one for one in TIGHT if one not in ("full", "offload", "no_cache")], name=FAMILIES)
def test_each_layer_shows_the_best_of_what_it_recalled(kv: str, name: str, monkeypatch) -> None:
    """By the last word's attention in the layer before the stage where all layers show the same, else in its own."""
    views: dict[int, tuple[KVView, KVView]] = {}
    facts: list[RetrievedTokenPruning] = []

    def see(pruning: RetrievedTokenPruning, layer: int, whole: KVView, left: KVView) -> None:
        views.setdefault(layer, (whole, left))
        facts.append(pruning)

    watched(monkeypatch, see)
    with session(name, {"kv": TIGHT[kv], "prune": FastV(layer=2, retention=0.3)}) as one:
        one.ask(QUESTION, 1)
        unit = one._live.stream.tokens_per_unit  # type: ignore[union-attr]
    head, rows = facts[0]._stream.head, views[0][0].query.shape[2]  # type: ignore[union-attr]
    assert 0 not in views or torch.equal(views[0][0].key, views[0][1].key)
    unlike = kv in ("rekv", "mosaic", "livevlm", "streammem")
    for layer in (2, 3):
        whole, left = views[layer]
        base = whole.key.shape[2] - rows
        few = (base - head) % unit if kv == "mosaic" else 0
        first = head + few
        ranked = views[layer if unlike else 1][0]
        worth = paid(ranked.query, ranked.key, ranked.bias)[first:base]
        count = int(0.3 * (base - first) + 1e-9)
        best = worth.topk(count).indices.sort().values + first
        kept = torch.cat([torch.arange(first), best, torch.arange(base, base + rows)])
        assert torch.equal(left.key, whole.key[:, :, kept])
        assert torch.equal(left.value, whole.value[:, :, kept])
        assert 0 < count < base - first


def test_summary_tokens_and_rows_of_the_question_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """mosaic stands a token for each cluster that it left out before the units."""
    shown: list[tuple[int, int]] = []

    def see(pruning: RetrievedTokenPruning, layer: int, whole: KVView, left: KVView) -> None:
        if layer == DEPTH - 1 and pruning._pass is not None and pruning._pass.kind == "question":
            first = pruning._stream.head + pruning.state.count_summary_columns(layer)
            shown.append(
                (pruning.state.count_summary_columns(layer), left.key.shape[2] - first - pruning._tail)
            )
            assert torch.equal(left.key[:, :, :first], whole.key[:, :, :first])

    watched(monkeypatch, see)
    with session("random-ov", {"kv": TIGHT["mosaic"], "prune": FastV(layer=1, retention=0.0)}) as one:
        one.ask(QUESTION, 1)
    assert [few > 0 for few, _ in shown] == [True] and [units for _, units in shown] == [0]


def test_a_branch_that_is_not_taken_leaves_no_trace_in_what_a_layer_holds() -> None:
    """The rows of question and answer are taken as the memory has them after each step."""
    with session("random-ov", {"kv": "full", "prune": EACH["fastv"]}) as one:
        live = one._live
        want = [asked_of(live, QUESTION, 9)]
        with want[0] as asked:
            straight = [asked.step(torch.tensor([[n]]))[0, 0].clone() for n in (5, 6, 7)]
        with asked_of(live, QUESTION, 9) as asked:
            asked.step(torch.tensor([[5, 9, 9]]))
            asked.truncate(asked.length() - 2)
            for n, logits in zip((6, 7), straight[1:], strict=True):
                torch.testing.assert_close(asked.step(torch.tensor([[n]]))[0, 0], logits, **CLOSE)  # type: ignore[arg-type]


def test_evidence_weighs_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a unit whose tokens a layer drops nothing reaches the answer there."""
    from mmaccel.policies.kv._windowed import StreamMemory

    tell = lambda self, layer, shares: (layer, shares[0].clone())  # noqa: E731
    seen = heard(monkeypatch, StreamMemory, "_units_of", tell)
    recipe = {"kv": {**TIGHT["recent"], "local": 4}}
    with session("random-ov", recipe) as one:
        bare = [moment.score for moment in one.ask(QUESTION, 1).evidence]
    whole = dict(seen)
    prune = FastV(layer=2, retention=0.25)
    with session("random-ov", {**recipe, "prune": prune}) as one:
        scores = [moment.score for moment in one.ask(QUESTION, 1).evidence]
        left, told = one.counters()["visual from layer 2"], dict(seen)
    assert scores != bare and sum(scores) == pytest.approx(1)  # type: ignore[arg-type]
    for layer in range(DEPTH):
        assert bool((whole[layer] > 0).all())
        assert int((told[layer] > 0).sum()) == (len(whole[layer]) if layer < 2 else left)


@crossed(kv=["full", "rekv", "mosaic", "livevlm", "no_cache"], between=[None, (1.0, 4.0)])
def test_a_layer_that_sees_nothing_of_a_frame_is_not_counted(kv: str, between: Any) -> None:
    plain, half = (
        session("random-ov", {"kv": TIGHT[kv], **more})
        for more in ({}, {"prune": LAST["fastv that leaves nothing"]})
    )
    with plain, half:
        before, after = (
            {x.frames: x for x in one.ask(QUESTION, 1, between=between).evidence} for one in (plain, half)
        )
    assert (
        before and all(0 < one.share <= 2 / DEPTH for one in after.values()) and after.keys() <= before.keys()
    )
    assert any(one.share > 2 / DEPTH for one in before.values())
    for frames, one in after.items():
        assert one.share <= before[frames].share and one.recalled <= one.share


@pytest.mark.parametrize("name", FAMILIES)
def test_images_and_other_videos_stay(name: str) -> None:
    """Whatever a call's prompt holds beside its longest video is seen whole, as text is."""
    image = {"type": "image", "image": film(21)[20]}
    inputs = prompt(name, image, {"type": "video", "video": film(8)}, image)
    prune = FastV(layer=1, retention=0.0)
    _, _, report = said(name, {"kv": ROOM["rekv"], "prune": prune}, inputs)
    model = SHARP[name][0]
    layout = adapter_for(model).layout(model, inputs)
    tokens = int(((layout.modality[0] == VIDEO) & (layout.frame[0] >= 0)).sum())
    assert (report.kv["visual"], report.kv["visual from layer 1"]) == (tokens, 0)
    with pytest.warns(MmaccelWarning, match="prune 'fastv' did nothing: the prompt has no"):
        _, found, report = said(name, {"kv": ROOM["rekv"], "prune": prune}, prompt(name, image, image))
    assert any("prune 'fastv' did nothing" in note for note in report.notes)
    bare = said(name, {"kv": ROOM["rekv"]}, prompt(name, image, image))[1]
    torch.testing.assert_close(found, bare, **CLOSE)  # type: ignore[arg-type]


def test_the_layout_is_a_prompt_s() -> None:
    """Head, units by rank, what stands for pictures in the question, and its words."""
    with session("random-ov", {"kv": "full", "prune": EACH["fastv"]}) as one:
        live = one._live
        with asked_of(live, QUESTION, 1) as asked:
            pruning: Any = asked.state
            (layout,) = pruning._layouts.values()
            (head, base, _), rows = next(iter(pruning._layouts)), pruning._tail
        marks = live.info.marks.shape[0]
    unit = live.stream.tokens_per_unit
    assert (base - head, layout.length) == (FRAMES * unit, base + rows) and marks > 0
    kinds = layout.modality[0].tolist()
    assert kinds == [TEXT] * head + [VIDEO] * (base - head + marks) + [TEXT] * (rows - marks)
    assert torch.equal(prunes.candidate_columns(layout), torch.arange(head, base))
    assert layout.frame[0, head:base].tolist() == [n // unit for n in range(FRAMES * unit)]
    words = torch.arange(base + marks, base + rows)
    assert torch.equal(prunes.observation_columns(layout), words)
    assert torch.equal(prunes.question_text_columns(layout), words)


class ByStates(FastV):
    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "attention"})


def test_what_has_no_part_in_a_question_is_told_before_a_weight_moves() -> None:
    for prune in (VisionZip(carry=True), ByStates()):
        for kv in ("full", "rekv"):
            told = refusal(lambda prune=prune, kv=kv: stream_policy(Recipe(kv=kv, prune=prune)))
            assert f"prune '{prune.name}' works on the states of a whole prompt, and kv '{kv}'" in told
            assert "or ask by generate or `mmaccel ask`, with kv 'full'." in told, "kv may be full already"
    assert "set compact to False" in refusal(lambda: Recipe(kv="rekv", prune=FastV(compact=True)))
    assert Recipe(kv="full", prune=FastV(compact=True)).prune is not None


def test_a_prompt_goes_in_by_chunks_and_its_question_is_pruned_whole() -> None:
    recipe = {"kv": ROOM["offload"], "prune": EACH["fastv"]}
    whole = said("random-ov", recipe, prompt("random-ov"))
    parts = said("random-ov", {**recipe, "chunk": 64}, prompt("random-ov"))
    assert torch.equal(parts[0], whole[0]) and parts[2].kv["visual from layer 1"] > 0
    torch.testing.assert_close(parts[1], whole[1], **CLOSE)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="runs the prompt whole; set chunk to null"):
        Recipe(kv="full", prune="fastv", chunk=64)


class OfImages(FastV):
    prunes: ClassVar[frozenset[int]] = frozenset({IMAGE})


def test_a_pruner_of_images_leaves_a_stream_s_frames() -> None:
    with session("random-ov", {"kv": TIGHT["rekv"], "prune": OfImages(layer=1, retention=0.0)}) as one:
        with pytest.warns(MmaccelWarning, match="prune 'fastv' did nothing: the prompt has no image tokens"):
            ids = one.ask(QUESTION, TOKENS).ids
        assert one.report().notes and one.counters()["visual"] == 0
    assert list(ids) == answer("random-ov", {"kv": TIGHT["rekv"]})[0]


def test_raters_are_the_words_where_there_are_no_embeddings() -> None:
    own = SparseVLM()
    assert own.for_stream() == SparseVLM(recycle=0.0, raters="all")
    with pytest.raises(RecipeError, match="raters"):
        SparseVLM(raters="some")  # type: ignore[arg-type]
