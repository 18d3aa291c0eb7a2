"""The clusters of a stream in files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mmaccel.core import checkpoint_io
from mmaccel.core.errors import ModelError
from mmaccel.policies.kv.mosaic.clusters import ROWS
from mmaccel.policies.kv.mosaic.maintain import Hierarchy

MOST = 1 << 53
"""Counters are below this."""
FACTS = {"units": int, "started": bool, "buffer": list, "counters": dict, "absent": list}


def save(tree: Hierarchy, absent: Tensor, folder: Path) -> None:
    """Write the hierarchy, the units' means and which units are `absent` (a mask) into `folder`."""
    checkpoint_io.write_tensors(folder / "clusters.safetensors", {**tree.means.tensors(), **tree.tensors()})
    facts = {
        "units": tree.units,
        "started": tree.started,
        "buffer": tree.buffer,
        "counters": dict(tree.counters),
        "absent": absent.nonzero()[:, 0].tolist(),
    }
    checkpoint_io.write_json(folder / "clusters.json", facts)


def load(tree: Hierarchy, units: int, folder: Path) -> Tensor:
    """Read what `save` wrote for a stream of `units` units; the mask of units that are no more."""
    facts = checkpoint_io.read_json(folder / "clusters.json", FACTS)
    if facts["units"] != units or len(facts["buffer"]) != tree.layers:
        raise ModelError(
            f"{folder}: clusters of {facts['units']} units are beside {units} units; it is damaged."
        )
    means, layers = tree.means, tree.layers
    work, kept = means.work, means.key.dtype
    width, look = means.key.shape[2], tree.visual.centroid.shape[2] - 1
    wanted = {
        "look": ((units, look), work),
        "key": ((units, layers, width), kept),
        "value": ((units, layers, width), kept),
    }
    if facts["started"]:
        wanted |= {"centre_look": ((look + 1,), work), "centre_key": ((layers, width + 1), work)}
        for name, level, size in (("visual", tree.visual, look), ("semantic", tree.semantic, width)):
            shape: dict[str, tuple[int, ...]] = {
                "centroid": (level.layers, -1, size + 1),
                "members": (level.layers, -1, -1),
            }
            for row in ROWS:
                wanted[f"{name}.{row}"] = shape.get(row, (level.layers, -1)), getattr(level, row).dtype
            wanted[f"{name}.owner"] = (level.layers, units), torch.long
            wanted[f"{name}.threshold"] = (2, level.layers), work
    found = checkpoint_io.read_tensors(folder / "clusters.safetensors", wanted, torch.device("cpu"))
    count = found["semantic.size"].shape[1] if facts["started"] else 0
    buffer = [checkpoint_io.numbers(ids, "clusters.json: buffer", count) for ids in facts["buffer"]]
    checkpoint_io.numbers(list(facts["counters"].values()), "clusters.json: counters", MOST)
    gone = checkpoint_io.numbers(facts["absent"], "clusters.json: absent", units)
    _check(found, folder, units)
    means.load({name: found.pop(name) for name in list(found) if "." not in name})
    tree.load(found, units, buffer, facts["counters"])
    absent = torch.zeros(units, dtype=torch.bool)
    absent[gone] = True
    return absent


def _check(found: dict[str, Tensor], folder: Path, units: int) -> None:
    """Raise `ModelError` where numbers point to what is not there."""
    for name in ("visual", "semantic"):
        if f"{name}.owner" not in found:
            continue
        clusters = {found[f"{name}.{row}"].shape[1] for row in ROWS}
        count = found[f"{name}.size"].shape[1]
        above = found["visual.size"].shape[1]
        bounds = {"owner": count, "members": units, "home": count, "parent": above}
        wrong = [row for row, end in bounds.items() if _outside(found[f"{name}.{row}"], end)]
        if len(clusters) > 1 or wrong or not _fits(found, name):
            raise ModelError(f"{folder}: {name} clusters do not fit together; the file is damaged.")


def _fits(found: dict[str, Tensor], name: str) -> bool:
    """Whether each cluster of a level has as many members as its size says, they are its own, and it has a parent."""
    size, members, owner = (found[f"{name}.{row}"] for row in ("size", "members", "owner"))
    held = torch.arange(members.shape[2]) < size[..., None]
    owners = owner.gather(1, members.clamp_min(0).flatten(1)).view(members.shape)
    own = torch.arange(size.shape[1])[:, None].expand(members.shape)
    fits = (
        torch.equal(held, members >= 0)
        and torch.equal(held.sum(2), size)
        and torch.equal(owners[held], own[held])
    )
    if name == "semantic":
        above = found["visual.size"].expand(size.shape[0], -1)
        parent = found["semantic.parent"]
        fits = fits and bool(((parent >= 0) & (above.gather(1, parent.clamp_min(0)) > 0))[size > 0].all())
    return fits


def _outside(numbers: Tensor, end: int) -> bool:
    return bool(numbers.numel()) and (int(numbers.min()) < -1 or int(numbers.max()) >= end)
