"""Completions: the answers are those of `generate`, in OpenAI's form, whole or piece by piece."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.decoding.generate import Deadline
from mmaccel.media.video import Video, read_image
from mmaccel.serve.sources import decode_base64
from mmaccel.serve.speech import TextStreamer
from tests.media.films import write_film
from tests.serve.conftest import QUESTION, Served, frames_url, jpegs, loaded, mp4_url, text, video
from tests.spies import product


def seen() -> Video:
    """The frames that the server sees of `frames_url()`."""
    frames = torch.stack([read_image(decode_base64(one)) for one in jpegs()])
    times = torch.arange(len(frames), dtype=torch.float64)
    return Video(frames, times, 1.0, 1.0, float(len(frames)))


def plainly(content: list[dict[str, Any]], recipe: Any, **how: Any) -> tuple[str, int]:
    """What `generate` says of a content, and the tokens of the prompt."""
    model, processor = loaded()
    inputs = mmaccel.load_processor(processor, special_tokens=False, like=model).chat(content)
    with mmaccel.accelerate(model, recipe), torch.no_grad():
        ids = model.generate(**inputs, **{"do_sample": False, "max_new_tokens": 24, **how})
    rows = inputs["input_ids"].shape[1]
    return processor.decode(ids[0, rows:]), rows


@pytest.mark.parametrize(
    ("recipe", "streamed"), product(["dense", "mosaic", "fastv", "prompt_lookup"], [True, False])
)
def test_an_answer_is_that_of_generate(served: Served, recipe: str, streamed: bool) -> None:
    words = "Describe the video."
    content = [{"type": "video", "video": seen()}, {"type": "text", "text": words}]
    said, rows = plainly(content, served.engine.recipes[recipe])
    fields = {"max_tokens": 24, "mmaccel": {"recipe": recipe}, "stream": streamed}
    if streamed:
        fields["stream_options"] = {"include_usage": True}
    response = served.chat([video(frames_url()), text(words)], **fields)
    assert response.status_code == 200, response.text
    if not streamed:
        whole = response.json()
        assert whole["object"] == "chat.completion" and whole["choices"][0]["message"]["content"] == said
        reason, ours, usage = whole["choices"][0]["finish_reason"], whole["mmaccel"], whole["usage"]
    else:
        lines = [line for line in response.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == said
        assert len(deltas) > 4  # piece by piece
        last = chunks[-2]
        reason, ours, usage = last["choices"][0]["finish_reason"], last["mmaccel"], chunks[-1]["usage"]
    assert reason == ("length" if usage["completion_tokens"] == 24 else "stop")
    assert usage["prompt_tokens"] == rows
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert ours["recipe"] == recipe and 0 < ours["report"]["ttft_s"] < ours["ttft_s"]
    assert ours["report"]["new_tokens"] == usage["completion_tokens"]


def test_an_address_may_be_a_plain_text(served: Served) -> None:
    short = {"type": "video_url", "video_url": frames_url()}
    told = [
        served.chat([one, text()], max_tokens=4).json()["choices"] for one in (short, video(frames_url()))
    ]
    assert told[0] == told[1]
    assert served.engine.settings.folder is not None
    whole = served.engine.settings.folder / "bars.mp4"
    for url in ("file:bars.mp4", f"file://{whole}", f"file:{whole}"):
        answer = served.chat([video(url), text()], mmaccel={"frames": 4}, max_tokens=2)
        assert answer.status_code == 200, answer.text


def test_evidence_names_frames_and_shows_them(served: Served) -> None:
    ours = {"recipe": "mosaic", "thumbnails": True}
    answer = served.chat([video(frames_url()), text()], mmaccel=ours).json()
    content = [{"type": "video", "video": seen()}, {"type": "text", "text": QUESTION}]
    assert answer["choices"][0]["message"]["content"] == plainly(content, served.engine.recipes["mosaic"])[0]
    found = answer["mmaccel"]["evidence"]
    assert found and all(0 <= one["frames"][0] <= one["frames"][1] < 40 for one in found)
    assert [one["seconds"] for one in found] == [one["frames"][0] for one in found]  # one frame a second
    scores = [one["score"] or 0.0 for one in found]
    assert scores == sorted(scores, reverse=True)
    shown = read_image(decode_base64(found[0]["image"].partition(",")[2]))
    assert shown.shape == (3, 42, 70)
    assert (shown.float() - seen().frames[found[0]["frames"][0]].float()).abs().mean() < 8
    none = served.chat([video(frames_url()), text()], mmaccel={"recipe": "mosaic", "evidence": False})
    assert none.json()["mmaccel"]["evidence"] is None


def test_a_video_is_read_once_for_two_questions(served: Served, tmp_path: Path) -> None:
    url = mp4_url(write_film(tmp_path / "film.mp4", 30))
    before = served.engine.metrics.hits._value.get()
    first = served.chat([video(url), text()], mmaccel={"recipe": "mosaic", "frames": 8}).json()
    again = served.chat([video(url), text("How many?")], mmaccel={"recipe": "mosaic", "frames": 8}).json()
    other = served.chat([video(url), text()], mmaccel={"recipe": "mosaic", "frames": 9}).json()
    assert served.engine.metrics.hits._value.get() == before + 1
    counts = [one["mmaccel"]["report"]["kv"]["questions"] for one in (first, again, other)]
    assert counts == [1, 2, 1]
    for count in range(10, 17):
        served.chat([video(frames_url(count)), text()], mmaccel={"recipe": "mosaic"}, max_tokens=1)
    assert len(served.engine.kept._videos) == served.engine.settings.limits.kept


def test_conversations_images_and_text(client: Any) -> None:
    def conversation(picture: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": [picture, text("What is it?")]},
            {"role": "assistant", "content": "A star."},
            {"role": "user", "content": "What colour is it?"},
        ]

    url = {"url": f"data:image/jpeg;base64,{jpegs()[0]}"}
    messages = conversation({"type": "image_url", "image_url": url})
    body = {"model": "tiny-ov@fastv", "messages": messages, "max_completion_tokens": 6}
    answer = client.post("/v1/chat/completions", json=body).json()
    content = conversation({"type": "image", "image": read_image(decode_base64(jpegs()[0]))})
    said, rows = plainly(content, "fastv", max_new_tokens=6)
    assert answer["choices"][0]["message"]["content"] == said
    assert answer["usage"]["prompt_tokens"] == rows and answer["mmaccel"]["recipe"] == "fastv"


def test_stop_texts_end_an_answer_and_are_not_said(served: Served) -> None:
    words = [video(frames_url()), text("Describe the video.")]
    for recipe in ("dense", "fastv"):
        fields = {"mmaccel": {"recipe": recipe}, "max_tokens": 24}
        whole = served.chat(words, **fields).json()["choices"][0]["message"]["content"]
        stop = whole.split()[3]
        cut = whole[: whole.find(stop)]
        for streamed in (False, True):
            response = served.chat(words, stop=["nothing like it", stop], stream=streamed, **fields)
            if streamed:
                chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
                said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
                assert said == cut and chunks[-1]["choices"][0]["finish_reason"] == "stop"
            else:
                choice = response.json()["choices"][0]
                assert choice["message"]["content"] == cut and choice["finish_reason"] == "stop"


def test_tokens_behind_a_stop_text_are_not_counted() -> None:
    """A step may verify more of them: what stands behind the stop text is no part of the answer."""
    said = list[str]()
    speech = TextStreamer(lambda ids: "".join(map(chr, ids)), ["cd", "zz"], said.append, Deadline())
    for some in ("prompt", "a", "bcdef"):
        speech.put(torch.tensor([list(map(ord, some))]))
    speech.end()
    assert speech.cutter.stopped and speech.ids == [*map(ord, "abcd")] and "".join(said) == "ab"


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMS = [
    {
        "type": "json_schema",
        "json_schema": {"name": "number", "schema": {**NUMBER, "additionalProperties": False}},
    },
    {"type": "json_object"},
]


@pytest.mark.parametrize(("recipe", "form"), product(["dense", "mosaic", "prompt_lookup"], FORMS))
def test_an_answer_in_json(served: Served, recipe: str, form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    fields = {"max_tokens": 40, "mmaccel": {"recipe": recipe}, "response_format": form}
    response = served.chat([video(frames_url()), text("How many stars? Answer in JSON.")], **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    said = choice["message"]["content"]
    assert said.startswith("{")
    if choice["finish_reason"] == "stop" and form["type"] == "json_schema":
        assert type(json.loads(said)["n"]) is int
    plain = served.chat([video(frames_url()), text()], **fields | {"response_format": {"type": "text"}})
    assert not plain.json()["choices"][0]["message"]["content"].startswith("{")


def test_a_seed_draws_the_same_again(served: Served) -> None:
    how = {"temperature": 2.0, "max_tokens": 16}
    words = [video(frames_url(12)), text("Describe the video.")]

    def said(seed: int) -> str:
        return str(served.chat(words, seed=seed, **how).json()["choices"][0]["message"]["content"])

    assert said(1) == said(1)
    assert len({said(seed) for seed in range(1, 5)}) > 1


def test_the_models_are_listed(client: Any) -> None:
    listed = client.get("/v1/models").json()
    assert [one["id"] for one in listed["data"]][:3] == ["tiny-ov", "tiny-ov@dense", "tiny-ov@mosaic"]
    assert listed["mmaccel"]["default"] == "dense" and "mosaic" in listed["mmaccel"]["streams"]


def test_metrics_count(served: Served, client: Any) -> None:
    def figure(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])

    before = figure("mmaccel_new_tokens_total"), figure("mmaccel_first_token_seconds_count")
    drafted = figure("mmaccel_drafted_tokens_total")
    answer = served.chat(
        [video(frames_url(12)), text("Describe the video.")], mmaccel={"recipe": "prompt_lookup"}
    )
    assert figure("mmaccel_new_tokens_total") - before[0] == answer.json()["usage"]["completion_tokens"]
    assert figure("mmaccel_first_token_seconds_count") - before[1] == 1
    assert (
        figure("mmaccel_drafted_tokens_total") - drafted
        == answer.json()["mmaccel"]["report"]["draft"]["proposed"]
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": "gpt-9"}, "this server has 'tiny-ov' alone"),
        ({"mmaccel": {"recipe": "fast"}}, "this server has 'dense', 'mosaic'"),
        ({"n": 3}, "n: input should be 1"),
        ({"tools": []}, "tools: it is not served; leave it out"),
        ({"logprobs": True}, "logprobs: input should be false"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"max_tokens": 10**6}, "max_tokens: 1000000 is more than the 4096"),
        ({"temperature": -1}, "temperature: input should be"),
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"response_format": {"type": "json_schema"}}, "json_schema goes with the type json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type: input should be"),
        ({"stop": ["", "a"]}, "stop: a stop text is empty"),
        ({"mmaccel": {"recip": "mosaic"}}, "mmaccel.recip: there is no such field; take 'recipe'"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: it is neither a text nor a list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]},
            "messages.0.content.0.video_url.url: field required",
        ),
        ({"mmaccel": {"frames": 10**7}}, "frames: 10000000 is more than the 4096"),
    ],
)
def test_what_is_not_served_is_refused_in_a_sentence(served: Served, fields: Any, told: str) -> None:
    assert served.engine.settings.folder is not None
    response = served.chat([video("file:bars.mp4"), text()], **fields)
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    assert told in error["message"] and error["message"].count("\n") == 0
    assert QUESTION not in response.text  # nothing of what was sent comes back
