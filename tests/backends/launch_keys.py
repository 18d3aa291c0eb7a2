"""What Triton would compile for prompts of many lengths, found without a device.

    python -m tests.backends.launch_keys sm_90 2000,4001,65537 50

A kernel is compiled again for each *key*: the types of its arguments, whether an integer is one, a multiple of 16 or wide,
whether an address is a multiple of 16, its constants, and its warps and stages. Here the plans and the launches of a layer
and of a decode step are made as on a device of this architecture, each launch tells its key, and nothing is compiled: first
for the given lengths, then for so many others between them. Prints a row for each kernel: name, keys in all, on how many of
the other lengths there was a new one, and in what the keys differ.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from mmaccel.backends import triton as backend
from mmaccel.backends.ops import block_lists, layer_ops, lines
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.triton.prefill import estimate, lists
from mmaccel.backends.triton.prefill import lines as line_kernels
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.kv import grow_buffer
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.core.recipe import Recipe
from mmaccel.policies.sparse.estimate import LastQueryAttention

from .compiled import as_on

HEADS, GROUPS, SIZE, HIDDEN = 8, 2, 128, 1024

FRAMES = (196, 144, 256, 169, 225)
"""Tokens of a frame, by the length of a prompt."""


@dataclass
class Keys:
    """The keys of each kernel that was launched, and the prompts on which there was a new one."""

    of: dict[str, dict[Any, Any]] = field(default_factory=dict)
    new: dict[str, list[int]] = field(default_factory=dict)
    prompt: int = 0

    def take(self, *, fn: Any, compile: Any, **told: Any) -> bool:
        """Triton's hook before it compiles; True tells it that nothing is to be compiled."""
        function = fn.jit_function
        name = f"{function.__module__.rsplit('.', 1)[1]}.{function.__name__}"
        known = self.of.setdefault(name, {})
        key = str(compile["key"])
        if key not in known:
            known[key] = _told(function, compile)
            self.new.setdefault(name, [])
            if self.prompt not in self.new[name]:
                self.new[name].append(self.prompt)
        return True

    def differing(self, name: str) -> dict[str, set[Any]]:
        """The arguments in which the keys of a kernel differ, and what they are."""
        told = list(self.of[name].values())
        found = {of: {one.get(of) for one in told} for of in {of for one in told for of in one}}
        return {of: some for of, some in sorted(found.items()) if len(some) > 1}


def _told(function: Any, compile: Any) -> dict[str, Any]:
    """By argument its type, its constant value and whether it is a multiple of 16."""
    names = function.arg_names
    found: dict[str, Any] = {}
    for name, kind in compile["signature"].items():
        found[name] = (str(kind),)
    for path, value in compile["constants"].items():
        name = names[path[0]] + "".join(f"[{i}]" for i in path[1:])
        found[name] = (*found.get(name, ()), str(value))
    for path, attributes in compile["configs"][0].items():
        name = names[path[0]] + "".join(f"[{i}]" for i in path[1:])
        found[name] = (*found.get(name, ()), *(f"{what} {value}" for what, value in attributes))
    return found | {name: compile[name] for name in ("num_warps", "num_stages")}


