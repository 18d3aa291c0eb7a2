"""What a video and its questions cost under a recipe: seconds and bytes, from sizes of a model and rates of a device.

Nothing is fitted. A model's sizes are counted (`Sizes`), a device's rates measured once, in a few seconds, or known
(`DEVICES`). Each term is work over a rate:

products   2 FLOPs for each weight and row, at the rate of a large product of that width
pairs      causal query-key pairs at what attention costs here (`select.Costs`), dense, or listed by the recipe's pattern
traffic    what norms, gates, rotations and copies read and write, at the rate of a copy
launches   starting the operators of a layer: beside the device's work on CUDA, before it on a CPU
decode     weights and shown keys and values read once a token
wire       recalled keys and values from the host

Letters: n rows of a pass, N columns that they see, L layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmaccel.backends import select
from mmaccel.backends.select import Bench, Costs, Line, Store, bench
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.prefill.attention import MIN_ROWS
from mmaccel.core.recipe import Recipe

STEP_S, RETRIEVE_S, ANSWER_S = 16e-6, 6e-4, 4e-5
"""Seconds of a layer that CUDA replays: of a step (steps_h200: 4.05 ms where weights and keys take 3.6), of a question that
retrieves (stream_h200: 21.7 ms with one frame), and of its answer."""
TOLD = 3.7
"""Tokens that a step gives where a draft's windows of 5 are kept to 0.8, as benchmarks replay it."""
STEP_LAYERS = 4
EAGER, ASKED, SEARCHED = 2.4, 2, 3
"""A layer under a recipe or in a session starts so many times what a plain one does, for hooks and the memory (steps of the tiny
models after 30 frames); a question starts as much as so many passes of one row, with its words and what its answer rests on,
and as so many where it retrieves."""
TOKEN_S = 4e-4
"""The host's part of a token: the choice, the text."""
HIDDEN = 0.6
"""Of the wire's seconds, hidden behind layers by the prefetch (stream_h200: 15 ms of a question's 26)."""
ROWS, PATCHES, UNITS, ROOM, SLAB = 1 << 15, 1 << 14, 16, 8192, 1 << 28
"""Rows of a pass of an ingestion and of a feed-forward block, patches of a tower's call, units of a pass of
live frames, the most
columns that a buffer grows ahead, and bytes that a host store takes at a time."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model. Weights are numbers of parameters: of all, of the decoder layers, of the head, of the tower.

    patches, tokens, pixels  of a unit, which is `pace` frames; `patch_row`: elements that a patch holds in the tower at most
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    weights: int
    layer_weights: int
    head_weights: int
    tower_weights: int
    tower_layers: int
    tower_width: int
    tower_inner: int
    patch_row: int
    patches: int
    tokens: int
    pixels: int
    pace: int
    limit: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def column(self) -> int:
        """Bytes of the keys and values of a token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device does: FLOP/s of products by width, seconds of attention (`Costs`), bytes/s of a copy, read and written,
    and from the host; seconds to start the operators of a decoder layer; bytes of memory."""

    name: str
    products: dict[int, float]
    attend: Costs
    copy: float
    wire: float
    layer: float
    memory: int

    @property
    def cuda(self) -> bool:
        return self.name != "cpu"

    def product(self, width: int) -> float:
        """FLOP/s at a width, between those measured; at a narrower one the rate falls with it."""
        (low, slow), (high, fast) = sorted(self.products.items())
        share = (math.log(width) - math.log(low)) / (math.log(high) - math.log(low))
        return float(slow * (fast / slow) ** min(share, 1.0)) if share > 0 else slow * min(1.0, width / low)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Device:
        """From what `asdict` made of one."""
        products = {int(width): rate for width, rate in found["products"].items()}
        return cls(**{**found, "products": products, "attend": Costs.of(found["attend"])})


def _hopper(name: str, copy: float, memory: int) -> Device:
    pairs = Costs(Line(2e-4, 9.1e-13), {"triton": Line(5e-4, 1.0e-12)}, Line(1e-3, 9e-9))
    return Device(
        name=name, products={1280: 4.5e14, 3584: 6.4e14}, attend=pairs, copy=copy, wire=48e9, layer=4e-4, memory=memory
    )  # fmt: skip


DEVICES = {
    "h200": _hopper("h200", 4.3e12, 150109880320),
    "h100": _hopper("h100", 3.0e12, 85017493504),
}
"""Known ones, from bench/results: products and pairs of prefill_h200 (128k tokens in 8.8 s, 6.1 of them attention), tower_h200
and sweep_h200 at heads of 128, the copy and the layer of steps_h200 and latency_7b_h200, the wire of transfer_h200. An H100
computes alike, and its memory has 3.35/4.8 of the rate."""


def measured(
    device: torch.device,
    sizes: Sizes,
    step: Callable[[], Any],
    store: Store[Device] | None = None,
    bench: Bench = bench,
) -> Device:
    """The rates of this device for heads like the model's: read from `store`, or measured in a few seconds and kept there.
    `step` runs `STEP_LAYERS` small decoder layers on one row."""
    shape = select.Shape(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.dtype)
    store = Store("rates.json", Device.of) if store is None else store
    cuda = device.type == "cuda"
    backend = select.choose(device)
    key = select.key_of(device, shape, (backend,), "rates")
    found = store.get(key)
    if found is None:
        kernels = {backend: select.get(backend, device)}
        lengths = select.LENGTHS if cuda else (1024, 2048)
        attend = select.measured_costs(device, shape, kernels, lengths=lengths, bench=bench)
        found = Device(
            name=torch.cuda.get_device_name(device) if cuda else "cpu",
            products={
                w: _product(w, device, sizes.dtype, bench) for w in ((1024, 4096) if cuda else (256, 1024))
            },
            attend=attend,
            copy=_copy(device, device, bench),
            wire=_copy(torch.device("cpu"), device, bench),
            layer=bench(step, device) / STEP_LAYERS,
            memory=_memory(device),
        )
        store.put(key, found)
    return found


def _product(width: int, device: torch.device, dtype: torch.dtype, bench: Bench) -> float:
    rows = 8192 if device.type == "cuda" else 1024
    x, weight = (torch.ones(n, width, device=device, dtype=dtype) for n in (rows, 4 * width))
    return 2 * rows * weight.numel() / bench(lambda: torch.nn.functional.linear(x, weight), device)


def _copy(source: torch.device, device: torch.device, bench: Bench) -> float:
    """Bytes/s: of a copy on the device those read and those written, of one from the host those that cross."""
    cuda = device.type == "cuda"
    here = torch.ones(1 << (28 if cuda else 24), dtype=torch.uint8, device=source)
    here = here.pin_memory() if cuda and source.type == "cpu" else here
    there = torch.empty_like(here, device=device)
    sides = 2 if source == device else 1
    return sides * here.numel() / bench(lambda: there.copy_(here, non_blocking=True), device)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be done: frames of a video or a stream, questions of `words` tokens each, answers of `answer` tokens.

    live    frames come from a camera, and are watched
    memory, host  bytes of the device and of the host that may be used
    told    tokens that a step of the target gives with the recipe's draft; None: `TOLD` by a draft model, else 1
    """

    frames: int
    questions: int = 1
    answer: int = 64
    words: int = 40
    live: bool = False
    memory: int
    host: int
    told: float | None = None


