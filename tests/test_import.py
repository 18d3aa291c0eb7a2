"""Importing the package in a fresh process: what it loads, what it does without, what it touches; how threads wait."""

import re
import subprocess
import sys

import pytest

from tests import python

BLOCK = """
import importlib.abc, sys
class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Wall())
"""


def run(code: str, blocked: tuple[str, ...] = ()) -> str:
    """What `code` prints in a fresh interpreter."""
    return python("-c", BLOCK.format(blocked=set(blocked)) + code).stdout


def test_import_loads_no_heavy_package_and_starts_no_device_and_help_no_model_code() -> None:
    """A room is open when it is asked for."""
    code = """
import sys, mmaccel, torch
heavy = "transformers triton tokenizers av rich typer PIL matplotlib huggingface_hub".split()
print([m for m in heavy if m in sys.modules], torch.cuda.is_initialized(), torch.get_default_dtype())
from mmaccel.cli import main
try:
    main(["ask", "--help"])
except SystemExit as done:
    assert done.code == 0
print([m for m in ("transformers", "av", "triton") if m in sys.modules])
mmaccel.media.read
print("av" in sys.modules)
"""
    out = re.sub(r"\x1b\[[0-9;]*m", "", run(code))  # some environments make typer colour its help
    first, *help, models, room = out.splitlines()
    assert [first, models, room] == ["[] False torch.float32", "[]", "True"]
    assert any("--compare" in line for line in help)


def test_neither_import_nor_the_oracle_needs_an_optional_package() -> None:
    code = """
import torch, mmaccel
import mmaccel.core.attach
from mmaccel.backends import select
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.sparse import attend_plan
layout = TokenLayout.text(1, 200)
q, k = torch.randn(1, 2, 200, 16), torch.randn(1, 1, 200, 16)
pattern = mmaccel.Recipe.load({"sparse": {"name": "a_shape", "sink": 16, "window": 32}}).sparse
plan = pattern.plan(q, k, layout, layout)
out, _ = attend_plan(plan, q, k, k, 0.25, select.get("reference", "cpu"))
print(tuple(out.shape))
"""
    blocked = ("transformers", "triton", "flash_attn", "av", "PIL", "matplotlib", "torchvision")
    assert run(code, blocked).strip() == "(1, 2, 200, 16)"


def test_import_patches_nothing() -> None:
    """Neither torch nor transformers differs after the import: same functions, same attention table."""
    code = """
import importlib.util, json, torch
if torch.version.cuda is None and importlib.util.find_spec("torchvision"):  # see `mmaccel.models._declare_operators`
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table
def state():
    names = ("softmax", "matmul", "nn.Linear.forward", "nn.functional.scaled_dot_product_attention", "nn.Module.__call__")
    found = []
    for name in names:
        value = torch
        for part in name.split("."):
            value = getattr(value, part)
        found.append(id(value))
    found += sorted((k, id(v)) for k, v in table.items())
    found += [id(transformers.PreTrainedModel.from_pretrained.__func__), id(transformers.GenerationMixin.generate)]
    return found
before = state()
import mmaccel
print(json.dumps(before == state()))
"""
    assert run(code).strip() == "true"


WITHOUT_THE_LAB = """
from mmaccel_command import main as command
sys.argv = ["mmaccel", "--version"]
try:
    command()
except SystemExit as done:
    assert not done.code
import mmaccel
from mmaccel.cli import main
print(mmaccel.list_models()[0])
for load in (mmaccel.load_model, mmaccel.load_processor):
    try:
        load("tiny-ov")
    except mmaccel.MmaccelError as error:
        print(error)
for words in (["ask", "none.mp4", "hi", "--model", "tiny-ov"], ["describe", "tiny-ov"], ["demo"], ["list"]):
    try:
        main(words)
    except SystemExit as done:
        print("status", done.code)
try:
    mmaccel.load_model("llava/tiny-ov/no")
except mmaccel.MmaccelError as error:
    print(error)
"""


def told_of_threads(code: str, **given: str) -> subprocess.CompletedProcess[str]:
    """What a process says, whose OpenMP tells on standard error how threads wait."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            patch.delenv(name, raising=False)
        return python("-c", code, OMP_DISPLAY_ENV="verbose", **given)


@pytest.fixture(scope="module")
def bare() -> subprocess.CompletedProcess[str]:
    """Commands where the lab is not."""
    return told_of_threads(BLOCK.format(blocked={"mmaccel_lab"}) + WITHOUT_THE_LAB)


def test_without_the_lab_a_tiny_model_says_what_to_install(bare: subprocess.CompletedProcess[str]) -> None:
    told = (
        "model 'tiny-ov' comes with mmaccel-lab, which is not installed; run `pip install mmaccel-lab`, or `make install` "
        "in a checkout."
    )
    lines = bare.stdout.splitlines()[1:]
    assert lines[:3] == ["tiny-ov", told, told]
    assert [line for line in lines if line.startswith("status")] == ["status 2"] * 3 + ["status 0"]
    ask, describe, demo = (line for line in bare.stderr.splitlines() if line.startswith("error"))
    assert ask == describe == f"error: {told}"
    assert demo.startswith(
        "error: `mmaccel demo` is now `mmaccel-lab demo`; where that is missing, run `pip install"
    )
    assert lines[-1].startswith("there is no folder llava/tiny-ov/no")


COMMAND = "import sys; sys.argv = ['mmaccel', '--version']; from mmaccel_command import main; main()"


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP of other platforms tells in other words")
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    bare: subprocess.CompletedProcess[str],
) -> None:
    """As the OpenMP that torch has loaded tells it: what is set after that has no effect."""
    for done, spins in ((bare, False), (told_of_threads(COMMAND, OMP_WAIT_POLICY="active"), True)):
        count = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
        assert count is not None and (count[1] != "0") is spins
