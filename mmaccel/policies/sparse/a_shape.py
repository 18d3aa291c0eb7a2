"""The `a_shape` pattern: attention sink and local window (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.backends.ops.block_attend import Part
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.sparse.orders import AttentionRegion, IntraPattern, max_window_sink_blocks


@register("sparse", "a_shape")
@dataclass(frozen=True, kw_only=True)
class AShape(IntraPattern):
    """Every query sees the first `sink` tokens and the last `window`, itself included; nothing else.

    Within a modality boundary both count only keys of the modality.

    Exact: all other keys of a block are masked, and with sink + window >= length it is dense attention. After MMInference
    (section 3.1, Tables 2 and 3: sink 128, local 1024 to 4096) and StreamingLLM (arXiv 2309.17453); unlike the latter, keys
    keep their positions. Appendix C.3 of the former mentions seven sinks; its tables, followed here, 128.
    """

    sink: int = limited(128, at_least(0))
    window: int = limited(4096, at_least(1, ", the token itself"))

    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        return (region.plan_part(region.window_and_sink(self.sink, self.window)),)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        return max_window_sink_blocks(n_key, self.sink, self.window, self.block, gaps=gaps)
