"""Where the question of a prompt stands, and later turns on the cache of the turn before, under every draft."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.layout import TEXT
from mmaccel.core.prefill.prune import observation_columns, question_text_columns
from mmaccel.models.prompt_layout import question_token_indices
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Sequential
from mmaccel.policies.prune import FastV, UVPrune
from tests.models.tiny_random import BUILD, DRAFTS, IMG, VE, VID, VS, prompt
from tests.spies import crossed, heard

# As Qwen2.5-VL's template writes: start and end of a message, line break, around a video; V are its tokens.
S, E, NL, FRONT, BACK, V = 90, 91, 92, 93, 94, 0
SYSTEM, USER, MODEL = [S, 80, NL, 1, 2, 3, E, NL], [S, 81, NL], [S, 82, NL]
VIDEO = [FRONT, V, V, V, BACK]
END = [E, NL]


def found(ids: list[int], ends: tuple[int, ...] = (E,)) -> list[int]:
    """The tokens of the question of `ids`, by `question_token_indices`."""
    at = [n for n, token in enumerate(ids) if token != V]
    visual = [n for n, token in enumerate(ids) if token == V]
    columns = question_token_indices([ids[n] for n in at], at, visual, ends, (FRONT, BACK))
    assert columns == sorted(set(columns))
    return [ids[n] for n in columns]


TAIL = [BACK, 12, 13, *END, *MODEL]
BEFORE = [*USER, 20, 21, *END, *MODEL, 22, *END]
MORE = [*MODEL, 30, *END, *USER, 31, *END, *MODEL]
ASKED: dict[str, list[tuple[list[int], list[int]]]] = {
    "words before a video, after words of a system": [
        (case, words)
        for system in ([], SYSTEM)
        for case, words in (
            ([*system, *USER, 10, 11, *VIDEO, *END, *MODEL], [10, 11]),
            # With words after it too, all that follows, as it is without words before.
            ([*system, *USER, 10, 11, *VIDEO, 12, 13, *END, *MODEL], [10, 11, *TAIL]),
            ([*system, *USER, 10, *VIDEO, 11, *VIDEO, *END, *MODEL], [10, 11]),
            # The model's message is begun already.
            ([*system, *USER, 10, 11, *VIDEO, *END, *MODEL, 7, 8], [10, 11]),
        )
    ],
    "where the text after is the question nothing is said": [
        ([*SYSTEM, *USER, *VIDEO, 10, 11, *END, *MODEL], []),
        ([*SYSTEM, *USER, *VIDEO, *VIDEO, 10, *END, *MODEL], []),
        ([*USER, *VIDEO, *END, *MODEL], []),
        ([*USER, 10, 11, *END, *MODEL], []),
    ],
    "earlier messages are no question of the video": [
        ([*BEFORE, *USER, 10, *VIDEO, *END, *MODEL], [10]),
        # A second question after the answer to the first.
        ([*USER, 10, *VIDEO, *END, *MORE], [10, BACK, *END, *MORE]),
    ],
    "markup that is not known is left alone": [
        ([10, 11, *VIDEO, 12], []),
        ([*USER, 10, *VIDEO], []),
        ([10, *VIDEO, *END, *MODEL], []),
        ([], []),
    ],
}


@pytest.mark.parametrize("told", ASKED)
def test_the_words_of_a_question(told: str) -> None:
    for ids, words in ASKED[told]:
        assert found(ids) == words
    assert found([*USER, 10, 11, *VIDEO, *END, *MODEL], ()) == []


@pytest.mark.parametrize("name", ["tiny-qwen", "tiny-ov"])
def test_of_a_chat(name: str, random_folder: Callable[[str], Path]) -> None:
    """The words alone of a question before the video; the text after it, as ever, of one behind it."""
    folder = random_folder(name)
    model, processor = mmaccel.load_model(str(folder)), mmaccel.load_processor(str(folder))
    video = {"type": "video", "video": torch.zeros(4, 3, 56, 56, dtype=torch.uint8)}
    words = {"type": "text", "text": "what colour is the circle ?"}

    def asked(*content: dict[str, Any]) -> tuple[list[str], list[str]]:
        inputs = processor.chat(content)
        layout = adapter_for(model).layout(model, inputs)
        ids = inputs["input_ids"][0]
        told = [processor.decode([int(ids[c])]) for c in question_text_columns(layout)]
        last = int((layout.modality[0] != TEXT).nonzero()[-1])
        assert observation_columns(layout).tolist() == list(range(last + 1, layout.length))
        return told, [processor.decode([int(ids[c])]) for c in observation_columns(layout)]

    told, after = asked(words, video)
    assert "".join(told).replace(" ", "") == "whatcolouristhecircle?"
    assert "assistant" in after[-1] + after[-2]
    told, after = asked(video, words)
    assert told == after


@pytest.mark.parametrize("family", BUILD)
@torch.no_grad()
def test_uv_compares_with_the_words(family: str) -> None:
    """Another question before the video keeps other tokens, and the same question keeps the same, whatever follows."""
    model = BUILD[family](layers=4)
    model.generation_config.eos_token_id = 150
    pieces: list[Any] = [("text", 12), ("video", 6), ("text", 4)]
    kept = []
    pruner = UVPrune(retention=0.3, layer=1, base=0, variation=False)
    for question_seed in (0, 0, 1):
        inputs = prompt(family, pieces)
        ids = inputs["input_ids"]
        words = torch.randint(3, 140, (8,), generator=torch.Generator().manual_seed(question_seed))
        # A start, who speaks, a break; eight words, one more; the video; an end, and the head of the model's message.
        ids[0, :3], ids[0, 3:11] = torch.tensor([160, 161, 162]), words
        ids[0, -4:] = torch.tensor([150, 160, 163 + len(kept) % 2, 162])
        layout = adapter_for(model).layout(model, inputs)
        assert question_text_columns(layout).tolist() == list(range(3, 12))
        states = adapter_for(model).embed(model, inputs)
        kept.append(
            pruner.keep({"hidden": torch.cat([states, states])}, layout, pruner.pruning_stages(4)[0]).tolist()
        )
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize("family", BUILD)
def test_a_draft_s_pruner_that_has_nothing_to_prune_is_told(family: str) -> None:
    model, peer = BUILD[family](layers=4), BUILD[family](layers=2, seed=1)
    draft = Sequential(model=peer, prune=UVPrune(retention=0.3))
    with mmaccel.accelerate(model, draft=draft) as fast:
        with pytest.warns(
            MmaccelWarning, match="prune 'uv' did nothing: the prompt has no image tokens or video"
        ):
            fast.generate(**prompt(family, [("text", 9)]), max_new_tokens=4, do_sample=False)
        told = fast.report()
        assert any("'uv' did nothing" in note for note in told.notes) and told.draft["failed"] is None
        fast.generate(
            **prompt(family, [("text", 3), ("image",), ("text", 9)]), max_new_tokens=4, do_sample=False
        )
        assert not fast.report().notes and fast.report().draft["failed"] is None


@pytest.mark.parametrize("family", BUILD)
def test_another_question_on_a_cache_is_refused_before_it_runs(family: str) -> None:
    """The cache holds what it held, and serves the question once what differs is cut off."""
    model, first = BUILD[family](), prompt(family, TURNS["text"][0])
    rows = {name: x for name, x in first.items() if x.shape == first["input_ids"].shape}
    other = {**first, **{name: torch.cat([x[:, :-4], x[:, -3:]], 1) for name, x in rows.items()}}
    ids = other["input_ids"]
    with mmaccel.accelerate(model) as fast:
        want = fast.generate(**other, **HOW)
        cache = (out := fast.generate(**first, **HOW)).past_key_values
        same = int((ids == out.sequences[:, : ids.shape[1]]).long().cumprod(1).sum())
        with pytest.raises(ModelError, match=rf"^input_ids: .* past_key_values .*crop\({same}\)"):
            fast.generate(**other, past_key_values=cache, **HOW)
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        cache.crop(same)
        with pytest.raises(ModelError, match=r"^pixel_values_videos: past_key_values has read"):
            fast.generate(**other, past_key_values=cache, **HOW)
        del other["pixel_values_videos"]
        two = {name: x if name.startswith("video") else x.repeat(2, 1) for name, x in other.items()}
        for given, beams in ((two, 1), (other, 2)):
            with pytest.raises(
                ModelError, match=r"^past_key_values: it holds 1 sequences and this call has 2"
            ):
                fast.generate(**given, past_key_values=cache, **HOW, num_beams=beams)
        assert torch.equal(fast.generate(**other, past_key_values=cache, **HOW).sequences, want.sequences)


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("family", BUILD)
def test_the_whole_conversation_follows_a_turn_of_new_tokens_alone(family: str, embeds: bool) -> None:
    """By their ids or their embeddings. Of what the cache holds only the turn before is known by its ids then."""
    model, first = BUILD[family](), prompt(family, TURNS["text"][0])
    new, last = torch.randint(20, 60, (1, 5)), torch.randint(20, 60, (1, 4))

    def third() -> tuple[Tensor, Any]:
        cache = (out := model.generate(**first, **HOW)).past_key_values
        ids = torch.cat([out.sequences[:, (held := cache.get_seq_length()) :], new], 1)
        mask = torch.ones(1, held + ids.shape[1], dtype=torch.long)
        if embeds:  # of all tokens, of which transformers takes those behind the cache
            ids = torch.cat([out.sequences, new], 1)
        given = {"inputs_embeds": model.get_input_embeddings()(ids)} if embeds else {"input_ids": ids}
        told = model.generate(**given, attention_mask=mask, past_key_values=cache, **HOW).sequences
        told = told if embeds else told[:, ids.shape[1] :]
        return torch.cat([out.sequences, new, told, last], 1), cache

    def answered(whole: Tensor, cache: Any) -> Tensor:
        mask = torch.ones_like(whole)
        return model.generate(input_ids=whole, attention_mask=mask, past_key_values=cache, **HOW).sequences

    want = answered(*third())
    with mmaccel.accelerate(model):
        whole, cache = third()
        held = cache.get_seq_length()
        with pytest.raises(ModelError, match=rf"do not begin with the {held} that past_key_values holds"):
            answered(whole[:, :held], cache)
        other = torch.cat([whole[:, :3], whole[:, 3:4] + 1, whole[:, 4:]], 1)
        with pytest.raises(ModelError, match=rf"do not begin with the {held} .* \(its crop\(3\)\)"):
            answered(other, cache)
        assert cache.get_seq_length() == held and torch.equal(answered(whole, cache), want)


TOKENS = 10
HOW: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
TURNS = {
    "text": [[("text", 6), ("video", 4), ("text", 9)], [("text", 8)], [("text", 5)]],
    "video": [
        [("text", 6), ("image",), ("text", 9)],
        [("text", 3), ("video", 6), ("text", 8)],
        [("text", 5)],
    ],
}


def sharp(name: str) -> Any:
    """A random model whose texts vary, and hold no placeholder: its weights are louder than drawn."""
    model = BUILD[name](layers=3)
    for weight in model.model.language_model.layers.parameters():
        weight.data *= 6 if weight.ndim == 2 else 1
    model.get_output_embeddings().weight.data[[IMG, VID, VS, VE]] = 0
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model = sharp(request.param)
    return request.param, model, copy.deepcopy(model)


def said(name: str, inputs: dict[str, Tensor], answer: Tensor, turn: dict[str, Tensor]) -> tuple[Any, Any]:
    """The next turn, after `answer` [1, S] on the cache, and as one whole prompt."""
    ids = torch.cat([answer, turn["input_ids"]], 1)
    new = {**turn, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    whole = {**inputs, **{k: v for k, v in new.items() if "pixel" not in k and "grid" not in k}}
    for name in turn:
        if name not in ("input_ids", "attention_mask", "mm_token_type_ids"):
            whole[name] = torch.cat([inputs[name], turn[name]]) if name in inputs else turn[name]
    if "mm_token_type_ids" in turn:
        gap = answer.shape[1] - inputs["mm_token_type_ids"].shape[1]
        kinds = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, gap))
        new["mm_token_type_ids"] = whole["mm_token_type_ids"] = torch.cat(
            [kinds, turn["mm_token_type_ids"]], 1
        )
    return new, whole


def talk(
    fast: Any, name: str, turns: Any, wanted: list[Tensor] | None = None, **more: Any
) -> tuple[list[Tensor], list[Any]]:
    """The answers of a conversation on one cache, and the report of each turn."""
    whole: dict[str, Any] = {}
    answers, reports, cache = [], [], None
    for number, pieces in enumerate(turns):
        turn = prompt(name, pieces, seed=number)
        given, whole = (turn, turn) if cache is None else said(name, whole, answers[-1], turn)
        out = fast.generate(**given, past_key_values=cache, **HOW, **more)
        cache = out.past_key_values
        answers.append(out.sequences)
        reports.append(fast.report())
    return answers, reports


def plainly(model: Any, name: str, turns: Any) -> list[Tensor]:
    """The same, each turn one whole prompt to the plain model."""
    whole: dict[str, Any] = {}
    answers: list[Tensor] = []
    for number, pieces in enumerate(turns):
        turn = prompt(name, pieces, seed=number)
        whole = turn if not answers else said(name, whole, answers[-1], turn)[1]
        answers.append(model.generate(**whole, max_new_tokens=TOKENS, do_sample=False))
    assert all(len(set(one[0, -TOKENS:].tolist())) > 2 for one in answers), "the texts must vary"
    return answers


@crossed("family", draft=DRAFTS, turns=TURNS, family=sorted(BUILD))
def test_turns_on_one_cache_are_one_whole_prompt(family, draft: str, turns: str, monkeypatch) -> None:
    name, model, peer = family
    want = plainly(model, name, TURNS[turns])
    read = heard(
        monkeypatch, HFRunner, "prefill",
        lambda self, inputs, *_, **__: (self.model is peer, inputs["input_ids"].shape[1]),
    )  # fmt: skip
    with mmaccel.accelerate(model, draft=DRAFTS[draft](peer)) as fast:
        got, reports = talk(fast, name, TURNS[turns])
    assert [one.tolist() for one in got] == [one.tolist() for one in want]
    for report in reports:
        assert not report.notes or (draft == "prompt_lookup" and "proposed nothing" in report.notes[0])
        if draft == "off":
            continue
        assert report.draft["failed"] is None
        assert report.draft["rounds"] > 0 or draft == "prompt_lookup"
        assert (report.draft["wait_s"] > 0) == (draft in ("sequential", "tree", "text_only", "parallel"))
        if draft in ("sequential", "parallel"):
            assert report.draft["accepted"] == report.draft["proposed"] > 0, (
                "a twin that sees the same is right"
            )
    if draft in ("sequential", "parallel", "tree", "text_only"):
        mine = [one for one in read if one[0]]
        assert len(mine) == 3
        assert mine[0][1] <= TOKENS + len(got[0][0])
        words = prompt(name, TURNS[turns][2], seed=2)["input_ids"].shape[1]
        assert words < mine[2][1] <= words + TOKENS, "what was read before is not read again"
    if draft == "sparse_to_dense":
        assert reports[1].draft["accepted"] > 0


@pytest.mark.parametrize("draft", ["off", "prompt_lookup"])
def test_columns_of_later_turns_are_known_for_what_they_are(family, draft: str) -> None:
    """transformers runs the tower before the model's forward, which then sees no pixels."""
    name, model, _ = family
    first, turn = (prompt(name, pieces, seed=n) for n, pieces in enumerate(TURNS["video"][:2]))
    with mmaccel.accelerate(model, draft=draft) as fast:
        out = fast.generate(**first, **HOW)
        given, whole = said(name, first, out.sequences, turn)
        again = fast.generate(**given, past_key_values=out.past_key_values, **HOW)
        known = again.past_key_values.sequence
        want = fast.adapter.layout(model, whole)
        assert bool((want.modality[0, first["input_ids"].shape[1] + TOKENS :] != 0).any())
        for field in ("modality", "frame", "row", "column"):
            own = getattr(known.layout, field)
            assert torch.equal(own[:, : want.length], getattr(want, field)), field
        ends = fast.adapter.positions(model, whole).flatten(0, -2)[-1, -1]
        assert int(known.delta) == int(ends) + 1 - want.length


