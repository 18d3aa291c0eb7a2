"""Two trees of mmaccel, compared bit for bit: every registered policy and preset, on both tiny models.

    python bench/same.py OLD NEW [--only TEXT] [--models tiny-ov,tiny-qwen] [--frames 40] [--stream 240]

OLD and NEW are checkouts of the repository. Each runs in a process of its own. The names come from OLD, so that NEW must
still load every recipe that OLD knew. A call compares the logits of its prompt, 12 greedy tokens, 12 sampled tokens and the
share of pairs kept. A stream compares three answers with their evidence and logits; for the last answer, NEW loads the
session that OLD saved. Of a recipe that a tree refuses, the class of the error is compared. Prints a line for each case, and
exits with 1 when one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

TOKENS = 12
ASKED = ("What colour was the star?", "Which scene came last?")
DRAFTS = {"tiny-ov": "tiny-ov-draft", "tiny-qwen": "tiny-qwen-draft"}
SIDES = {"tiny-ov": 112, "tiny-qwen": 112}


def cases() -> list[dict[str, Any]]:
    """Each policy and preset that this tree knows, for calls and for streams, with all fields written out."""
    import mmaccel
    from mmaccel.core.recipe import presets

    named: list[tuple[str, Any]] = [(f"preset {name}", name) for name in presets()]
    for kind, names in mmaccel.list_policies().items():
        if kind != "model":
            named += [(f"{kind} {name}", {kind: name}) for name in names]
    pruned = [(f"draft prune {name}", name) for name in mmaccel.list_policies("prune")["prune"]]
    named += [(name, {"draft": {"name": "sequential", "prune": one}}) for name, one in pruned]
    out = []
    for name, recipe in named:
        fields, stream, models = None, False, False
        try:
            loaded = mmaccel.Recipe.load(recipe)
            fields = loaded.to_dict()
            stream = name.startswith("kv ") or loaded.kv.name != "full"
            models = hasattr(loaded.draft, "model")
        except mmaccel.MmaccelError:
            pass
        out.append({"name": f"call {name}", "recipe": recipe, "fields": fields, "drafted": models})
        if stream:
            out.append({"name": f"stream {name}", "recipe": recipe, "fields": fields, "drafted": models})
    return out


def digest(tensor: Any) -> str:
    """The bits of a tensor, its shape and its type."""
    data = tensor.detach().cpu().contiguous()
    head = f"{tuple(data.shape)}{data.dtype}".encode()
    return hashlib.sha256(head + data.float().numpy().tobytes()).hexdigest()[:16]


def recipe_of(case: dict[str, Any], draft: str) -> Any:
    """The case's recipe; a preset's draft model becomes `draft`, which is shipped."""
    import mmaccel

    given = case["recipe"]
    if not case["drafted"]:
        return given
    fields = mmaccel.Recipe.load(given).to_dict()
    fields["draft"] = {**fields["draft"], "model": draft}
    return fields


def call(model: Any, processor: Any, recipe: Any, frames: Any) -> dict[str, Any]:
    """What one accelerated model gives for one prompt."""
    import torch

    import mmaccel

    inputs = processor.chat(ASKED[0], videos=frames, fps=1.0)
    width = inputs["input_ids"].shape[1]
    out: dict[str, Any] = {}
    with mmaccel.accelerate(model, recipe) as fast, torch.no_grad():
        out["logits"] = digest(model(**inputs).logits)
        out["greedy"] = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, width:].tolist()
        out["kept"] = fast.report().kept
        torch.manual_seed(7)
        sampled = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=True, temperature=1.3, top_k=0)
        out["sampled"] = sampled[0, width:].tolist()
    return out


def said(answer: Any) -> dict[str, Any]:
    """What an answer says and rests on."""
    evidence = [(e.frames, e.seconds, e.share, e.recalled, e.score) for e in answer.evidence]
    return {"ids": answer.ids, "evidence": hashlib.sha256(repr(evidence).encode()).hexdigest()[:16]}


def stream(
    model: Any, processor: Any, recipe: Any, frames: Any, folder: Path, saved: Path | None
) -> dict[str, Any]:
    """What one session answers, then its copy from `folder`, or the session that another tree saved to `saved`."""
    import mmaccel

    logits: list[str] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _m, _i, given: logits.append(digest(given))
    )

    session = mmaccel.VideoSession(model, processor, recipe)
    half = len(frames) // 2
    session.watch(frames[:half], fps=1.0)
    out = {"first": said(session.ask(ASKED[0], max_new_tokens=TOKENS))}
    session.watch(frames[half:])
    out["second"] = said(session.ask(ASKED[1], max_new_tokens=TOKENS))
    session.save(folder)
    session.close()
    with mmaccel.VideoSession.resume(model, processor, saved or folder) as again:
        out["resumed"] = said(again.ask(ASKED[1], max_new_tokens=TOKENS))
    hook.remove()
    return {**out, "logits": hashlib.sha256("".join(logits).encode()).hexdigest()[:16], "passes": len(logits)}


def work(given: dict[str, Any]) -> None:
    """Run the cases of one model in this process; a JSON line for each."""
    import torch
    import transformers

    import mmaccel
    from mmaccel_lab.world.drawing import render
    from mmaccel_lab.world.world import World

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = given["model"]
    side = SIDES[name]
    frames, film = (render(World.generate(11, given[n]).table(), side, side) for n in ("frames", "stream"))
    model, processor = mmaccel.load_model(name), mmaccel.load_processor(name)
    for case in given["cases"]:
        began, folder = time.perf_counter(), Path(given["folder"]) / case["name"].replace(" ", "-")
        saved = None if given["saved"] is None else Path(given["saved"]) / folder.name
        out: dict[str, Any]
        try:
            recipe = recipe_of(case, DRAFTS[name])
            torch.manual_seed(0)
            if case["name"].startswith("call"):
                out = call(model, processor, recipe, frames)
            else:
                out = stream(
                    model, processor, recipe, film, folder, saved if saved and saved.exists() else None
                )
        except mmaccel.MmaccelError as error:
            out = {"refused": type(error).__name__, "sentence": str(error)}
        if case["fields"] is not None:
            try:
                out["reads"] = mmaccel.Recipe.load(case["fields"]) == mmaccel.Recipe.load(case["recipe"])
            except mmaccel.MmaccelError as error:
                out["reads"] = str(error)
        print(json.dumps({"case": case["name"], "seconds": time.perf_counter() - began, **out}), flush=True)


def run(tree: Path, given: dict[str, Any]) -> Any:
    """The JSON lines that this file prints with `tree` in the place of the package."""
    where = os.pathsep.join((str(tree), str(tree / "lab")))
    env = {**os.environ, "PYTHONPATH": where, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--work", json.dumps(given)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=tree)


def differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The names of what differs; sentences of refusals may."""
    names = [*old, *(name for name in new if name not in old)]
    return [n for n in names if n not in ("case", "seconds", "sentence") and old.get(n) != new.get(n)]


