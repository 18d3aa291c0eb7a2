"""lmms-eval's command with our entry point, on each layout of its tasks, over worlds; skipped where it is not installed."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import media
from mmaccel.media.video import write_jpeg
from mmaccel_lab.world import World, render, write_mp4

lmms_eval = pytest.importorskip("lmms_eval", reason="lmms-eval is not installed: pip install '.[eval]'")
ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent
FRAMES = 24
RUN = "import mmaccel, runpy; runpy.run_module('lmms_eval', run_name='__main__', alter_sys=True)"
SEEDS = (3, 4, 6)


def harness(folder: Path) -> dict[str, str]:
    """The environment in which the harness runs: without a network, its videos below `folder`."""
    settings = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "lab"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **settings, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def judge(folder: Path, tasks: str, model_args: str) -> tuple[int, str]:
    """The harness's command run in `folder`: its status, and all that it prints."""
    words = ["--model", "mmaccel", "--model_args", model_args, "--tasks", tasks, "--include_path", str(TASKS)]
    words += ["--log_samples", "--output_path", "out", "--batch_size", "1"]
    # Beside a torch for CPUs, a torchvision built for CUDA is imported after mmaccel or not at all.
    command = [sys.executable, "-c", RUN, *words]
    own = dict(cwd=folder, env=harness(folder), timeout=300)
    done = subprocess.run(command, text=True, capture_output=True, **own)
    return done.returncode, done.stdout + done.stderr


def rows(file: Path, docs: Iterable[Any]) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in docs))


