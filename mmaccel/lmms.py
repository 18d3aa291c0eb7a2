"""Runs a model under a recipe in lmms-eval: `python -m lmms_eval --model mmaccel --model_args pretrained=NAME,recipe=NAME`.

lmms-eval finds this module by entry points of the package; `pip install 'mmaccel[eval]'` installs both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms

from mmaccel.core.attach import accelerate
from mmaccel.core.decoding.generate import MAX_NEW_TOKENS
from mmaccel.core.errors import ModelError, VideoError, quoted
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report

HARNESS = {"batch_size", "max_batch_size"}
"""What the harness gives every model; here prompts are answered one after the other."""


def lmms_eval_manifest() -> Any:
    """Return the model manifest that lmms-eval asks for by its entry point `lmms_eval.models`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("mmaccel", chat_class_path=f"{__name__}.{Mmaccel.__name__}")


class Mmaccel(lmms):
    """lmms-eval model: `pretrained` (a name or folder) under `recipe` (a name or YAML file).

    fps, frames    frames per second of each video, or at most so many frames; default: as the model's own processor
    device, dtype  default: the process's CUDA device, or the CPU; the checkpoint's dtype

    lmms-eval prints and writes, under "throughput": `avg_ttft_s` (mean seconds to the first token, vision and prefill
    included), `avg_peak_gib` (largest peak memory) and `avg_kept` (mean share of query-key pairs that prefill computed),
    each as in `Report`.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = "tiny-ov",
        recipe: str = "dense",
        fps: float | None = None,
        frames: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        **rest: Any,
    ) -> None:
        from mmaccel.models import load_processor
        from mmaccel.models.loading import load_model

        super().__init__()
        if unknown := sorted(rest.keys() - HARNESS):
            raise ModelError(
                f"model_args: {unknown[0]!r} is unknown; give pretrained, recipe, fps, frames, device or dtype."
            )
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self._place = torch.device(device or self.accelerator.device)
        model = load_model(
            pretrained, dtype or ("float32" if self._place.type == "cpu" else "auto"), self._place
        )
        self._processor = load_processor(pretrained, special_tokens=False, like=model)
        self._fast = accelerate(model, Recipe.load(recipe))
        self._fps, self._frames = fps, frames
        self._reports: list[Report] = []

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        found = []
        for one in requests:
            _, messages, options, number, task, split = one.args
            turn = _told(task, messages, self.task_dict[task][split][number])
            text, report = self._answer(task, turn, options)
            found.append(GenerationResult(text, TokenCounts(report.prompt_tokens, report.new_tokens)))
        self._tell()
        return found

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        """Answer multi-round tasks: each prompt is made by the task from the answers so far, until the task ends."""
        found = []
        for one in requests:
            _, messages, options, number, task, split = one.args
            doc, said, facts = self.task_dict[task][split][number], list[str](), None
            turn = _told(task, messages, doc)
            while turn is not None:
                said.append(self._answer(task, turn, options)[0])
                how = {"round_idx": len(said), "previous_output": [*said], "previous_round_info": facts}
                made = _told(task, messages, doc, **how)
                # Messages, whether it is over, and two things for the round after; or nothing more.
                turn, over, _, facts = made if isinstance(made, tuple) else (None, True, None, None)
                turn = None if over else turn
            found.append(said)
        self._tell()
        return found

    def loglikelihood(self, requests: list[Instance]) -> Any:
        raise ModelError(
            "tasks by likelihood are not supported; take the task that generates (egoschema for egoschema_mcppl)."
        )

    def _answer(self, task: str, turn: Any, options: Mapping[str, Any]) -> tuple[str, Report]:
        from lmms_eval.protocol import ChatMessages

        if options.get("num_beams", 1) != 1:
            raise ModelError(f"{task}: num_beams: beam search is not supported; set it to 1 by --gen_kwargs.")
        given = ChatMessages(messages=turn).messages
        chat = [
            {"role": one.role, "content": [self._piece(task, part) for part in one.content]} for one in given
        ]
        inputs = self._processor.chat(
            chat, device=self._place, dtype=next(self._fast.model.parameters()).dtype
        )
        how: dict[str, Any] = {"do_sample": bool(options.get("do_sample") and options.get("temperature"))}
        if how["do_sample"]:
            how |= {name: options[name] for name in ("temperature", "top_p", "top_k") if options.get(name)}
        with torch.no_grad():
            ids = self._fast.generate(
                **inputs, max_new_tokens=options.get("max_new_tokens", MAX_NEW_TOKENS), **how
            )
        text = self._processor.decode(ids[0, inputs["input_ids"].shape[1] :])
        for stop in filter(None, options.get("until") or ()):
            text = text.split(stop)[0]
        self._reports.append(report := self._fast.report())
        return text, report

    def _piece(self, task: str, part: Any) -> dict[str, Any]:
        """A piece of a message, its video read."""
        from mmaccel.media.reader import video_metadata
        from mmaccel.models.taking import read_sampled_video

        if part.type == "text":
            return {"type": "text", "text": part.text}
        url = part.url
        if part.type == "image" and not isinstance(url, str):
            return {"type": "image", "image": url}
        if part.type not in ("image", "video") or not isinstance(url, str):
            raise ModelError(
                f"{task}: it shows {part.type} {quoted(url)}; videos and images are read, from files."
            )
        if "://" not in url and not os.path.isfile(url):
            raise VideoError(_missing(task, f"the {part.type} {os.path.abspath(url)} is missing"))
        if part.type == "image":
            return {"type": "image", "image": url}
        frames = None if self._frames is None else min(self._frames, video_metadata(url)[0] or self._frames)
        span = {"start": part.start_time, "stop": part.end_time}
        video = read_sampled_video(
            self._processor, url, fps=self._fps, frames=frames, faster=self._fps is None, **span
        )
        return {"type": "video", "video": video}

    def _tell(self) -> None:
        """Tell the harness what the answers took."""
        from lmms_eval.models.model_utils.gen_metrics import log_metrics

        reports, self._reports = self._reports, []
        if not reports:
            return
        tokens = sum(one.new_tokens for one in reports)
        seconds = sum(one.ttft_s or 0.0 for one in reports)
        seconds += sum((one.new_tokens - 1) / one.tokens_per_s for one in reports if one.tokens_per_s)
        seconds += sum(one.draft["wait_s"] for one in reports)
        figures: dict[str, float] = {"num_requests": len(reports)}
        figures["peak_gib"] = max(one.peak_bytes for one in reports) / 2**30
        for name in ("ttft_s", "kept"):
            if told := [value for one in reports if (value := getattr(one, name)) is not None]:
                figures[name] = sum(told) / len(told)
        log_metrics(seconds, tokens, tokens / seconds if seconds else 0.0, figures)


def _told(task: str, messages: Callable[..., Any], doc: Any, **how: Any) -> Any:
    """The messages that a task makes of a document. Tasks exit, or assert, where a file is missing."""
    try:
        return messages(doc, **how)
    except (SystemExit, AssertionError, OSError) as error:
        raise VideoError(_missing(task, str(error) or type(error).__name__)) from error


def _missing(task: str, what: str) -> str:
    home = os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    return (
        f"{task}: {what.rstrip('.')}; lmms-eval keeps the videos of a task in a folder below HF_HOME ({home}): put them "
        "there, or set HF_HOME to where they are."
    )
