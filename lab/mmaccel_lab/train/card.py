"""The model card of a tiny model, with the accuracies it was measured to have."""

from __future__ import annotations

from typing import Any

from mmaccel.models.shipped import CAPTION_REQUEST
from mmaccel_lab.tiny.configs import Spec
from mmaccel_lab.train.evaluate import Scores, table
from mmaccel_lab.world import SCENES, SHAPES
from mmaccel_lab.world.words import QUESTIONS

_FAMILY = {
    "llava_onevision": "LLaVA-OneVision",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5",
}


def _asked() -> str:
    """An example of every question, as a person would write it."""
    examples = [
        form.format(*([SCENES[1]] if kind == "scene" else SHAPES[3:5])) for kind, form in QUESTIONS.items()
    ]
    examples.append(CAPTION_REQUEST)
    written = [one.replace(" ?", "?").replace(" ,", ",").replace(" .", ".").capitalize() for one in examples]
    return ", ".join(f'"{one}"' for one in written)


def write_card(
    spec: Spec, parameters: int, scores: Scores | None, head: dict[str, Any], rows: str | None = None
) -> str:
    """Markdown. `head` holds the run's options as the journal has them, and remarks to add if any; `rows` is the table of
    `mmaccel-lab eval table`."""
    options = head["options"]
    role = (
        f"The draft of `{spec.target}`: the same family and tokenizer, cheap enough to guess ahead."
        if spec.target
        else "A target model, small enough for any machine."
    )
    lines = [
        "---",
        "license: apache-2.0",
        "library_name: transformers",
        "pipeline_tag: video-text-to-text",
        "---",
        "",
        f"# {spec.name}",
        "",
        f"{role} {parameters / 1e6:.1f} M parameters of the stock {_FAMILY[spec.model_type]} class, "
        f"{spec.tokens_per_frame} tokens a frame of {spec.height} by {spec.width} pixels.",
        "",
        "It was trained from nothing on the synthetic world of `mmaccel_lab.world` (scenes, small moving objects, and cards "
        "with a coloured shape that last one frame) and knows nothing else. It is made for tests, demonstrations and "
        "measurements of acceleration methods, not for real video.",
        "",
        f"Ask in the world's words, upper or lower case: {_asked()}.",
        "",
    ]
    if rows is not None:
        lines += [
            "Measured with `mmaccel-lab eval table` on worlds never trained on, written as H.264 and read back; answers are "
            "greedy and right or wrong as a whole, captions count token by token under teacher forcing:",
            "",
            rows,
            "",
        ]
    if scores is not None:
        lines += [
            "At the end of training, accuracy in percent on frames never trained on that went through no file, by number "
            "of frames; `doc-` is in interleaved documents, `end` is the end of a multi-part answer:",
            "",
            "```",
            table(scores),
            "```",
            "",
        ]
    lines += [
        f"Training: `python -m mmaccel_lab.train {spec.name}`, seed {options['seed']}, videos of up to {options['longest']} "
        "frames; the losses are in `curve.json`.",
        *head.get("remarks", ()),
        "",
    ]
    return "\n".join(lines)
