"""What the multimodal model's part of a forward pass tells the text model's part."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.core.adapter import Branches
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.masked import BidirectionalImages
from mmaccel.core.prefill.prune import Probe


@dataclass(frozen=True)
class Note:
    """Facts of a pass that the multimodal model hands to the text model: the layout of the new columns, whether they are
    draft tokens to verify and their tree, probes, a `mask`, and the `images` with bidirectional attention."""

    layout: TokenLayout | None = None
    mask: Tensor | None = None
    images: BidirectionalImages | None = None
    verify: bool = False
    branches: Branches | None = None
    probes: tuple[Probe, ...] = ()


NOTE = "mmaccel_note"
"""The keyword under which a `Note` travels to the text model."""
