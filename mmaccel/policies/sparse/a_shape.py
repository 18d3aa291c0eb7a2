"""The `a_shape` pattern: attention sink and local window (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.backends.ops.block_attend import KeySpan, Part
from mmaccel.core.errors import at_least, limited
from mmaccel.core.prefill.plan import FAR
from mmaccel.core.registry import register
from mmaccel.policies.sparse.orders import IntraPattern, Region, spanned_blocks, whole_blocks


@register("sparse", "a_shape")
@dataclass(frozen=True, kw_only=True)
class AShape(IntraPattern):
    """Every query sees the first `sink` tokens and the last `window`, itself included; nothing else.

    Within a modality boundary both count only keys of the modality.

    Exact: no block is rounded up, and with sink + window >= length it is dense attention. After MMInference (section 3.1,
    Tables 2 and 3: sink 128, local 1024 to 4096) and StreamingLLM (arXiv 2309.17453); unlike the latter, keys keep their
    positions. Appendix C.3 of the former mentions seven sinks; its tables, followed here, 128.
    """

    sink: int = limited(128, at_least(0))
    window: int = limited(4096, at_least(1, ", the token itself"))

    def parts(self, region: Region) -> tuple[Part, ...]:
        return (region.part(near_and_first(region, self.sink, self.window)),)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        return near_and_first_blocks(n_key, self.sink, self.window, self.block, gaps=gaps)


def near_and_first(region: Region, sink: int, window: int) -> tuple[KeySpan, ...]:
    """Return spans over the last `window` of the keys up to each query, and over the first `sink` keys; either may be 0."""
    near = (region.span(0, window),) if window else ()
    return (*near, region.span(window, FAR, first=sink)) if sink else near


def near_and_first_blocks(n_key: int, sink: int, window: int, block: int, *, gaps: bool) -> tuple[int, int]:
    """Return how many key blocks `near_and_first` lists at most: for each query block, and further ones in total (see
    `IntraPattern.max_blocks`)."""
    keys = whole_blocks(n_key, block)
    near = min(spanned_blocks(block + window - 1, block), keys) if window else 0
    # Queries ascend: what their blocks see beyond one window is, all together, no more than the keys.
    return near + whole_blocks(min(sink, n_key), block), keys if gaps and window else 0
