"""What a command says when it is stopped, and while it works where there is no terminal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mmaccel.cli import console
from mmaccel.core.errors import StoreError
from tests import SOURCES
from tests.cli import Call, after, interrupt
from tests.spies import heard, nth, product

COMMANDS = {
    "needle": ("mmaccel_lab.eval.needle", "judge"),
    "caption": ("mmaccel_lab.eval.caption", "caption_scores"),
    "table": ("mmaccel_lab.eval.table", "measure"),
    "haystack": ("mmaccel_lab.eval.haystack", "shots"),
    "stream": ("mmaccel_lab.eval.stream", "shots"),
    "demo": ("mmaccel_lab.eval.needle", "judge"),
}


def terminate() -> None:
    """SIGTERM, twice, as a supervisor sends it to a process and to its group."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)


Stop = Callable[[], None]
ENDS: list[tuple[Stop, int]] = [(interrupt, 130), (terminate, 143)]
STOPS = [pytest.param(*one, id=one[0].__name__) for one in ENDS]


def told_as(one: Any) -> str:
    """The name of a command, of a time, or of an end."""
    return one if isinstance(one, str) else one[0].__name__


def full() -> None:
    """An error that a user can make."""
    raise StoreError("the host's memory is full.")


@pytest.mark.parametrize(("name", "end"), product(COMMANDS, [*ENDS, (full, 2)]), ids=told_as)
def test_an_end_before_the_first_answer_is_told_alone(
    name: str, end: tuple[Stop, int], call: Call, ov: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place, function), (stop, code) = COMMANDS[name], end
    monkeypatch.setattr(f"{place}.{function}", after(0, iter, stop))
    how = {
        "needle": ("--frames", 8),
        "caption": ("--frames", 8),
        "haystack": ("--recipe", "dense", "--frames", 16),
        "stream": ("--frames", 20),
        "demo": ("--worlds", 1, "--recipe", "grid"),
    }
    words = ("demo",) if name == "demo" else ("eval", name)
    said = "error: the host's memory is full.\n" if stop is full else "stopped: nothing was answered.\n"
    for form in ((), ("--json",)) if stop is full else (("--json",) * (name == "demo"),):
        status, out, err = call(*words, "--model", ov, *how.get(name, ()), *form)
        assert (status, err) == (code, said)
        assert name == "demo" or out == ""


