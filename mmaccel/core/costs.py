"""Predicts seconds and bytes for a video and its questions under a recipe, from a model's sizes and a device's rates.

Nothing is fitted to a whole run. A model's sizes are counted (`ModelSizes`), a device's rates measured once, or known
(`DEVICES`). Each term is work over a rate:

products   2 FLOPs for each weight and row, at the rate of a large product of that width
pairs      causal query-key pairs at the measured cost of attention (`measure.Costs`), dense, or listed by the pattern
traffic    what norms, gates, RoPE and copies read and write, at the rate of a copy
launches   starting the operators of a layer: on CUDA in parallel with the device's work, on a CPU before it
decode     weights and visible keys and values, read once a token
wire       retrieved keys and values, copied from the host
pinning    page-locking the host memory for units that leave the device; a process pays only for its largest amount so far
surplus    seconds beyond all of these that measured short sessions of a few layers took (`rates.MeasuredOverhead`)

Letters: n rows of a pass, N columns that they see, L layers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.prefill.attention import MIN_ROWS
from mmaccel.core.rates import DeviceRates, ModelSizes, predict_plane_seconds
from mmaccel.core.recipe import Recipe

STEP_S, RETRIEVE_S, ANSWER_S = 16e-6, 6e-4, 4e-5
"""Seconds of a layer that CUDA replays: of a step (steps_h200: 4.05 ms where weights and keys take 3.6), of a question that
retrieves (stream_h200: 21.7 ms with one frame), and of its answer."""
TOLD = 3.7
"""Tokens that a step gives where a draft's windows of 5 are kept to 0.8, as benchmarks replay it."""
EAGER, ASKED, SEARCHED = 2.4, 2, 3
"""A layer under a recipe or in a session starts so many times what a plain one does, for hooks and the memory (steps of the
tiny models after 30 frames); a question starts as much as so many passes of one row, with its words and what its answer
rests on, and as so many where it retrieves."""
CLUSTER_S = 1.3e-3
"""The host's part of a unit that a memory by clusters takes in (stream_h200, splits: 1.3 to 1.5 ms at a 7B's 28 layers)."""
TOKEN_S = 4e-4
"""The host's part of a token: the choice, the text."""
HIDDEN = 0.6
"""Of the wire's seconds, hidden behind layers by the prefetch (stream_h200: 15 ms of a question's 26)."""
ROWS, PATCHES, UNITS, ROOM, SLAB = 1 << 15, 1 << 14, 16, 8192, 1 << 24
"""Rows of a pass of an ingestion (on CUDA twice as many) and of a feed-forward block, patches of a tower's call, units of a
pass of live frames, the most columns that a buffer grows ahead, and bytes that a host store takes at a time."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload to predict: a video or stream of `frames` frames, `questions` of `words` tokens each, answers of `answer`
    tokens.

    live    whether the frames come from a camera as they are watched
    memory, host  bytes of device and host memory that may be used
    step_tokens  tokens per decode step with the recipe's draft; None: assume 3.7 (`TOLD`) with a draft model, else 1
    """

    frames: int
    questions: int = 1
    answer: int = 64
    words: int = 40
    live: bool = False
    memory: int
    host: int
    step_tokens: float | None = None


@dataclass(frozen=True)
class PredictedCost:
    """Predicted seconds to read the video (`read_s`), to a question's first token (`question_s`), and per later token
    (`token_s`); peak bytes on device and host.

    session  whether this is for a `VideoSession`, not for a call of `generate`
    once_s   for each of the first questions, the extra seconds that one-off work takes, such as CUDA graph captures
    """

    read_s: float
    question_s: float
    token_s: float
    device_bytes: int
    host_bytes: int
    session: bool
    work: Workload
    once_s: tuple[float, ...] = ()

    @property
    def first_s(self) -> float:
        """Predicted seconds to the first token of the first answer, with reading the video unless it is a live stream."""
        return self.question_s + sum(self.once_s[:1]) + (0.0 if self.work.live else self.read_s)

    @property
    def total_s(self) -> float:
        """Predicted seconds for reading the video and answering all questions, one after the other."""
        return (
            self.read_s
            + self.work.questions * self.question_and_answer_s
            + sum(self.once_s[: self.work.questions])
        )

    @property
    def question_and_answer_s(self) -> float:
        """Predicted seconds for one question with its whole answer."""
        return self.question_s + self.work.answer * self.token_s


def needs_video_session(recipe: Recipe, work: Workload) -> bool:
    """Return whether `work` needs a `VideoSession`; a call of `generate` serves any other."""
    return work.live or work.questions > 1 or not recipe.kv.sequences


