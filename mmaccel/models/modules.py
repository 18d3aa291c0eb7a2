"""Makes a model's own modules cheaper under a recipe or in a stream: in chunks, and by fused kernels.

Chunks: modules that act on each token alone run on 32,768 tokens at a time, which bounds their temporary memory. At a
million tokens the MLP of a 7B model holds 38 GB for each of three products; in chunks 1.2 GB, at full matrix throughput. The
vision tower runs on some frames at a time (at a million tokens Qwen2.5-VL's holds 10 GB for each hidden state,
LLaVA-OneVision's projector 28 GB before pooling). Frames do not attend to each other, so results are equal up to rounding of
other kernels. Not split are a time step, an image with its tiles, and calls that ask for gradients, hidden states,
attentions or a tuple, or that pass lengths or positions of all patches. A split call returns `pooler_output` alone.

Fusion: a norm, gate or rotation is one kernel, as these are bound by memory. Of a decoder layer's 38 ms at 131,072 tokens on
an H200 all but 10 are steps that one kernel computes together. The MLPs of Qwen2.5-VL's tower have an inner size of 3,420 at
most published sizes. Its rows in 16 bits start at multiples of 8 bytes, but Hopper's tensor cores load rows that start at
multiples of 16, so cuBLAS falls back to kernels of the previous generation. Padding with zeros to 3,424 gives the same
products. The padded copies are made when the tower first runs and freed with the hooks; the model's own weights are never
changed, so that saving, moving and training work as before. Below, `family` is the model's `Family`, and `whole` a method
before it was wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import CellType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from mmaccel.backends.ops import layer_ops
from mmaccel.core.layout import IMAGE, VIDEO
from mmaccel.models import deepstack
from mmaccel.models.install import Hooks, shared_hooks
from mmaccel.models.prompt_layout import bind_args

ROWS = 1 << 15
"""Rows at a time; a shorter prompt goes through at once, and meets no other arithmetic than without us."""

PATCHES = 1 << 14
"""Patches of a call, unless one step of time or one image has more. At the published shapes a patch of Qwen2.5-VL holds some
44 kB where queries and keys are turned in float32, and one of LLaVA-OneVision some 87 kB in releases of transformers that
keep the states of all layers: 0.7 and 1.4 GB. Of fewer a host launches the layers more slowly than an H200 computes them."""

ALIGNED = 16
"""Bytes: a row that begins at a multiple of these is copied by Hopper's matrix units themselves."""

METHODS = {IMAGE: "get_image_features", VIDEO: "get_video_features"}

WHOLE = ("cu_seqlens", "cu_window_seqlens", "max_seqlen", "max_window_seqlen", "position_ids", "window_index")
"""What a caller may have computed of all patches; with or without the modality in front."""

_FUSED: WeakSet[nn.Module] = WeakSet()
"""Towers with fewer kernels by now."""


def pointwise_modules(model: nn.Module, family: Any) -> list[nn.Module]:
    """Return the language model's norms and MLPs: they act on each token alone, so tokens can pass through in chunks."""
    layers: list[Any] = list(family.layers(model))
    owners = [
        one for layer in layers for one in (layer, getattr(layer, "self_attn", None)) if one is not None
    ]
    inside = (child for one in owners for child in one.named_children())
    return [family.text_model(model).norm, *(one for name, one in inside if name == "mlp" or "norm" in name)]


def process_in_token_chunks(hooks: Hooks, modules: Iterable[nn.Module], family: Any) -> None:
    """Make `modules`, which act on each token alone, process inputs [B, n, E] in chunks of `ROWS` tokens."""
    for module in modules:
        if _is_gated(module, family):
            hooks.wrap(module, "forward", fused_mlp, module)
        hooks.wrap(module, "forward", _by_rows)
        if is_norm(module, family):
            hooks.wrap(module, "forward", _normed_or, module, family)


