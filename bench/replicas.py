"""Streams at once on one replica and on several: frames and questions a second, and how long a question takes.

    python bench/replicas.py                                            # tiny-ov on the CPU: no Ray, one replica, two
    python bench/replicas.py --device cuda --model FOLDER --replicas 1 2 2 --streams 20 20 40

Each stream sends `--clip` frames and a question after them, again and again, as fast as it is answered. A request counts by
the share of its time within the measured seconds, which begin when each stream was answered, and a quarter as many passed.
Two replicas carry twice the streams of one if, with twice as many, each gets as much, as soon. `replicas` 0 is the server
without Ray, which saves nothing; a replica saves each change of a stream. On a CPU the replicas share its cores: that two do
more than one is seen on devices of their own.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).parent))
from live import quantile
from timing import Log, documented_parser, told

from mmaccel.media.video import write_jpeg
from mmaccel_lab.world import World, render

SESSIONS = "/v1/streaming/sessions"


def await_replicas(url: str, replicas: int, key: str, end: float) -> None:
    """Return when each replica has opened a stream: one that starts later would get none of those that are there."""
    found = set[str]()
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, trust_env=False) as client:
        while len(found) < replicas:
            if time.monotonic() > end:
                raise RuntimeError(f"{len(found)} of {replicas} replicas open streams")
            number = client.post(SESSIONS, json={}).raise_for_status().json()["id"]
            client.delete(f"{SESSIONS}/{number}").raise_for_status()
            found.add(number.rpartition(".")[2])
            time.sleep(0.1)


@contextmanager
def serving(args: Any, replicas: int, keys: list[str]) -> Iterator[str]:
    """The address of `mmaccel serve`."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with tempfile.TemporaryDirectory() as saves:
        words = ["--model", args.model, "--device", args.device, "--recipe", args.recipe, "--port", str(port)]
        ray = ["--ray", "--replicas", str(replicas), *["--gpus", str(args.gpus)] * bool(args.gpus)]
        words += ["--saves", saves, *ray * bool(replicas)]
        # A Ray of its own, of whose memory for objects a request takes little.
        given = {"MMACCEL_KEY": " ".join(keys), "RAY_ADDRESS": "local"}
        given |= {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(256 << 20)}
        command = [sys.executable, "-m", "mmaccel", "serve", *words]
        process = subprocess.Popen(command, env={**os.environ, **given}, stdout=subprocess.DEVNULL)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
        try:
            while True:
                try:
                    if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("mmaccel serve did not start")
                time.sleep(0.5)
            await_replicas(url, replicas, keys[0], end)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def measured(url: str, keys: list[str], clip: int, seconds: float, tokens: int) -> dict[str, Any]:
    """What streams, one of each key, get done in so many seconds."""
    film = render(World.generate(3, 40).table(), 84, 140)
    jpegs = [base64.b64encode(write_jpeg(one, 4096)).decode() for one in film]
    sent: dict[str, list[tuple[float, float]]] = {"frames": [], "ask": []}  # when requests began and ended
    homes = Counter[str]()  # streams by replica
    warm, over, failed, last = threading.Semaphore(0), threading.Event(), list[Any](), [0.0] * len(keys)

    def stream(number: int) -> None:
        headers = {"Authorization": f"Bearer {keys[number]}"}
        with httpx2.Client(base_url=url, headers=headers, timeout=300, trust_env=False) as client:

            def send(path: str, **body: Any) -> Any:
                since = time.perf_counter()
                told = client.post(SESSIONS + path, json=body).raise_for_status().json()
                last[number] = time.perf_counter()
                sent.get(path.rpartition("/")[2], []).append((since, last[number]))
                return told

            try:
                name, turn = send("")["id"], number
                homes[name.rpartition(".")[2] if "." in name else ""] += 1
                send(f"/{name}/frames", frames=jpegs[:clip], fps=1)
                send(f"/{name}/ask", question="What colour was the star?", max_tokens=tokens)
                warm.release()
                while not over.is_set():
                    begin, turn = turn % (len(jpegs) - clip), turn + clip
                    send(f"/{name}/frames", frames=jpegs[begin : begin + clip], fps=1)
                    send(f"/{name}/ask", question="What colour was the star?", max_tokens=tokens)
                client.delete(f"{SESSIONS}/{name}")
            except Exception as error:
                failed.append(error)
                warm.release()

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(len(keys))]
    for one in threads:
        one.start()
    try:
        for _ in keys:
            warm.acquire(timeout=600)
        time.sleep(seconds / 4)  # until they no longer keep step
        began = time.perf_counter()
        time.sleep(seconds)
        ended = time.perf_counter()
        while not failed and min(last) < ended:  # the last requests under the same load
            time.sleep(0.1)
    finally:
        over.set()
        for one in threads:
            one.join()
    if failed:
        raise failed[0]
    share = lambda since, end: max(0.0, min(end, ended) - max(since, began)) / (end - since)  # noqa: E731
    within = {path: sum(share(*one) for one in some) / (ended - began) for path, some in sent.items()}
    asked = [end - since for since, end in sent["ask"] if began < since < ended]
    told = {
        "frames_per_s": clip * within["frames"],
        "questions_per_s": within["ask"],
        "questions": len(asked),
        "streams_each": sorted(homes.values()),
    }
    return told | {"question_median_s": quantile(asked, 0.5), "question_p95_s": quantile(asked, 0.95)}


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--model", default="tiny-ov")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipe", default="mosaic")
    parser.add_argument("--replicas", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--gpus", type=float, help="of each replica: 0.5 lets two share one")
    parser.add_argument("--streams", type=int, nargs="+", default=[8], help="in all; one for each --replicas")
    parser.add_argument("--clip", type=int, default=4, help="frames in a call")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("runs/replicas.jsonl"))
    args = parser.parse_args()
    log = Log(args.out, args.device)
    each = args.streams * len(args.replicas) if len(args.streams) == 1 else args.streams
    if len(each) != len(args.replicas):
        parser.error("--streams: give one number, or one for each of --replicas")
    for replicas, streams in zip(args.replicas, each, strict=True):
        keys = [f"bench-key-{number:04d}" for number in range(streams)]
        with serving(args, replicas, keys) as url:
            found = measured(url, keys, args.clip, args.seconds, args.tokens)
        given = {name: getattr(args, name) for name in ("clip", "model", "recipe", "tokens")}
        given |= {"streams": streams, "gpus": args.gpus if replicas else None}
        log.row(**(row := {"case": "replicas", "replicas": replicas, **given, **found}))
        print(told(row), flush=True)


if __name__ == "__main__":
    main()
