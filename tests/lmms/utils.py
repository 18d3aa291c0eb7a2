"""Layouts of lmms-eval's own tasks, over worlds: a letter of four, the frames as images, an open answer."""

from pathlib import Path

from lmms_eval.tasks.ovobench.utils import *  # noqa: F403
from lmms_eval.tasks.videomme.utils import *  # noqa: F403
from PIL import Image


def film(doc):
    return [f"{doc['id']}.mp4"]


def pictures(doc):
    return [Image.open(path) for path in sorted(Path(doc["id"]).glob("*.jpg"))]


def question(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def exact(doc, results):
    return {"exact": float(results[0].strip() == doc["answer"])}
