"""`mmaccel watch`: questions at their time, answers with evidence, sessions saved and gone on with, errors in a sentence."""

import io
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mmaccel.cli import choices
from mmaccel.cli import watch as command
from mmaccel.cli.questions import TerminalQuestions, evidence_footer, evidence_table, parse_question
from mmaccel.core.decoding.generate import Answer, Evidence
from mmaccel.core.errors import MmaccelError, ModelError, VideoError
from mmaccel.media import Video
from tests import python
from tests.cli import Call, after
from tests.spies import broken, product


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("where is it ?@12.5", (12.5, "where is it ?")),
        ("where is it ?", (None, "where is it ?")),
        ("who wrote to me@home ?", (None, "who wrote to me@home ?")),
        ("a@b@3", (3.0, "a@b")),
        ("who is me@home ", (None, "who is me@home")),
    ],
)
def test_a_question_may_have_a_time(text: str, want: tuple[float | None, str]) -> None:
    assert parse_question(text) == want


@pytest.mark.parametrize("text", ["@4", "  ", "now@-1", "now@inf", "now@nan", "@abc", "now@soon", "now@1:30"])
def test_questions_that_cannot_be_are_one_sentence(text: str) -> None:
    with pytest.raises(MmaccelError, match=r"^--question: .*\.$"):
        parse_question(text)


def test_questions_are_due_after_the_last_frame_before_them() -> None:
    times = torch.tensor([0.0, 2.0, 4.0, 6.0], dtype=torch.float64)
    video = Video(torch.zeros(4, 3, 2, 2, dtype=torch.uint8), times, 0.5, 1.0, 8.0)
    asked = [(1.0, "a"), (4.0, "b"), (4.5, "c"), (7.0, "d"), (None, "e")]
    later = Video(video.frames, times + 8, 0.5, 1.0, 8.0)
    for film, pieces, left in (
        (video, [([0.0], ["a"]), ([2.0, 4.0], ["b", "c"]), ([6.0], [])], [(7.0, "d"), (None, "e")]),
        (later, [(None, ["d"]), ((times + 8).tolist(), [])], [(None, "e")]),
    ):
        found = command.split_clip_at_questions(film, asked)
        assert [(p and p.times.tolist(), [q for _, q in due]) for p, due in found] == pieces
        assert asked == left


