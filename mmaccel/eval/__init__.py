"""Measuring answers: questions about the synthetic world, captions, and the table of the model cards.

Everything takes a model and a processor, runs on any device, and goes the way a user's video goes: an H.264 file, the
reader, the processor, `generate`, text.
"""

from mmaccel.eval.answer import Answer, ask, prompt
from mmaccel.eval.caption import agreement, caption_scores, forced
from mmaccel.eval.cases import Case, Film, cases
from mmaccel.eval.needle import Judged, Tally, judge

__all__ = [
    "Answer",
    "Case",
    "Film",
    "Judged",
    "Tally",
    "agreement",
    "ask",
    "caption_scores",
    "cases",
    "forced",
    "judge",
    "prompt",
]