def overhead_key(recipe: Recipe, work: Workload) -> str:
    """Return the key under which measured corrections to the predicted seconds (`MeasuredOverhead`) are stored for `work`.

    The key is a text of the kind of run (a live stream, a session, or one call of `generate`) and of all fields of `recipe`
    but the draft.
    """
    how = "live" if work.live else "session" if needs_video_session(recipe, work) else "call"
    told = {name: part for name, part in recipe.to_dict().items() if name != "draft"}
    return f"{how} {json.dumps(told, sort_keys=True, default=str)}"


def predict_cost(
    recipe: Recipe, sizes: ModelSizes, work: Workload, device: DeviceRates, draft: ModelSizes | None = None
) -> PredictedCost:
    """Predict the cost of `work` under `recipe`: of a call of `generate`, or of a session if the work needs one
    (`needs_video_session`). `draft`: the sizes of the recipe's draft model, which reads the video too."""
    return _Estimate(recipe, sizes, work, device, draft).cost()


class _Estimate:
    """The terms of one recipe on one model."""

    def __init__(
        self, recipe: Recipe, sizes: ModelSizes, work: Workload, device: DeviceRates, draft: ModelSizes | None
    ) -> None:
        self.recipe, self.sizes, self.work, self.device, self.draft = recipe, sizes, work, device, draft
        self.kept = recipe.kv.footprint(sizes.tokens, sizes.frames_per_unit)
        self.session = needs_video_session(recipe, work)
        self.units = -(-work.frames // sizes.frames_per_unit)
        self.units = min(self.units, self._of(self.kept.shown)) if self.kept.deferred else self.units
        self.size = sizes.dtype.itemsize
        self.other: _Estimate | None = None
        if draft is not None:
            # A session's draft watches the frames; in `generate` it reads what its pruner leaves of each unit.
            pruner, own = recipe.draft.pruner, Recipe(kv=recipe.kv)
            share = 1.0 if self.session or pruner is None else pruner.pruning_stages(sizes.layers)[-1].share
            draft = replace(draft, tokens=max(1, round(draft.tokens * share)))
            self.other = _Estimate(own, draft, replace(work, live=self.session), device, None)

    def cost(self) -> PredictedCost:
        read, question, token = self._read(), self._question(), self._token()
        once: tuple[float, ...] = ()
        if (told := self.device.sessions.get(overhead_key(self.recipe, self.work))) is not None:
            size = self.sizes.layers, self.units
            # What was measured at other sizes is taken to halve a term at most.
            read = max(read + predict_plane_seconds(told.read, *size), read / 2)
            question = max(question + predict_plane_seconds(told.question, *size), question / 2)
            token = max(token + predict_plane_seconds(told.step, *size), token / 2)
            once = tuple(max(0.0, base + each * self.sizes.layers) for base, each in told.first)
        held, passing, leaving, host = self._bytes()
        if self.other is not None:
            token += (self.recipe.draft.max_rollback - 1) * self.other._token()
            read, question = read + self.other._read(), question + self.other._question()
            more, other, last, beside = self.other._bytes()
            held, passing, leaving, host = held + more, max(passing, other), max(leaving, last), host + beside
        if self.kept.deferred:
            read, question = 0.0, question + read
        token /= self.work.step_tokens or (1.0 if self.other is None else TOLD)
        most = held + max(passing, leaving)
        if not self.device.cuda:  # nothing is on the host before it leaves
            host = most = held + max(passing, leaving + host)
        return PredictedCost(read, question, token, int(most), int(host), self.session, self.work, once)

    def _of(self, frames: int | None) -> int:
        """Units that so many frames are; None: all."""
        return self.units if frames is None else -(-frames // self.sizes.frames_per_unit)

    def _copied_s(self, columns: int) -> float:
        """Seconds of bringing so many columns, all that is seen, from the host, where the memory does so."""
        return columns * self.sizes.kv_bytes_per_token / self.device.wire * self.kept.copied

    # Passes.

    @property
    def _rows(self) -> int:
        """Rows of a pass: of a prompt, an ingestion or live frames."""
        sizes, whole = self.sizes, self.units * self.sizes.tokens
        most = self.recipe.chunk or (ROWS << self.device.cuda if self.session else max(whole, 1))
        if self.work.live:
            most = self.recipe.chunk or UNITS * sizes.tokens
        return min(whole, max(1, most // sizes.tokens) * sizes.tokens)

    @property
    def _seen(self) -> int:
        """Units that a pass sees at most, its own included: all, those under the window, or what an ingestion holds."""
        if self.kept.window is None:
            return self.units
        window = self._of(self.kept.window)
        if self.work.live:
            return window + UNITS
        if not self.session:  # what is appended goes when the pass has ended
            return min(self.units, window + self._rows // self.sizes.tokens)
        free = self.work.memory - self.sizes.weights * self.size
        fit = max(1, int(free / 2) // (self.sizes.kv_bytes_per_token * self.sizes.tokens))
        most = fit if self.kept.ingest is None else min(fit, self._of(self.kept.ingest))
        return min(most, self.sizes.limit // self.sizes.tokens)

    def _passes(self) -> Iterator[tuple[int, int]]:
        """Rows of each pass, and the columns that its last row sees."""
        tokens, step, done = self.sizes.tokens, self._rows // self.sizes.tokens, 0
        window = 1 if self.kept.window is None or self.work.live else self._of(self.kept.window)
        while done < self.units:
            # Each unit of a pass sees at least what it would under the window.
            count = min(step, self.units - done, max(1, self._seen - min(window - 1, done)))
            yield count * tokens, min(done + count, max(self._seen, count)) * tokens
            done += count

    def _read(self) -> float:
        seconds = self._tower()
        for n, seen in self._passes():
            seconds += self._pass(n, seen)
        if not self.work.live:  # units leave for the host, and into clusters, when all have been read
            seconds += self._leaving_s
        return seconds

    @functools.cached_property
    def _leaving_s(self) -> float:
        """Seconds in which the host pins memory for units, copies going on meanwhile, and puts them into clusters."""
        if self.kept.deferred:
            return 0.0  # frames are on the host as they come, and in memory of any kind
        slower = max(1 / self.device.wire, 1 / self.device.pin) * self.device.cuda
        return self._bytes()[3] * slower + self.kept.clusters * self.units * CLUSTER_S

    def _tower(self) -> float:
        """Patches through the vision tower: products, attention within a unit, and what else reads and writes them."""
        s, device, patches = self.sizes, self.device, self.units * self.sizes.patches
        products = 2 * s.tower_weights * patches / device.matmul_flops_per_s(s.tower_width)
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
        products = 2 * s.layer_weights * n / device.matmul_flops_per_s(s.hidden)
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        elements = n * (10 * s.hidden + 3 * s.inner + 4 * wide) + 4 * seen * narrow
        traffic = s.layers * elements * self.size / device.copy
        pairs = s.layers * self._pairs(n, seen)
        starts = s.layers * EAGER * device.layer
        if self.work.live:  # the host does meanwhile what an ingestion does at its end
            starts += n / (self.units * s.tokens) * self._leaving_s
        return self._beside(products + traffic + pairs, starts) + self._copied_s(seen)

    def _pairs(self, n: int, seen: int) -> float:
        """Seconds of attention of a layer: dense, or by the pattern where that runs."""
        s, costs, pattern = self.sizes, self.device.attend, self.recipe.sparse
        causal = n * (2 * seen - n + 1) / 2
        if self.kept.window is not None and (self.work.live or not self.session):
            under = n * min(seen, self.kept.window // s.frames_per_unit * s.tokens)
            causal = under if self.work.live else min(causal, under)
        dense = costs.dense(s.heads * causal)
        if pattern.dense or self.work.live or n < MIN_ROWS:
            return dense
        at, place = pattern.for_layer(0), torch.arange(seen)[None]
        keys = TokenLayout.build(torch.full_like(place, VIDEO), frame=place // s.tokens)
        queries = keys.select_tokens(place[0, seen - n :])
        listed = min(at.expected_blocks(n, seen, (queries, keys)) * at.block**2, causal + n * at.block)
        sparse = min(line(s.heads * listed) for line in costs.sparse.values())
        # A plan that follows from the layout is made once for all layers.
        sparse = costs.predict_sparse_layer_s(sparse, seen) if at.adaptive else sparse
        # On a CPU nothing is measured, and the pattern always runs.
        return min(sparse, dense) if self.device.cuda else sparse

    # A question.

    @property
    def _shown(self) -> int:
        """Columns that a question sees: all, or those that are recalled beside the local ones."""
        return min(self.units, self._of(self.kept.shown)) * self.sizes.tokens

    def _question(self) -> float:
        s, device, n = self.sizes, self.device, self.work.words
        if not self.session:
            return TOKEN_S  # the prompt's pass holds it
        work = max(self._weights_s(), 2 * s.layer_weights * n / device.matmul_flops_per_s(s.hidden))
        shown = self._shown * s.kv_bytes_per_token / device.copy
        work += shown + s.layers * device.attend.dense(n * self._shown * s.heads)
        starts = s.layers * self._launch_s * (SEARCHED if self.kept.recalled else ASKED)
        if not self.kept.recalled:
            return self._beside(work, starts) + TOKEN_S + self._copied_s(self._shown)
        brought = (
            0 if self.kept.host == 0 else min(self.kept.recalled // s.frames_per_unit, self.units) * s.tokens
        )
        wire = brought * s.kv_bytes_per_token / device.wire
        if not device.cuda:
            return work + starts + wire
        return work + s.layers * RETRIEVE_S + (1 - HIDDEN) * wire

    def _token(self) -> float:
        s, device = self.sizes, self.device
        work = self._weights_s() + self._shown * s.kv_bytes_per_token / device.copy
        work += self._copied_s(self._shown)
        starts = s.layers * self._launch_s
        if not device.cuda:
            return work + starts
        replayed = STEP_S if not self.session else ANSWER_S if self.kept.window is not None else 0.0
        return TOKEN_S + (work + s.layers * replayed if replayed else max(work, starts))

    @property
    def _launch_s(self) -> float:
        """Seconds in which the host launches a layer for few rows: on CUDA all but its attention is captured."""
        return self.device.few if self.device.cuda else EAGER * self.device.layer

    def _weights_s(self) -> float:
        """Reading the weights of the language model once."""
        return (self.sizes.layer_weights + self.sizes.head_weights) * self.size / self.device.copy

    # Bytes.

    def _bytes(self) -> tuple[float, float, float, float]:
        """Bytes that the weights and the memory hold on the device when all has been read; what more is held while it is
        read, and when an ingestion has ended; and the host's."""
        s, work, kept, whole = self.sizes, self.work, self.kept, self.units * self.sizes.tokens
        windowed, asked = kept.window is not None, work.words + work.answer
        part = 2 / s.layers if kept.copied else 1  # a layer at a time, as it was and joined
        held, most, last, before = _roomy(whole + asked) * part, 0.0, 0.0, 0.0
        window = min(whole, self._of(0 if kept.copied else kept.window) * s.tokens)
        host = min(whole - window, self._of(kept.host) * s.tokens) * s.kv_bytes_per_token
        host = -(-host // SLAB) * SLAB
        host = min(host, work.host) if kept.evicts else host
        if kept.deferred:  # frames, a byte a value
            host = min(-(-work.frames // s.frames_per_unit), self._of(kept.host)) * s.pixels
        # Of a session: keys as they were and turned, and values; what a question is shown stays where it was.
        ring, shown = (window * 3 // 2, self._shown) if self.session else (window, asked)
        if windowed:
            held = ring + shown + min(self.units, kept.cache // s.frames_per_unit) * s.tokens
        for n, seen in self._passes():
            after = min(held, seen * 3 // 2) if windowed and work.live else _roomy(seen) * part
            # A windowed memory moves what is new when the pass has ended.
            new = n if windowed else 0
            most = max(most, before * s.kv_bytes_per_token + self._tower_bytes(n))
            most = max(most, (after + new) * s.kv_bytes_per_token + self._layer_bytes(n, seen))
            before, last = after, after + ring if windowed and not work.live else 0.0
        fixed, stays = s.weights * self.size, held * s.kv_bytes_per_token
        return fixed + stays, max(0.0, most - stays), max(0.0, last * s.kv_bytes_per_token - stays), host

    def _tower_bytes(self, n: int) -> float:
        """Patches in the tower, those of a call; pixels; and the features of all."""
        s, units = self.sizes, -(-n // self.sizes.tokens)
        some = min(units * s.patches, max(PATCHES, s.patches))
        return float(some * s.patch_row + units * s.pixels + n * s.hidden) * self.size

    def _layer_bytes(self, n: int, seen: int) -> float:
        """Rows in a layer: features, the states that enter, leave and are normed, then queries, keys and values and what
        turns them, or the gate, of so many rows at a time."""
        s = self.sizes
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attention = n * (3 * s.hidden + 3 * wide + 4 * narrow) + seen * narrow
        gate = n * 4 * s.hidden + min(n, ROWS) * 3 * s.inner
        return float(max(attention, gate) + n * (s.hidden + 2 * s.head_dim)) * self.size


def _roomy(columns: int) -> int:
    """Columns of a buffer that grows ahead."""
    return columns + min(max(columns // 8, 256), ROOM)