@dataclass(frozen=True)
class Cost:
    """Seconds to read the video, to a question's first token, and of each token after it; bytes on device and host at most.

    session  whether it is a session's, and not a call of `generate`
    """

    read_s: float
    question_s: float
    token_s: float
    device_bytes: int
    host_bytes: int
    session: bool
    work: Work

    @property
    def first_s(self) -> float:
        """Seconds to the first token of the first answer, the video read before; of a stream it is read as it comes."""
        return self.question_s + (0.0 if self.work.live else self.read_s)

    @property
    def total_s(self) -> float:
        """Seconds of everything, one question after the other."""
        return self.read_s + self.work.questions * self.asked_s

    @property
    def asked_s(self) -> float:
        """Seconds of a question with its whole answer."""
        return self.question_s + self.work.answer * self.token_s


def cost(recipe: Recipe, sizes: Sizes, work: Work, device: Device, draft: Sizes | None = None) -> Cost:
    """What `work` costs. A memory of sequences serves one question by `generate` and more in a session; `draft`: the sizes of
    the recipe's draft model, whose video is read as the target's is."""
    return _Estimate(recipe, sizes, work, device, draft).cost()


class _Estimate:
    """The terms of one recipe on one model."""

    def __init__(self, recipe: Recipe, sizes: Sizes, work: Work, device: Device, draft: Sizes | None) -> None:
        self.recipe, self.sizes, self.work, self.device, self.draft = recipe, sizes, work, device, draft
        self.kv: Any = recipe.kv
        self.session = work.live or work.questions > 1 or not recipe.kv.sequences
        self.archived = hasattr(recipe.kv, "frames")
        self.units = -(-work.frames // sizes.pace)
        self.size = sizes.dtype.itemsize
        self.other: _Estimate | None = None
        if draft is not None:
            # A session's draft watches the frames; in `generate` it reads what its pruner leaves of each unit.
            share = 1.0 if self.session or recipe.draft.pruner is None else recipe.draft.pruner.retention
            draft = replace(draft, tokens=max(1, round(draft.tokens * share)))
            self.other = _Estimate(
                Recipe(kv=recipe.kv), draft, replace(work, live=self.session), device, None
            )

    def cost(self) -> Cost:
        read, question, token = self._read(), self._question(), self._token()
        held, passing, leaving, host = self._bytes()
        if self.other is not None:
            token += (getattr(self.recipe.draft, "window", None) or 5) * self.other._token()
            read, question = read + self.other._read(), question + self.other._question()
            more, other, last, beside = self.other._bytes()
            held, passing, leaving, host = held + more, max(passing, other), max(leaving, last), host + beside
        token /= self.work.told or (1.0 if self.other is None else TOLD)
        most = held + max(passing, leaving)
        if not self.device.cuda:  # nothing is on the host before it leaves
            host = most = held + max(passing, leaving + host)
        return Cost(read, question, token, int(most), int(host), self.session, self.work)

    # Passes.

    @property
    def _rows(self) -> int:
        """Rows of a pass: of a prompt, an ingestion or live frames."""
        sizes, whole = self.sizes, self.units * self.sizes.tokens
        most = self.recipe.chunk or (ROWS if self.session else max(whole, 1))
        if self.work.live:
            most = self.recipe.chunk or UNITS * sizes.tokens
        return min(whole, max(1, most // sizes.tokens) * sizes.tokens)

    @property
    def _seen(self) -> int:
        """Units that a pass sees at most, its own included: all, those under the window, or what an ingestion holds."""
        if not self.archived:
            return self.units
        window = -(-self.kv.window // self.sizes.pace)
        if self.work.live:
            return window + UNITS
        free = self.work.memory - self.sizes.weights * self.size
        fit = max(1, int(free / 2) // (self.sizes.column * self.sizes.tokens))
        given = self.kv.ingest_frames
        most = fit if given is None else min(fit, -(-given // self.sizes.pace))
        return min(most, self.sizes.limit // self.sizes.tokens)

    def _passes(self) -> Iterator[tuple[int, int]]:
        """Rows of each pass, and the columns that its last row sees."""
        tokens, step, done = self.sizes.tokens, self._rows // self.sizes.tokens, 0
        window = -(-self.kv.window // self.sizes.pace) if self.archived and not self.work.live else 1
        while done < self.units:
            # Each unit of a pass sees at least what it would under the window.
            count = min(step, self.units - done, max(1, self._seen - min(window - 1, done)))
            yield count * tokens, min(done + count, max(self._seen, count)) * tokens
            done += count

    def _read(self) -> float:
        seconds = self._tower()
        for n, seen in self._passes():
            seconds += self._pass(n, seen)
        return seconds

    def _tower(self) -> float:
        """Patches through the vision tower: products, attention within a unit, and what else reads and writes them."""
        s, device, patches = self.sizes, self.device, self.units * self.sizes.patches
        products = 2 * s.tower_weights * patches / device.product(s.tower_width)
        pairs = s.patches * patches * s.tower_width * s.tower_layers * device.attend.dense.each / s.head_dim
        traffic = (
            patches * s.tower_layers * (12 * s.tower_width + 3 * s.tower_inner) * self.size / device.copy
        )
        calls = -(-self.units * s.tokens // self._rows) + patches // PATCHES
        return self._beside(products + pairs + traffic, calls * s.tower_layers * device.layer)

    def _beside(self, work: float, starts: float) -> float:
        """A CUDA device works while the host starts what follows."""
        return max(work, starts) if self.device.cuda else work + starts

    def _pass(self, n: int, seen: int) -> float:
        s, device = self.sizes, self.device
        products = 2 * s.layer_weights * n / device.product(s.hidden)
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        elements = n * (10 * s.hidden + 3 * s.inner + 4 * wide) + 4 * seen * narrow
        traffic = s.layers * elements * self.size / device.copy
        pairs = s.layers * self._pairs(n, seen)
        return self._beside(products + traffic + pairs, s.layers * EAGER * device.layer)

    def _pairs(self, n: int, seen: int) -> float:
        """Seconds of attention of a layer: dense, or by the pattern where that runs."""
        s, costs, pattern = self.sizes, self.device.attend, self.recipe.sparse
        causal = n * (2 * seen - n + 1) / 2
        if self.work.live and self.archived:
            causal = n * min(seen, self.kv.window // s.pace * s.tokens)
        dense = costs.dense(s.heads * causal)
        if pattern.dense or self.work.live or n < MIN_ROWS:
            return dense
        at, place = pattern.at(0), torch.arange(seen)[None]
        keys = TokenLayout.build(torch.full_like(place, VIDEO), frame=place // s.tokens)
        queries = keys.take(place[0, seen - n :])
        listed = min(at.expected_blocks(n, seen, (queries, keys)) * at.block**2, causal + n * at.block)
        sparse = min(line(s.heads * listed) for line in costs.sparse.values()) + costs.planning(seen)
        # On a CPU nothing is measured, and the pattern always runs.
        return min(sparse, dense) if self.device.cuda else sparse

    # A question.

    @property
    def _shown(self) -> int:
        """Columns that a question sees: all, or those that are recalled beside the local ones."""
        units = self.units
        if self.archived:
            units = min(units, -(-(self.kv.frames + self.kv.local) // self.sizes.pace))
        return units * self.sizes.tokens

    def _question(self) -> float:
        s, device, n = self.sizes, self.device, self.work.words
        if not self.session:
            return TOKEN_S  # the prompt's pass holds it
        work = max(self._weights_s(), 2 * s.layer_weights * n / device.product(s.hidden))
        work += self._shown * s.column / device.copy + s.layers * device.attend.dense(
            n * self._shown * s.heads
        )
        starts = s.layers * EAGER * device.layer * (SEARCHED if self.archived else ASKED)
        if not self.archived:
            return self._beside(work, starts) + TOKEN_S
        wire = min(self.kv.frames // s.pace, self.units) * s.tokens * s.column / device.wire
        if not device.cuda:
            return work + starts + wire
        return work + s.layers * RETRIEVE_S + (1 - HIDDEN) * wire

    def _token(self) -> float:
        s, device = self.sizes, self.device
        work = self._weights_s() + self._shown * s.column / device.copy
        starts = s.layers * EAGER * device.layer
        if not device.cuda:
            return work + starts
        replayed = STEP_S if not self.session else ANSWER_S if self.archived else 0.0
        return TOKEN_S + (work + s.layers * replayed if replayed else max(work, starts))

    def _weights_s(self) -> float:
        """Reading the weights of the language model once."""
        return (self.sizes.layer_weights + self.sizes.head_weights) * self.size / self.device.copy

    # Bytes.

    def _bytes(self) -> tuple[float, float, float, float]:
        """Bytes that the weights and the memory hold on the device when all has been read; what more is held while it is read,
        and when an ingestion has ended; and the host's."""
        s, units, whole = self.sizes, self.units, self.units * self.sizes.tokens
        held, host, most, last = _roomy(whole + self.work.words + self.work.answer), 0, 0.0, 0
        if self.archived:
            window = min(units, -(-self.kv.window // s.pace)) * s.tokens
            # Keys as they were and turned, and values; what a question is shown stays where it was.
            held = window * 3 // 2 + self._shown + min(units, self.kv.cache // s.pace) * s.tokens
            host = max(0, whole - window) * s.column
            host = -(-host // SLAB) * SLAB
            host = min(host, self.work.host) if self.kv.spill == "drop_oldest" else host
        before = 0
        for n, seen in self._passes():
            after = min(held, seen * 3 // 2) if self.archived and self.work.live else _roomy(seen)
            # A windowed memory moves what is new when the pass has ended.
            new = n if self.archived else 0
            tower, layer = self._tower_bytes(n), self._layer_bytes(n, seen)
            most = max(most, before * s.column + tower, (after + new) * s.column + layer)
            before = after
            if self.archived and not self.work.live:
                last = after + window * 3 // 2
        fixed, kept = s.weights * self.size, held * s.column
        return fixed + kept, max(0.0, most - kept), max(0.0, last * s.column - kept), host

    def _tower_bytes(self, n: int) -> float:
        """Patches in the tower, those of a call; pixels; and the features of all."""
        s, units = self.sizes, -(-n // self.sizes.tokens)
        some = min(units * s.patches, max(PATCHES, s.patches))
        return float(some * s.patch_row + units * s.pixels + n * s.hidden) * self.size

    def _layer_bytes(self, n: int, seen: int) -> float:
        """Rows in a layer: features, the states that enter, leave and are normed, then queries, keys and values and what turns
        them, or the gate, of so many rows at a time."""
        s = self.sizes
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = n * (3 * s.hidden + 3 * wide + 4 * narrow) + seen * narrow
        gate = n * 4 * s.hidden + min(n, ROWS) * 3 * s.inner
        return float(max(attention, gate) + n * (s.hidden + 2 * s.head_dim)) * self.size


def _roomy(columns: int) -> int:
    """Columns of a buffer that grows ahead."""
    return columns + min(max(columns // 8, 256), ROOM)
