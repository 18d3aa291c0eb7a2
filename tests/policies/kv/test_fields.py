"""Fields of memories out of their range, and of earlier versions: read with a warning, or refused in one sentence.
A question's way through the layers reads nothing back from the device, and issues few operations."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.errors import MmaccelWarning, ModelError, RecipeError
from mmaccel.core.memory.kv import StreamPass
from mmaccel.core.prefill import attention
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy, register
from mmaccel.policies.kv import LiveVLM, ReKV
from mmaccel.policies.kv._archived import HostMemory
from mmaccel.policies.kv._window import Rope
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.mosaic import Clusters, Mosaic
from mmaccel.policies.kv.store import HostStore
from tests.policies.kv.mosaic.driven import CPU, GEOMETRY, HEAD, LAYERS, WHEEL, Driven
from tests.policies.sparse.test_plans import NoReads, no_lists

WRONG: dict[str, list[tuple[str, Any]]] = {
    "livevlm": [
        ("frames", 0), ("recent", -1), ("recall", 0.0), ("recall", 1.5), ("scatter", -0.1), ("bucket", 0), ("page", 0),
        ("probes", 0), ("positions", "x"),
    ],
    "streammem": [("frames", 0), ("similar", 2.0), ("positions", "x")],
    "window": [("sinks", -1), ("window", 0), ("margin", -1)],
}  # fmt: skip


@pytest.mark.parametrize(("name", "field", "value"), [(name, *one) for name in WRONG for one in WRONG[name]])
def test_a_field_out_of_range_is_told(name: str, field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"^{name}: {field} is .*; give .*\.$"):
        policy("kv", {"name": name, field: value})


@pytest.mark.parametrize("value", [2.5, True, "8", None])
def test_a_field_of_another_type_is_told_in_python_too(value: Any) -> None:
    with pytest.raises(RecipeError, match=r"^rekv: window is .*; give a whole number\.$"):
        ReKV(window=value)


def test_a_number_of_numpy_is_one() -> None:
    """Also where the recipe is written down."""
    for made in (ReKV(window=np.int64(8)), LiveVLM(recall=np.float64(0.5)), LiveVLM(recall=np.float32(0.5))):
        assert Recipe.load(yaml.safe_load(Recipe(kv=made).to_yaml())).kv == made


OLD: dict[str, Any] = {
    "similarity": "dot", "levels": "both", "granularity": "frame", "tile": 49, "init": 64, "lift": 2.0, "visual": 16,
    "semantic": 4, "smallest": 4, "largest": 32, "tau_small": 1.25, "tau_large": 2.0, "alpha": 8.0,
    "threshold": "relaxing", "new_scene": 2.0, "gain": 0.05, "unmix": 0.5, "deferred": True, "buffer": 64, "reps": 512,
    "reps_for": "all", "rep_of": "mean", "rep_bias": "none", "encode_frames": 8, "cache": 64, "prefetch": True,
    "predictor": "projected", "slack": 1.25, "clip": None, "batch_layers": True, "batch_attention": True,
    "batch_feed": True, "batch_match": True,
}  # fmt: skip
"""Fields of mosaic in recipes and sessions of version 4."""


def test_fields_of_earlier_versions_are_read() -> None:
    with pytest.warns(
        MmaccelWarning, match="init, visual, semantic, buffer moved to the index; write index: {"
    ):
        assert policy("kv", {"name": "mosaic", **OLD}) == Mosaic(**OLD) == Mosaic()
    changed = {**OLD, "visual": 8, "prefetch": False, "batch_layers": False}
    with pytest.warns(MmaccelWarning, match="name: clusters, .*visual: 8"):
        found = policy("kv", {"name": "mosaic", **changed})
    assert found == Mosaic(index=Clusters(visual=8), prefetch="off", encode_by="frame")
    for field, value, why in (
        ("levels", "none", "kv 'rekv' retrieves frame by frame"),
        ("tau_small", 2.0, "equation 5"),
        ("deferred", 1, "leave it out"),
        ("predictor", "luck", "leave it out and set prefetch"),
        ("predictor", None, "leave it out and set prefetch"),
        ("slack", "x", "leave it out"),
        ("batch_layers", "x", "leave it out and set encode_by"),
        ("batch_layers", None, "leave it out and set encode_by"),
    ):
        with pytest.raises(RecipeError, match=f"mosaic: .*{field}.*{why}"):
            Recipe.load(None, kv={"name": "mosaic", field: value})


@pytest.mark.parametrize(
    ("fields", "now", "told"),
    [
        ({"slack": 2}, {}, "slack is gone, and it changed no answer"),
        ({"clip": 8}, {}, "clip is gone"),
        ({"copies": "frame"}, {}, "copies is gone"),
        ({"batch_match": False}, {}, "batch_match is gone"),
        ({"predictor": "frames"}, {"prefetch": "query"}, "write prefetch: query"),
        ({"predictor": "frames", "prefetch": False}, {"prefetch": "off"}, "write prefetch: off"),
        ({"prefetch": True}, {"prefetch": "projected"}, "write prefetch: projected"),
        ({"batch_layers": False}, {"encode_by": "frame"}, "write encode_by: frame"),
    ],
)
def test_a_former_field_of_speed_alone_is_dropped_and_a_spelling_warns(
    fields: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    with pytest.warns(MmaccelWarning, match=told):
        assert Recipe.load(None, kv={"name": "mosaic", **fields}).kv == Mosaic(**now)


STORED: dict[str, Any] = {"host_bytes": 10**9, "process_bytes": None, "spill": "disk", "folder": "slabs"}


@pytest.mark.parametrize("name", ["mosaic", "rekv", "offload"])
def test_what_a_memory_said_of_the_host_moves_to_its_store(name: str, tmp_path: Path) -> None:
    """Also in a YAML file, from whose folder the store's counts."""
    told = f"{name}: .* moved to the store; write store: {{name: host, host_bytes: .*, process_bytes: null"
    with pytest.warns(MmaccelWarning, match=told):
        found: Any = policy("kv", {"name": name, **STORED})
    assert found == policy("kv", {"name": name, "store": STORED}) and found.store == HostMemory(**STORED)
    assert Recipe.load(Recipe(kv=found).to_dict()).kv == found
    (tmp_path / "old.yaml").write_text(f"kv: {{name: {name}, spill: disk, folder: slabs}}\n")
    with pytest.warns(MmaccelWarning, match="moved to the store"):
        old: Any = Recipe.load(tmp_path / "old.yaml").kv
    assert old.store == HostMemory(spill="disk", folder=str(tmp_path / "slabs"))


