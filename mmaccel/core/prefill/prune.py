"""The interface of token pruners, which choose the visual tokens to keep by signals of a model's prefill; `ForwardProbe`
reads such signals while the layers run.

Visual tokens are those of images and of videos. Letters: S columns, m visual tokens that may be dropped, n rows of text, E
hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import TokenTree
from mmaccel.core.errors import RecipeError, UnknownName, warn
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.kv import KVState
from mmaccel.core.prefill.masked import BidirectionalImages
from mmaccel.core.registry import SHARE, Policy, limited, one_of

SIGNALS = ("hidden", "attention", "vision_attention", "vision_key")
"""What a pruner may need; all float, without a batch axis.

hidden            [k, S, E]: what enters the decoder after `Stage.hidden[k]` layers (0: the input embeddings)
attention         [k, n, S]: the attention that the `observation_columns`, which see all visual tokens, pay to every column,
                  a mean over heads and over the layers of the group `Stage.attention[k]`
vision_attention  [S]: the attention a visual token receives within its frame or tile in the vision tower; 0 elsewhere
vision_key        [S, D]: its key there, a mean over heads; 0 elsewhere
"""


class Signals(dict[str, Tensor]):
    """What a pruner reads at a stage: signal name -> tensor, for the names in its `needs`; `RecipeError` for any other."""

    def __missing__(self, name: str) -> Tensor:
        raise RecipeError(
            f"prune: keep reads {name!r}, which is not there; put it in needs, and its layers in the stage."
        )


NO_COLUMNS = TokenLayout.text(1, 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillPass:
    """What a `ForwardProbe` may read of a forward pass over new columns ``start .. start + n`` of a batch.

    layout  every column up to the last new one; empty for a stream, whose memory numbers its columns itself
    state   the KV memory that holds the keys; None without one: the probe is then given all keys
    """

    layout: TokenLayout = NO_COLUMNS
    start: int = 0
    state: KVState | None = None


class ForwardProbe:
    """Reads what the layers of one forward pass compute; subclasses override its methods. An error in one of them aborts the
    pass."""

    def read_layer_input(self, run: PrefillPass, layer: int, hidden: Tensor) -> None:
        """Read the input `hidden` [B, n, E] of `layer` for the new columns of `run`; the number of layers means the
        last layer's output. Called only for layers that the draft's pruner of the attached recipe reads."""

    def read_attention_inputs(
        self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        """Read the inputs of the attention of `layer`: query [B, H, n, D]; key, value [B, G, N, D]."""


@dataclass(frozen=True)
class ForwardPassInfo:
    """Facts of a pass that the multimodal model hands to the text model: the layout of the new columns, whether they are
    draft tokens to verify and their tree, probes, a `mask`, the `images` with bidirectional attention, and whether the
    caller reads the hidden state of the last row alone."""

    layout: TokenLayout | None = None
    mask: Tensor | None = None
    images: BidirectionalImages | None = None
    verify: bool = False
    branches: TokenTree | None = None
    probes: tuple[ForwardProbe, ...] = ()
    last_only: bool = False


NOTE = "mmaccel_note"
"""The keyword under which a `ForwardPassInfo` travels to the text model."""


@dataclass(frozen=True)
class Stage:
    """One point at which a pruner drops tokens of a prompt.

    layer      number of decoder layers run before it; 0 is before the language model
    hidden     the hidden states it reads, each by the number of layers run before it, at most `layer`
    attention  the layers whose attention it reads, in groups that are averaged; a stage between layers of the target may
               read only `layer` and the one before
    share      the share of the prompt's candidates that remains after it
    """

    layer: int
    hidden: tuple[int, ...] = ()
    attention: tuple[tuple[int, ...], ...] = ()
    share: float = 1.0

    def count_kept_tokens(self, at: Tensor, total: int | None) -> int:
        """Return how many of the candidate tokens `at` [m] this stage keeps; `total` is their number before all stages."""
        return min(share_token_count(self.share, at.numel() if total is None else total), at.numel())


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """What a pruning stage keeps: columns [n], ascending, and their new states [n, E] (None: unchanged)."""

    columns: Tensor
    states: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TokenPruner(Policy, ABC, kind="prune"):
    """Chooses which tokens to keep, by signals it declares. Text and marks (such as LLaVA's newline) are always kept.

    stage   which tokens are dropped: the target's before its language model ("frames") or between its layers ("layer"),
            or those of a "draft"'s prompt, by signals of the target, whose own output then does not change
    needs   names of `SIGNALS` it reads
    prunes  the modalities it prunes: images, videos or both; tokens of others stay
    group   frames (or temporal patches) that it prunes together

    compact  renumber the kept tokens 0, 1, 2, ... on every rotary axis; otherwise each keeps its original position, M-RoPE's
             time and place included
    """

    stage: ClassVar[Literal["frames", "layer", "draft"]]
    needs: ClassVar[frozenset[str]] = frozenset()
    prunes: ClassVar[frozenset[int]] = frozenset({IMAGE, VIDEO})
    group: ClassVar[int] = 1

    compact: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "seat" in vars(cls):
            warn(f"{cls.__name__}: seat is the former name; write stage: ClassVar = {vars(cls)['seat']!r}.")
            cls.stage = vars(cls)["seat"]

    def candidates(self, layout: TokenLayout) -> Tensor:
        """Return the columns [m] of `layout` (batch 1) that this pruner may drop; empty if it does nothing to the prompt."""
        at = candidate_columns(layout)
        prunes = torch.tensor(sorted(self.prunes), device=at.device)
        return at[torch.isin(layout.modality[0, at], prunes)]

    @abstractmethod
    def pruning_stages(self, depth: int) -> tuple[Stage, ...]:
        """Return the stages for a model of `depth` layers, by layer, ascending; a draft's pruner has one.

        Raises `RecipeError` for a model that is too shallow.
        """

    @abstractmethod
    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        """Return [n] long, ascending: the columns of `layout` (batch 1) to keep at `stage`.

        `signals` have the columns of `layout`, without those dropped at earlier stages. `total` is the number of candidates
        in the prompt before any stage, to which retention refers; None: those of `layout`.
        """

    def prune(
        self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None
    ) -> KeptTokens:
        """Return the columns that `keep` keeps, with new hidden states if dropped tokens are merged into kept ones."""
        return KeptTokens(self.keep(signals, layout, stage, total))

    def for_stream(self) -> TokenPruner | None:
        """Return the pruner to use on a stream, where a question sees cached keys and values but no hidden states; None:
        unsupported. A pruner of stage "layer" acts on what the question retrieves (`RetrievedTokenPruning`): its layouts
        count only the units shown, each as a frame, and have no cells. A `compact` one of stage "frames" acts on each
        `group` of frames before it is stored as one unit of `kept_token_count` tokens."""
        return self if self.stage == "layer" and self.needs <= {"attention"} else None

    def kept_token_count(self, tokens: int) -> int:
        """Return how many tokens this pruner keeps of a group of frames of `tokens` tokens each, on a video stream."""
        raise RecipeError(
            f"prune {self.name!r} does not say how many tokens of a frame are kept; write kept_token_count."
        )

    @property
    def scoring_layer(self) -> int | None:
        """The layer whose attention chooses which video tokens a decoded token sees in later layers; None: it sees all."""
        return None

    def recalled_columns(self, attention: Tensor, columns: Tensor, before: Tensor | None) -> Tensor | None:
        """Return the cached visual columns that a decoded token sees: [n] long, ascending, out of `columns` [m].

        attention [m]: the token's attention to them at `scoring_layer`, averaged over heads. before [m]: the same at the
        previous step, or None at the first. A result of None keeps the choice of the previous step.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class FixedRetentionPruner(TokenPruner):
    """A pruner that keeps a fixed share of the candidates: subclasses write `choose_candidates` and `pruning_stages`.

    retention  the share of the candidates that is kept, rounded down to a whole token
    """

    retention: float = limited(0.1, SHARE)

    @abstractmethod
    def choose_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor, count: int) -> Tensor:
        """Return [count] indices into `at` [m] (candidate columns of `layout`) of the tokens to keep; 0 <= count < m."""

    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        at = candidate_columns(layout)
        count = stage.count_kept_tokens(at, total)
        return with_unprunable_columns(
            layout, at if count == at.numel() else at[self.choose_candidates(signals, layout, at, count)]
        )


