"""Pruned answers from the command line: the report says how many video tokens there were, and how many were left where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from mmaccel.policies.draft._draft_model import PeerState

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    "fields, told",
    [
        ("prune: {name: fastv, retention: 0.25, layer: 1}", "256 from layer 1"),
        ("prune: {name: visionzip, retention: 0.5}\nsparse: a_shape", "512 from layer 0"),
        ("prune: {name: dycoke, drop: 0.5, forget: 0.5, layer: 2}", "640 from layer 0"),
    ],
)
def test_ask_names_what_was_pruned(
    call: Call, clip: str, ov: str, tmp_path: Path, fields: str, told: str
) -> None:
    recipe = tmp_path / "pruned.yaml"
    recipe.write_text(fields)
    status, out, _ = call(
        "ask", clip, "What colour was the star?", "--model", ov, "--recipe", recipe, "--max-new-tokens", 2
    )
    assert status == 0 and "1024 tokens" in out and told in " ".join(out.split())
    mean = "held, the mean of the layers" in " ".join(out.replace("│", " ").split())
    assert mean == ("layer 0" not in told), "after a cut before the first layer all hold as many"


def test_ask_gives_programs_the_tokens_left(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    recipe = tmp_path / "pruned.yaml"
    recipe.write_text("prune: {name: fastv, retention: 0.25, layer: 1}")
    arguments = ("ask", clip, "hi", "--model", ov, "--recipe", recipe, "--max-new-tokens", 2, "--json")
    told = json.loads(call(*arguments)[1])
    assert told["video_tokens"] == {"prompt": 1024, "from layer 1": 256} and told["cache"]["bytes"] > 0
    layers = len(told["patterns"])
    assert told["cache"]["held"] - told["cache"]["held_mean"] == 768 * (layers - 1) // layers


@pytest.mark.parametrize("pruner", ["uv", "attention", "uniform", "random"])
def test_ask_names_what_the_draft_read(
    call: Call, clip: str, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruner: str
) -> None:
    read: list[int] = []
    plain = PeerState.keep

    def keep(self: PeerState, columns: Tensor) -> None:
        read.append(columns.numel())
        plain(self, columns)

    monkeypatch.setattr(PeerState, "keep", keep)
    recipe = tmp_path / "pruned.yaml"
    fields = f"prune: {{name: {pruner}, retention: 0.07}}"
    recipe.write_text(f"draft: {{name: sequential, model: {ov}, {fields}}}")
    arguments = (
        "ask",
        clip,
        "describe the video .",
        *f"--model {ov} --recipe {recipe} --max-new-tokens 6".split(),
    )
    told = json.loads(call(*arguments, "--json")[1])
    # All that is not a video stays.
    assert told["video_tokens"] == {"prompt": 1024, "in the draft": read[0] - told["prompt_tokens"] + 1024}
    assert told["video_tokens"]["in the draft"] == 71
    assert "1024 tokens, 71 in the draft" in call(*arguments)[1]


def test_a_draft_s_pruner_is_no_recipe(call: Call, clip: str, ov: str) -> None:
    status, _, err = call("ask", clip, "Which?", "--model", ov, "--recipe", "uv")
    assert status == 2 and "give it to the draft" in err