def compare(args: argparse.Namespace) -> int:
    """Both trees over all cases, beside each other."""
    listed = run(args.old, {"list": True})
    everything = [c for c in json.loads(listed.communicate()[0]) if args.only in c["name"]]
    bad = count = 0
    with tempfile.TemporaryDirectory() as top:
        for model in args.models.split(","):
            base = {"model": model, "cases": everything, "frames": args.frames, "stream": args.stream}
            folders = {side: str(Path(top) / f"{model}-{side}") for side in ("old", "new")}
            old = run(args.old, {**base, "folder": folders["old"], "saved": None})
            lines = [json.loads(line) for line in old.stdout]
            new = run(args.new, {**base, "folder": folders["new"], "saved": folders["old"]})
            for before, line in zip(lines, new.stdout, strict=False):
                after = json.loads(line)
                wrong = differing(before, after)
                count += 1
                bad += bool(wrong)
                verdict = (
                    "differs: " + ", ".join(wrong)
                    if wrong
                    else "refused alike"
                    if "refused" in after
                    else "same"
                )
                print(
                    f"{model:10} {after['case']:44} {before['seconds']:6.1f} {after['seconds']:6.1f} s  {verdict}"
                )
                for name in wrong:
                    print(f"    {name}: {before.get(name)} -> {after.get(name)}")
                if "sentence" in after and (wrong or args.sentences):
                    print(f"    {after['sentence']}")
            if old.wait() or new.wait() or count % len(everything):
                print(f"{model}: a tree ended early (exit {old.returncode} and {new.returncode}).")
                return 1
    print(f"{count - bad} of {count} cases are the same.")
    return 1 if bad or not count else 0


def main() -> int:
    """The command."""
    if sys.argv[1:2] == ["--work"]:
        warnings.simplefilter("ignore")
        given = json.loads(sys.argv[2])
        if given.get("list"):
            print(json.dumps(cases()))
        else:
            work(given)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default="", help="compare the cases whose name has this text")
    parser.add_argument("--models", default="tiny-ov,tiny-qwen")
    parser.add_argument("--frames", type=int, default=40, help="frames of a call's video")
    parser.add_argument("--stream", type=int, default=240, help="frames of a stream")
    parser.add_argument("--sentences", action="store_true", help="print the sentence of each refusal")
    args = parser.parse_args()
    args.old, args.new = args.old.resolve(), args.new.resolve()
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
