"""`mmaccel recommend`: a table, a sentence, JSON, and what is wrong with an option."""

from __future__ import annotations

import pytest

from mmaccel.cli.choices import size
from tests.cli import Call

FILM = ("recommend", "--minutes", "60", "--questions", "5", "--device", "h200", "--host-memory", "64GB")


def test_it_names_one_preset_and_says_what_does_not_fit(call: Call) -> None:
    status, out, err = call(*FILM, "--memory", "24GB", "--model", "llava-onevision-7b")
    assert (status, err) == (0, "")
    assert "take film-many-questions: film-many-questions alone fits: " in out and out.count("lacks") == 2
    assert "captions: no, for it takes a draft model" in out


def test_json_has_each_preset(call: Call) -> None:
    told = call.object(*FILM, "--memory", "80GiB", "--draft", "qwen2.5-vl-3b", "--json")
    assert set(told["presets"]) == {"exact", "long-video", "film-many-questions", "captions", "everything"}
    assert told["frames"] == 1800 and told["take"] in told["presets"]
    assert told["presets"][told["take"]]["fits"]
    live = call.object(*FILM, "--live", "--frames", "40", "--json")
    assert live["take"] == "stream" and live["frames"] == 40
    only = call.object(*FILM, "--lossless", "--json")
    assert set(only["presets"]) == {"exact"}


@pytest.mark.parametrize(
    "option, said",
    [
        (("--memory", "much"), "--memory: 'much' is not a size; give one such as 24GB"),
        (("--host-memory", "0GB"), "--host-memory: '0GB' is not a size"),
        (("--frame-size", "big"), "--frame-size: 'big' is not HEIGHTxWIDTH"),
        (("--device", "h900"), "Devices known by name are h200, h100"),
        (("--model", "nothing"), "model 'nothing'"),
    ],
)
def test_a_wrong_option_is_one_sentence(call: Call, option: tuple[str, str], said: str) -> None:
    assert said in call.error(*FILM, *option)


def test_sizes_are_decimal_or_binary() -> None:
    assert [size(text, "") for text in ("24GB", "1.5 gib", "7")] == [24 * 10**9, 3 << 29, 7]
