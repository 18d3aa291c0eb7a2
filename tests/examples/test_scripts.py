"""Scripts and notebooks of examples/ run as they are: a stock script, an adapter of models with code of their own."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

import mmaccel
from mmaccel import media
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import registry
from tests import python
from tests.examples import EXAMPLES, example
from tests.media.films import write_film


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    utils = pytest.importorskip("qwen_vl_utils.vision_process")
    pytest.importorskip("accelerate")

    def by_pyav(told: dict[str, Any]) -> Any:
        """A reader of theirs: torchcodec and decord are not here."""
        whole = media.read(told["video"])
        count = utils.smart_nframes(told, total_frames=len(whole), video_fps=whole.source_fps)
        numbers = torch.linspace(0, len(whole) - 1, count).round().long()
        metadata = {"fps": whole.source_fps, "frames_indices": numbers, "total_num_frames": len(whole)}
        return whole.frames[numbers], metadata, count / len(whole) * whole.source_fps

    monkeypatch.setattr(utils, "VIDEO_READER_BACKENDS", {"torchvision": by_pyav})
    monkeypatch.setattr(utils, "FORCE_QWENVL_VIDEO_READER", "torchvision")
    utils.get_video_reader_backend.cache_clear()
    return example("stock_qwen")


@pytest.mark.parametrize(
    "name", [pytest.param("tiny-qwen", marks=pytest.mark.slow), "tiny-qwen3", "tiny-hybrid"]
)
def test_the_line_changes_no_token_and_reaches_the_model(
    name: str,
    script: ModuleType,
    random_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    film = str(write_film(tmp_path / "film.mp4", 60))
    asked = (random_folder(name), film, "What colour was the star?")
    reports = []

    class Heard(mmaccel.Accelerated):
        def detach(self) -> None:
            reports.append(self.report())
            super().detach()

    monkeypatch.setattr(mmaccel, "accelerate", lambda *_: nullcontext())
    plain = script.answer(*asked, max_new_tokens=8)
    monkeypatch.setattr(
        mmaccel, "accelerate", lambda model, recipe: Heard(model, mmaccel.Recipe.load(recipe))
    )
    dense = script.answer(*asked, recipe="dense", max_new_tokens=8)
    assert torch.equal(dense[1], plain[1]) and dense[0] == plain[0]
    sparse = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
    script.answer(*asked, recipe=sparse, max_new_tokens=8)
    assert [report.kept < 1 for report in reports] == [False, True]
    assert reports[0].video_units == 12


def test_the_script_is_a_stock_one_but_for_the_line() -> None:
    """What is ours in it: an import, and one line."""
    text = (EXAMPLES / "stock_qwen.py").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "mmaccel" in line]
    assert lines == ["import mmaccel", "    with mmaccel.accelerate(model, recipe):  # the line"]


def test_the_script_runs_as_installed() -> None:
    """Its imports stand in an order that a torchvision of another build survives; a missing reader is a sentence."""
    pytest.importorskip("qwen_vl_utils")
    if hasattr(pytest.importorskip("torchvision").io, "read_video"):
        pytest.skip("torchvision reads video itself")
    lines = ["import runpy, sys", "sys.modules['decord'] = sys.modules['torchcodec'] = None", "try:"]
    lines += [f"    runpy.run_path({str(EXAMPLES / 'stock_qwen.py')!r}, run_name='__main__')"]
    lines += ["except SystemExit as told:", "    print(told)"]
    told = python("-c", "\n".join(lines)).stdout
    assert told == "qwen_vl_utils finds nothing to read video with; pip install torchcodec, or decord.\n"


SPARSE = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
TOLD: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


class StandInConfig(Qwen2Config):
    model_type = "llava_qwen"


class StandInModel(Qwen2Model):
    """The language model holds tower and projector, as in LLaVA-NeXT's code."""

    config_class = StandInConfig

    def __init__(self, config: StandInConfig) -> None:
        super().__init__(config)
        self.vision_tower = nn.Conv2d(3, 16, 7, 7)
        self.mm_projector = nn.Linear(16, config.hidden_size)
        self.image_newline = nn.Parameter(torch.randn(config.hidden_size))


