"""Fetches images and videos that requests name by URL (`http`, `data:`, `file:`); refuses forbidden hosts and files."""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import os
import re
import socket
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpcore2
import torch
from torch import Tensor

from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.errors import MmaccelError, VideoError, quoted
from mmaccel.media.container import Source
from mmaccel.media.video import Video, image_size, read_image
from mmaccel.models.taking import read_sampled_video
from mmaccel.serve.settings import Limits, Refused, Settings

Kind = Literal["video", "image"]
DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,gif,asf,h264,hevc,ivf"
"""Containers that are read; none of them names other files or addresses, as playlists do."""
BLOCK = 1 << 16
FRAMES = re.compile(r"data:video/(jpeg|png|webp)(;[^,]*)?;base64,", re.IGNORECASE)
DATA = re.compile(r"data:(video|image)/[\w.+-]+(;[^,]*)?;base64,", re.IGNORECASE)
MAPPED = [ipaddress.ip_network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")]
"""IPv6 networks whose addresses stand for IPv4 ones."""


@dataclass(frozen=True)
class FetchedMedia:
    """A fetched source: a local file, or the bytes of an image or of a video's frames; `digest` identifies its content."""

    kind: Kind
    digest: str
    path: Path | None = None
    data: tuple[bytes, ...] = ()
    size: int = 0  # bytes that were stored for it


def fetch_media(url: str, kind: Kind, folder: Path, settings: Settings, deadline: Deadline) -> FetchedMedia:
    """Fetch `url` to a file in `folder`; a local file stays where it is. Raises `Refused`, `VideoError` or `CallEnded`."""
    scheme, limits = url[:16].partition(":")[0].lower(), settings.limits
    if kind == "image":
        limits = replace(limits, source_bytes=min(limits.source_bytes, limits.image_bytes))
    if scheme == "data":
        return _data(url, kind, folder, limits, deadline)
    if scheme == "file":
        path = _local(url, settings)
        if kind == "image":
            if path.stat().st_size > limits.source_bytes:
                raise Refused(413, f"the image has more than {limits.source_bytes} bytes; make it smaller.")
            return _image(path.read_bytes())
        stat = path.stat()
        facts = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
        return FetchedMedia(kind, hashlib.sha256(facts.encode()).hexdigest(), path)
    if scheme in ("http", "https"):
        with closing(download(url, settings)) as blocks:  # at once, also where a block is refused
            return _stored(blocks, kind, folder, limits, deadline)
    raise VideoError(f"{kind}_url: {quoted(url)} is no http:, https:, data: or file: address; give one.")


def _image(data: bytes) -> FetchedMedia:
    return FetchedMedia("image", hashlib.sha256(data).hexdigest(), data=(data,))


def _data(url: str, kind: Kind, folder: Path, limits: Limits, deadline: Deadline) -> FetchedMedia:
    if kind == "video" and (begin := FRAMES.match(url)):
        pieces = url[begin.end() :].split(",", limits.frames)
        if len(pieces) > limits.frames:
            raise Refused(413, f"video_url: it has more than {limits.frames} frames; give fewer.")
        frames = tuple(decode_base64(piece) for piece in pieces)
        # With their lengths: the same bytes may be cut into frames otherwise.
        digest = hashlib.sha256(b"".join(len(one).to_bytes(8, "big") + one for one in frames))
        return FetchedMedia("video", digest.hexdigest(), data=frames)
    begin = DATA.match(url)
    if begin is None:
        raise VideoError(f"{kind}_url: it is no data:{kind}/...;base64, address; give one.")
    return _stored([decode_base64(url[begin.end() :])], kind, folder, limits, deadline)


def decode_base64(text: str) -> bytes:
    """Decode base64, or a base64 data URL, to bytes. Raises `VideoError`."""
    try:
        return base64.b64decode(text.partition(",")[2] if text[:5] == "data:" else text, validate=True)
    except (binascii.Error, ValueError):
        raise VideoError("the data is not base64; encode it so.") from None


def _stored(
    blocks: Iterable[bytes], kind: Kind, folder: Path, limits: Limits, deadline: Deadline
) -> FetchedMedia:
    """The blocks as a file of `folder`, or as the bytes of an image."""
    digest, size = hashlib.sha256(), 0
    number, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "wb") as file:
        for block in blocks:
            deadline.check()
            size += len(block)
            if size > limits.source_bytes:
                raise Refused(413, f"the {kind} has more than {limits.source_bytes} bytes; make it smaller.")
            digest.update(block)
            file.write(block)
    if kind == "image":
        return replace(_image(Path(name).read_bytes()), size=size)
    return FetchedMedia(kind, digest.hexdigest(), Path(name), size=size)


def _local(url: str, settings: Settings) -> Path:
    """The file that a `file:` address names below the server's folder; of others nobody learns whether they are there."""
    parts = urllib.parse.urlsplit(url)
    refused = Refused(403, f"{quoted(url)} is no file below the folder that this server reads (--files).")
    if settings.folder is None or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise refused
    try:
        root = settings.folder.resolve()
        path = (root / urllib.parse.unquote(parts.path, errors="strict")).resolve()
        if not (path.is_relative_to(root) and path.is_file()):
            raise refused
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    return path


