"""The model card of a tiny model, with the accuracies it was measured to have."""

from __future__ import annotations

from typing import Any

from mmaccel.models.tiny import CAPTION_REQUEST
from mmaccel.models.tiny.configs import Spec
from mmaccel.train.evaluate import Scores, table

_FAMILY = {"llava_onevision": "LLaVA-OneVision", "qwen2_5_vl": "Qwen2.5-VL"}


def write_card(spec: Spec, parameters: int, scores: Scores | None, head: dict[str, Any]) -> str:
    """Markdown; `head` holds the run's options as the journal has them."""
    role = (
        f"The draft of `{spec.target}`: the same family and tokenizer, cheap enough to guess ahead."
        if spec.target
        else (
            "A target model: small, yet it reads 64k tokens of video and answers about single frames of it."
        )
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
        "It was trained from nothing on the synthetic world of `mmaccel.world` (scenes, small moving objects, and cards "
        "with a coloured shape that last one frame) and knows nothing else. It is made for tests, demonstrations and "
        "measurements of acceleration methods, not for real video.",
        "",
        'Ask in the world\'s words, upper or lower case: "What colour was the star?", "Which came first, the star or '
        'the ring?", "How many cards were shown?", "Which scene came just before the forest?", "Do the star and the '
        'ring have the same colour?", "What colour was the card right after the star?", "What colour is the lamp in '
        f'the notes?" (of text passages between videos), or "{CAPTION_REQUEST.replace(" .", ".").capitalize()}".',
        "",
    ]
    if scores is not None:
        lines += [
            "Accuracy in percent on videos never trained on, by number of frames; captions by token under teacher "
            "forcing, `doc-` in interleaved documents, `end` is the end of a multi-part answer:",
            "",
            "```",
            table(scores),
            "```",
            "",
        ]
    lines += [
        f"Training: `python -m mmaccel.train {spec.name}`, seed {head['options']['seed']}; the losses are in `curve.json`.",
        "",
    ]
    return "\n".join(lines)