def test_it_watches_asks_saves_and_goes_on(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    base = ("watch", clip, "--model", ov, "--json", "--max-new-tokens", 3, "--fps", 0.25)
    told = call.object(
        *base, "--recipe", "rekv", "--question", "what colour was the star ?@20", "--question", "how many ?", "--save",
        tmp_path / "s",
    )  # fmt: skip
    assert told["frames"] == 16 and told["seconds"] == 60.0 and told["complete"] and told["began"] is None
    assert [(a["asked_at"], a["frames"]) for a in told["answers"]] == [(20.0, 6), (60.0, 16)]
    best = told["answers"][0]["evidence"]
    ranks = [-one["score"] for one in best]
    assert len(best) == 5 and ranks == sorted(ranks) and told["answers"][0]["moments"] == 6
    assert all(first == last and first in range(6) for first, last in (one["frames"] for one in best))
    assert told["answers"][1]["ttft_s"] > 0 and told["recipe"]["kv"]["name"] == "rekv"
    another = shutil.copy(clip, tmp_path / "another.mp4")
    again = ("watch", another, *base[2:], "--load", tmp_path / "s")
    told = call.object(*again, "--question", "what was first ?@72")
    assert (told["began"], told["frames"]) == (60.0, 32)
    assert [(a["asked_at"], a["frames"]) for a in told["answers"]] == [(72.0, 19)]


def test_a_saved_session_has_its_own_dtype(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    base, saved = ("--model", ov, "--max-new-tokens", 2), tmp_path / "s"
    call.object("watch", clip, *base, "--json", "--fps", 0.1, "--dtype", "bfloat16", "--save", saved)
    told = call.object("watch", "--load", saved, *base, "--json", "--question", "how many ?")
    assert told["frames"] and told["answers"][0]["answer"] is not None
    said = call.error("watch", "--load", saved, *base, "--dtype", "float32", "--question", "how many ?")
    assert said.startswith("error: --dtype: ") and "give bfloat16, or leave --dtype out." in said


def test_presets_are_recipes_of_a_watch(call: Call) -> None:
    said = call.text("watch", "--help")
    assert "A recipe, a memory's name or a YAML file" in " ".join(said.replace("│", " ").split())


def test_people_read_the_answer_and_what_it_rests_on(call: Call, clip: str, ov: str) -> None:
    status, out, err = call(
        "watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.25, "--question", "how many ?", "--max-new-tokens", 2
    )  # fmt: skip
    assert status == 0 and "watched 16 frames, 60 s" in err
    # The rate is told before all else, and once.
    first, rest = err.split("\n", 1)
    told = "reads 0.25 of 1 frames a second (--fps); what is shown for less than 4 s may be missed."
    assert first == told and "--fps" not in rest
    assert "[60.0 s] how many ?" in out and "more" not in out
    assert re.search(r"first token [\d.]+ s; decode: 2 tokens\n", out), "two tokens make no rate"
    head = "based on  shown at  visible in  retrieved in  attention-rollout share"
    assert head in out and "0% retrieved: a recent frame" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("frame ")]
    seen = [["frame", str(n), str(4 * n), "s", "100%"] for n in range(12, 16)]
    assert sorted(row[:5] for row in rows) == seen
    assert all(row[5] == "0%" for row in rows), "what is in the local window is seen, and not retrieved"
    assert sum(float(row[6].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.3)
    status, out, _ = call(
        "watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.25, "--question", "how many ?", "--evidence", 3
    )  # fmt: skip
    assert status == 0 and out.count(" 100% ") == 3 and "and on 1 more" in out


def test_what_a_memory_does_not_tell_is_left_blank() -> None:
    evidence = tuple(Evidence((n, n), float(n), 1.0, 0.0, None) for n in range(4))
    answer = Answer("red", (3,), 0.1, None, evidence)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(evidence_table(answer, 2))
    rows = console.export_text().splitlines()[1:]
    assert [row.split() for row in rows] == [["frame", str(n), str(n), "s", "100%", "0%"] for n in range(2)]
    told = evidence_footer(answer, 2)
    assert told[0] == "and on 2 more" and "does not tell" in told[1]
    assert told[2].endswith("decode: 2 tokens") and "1 token," in repr(answer)
    # Counters of clusters are no tokens that a pruner left.
    counts = {"visual_clusters": 7.0, "visual_splits": 0.0}
    assert evidence_footer(replace(answer, counters=counts), 2) == told
    pruned = replace(answer, counters={**counts, "visual": 9.0, "visual from layer 2": 3.0})
    assert evidence_footer(pruned, 2)[2] == "video: 9 tokens, 3 from layer 2 on"


def test_questions_are_piped(clip: str, ov: str) -> None:
    """To a real process: JSON alone on standard output, and nothing but what it says of the questions beside it."""
    words = f"-m mmaccel watch {clip} --model {ov} --recipe recent --fps 0.25 --max-new-tokens 1 --json"
    piped = "how many ?\n\nwhat was first ?@20\r\nwhat was last ?@500\n"
    done = python(*words.split(), said=piped, HF_HUB_OFFLINE="1")
    told = json.loads(done.stdout)
    assert [(a["question"], a["at"], a["asked_at"]) for a in told["answers"]] == [
        ("what was first ?", 20.0, 20.0), ("what was last ?", 500.0, 60.0), ("how many ?", None, 60.0)
    ]  # fmt: skip
    assert done.stderr.splitlines() == [
        "3 questions from standard input: 2 at a time, 1 at the end.",
        "'what was last ?' is for 500 s, past the last frame at 60 s; it is asked there.",
    ]


def test_a_file_of_questions(call: Call, clip: str, ov: str, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("how many ?\n")
    base = ("watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.1, "--max-new-tokens", 1, "--json")
    for options, asked, said in (
        ((), ["how many ?"], "1 question from standard input: 0 at a time, 1 at the end."),
        (("--question", "who ?"), ["who ?"], "not read beside --question"),
        (("--question", "who ?", "--question", "-"), ["who ?", "how many ?"], "1 question from"),
    ):
        with path.open(encoding="utf-8") as file:
            monkeypatch.setattr("sys.stdin", file)
            status, out, err = call(*base, *options)
        assert status == 0 and [one["question"] for one in json.loads(out)["answers"]] == asked
        assert said in err and err.count("\n") == 1
    for content, match in (
        (b"a ?@soon\n", "standard input: 'soon' after"),
        (
            b"what is it ?\n\xff\xfe bad ?\n",
            "not UTF-8 text: line 2 has other bytes; give one question a line",
        ),
        (b"x" * (1 << 20) + b"?", "standard input has more than 1 MiB"),
    ):
        path.write_bytes(content)
        # As where the locale is C: such bytes go through.
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            monkeypatch.setattr("sys.stdin", file)
            assert match in call.error(*base)


def test_a_time_before_a_saved_session_s_end_is_told(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    base = ("watch", clip, "--model", ov, "--json", "--max-new-tokens", 1, "--fps", 0.1)
    assert call(*base, "--recipe", "recent", "--save", tmp_path / "s")[0] == 0
    another = shutil.copy(clip, tmp_path / "another.mp4")
    asked = ("--question", "what was first ?@20")
    status, _, err = call("watch", another, *base[2:], "--load", tmp_path / "s", *asked)
    told = "'what was first ?' is for 20 s, before the saved session's end at 60 s; it is asked there.\n"
    assert (status, err) == (0, told)


def test_a_saved_session_is_asked_without_a_video(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    model = ("--model", ov, "--max-new-tokens", 3, "--json")
    base = ("watch", clip, *model, "--recipe", "rekv", "--fps", 0.25, "--question", "how many ?")
    (before,) = call.object(*base, "--save", tmp_path / "s")["answers"]
    told = call.object("watch", "--load", tmp_path / "s", *model, "--question", "how many ?")
    assert (told["video"], told["frames"], told["began"]) == (None, 16, 60.0)
    (after,) = told["answers"]
    assert (after["answer"], after["evidence"]) == (before["answer"], before["evidence"])
    for words, sentence in (
        (("watch", *model), "there is no video; name one, or a saved session with --load"),
        (("watch", "--load", tmp_path / "s", *model), "there is no question; give one with --question"),
        (("watch", "--load", tmp_path / "s", *model, "--question", "hi ?@40"), "at 60 s; leave out @40."),
    ):
        assert sentence in call.error(*words)


def test_a_rate_is_told_for_what_it_is() -> None:
    assert choices.format_frame_rate(25.0, 25.0) == "reads every frame, 25 a second (--fps)."
    assert choices.format_frame_rate(0.5, None).startswith(
        "reads 0.5 frames a second (--fps); what is shown for less than 2 s"
    )


def test_typed_questions_are_answered(call: Call, clip: str, ov: str, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("first one ?\n\nsecond one ?\n"))
    status, out, err = call(
        "watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.1, "--max-new-tokens", 1
    )
    assert status == 0 and "type a question" in err
    assert "first one ?" in out and "second one ?" in out and out.count("based on") == 2


ENDS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (VideoError("it is silent."), 2)]


@pytest.mark.parametrize(("end", "live"), product(ENDS, [(), ("--live",)]), ids=str)
def test_a_stop_keeps_what_was_seen(
    call: Call,
    clip: str,
    ov: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: tuple[BaseException | signal.Signals, int],
    live: tuple[str, ...],
) -> None:
    from mmaccel import media

    stop, status = end
    # Where the tests run in the background of a shell interrupts are ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def ends() -> None:
        if isinstance(stop, BaseException):
            raise stop
        os.kill(os.getpid(), stop)
        time.sleep(0.5)

    monkeypatch.setattr(media, "clips", after(2, media.clips, ends))
    try:
        found, out, err = call(
            "watch", clip, "--model", ov, "--recipe", "recent", "--fps", 1, "--clip", 4, "--save", tmp_path / "s",
            "--json", *live,
        )  # fmt: skip
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == status
    if status != 2:
        assert json.loads(out)["complete"] is False and json.loads(out)["frames"] == 8
    else:
        assert err == f"saved 8 frames to {tmp_path / 's'}\nerror: it is silent.\n"
    assert json.loads((tmp_path / "s" / "session.json").read_text())["frames"] == 8


CAP = "kv: {name: rekv, window: 16, frames: 8, store: {host_bytes: 1000000}}\n"
"""Room for 40 of the 64 frames, beside the window."""


@pytest.mark.parametrize("stop", ["the cap is reached", "it is stopped", "what is saved has no room"])
def test_answers_given_are_not_lost_when_it_ends_early(
    call: Call, clip: str, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    from mmaccel.core.streams.session import VideoSession

    asked = ("how many ?@8", "what colour was the star ?@60", "what was first ?")
    (tmp_path / "cap.yaml").write_text(CAP if "cap" in stop else "kv: rekv\n")
    if "saved" in stop:
        asked = asked[:1]
        broken(monkeypatch, VideoSession, "save", ModelError("no room."))
    elif "stopped" in stop:
        broken(monkeypatch, VideoSession, "watch", KeyboardInterrupt, lambda self, *_, **__: len(self) > 30)
    base = (
        "watch", clip, "--model", ov, "--recipe", tmp_path / "cap.yaml", "--fps", 1, "--clip", 8, "--max-new-tokens", 2,
        "--save", tmp_path / "s", *(part for text in asked for part in ("--question", text)),
        *(["--live"] if "stopped" in stop else []),
    )  # fmt: skip
    status, out, err = call(*base, "--json")
    told = json.loads(out)
    assert told["complete"] is False and [one["question"] for one in told["answers"]] == ["how many ?"]
    left = [("what colour was the star ?", 60.0), ("what was first ?", None)] if len(asked) > 1 else []
    assert [(one["question"], one["at"]) for one in told["unanswered"]] == left
    if "stopped" in stop:
        assert (status, err, told["error"]) == (130, "", None)
    else:
        assert status == 2 and err.endswith(f"error: {told['error']}\n")
        assert ("reached" if "cap" in stop else "no room.") in told["error"]
    there = tmp_path / "s" if "saved" not in stop else None
    assert told["saved"] == (None if there is None else str(there)) and told["frames"] > 8
    status, out, err = call(*base)
    assert status == (130 if "stopped" in stop else 2) and "how many ?" in out
    named = "not answered: 'what colour was the star ?' (for 60 s), 'what was first ?'\n"
    assert (named in err) == bool(left)


def test_what_is_typed_and_is_no_text_is_left_out(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"first ?\n\xff ?\nsecond ?\n"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", typed)
    assert list(TerminalQuestions(True).read(waits=True)) == ["first ?", "second ?"]
    assert "has bytes that are not UTF-8; write it in UTF-8." in capsys.readouterr().err


def test_what_is_typed_and_is_no_text_ends_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"first ?\n" + b"x" * 9000 + b"\n\xff\n"), "utf-8")
    )
    assert next(iter(list(TerminalQuestions(True).read(waits=True)))) == "first ?"


@pytest.mark.parametrize("how", [[], ["--live"]])
def test_subtitles_of_a_film(how: list[str], call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    """Each question sees those of its time; a saved session has them."""
    path = tmp_path / "clip.srt"
    cues = {1: "one", 11: "eleven", 20: "twenty", 63: "last", 99: "beyond"}
    at = {n: f"0:0{n // 60}:{n % 60:02}" for n in cues}
    path.write_text("\n".join(f"{at[n]},0 --> {at[n]},9\n{t}\n" for n, t in cues.items()))
    base = "--model", ov, "--fps", 1, "--json", "--max-new-tokens", 2, "--subtitles", path, *how
    recipe = tmp_path / "all.yaml"
    recipe.write_text("kv: full")
    questions = "--question", "which ?@20", "--question", "what ?", "--save", tmp_path / "s"
    answers = call.object("watch", clip, *base, "--recipe", recipe, *questions)["answers"]
    assert [[text for _, _, text in one["lines"]] for one in answers] == [
        [*cues.values()][:3],
        [*cues.values()][:4],
    ]
    again = call.text("watch", clip, *base, "--load", tmp_path / "s", "--question", "what ?")
    lines = json.loads(again)["answers"][0]["lines"]
    assert lines == answers[1]["lines"], "the film was watched"
    path.write_text("1\n0:01 --> 0:02\none")
    err = call.error("watch", clip, *base, "--recipe", "rekv")
    assert "subtitles: line 2 of" in err and "has no two times: '0:01 --> 0:02'; write 00:01:02,000" in err
