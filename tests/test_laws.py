"""Laws of the code: core knows no policy, hooks in one place; what an import loads and touches, and how threads wait."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from mmaccel.core.registry import DEFAULTS, KINDS, registry
from tests import python
from tests.house import FILES, PACKAGE

# Names of policies that are words too: in a sentence of core they are the word, but for where a sentence names a policy.
WORDS = ("attention", "dense", "frames", "full", "other", "tree", "window")
# The registry asks classes of every kind, some of which are no policies, for what policies declare.
REGISTERED = ("'__dataclass_fields__', {}", "'words', {}", "'FORMER', ()")
# Where core may name one: defaults where they are defined, a signal, a stage, what the report calls a head without a plan.
NAMED = {
    "registry.py": {*DEFAULTS.values(), *(f"getattr(cls, {one})" for one in REGISTERED)},
    "streams/session.py": {"mosaic"},
    "streams/live.py": {"mosaic"},
    "prefill/prune.py": {"attention", "frames"},
    "prefill/attention.py": {"dense"},
    "recipe.py": {"attention"},
    "report_page.py": {"frames"},
    "streams/saved_stream.py": {"frames"},
}
PARTS = (
    *("recipe", "sparse", "kv", "draft", "prune", "pruner", "policy"),
    *("index", "memory", "pattern", "strategy", "cls"),
)


def of_a_part(node: ast.AST) -> bool:
    """Whether an expression is by its name a part of a recipe, or a field of one: `recipe.draft.pruner`, `self.kv`."""
    name = getattr(node, "attr", getattr(node, "id", "")).lstrip("_")
    inner = getattr(node, "func", None) or getattr(node, "value", None)
    return name in PARTS or (not name and inner is not None and of_a_part(inner))


def knows(source: str, names: set[str]) -> list[str]:
    """Where a source knows policies: strings that name one of `names`, docstrings apart; and tests of a recipe's parts by
    their name, or by what they happen to have."""
    words = "|".join(WORDS)
    plain = rf"'({words})'|^({words})$|(?:such as|sparse|kv|draft|prune|index|name:) ({words})\b"
    rest = "|".join(map(re.escape, names - {*WORDS}))
    named = re.compile(rf"{plain}|(?<![\w-])({rest})(?![\w-])")
    tree, found = ast.parse(source), list[str]()
    told = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            found += [one[0] for one in named.finditer(node.value)]
        elif isinstance(node, ast.Compare):
            sides = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Attribute)]
            found += [ast.unparse(node) for side in sides if side.attr == "name" and of_a_part(side.value)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
            by_name = isinstance(node.args[1], ast.Constant)
            found += [ast.unparse(node)] if by_name and of_a_part(node.args[0]) else []
    return found


@pytest.mark.always
def test_core_knows_no_policy() -> None:
    """No text in core names a policy, a family or an index, and no code asks for one by its name or by its fields."""
    names = {name for kind in KINDS for name in registry(kind)}
    found = {}
    for path in (PACKAGE / "core").rglob("*.py"):
        inside = str(path.relative_to(PACKAGE / "core"))
        known = [
            one for one in knows(path.read_text(encoding="utf-8"), names) if one not in NAMED.get(inside, ())
        ]
        found |= {inside: known} if known else {}
    assert found == {}


def test_what_core_must_not_know_is_noticed() -> None:
    names = {"fastv", "mosaic", "no_cache", "full", "attention", "clusters"}
    for breach in (
        "x = f'prune {p}: choose one, such as fastv, or none'",
        "x = 'give it a cheaper kv, such as no_cache'",
        "x = 'choose another, such as attention.'",
        "x = f'only kv {one} or kv full serves'",
        "x = kv == 'full'",
        "x = recipe.kv.name == one",
        "x = one != self.kv.index.name",
        "x = hasattr(recipe.draft, 'model')",
        "x = getattr(self.kv, 'frames', 0)",
        "x = getattr(getattr(self.kv, 'index', None), 'size', 0)",
    ):
        assert knows(breach, names), breach
    reads = "x = [getattr(self._kv, name) for name in free]"
    for right in ("'full of attention'", reads, "x = device.name == 'cpu'"):
        assert knows(right, names) == [], right


# Files beside models/install.py that reach into an object's own attributes or register hooks of modules, and why.
REACHES = {
    "cli/ask.py": "progress of a prompt, by hooks that go with the call",
    "contract/family.py": "what a family's layers are given, in a check",
    "core/registry.py": "fields of base classes",
    "core/streams/fair_lock.py": "a cached property",
    "models/attention.py": "a stand-in for a module, while its attention is read",
    "models/generate.py": "the state of a call, as it was",
    "models/hf.py": "the model's own rope_deltas, as they were",
    "models/layer_step.py": "a copy of a block, of which one part is another",
    "models/signals.py": "what a thread has read",
    "models/stream.py": "a cached property",
}


def reaches(tree: ast.AST) -> bool:
    names = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return any(name == "__dict__" or name.startswith("register_forward") for name in names)


def keyed_by_tensors(tree: ast.Module) -> list[str]:
    """Names of the module that stand for a mapping by a tensor, or that are indexed by an address or an identity."""
    found, own = list[str](), set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            told = ast.unparse(node)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [ast.unparse(target) for target in targets]
            own |= {*names}
            mapped = re.search(r"(TensorKey|IdKey)Dictionary|[Dd]ict(ionary)?\[(\w+\.)?Tensor\b", told)
            found += names if mapped else []
    by = re.compile(r"data_ptr\(|(?<!\w)id\(")
    for node in ast.walk(tree):
        written = isinstance(node, ast.Subscript) and ast.unparse(node.value) in own
        if written and by.search(ast.unparse(node.slice)):
            found.append(ast.unparse(node))
    return found


def test_what_is_kept_of_a_tensor_goes_with_it() -> None:
    """No mapping of a module is by a tensor or its address: it would stay false after a write, and live on."""
    kept = {
        str(p.relative_to(PACKAGE)): keyed_by_tensors(ast.parse(p.read_text(encoding="utf-8"))) for p in FILES
    }
    assert {name: found for name, found in kept.items() if found} == {}
    for breach in (
        "_KNOWN: Any = WeakTensorKeyDictionary()",
        "_known: dict[Tensor, int] = {}",
        "_kept = {}\ndef f(x):\n    _kept[x.data_ptr()] = 1",
    ):
        assert keyed_by_tensors(ast.parse(breach)), breach


def test_hooks_are_installed_in_one_place() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in FILES}
    named = {name: text for name, text in texts.items() if "__dict__" in text or "register_forward" in text}
    found = {name for name, text in named.items() if reaches(ast.parse(text))}
    assert found == {*REACHES, "models/install.py"}


# Names in docstrings that code has not whole: of Python, transformers, Ray and a paper, and counters made of parts.
THEIRS = re.compile(
    r"break|SimpleNamespace|transformers\..*|\w+ForConditionalGeneration|is_flash_attention_requested|ray_mmaccel_\.*|n_local"
    r"|avg_\w+|host_\w+_in"
)


def stale(sources: Mapping[str, str]) -> list[str]:
    """The names between backticks in docstrings that no code of `sources` (name -> text) has: renamed or gone."""
    code, told = set[str](), list[tuple[str, str]]()
    for name, source in sources.items():
        tree = ast.parse(source)
        docs = {id(one.value): one.value for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        for node in ast.walk(tree):
            value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and id(node) in docs:
                told += [(name, one) for one in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)", value)]
            elif isinstance(value, str):
                code |= set(re.findall(r"\w+", value))
            named = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module"))
            code |= {part for name in named if isinstance(name, str) for part in name.split(".")}
    code |= {part for name in sources for part in re.findall(r"\w+", name)}
    left = [(name, one) for name, one in told if not {one.split(".")[-1]} & code]
    return [f"{name}: {one}" for name, one in left if not THEIRS.fullmatch(one)]


@pytest.mark.always
def test_docstrings_name_what_there_is() -> None:
    assert stale({str(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}) == []
    assert stale({"a.py": 'def new():\n    """As `old` and `new` do, and `other.new()`."""'}) == ["a.py: old"]


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


@pytest.mark.always
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
out, _ = attend_plan(plan, q, k, k, 0.25, select.get_op("reference", "cpu"))
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