class StandIn(Qwen2ForCausalLM):
    config_class = StandInConfig

    def __init__(self, config: StandInConfig) -> None:
        super().__init__(config)
        self.model = StandInModel(config)
        self.post_init()

    def get_model(self) -> nn.Module:
        return self.model

    def prepare_inputs_labels_for_multimodal(
        self, input_ids: Tensor, position_ids: Any, attention_mask: Any, past: Any, labels: Any, images: Any,
        modalities: Any = ("image",),
    ) -> tuple[Any, ...]:  # fmt: skip
        assert list(modalities) == ["video"]
        tokens = self.model.vision_tower(images[0]).flatten(2).mT
        features = self.model.mm_projector(tokens).flatten(0, 1)
        features = torch.cat([features, self.model.image_newline[None]])
        at = int((input_ids[0] == -200).nonzero())
        words = self.get_input_embeddings()
        before, after = words(input_ids[0, :at]), words(input_ids[0, at + 1 :])
        return None, position_ids, attention_mask, past, torch.cat([before, features, after])[None], labels

    @torch.no_grad()
    def generate(self, inputs: Any = None, images: Any = None, **kwargs: Any) -> Any:
        made = self.prepare_inputs_labels_for_multimodal(inputs, None, None, None, None, images, ["video"])
        return super().generate(inputs_embeds=made[4], **kwargs)


@pytest.fixture(scope="module")
def adapter() -> Iterator[ModuleType]:
    module = example("remote_video")
    yield module
    registry("model")._classes.pop(module.KIND)


@pytest.fixture(scope="module")
def remote() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 200}
    made: Any = StandIn(StandInConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).float().eval()
    made.generation_config.eos_token_id = None
    return made


def asked(frames: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 180, (1, 14), generator=generator)
    ids[0, 5] = -200
    return ids, torch.randn(frames, 3, 14, 14, generator=generator)


def test_streams_are_refused(adapter: ModuleType, remote: Any) -> None:
    model = adapter.wrap(remote)
    with pytest.raises(RecipeError, match=r"kv 'rekv': .* by code of their own"):
        mmaccel.accelerate(model, kv="rekv")


def test_it_says_what_their_code_says(adapter: ModuleType, remote: Any) -> None:
    ids, video = asked()
    want = remote.generate(ids, images=[video], **TOLD)
    model, inputs = adapter.wrap(remote), adapter.prompt(remote, ids, video)
    start = inputs["input_ids"].shape[1]
    assert start == 13 + 4 * 40 + 1
    window = {"kv": {"name": "window", "window": 999}}
    for recipe in (None, {}, {"chunk": 64}, {"draft": "prompt_lookup"}, window):
        if recipe is None:
            assert torch.equal(model.generate(**inputs, **TOLD)[:, start:], want)
            continue
        with mmaccel.accelerate(model, **recipe):
            assert torch.equal(model.generate(**inputs, **TOLD)[:, start:], want)
    with mmaccel.accelerate(model, **SPARSE) as fast:
        model.generate(**inputs, **TOLD)
        report = fast.report()
    assert 0 < report.kept < 0.6 and report.video_units == 40 and report.video_tokens == 4 * 40 + 1
    assert torch.equal(remote.generate(ids, images=[video], **TOLD), want)


def test_columns_of_frames(adapter: ModuleType, remote: Any) -> None:
    """Of each frame its own tokens, then the mark; of a tower that joins frames, of each step."""
    ids, video = asked()
    model = adapter.wrap(remote)
    for units, each in ((None, 4), (20, 8)):
        layout = mmaccel.core.attach.adapter_for(model).layout(
            model, adapter.prompt(remote, ids, video, units=units)
        )
        frame = layout.frame[0, 5:-8]
        assert frame[:-1].tolist() == [n for n in range(160 // each) for _ in range(each)]
        assert frame[-1] == -1 and bool((layout.modality[0, 5:-8] != 0).all())


def run(name: str) -> tuple[dict[str, Any], str]:
    """The names that the cells leave behind, and what they print."""
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as said:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}:{cell['id']}", "exec"), names)
    return names, said.getvalue()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.savefig(tmp_path / "drawn.png"))


def test_a_stream(elsewhere: None, tmp_path: Path) -> None:
    names, said = run("stream.ipynb")
    assert names["answer"].text == names["question"].answer
    assert len(names["moments"]) == 3 and (tmp_path / "drawn.png").stat().st_size > 1000
    assert said.splitlines()[-1] == f"256 frames: {names['question'].answer}"


def test_a_long_video(elsewhere: None, tmp_path: Path) -> None:
    names, said = run("long_video.ipynb")
    dense, sparse = names["answers"].values()
    assert dense[0] == sparse[0] == names["question"].answer
    assert dense[2].kept in (None, 1.0) and 0 < sparse[2].kept < 1
    assert (tmp_path / "drawn.png").stat().st_size > 1000 and "tokens" in said
