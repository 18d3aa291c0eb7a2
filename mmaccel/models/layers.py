"""Few rows through the layers of a Qwen2-like family without their modules: four products a layer beside attention.

The modules of a layer launch some thirty small kernels and take a host about a millisecond; for few rows that is most of
the time. Weights are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import pad

from mmaccel.backends import ops
from mmaccel.core.attention import StreamRun
from mmaccel.core.replay import Replays
from mmaccel.models.pointwise import normed

if TYPE_CHECKING:
    from mmaccel.models.family import Family

LAYERS = {"Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer"}
"""Classes of decoder layers that are known here."""

DEVICES = ("cuda",)
"""Where it is worth it."""


WIDTHS = (1, 2, 4, *range(8, 65, 8))
"""Numbers of rows that are computed so, filled up to the next of these: more is work for the modules."""


class FewRows:
    """Questions and answers on the memory of a stream: between two layers' attention all is one replayed function."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        self._model, self._family = model, family
        self._shape = family.geometry(model)
        # Walking through the modules takes the host a millisecond.
        self._inner = [module for layer in family.layers(model) for module in layer.modules()]
        self._replays = Replays(next(model.parameters()).device)

    def serves(self, rows: Tensor) -> bool:
        """Whether the layers are `known`, and nobody listens to them; and rows [n, E] are few."""
        layers: list[Any] = list(self._family.layers(self._model))
        config = self._family.text(self._model).config
        if len(rows) > WIDTHS[-1] or rows.device.type not in DEVICES:
            return False
        if not known(layers, getattr(config, "hidden_act", "")):
            return False
        return not any(module._forward_hooks or module._forward_pre_hooks for module in self._inner)

    def run(self, run: StreamRun, embeds: Tensor, hidden: bool) -> Tensor:
        """See `StreamSeam.run`."""
        shape, state, n = self._shape, run.state, len(embeds)
        layers: list[Any] = list(self._family.layers(self._model))
        heads, groups, size = shape.heads, shape.kv_heads, shape.head_dim
        width = next(rows for rows in WIDTHS if rows >= n)
        self._replays.under(tuple(layer.self_attn.q_proj.weight.data_ptr() for layer in layers))
        x = pad(embeds, (0, 0, 0, width - n))
        rows = entering(layers[0], x)
        for number in range(len(layers)):
            if hidden:
                state.ahead(number, x[None, :n])
            columns = rows[None, :n].view(1, n, -1, size).transpose(1, 2)
            query, key, value = columns.split([heads, groups, groups], 1)
            state.append(number, key, value)
            out = run.attend(number, query, key, value, size**-0.5)
            out = pad(out.transpose(1, 2).reshape(n, -1), (0, 0, 0, width - n))
            x, *some = self._replays((number, width), between(layers[number : number + 2]), x, out)
            rows = some[0] if some else rows
        return normed(self._family.text(self._model).norm, x[:n])


def between(layers: Sequence[Any]) -> Callable[..., tuple[Tensor, ...]]:
    """From what entered a layer and its attention to what leaves it, and `entering` of the layer after it, if any."""

    def step(x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        x = leaving(layers[0], x, attended)
        return x, *(entering(one, x) for one in layers[1:])

    return step


def entering(layer: Any, x: Tensor) -> Tensor:
    """[R, (H + 2 G) * D]: queries, keys and values before rotation, side by side, of rows x [R, E] that enter a layer."""
    own = layer.self_attn
    return project(x, [own.q_proj, own.k_proj, own.v_proj], layer.input_layernorm)


def leaving(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """[R, E]: what leaves a layer that rows x [R, E] entered, by their attention [R, H * D]."""
    mlp = layer.mlp
    x = project(attended, [layer.self_attn.o_proj], residual=x)
    wide = project(x, [mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm, gated=True)
    return project(wide, [mlp.down_proj], residual=x)


def project(
    x: Tensor,
    linear: Sequence[nn.Linear],
    norm: Any = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """See `ops.project_rows`."""
    weight = [one.weight for one in linear]
    bias = [one.bias for one in linear if one.bias is not None]
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    return ops.project_rows(x, weight, bias, gain, eps, residual, gated)  # type: ignore[no-any-return]


def known(layers: Iterable[Any], activation: str) -> bool:
    """Whether `entering` and `leaving` compute what `layers` do: of classes known here, each on one device, with weights as
    they come."""
    layers = list(layers)
    return activation == "silu" and all(
        type(layer).__name__ in LAYERS
        and layer.self_attn.sliding_window is None
        and all(type(linear) is nn.Linear for linear in linears(layer))
        and len({p.device for p in layer.parameters()}) == 1
        for layer in layers
    )


def linears(layer: Any) -> list[nn.Module]:
    """The seven products of a layer."""
    own, mlp = layer.self_attn, layer.mlp
    return [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
