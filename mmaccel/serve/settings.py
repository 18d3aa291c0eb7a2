"""Server settings: address, API keys, allowed sources, and limits."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from mmaccel.core.errors import MmaccelError, RecipeError

LOCAL = "local"
"""The caller of a server without keys."""


class Refused(MmaccelError):
    """A request that is refused: HTTP status, message, and an error code for programs."""

    def __init__(self, status: int, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest sizes, counts and times that the server allows a request, a caller, or all callers together.

    body_bytes      bytes of a request body; `bodies_bytes` of all bodies in progress; `body_seconds` to receive one
    source_bytes    bytes of all videos and images of a request; `image_bytes` of one image; `source_seconds` to download
                    one, with at most `redirects`
    frames          frames of a video, or in one call of a stream; `visuals`: videos and images of a request
    pixels          pixels of a frame; `video_seconds` of a video; `decoded_bytes` of all frames of a request
    text            characters of all messages; `new_tokens` of an answer; `seconds` that a request may take
    at_once         requests at a time that read their prompts or are decoded alone; `together`: further requests whose
                    prompts have been read and which are decoded, in shared steps; `waiting`: requests in the queue
    fetching        concurrent downloads of one caller
    sessions        open streams of all callers; `own_sessions` of one; closed after `idle_seconds` without a request
    busy            share of the time that frames of all streams may take; the rest is for answers
    memory_bytes    bytes of all streams, on all devices and disks
    saves           saved streams of one caller, and `saved_bytes` of them; under Ray the same limits hold once more for its
                    open streams on all replicas
    sockets         WebSockets of one caller, or of an address before its key comes; `message_bytes` of one message, and of
                    all frames that wait
    calls           concurrent questions and calls with frames on one caller's streams; more wait
    kept            videos cached for the next question, of `kept_bytes` in all
    thumbnails      thumbnails of one stream
    """

    body_bytes: int = 256 << 20
    bodies_bytes: int = 2 << 30
    body_seconds: float = 60.0
    source_bytes: int = 1 << 30
    image_bytes: int = 64 << 20
    source_seconds: float = 60.0
    redirects: int = 3
    frames: int = 4096
    visuals: int = 64
    pixels: int = 1 << 24
    video_seconds: float = 4 * 3600.0
    decoded_bytes: int = 4 << 30
    text: int = 1 << 17
    new_tokens: int = 4096
    seconds: float = 600.0
    at_once: int = 2
    together: int = 16
    waiting: int = 1024
    fetching: int = 4
    sessions: int = 64
    own_sessions: int = 16
    idle_seconds: float = 3600.0
    calls: int = 32
    busy: float = 0.8
    memory_bytes: int = 64 << 30
    saves: int = 64
    saved_bytes: int = 64 << 30
    sockets: int = 32
    message_bytes: int = 32 << 20
    kept: int = 4
    kept_bytes: int = 8 << 30
    thumbnails: int = 8192


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server: `host` and `port` to listen on, and its `limits`.

    keys           API keys, one of which a caller must send; not needed on the local machine
    folder         below which `file:` URLs must lie (None: not allowed)
    saves          folder where streams are saved (None: not allowed)
    private        whether http URLs may lead to private networks and this machine
    origins        other web origins that may call (CORS)
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    folder: Path | None = None
    saves: Path | None = None
    private: bool = False
    origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.keys and not is_loopback(self.host):
            raise RecipeError(
                f"--host {self.host}: others reach it there; give a key by --keys FILE or MMACCEL_KEY, or leave --host out."
            )
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in self.keys):
            raise RecipeError(
                "--keys or MMACCEL_KEY: a key has at least 8 printable ASCII characters and no space."
            )

    def identify_caller(self, key: str | None) -> str | None:
        """Return the identity of the caller who sent `key`, the same for all if no keys are set; None: wrong or missing."""
        if not self.keys:
            return LOCAL
        given = (key or "").encode(errors="replace")
        right = [one for one in self.keys if hmac.compare_digest(one.encode(), given)]
        return hashlib.sha256(right[0].encode()).hexdigest()[:16] if right else None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is of the local machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
