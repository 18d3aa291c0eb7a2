"""`CapturedVisionTower`: the vision tower on a few frames, as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import home_device
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.models.fingerprint import ModuleFingerprint

FRAMES = 4
"""Frames at most whose way through the vision tower is captured: of more, the device takes longer than the host."""


class CapturedVisionTower:
    """Runs the vision tower on up to `FRAMES` frames as one CUDA graph, because for so few the host takes longer to launch
    kernels than the device to run them. For families whose tower needs pixels only (`Family.needs_only_pixels`)."""

    def __init__(self, model: nn.Module, family: Any) -> None:
        self._model, self._family, self._replays = model, family, CudaGraphCache(home_device(model))
        self._watched: ModuleFingerprint | None = None
        self._devices = set[torch.device]()  # of the weights

    def features(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return what `Family.encode_frames` returns for `inputs`; None if the graph cannot be used: more frames, hooks,
        autocast, a tower on another device, or modules whose `forward` was replaced."""
        ((name, pixels), *more), family = inputs.items(), self._family
        if more or not family.needs_only_pixels or math.prod(pixels.shape[:-3]) > FRAMES:
            return None
        text, multimodal = family.text_model(self._model), family.multimodal(self._model)
        device = pixels.device
        roots = [one for one in multimodal.children() if one is not text]
        if self._watched is None or not self._watched.is_unchanged(roots):
            self._watched = ModuleFingerprint(roots)
            self._devices = {weight.device for one in roots for weight in one.parameters()}
        heard = any(self._watched.own_forwards()) or self._watched.has_hooks()
        if heard or self._devices - {device} or torch.is_autocast_enabled(device.type):
            return None
        # Not in `roots`: weights of the model itself, such as the newline's.
        own = tuple(weight.data_ptr() for weight in multimodal.parameters(recurse=False))
        config: Any = multimodal.config
        self._replays.drop_if_moved((self._watched, own, config.vision_config._attn_implementation))
        room = self._replays.get_buffer("pixels", tuple(pixels.shape), pixels.dtype).copy_(pixels)
        told = partial(family.encode_frames, self._model, {name: room})
        (rows,) = self._replays("tower", lambda: (told(),), at=(pixels.shape, pixels.dtype), lasting=False)
        return rows.clone()  # the next frame, of any stream, comes to lie there