class PublicAddressBackend(httpcore2.SyncBackend):
    """HTTP connections to `is_public` addresses only. A name is resolved once: the checked address is the one used."""

    def __init__(self, private: bool, deadline: float) -> None:
        self._private, self._deadline = private, deadline

    def connect_tcp(self, host: Any, port: int, timeout: float | None = None, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise VideoError(f"{quoted(name)} is not known; check the address.") from None
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not self._private and not all(map(is_public, addresses)):
            raise Refused(
                403, f"{quoted(name)} is not a public address, and this server reads no other (--private)."
            )
        left = max(0.1, self._deadline - time.monotonic())
        made = super().connect_tcp(addresses[0], port, min(timeout or left, left), *rest, **more)
        return DeadlineNetworkStream(made, self._deadline)


class DeadlineNetworkStream(httpcore2.NetworkStream):
    """A network connection with one deadline for all reads together, however slowly the peer sends."""

    def __init__(self, inner: httpcore2.NetworkStream, deadline: float) -> None:
        self._inner, self._deadline = inner, deadline

    def _left(self, timeout: float | None) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise httpcore2.ReadTimeout("the time is over")
        return left if timeout is None else min(timeout, left)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._left(timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, ssl_context: Any, server_hostname: Any = None, timeout: float | None = None) -> Any:
        inner = self._inner.start_tls(ssl_context, server_hostname, self._left(timeout))
        return DeadlineNetworkStream(inner, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet; addresses mapped into IPv6 are unwrapped first."""
    one = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(one, ipaddress.IPv6Address):
        if one.ipv4_mapped is not None:
            return is_public(str(one.ipv4_mapped))
        if any(one in net for net in MAPPED):
            return False
    return one.is_global and not one.is_multicast and not one.is_reserved and not one.is_unspecified


def download(url: str, settings: Settings) -> Generator[bytes, None, None]:
    """Yield the blocks of a file at an http URL. Raises `Refused` or `VideoError`."""
    limits = settings.limits
    end = time.monotonic() + limits.source_seconds
    wait = {name: min(10.0, limits.source_seconds) for name in ("connect", "read", "write", "pool")}
    backend = PublicAddressBackend(settings.private, end)
    with httpcore2.ConnectionPool(network_backend=backend, max_keepalive_connections=0) as pool:
        for _ in range(limits.redirects + 1):
            parts = urllib.parse.urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                raise VideoError(f"{quoted(url)} is no http or https address; give one without a password.")
            target = urllib.parse.quote(url.partition("#")[0], safe="%/:=&?~+!$,;'@()*[]")
            try:
                with pool.stream("GET", target, headers=_HEADERS, extensions={"timeout": wait}) as answer:
                    place = {name.lower(): value for name, value in answer.headers}.get(b"location")
                    if answer.status in (301, 302, 303, 307, 308) and place is not None:
                        url = urllib.parse.urljoin(url, place.decode("latin-1"))
                        continue
                    if answer.status != 200:
                        raise VideoError(f"{quoted(url)} gives status {answer.status}, no file; check it.")
                    yield from answer.iter_stream()
                    return
            except MmaccelError:
                raise
            except Exception as error:  # of the network, and of addresses that are none
                told = (
                    f"within {limits.source_seconds:g} s" if time.monotonic() > end else type(error).__name__
                )
                raise VideoError(f"{quoted(url)} cannot be read: {told}.") from error
    raise VideoError(f"{quoted(url)} redirects more than {limits.redirects} times; give the file's address.")


_HEADERS = [("User-Agent", "mmaccel"), ("Accept", "*/*"), ("Accept-Encoding", "identity")]


def _check_room(size: int, limits: Limits) -> None:
    """Raise `Refused` if decoded frames would exceed the limit of a request in bytes."""
    if size > limits.decoded_bytes:
        raise Refused(413, f"the frames have more than {limits.decoded_bytes} bytes decoded; give fewer.")


def decode_image(source: FetchedMedia, limits: Limits) -> Tensor:
    """Decode an image source to uint8 [3, H, W]."""
    return decode_frames(source.data, limits)[0]


def decode_frames(data: Sequence[bytes], limits: Limits) -> Tensor:
    """Decode encoded frames of equal size to uint8 [T, 3, H, W]; raises `Refused` before decoding if they are too large."""
    _check_room(sum(3 * width * height for width, height in map(image_size, data)), limits)
    pictures = [read_image(one, limits.pixels) for one in data]
    sizes = {tuple(one.shape) for one in pictures}
    if len(sizes) != 1:
        raise VideoError(f"frames: they have {len(sizes)} sizes; give one or more frames, all of one size.")
    return torch.stack(pictures)


def sample_video(
    source: FetchedMedia,
    processor: Any,
    limits: Limits,
    fps: float | None = None,
    frames: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Video:
    """Decode frames of a video source: `frames` evenly spaced, `fps` per second, or as the model's own processor samples.
    Raises `Refused` or `VideoError` before decoding for one that exceeds `limits`."""
    if frames is not None and frames > limits.frames:
        raise Refused(413, f"frames: {frames} is more than the {limits.frames} that this server takes.")
    if source.data:
        pictures, rate = decode_frames(source.data, limits), fps or 1.0
        times = torch.arange(len(pictures), dtype=torch.float64) / rate
        return Video(pictures, times, rate, rate, len(pictures) / rate)
    options = {"format_whitelist": DEMUXERS}
    path = str(source.path)
    try:
        with Source(path, options=options) as facts:
            if facts.width * facts.height > limits.pixels:
                raise Refused(413, f"the video's frames have more than {limits.pixels} pixels; scale it.")
            seconds = facts.duration or 0.0
            if seconds > limits.video_seconds:
                raise Refused(413, f"the video lasts {seconds:.0f} s, more than {limits.video_seconds:g}.")
        many = None if fps is None else limits.frames
        how: dict[str, Any] = {"options": options, "progress": progress, "max_side": 4096}
        how["max_bytes"] = limits.decoded_bytes
        taken = read_sampled_video(
            processor, path, fps=fps, frames=frames, max_frames=many, faster=fps is None, **how
        )
    except VideoError as error:
        raise VideoError(str(error).replace(path, "the video")) from error
    _check_room(taken.frames.nbytes, limits)
    return taken