def _by_rows(whole: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    batch, n = hidden.shape[:2]
    # Where gradients are wanted, all that the pieces hold is kept anyway.
    if args or kwargs or batch * n <= ROWS or _wants_gradients(hidden):
        return whole(hidden, *args, **kwargs)
    rows, out = ROWS // batch, None
    for begin in range(0, n, rows):
        piece = whole(hidden[:, begin : begin + rows].contiguous())  # a mixture of experts views it
        if out is None:
            out = piece.new_empty(batch, n, *piece.shape[2:])
        out[:, begin : begin + rows] = piece
    return out


def rebind_function(hooks: Hooks, modules: Iterable[nn.Module], name: str, ours: Callable[..., Any]) -> None:
    """Make the forward of `modules` call `ours(original, *args, **kwargs)` wherever it calls the function `name`. A module
    whose forward does not call that name is left unchanged."""
    for module in modules:
        known: Any = getattr(module.forward, "__func__", None)
        if (copied := _copy_rebound(known, name, ours)) is None:
            continue
        # Not compiled itself: what is kept of a compiled forward goes by the code, which both have, and not by the names.
        wrapper = functools.partial(_unless_compiled, torch.compiler.disable(copied), known, module)
        hooks.set_attribute(module, "forward", functools.wraps(module.forward)(wrapper))


def _copy_rebound(known: Any, name: str, ours: Callable[..., Any]) -> FunctionType | None:
    """A copy of the function `known`, or of that which its decorators wrap, in which `name` is `ours`; None: it has no such
    name."""
    code = getattr(known, "__code__", None)
    if code is None:
        return None
    names, cells = known.__globals__, known.__closure__
    if name in code.co_names:
        names = {**names, name: functools.partial(ours, names[name])}
    else:
        inner = getattr(known, "__wrapped__", None)
        if inner is None or not cells or (copied := _copy_rebound(inner, name, ours)) is None:
            return None
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(code, names, known.__name__, known.__defaults__, cells)
    made.__kwdefaults__ = known.__kwdefaults__
    return made


def _unless_compiled(ours: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A compiler goes by the names of the module, which ours has a copy of; what it makes of theirs is few kernels too."""
    return (plain if torch.compiler.is_compiling() else ours)(*args, **kwargs)


def apply_rope_in_place(
    whole: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Apply RoPE to query and key [B, H, n, D] in place, by one kernel each, in as many dimensions as `cos` and `sin` have.
    If no kernel fits, call `whole`, the attention module's own RoPE function."""
    size = cos.shape[-1]
    one = cos.shape == sin.shape and cos.dtype == sin.dtype == query.dtype == key.dtype
    fits = one and cos.shape[1:-1] == query.shape[2:-1] and cos.shape[0] in (1, query.shape[0])
    fits = fits and size <= query.shape[-1] and layer_ops.can_fuse(query)
    if args or kwargs or not fits or torch.is_grad_enabled():
        return whole(query, key, cos, sin, *args, **kwargs)
    layer_ops.rotate_(query[..., :size], cos, sin)
    layer_ops.rotate_(key[..., :size], cos, sin)
    return query, key


def is_norm(module: nn.Module, family: Any) -> bool:
    """Whether `module` is an RMSNorm of the family that has a weight and no bias."""
    return type(module).__name__ in family.rms_norms | family.centred_norms


def _is_gated(module: nn.Module, family: Any) -> bool:
    """Whether `module` is a SwiGLU MLP of the family: gate, up and down projection with SiLU."""
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return silu and type(module).__name__ in family.gated_mlps


def fused_norm(module: Any, hidden: Tensor, family: Any) -> Tensor:
    """Apply the norm `module` to `hidden`, by a fused kernel if there is one; not for code under torch.compile."""
    if not is_norm(module, family):
        return module(hidden)  # type: ignore[no-any-return]
    return _normed_or(module, family, module, hidden)  # type: ignore[no-any-return]


def _normed_or(module: Any, family: Any, whole: Callable[..., Any], hidden: Tensor) -> Any:
    """Apply the norm `module` to `hidden`, by a fused kernel if there is one, else by its own forward `whole`."""
    # Weights that accelerate offloads are elsewhere until the module's own forward brings them.
    same = module.weight.dtype == hidden.dtype and module.weight.device == hidden.device
    fits = same and layer_ops.can_fuse(hidden)
    if not fits or _wants_gradients(hidden, module.weight):
        return whole(hidden)
    if type(module).__name__ in family.centred_norms:
        return layer_ops.rms_norm(hidden, module.weight, module.eps, True)
    return layer_ops.rms_norm(hidden, module.weight, module.variance_epsilon)


def fused_mlp(module: Any, whole: Callable[..., Any], hidden: Tensor) -> Any:
    """Apply the SwiGLU MLP `module` to `hidden`, with SiLU and product in one kernel if there is one, else by its own
    forward `whole`."""
    if not layer_ops.can_fuse(hidden) or torch.is_grad_enabled():
        return whole(hidden)
    gate = module.gate_proj(hidden)
    layer_ops.silu_multiply_(gate, module.up_proj(hidden))
    return module.down_proj(gate)


def _wants_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


@contextmanager
def batched_tower(family: Any, model: nn.Module, fuse: bool = True) -> Iterator[None]:
    """Context in which a model's vision tower is set up as by `install_batched_tower`. Contexts of several threads may
    overlap."""
    inner, given = family.multimodal(model), {"family": family, "model": model}
    fused = shared_hooks(inner, "fused", functools.partial(fuse_tower, **given)) if fuse else nullcontext()
    with (
        shared_hooks(inner, "batched_tower", functools.partial(install_batched_tower, fuse=False, **given)),
        fused,
    ):
        yield


def install_batched_tower(
    hooks: Hooks,
    family: Any,
    model: nn.Module,
    fuse: bool = True,
    context: Any = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Make the model's vision tower encode at most `PATCHES` patches a call, batch attention windows of equal length and, if
    `fuse`, use fused kernels. A tower already set up so is left unchanged. `context`: the `ContextGroup` over whose
    processes the calls are spread; None: this process makes all, and calls `check` before each."""
    multimodal = family.multimodal(model)
    # Here, not where it is written: what compiles is imported by that, when a model is there.
    spread = context.run_sharded if context else functools.partial(_checked_map, check)
    joined = functools.partial(torch.compiler.disable(_joined, recursive=False), spread)
    for kind, name in METHODS.items():
        encode = getattr(multimodal, name, None)
        if encode is not None and not getattr(encode, "by_parts", False):
            ours = hooks.wrap(multimodal, name, _encode, family, model, kind, joined, context)
            ours.by_parts = True  # type: ignore[attr-defined]
    for name, method in family.replaced_methods.items():
        if name not in vars(multimodal):
            hooks.wrap(multimodal, name, method)
    if (tower := family.window_attention_tower(model)) is not None:
        family.batch_windows(hooks, tower)
    if fuse:
        fuse_tower(hooks, family, model)


def _encode(
    family: Any, model: nn.Module, kind: int, joined: Any, context: Any, whole: Any, *args: Any, **kwargs: Any
) -> Any:
    """What the tower's method gives: in parts where there are many patches and nothing but their features is asked for."""
    given, name = bind_args(whole, args, kwargs), next(iter(inspect.signature(whole).parameters))
    pixels = given.get(name)
    count = family.count_patches(model, pixels) if isinstance(pixels, Tensor) else 0
    most = PATCHES if context is None else context.patches_per_call(count, PATCHES)
    if count <= most:
        return whole(*args, **kwargs)
    bare = {key.removeprefix("image_").removeprefix("video_") for key, x in given.items() if x is not None}
    states = given.get("output_hidden_states") or given.get("output_attentions")
    outside = [
        child for child in family.multimodal(model).children() if child is not family.text_model(model)
    ]
    trained = torch.is_grad_enabled() and any(p.requires_grad for one in outside for p in one.parameters())
    if states or trained or given.get("return_dict") is False or not bare.isdisjoint(WHOLE):
        return whole(*args, **kwargs)
    return joined(family, model, kind, whole, name, given, most)


def _joined(
    run_sharded: Any, family: Any, model: Any, kind: int, whole: Any, pixels: str, given: Any, most: int
) -> Any:
    """What `whole` gives of all that is `given`, from what it gives of parts of the argument `pixels`."""
    made: list[Any] = []

    def encode(part: tuple[Tensor, Mapping[str, Any]]) -> Any:
        made[:] = [whole(**{**given, pixels: part[0], **part[1], "return_dict": True})]
        return deepstack.join_tower_deepstack(made[0])

    others = {name: x for name, x in given.items() if name != pixels}
    joined = family.encode_pixels(
        model, kind, given[pixels], others, most, functools.partial(run_sharded, encode)
    )
    return type(made[0])(**deepstack.split_tower_deepstack(joined, made[0]))


def _checked_map(
    check: Callable[[], object], work: Callable[[Any], Any], parts: Iterable[Any]
) -> Iterator[Any]:
    for part in parts:
        check()
        yield work(part)


def fuse_tower(hooks: Hooks, family: Any, model: nn.Module) -> None:
    """Make the model's vision tower use fused kernels, where they exist; padded weight copies are freed with `hooks`. A
    tower without windows, or already set up so, is left unchanged."""
    tower = family.window_attention_tower(model)
    if tower is None or tower in _FUSED:
        return
    hooks.callback(_FUSED.discard, tower)
    _FUSED.add(tower)
    modules = list(tower.modules())
    for one in modules:
        if is_norm(one, family):
            hooks.wrap(one, "forward", _normed_or, one, family)
        elif _is_gated(one, family):
            hooks.wrap(one, "forward", _filled, PaddedMLP(one))
    rebind_function(hooks, modules, family.vision_rotate_function, _turned_rows)


def _filled(filled: PaddedMLP, whole: Callable[..., Any], hidden: Tensor) -> Any:
    """[..., E]: the output of the feed-forward block for `hidden` [..., E]."""
    fits = layer_ops.can_fuse(hidden) and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    weights = filled.weights(hidden) if fits else None
    if weights is None:
        return fused_mlp(filled.module, whole, hidden)
    gate, up, down, gate_bias, up_bias, down_bias = weights
    wide = linear(hidden, gate, gate_bias)
    layer_ops.silu_multiply_(wide, linear(hidden, up, up_bias))
    return linear(wide, down, down_bias)


class PaddedMLP:
    """An MLP's weights, zero-padded to an inner size that is a multiple of `ALIGNED` bytes.

    Padding changes no result: a padded gate is silu(0) * 0, and its column of the down projection is zero. Copies are made
    anew when a weight is replaced or changed in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self._made_of: tuple[Any, ...] | None = None
        self._held: tuple[Tensor | None, ...] = ()

    def weights(self, hidden: Tensor) -> tuple[Any, ...] | None:
        """Return padded weights of gate, up and down, then their biases or None. Return None if the MLP must run by itself:
        its inner size needs no padding, or its linear modules are not plain, or differ from `hidden` in dtype or device."""
        parts = self.module.gate_proj, self.module.up_proj, self.module.down_proj
        hooked = any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in parts)
        if hooked or not all(map(is_plain_linear, parts)):
            return None
        given = [part.weight for part in parts] + [part.bias for part in parts]
        inner, size = parts[0].weight.shape[0], ALIGNED // hidden.element_size()
        alike = all(x is None or (x.dtype, x.device) == (hidden.dtype, hidden.device) for x in given)
        if not alike or inner % size == 0:
            return None
        known = tuple(
            None if x is None else (x.data_ptr(), 0 if x.is_inference() else x._version) for x in given
        )
        if known != self._made_of:
            rows, more = [*given[:2], *given[3:5]], -inner % size
            gate, up, *bias = [None if x is None else pad(x, (0, 0) * (x.ndim - 1) + (0, more)) for x in rows]
            self._held = gate, up, pad(given[2], (0, more)), *bias, given[5]
            self._made_of = known
        return self._held


def is_plain_linear(part: Any) -> bool:
    """Whether `part` is a plain linear module: no adapter (LoRA), no quantized weight."""
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter


def _turned_rows(whole: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Queries and keys [rows, H, D] turned in place by angles [rows, D], in float32 as the tower does."""
    fits = cos.dtype == sin.dtype == torch.float32 and query.dtype == key.dtype and cos.shape == sin.shape
    if not fits or not layer_ops.can_fuse(query) or torch.is_grad_enabled():
        return whole(query, key, cos, sin)
    for one in (query, key):
        layer_ops.rotate_(one.transpose(0, 1)[None], cos[None], sin[None])
    return query, key
