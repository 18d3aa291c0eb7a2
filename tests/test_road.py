"""From an mp4 to a right answer with the shipped models, dense and sparse; and what a wheel holds.

Worlds here have seeds that no training run drew.
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import load_model, load_processor
from mmaccel.cli.answer import ask, prompt_inputs
from mmaccel.core.recipe import Recipe
from mmaccel.models import shipped as tiny
from mmaccel_lab.cli import main
from mmaccel_lab.eval.caption import agreement, caption_cases, caption_scores
from mmaccel_lab.eval.cases import Case, Film, cases
from mmaccel_lab.eval.needle import Judged, Tally, judge

ROOT = Path(__file__).parent.parent
TARGETS = ["tiny-ov", "tiny-qwen"]
ONE = ["tiny-ov", pytest.param("tiny-qwen", marks=pytest.mark.slow)]
KINDS = ("needle", "order", "combine")
SEED = 7000

Shipped = Callable[[str], str]


@pytest.fixture(scope="module")
def loaded() -> Callable[[str], tuple[Any, Any]]:
    """Name -> the model in float32 and its processor, loaded once."""
    held: dict[str, tuple[Any, Any]] = {}

    def get(name: str) -> tuple[Any, Any]:
        if name not in held:
            held[name] = load_model(name, dtype=torch.float32), load_processor(name)
        return held[name]

    return get


Loaded = Callable[[str], tuple[Any, Any]]


def inputs_of(loaded: tuple[Any, Any], case: Case) -> dict[str, torch.Tensor]:
    model, processor = loaded
    with Film() as film:
        return prompt_inputs(processor, case.content(film.watch(case.world)), model)


def share(seen: list[Judged], recipe: str) -> float:
    tally = Tally(recipe)
    for one in seen:
        tally.add(one)
    return tally.share() or 0.0


@pytest.mark.parametrize(
    ("name", "samples"),
    [("tiny-qwen", 1), *(pytest.param(name, 5, marks=pytest.mark.slow) for name in TARGETS)],
)
def test_a_film_is_answered_rightly(name: str, samples: int, shipped: Shipped, loaded: Loaded) -> None:
    """Three kinds of question about real H.264 files, under dense, a_shape and grid; the demonstration asks tiny-ov."""
    recipes = {one: Recipe.load(one) for one in ("dense", "a_shape-short", "grid")}
    frames = 96 if samples == 1 else 128
    with Film() as film:
        seen = list(judge(*loaded(shipped(name)), recipes, cases(frames, samples, SEED, KINDS), film))
    assert len(seen) == 3 * samples
    shares = {one: share(seen, one) for one in recipes}
    assert min(shares.values()) >= 0.9, shares
    for one in seen:
        for recipe, pattern in (("a_shape-short", "a_shape"), ("grid", "grid")):
            report = one.answers[recipe].report
            # A run that fell back to dense would keep everything and name no pattern.
            assert report.kept is not None and report.kept < 0.8
            assert set(report.heads()) == {pattern} and report.heads()[pattern] == 8 * 4
        assert one.answers["dense"].report.kept == 1.0


@pytest.mark.parametrize("name", ONE)
def test_an_answer_rests_on_the_video(name: str, shipped: Shipped, loaded: Loaded) -> None:
    """Shown another film, the model gives another answer: what it says is seen, not guessed."""
    model, processor = loaded(shipped(name))
    first = next(cases(64, 1, SEED, ("needle",)))
    others = [case for case in cases(64, 12, SEED + 1, ("count",)) if case.answer != "one"]

    def said(case: Case) -> str:
        return ask(model, processor, inputs_of((model, processor), case), max_new_tokens=8).text

    assert first.right(said(first))
    counts = set()
    for case in others:
        if len(counts) >= 2:
            break
        counts.add(said(case))
    assert len(counts) >= 2


@pytest.mark.parametrize("name", ONE)
def test_a_draft_writes_the_target_s_own_caption(name: str, shipped: Shipped, loaded: Loaded) -> None:
    """Greedy sequential drafting gives the model's own tokens, and most of what it drafts is taken."""
    model, processor = loaded(shipped(name))
    folder = str(tiny.tiny_model_folder(shipped(f"{name}-draft")))
    (case,) = caption_cases(48, 1, SEED)
    inputs = inputs_of((model, processor), case)
    plain = ask(model, processor, inputs, max_new_tokens=120)
    recipe = Recipe.load(draft={"name": "sequential", "model": folder})
    drafted = ask(model, processor, inputs, recipe, max_new_tokens=120)
    told = drafted.report.draft
    assert drafted.text == plain.text and told["failed"] is None
    assert 0.3 < told["accepted"] / told["proposed"] < 1 and told["target_steps"] < 100