@pytest.mark.usefixtures("forgotten")
def test_a_store_of_one_s_own_is_the_one_that_a_memory_opens() -> None:
    opened: list[Any] = []

    @register("store", "told")
    @dataclass(frozen=True, kw_only=True)
    class Told(HostMemory):
        def open(self, *given: Any) -> HostStore:
            opened.append(super().open(*given))
            return opened[-1]

    assert Driven(store={"name": "told", "spill": "disk"}).state.store is opened[0]
    assert opened[0].spill == "disk"
    assert type(policy("kv", {"name": "offload", "store": "told"}).store) is Told


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_layers": False, "encode_by": "pass"},
        {"prefetch": "query", "predictor": "projected"},
        {"prefetch": "off", "predictor": "query"},
        {"init": 8, "index": {"name": "clusters", "init": 4}},
        {"spill": "disk", "store": {"spill": "refuse"}},
        {"spill": "disk", "store": None},
    ],
)
def test_a_former_spelling_that_disagrees_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="mosaic: "):
        Recipe.load(None, kv={"name": "mosaic", **fields})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kv": {"name": "mosaic", "initt": 3}}, "did you mean 'init', of its index"),
        ({"kv": {"name": "mosaic", "first_stag": 3}}, "did you mean 'first_stage', of its index"),
        ({"kv": {"name": "mosaic", "fames": 3}}, r"did you mean 'frames'\?"),
        ({"kv": {"name": "mosaic", "spil": 3}}, "did you mean 'spill', of its index or store"),
        (
            {"kv": {"name": "offload", "store": {"spill": "drop_oldest"}}},
            "offload: store: spill is .*; give 'refuse' or 'disk', for it keeps everything[.]",
        ),
        (
            {"kv": {"name": "rekv", "store": {"spill": "x"}}},
            "host: spill is 'x'; give .* or 'drop_oldest'[.]",
        ),
        ({"kv": {"name": "rekv", "store": {"spil": "x"}}}, "did you mean 'spill'"),
        ({"kv": {"name": "rekv", "store": None}}, "rekv: store is None; give a name, or a mapping"),
        ({"prune": "uv"}, r"as \{draft: \{name: parallel, prune: uv\}\}, or"),
    ],
)
def test_an_error_says_what_to_give(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        Recipe.load(None, **fields)


VIEWS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "_unsafe_view", "view",
}  # fmt: skip
"""What launches nothing."""


