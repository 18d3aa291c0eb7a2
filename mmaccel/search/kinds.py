"""The four types of modality boundary (MMInference, section 2.3), each as places that take an intra-modality pattern.

A *slot* is such a place: the queries of one modality, or all (None), over the keys of one modality, or all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmaccel.core.layout import MODALITIES

KINDS = ("no_boundary", "k_boundary", "q_boundary", "boundary_2d")


@dataclass(frozen=True)
class Slot:
    """The queries of modality `query` over the keys of modality `key`; None stands for all."""

    name: str
    query: int | None
    key: int | None


def slots(kind: str, modalities: Sequence[int]) -> list[Slot]:
    """The slots of a type in a prompt of these modalities."""
    if kind == "no_boundary":
        return [Slot("all", None, None)]
    if kind == "q_boundary":
        return [Slot(MODALITIES[m], m, None) for m in modalities]
    if kind == "k_boundary":
        return [Slot(MODALITIES[m], None, m) for m in modalities]
    return [Slot(f"{MODALITIES[q]}>{MODALITIES[k]}", q, k) for q in modalities for k in modalities]


def composed(kind: str, chosen: Mapping[str, Mapping[str, Any]], block: int) -> dict[str, Any]:
    """The pattern of a type with a pattern in each slot, as a mapping.

    Modalities that the sample lacks take the pattern of one that it has: a picture's that of videos, if there are any.
    """
    if kind == "no_boundary":
        return dict(chosen["all"])
    names = list(MODALITIES.values())
    if kind in ("q_boundary", "k_boundary"):
        return {"name": kind, "block": block, **{m: dict(chosen[_nearest(m, list(chosen))]) for m in names}}
    there = list(dict.fromkeys(pair.split(">")[0] for pair in chosen))
    pairs = {
        f"{q}>{k}": dict(chosen[f"{_nearest(q, there)}>{_nearest(k, there)}"]) for q in names for k in names
    }
    return {"name": kind, "block": block, "pairs": pairs}


def _nearest(modality: str, there: Sequence[str]) -> str:
    """The modality itself, or the other kind of vision, or whatever there is."""
    if modality in there:
        return modality
    for other in {"image": ("video", "text"), "video": ("image", "text"), "text": ("video", "image")}[
        modality
    ]:
        if other in there:
            return other
    raise KeyError(modality)


def alone(kind: str, slot: Slot, pattern: Mapping[str, Any], block: int) -> dict[str, Any]:
    """The pattern of a type with `pattern` in one slot and nothing in the others, as a mapping."""
    if kind == "no_boundary":
        return dict(pattern)
    if kind == "boundary_2d":
        return {"name": kind, "block": block, "default": None, "pairs": {slot.name: dict(pattern)}}
    rest = dict.fromkeys(MODALITIES.values(), None)
    return {"name": kind, "block": block, **rest, slot.name: dict(pattern)}


def everywhere(
    kind: str, pattern: Mapping[str, Any], modalities: Sequence[int], block: int
) -> dict[str, Any]:
    """The pattern of a type with `pattern` in every slot, as a mapping."""
    return composed(kind, {slot.name: pattern for slot in slots(kind, modalities)}, block)
