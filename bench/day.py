"""24 hours of stream compressed into one run: flat memory of a server, and planted questions.

    python bench/day.py --hours 24 --folder day --out bench/results/day_cpu_202611.jsonl

A process of its own runs `mmaccel serve` with `--keep-seconds` and `--host-bytes`. It is given the frames of a world of each
hour as JPEG, as fast as it takes them; two minutes after each card it is asked for its colour, and once an hour about a time
that was let go of two hours before. A session in this process is given the same frames, and asked the same. A row for each
hour has the questions, how many were answered right, and how many in the `same` words as without a server; the server's
memory (VmRSS), what it keeps on the host, and the seconds that it still holds. At the end of each hour both streams are
saved into `--folder`, and the same command goes on where the last whole hour ended; `--minutes` ends a part of it.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, documented_parser, read_rows, told

import mmaccel
from mmaccel.core.errors import ModelError
from mmaccel.media.video import read_image, write_jpeg
from mmaccel_lab.world import World, render

SIDE, CALL = 112, 60
"""Pixels of a frame, and frames that are given at a time."""
BACK_S = 600.0
"""Seconds that a question is about."""
RECIPE = "kv: {name: mosaic, window: 16, local: 8, frames: 64, encode_frames: 0}\n"
GONE = "holds nothing of that time any more"


class Server:
    """`mmaccel serve` in a process of its own."""

    def __init__(self, folder: Path, keep_seconds: float, host_bytes: str) -> None:
        (folder / "stream.yaml").write_text(RECIPE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = "serve", "--model", "tiny-ov", "--device", "cpu", "--recipe", str(folder / "stream.yaml")
        more = (
            "--keep-seconds",
            str(keep_seconds),
            "--host-bytes",
            host_bytes,
            "--saves",
            str(folder / "saves"),
        )
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmaccel", *words, *more, "--port", str(port)], stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + 300
        while True:
            try:
                self.call("GET", "/health")
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the server did not start; its output says why.") from None
                time.sleep(0.2)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """What the server answers, or its error's sentence."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=900) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def memory(self) -> int:
        """Bytes of the process that are in memory."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the system does not tell the memory of a process.")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Day:
    """The stream of the server and that of this process, hour by hour."""

    def __init__(self, server: Server, folder: Path, hours: int, fps: float, keep_seconds: float) -> None:
        self.server, self.folder, self.fps, self.keep = server, folder, fps, keep_seconds
        model, processor = (
            mmaccel.load_model("tiny-ov", dtype=torch.float32),
            mmaccel.load_processor("tiny-ov"),
        )
        asked = {"resume": "day"} if hours else {}
        self.path = f"/v1/streaming/sessions/{server.call('POST', '/v1/streaming/sessions', asked)['id']}"
        if hours:
            self.twin = mmaccel.VideoSession.resume(model, processor, folder / "twin")
        else:
            recipe = mmaccel.Recipe.load(str(folder / "stream.yaml"))
            kv = {**recipe.to_dict()["kv"], "keep_seconds": keep_seconds}
            self.twin = mmaccel.VideoSession(model, processor, None, kv=kv)

    def hour(self, number: int) -> dict[str, Any]:
        """The row of an hour."""
        began, count = time.monotonic(), int(3600 * self.fps)
        world, first = World.generate(700 + number, count), number * count
        frames, asked, right, same = render(world.table(), SIDE, SIDE), 0, 0, 0
        for begin in range(0, count, CALL):
            files = [write_jpeg(frame, SIDE) for frame in frames[begin : begin + CALL]]
            times = [(first + begin + n) / self.fps for n in range(len(files))]
            body = {"frames": [base64.b64encode(file).decode() for file in files], "times": times}
            told = self.server.call("POST", f"{self.path}/frames", body)
            assert told.get("taken") == len(files), told
            self.twin.watch(torch.stack([read_image(file) for file in files]), times=times)
            for card in world.cards:
                if begin - CALL <= card.frame < begin:
                    mine, theirs = self.ask(
                        f"what colour was the {card.shape} ?", times[-1] - BACK_S, times[-1]
                    )
                    asked, right, same = asked + 1, right + (mine == card.colour), same + (mine == theirs)
        now, gone = times[-1], None
        if now > 2 * 3600 + BACK_S:
            both = self.ask("describe the video .", now - 7200 - BACK_S, now - 7200)
            gone = all(GONE in one for one in both)
        facts, held = self.server.call("GET", self.path), self.server.call("GET", self.path)["counters"]
        counted = self.twin.counters()
        assert self.server.call("POST", f"{self.path}/save", {"name": "day"}).get("saved") == "day"
        self.twin.save(self.folder / "twin")
        return {
            "case": "day",
            "hour": number + 1,
            "frames": facts["frames"],
            "questions": asked,
            "right": right,
            "same": same,
            "gone_told": gone,
            "server_mib": self.server.memory() / 2**20,
            "host_mib": held["host_bytes"] / 2**20,
            "index_mib": (held["index_bytes"] + held["summary_bytes"]) / 2**20,
            "let_go": held["let_go"],
            "same_held": held["let_go"] == counted["let_go"],
            "seconds_held": (facts["frames"] - held["let_go"]) / self.fps,
            "took_s": time.monotonic() - began,
        }

    def ask(self, question: str, begin: float, end: float) -> tuple[str, str]:
        """What the server and the session of this process say."""
        between = max(0.0, begin), end
        body = {"question": question, "between": between, "max_tokens": 16, "evidence": False}
        told = self.server.call("POST", f"{self.path}/ask", body)
        try:
            own = self.twin.ask(question, 16, between=between, evidence=False).text
        except ModelError as error:
            own = str(error)
        return told.get("text", str(told.get("error"))), own


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--fps", type=float, default=0.5)
    parser.add_argument("--keep-seconds", type=float, default=1800.0)
    parser.add_argument("--host-bytes", default="256MiB")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no hour after so many")
    parser.add_argument("--folder", type=Path, required=True, help="where both streams are saved")
    parser.add_argument(
        "--out", type=Path, required=True, help="rows, as JSON lines; read again by the same command"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read_rows([args.out]) if "hour" in row] if args.out.exists() else []
    done, end = (rows[-1]["hour"] if rows else 0), time.monotonic() + 60 * args.minutes
    log, server = Log(args.out), Server(args.folder, args.keep_seconds, args.host_bytes)
    try:
        day = Day(server, args.folder, done, args.fps, args.keep_seconds)
        for number in range(done, args.hours):
            if time.monotonic() > end:
                break
            rows.append(day.hour(number))
            log.row(**rows[-1])
            print(told(rows[-1]), flush=True)
    finally:
        server.close()
    asked = sum(row["questions"] for row in rows)
    same = all(row["questions"] == row["same"] and row["same_held"] for row in rows)
    right, admitted = sum(row["right"] for row in rows), all(row["gone_told"] is not False for row in rows)
    most = max(row["server_mib"] for row in rows[2:]) if len(rows) > 2 else float("nan")
    first = rows[min(2, len(rows) - 1)]["server_mib"]
    print(
        f"{len(rows)} of {args.hours} hours, {asked} questions: {right} right; all as without a server: {same}; "
        f"what is gone is told of: {admitted}; memory {first:.0f} MiB after the third hour and {most:.0f} MiB at most since"
    )
    sys.exit(not (same and admitted))


if __name__ == "__main__":
    main()
