"""Mosaic: a stream's keys and values in clusters, by look and inside a look by key (arXiv 2604.10060)."""

from mmaccel.policies.kv.mosaic.policy import Clusters, Mosaic

__all__ = ["Clusters", "Mosaic"]
