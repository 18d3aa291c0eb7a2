"""What the commands say of an answer that was cut off, and one default of how long answers may be."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mmaccel
from mmaccel.cli.ask import ask
from mmaccel.cli.console import cut_short
from mmaccel.cli.watch import watch
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS

Call = Callable[..., tuple[int, str, str]]
MARK = "cut off at 2 tokens (--max-new-tokens)"


def test_one_default_serves_everywhere() -> None:
    for call in (ask, watch, mmaccel.VideoSession.ask):
        assert inspect.signature(call).parameters["max_new_tokens"].default == MAX_NEW_TOKENS


def test_a_cut_is_told_of() -> None:
    assert cut_short("stop", 3) == ""
    told = [cut_short(reason, 1) for reason in ("length", "positions", "timeout", "cancelled")]
    assert len(set(told)) == 4 and all("1 token" in one and "1 tokens" not in one for one in told)


@pytest.mark.parametrize(
    "words",
    [
        ("watch", "{clip}", "--recipe", "recent", "--fps", 0.25, "--question", "what was it ?"),
        ("ask", "{clip}", "what was it ?", "--frames", 2),
        ("caption", "{clip}", "--recipe", "prompt_lookup", "--no-compare", "--frames", 2),
    ],
    ids=lambda words: words[0],
)
def test_a_command_marks_an_answer_that_is_cut_off(call: Call, clip: str, ov: str, words: tuple) -> None:
    line = [str(word).format(clip=clip) for word in words]
    status, out, _ = call(*line, "--model", ov, "--max-new-tokens", 2)
    assert status == 0 and MARK in out
    status, out, _ = call(*line, "--model", ov, "--max-new-tokens", 2, "--json")
    told = json.loads(out)
    assert status == 0 and told.get("answers", [told])[0]["finish_reason"] == "length"


def test_a_whole_answer_has_no_mark(
    call: Call, clip: str, shipped: Callable[[str], str], tmp_path: Path
) -> None:
    name = shipped("tiny-ov")
    status, out, _ = call(
        "watch", clip, "--model", name, "--fps", 0.25, "--question", "what colour was the star ?"
    )
    assert status == 0 and "cut off" not in out
    status, out, _ = call("ask", clip, "what colour was the star ?", "--model", name, "--frames", 4, "--json")
    assert status == 0 and json.loads(out)["finish_reason"] == "stop"


def test_evidence_may_be_left_out(call: Call, clip: str, ov: str) -> None:
    base = ("watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.25, "--question", "what was it ?")
    status, out, _ = call(*base, "--max-new-tokens", 2, "--evidence", 0)
    assert status == 0 and "based on" not in out and "first token" in out
    status, out, _ = call(*base, "--max-new-tokens", 2, "--evidence", 0, "--json")
    told = json.loads(out)["answers"][0]
    assert (told["evidence"], told["moments"]) == ([], 0)
