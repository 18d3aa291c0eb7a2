"""What a memory declares of its needs, from which `costs` predicts seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a KV memory keeps of a video and what passes see of it, in numbers of frames (None: all). By default the device
    keeps all frames, and every pass sees all before it.

    window    newest frames, kept on the device, that a new frame of a live stream sees; `cache`: other frames kept there
    ingest    frames that a pass of a stored video sees; None: as many as there is room for
    shown     frames that a question sees; `recalled`: how many of these each layer retrieves
    host      frames that the host keeps of those that left the device; `evicts`: the oldest are dropped when it is full
    clusters  whether each frame is put into a cluster as it comes
    copied    whether each pass (of frames, a question or a token) copies all keys and values that it sees from the host
    deferred  whether frames go through the model only when a question comes
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
