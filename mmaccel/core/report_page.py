"""A run's report as one HTML page that needs no network: answers, the frames they rest on, the recipe, and its cost."""

from __future__ import annotations

import base64
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from mmaccel.core.registry import DEFAULTS

Fields = Mapping[str, Any]
Thumbnails = Callable[[float], bytes | None]
"""Seconds -> the frame shown then, as a JPEG file; None where there is none."""

MOST, GIVEN, LONGEST = 8, 8, 6000
"""Frames shown below an answer, and of a video whose answer names none; characters of a recipe."""
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
FEWEST = 8
"""Tokens of an answer from which on a rate is told."""
STEPS = 10
"""Shades of the map of heads."""

COLUMNS, GROUPS, UNBROKEN = 100, ("fetch_", "host_"), "\N{NO-BREAK SPACE}"
"""Of the lines on a memory: their width; the first words of counters that have a line of their own; a space in a figure."""

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }} h3 {{ font-size: 1rem; margin-bottom: 0 }}
h3 .less {{ font-weight: normal }}
table {{ border-collapse: collapse }} th, td {{ text-align: left; vertical-align: top; padding: .15rem 1.2rem .15rem 0 }}
th {{ font-weight: 600 }} pre {{ overflow-x: auto; padding: .7rem; border: 1px solid #8886 }}
.frames {{ display: flex; flex-wrap: wrap; gap: .7rem }} figure {{ margin: 0; width: 13rem; font-size: .85rem }}
img {{ display: block; max-width: 100% }} .less {{ opacity: .75 }} svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}</h1>
"""


class HtmlReport:
    """Mixin of `Report`: returns its fields as a dictionary, and saves them as an HTML page."""

    recipe: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields of the report as a JSON-ready dictionary."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def save_html(
        self, path: str | Path, answers: Mapping[str, Any] | None = None, thumbnails: Thumbnails | None = None
    ) -> None:
        """Write the report as one HTML page that needs no network: the recipe, its cost, the attention computed.

        answers     question -> its text, or the `Answer` of a session, with the frames it is based on
        thumbnails  gives the frames' pictures: ``mmaccel.media.thumbnails("film.mp4")``; None shows only times
        """
        told = [
            {"question": text, "answer": said}
            if isinstance(said, str)
            else {
                "question": text,
                "answer": said.text,
                "finish_reason": said.finish_reason,
                "ttft_s": said.ttft_s,
                "moments": len(said.evidence),
                "evidence": [asdict(one) for one in said.top()],
            }
            for text, said in (answers or {}).items()
        ]
        text = render_page({format_policy_names(self.recipe): self.to_dict()}, told, thumbnails=thumbnails)
        Path(path).write_text(text, encoding="utf-8")


def format_policy_names(recipe: Fields) -> str:
    """Return the names of a recipe's policies that differ from the unaccelerated model's, joined by " + "."""
    names = [value["name"] for value in recipe.values() if isinstance(value, Mapping)]
    return " + ".join(name for name in names if name not in DEFAULTS.values()) or DEFAULTS["sparse"]


def render_page(
    runs: Mapping[str, Fields],
    answers: Sequence[Fields] = (),
    facts: Mapping[str, object] | None = None,
    thumbnails: Thumbnails | None = None,
    given: Sequence[float] = (),
) -> str:
    """Return the HTML text of a report page.

    runs        name -> the fields of a `Report` (`to_dict`), of which any may be missing; runs stand side by side
    answers     each with "question", "answer" (its text), and perhaps "recipe" (the name of its run), "finish_reason",
                "asked_at" and "ttft_s" (seconds), "moments" (how many it is based on) and "evidence", best first: mappings
                with the fields of an `Evidence`
    facts       further facts about the run, by label
    thumbnails  seconds -> the frame's JPEG bytes, or None; None shows only times
    given       seconds of the frames that the model was given, shown where no answer has evidence
    """
    title = f"mmaccel: {', '.join(runs)}"
    parts = [HEAD.format(title=escape(title))]
    known = {label: value for label, value in (facts or {}).items() if value not in (None, "")}
    parts.append(_table([(label, [str(value)]) for label, value in known.items()]))
    if answers:
        end = max(
            chain(given, (one.get("asked_at") or 0.0 for one in answers), _moments(answers)), default=0.0
        )
        parts.append("<h2>Answers</h2>")
        parts += [_answer(one, end, thumbnails) for one in answers]
    if given and not any(one.get("evidence") for one in answers):
        step = max(1, len(given) // GIVEN)
        some = [(seconds, "") for seconds in given[::step][:GIVEN]]
        parts.append(f"<h2>Frames that the model was given: {len(some)} of {len(given)}</h2>")
        parts.append(_figures(some, thumbnails))
        parts.append(
            '<p class="less"><code>generate</code> does not say which frames its answer is based on; a session does '
            "(<code>mmaccel watch</code>, <code>VideoSession.ask</code>).</p>"
        )
    parts += ["<h2>What it cost and what it kept</h2>", _costs(runs)]
    for name, run in runs.items():
        of = f": {escape(name)}" if len(runs) > 1 else ""
        if run.get("kept_by_head"):
            parts += [f"<h2>Heads{of}</h2>", _heads(run["patterns"], run["kept_by_head"])]
        notes = [*(run.get("draft") or {}).get("notes", ()), *run.get("notes", ())]
        if notes:
            parts += [f"<h2>Notes{of}</h2><ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
        if run.get("recipe"):
            text = yaml.safe_dump(_plain(run["recipe"]), sort_keys=False, allow_unicode=True)
            text = text if len(text) <= LONGEST else text[:LONGEST] + "...\n"
            parts.append(f"<h2>Recipe{of}</h2><pre>{escape(text)}</pre>")
    parts.append("</body></html>\n")
    return "\n".join(parts).encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    """Mappings and lists as YAML's safe writer takes them."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _moments(answers: Iterable[Fields]) -> list[float]:
    return [one["seconds"] for answer in answers for one in answer.get("evidence") or ()]


def _table(rows: Iterable[tuple[str, Sequence[str]]], head: Sequence[str] = ()) -> str:
    lines = ["<tr><td></td>" + "".join(f"<th>{escape(one)}</th>" for one in head) + "</tr>"] if head else []
    for label, cells in rows:
        if any(cells):
            row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            lines.append(f"<tr><th>{escape(label)}</th>{row}</tr>")
    return "\n".join(["<table>", *lines, "</table>"])


def _answer(answer: Fields, end: float, thumbnails: Thumbnails | None) -> str:
    by = f"({answer['recipe']})" if answer.get("recipe") else ""
    at = answer.get("asked_at")
    when = "" if at is None else f" after {at:.1f} s"
    why = answer.get("finish_reason", "stop")
    cut = "" if why == "stop" else f" [ended: {why}]"
    first = answer.get("ttft_s")
    took = "" if first is None else f", first token after {first:.3f} s"
    parts = [
        f"<h3>{escape(str(answer['question']))}<span class=less>{when}{took} {escape(by)}</span></h3>",
        f"<p>{escape(str(answer['answer']) or '(nothing)')}{escape(cut)}</p>",
    ]
    evidence = answer.get("evidence") or ()
    if evidence:
        scored = [one.get("score") for one in evidence]
        whole = all(score is not None for score in scored)
        weights = scored if whole else [one["share"] for one in evidence]
        what = "of what reached the answer" if whole else "of the layers looked at it"
        count = answer.get("moments", len(evidence))
        told = f"The {min(MOST, len(evidence))} of {count} moments seen that weigh most, best first."
        said = [f": {weight:.1%} {what}" for weight in weights]
        if all(score is None for score in scored):  # as `mmaccel watch` says
            told = "These were seen; this memory does not tell which of them the answer is based on."
            said = [""] * len(evidence)
        some = [(x["seconds"], _span(x["frames"]) + more) for x, more in zip(evidence, said, strict=True)]
        parts.append(f"<p class=less>{told}</p>")
        parts += [
            _timeline([one["seconds"] for one in evidence], weights, end),
            _figures(some[:MOST], thumbnails),
        ]
    return "\n".join(parts)


def _span(frames: Sequence[int]) -> str:
    first, last = frames
    return f"frame {first}" if first == last else f"frames {first}-{last}"


def _figures(moments: Iterable[tuple[float, str]], thumbnails: Thumbnails | None) -> str:
    """Pictures over their times and a line of text each."""
    parts = ["<div class=frames>"]
    for seconds, text in moments:
        data = None if thumbnails is None else thumbnails(seconds)
        shown = "(no picture)" if data is None else _image(data, seconds)
        parts.append(
            f"<figure>{shown}<figcaption><b>{seconds:.1f} s</b> {escape(text)}</figcaption></figure>"
        )
    return "\n".join([*parts, "</div>"])


def _image(data: bytes, seconds: float) -> str:
    text = base64.b64encode(data).decode("ascii")
    return f'<img alt="the frame at {seconds:.1f} s" src="data:image/jpeg;base64,{text}">'


def _timeline(moments: Sequence[float], weights: Sequence[float], end: float) -> str:
    """A line for each moment, as high as its weight, over the seconds of the video."""
    most, end = max(weights) or 1.0, end or 1.0
    lines = "".join(
        f"M{700 * seconds / end + 10:.1f} 40V{40 - 34 * weight / most:.1f}"
        for seconds, weight in zip(moments, weights, strict=True)
    )
    return (
        '<svg viewBox="0 0 720 58" width="720" role="img" aria-label="when the frames were shown">'
        '<path d="M10 40H710" stroke="currentColor" opacity=".4"/>'
        f'<path d="{lines}" stroke="{COLOURS[0]}" stroke-width="2.5"/>'
        '<g font-size="11" fill="currentColor"><text x="10" y="54">0 s</text>'
        f'<text x="710" y="54" text-anchor="end">{end:.0f} s</text></g></svg>'
    )


def _costs(runs: Mapping[str, Fields]) -> str:
    """One column a run."""

    def number(name: str, form: str, unit: str, scale: float = 1) -> Callable[[Fields], str]:
        def show(run: Fields) -> str:
            value = run.get(name)
            return "" if value is None else f"{value * scale:{form}}{unit}"

        return show

    rows: dict[str, Callable[[Fields], str]] = {
        "first token": number("ttft_s", ".3f", " s"),
        "decode": lambda run: format_answer_speed(run.get("new_tokens"), run.get("tokens_per_s")),
        "prompt": number("prompt_tokens", "d", " tokens"),
        "pairs computed": number("kept", ".1%", " of causal, in the last prompt or ingestion"),
        "peak memory": number("peak_bytes", ".0f", " MiB (on a CPU: the process's so far)", 2**-20),
        "memory holds": lambda run: describe_kv_memory(run.get("kv") or {}),
        "draft": lambda run: describe_draft({**(run.get("draft") or {}), "notes": ()}),  # they stand below
        "backend": lambda run: str(run.get("backend") or ""),
        "why": lambda run: str(run.get("backend_why") or ""),
    }
    table = [(label, [show(run) for run in runs.values()]) for label, show in rows.items()]
    return _table(table, list(runs) if len(runs) > 1 else ())


def format_report_lines(run: Fields) -> str:
    """Return the fields of a `Report` as lines of text."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    draft = run["draft"]
    heads = format_head_counts(Counter(chain.from_iterable(run["patterns"])))
    asked = run["recipe"].get("sparse", {}).get("name", DEFAULTS["sparse"])
    unused = "no pattern" if asked == DEFAULTS["sparse"] else f"{asked} acted on no part of it, see below"
    lines = [
        f"prompt: {run['prompt_tokens']} tokens, first token after {show(run['ttft_s'], '.3f')} s; "
        f"decode: {format_answer_speed(run['new_tokens'], run['tokens_per_s'])}",
        f"attention: pairs computed in prefill {format_attention_share(run['kept'])} ({heads or unused}), "
        f"backend {run['backend']}",
        *memory_lines(run),
    ]
    if run["backend_why"].startswith("measured"):
        lines.insert(2, f"backend {run['backend']}: {run['backend_why']}")
    notes = draft.get("notes", ())
    if said := describe_draft({**draft, "notes": ()}):
        lines.append(
            f"draft: {said}"
            + (f"; {plural(draft['target_steps'], 'target step')}" if draft["rounds"] else "")
        )
    return "\n".join([*lines, *(f"draft: {note}" for note in notes), *run["notes"]])


def memory_lines(run: Fields) -> list[str]:
    """Return the peak memory and a memory's counters, of the fields of a `Report`, as lines of at most `COLUMNS` characters;
    counters that begin with one of `GROUPS` have a line of their own, which names the group once."""
    groups = {"": [f"memory: peak {run['peak_bytes'] / 2**20:.0f} MiB"], **{name: [] for name in GROUPS}}
    for name, value in run["kv"].items():
        group = next((one for one in GROUPS if name.startswith(one)), "")
        if value:
            groups[group].append(_figure(name, value).removeprefix(group))
    lines: list[str] = []
    for group, figures in groups.items():
        text = f"  {group[:-1]}: " * bool(group) + ", ".join(one.replace(" ", UNBROKEN) for one in figures)
        lines += textwrap.wrap(text, COLUMNS, subsequent_indent=4 * " ") if figures else []
    return [line.replace(UNBROKEN, " ") for line in lines]


def _figure(name: str, value: float) -> str:
    """A counter of a memory with its unit, where its name has one; tokens are held and seen."""
    what, _, where = name.partition(" ")
    if what == "visual":
        return f"{value:g} visual tokens {where}{' on' if where.startswith('from ') else ''}".rstrip()
    if "bytes" in name.split("_"):
        return f"{name} {value / 2**20:.2f} MiB"
    unit = " s" if "seconds" in name.split("_") else ""
    unit = " tokens" if name in ("held", "held_mean", "seen") else unit
    return f"{name} {value:.4g}{unit}" if unit == " s" else f"{name} {value:g}{unit}"


def format_head_counts(heads: Mapping[str, int]) -> str:
    """Format how many heads ran each pattern: "dense x 2, grid x 10"."""
    return ", ".join(f"{name} x {n}" for name, n in sorted(heads.items()))


def format_attention_share(kept: float | None) -> str:
    """Format the share of causal query-key pairs that was computed, in percent; above 100% the text says why."""
    percent = "-" if kept is None else f"{kept:.1%} of causal"
    return f"{percent} (blocks count whole)" if kept and kept > 1 and percent[:6] != "100.0%" else percent


def format_answer_speed(tokens: int | None, rate: float | None) -> str:
    """Format an answer's number of tokens ("" for None), with their `rate` per second if there are at least `FEWEST`."""
    told = "" if tokens is None else plural(tokens, "token")
    return f"{told}, {rate:.1f} tokens/s" if rate and (tokens or 0) >= FEWEST else told


def describe_kv_memory(kv: Fields) -> str:
    """Describe in words what a KV memory holds, from its counters `kv`; "" if it holds nothing."""
    parts = [bytes_text(kv["bytes"])] if kv.get("bytes") else []
    if held := kv.get("held"):
        mean = kv.get("held_mean", held)
        least = ", the mean of the layers" if mean < held else ""
        tokens, twice = plural(round(kv.get("seen", held)), "token"), mean > kv.get("seen", held)
        told = f"{mean:.0f} tokens allocated for {kv.get('seen'):g}, with copies of retrieved frames"
        parts.append((told if twice else f"{mean:.0f} of {tokens} held") + least)
    return ", ".join(parts)


def describe_draft(draft: Fields) -> str:
    """Return in words how many tokens were drafted and accepted, what the draft's pruner left out, what its own memory
    holds, and how long the answer waited for it, from `Report.draft`; "" if nothing was drafted."""
    failed, notes, rounds = draft.get("failed"), "; ".join(draft.get("notes", ())), draft.get("rounds")
    seconds = draft.get("wait_s")
    waited = f"the answer waited {seconds:.3f} s for it to read the prompt" if seconds else ""
    if not rounds:
        return "; ".join(filter(None, [f"nothing: {failed or notes}" if failed or notes else "", waited]))
    counters = draft.get("counters", {})
    own = describe_kv_memory({name.removeprefix("kv_"): value for name, value in counters.items()})
    told = [
        f"{draft['accepted']} of {draft['proposed']} accepted in {plural(rounds, 'round')}, "
        f"{draft['accepted'] / rounds:.2f} a round",
        f"its pruner left out {plural(int(left), 'visual token')}"
        if (left := counters.get("pruned"))
        else "",
        f"draft KV cache: {own}" if own else "",
        waited,
        notes,
        f"stopped: {failed}" if failed else "",
    ]
    return "; ".join(filter(None, told))


def plural(count: int, thing: str) -> str:
    """Format a count with its noun: "1 frame", "2 frames"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _heads(patterns: Sequence[Sequence[str]], kept: Sequence[Sequence[float]]) -> str:
    """A map of heads: a row a layer, a hue a pattern, darker where more is kept."""
    names = sorted(set(chain.from_iterable(patterns)))
    cells: dict[tuple[str, int], list[str]] = defaultdict(list)
    for y, (row, shares) in enumerate(zip(patterns, kept, strict=True)):
        for x, (name, share) in enumerate(zip(row, shares, strict=True)):
            cells[name, min(STEPS, round(STEPS * share))].append(f"M{x} {y}h.9v.9h-.9z")
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    paths = [
        f'<path fill="{colours[name]}" fill-opacity="{0.12 + 0.88 * step / STEPS:.2f}" d="{"".join(some)}">'
        f"<title>{escape(name)}, about {step / STEPS:.0%} kept</title></path>"
        for (name, step), some in sorted(cells.items())
    ]
    wide, high = max(map(len, patterns)), len(patterns)
    size = max(4, min(16, 640 // max(1, wide)))
    legend = " ".join(f'<span style="color:{colours[name]}">&#9632;</span> {escape(name)}' for name in names)
    return "\n".join(
        [
            f'<svg viewBox="0 0 {wide} {high}" width="{size * wide}" role="img" aria-label="kept by layer and head">',
            *paths,
            f"</svg><p class=less>{legend}. A row is a layer, the first on top; a column is a head; "
            "full colour keeps all.</p>",
        ]
    )
