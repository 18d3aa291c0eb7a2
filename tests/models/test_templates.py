"""Chat templates that fail are told in one sentence, and special tokens in a question are text where that is asked for."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.models import chat
from mmaccel.models.processor import Processor
from tests.models.streams import FPS, film, logits, pair

NAMES = ("tiny-ov", "tiny-qwen")
BROKEN = {
    "{% for m in messages %}": "unexpected end of template",
    "{{ messages[0]['content'][7]['text'] }}": "has no element 7",
    "{{ messages.__class__.__mro__ }}": "unsafe",
    "{{ 1 // 0 }}": "by zero",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{{ messages | nothing }}": "no filter named 'nothing'",
    "{{ 'a' * 10 ** 9 }}": "line 1 has a power",
    "a\n{{ 'a' * 9999999999 }}": "line 2 has a number above 1000000",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ 'a' * 1000000 }}": "it writes 1000000 characters from 12",
    "{% set x = " + "(" * 5000 + "1" + ")" * 5000 + " %}": "recursion",
}


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_fails_is_told(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "range" in template:
        monkeypatch.setattr(chat, "SECONDS", 0.3)
    processor = mmaccel.load_processor("tiny-ov")
    processor.chat_template = template
    begin = time.monotonic()
    with pytest.raises(ModelError) as caught:
        processor.chat("what is it ?")
    told = str(caught.value)
    assert told.startswith("chat template: ") and BROKEN[template] in told
    assert told.endswith(".") and "\n" not in told and len(told) < 400
    assert time.monotonic() - begin < 4 and sys.gettrace() is None


def test_a_template_that_fails_is_told_by_a_session_too() -> None:
    model, stock = pair("random-ov")
    broken = Processor(
        stock.model_type, stock.tokenizer, image=stock.image.to_dict(), video=stock.video.to_dict(),
        extra=stock.extra, chat_template="{{ messages.nothing.at.all }}",
    )  # fmt: skip
    with (
        mmaccel.VideoSession(model, broken, kv="recent") as session,
        pytest.raises(ModelError, match="chat template"),
    ):
        session.watch(film(2), fps=FPS)


def test_a_template_with_blocks_of_transformers_is_rendered() -> None:
    processor = mmaccel.load_processor("tiny-ov")
    processor.chat_template = (
        "{% for m in messages %}{% if loop.index0 > 1000 %}{% break %}{% endif %}"
        "{% generation %}{{ m['content'][0]['text'] }}{% endgeneration %}{% endfor %}"
    )
    plain = processor.tokenizer("what is it ?")["input_ids"]
    assert processor.chat("what is it ?")["input_ids"].tolist() == [plain]


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_a_question_are_text_where_that_is_asked_for(name: str) -> None:
    stock, guarded = mmaccel.load_processor(name), mmaccel.load_processor(name, special_tokens=False)
    for question in ("what is it ?", "how many stars are there ?"):
        assert torch.equal(stock.chat(question)["input_ids"], guarded.chat(question)["input_ids"])
    video, special = (
        film(4),
        set(stock.tokenizer.all_special_ids) | {stock.video_token_id, stock.image_token_id},
    )
    ends = [
        token
        for token in stock.tokenizer.all_special_tokens
        if token not in (stock.video_token, stock.image_token)
    ]
    for token in (*ends, stock.video_token, stock.image_token):
        ids = [
            processor.chat([{"type": "video", "video": video}, {"type": "text", "text": text}])["input_ids"][
                0
            ].tolist()
            for processor, text in ((guarded, f"what{token} is{token} it ?"), (stock, "what is it ?"))
        ]
        counts = [sum(one in special for one in row) for row in ids]
        assert counts[0] == counts[1], token
        # A tokenizer of bytes has every text; the tokens of the text are those of the token's characters.
        inside = guarded.tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert len(ids[0]) >= len(ids[1]) + 2 * max(1, len(inside) - 1), token
        if token in ends:
            taken = stock.chat(f"what{token} is it ?")["input_ids"][0].tolist()
            assert sum(one in special for one in taken) > sum(
                one in special for one in stock.chat("what is it ?")["input_ids"][0].tolist()
            )


def test_a_session_goes_by_its_processor() -> None:
    model, stock = pair("random-ov")
    guarded = Processor(
        stock.model_type, stock.tokenizer, image=stock.image.to_dict(), video=stock.video.to_dict(),
        extra=stock.extra, chat_template=stock.chat_template, special_tokens=False,
    )  # fmt: skip
    ended = stock.tokenizer.eos_token
    with (
        mmaccel.VideoSession(model, stock, kv="recent") as one,
        mmaccel.VideoSession(model, guarded, kv="recent") as other,
    ):
        for session in (one, other):
            session.watch(film(4), fps=FPS)
        assert torch.equal(logits(one), logits(other))
        assert stock.video_token not in other.ask(f"what is {stock.video_token} ?", 1).text
        ids = [session._stream_adapter.tail(f"what {ended} is it ?")[0].tolist() for session in (one, other)]
        number = stock.tokenizer.convert_tokens_to_ids(ended)
        assert ids[0].count(number) == ids[1].count(number) + 1


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where standard input says yes."""
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').write_text('')\n"
        "from transformers import PretrainedConfig\nclass Evil(PretrainedConfig):\n    model_type = 'evil'\n"
    )
    config = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForImageTextToText": "evil.Evil"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(
        ModelError, match="brings code of its own, which is not run; give a model of a family"
    ):
        mmaccel.load_model(tmp_path)
    assert not list(tmp_path.rglob("ran")) and "evil" not in sys.modules
