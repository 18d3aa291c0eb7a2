"""The page of a run: what it holds, that it needs no network, and its three ways: Python, --report, `mmaccel report`."""

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from mmaccel import media
from mmaccel.cli.questions import stream_status_lines, summarize_stream_memory
from mmaccel.core.report import Meter
from mmaccel.core.report_page import COLUMNS, describe_draft, describe_kv_memory, memory_lines, render_page
from mmaccel.media.thumbnail import SIDE, encode_jpeg
from tests.cli import Call
from tests.models.streams import QUESTION, film, open_session

IMAGE = re.compile(r'src="data:image/jpeg;base64,([^"]+)"')
REKV = "kv: {name: rekv, frames: 4, window: 4, local: 2}\n"


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where a tag is left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []
        self.images = [picture(data) for data in IMAGE.findall(text)]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data + "\n"


def picture(data: str) -> torch.Tensor:
    """[3, H, W] float of a picture of a page."""
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    return (
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        .view(image.height, image.width, 3)
        .permute(2, 0, 1)
        .float()
    )


def without_images(text: str) -> str:
    return IMAGE.sub("", text)


def test_a_session_s_report_is_a_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    video = media.Video(film(24), torch.arange(24) / 2.0, 2.0, 2.0, 12.0)
    with open_session("random-ov", {"name": "rekv", "frames": 4, "window": 8, "local": 2}) as session:
        session.watch(video)
        answer, report = session.ask(QUESTION, 4), session.report()
    report.save_html(path, {QUESTION: answer, "<script>alert(1)</script>": "a & b"}, media.thumbnails(video))
    text = path.read_text(encoding="utf-8")
    found = Page(text)
    assert found.text["title"] == "mmaccel: rekv\n"
    assert "script" not in {tag for tag, _ in found.tags} and "alert(1)" in found.text["h3"]
    assert answer.text in found.text["p"] and "a & b" in found.text["p"]
    assert yaml.safe_load(found.text["pre"]) == json.loads(json.dumps(report.recipe))
    best = answer.top(8)
    assert len(found.images) == len(best) > 2
    for shown, one in zip(found.images, best, strict=True):
        frame = film(24)[round(one.seconds * 2)].float()
        other = film(24)[round(one.seconds * 2) - 12].float()
        assert (shown - frame).abs().mean() < 12 < (shown - other).abs().mean()
        assert f"{one.seconds:.1f} s" in found.text["b"]
    assert f"{report.ttft_s:.3f} s" in found.text["td"]


def test_a_page_asks_nothing_of_a_network(tmp_path: Path) -> None:
    with open_session("random-ov", "rekv") as session:
        session.watch(film(8), fps=2.0)
        answer = session.ask(QUESTION, 2)
        session.report().save_html(tmp_path / "page.html", {QUESTION: answer})
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//|url\(|@import", IMAGE.sub("", text).replace("<!doctype", ""))
    assert "default-src 'none'" in text and "(no picture)" in text and not IMAGE.search(text)


