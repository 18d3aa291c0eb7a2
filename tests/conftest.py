"""Profiles of property tests ("ci", the default, is small and always the same; "thorough" looks further), and models."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import mmaccel  # noqa: F401  # before transformers: see `mmaccel.models._declare_operators`
from mmaccel.core.registry import KINDS, registry

pytest_plugins = ["tests.selection"]

# Read when transformers is first imported: what a command prints is compared with nothing else.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

settings.register_profile(
    "ci",
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def by_float32(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`product` of half precision by that of float32, rounded, which is what a processor with products of its own gives."""

    def rounded(
        x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *args: Any, **how: Any
    ) -> torch.Tensor:
        if x.dtype.itemsize != 2 or x.dtype != weight.dtype or x.numel() < 2048:
            return product(x, weight, bias, *args, **how)
        wide = None if bias is None else bias.float()
        return product(x.float(), weight.float(), wide, *args, **how).to(x.dtype)

    return rounded


if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # PyTorch's own take eight times as long
    for name in ("linear", "conv2d", "conv3d"):
        setattr(torch.nn.functional, name, by_float32(getattr(torch.nn.functional, name)))


def pytest_collection_finish() -> None:
    """What there is by now stays: a full collection, for which tests and commands call, need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for kind in KINDS:
        monkeypatch.setattr(registry(kind), "_classes", dict(registry(kind)._classes))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What a device that is not here says of itself; of ROCm where it has a `gcnArchName`."""
    from mmaccel.backends.ops import operator

    told = SimpleNamespace(multi_processor_count=60, total_memory=9 << 30)
    cached = operator.architecture_of, operator.find_device_limits, operator.why_triton_unusable
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    for function in cached:
        function.cache_clear()
    yield told
    for function in cached:
        function.cache_clear()


@pytest.fixture
def forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that would be spawned are forks of one, which imports once what takes each of them four seconds."""
    context = multiprocessing.get_context("forkserver")
    needed = ["mmaccel_lab.train.feeder", "tests.eval.test_cases", "transformers.models.auto.modeling_auto"]
    context.set_forkserver_preload(needed)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model -> a folder with its architecture, tokenizer and processor, and random weights."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        from mmaccel_lab.tiny.configs import SPECS, build_model
        from mmaccel_lab.tiny.package import export
        from mmaccel_lab.train.dialect import words

        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            torch.manual_seed(0)
            export(
                build_model(SPECS[name]), SPECS[name], words(), made[name], "A model that knows nothing.\n"
            )
        return made[name]

    return folder


@pytest.fixture(scope="session")
def shipped() -> Callable[[str], str]:
    """Name of a shipped model -> the same name.

    Where no model is installed a test that needs one is skipped, and says so; where one lacks its weights it fails.
    """

    def name_of(name: str) -> str:
        from mmaccel.core.errors import ModelError
        from mmaccel.models.shipped import tiny_model_folder
        from mmaccel_lab.tiny import ROOT

        try:
            tiny_model_folder(name)
        except ModelError as error:
            if any(ROOT.glob("*/config.json")):
                pytest.fail(str(error))
            pytest.skip(str(error))
        return name

    return name_of