TOLIST = torch.Tensor.tolist


class Counted(NoReads):
    """Counts what would be launched, too; a rotation in place is one kernel, so are attention and what is replayed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()
        for name, of in (("apply_", Rope), ("__call__", CudaGraphCache), ("dense_attend", attention)):
            patch.setattr(of, name, self.as_one(getattr(of, name)))

    def as_one(self, whole: Any) -> Any:
        def one(*given: Any, **named: Any) -> Any:
            outside, self.launched = self.launched, self.replayed
            try:
                return whole(*given, **named)
            finally:
                self.launched = outside
                self.launched[whole.__qualname__] += 1

        return one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_units":
            # The plain one looks at its index; the kernel of a device does not.
            with torch.utils._python_dispatch._disable_current_modes(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", TOLIST)
                func(*args)
            self.launched[name] += 1
            return None
        self.launched[name] += name not in VIEWS
        return super().__torch_dispatch__(func, types, args, kwargs)


def rekv() -> Driven:
    driven = Driven()
    stream = driven.state.stream
    driven.state = ReKV(frames=8, window=5, local=2).open_stream(stream, GEOMETRY, WHEEL, CPU)  # type: ignore[arg-type, assignment]
    driven.run(StreamPass(kind="head", rows=HEAD), lambda layer: driven.noise((layer, -1), HEAD))
    return driven


MOSAIC: dict[str, dict[str, Any]] = {
    "mosaic": {},
    "query": {"prefetch": "query"},
    "no guess": {"prefetch": "off"},
    "no pseudo tokens": {"reps": 0},
    "compact": {"positions": "compact"},
    "looks": {"first_stage": "look"},
    "frames": {"index": "frames"},
    "cosine": {"similarity": "cosine"},
    "words": {"index": {"name": "clusters", "ask_by": "words"}},
}
MOST = {"looks": 25}


@pytest.mark.parametrize("name", ["rekv", *MOSAIC])
def test_a_question_reads_nothing_and_launches_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = rekv() if name == "rekv" else Driven(**MOSAIC[name])
    driven.watch(80)
    driven.state.end_ingest()
    # The addresses of places on the device are told it when they are new.
    for _ in range(2):
        driven.ask(1)
    driven.state.end_ingest()
    made = [(driven.question(2)(layer), driven.hidden(2)(layer)) for layer in range(LAYERS)]
    monkeypatch.setattr(torch.Tensor, "tolist", no_lists)
    with driven.state.question_scope():
        with Counted(monkeypatch) as counted:
            driven.run(driven.stream_pass(), lambda layer: made[layer][0], lambda layer: made[layer][1])
        monkeypatch.undo()
        evidence = driven.state.evidence()
    assert len(evidence) >= 10
    launched = sum(counted.launched.values()) / LAYERS
    assert 10 < launched <= MOST.get(name, 24), counted.launched.most_common()


def test_a_memory_that_keeps_units_says_how_it_saves_them(tmp_path: Path) -> None:
    """Its own `_save` may call the base's."""
    keeps = {"_gone": lambda self, *given: None}
    own = type(
        "Own", (StreamMemory,), {**keeps, "_save": lambda self, folder: StreamMemory._save(self, folder)}
    )
    assert own._save(object.__new__(own), tmp_path) is False  # type: ignore[attr-defined]
    bare = type("Bare", (StreamMemory,), keeps)
    with pytest.raises(ModelError, match="Bare has no _save for its units"):
        bare._save(object.__new__(bare), tmp_path)  # type: ignore[attr-defined]
