"""Video in: containers, sampling, streams, and the pixels a model wants."""

from mmaccel.media.reader import read
from mmaccel.media.stream import clips
from mmaccel.media.thumbnail import thumbnails
from mmaccel.media.video import Event, Video

__all__ = ["Event", "Video", "clips", "read", "thumbnails"]
