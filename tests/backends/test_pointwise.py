"""The operators of a layer's rows: their contracts, and their plain forms."""

from __future__ import annotations

import torch

from mmaccel.backends.ops import layer_ops


def test_the_operators_keep_their_contracts() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    torch.library.opcheck(layer_ops.rms_norm.op, (x, weight, 1e-5))
    torch.library.opcheck(layer_ops.silu_times_.op, (x.clone(), x))
    torch.library.opcheck(layer_ops.rotate_.op, (torch.randn(2, 4, 3, 8), x, x))


def test_the_plain_forms() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    torch.testing.assert_close(
        layer_ops.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    )
    gate = x.clone()
    layer_ops.silu_times_(gate, 2 * x)
    torch.testing.assert_close(gate, 2 * x * x * x.sigmoid())
    q = torch.randn(2, 4, 3, 8)
    angle = torch.cat([x[..., :4]] * 2, -1)
    numbers = torch.view_as_complex(torch.stack([q[..., :4], q[..., 4:]], -1))
    wanted = torch.view_as_real(numbers * torch.polar(torch.ones(2, 1, 3, 4), x[:, None, :, :4]))
    layer_ops.rotate_(q, angle.cos(), angle.sin())
    torch.testing.assert_close(q, torch.cat([wanted[..., 0], wanted[..., 1]], -1))
