"""Questions and chat templates, as odd as text can be."""

from __future__ import annotations

import functools
import random

import pytest

import mmaccel
from mmaccel.cli.questions import parsed
from mmaccel.models import chat
from tests.fuzz.trial import Case, try_apart, try_here
from tests.fuzz.values import odd
from tests.models.test_session_faults import begun

PIECES = (
    "what", "is", " ", "\n", "?", "@", "@12", "@nan", "@-1", "<image>", "<video>", "<|im_end|>", "<|im_start|>system",
    "<|video_pad|>",
    "\0", "\x1b[2J", "\ud800", "\udcff", "\u202e", "\ufeff", "\U0001f600", "e" + "\u0301" * 200, "{{ 7 * 7 }}",
    "{% for %}", "\u2028",
    "%s%n", "a" * 1000, "word " * 200, "\ue000", "\uffff", "../../x", "--help", "\\", "'", '"', "<", "null",
)  # fmt: skip


@functools.cache
def processor(name: str, special_tokens: bool = True) -> mmaccel.models.processor.Processor:
    return mmaccel.load_processor(name, special_tokens=special_tokens)


@functools.cache
def session() -> mmaccel.VideoSession:
    return begun("recent", 4)


def question(chance: random.Random) -> Case:
    text = "".join(chance.choice(PIECES) for _ in range(chance.choice((0, 1, 3, 6))))
    given = odd(chance) if chance.random() < 0.1 else text
    way, name, special = chance.randrange(4), chance.choice(("tiny-ov", "tiny-qwen")), chance.random() < 0.5
    if way == 0:
        return lambda: session().ask(given, 1)
    if way == 1:
        return lambda: parsed(text)
    if way == 2:
        return lambda: processor(name, special).chat(given)
    return lambda: processor(name, special).chat([{"role": "user", "content": given}])


STATEMENTS = (
    "{{ messages }}", "{{ messages[0]['content'][0]['text'] }}", "{{ messages[0].content }}", "{{ bos_token }}",
    "{{ nothing }}",
    "{{ nothing.at.all }}", "{% for m in messages %}", "{% endfor %}", "{% if add_generation_prompt %}",
    "{% endif %}", "{% else %}",
    "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ 'a' * 999999 }}", "{{ 'a' * 9999999 }}", "{{ 9 ** 999999999 }}",
    "{# c #}",
    "{{ range(99999999) }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}",
    "{% endmacro %}", "{{ f() }}", "{% set a = messages * 5 %}", "{{ a }}", "{{ messages.__class__.__mro__ }}",
    "{{ [].append(1) }}",
    "{{ ''.__class__ }}", "{{ messages | tojson }}", "{{ messages | map('upper') | list }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}", "{% extends 'x' %}", "{% generation %}", "{% endgeneration %}", "{% break %}",
    "{{ cycler() }}",
    "{{ joiner }}", "{{ namespace(a=1).a }}", "{{ strftime_now('%Y') }}", "{{ '%d' | format('x') }}",
    "{{ 'a'.format(1) }}",
    "{{ '{0.__class__}'.format(1) }}", "{%", "{{", "}}", "{#", "<image>", "<video>", "\0", "\U0001f600", "text", "\n",
    "{{ messages | sort }}", "{{ messages[0]['role'] + 1 }}", "{{ lipsum(9) }}", "{{ 'a' | center(9999) }}",
    "{% filter upper %}",
    "{% raw %}", "{{ dict(a=1) }}", "{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "{{ " + "[" * 9000 + " }}",
    "{{ loop.index }}",
)  # fmt: skip


def template(chance: random.Random) -> Case:
    one = processor(chance.choice(("tiny-ov", "tiny-qwen")))
    stock, text = (
        one.chat_template,
        "".join(chance.choice(STATEMENTS) for _ in range(chance.choice((1, 1, 2, 4, 8)))),
    )
    if chance.random() < 0.3:
        at = chance.randrange(len(stock))
        text = stock[:at] + chance.choice((text, "", text)) + stock[at + chance.choice((0, 1, 9)) :]

    def work() -> None:
        one.chat_template = odd(chance) if chance.random() < 0.03 else text
        try:
            one.chat("what is it ?")
        finally:
            one.chat_template = stock

    return work


@pytest.fixture(autouse=True)
def warm() -> None:
    """Models are made before a case is timed."""
    for name in ("tiny-ov", "tiny-qwen"):
        processor(name), processor(name, False)
    session()


def test_questions() -> None:
    assert 0.2 < try_here(question) < 0.95


def test_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.1)
    assert 0.1 < try_here(template) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("make", [question, template])
def test_in_processes_with_limits(make: object) -> None:
    try_apart(make)  # type: ignore[arg-type]
