"""A pytest plugin: transformers' own tests, with each model that they make accelerated. `make test-stock` uses it.

    python -m pytest -p stock_plugin --stock-recipe dense --stock-out dense.json CHECKOUT/tests/models/...

It attaches after `__init__` and after `from_pretrained`, and writes what each test came to as JSON. Recipe "plain" attaches
nothing: its failures are transformers' own.
"""

import copy
import functools
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers

import mmaccel
from mmaccel.models.attention import ATTENTION
from mmaccel.models.qwen2_5_vl import WINDOW_ATTENTION

RECIPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "full budget": {"sparse": {"name": "a_shape", "sink": 1 << 20, "window": 1 << 20}, "chunk": 64},
    "window": {"kv": {"name": "window", "sinks": 4, "window": 4096}},
    "prompt_lookup": {"draft": "prompt_lookup"},
    "sequential": {"draft": {"name": "sequential"}},
}
"""What is attached under each name; "sequential" gets a copy of the model for its draft."""

CLASSES = ("LlavaOnevisionForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")

LEFT_OUT = (
    "compil", "export", "get_image_features", "get_video_features", "get_audio_features", "get_text_features",
    "Integration", "recompile",
)  # fmt: skip
"""Parts of the names of tests that are not run: they are about other things than a model's calls, or too slow."""

OWN_CONFIG = "while the test looks at a config that mmaccel gave a module"
"""What is added to an error that a test raises itself, where a variable of it is such a config, or a module that has one."""

REASONS = {
    "no gradient": r"no gradient; detach the recipe to train",
    "static cache": r"cache_implementation: an accelerated",
    "4-D mask": r"attention_mask: an accelerated model takes a mask of shape",
    "private config copy": rf"attn_implementation: it was set while|{OWN_CONFIG}",
    "class of the exception": r"^\S*mismatching",
}
"""The five reasons for which an accelerated model may fail a test that the plain one passes, and what tells them: a part of
the test's name or of what it raised."""

_DRAFTED = {"assistant_model", "input_ids", "inputs_embeds", "num_beams"}
_DRAFTED |= {"output_attentions", "past_key_values"}

IMPOSSIBLE: dict[str, set[str]] = {
    "dense": set(),
    "full budget": {"output_attentions"},
    "window": {"attention_mask", "output_attentions", "position_ids"},
    "prompt_lookup": _DRAFTED,
    "sequential": _DRAFTED,
}
"""The arguments that each recipe makes impossible, as docs/stock.md lists them: it may refuse these in one sentence, and no
others."""


def reason(recipe: str, test: str, error: str) -> str:
    """Why a test fails under `recipe`: one of `REASONS`, "refused: ARGUMENT" for a sentence about one, or "other"."""
    known = next((name for name, found in REASONS.items() if re.search(found, f"{test} {error}")), None)
    refused = re.match(r"mmaccel\.core\.errors\.\w+: (\w+): .*\.$", error.splitlines()[0] if error else "")
    return known or (f"refused: {refused[1]}" if refused and refused[1] in IMPOSSIBLE[recipe] else "other")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stock-recipe", default="plain", choices=["plain", *RECIPES])
    parser.addoption("--stock-out", type=Path, required=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if any(part in item.nodeid for part in LEFT_OUT)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Log(config.getoption("--stock-out")))
    name = config.getoption("--stock-recipe")
    if name != "plain":
        for model in CLASSES:
            _attach_all(getattr(transformers, model), name)


def _attach_all(model: Any, name: str) -> None:
    """From here on whatever is made of the class `model` is accelerated."""
    init, load, busy = model.__init__, model.from_pretrained.__func__, []

    def attach(made: Any) -> None:
        recipe = copy.deepcopy(RECIPES[name])
        if name == "sequential":
            recipe["draft"]["model"] = copy.deepcopy(made).eval()
        mmaccel.accelerate(made, **recipe)

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not busy and all(p.device.type != "meta" for p in self.parameters()):
            attach(self)

    @functools.wraps(load)
    def loaded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        busy.append(None)
        try:
            found = load(cls, *args, **kwargs)
        finally:
            busy.pop()
        if not busy:
            attach(found[0] if isinstance(found, tuple) else found)
        return found

    model.__init__, model.from_pretrained = made, classmethod(loaded)


def _looks_at_own_config(traceback: Any, checkout: Path) -> bool:
    """Whether the error was raised in the tests of `checkout`, by code that has such a config at hand."""
    where = [entry for entry in traceback if "unittest" not in Path(entry.path).parts]
    if not where or not Path(where[-1].path).is_relative_to(checkout):
        return False
    found = False
    for value in where[-1].frame.f_locals.values():
        with suppress(Exception):
            config = value if isinstance(value, transformers.PreTrainedConfig) else value.config
            found |= config._attn_implementation in (ATTENTION, WINDOW_ATTENTION)
    return found


class _Log:
    """What each test came to."""

    def __init__(self, path: Path) -> None:
        self.path, self.results = path, {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if call.excinfo is not None and _looks_at_own_config(call.excinfo.traceback, item.config.rootpath):
            report.stock_own_config = True
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = "::".join(report.nodeid.split("::")[-2:])
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            told = str(crash.message if crash else report.longrepr)[:600]
            mark = f"; {OWN_CONFIG}" if getattr(report, "stock_own_config", False) else ""
            self.results[name] = ["failed", told + mark]
        elif report.skipped:
            self.results.setdefault(name, ["skipped", ""])
        elif report.when == "call":
            self.results.setdefault(name, ["passed", ""])

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.results, indent=1), encoding="utf-8")
