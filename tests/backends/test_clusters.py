"""What a question retrieves by clusters, where there are too many of them for the kernels."""

from __future__ import annotations

from unittest import mock

import torch

from mmaccel.backends.ops import clusters, operator


def test_very_many_clusters_are_sorted() -> None:
    """Comparing each with all is for some thousands."""
    launched = mock.Mock()
    with (
        mock.patch.object(operator, "usable", lambda device: None),
        mock.patch("mmaccel.backends.triton.stream.outside", launched),
    ):
        for count in (clusters.MOST, clusters.MOST + 1):
            clusters.outside(torch.zeros(1, count), torch.ones(count, dtype=torch.long), 3, 0)
    assert launched.call_count == 1 and launched.call_args[0][0].shape == (1, clusters.MOST)
