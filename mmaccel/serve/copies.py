"""A pool of copies of one model for concurrent calls. Copies share the model's weights; each has a recipe attached."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import Accelerated, accelerate, adapter_for
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.recipe import Recipe
from mmaccel.models.together import copy_sharing_weights

CHECK_S = 0.1
"""Seconds between two looks of a thread that waits at whether its request goes on."""


class ModelCopyPool:
    """Copies of `model` that share its weights, each with a recipe attached: at most `most` copies a recipe, or one if its
    draft runs in a process of its own. Copies under one recipe also share the weights of its draft model."""

    def __init__(self, model: nn.Module, most: int) -> None:
        # Of one that is never called: a pass of a stream lends the model's modules other functions while it runs.
        self._still, self._most = copy_sharing_weights(model), most
        self._view = ModelView(self._still, adapter_for(model), adapter_for)
        self._idle: dict[str, queue.LifoQueue[Accelerated]] = defaultdict(queue.LifoQueue)
        self._made: dict[str, int] = defaultdict(int)
        self._making, self._loading = threading.Lock(), threading.Lock()

    @contextmanager
    def borrow(self, name: str, recipe: Recipe, deadline: Deadline) -> Iterator[Accelerated]:
        """Borrow a model copy under the recipe `name` for one call. Raises `CallEnded` if none is free by the deadline."""
        idle, draft = self._idle[name], recipe.draft
        most = 1 if getattr(draft, "process", False) else self._most
        fast = None
        while fast is None:
            deadline.check()
            with self._making:
                make = idle.empty() and self._made[name] < most
                self._made[name] += make
            try:
                fast = self._copied(recipe, deadline) if make else idle.get(timeout=CHECK_S)
            except queue.Empty:
                continue  # the one that was being made may have failed
            except BaseException:
                with self._making:
                    self._made[name] -= make
                raise
        try:
            yield fast
        finally:
            idle.put(fast)

    def _copied(self, recipe: Recipe, deadline: Deadline) -> Accelerated:
        draft: Any = recipe.draft
        if getattr(draft, "model", None) is not None and not getattr(draft, "process", False):
            while not self._loading.acquire(timeout=CHECK_S):
                deadline.check()
            try:  # the view loads a draft once
                peer = draft.peer(self._view).model
            finally:
                self._loading.release()
            recipe = replace(recipe, draft=replace(draft, model=copy_sharing_weights(peer)))
        return accelerate(copy_sharing_weights(self._still), recipe)

    def close(self) -> None:
        """Detach the recipes from all idle copies of the model."""
        for idle in self._idle.values():
            while not idle.empty():
                idle.get().detach()