@pytest.mark.filterwarnings("ignore::mmaccel.core.errors.MmaccelWarning")
def test_a_pruner_of_the_target_says_that_it_leaves_a_later_video(family) -> None:
    name, model, peer = family
    told: list[Any] = []
    prune = FastV(layer=1, retention=0.3)
    for draft in ("off", Sequential(model=peer, window=3)):
        with mmaccel.accelerate(model, prune=prune, draft=draft) as fast:
            answers, reports = talk(fast, name, TURNS["video"])
        told.append([one.tolist() for one in answers])
        whole = [any("of this turn whole" in note for note in one.notes) for one in reports]
        assert whole == [False, True, False]
        assert reports[0].kv["visual from layer 1"] == int(0.3 * reports[0].kv["visual"]) > 0
    assert told[0] == told[1]
    with mmaccel.accelerate(model, prune=prune) as fast, pytest.warns(MmaccelWarning, match="of this turn"):
        talk(fast, name, TURNS["video"][:2])


def test_a_later_turn_knows_that_the_pattern_acted_and_a_pass_after_it_is_told_alone() -> None:
    model, first = BUILD["llava"](), prompt("llava", [("text", 6), ("video", 36), ("text", 60)])
    pattern = {"name": "a_shape", "block": 16, "window": 16, "sink": 16}
    with mmaccel.accelerate(model, sparse=pattern, draft="prompt_lookup", dense_tail=0) as fast:
        out = fast.generate(**first, **HOW)
        assert not [one for one in fast.report().notes if "sparse" in one]
        more = torch.cat([out.sequences, torch.randint(20, 60, (1, 3))], 1)
        out = fast.generate(input_ids=more, past_key_values=out.past_key_values, **HOW)
        assert any(one.startswith("sparse: a_shape acted in an earlier call") for one in fast.report().notes)
        with torch.no_grad():
            fast(input_ids=torch.randint(20, 60, (1, 70)), past_key_values=out.past_key_values)
        told = fast.report()
        assert (told.new_tokens, told.prompt_tokens, told.notes) == (0, 70, ()) and told.ttft_s is None