@pytest.fixture(scope="module")
def worlds(shipped: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with films, pieces and pictures of worlds in the places where tasks look, and the tasks' questions."""
    shipped("tiny-ov")
    folder = tmp_path_factory.mktemp("worlds")
    for name in ("videomme/data", "chunks"):
        (folder / name).mkdir(parents=True)
    choice, asked, rounds = list[Any](), list[Any](), list[Any]()
    for seed in SEEDS:
        world, name = World.generate(seed, FRAMES), f"w{seed}"
        write_mp4(world, folder / f"{name}.mp4", 84, 140)
        (folder / f"videomme/data/{name}.mp4").symlink_to(folder / f"{name}.mp4")
        (folder / name).mkdir()
        for number, frame in enumerate(render(world.table(), 84, 140)[:4]):
            (folder / name / f"{number}.jpg").write_bytes(write_jpeg(frame, 4096))
        question = world.questions("needle")[0]
        asked.append({"id": name, "question": question.text, "answer": question.answer})
        others = [one for one in ("red", "green", "blue", "yellow", "orange") if one != question.answer][:3]
        options = [f"{letter}. {one}" for letter, one in zip("ABCD", [question.answer, *others], strict=True)]
        kinds = {"domain": "Knowledge", "sub_category": "Astronomy", "task_type": "OCR Problems"}
        facts = {"question_id": name, "videoID": name, "duration": "short", "answer": "A", **kinds}
        choice.append({**facts, "question": question.text, "options": options})
        for number in range(2):
            piece = World.generate(seed, FRAMES // 2 * (number + 1))
            write_mp4(piece, folder / f"chunks/{seed}_{number}.mp4", 84, 140)
        steps = [{"realtime": 1.0, "type": 0}, {"realtime": 2.0, "type": 1}]
        rounds.append(
            {"id": seed, "task": "CRR", "question": question.text, "answer": "", "test_info": steps}
        )
    rows(folder / "choice.jsonl", choice)
    rows(folder / "open.jsonl", asked)
    rows(folder / "rounds.jsonl", rounds)
    return folder


def own(worlds: Path, recipe: str, asked: Iterable[tuple[str, str]]) -> list[str]:
    """The answers to questions on films, asked without the harness."""
    model, processor = mmaccel.load_model("tiny-ov", dtype=torch.float32), mmaccel.load_processor("tiny-ov")
    found = []
    for film, words in asked:
        content = [{"type": "video", "video": media.read(worlds / film)}, {"type": "text", "text": words}]
        inputs = processor.chat(content)
        with mmaccel.accelerate(model, recipe) as fast, torch.no_grad():
            ids = fast.generate(**inputs, max_new_tokens=4, do_sample=False)
        found.append(processor.decode(ids[0, inputs["input_ids"].shape[1] :]).split("\n\n")[0])
    return found


def docs(folder: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def samples(folder: Path, task: str) -> list[Any]:
    """What the model said to each document, in order: the texts of its rounds, mostly one."""
    (file,) = folder.glob(f"out/**/*samples_{task}.jsonl")
    told = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    return [said if isinstance(said := one["filtered_resps"], list) else [said] for one in told]


def test_lmms_eval_finds_the_entry_point() -> None:
    found = importlib.metadata.entry_points(group="lmms_eval.models")
    assert "mmaccel.lmms:manifest" in {one.value for one in found}, "install this tree: pip install -e ."


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kept"), [("dense", 1), ("mosaic", 0)])
def test_each_layout_is_asked_and_told_with_what_it_took(
    worlds: Path, tmp_path: Path, recipe: str, kept: float
) -> None:
    for one in worlds.iterdir():
        (tmp_path / one.name).symlink_to(one)
    tasks = "world_choice,world_open,world_rounds" + (",world_frames" if recipe == "dense" else "")
    status, printed = judge(tmp_path, tasks, f"pretrained=tiny-ov,recipe={recipe},frames={FRAMES}")
    assert status == 0 and "Error" not in printed, printed[-3000:]
    from lmms_eval.tasks.ovobench.utils import build_prompt
    from lmms_eval.tasks.videomme.utils import videomme_doc_to_text

    (file,) = tmp_path.glob("out/**/2*_results.json")
    told, asked = json.loads(file.read_text()), docs(worlds, "open")
    right = own(worlds, recipe, [(f"{one['id']}.mp4", one["question"]) for one in asked])
    assert samples(tmp_path, "world_open") == [[one] for one in right]
    score = sum(a == one["answer"] for a, one in zip(right, asked, strict=True)) / len(asked)
    assert told["results"]["world_open"]["exact,none"] == pytest.approx(score) and score > 0.5
    post = {"post_prompt": "\nAnswer with the option's letter from the given choices directly."}
    chosen = [(f"{one['videoID']}.mp4", videomme_doc_to_text(one, post)) for one in docs(worlds, "choice")]
    assert samples(tmp_path, "world_choice") == [[one] for one in own(worlds, recipe, chosen)]
    pieces = [
        [(f"chunks/{one['id']}_{i}.mp4", build_prompt(one, i)) for i in range(2)]
        for one in docs(worlds, "rounds")
    ]
    assert samples(tmp_path, "world_rounds") == [own(worlds, recipe, one) for one in pieces]
    took = told["throughput"]
    assert 0 < took["avg_ttft_s"] < took["avg_latency"] < 60 and took["avg_peak_gib"] > 0.1
    assert took["total_gen_tokens"] > len(SEEDS) and took.get("avg_kept", 0) == kept
    assert "avg_ttft_s" in printed and "avg_peak_gib" in printed


@pytest.mark.slow
def test_density_stands_beside_the_score(worlds: Path, tmp_path: Path) -> None:
    """Under a sparse pattern it is below one."""
    (tmp_path / "open.jsonl").symlink_to(worlds / "open.jsonl")
    for seed in SEEDS:
        (tmp_path / f"w{seed}.mp4").symlink_to(worlds / f"w{seed}.mp4")
    (tmp_path / "sparse.yaml").write_text("sparse: {name: a_shape, sink: 16, window: 16, block: 16}\n")
    status, printed = judge(tmp_path, "world_open", f"pretrained=tiny-ov,recipe=sparse.yaml,frames={FRAMES}")
    assert status == 0 and "Error" not in printed, printed[-3000:]
    (file,) = tmp_path.glob("out/**/2*_results.json")
    assert 0 < json.loads(file.read_text())["throughput"]["avg_kept"] < 1


@pytest.mark.slow
def test_what_is_missing_is_told_with_where_it_belongs(worlds: Path, tmp_path: Path) -> None:
    for name in ("choice.jsonl", "open.jsonl"):
        (tmp_path / name).symlink_to(worlds / name)
    for task, path in (("world_choice", "videomme/data/w3.mp4"), ("world_open", "w3.mp4")):
        _, printed = judge(tmp_path, task, "pretrained=tiny-ov,recipe=dense")
        assert f"below HF_HOME ({tmp_path})" in printed and path in printed


@pytest.mark.slow
def test_the_harness_s_own_openai_model_asks_our_server(worlds: Path, tmp_path: Path, monkeypatch) -> None:
    """`examples/lmms_openai.py`: the server reads the films, and answers as the model does by itself."""
    from mmaccel.serve.settings import Settings
    from tests.examples.test_serving import example
    from tests.serve.conftest import running

    for name, value in harness(worlds).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(worlds)
    more = ("--include_path", str(TASKS), "--log_samples", "--output_path", str(tmp_path / "out"))
    with running(Settings(folder=worlds)) as served:
        how = (f"{served.url}/v1", "tiny-ov@dense", "world_open", FRAMES, "none")
        assert example("lmms_openai").evaluate(*how, *more) == 0
        assert served.engine.metrics.prompt._value.get() > 0
    right = own(worlds, "dense", [(f"{one['id']}.mp4", one["question"]) for one in docs(worlds, "open")])
    assert samples(tmp_path, "world_open") == [[one] for one in right]


def test_what_is_not_served_is_told(shipped: Callable[[str], str]) -> None:
    from mmaccel.core.errors import MmaccelError
    from mmaccel.lmms import Mmaccel

    shipped("tiny-ov")
    with pytest.raises(MmaccelError, match=r"model_args: 'max_pixels' is unknown; give pretrained"):
        Mmaccel("tiny-ov", max_pixels=1)
    model = Mmaccel("tiny-ov", device="cpu", batch_size=4)
    with pytest.raises(MmaccelError, match="take the task that generates"):
        model.loglikelihood([])
    words = {"type": "text", "text": "What colour was the star?"}
    for piece, options, told in (
        (words, {"num_beams": 4}, "t: num_beams"),
        ({"type": "audio", "url": "a.wav"}, {}, "t: it shows audio 'a.wav'"),
        ({"type": "video", "url": {"path": "a.mp4", "video_start": 1}}, {}, "t: it shows video"),
        (
            {"type": "image", "url": "/nowhere/a.png"},
            {},
            "t: the image /nowhere/a.png is missing; .* HF_HOME",
        ),
    ):
        with pytest.raises(MmaccelError, match=told):
            model._answer("t", [{"role": "user", "content": [piece, words]}], options)


def test_the_page_names_tasks_datasets_and_folders_as_the_harness_has_them() -> None:
    page = (ROOT / "docs" / "evaluating.md").read_text()
    rows = re.findall(r"^\| [\w-]+ \| `(\w+)` \| ([\w./-]+) \| `([\w/]+)` \|$", page, re.MULTILINE)
    tasks = Path(lmms_eval.__file__).parent / "tasks"
    found = {file: file.read_text(errors="ignore") for file in tasks.rglob("*yaml")}
    assert len(rows) == 11
    for task, dataset, folder in rows:
        named = [
            file for file, text in found.items() if re.search(rf'^(task|group): *"?{task}"?$', text, re.M)
        ]
        assert named, task
        beside = "".join(text for file, text in found.items() if file.parent == named[0].parent)
        assert f"dataset_path: {dataset}\n" in beside, task
        code = "".join(one.read_text() for one in named[0].parent.glob("utils.py"))
        assert f"cache_dir: {folder}\n" in beside or f'HF_HOME, "{folder}"' in code, task
