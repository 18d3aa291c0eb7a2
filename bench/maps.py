"""Maps among the pictures: hard questions, needles, heads, a stream, the house. `pictures.py` draws them."""

from __future__ import annotations

import json
from typing import Any

import drawing
from drawing import COLOURS, MEMORIES, MODELS, ROOT, Figure, note, panel, rows

KINDS = {
    "needle": "one card's\ncolour",
    "scene": "scene\nbefore",
    "order": "order of\ntwo cards",
    "combine": "colours\nof both",
}


def hard_facts() -> dict[str, Any]:
    """Share right by memory and kind of question, at 16 frames retrieved where there is a budget."""
    found: dict[str, Any] = {}
    for model in MODELS:
        for row in rows(f"memories_{model}_202611"):
            if row.get("what") == "mean" and row["length"] == "all" and row["memory"] in MEMORIES:
                budget = 64 if row["memory"] in ("no_cache", "recent") else 16
                if row["kind"] != "all" and row["budget"] in (None, budget):
                    cell = found.setdefault(model, {}).setdefault(row["memory"], {})
                    cell[row["kind"]] = round(row["accuracy"], 3)
    return found


def hard(facts: Any) -> Figure:
    drawn, plots = panel(
        8.6, 4.2, "Hard questions: under ReKV and LiveVLM the order of two cards is a guess",
        "percent right by memory and kind of question; 16 frames retrieved (last two rows: 64); chance is 50 for the order",
        columns=2,
    )  # fmt: skip
    for axes, (model, told) in zip(plots, facts.items(), strict=True):
        order = [n for n in MEMORIES if n in told]
        kinds = [k for k in KINDS if k in told[order[0]]]
        cells = [[100 * told[name][kind] for kind in kinds] for name in order]
        drawing.cells(axes, cells, "{:.0f}")
        axes.set_xticks(range(len(kinds)), [KINDS[k] for k in kinds], fontsize=9)
        axes.set_yticks(range(len(order)), [MEMORIES[n] for n in order] if model == MODELS[0] else [])
        axes.set_title(model, fontsize=11, loc="left", color=COLOURS["ink"])
    return drawn


METHODS = {
    "dense": "dense",
    "searched": "searched (ours)",
    "without_boundaries": "ours, no boundaries",
    "without_tail": "ours, no dense rows",
    "without_both": "ours, neither",
    "minference": "vertical-slash",
    "block_topk": "block_topk",
    "a_shape": "A-shape",
    "tri_shape": "Tri-shape",
    "sf_fixed": "SF-fixed",
    "sf_strided": "SF-strided",
    "visionzip": "VisionZip",
}


def needles_facts() -> dict[str, Any]:
    """Right of asked by model and task, method, and thousands of tokens of the prompt."""
    found: dict[str, Any] = {}
    for row in rows("haystack_tails_h200_202611"):
        if row.get("recipe") in METHODS and row["compress"] is None and row["dtype"] == "bfloat16":
            task = f"{row['model']}, {'MM' if row['documents'] else 'V'}-NIAH"
            length = min((2, 4, 8, 16, 32), key=lambda k: abs(k * 1024 - row["tokens"]))
            cell = found.setdefault(task, {}).setdefault(row["recipe"], {}).setdefault(str(length), [0, 0])
            cell[0] += bool(row["right"])
            cell[1] += 1
    return {task: {m: told[m] for m in METHODS if m in told} for task, told in sorted(found.items())}


def needles(facts: Any) -> Figure:
    drawn, plots = panel(
        8.6, 5.0, "Needles do not tell patterns apart: all find them, only VisionZip does not at 32k",
        "right answers of ten by method and length of the prompt in tokens, all at the same share of attention; one H200",
        columns=4,
    )  # fmt: skip
    for number, (axes, (task, told)) in enumerate(zip(plots, facts.items(), strict=True)):
        lengths = sorted(next(iter(told.values())), key=int)
        counts = [[told[m].get(n, (0, 1)) for n in lengths] for m in told]
        shares = [[100 * right / asked for right, asked in line] for line in counts]
        drawing.cells(axes, shares, "{}", [[str(right) for right, _ in line] for line in counts])
        axes.set_xticks(range(len(lengths)), [f"{n}k" for n in lengths], fontsize=9)
        axes.set_yticks(range(len(told)), [METHODS[m] for m in told] if not number else [])
        axes.set_title(task.replace(", ", "\n"), fontsize=10, loc="left", color=COLOURS["ink"])
    return drawn


PATTERNS = {
    "grid": "blue",
    "vertical_slash": "green",
    "a_shape": "muted",
    "q_boundary": "orange",
    "boundary_2d": "red",
    "k_boundary": "violet",
}


def heads_facts() -> dict[str, Any]:
    """The pattern of each head, by layer, in the tables that the lab ships."""
    found = {}
    for model in MODELS:
        path = ROOT / "lab" / "mmaccel_lab" / "tiny" / model / "heads.json"
        layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
        found[model] = [
            [[head["pattern"]["name"], round(head["share"], 3)] for head in layer] for layer in layers
        ]
    return found


def heads(facts: Any) -> Figure:
    drawn, plots = panel(
        8.6, 4.6, "Most heads want a pattern for each modality, and neighbours want different ones",
        "pattern that the search chose for each head, and the percentage of attention it computes; 5 474 and 5 222 tokens",
        columns=2,
    )  # fmt: skip
    for axes, (model, layers) in zip(plots, facts.items(), strict=True):
        for y, layer in enumerate(layers):
            for x, (name, share) in enumerate(layer):
                drawing.cell(axes, x, y, COLOURS[PATTERNS[name]], 0.55, f"{100 * share:.0f}")
        drawing.square(axes, len(layers[0]), len(layers))
        axes.set_xticks(range(len(layers[0])), [f"head {n}" for n in range(len(layers[0]))], fontsize=9)
        axes.set_yticks(
            range(len(layers)), [f"layer {n}" for n in range(len(layers))] if model == MODELS[0] else []
        )
        axes.set_title(model, fontsize=11, loc="left", color=COLOURS["ink"])
    used = [
        name for name in PATTERNS if any(name == one for m in facts.values() for la in m for one, _ in la)
    ]
    drawing.key(drawn, {name: COLOURS[PATTERNS[name]] for name in used})
    return drawn