@pytest.mark.parametrize("name", ONE)
def test_a_caption_is_known_token_by_token(name: str, shipped: Shipped, loaded: Loaded) -> None:
    model, processor = loaded(shipped(name))
    draft, _ = loaded(shipped(f"{name}-draft"))
    with Film() as film:
        rows = list(caption_scores(model, processor, caption_cases(128, 1, SEED), film, draft=draft))
    shares = agreement(rows)
    assert shares["accuracy"] is not None and shares["accuracy"] >= 0.9
    assert shares["agreement"] is not None and 0.5 <= shares["agreement"] <= 0.9


@pytest.mark.parametrize("name", ONE)
def test_documents_are_read_and_watched(name: str, shipped: Shipped, loaded: Loaded) -> None:
    with Film() as film:
        todo = cases(64, 2, SEED, ("needle",), documents=4, tokens_per_frame=16)
        seen = list(judge(*loaded(shipped(name)), {"dense": Recipe()}, todo, film))
    assert len(seen) == 2 and share(seen, "dense") == 1


def test_natural_spelling_is_understood(shipped: Shipped, loaded: Loaded) -> None:
    model, processor = loaded(shipped("tiny-ov"))
    case = next(cases(32, 1, SEED, ("needle",)))
    natural = replace(case, question=case.question.replace(" ?", "?").capitalize())
    assert case.right(ask(model, processor, inputs_of((model, processor), natural), max_new_tokens=8).text)


def test_the_demonstration_passes(shipped: Shipped, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["demo", "--model", shipped("tiny-ov"), "--worlds", "1", "--seed0", "300", "--frames", "48"])
    out, err = capsys.readouterr()
    assert not done.value.code, out + err
    assert "the truth:" in out and "right, kept" in out


@pytest.mark.always
def test_the_readme_s_python_runs(shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the README on a tiny model, as they stand, beside videos of those names."""
    shipped("tiny-ov")
    from mmaccel_lab.world import World, write_mp4

    write_mp4(World.generate(SEED, 64), tmp_path / "clip.mp4")
    (tmp_path / "camera.mp4").symlink_to(tmp_path / "clip.mp4")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    real, tiny_one, stream = blocks
    assert "Qwen/Qwen2.5-VL" in real
    monkeypatch.chdir(tmp_path)
    room: dict[str, Any] = {}
    exec(compile(tiny_one, "README.md", "exec"), room)
    assert sum((heads := room["fast"].report().heads()).values()) == 32 and "grid" in heads
    assert mmaccel.attached(room["model"]) is None
    exec(compile(stream, "README.md", "exec"), room)
    assert room["answer"].evidence and (tmp_path / "page.html").is_file() and (tmp_path / "memory").is_dir()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_shipped_folder_is_whole(name: str, shipped: Shipped) -> None:
    folder = tiny.tiny_model_folder(shipped(name))
    names = {path.name for path in folder.iterdir()}
    assert names >= {f"{name}.json" for name in ("config", "generation_config", "tokenizer")}
    assert names >= {"model.safetensors", "README.md"}
    assert "license: apache-2.0" in (folder / "README.md").read_text(encoding="utf-8")
    model = load_model(name)
    assert next(model.parameters()).dtype == torch.bfloat16


def test_the_shipped_models_are_small(shipped: Shipped) -> None:
    sizes = [
        path.stat().st_size for name in tiny.NAMES for path in tiny.tiny_model_folder(shipped(name)).iterdir()
    ]
    assert sum(sizes) <= 40 * 2**20


def test_the_wheels_hold_what_they_need(shipped: Shipped, tmp_path: Path) -> None:
    """The library is small; the weights, the world and the studies are the lab's."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(ROOT), str(ROOT / "lab")], check=True, timeout=600)
    (wheel,) = tmp_path.glob("mmaccel-*.whl")
    (lab,) = tmp_path.glob("mmaccel_lab-*.whl")
    held, held_by_lab = set(zipfile.ZipFile(wheel).namelist()), set(zipfile.ZipFile(lab).namelist())
    assert {"mmaccel/recipes/dense.yaml", "mmaccel/py.typed", "mmaccel_command.py"} <= held
    assert {top.split("/")[0].split("-")[0] for top in held} == {"mmaccel", "mmaccel_command.py"}
    assert wheel.stat().st_size < 1.1 * 2**20
    assert {"mmaccel_lab/py.typed", "mmaccel_lab/world/world.py", "mmaccel_lab/cli/worlds.py"} <= held_by_lab
    for name in tiny.NAMES:
        assert f"mmaccel_lab/tiny/{shipped(name)}/model.safetensors" in held_by_lab
    assert {top.split("/")[0].split("-")[0] for top in held_by_lab} == {"mmaccel_lab"}
    for one, names in ((wheel, held), (lab, held_by_lab)):
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names), one.name
    assert (ROOT / "lab" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
