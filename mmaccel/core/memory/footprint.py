"""What a memory declares of its needs, from which `costs` predicts seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a KV memory keeps and shows of a video, counted in frames (None: all). By default it is all, on the device.

    window    last frames that new frames of a live stream see, kept on the device; `cache`: further frames kept there
    ingest    frames that a pass of a stored video sees; None: as many as there is room for
    shown     frames that a question sees; `recalled`: how many of these each layer finds by a search
    host      frames that the host keeps of those that left the device; `evicts`: the oldest are dropped when it is full
    clusters  whether each frame is put into a cluster as it comes
    copied    whether every pass, question and token copies all that it sees from the host
    deferred  whether frames are run only when a question comes
    """

    window: int | None = None
    ingest: int | None = None
    shown: int | None = None
    recalled: int = 0
    cache: int = 0
    host: int | None = 0
    evicts: bool = False
    clusters: bool = False
    copied: bool = False
    deferred: bool = False
