"""Where the question of a prompt stands, and that pruners read it there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.layout import TEXT
from mmaccel.core.prefill.prune import observers, question
from mmaccel.models.prompt_layout import question_columns
from mmaccel.policies.draft import Sequential
from mmaccel.policies.prune import UVPrune
from tests.models.tiny_random import BUILD, prompt

# As Qwen2.5-VL's template writes: start and end of a message, line break, around a video; V are its tokens.
S, E, NL, VS, VE, V = 90, 91, 92, 93, 94, 0
SYSTEM, USER, MODEL = [S, 80, NL, 1, 2, 3, E, NL], [S, 81, NL], [S, 82, NL]
VIDEO = [VS, V, V, V, VE]
END = [E, NL]


def found(ids: list[int], ends: tuple[int, ...] = (E,)) -> list[int]:
    """The tokens of the question of `ids`, by `question_columns`."""
    at = [n for n, token in enumerate(ids) if token != V]
    visual = [n for n, token in enumerate(ids) if token == V]
    columns = question_columns([ids[n] for n in at], at, visual, ends, (VS, VE))
    assert columns == sorted(set(columns))
    return [ids[n] for n in columns]


@pytest.mark.parametrize("system", [[], SYSTEM], ids=["first message", "after a system's"])
def test_words_before_a_video(system: list[int]) -> None:
    assert found([*system, *USER, 10, 11, *VIDEO, *END, *MODEL]) == [10, 11]
    # With words after it too, all that follows, as it is without words before.
    tail = [VE, 12, 13, *END, *MODEL]
    assert found([*system, *USER, 10, 11, *VIDEO, 12, 13, *END, *MODEL]) == [10, 11, *tail]
    assert found([*system, *USER, 10, *VIDEO, 11, *VIDEO, *END, *MODEL]) == [10, 11]
    # The model's message is begun already.
    assert found([*system, *USER, 10, 11, *VIDEO, *END, *MODEL, 7, 8]) == [10, 11]


def test_where_the_text_after_is_the_question_nothing_is_said() -> None:
    assert found([*SYSTEM, *USER, *VIDEO, 10, 11, *END, *MODEL]) == []
    assert found([*SYSTEM, *USER, *VIDEO, *VIDEO, 10, *END, *MODEL]) == []
    assert found([*USER, *VIDEO, *END, *MODEL]) == []
    assert found([*USER, 10, 11, *END, *MODEL]) == []


def test_earlier_messages_are_no_question_of_the_video() -> None:
    before = [*USER, 20, 21, *END, *MODEL, 22, *END]
    assert found([*before, *USER, 10, *VIDEO, *END, *MODEL]) == [10]
    # A second question after the answer to the first.
    more = [*MODEL, 30, *END, *USER, 31, *END, *MODEL]
    assert found([*USER, 10, *VIDEO, *END, *more]) == [10, VE, *END, *more]


@pytest.mark.parametrize(
    "ids, ends",
    [
        ([*USER, 10, 11, *VIDEO, *END, *MODEL], ()),
        ([10, 11, *VIDEO, 12], (E,)),
        ([*USER, 10, *VIDEO], (E,)),
        ([10, *VIDEO, *END, *MODEL], (E,)),
        ([], (E,)),
    ],
)
def test_markup_that_is_not_known_is_left_alone(ids: list[int], ends: tuple[int, ...]) -> None:
    assert found(ids, ends) == []


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
        told = [processor.decode([int(ids[c])]) for c in question(layout)]
        last = int((layout.modality[0] != TEXT).nonzero()[-1])
        assert observers(layout).tolist() == list(range(last + 1, layout.length))
        return told, [processor.decode([int(ids[c])]) for c in observers(layout)]

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
        assert question(layout).tolist() == list(range(3, 12))
        states = adapter_for(model).embed(model, inputs)
        kept.append(
            pruner.keep({"hidden": torch.cat([states, states])}, layout, pruner.stages(4)[0]).tolist()
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