def test_ask_writes_a_page_and_so_does_report(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    made, run = tmp_path / "page.html", tmp_path / "run.json"
    words = ("ask", clip, "How many ?", "--model", ov, "--recipe", "a_shape-short", "--compare", "--json")
    status, out, err = call(*words, "--max-new-tokens", 2, "--report", made)
    assert status == 0 and err == f"the page of this run: {made}\n"
    run.write_text(out)
    assert call("report", run)[0] == 0
    text, again = made.read_text(), run.with_suffix(".html").read_text()
    assert without_images(text) == without_images(again)
    found, told = Page(text), json.loads(out)
    assert [tag for tag, _ in found.tags].count("svg") == 2  # a map of heads for each run
    assert "dense" in found.text["th"] and "a_shape-short" in found.text["th"]
    assert f"{told['kept']:.1%} of causal, in the last prompt or ingestion" in found.text["td"]
    assert "does not say which frames" in found.text["p"]
    given = media.read(clip, fps=told["fps"]).frames
    for shown, other, number in zip(found.images, Page(again).images, range(0, 64, 8), strict=True):
        assert max(shown.shape) <= SIDE and (shown - other).abs().mean() < 6
        frame = picture(base64.b64encode(encode_jpeg(given[number])).decode())
        assert (other - frame).abs().mean() < 6


def test_a_memory_that_does_not_tell_ranks_no_frames(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    words = f"watch {clip} --model {ov} --recipe full --fps 0.1 --max-new-tokens 1 --question hi".split()
    assert call(*words, "--report", tmp_path / "page.html")[0] == 0
    found = Page((tmp_path / "page.html").read_text())
    assert "does not tell which of them" in found.text["p"]
    assert not any(word in found.text["p"] + found.text["figcaption"] for word in ("%", "weigh most"))


def test_watch_shows_the_frames_an_answer_rests_on(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    made, run, recipe = tmp_path / "page.html", tmp_path / "run.json", tmp_path / "recipe.yaml"
    recipe.write_text(REKV)
    words = f"watch {clip} --model {ov} --recipe {recipe} --fps 0.5 --max-new-tokens 2 --json".split()
    status, out, err = call(*words, "--question", "what ?@30", "--question", "how many ?", "--report", made)
    assert status == 0 and err == f"the page of this run: {made}\n"
    told, found = json.loads(out), Page(made.read_text())
    seconds = [one["seconds"] for answer in told["answers"] for one in answer["evidence"]]
    assert len(found.images) == len(seconds) == 10
    for shown, when in zip(found.images, seconds, strict=True):
        frame = media.thumbnails(clip)(when)
        assert frame is not None and torch.equal(shown, picture(base64.b64encode(frame).decode()))
    run.write_text(out)
    call("report", run, "--out", made)
    assert Page(made.read_text()).images
    # A session that went on with another film: seconds of the earlier one have no picture here, later ones are moved.
    run.write_text(json.dumps({**told, "began": 20.0, "shift": 20.0}))
    call("report", run, "--out", made)
    moved = [when for when in seconds if when > 20]
    assert 0 < len(moved) < 10
    first = media.thumbnails(clip)(moved[0] - 20)
    assert first is not None
    assert torch.equal(Page(made.read_text()).images[0], picture(base64.b64encode(first).decode()))
    call("report", run, "--out", made, "--video", tmp_path / "gone.mp4")
    assert Page(made.read_text()).images == [] and "(no picture)" in made.read_text()


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"answers": 3, "video": null}', '{"recipe": "x", "video": 3}', "no JSON"]
)
def test_what_is_no_run_is_said(call: Call, tmp_path: Path, text: str) -> None:
    run = tmp_path / "run.json"
    run.write_text(text)
    call.error("report", run)
    assert not run.with_suffix(".html").exists()


@pytest.mark.parametrize("words", [("ask", "clip.mp4", "hi"), ("watch", "clip.mp4")])
def test_a_page_that_cannot_be_written_is_said_before_the_run(
    call: Call, tmp_path: Path, words: tuple[str, ...]
) -> None:
    for path, said in ((tmp_path / "no" / "page.html", "does not exist"), (tmp_path, "is a folder")):
        err = call.error(*words, "--report", path)
        assert err.startswith("error: --report: ") and said in err


def test_a_map_has_a_cell_for_each_head() -> None:
    patterns = [["grid", "a_shape"], ["dense", "grid"]]
    text = render_page(
        {"mine": {"patterns": patterns, "kept_by_head": [[0.1, 0.5], [1.0, 0.1]], "notes": ["a <note>"]}}
    )
    found = Page(text)
    cells = [attributes["d"] for tag, attributes in found.tags if tag == "path"]
    assert sorted(len(re.findall("M", one or "")) for one in cells) == [1, 1, 2]
    assert "M0 0h.9v.9h-.9zM1 1h.9v.9h-.9z" in cells and "a <note>" in found.text["li"]
    table = {n: {"name": "a_shape"} for n in range(2000)}
    text = render_page(
        {"mine": {"recipe": {"sparse": {"name": "per_head", "table": table}}}},
        [{"question": "\ud800", "answer": ""}],
    )
    assert len(text) < 12_000 and "...\n</pre>" in text and "(nothing)" in text and text.encode()


def test_more_places_than_tokens_are_told_as_copies() -> None:
    """A memory of streams that answered holds what the question sees a second time."""
    twice = "30 tokens allocated for 21, with copies of retrieved frames"
    assert describe_kv_memory({"held": 20.0, "seen": 21.0}) == "20 of 21 tokens held"
    assert describe_kv_memory({"held": 30.0, "seen": 21.0}) == twice
    told = describe_draft({"rounds": 16, "proposed": 80, "accepted": 38, "failed": None, "notes": []})
    assert told == "38 of 80 accepted in 16 rounds, 2.38 a round"
    fits = {"units": 60.0, "window": 60.0, "resident": 60.0, "let_go": 0.0, "clusters": 0.0, "bytes": 2.0**21}
    told = "all 60 steps of time (frames) fit in the window, nothing was clustered or offloaded; device 2 MiB"
    assert summarize_stream_memory(fits, 2**22) == f"memory: {told}; peak 4 MiB"
    more = dict(units=90.0, clusters=4.0, host_bytes=2.0**20, fetch_needed=8.0, prefetch_coverage=0.5)
    told = "60 of 90 steps of time (frames) on the device; device 2 MiB, host 1 MiB"
    prefetched = "50% of what questions copied back was prefetched"
    assert summarize_stream_memory(fits | more, 2**22) == f"memory: {told}; {prefetched}; peak 4 MiB"


def test_an_ingestion_that_was_cut_is_told_as_the_last() -> None:
    run = Meter().report({}, "reference", {}, torch.device("cpu"))
    run = replace(run, kept=0.25, patterns=(("grid",),), new_tokens=8, tokens_per_s=2.0)
    assert stream_status_lines(run, (0, 60)) == ["pairs computed: 25.0% of causal (grid x 1)"]
    told = "pairs computed in the last ingestion (frames 31-59): 25.0% of causal (grid x 1)"
    assert stream_status_lines(run, (31, 60)) == [told]
    cut = "each frame attended to 44% of earlier frames on average (a timed question or a save ended an ingestion)"
    assert stream_status_lines(replace(run, kv={"ingest_seen": 0.44}), (31, 60))[0] == f"{cut}; {told}"
    assert "decode: 8 tokens, 2.0 tokens/s" in str(run)
    assert "decode: 7 tokens\n" in str(replace(run, new_tokens=7))


def test_the_counters_of_a_memory_fit_a_terminal_and_stand_in_groups() -> None:
    few = dict(held=20.0, fetch_needed=3.0, host_bytes=2.0**20, host_seconds_in=0.25, questions=0.0)
    run: dict[str, Any] = {"peak_bytes": 2**21, "kv": few}
    assert memory_lines(run) == [
        "memory: peak 2 MiB, held 20 tokens",
        "  fetch: needed 3",
        "  host: bytes 1.00 MiB, seconds_in 0.25 s",
    ]
    assert memory_lines({**run, "kv": {}}) == ["memory: peak 2 MiB"]
    many = {
        f"{group}counter_{n}_seconds": n + 0.123456 for group in ("", "fetch_", "host_") for n in range(1, 20)
    }
    lines = memory_lines({**run, "kv": many})
    assert max(map(len, lines)) <= COLUMNS and not any(line[-1].isdigit() for line in lines)
    assert [line.split()[0] for line in lines if line[:4] != 4 * " "] == ["memory:", "fetch:", "host:"]
    assert sum(line.count(" s") for line in lines) == len(many), "no figure is broken"