def stream_facts() -> dict[str, Any]:
    """Scenes, clusters by level, and four questions with the frames that their answers are based on."""
    told = rows("timeline_cpu_202611")
    (scenes,) = (row["scenes"] for row in told if row.get("case") == "scenes")
    clusters = {row["name"]: row["owner"] for row in told if row.get("case") == "clusters"}
    asked = [
        {k: row[k] for k in ("question", "answer", "evidence", "about")}
        for row in told
        if row.get("case") == "question"
    ]
    return {"scenes": scenes, "clusters": clusters, "questions": asked}


def stream(facts: Any) -> Figure:
    asked = facts["questions"]
    drawn, plots = panel(
        8.6, 6.6, "A memory sorts a stream by scene, and questions find the frames they are about",
        "tiny-ov watches 512 frames, one a second, under mosaic, and retrieves 16 of them for each question",
        rows=2 + len(asked), heights=[0.5, 2.6, *[0.75] * len(asked)],
    )  # fmt: skip
    names = list(dict.fromkeys(name for _, _, name in facts["scenes"]))
    tints = [COLOURS[c] for c in ("blue", "orange", "green", "violet", "red", "muted")]
    for start, stop, name in facts["scenes"]:
        drawing.span(plots[0], start, stop, 0, 1, tints[names.index(name) % len(tints)], 0.45, name)
    plots[0].set_ylim(0, 1)
    owners = next(iter(facts["clusters"].values()))
    lanes: list[int] = []
    for second, owner in enumerate(owners):
        if owner not in lanes:
            lanes.append(owner)
        scene = next((n for a, b, n in facts["scenes"] if a <= second < b), names[0])
        colour = tints[names.index(scene) % len(tints)]
        drawing.span(
            plots[1], second, second + 1, lanes.index(owner) - 0.45, lanes.index(owner) + 0.45, colour, 1.0
        )
    plots[1].set_ylim(len(lanes) - 0.4, -0.6)
    for axes, one in zip(plots[2:], asked, strict=True):
        for second in one["about"] or ():
            axes.axvline(second, color=COLOURS["red"], linewidth=3, alpha=0.45)
        seconds, shares = zip(*one["evidence"], strict=True)
        axes.vlines(seconds, 0, shares, color=COLOURS["blue"], linewidth=1.4)
        axes.set_ylim(0, 1.08 * max(shares))
        axes.set_title(
            f"{one['question']}  →  {one['answer']}", fontsize=10, loc="left", color=COLOURS["ink"], pad=3
        )
    for axes in plots:
        axes.set_xlim(0, len(owners))
        axes.set_yticks([])
        if axes is not plots[-1]:
            axes.set_xticklabels([])
    plots[0].set_ylabel("scene", rotation=0, ha="right", va="center")
    plots[1].set_ylabel(f"{len(lanes)} visual\nclusters,\na line each", rotation=0, ha="right", va="center")
    plots[-1].set_xlabel("seconds of the stream")
    plots[2].plot(
        [], [], color=COLOURS["blue"], label="what each frame contributes to the answer (attention rollout)"
    )
    plots[2].plot(
        [], [], color=COLOURS["red"], linewidth=3, alpha=0.45, label="the frames the question is about"
    )
    note(drawn, plots[2])
    return drawn


HOUSE: list[tuple[str, float, float, float, float, str, str]] = [
    ("your code", 0.0, 4.5, 6.0, 0.45, "muted", "a script with transformers, or mmaccel ask, watch, serve"),
    ("models", 0.0, 3.05, 2.9, 0.9, "red", "hooks into an unmodified\nHugging Face model;\na family of models is a file"),
    ("policies", 3.1, 3.05, 2.9, 0.9, "blue", "sparse pattern, memory (kv),\ndraft, pruner;\na policy is a file"),
    ("core", 0.0, 1.75, 6.0, 0.75, "green", "a recipe names policies, checked together before weights load\n"
     "prefill: a plan for each layer    streams: watch, retrieve, ask    decoding: draft, verify"),
    ("backends", 0.0, 0.45, 6.0, 0.75, "violet", "Triton and Hopper kernels, flash-attn, FlexAttention, plain PyTorch;\n"
     "which one runs is chosen by measured costs"),
]  # fmt: skip
"""Name, left, bottom, width, height, colour, and what is in it."""
CALLS = [
    (1.45, 4.5, 3.95, "accelerate(model, recipe)"),
    (4.55, 4.5, 3.95, "a recipe in YAML"),
    (1.45, 3.05, 2.5, "queries, keys and values of a layer"),
    (4.55, 3.05, 2.5, "what to compute"),
    (3.0, 1.75, 1.2, "plans: which block of queries sees which keys"),
]
"""Arrows: where, from, to, and what goes along."""


def architecture_facts() -> Any:
    return [list(map(list, HOUSE)), list(map(list, CALLS))]


def architecture(facts: Any) -> Figure:
    drawn, axes = panel(
        8.6, 5.4, "The house: models bring tensors, policies say what to compute, kernels compute it",
        "core knows no policy and no family of models, backends know neither; tests hold the imports to that",
    )  # fmt: skip
    drawing.boxes(axes, *facts)
    return drawn
