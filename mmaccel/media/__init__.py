"""Video in: containers, sampling, streams, and the pixels a model wants."""

from mmaccel.media.reader import read
from mmaccel.media.stream import clips
from mmaccel.media.video import Video

__all__ = ["Video", "clips", "read"]