@pytest.mark.parametrize(("stop", "code"), STOPS)
def test_a_stopped_haystack_shows_what_there_is(
    stop: Stop, code: int, call: Call, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmaccel_lab.eval import haystack

    monkeypatch.setattr(haystack, "shots", after(1, haystack.shots, stop))
    words = f"eval haystack --model {ov} --recipe dense --recipe a_shape-short --frames 16".split()
    status, out, err = call(*words, "--out", tmp_path / "rows.jsonl")
    assert status == code and "accuracy" in out and "dense" in out
    assert err == "stopped: these are the answers so far; the same command goes on from what --out holds.\n"
    assert json.loads(call(*words, "--json")[1])["complete"] is False


@pytest.mark.parametrize(
    ("stop", "code"),
    [ENDS[0], pytest.param(*ENDS[1], marks=pytest.mark.slow)],
    ids=["interrupt", "terminate"],
)
def test_a_stopped_search_says_what_is_kept(
    stop: Stop, code: int, call: Call, ov: str, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmaccel.search import measure, run

    out = tmp_path / "t.json"
    words = ("search", ov, "--video", clip, "--max-tokens", 300, "--out", out, "--boundaries", "no_boundary")
    words += ("--cost", "pairs", "--block", 16, "--device", "cpu")
    with monkeypatch.context() as broken:
        broken.setattr(measure, "visit_attention_inputs", lambda *_: stop())
        assert call(*words) == (code, "", "stopped: nothing was measured yet.\n")
    with monkeypatch.context() as broken:
        heard(broken, run, "measure_candidates", lambda bench, *_: stop() if bench.inside.layer > 0 else None)
        told = (
            f"stopped: the costs and 1 whole layer are kept in {out}.parts; the same command goes on with the next "
            "layer, from its beginning.\n"
        )
        assert call(*words) == (code, "", told)
    assert call(*words)[0] == 0 and out.is_file() and not Path(f"{out}.parts").exists()


def test_off_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "EVERY_S", 0.05)
    with console.progress_bars() as progress:
        time.sleep(0.12)
        tell = console.show_bar(progress, "decode", "frames", 40)
        console.progress_callback(progress, "layers")("encode", 6, 6)
        tell(7, None)
        time.sleep(0.12)
    time.sleep(0.12)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and 2 <= len(lines) <= 5 and lines[0] == "at work; 0 s"
    assert lines[-1] == "decode 7/40 frames; 0 s"


IMPORTED = """
import signal, sys, time
# Where the tests run in the background of a shell interrupts are ignored, and that is handed on.
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.argv = ["mmaccel", "list"]
from mmaccel_command import main
main()
"""


def stopped_while_importing(words: list[str], environment: dict[str, str]) -> None:
    """Python with `words`, interrupted when it says that it imports, tells it in one line and ends with 130."""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None and command.stdout.readline() == "importing\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=30) == ("", "stopped.\n")
    assert command.returncode == 130


@pytest.mark.parametrize(
    "module",
    ["torch", "typer", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mmaccel", "mmaccel.cli"))],
)
def test_a_stop_while_the_command_is_imported_is_told(module: str) -> None:
    stopped_while_importing(["-c", IMPORTED.format(module=module)], {})


MODULES = [("mmaccel", name) for name in ("mmaccel.models", "torch", "typer")]
MODULES += [pytest.param("mmaccel", "mmaccel.cli", marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("program", "module"), [*MODULES, ("mmaccel_lab", "mmaccel"), ("mmaccel_lab", "mmaccel_lab.cli")]
)
def test_a_stop_while_the_package_is_imported_as_a_command_is_told(
    program: str, module: str, tmp_path: Path
) -> None:
    """``python -m mmaccel`` imports the package before any of its commands; the lab's package is empty."""
    slow = IMPORTED.format(module=module).partition("sys.argv")[0]
    (tmp_path / "sitecustomize.py").write_text(slow)
    paths = os.pathsep.join([str(tmp_path), SOURCES])
    stopped_while_importing(["-m", program, "--version"], {"PYTHONPATH": paths})


@pytest.mark.parametrize(
    "place", ["typer.main.get_command", "typer.core.TyperGroup.make_context", "mmaccel.cli.catalog.presets"]
)
def test_a_stop_at_any_other_time_is_told(place: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, Mock(side_effect=KeyboardInterrupt))
    assert call("list") == (130, "", "stopped.\n")


def test_sigterm_while_a_session_is_saved_waits_for_the_save(
    call: Call, ov: str, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmaccel.core.streams import session_io

    def slow(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    heard(monkeypatch, session_io, "save_session", slow)
    words = f"watch {clip} --model {ov} --recipe recent --fps 0.1 --save {tmp_path / 's'} --json".split()
    status, out, err = call(*words)
    assert status == 143 and json.loads(out)["saved"] == str(tmp_path / "s") and err == ""
    assert json.loads((tmp_path / "s" / "session.json").read_text())["frames"] == 7


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("swallowed", [True, False])
def test_sigterm_acts_again_where_the_first_was_swallowed(call: Call, monkeypatch, swallowed: bool) -> None:
    from mmaccel.cli import catalog

    class Callback:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    def twice(*_: object) -> None:
        if swallowed:
            Callback()
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # to the process's group: it stops nothing that cleans up
            cleaned.append(True)

    cleaned: list[bool] = []
    monkeypatch.setattr(sys.modules["mmaccel.cli.program"], "AGAIN_S", 0.05 if swallowed else 60.0)
    monkeypatch.setattr(catalog, "presets", twice)
    begin = time.monotonic()
    assert call("list") == (143, "", "stopped.\n") and time.monotonic() - begin < 50
    assert bool(cleaned) is not swallowed


@pytest.mark.parametrize(
    ("when", "end"),
    product(["the first clip", "the model loads", "the model loads again"], ENDS[::-1]),
    ids=told_as,
)
def test_a_watch_stopped_early_says_that_nothing_is_saved(
    call: Call,
    ov: str,
    clip: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    end: tuple[Stop, int],
) -> None:
    from mmaccel.cli import choices
    from mmaccel.core.streams.session import VideoSession

    place, (stop, code) = tmp_path / "s", end
    base = ("watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.25)
    if when == "the model loads again":
        assert call(*base, "--save", place)[0] == 0
    early = (choices, "load_cli_model") if "loads" in when else (VideoSession, "ingest")
    monkeypatch.setattr(*early, lambda *_, **__: stop())
    status, out, err = call(*base, "--save", place)
    told = {
        "the model loads": f"stopped before the first frame; nothing was saved to {place}.",
        "the model loads again": f"stopped before the first frame; the session in {place} is as it was.",
        "the first clip": f"stopped after 0 frames, 0 s; nothing was saved to {place}",
    }
    assert (status, out) == (code, "") and err.splitlines()[-1] == told[when]
    if when == "the model loads":
        assert call(*base)[2].splitlines()[-1] == "stopped."


@pytest.mark.parametrize("saves", [0, 1])
def test_a_watch_whose_last_save_is_stopped_says_what_is_saved(
    call: Call, ov: str, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    from mmaccel.core.streams import session_io

    last = nth(*range(saves + 1, 9))
    heard(monkeypatch, session_io, "save_session", lambda *_: interrupt() if last() else None)
    monkeypatch.setattr("mmaccel.cli.journal.PeriodicSaver.save_if_due", lambda keeper: keeper.save(False))
    base = ("watch", clip, "--model", ov, "--recipe", "recent", "--fps", 0.25, "--clip", 4, "--live")
    status, _, err = call(*base, "--save", tmp_path / "s")
    told = f"the first 4 frames are saved to {tmp_path / 's'}, the rest is not"
    told = told if saves else f"nothing was saved to {tmp_path / 's'}"
    stopped = "stopped after 8 frames, 28 s" if saves else "stopped after 4 frames, 12 s"
    assert status == 130 and err.splitlines()[-1] == f"{stopped}; {told}"


def test_a_handler_of_the_caller_stays(call: Call) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert call("list")[0] == 0 and signal.getsignal(signal.SIGTERM) is before
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        own = signal.getsignal(signal.SIGTERM)
        assert call("list")[0] == 0 and signal.getsignal(signal.SIGTERM) is own and seen == []
    finally:
        signal.signal(signal.SIGTERM, before)