@dataclass(frozen=True, kw_only=True)
class ScorePruner(FixedRetentionPruner):
    """Scores all candidates and keeps the highest. Subclasses write `score_candidates` and `pruning_stages`."""

    @abstractmethod
    def score_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor) -> Tensor:
        """Return scores [m] of the candidate tokens in columns `at` [m] of `layout`; the highest are kept."""

    def choose_candidates(self, signals: Signals, layout: TokenLayout, at: Tensor, count: int) -> Tensor:
        told = signals.get("score")  # [S]: of a stream (`core.streams.listening`)
        return top_indices(self.score_candidates(signals, layout, at) if told is None else told[at], count)


def check_pruning_stages(pruner: TokenPruner, depth: int) -> tuple[Stage, ...]:
    """Return the stages of `pruner` for a model of `depth` layers; raises `RecipeError` if they cannot be run."""
    who, stages = f"prune {pruner.name!r}", tuple(pruner.pruning_stages(depth))
    for name in pruner.needs:
        if name not in SIGNALS:
            raise UnknownName(f"signal in needs of {who}", str(name), SIGNALS)
    one_of("frames", "layer", "draft").check(who, "stage", pruner.stage)
    layers = [stage.layer for stage in stages]
    if not layers or layers != sorted(set(layers)) or (pruner.stage != "layer" and len(layers) > 1):
        many = "one stage or more, by layer, ascending" if pruner.stage == "layer" else "one stage"
        raise RecipeError(f"{who}: stages are at layers {layers}; give {many}.")
    last = {"frames": 0, "layer": depth - 1, "draft": depth}[pruner.stage]
    between = pruner.stage == "layer"
    for stage in stages:
        if not between <= stage.layer <= last:
            raise RecipeError(
                f"{who}: a stage is at layer {stage.layer}; give {_layers(int(between), last)}."
            )
        low = max(stage.layer - 1, 0) if between else 0
        ahead = stage.layer if between else min(stage.layer, depth - 1)
        for field, read, least, most in (
            ("hidden", stage.hidden, 0, stage.layer),
            ("attention", [n for group in stage.attention for n in group], low, ahead),
        ):
            for n in read:
                if not least <= n <= most:
                    raise RecipeError(
                        f"{who}: the stage at layer {stage.layer} reads {field} of layer {n}; give {_layers(least, most)}."
                    )
    given = {name: any(getattr(stage, name) for stage in stages) for name in ("hidden", "attention")}
    for name, is_read in given.items():
        if is_read and name not in pruner.needs:
            raise RecipeError(f"{who}: a stage reads {name!r}; put it in needs too.")
        if name in pruner.needs and not is_read:
            raise RecipeError(f"{who}: needs has {name!r}; name the layers of it in a stage too.")
    absent = {"attention"} if pruner.stage == "frames" else {"vision_attention", "vision_key"}
    for name in sorted(pruner.needs & absent):
        raise RecipeError(
            f"{who}: needs has {name!r}, which stage {pruner.stage!r} is not given; choose another stage."
        )
    return stages