def _filled(launch: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A launch that is not made, its results being those of the plain form."""

    def both(*args: Any) -> Any:
        out, right = launch(*args), plain(*args)
        pairs = [(out, right)] if isinstance(out, Tensor) else zip(out, right, strict=True)
        for mine, its in pairs:
            mine.copy_(its)
        return out

    return both


def _drawn(launch: Callable[..., Any], draw: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """A launch that is not made, its results being any that there may be."""

    def both(*args: Any) -> Any:
        out = launch(*args)
        for one in [out] if isinstance(out, Tensor) else out:
            draw(one)
        return out

    return both


@contextmanager
def recorded(architecture: str = "sm_90") -> Iterator[Keys]:
    """Within, tensors of the CPU are launched on as on a device of this architecture; all that comes of it are the keys."""
    keys = Keys()
    with ExitStack() as stack:
        held = {
            LastQueryAttention: dict(has_kernel=True),
            lists: dict(
                assemble_slices=_filled(lists.assemble_slices, block_lists.assemble_slices.plain),
                list_band=_filled(lists.list_band, block_lists.list_band.plain),
                listed_pairs=_filled(lists.listed_pairs, block_lists.listed_pairs.plain),
            ),
            line_kernels: dict(
                choose_lines=_filled(line_kernels.choose_lines, lines.choose_lines.plain),
                split_columns=_filled(line_kernels.split_columns, lines.split_columns.plain),
                list_slash_blocks=_filled(line_kernels.list_slash_blocks, lines.list_slash_blocks.plain),
                sort_by_class=_filled(line_kernels.sort_by_class, lines.sort_by_class.plain),
            ),
            estimate: dict(
                rowwise_logsumexp=_drawn(estimate.rowwise_logsumexp, Tensor.zero_),
                line_weights=_drawn(estimate.line_weights, Tensor.uniform_),
                choose_grid_lines=_drawn(estimate.choose_grid_lines, Tensor.zero_),
                score_strides=_drawn(estimate.score_strides, Tensor.uniform_),
            ),
        }
        for target, some in held.items():
            stack.enter_context(mock.patch.multiple(target, **some))
        stack.enter_context(mock.patch.object(triton.knobs.runtime, "jit_cache_hook", keys.take))
        stack.enter_context(as_on(operators.find_architecture(architecture)))
        yield keys


def patterns() -> list[dict[str, Any]]:
    """Each pattern for all heads of a layer, and one of each head."""
    near = {"name": "a_shape", "sink": 128, "window": 1024}
    lines = {"name": "vertical_slash", "vertical": 200, "slash": 300}
    grid = {"name": "grid", "stride": "frame"}
    cut = {"name": "q_boundary", "text": near, "video": near}
    area = {"name": "boundary_2d", "default": lines}
    heads = dict(enumerate([grid, grid, lines, {**cut, "video": grid}, near, lines, area, near]))
    alone = [near, lines, grid, {**grid, "stride": "free"}, cut, area]
    alone += [{"name": name} for name in ("block_topk", "k_boundary", "tri_shape", "sf_fixed", "sf_strided")]
    return [*alone, {"name": "per_head", "table": {0: heads}}]


def layout_of(tokens: int, batch: int) -> TokenLayout:
    """Video in frames, cut by islands of text; all but the last sequence are shorter, with padding before them."""
    islands = min(8, tokens // 512)
    place = torch.arange(tokens)
    text = place % (tokens // islands) >= tokens // islands * 3 // 4
    frame = torch.where(text, -1, ((~text).long().cumsum(0) - 1) // FRAMES[tokens % len(FRAMES)])
    short = torch.arange(batch - 1, -1, -1)[:, None] * (tokens // 7)
    modality = torch.where(text, TEXT, VIDEO)
    return TokenLayout.build(
        modality.expand(batch, -1), frame=frame.expand(batch, -1), valid=place.expand(batch, -1) >= short
    )


def prefill(tokens: int, sparse: dict[str, Any], buffered: bool = False, batch: int = 1) -> None:
    """A layer of a prompt; its keys and values as projections leave them, or in a buffer with room for more."""

    def rows(heads: int) -> Tensor:
        return torch.zeros(batch, tokens, heads, SIZE, dtype=torch.bfloat16).transpose(1, 2)

    query, key, value = rows(HEADS), rows(GROUPS), rows(GROUPS)
    if buffered:
        key, value = (grow_buffer(None, 2, tokens, like=t)[:, :, :tokens] for t in (key, value))
    layout = layout_of(tokens, batch)
    angles = torch.zeros(1, tokens, SIZE, dtype=torch.bfloat16)
    layer_ops.rotate_(query, angles, angles)
    plan = Recipe.load(sparse=sparse).sparse.for_layer(0).plan(query, key, layout, layout)
    assert plan is not None
    attend_plan(plan, query, key, value, SIZE**-0.5, backend.op)


def rows_alone(tokens: int) -> None:
    """What a layer does to each row alone."""
    x = torch.zeros(1, tokens, HIDDEN, dtype=torch.bfloat16)
    layer_ops.rms_norm(x, x[0, 0], 1e-6)
    layer_ops.silu_multiply_(x, x.clone())


def decoded(tokens: int) -> None:
    """The operators of a decode step after a prompt, over a cache with room."""
    cache = grow_buffer(None, 2, tokens, like=torch.zeros(1, GROUPS, 0, SIZE, dtype=torch.bfloat16))
    angles = torch.zeros(1, cache.shape[2], SIZE, dtype=torch.bfloat16)
    for width in (1, 6):
        at = torch.full((1, width), tokens)
        x = torch.zeros(width, HIDDEN, dtype=torch.bfloat16)
        layer_ops.project_rows(x, [torch.zeros(64, HIDDEN, dtype=torch.bfloat16)], [])
        square = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16)
        _, gained, squares = layer_ops.residual_linear(x, square, [], x, square[0])
        three = [square.new_zeros(heads * SIZE, HIDDEN) for heads in (HEADS, GROUPS, GROUPS)]
        turn = square.new_zeros(2, 1, width, SIZE)
        layer_ops.qkv_rope_rows(gained, three, [], None, squares, 1e-6, turn, at, cache, cache)
        told = torch.zeros(1, width, (HEADS + 2 * GROUPS) * SIZE, dtype=torch.bfloat16)
        query = layer_ops.rope_rows(told, angles, angles, at, at, cache, cache)
        layer_ops.decode_attend(query, cache, cache, at, 0.1, None)
        layer_ops.decode_attend(query, cache, cache, at, 0.1, at[0])


def on_prompts(lengths: Sequence[int], architecture: str) -> Keys:
    """The keys of all that is launched for prompts of these lengths, one after another."""
    with recorded(architecture) as keys:
        for tokens in lengths:
            keys.prompt = tokens
            for sparse in patterns():
                prefill(tokens, sparse)
                prefill(tokens, sparse, buffered=True)
                prefill(tokens, sparse, batch=2)
            rows_alone(tokens)
            decoded(tokens)
    return keys


def some_lengths(count: int, least: int, most: int) -> list[int]:
    """Lengths between two, as many short ones as long ones, some of them multiples of what frames and blocks have."""
    rng = random.Random(0)
    found = (round(least * (most / least) ** rng.random()) for _ in range(count))
    return [tokens - tokens % rng.choice((1, 4, 16, 64, 256, 1024)) for tokens in found]


def main(architecture: str, first: Sequence[int], count: int) -> None:
    lengths = some_lengths(count, min(first), max(first))
    found = on_prompts([*first, *lengths], architecture)
    for name in sorted(found.of):
        later = [tokens for tokens in found.new[name] if tokens not in first]
        differing = {of: sorted(map(str, some)) for of, some in found.differing(name).items()}
        print(name, len(found.of[name]), len(later), differing, sep="; ")


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False
    main(sys.argv[1], [int(tokens) for tokens in sys.argv[2].split(",")], int(sys.argv[3]))
