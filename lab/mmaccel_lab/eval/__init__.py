"""Measuring answers: questions about the synthetic world, captions, and the table of the model cards.

Everything takes a model and a processor, runs on any device, and goes the way a user's video goes: an H.264 file, the
reader, the processor, `generate`, text.
"""

from mmaccel_lab.eval.caption import agreement, caption_scores, forced
from mmaccel_lab.eval.cases import Case, Film, cases
from mmaccel_lab.eval.needle import Judged, Tally, judge

__all__ = ["Case", "Film", "Judged", "Tally", "agreement", "caption_scores", "cases", "forced", "judge"]
