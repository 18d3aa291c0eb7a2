"""Video input: containers, frame sampling, live streams, and preprocessing to model pixels."""

from mmaccel.media.reader import read
from mmaccel.media.stream import clips
from mmaccel.media.thumbnail import thumbnails
from mmaccel.media.video import Event, Video

__all__ = ["Event", "Video", "clips", "read", "thumbnails"]
