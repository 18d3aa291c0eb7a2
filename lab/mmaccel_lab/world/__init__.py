"""A synthetic video world with ground truth: deterministic by seed, drawn on any device."""

from mmaccel_lab.world.document import DOCUMENT_KINDS, Document
from mmaccel_lab.world.drawing import render
from mmaccel_lab.world.mp4 import write_mp4
from mmaccel_lab.world.questions import KINDS
from mmaccel_lab.world.records import Card, Question, Segment
from mmaccel_lab.world.words import COLOURS, NUMBERS, OBJECTS, SCENES, SHAPES, vocabulary
from mmaccel_lab.world.world import World

__all__ = [
    "COLOURS",
    "DOCUMENT_KINDS",
    "KINDS",
    "NUMBERS",
    "OBJECTS",
    "SCENES",
    "SHAPES",
    "Card",
    "Document",
    "Question",
    "Segment",
    "World",
    "render",
    "vocabulary",
    "write_mp4",
]
