"""A draft's GPU beside that of its replica, on two GPUs that Ray only believes in."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mmaccel.core.errors import RecipeError
from mmaccel.core.recipe import Recipe
from mmaccel.models.shipped import tiny_model_folder
from tests.serve import test_replicas as on_ray
from tests.serve.test_replicas import ray, replicas


def make(saves: str) -> Any:
    """Its draft works on the CPU, whichever GPU it is shown; the replica writes down its own."""
    Path(saves, "gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    engine, draft = on_ray.make(saves), {"name": "parallel", "model": f"{saves}/draft", "device": "cpu"}
    engine.recipes["mosaic"] = Recipe.load(engine.recipes["mosaic"], draft={**draft, "window": 3})
    return engine


def shown(saves: Path) -> list[str]:
    """The GPUs that the replica and its draft's process see."""
    found = [(saves / "gpu").read_text()]
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{saves}/draft" in (one / "cmdline").read_text():
                found += re.findall(r"\0CUDA_VISIBLE_DEVICES=([^\0]*)", (one / "environ").read_text())
    return sorted(found)


@pytest.mark.slow
def test_a_draft_s_gpu_goes_with_its_replica(tmp_path: Path, shipped: Any, monkeypatch: Any) -> None:
    """Both GPUs are taken: a replica in the place of one that was killed needs what that one had."""
    (tmp_path / "draft").symlink_to(tiny_model_folder(shipped("tiny-ov-draft")))
    with on_ray.deployed(1, tmp_path, make, (1, 1)) as url:
        ((name, before),) = on_ray.watched(url, 1).items()
        assert shown(tmp_path) == ["0", "1"] and not ray.available_resources().get("GPU")
        gone = f"SERVE_REPLICA::{replicas.NAME}#{replicas.NAME}#{name.rpartition('.')[2]}"
        ray.kill(ray.get_actor(gone, namespace="serve"))
        assert on_ray.said(url, name) == before and shown(tmp_path) == ["0", "1"]
        ray.serve.delete(replicas.NAME)
        monkeypatch.setattr(replicas, "PLACED_S", 5.0)
        with pytest.raises(RecipeError, match="within 5 s the cluster had room for 1 of 2 replicas"):
            replicas.serve_on_ray(make, on_ray.Settings(saves=tmp_path), "2", 1, 1)
