"""Gated DeltaNet (arXiv 2412.06464): the update of its recurrent state for the few new rows of a decode step; for a prompt,
the convolution before and the gated norm after the chunked update, which flash-linear-attention computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmaccel.backends.ops.layer_ops import can_fuse, rms_norm
from mmaccel.backends.ops.operator import operator, runs_triton_in_float32


@operator(
    "delta",
    serves=runs_triton_in_float32,
    mutates=("journal", "state"),
    fake=lambda gate: torch.empty_like(gate, memory_format=torch.contiguous_format),
)
def deltanet_rows(
    rows: Tensor,
    gate: Tensor,
    conv: Tensor,
    decay: Tensor,
    shift: Tensor,
    gain: Tensor,
    eps: float,
    bounds: Tensor,
    journal: Tensor,
    state: Tensor,
) -> Tensor:
    """Run new rows of B sequences through a Gated DeltaNet: convolution, gated delta rule, norm and gate. Rounds as
    transformers' modules do.

    The recurrent state lags behind the sequence: columns that it does not contain yet are replayed from the journal, a ring
    buffer of projected rows. So a sequence is rolled back by an earlier `start`, and padding rows at the end have no effect.
    Returns [B * n, H * V].

    bounds   [B, 4] long. `start`: first new column; `base`: number of columns the state contains; `upto`: number it
             contains afterwards, at most `start`; `slot`: that of the sequence in journal and state
    rows     [B * n, W], columns ``start .. start + n - 1`` of each: queries and keys of G heads of size K, values of H heads
             of size V, then for each of the H heads the write strength and the decay. Written to the journal
    gate     [B * n, H * V]; conv [W - 2 H, taps]; decay, shift [H] (`A_log`, `dt_bias`); gain [V] and `eps` of the norm
    journal  [S, R, W]: column c is row c % R; zeros before column 0
    state    [S, H, K, V] float32
    """
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    n = len(rows) // len(bounds)
    for at, (*when, slot) in enumerate(bounds.tolist()):  # off a device: nothing waits
        some = slice(at * n, (at + 1) * n)
        said = _ruled(rows[some], conv, decay, shift, when, journal[slot], state[slot])
        out[some] = gated_rms_norm.plain(said, gate[some].view_as(said), gain, eps).flatten(1)
    return out


@operator("delta", serves=can_fuse, fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
def convolve_silu(x: Tensor, weight: Tensor) -> Tensor:
    """Causal convolution of x [B, S, C] along S, each channel with its own weight [C, taps], rounded, then SiLU."""
    past = functional.pad(x.mT, (weight.shape[1] - 1, 0))
    return functional.silu(functional.conv1d(past, weight[:, None], groups=len(weight))).mT.contiguous()


@operator("delta", serves=can_fuse, fake=lambda gate: torch.empty_like(gate))
def gated_rms_norm(x: Tensor, gate: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., V] times gain [V], each rounded as `gate` is, times silu(gate [..., V]); both contiguous."""
    return (rms_norm.plain(x.to(gate.dtype), gain, eps) * functional.silu(gate.float())).to(gate.dtype)


def _ruled(
    rows: Tensor, conv: Tensor, decay: Tensor, shift: Tensor, when: list[int], journal: Tensor, state: Tensor
) -> Tensor:
    """[n, H, V] float32 of one sequence, without norm and gate."""
    (heads, K, V), taps, here, (first, taken, upto) = state.shape, conv.shape[1], journal.shape[0], when
    end = first + len(rows)
    journal[torch.arange(first, end, device=rows.device) % here] = rows
    out = rows.new_zeros(len(rows), heads, V, dtype=torch.float32)
    if end == taken:
        return out
    past = journal[torch.arange(taken - taps + 1, end, device=rows.device) % here]
    mixed = functional.conv1d(past[:, : len(conv)].T[None], conv[:, None], groups=len(conv))[0]
    each = (len(conv) - heads * V) // 2
    mixed = functional.silu(mixed).T.float()
    query, key, value = mixed[:, :each], mixed[:, each : 2 * each], mixed[:, 2 * each :]
    query, key = (
        _unit(x.reshape(len(x), -1, K)).repeat_interleave(heads * K // each, 1) for x in (query, key)
    )
    value, (write, fade) = value.reshape(len(value), heads, V), past[taps - 1 :, len(conv) :].chunk(2, 1)
    write = write.sigmoid().float()
    fade = (-decay.float().exp() * functional.softplus(fade.float() + shift)).exp()
    now = state.clone()
    for at, column in enumerate(range(taken, end)):
        now *= fade[at, :, None, None]
        missing = value[at] - (now * key[at, :, :, None]).sum(1)
        now += key[at, :, :, None] * (missing * write[at, :, None])[:, None]
        if column >= first:
            out[column - first] = (now * query[at, :, :, None]).sum(1) * K**-0.5
        if column + 1 == upto:
            state.copy_(now)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
