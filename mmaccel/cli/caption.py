"""`mmaccel caption`: stream a long description of a video, and show the speed-up by a draft."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from typer import Argument, Option

from mmaccel.cli import answer, choices
from mmaccel.cli.answer import GenerationComparison
from mmaccel.cli.choices import Device, Draft, Dtype, Fps, Frames, Json, Model, Timeout
from mmaccel.cli.console import describe_cut_off, format_number, out, plural, print_json, progress_bars
from mmaccel.core.attach import accelerate
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import registry
from mmaccel.models.shipped import CAPTION_REQUEST
from mmaccel.serve.speech import TextStreamer


def caption(
    video: Annotated[str, Argument(help="A video file or URL.")],
    request: Annotated[str | None, Option(help="What to ask for.")] = None,
    model: Model = "tiny-ov",
    recipe: Annotated[str, Option(help="A name or a YAML file of a recipe that drafts.")] = "parallelvlm",
    draft: Draft = None,
    compare: Annotated[bool, Option(help="Decode without the draft too, to tell the speed-up.")] = True,
    as_json: Json = False,
    fps: Fps = None,
    frames: Frames = None,
    max_new_tokens: Annotated[int, Option(min=2, help="Longest description.")] = 512,
    timeout: Timeout = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Describe a video at length, streamed; then show speed-up, accepted lengths and the memory bandwidth's speed limit."""
    chosen = choices.load_recipe(recipe, draft)
    if not chosen.draft.active:
        raise RecipeError(f"recipe {recipe!r} drafts nothing; name one that does, such as parallelvlm.")
    choices.check_recipe_on_model(chosen, model, device)
    processor = choices.load_supported_processor(model)
    with progress_bars() as progress:
        load = partial(choices.load_cli_model, model, device, dtype)
        how = {"fps": fps, "frames": frames, "timeout": timeout}
        loaded, seen = choices.load_model_and_video(load, chosen, video, processor, progress, **how)
    text = {"type": "text", "text": request or CAPTION_REQUEST}
    inputs = answer.prompt_inputs(processor, [{"type": "video", "video": seen}, text], loaded)
    show = (lambda piece: None) if as_json else partial(print, end="", flush=True)
    streamer = TextStreamer(processor.decode, (), show, Deadline())
    with progress_bars() as progress:
        drafting = choices.attach_recipe(loaded, chosen, progress)
    with drafting as fast:
        run = answer.generate(fast, inputs, max_new_tokens=max_new_tokens, streamer=streamer)
    show("\n")
    (ids,), report = run
    plain = None
    if compare:
        # A draft changes nothing of what its recipe would say without it; a sparse pattern or a pruner may.
        with accelerate(loaded, replace(chosen, draft=registry("draft").build("off"))) as bare:
            plain = answer.generate(bare, inputs, max_new_tokens=max_new_tokens)
    told = answer.draft_metrics(run, plain)
    certificate = None
    if plain is not None and not told["same"] and chosen.sparse.dense and chosen.prune is None:
        window = max(report.draft["windows"], default=1) + 1
        certificate = answer.compare_generations(loaded, inputs, ids, plain[0][0], window)
    rate = answer.memory_bandwidth(device)
    floor = answer.min_decode_step_s(loaded, report.kv.get("bytes", 0.0), rate)
    facts = {
        "model": model,
        "recipe": recipe,
        "video": video,
        "frames": len(seen),
        "device": device,
        "prompt_tokens": report.prompt_tokens,
        "finish_reason": answer.finish_reason(
            ids.tolist(), answer.end_token_ids(loaded, processor.tokenizer), max_new_tokens
        ),
        "floor_tokens_per_s": 1 / floor,
        "read_bytes_per_s": rate,
    }
    if as_json:
        proof = None if certificate is None else {"holds": certificate.is_explained, **asdict(certificate)}
        # "kept" is a share of attention everywhere else; this is the accepted length of the field.
        told["accepted_length"] = told.pop("kept")
        print_json({**facts, "text": streamer.cutter.said.strip(), **told, "certificate": proof})
        return
    out().print()
    for line in _figure_lines(told, facts, compare, certificate):
        out().print(line, highlight=False, markup=False)


def _figure_lines(
    told: dict[str, Any], facts: dict[str, Any], compare: bool, certificate: GenerationComparison | None
) -> list[str]:
    """The lines of figures printed below the description."""
    speed = f"speed   {format_number(told['tokens_per_s'], '.1f', ' tokens/s')}"
    first = f"first   {format_number(told['ttft_s'], '.2f', ' s')}"
    if compare:
        plain = format_number(told["plain_per_s"], ".1f", " tokens/s")
        speed += f", plain {plain}; {format_number(told['speedup'], '.2f')} x as fast"
        first += f", plain {format_number(told['plain_ttft_s'], '.2f', ' s')}"
    if wait := told["draft_wait_s"]:
        speed += f" when the draft's {wait:.2f} s of prefill count" if compare else ""
        first += f"; then {wait:.2f} s in which the draft read the prompt"
    found = [
        f"{facts['model']}, {plural(facts['frames'], 'frame')}, {plural(facts['prompt_tokens'], 'token')}; "
        f"{plural(told['tokens'], 'token')} said in {plural(told['steps'], 'target step')}",
        f"{speed}; a plain step that only read weights and cache would give {facts['floor_tokens_per_s']:.0f} tokens/s",
        first,
        f"accepted {told['kept']:.2f} tokens a round, {told['a_step']:.2f} a target step, {told['streak']:.1f} consecutive, "
        f"{told['share']:.0%} of the verified draft tokens",
    ]
    counters = told["counters"]
    if {"window", "target_step_s", "draft_step_s"} <= counters.keys():
        found.append(
            f"window  {plural(round(counters['window']), 'token')}; a target step takes "
            f"{1e3 * counters['target_step_s']:.1f} ms, a draft step {1e3 * counters['draft_step_s']:.1f} ms"
        )
    found += [f"the draft: {note}" for note in told["notes"]]
    if cut := describe_cut_off(facts["finish_reason"], told["tokens"]):
        found.insert(0, f"the description is {cut}")
    if told["failed"] is not None:
        found.append(f"the draft stopped, and the model went on alone: {told['failed']}")
    if certificate is not None:
        verdict = "rounding alone" if certificate.is_explained else "more than rounding"
        found.append(
            f"differs from plain decoding at token {certificate.first}: {verdict} (gap {certificate.gap:.2g} in fp32, "
            f"rounding moves a logit by {certificate.slack:.2g})"
        )
    return found