def _layers(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers from {first} to {last}"


def check_kept_columns(pruner: TokenPruner, columns: Tensor, layout: TokenLayout) -> Tensor:
    """Check the `columns` of `layout` that `pruner` keeps, and return them; raises `RecipeError`. One device read."""
    who = f"prune {pruner.name!r}: keep"
    if columns.dtype != torch.long or columns.ndim != 1:
        raise RecipeError(f"{who} gives {list(columns.shape)} {columns.dtype}; give columns [n], long.")
    stays = torch.zeros(layout.length + 1, dtype=torch.bool, device=columns.device)
    stays[columns.clamp(-1, layout.length)] = True
    outside = (columns < 0) | (columns >= layout.length)
    descends = columns[1:] <= columns[:-1]
    lost = ~stays[:-1] & ~_may_go(layout).to(columns.device)
    wrong = torch.stack([outside.any(), descends.any(), lost.any()]).tolist()
    messages = (
        f"gives a column that is not there; give columns below {layout.length}",
        "gives columns that do not ascend; sort them, and give each once",
        "drops columns that are not visual; keep all but `candidate_columns`, as `with_unprunable_columns` does",
    )
    if any(wrong):
        raise RecipeError(f"{who} {messages[wrong.index(True)]}.")
    return columns


def share_token_count(share: float, count: int) -> int:
    """Return `share` of `count` tokens, rounded down, exactly: 0.29 of 100 is 29 despite binary rounding."""
    return int(share * count + 1e-9)


def candidate_columns(layout: TokenLayout) -> Tensor:
    """Return the columns [m] that a pruner may drop, in a layout of one sequence: tokens of images and video frames."""
    return _may_go(layout).nonzero()[:, 0]


def _may_go(layout: TokenLayout) -> Tensor:
    """Which tokens belong to a frame, or to the finer tiles of an image: those with a cell. Marks have no cell."""
    celled = (layout.frame[0] >= 0) | (layout.row[0] >= 0)
    return (layout.modality[0] != TEXT) & celled & layout.valid[0]


def frame_columns(layout: TokenLayout) -> list[Tensor]:
    """Return the candidate columns of each frame, in order. An image is one frame, and all its tiles are another."""
    at = candidate_columns(layout)
    number = torch.stack([layout.segment[0, at], layout.frame[0, at]])
    sizes = torch.unique_consecutive(number, return_counts=True, dim=1)[1]
    return list(torch.split(at, sizes.tolist()))


def columns_by_frame_size(layout: TokenLayout) -> list[Tensor]:
    """Return the candidate columns of frames, grouped by frame size: a tensor [frames, size] for each size."""
    by_size: dict[int, list[Tensor]] = {}
    for frame in frame_columns(layout):
        by_size.setdefault(len(frame), []).append(frame)
    return [torch.stack(same) for same in by_size.values()]


def with_unprunable_columns(layout: TokenLayout, *chosen: Tensor) -> Tensor:
    """Return [n] ascending: the `chosen` candidates and every column that is not a candidate."""
    stays = ~_may_go(layout)
    if chosen:
        stays[torch.cat(chosen)] = True
    return stays.nonzero()[:, 0]


def complement_indices(chosen: Tensor, among: int) -> Tensor:
    """Return [among - n] ascending: the indices below `among` that are not in `chosen` [n]."""
    left = torch.ones(among, dtype=torch.bool, device=chosen.device)
    left[chosen] = False
    return left.nonzero()[:, 0]


def question_text_columns(layout: TokenLayout) -> Tensor:
    """Return the columns [n] of the question.

    They are the words of the last user message, before and after its visual tokens, without chat markup
    (`TokenLayout.asked`). If the chat markup is unknown (`asked` is empty): the text after the last visual token, or all
    text if none follows; without text, the last column.
    """
    rows = (layout.asked[0] & layout.valid[0]).nonzero()[:, 0]
    if rows.numel():
        return rows
    text, after = _text(layout)
    rows = text[after] if bool(after.any()) else text
    return rows if rows.numel() else rows.new_tensor([layout.length - 1])


def observation_columns(layout: TokenLayout, last: int | None = None) -> Tensor:
    """Return the columns [n] whose attention to the visual tokens is read: the text after the last visual token, or, if none
    follows, the last column, as no earlier row sees them all. Without visual tokens, all text. `last`: only from the `last`
    columns, which are the current turn."""
    text, after = _text(layout)
    if last is not None:
        after = after & (text >= layout.length - last)
    return text[after] if bool(after.any()) else text.new_tensor([layout.length - 1])


def _text(layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """[n] the columns of text, and whether each comes after the last visual token."""
    rows = ((layout.modality[0] == TEXT) & layout.valid[0]).nonzero()[:, 0]
    visual = (layout.modality[0] != TEXT).nonzero()[:, 0]
    return rows, rows > (visual[-1] if visual.numel() else -1)


def top_indices(score: Tensor, count: int) -> Tensor:
    """Return the indices [count] of the largest scores, ascending; of equal scores the first, on every device."""
    return score.float().sort(descending=True, stable=True).indices[:count].sort().values


def evenly_spaced(count: int, among: int, device: torch.device | str = "cpu") -> Tensor:
    """Return [count] ascending, distinct: `count` indices below `among`, evenly spaced."""
    return ((2 * torch.arange(count, device=device) + 1) * among).div(
        2 * max(count, 1), rounding_mode="floor"
    )


def kept_layout(layout: TokenLayout, columns: Tensor) -> TokenLayout:
    """Return the layout of only the given columns: frames, cells and segments unchanged, positions renumbered."""
    left = layout.select_tokens(columns)
    return replace(left, position=(left.valid.long().cumsum(1) - 1).clamp(min=0))
