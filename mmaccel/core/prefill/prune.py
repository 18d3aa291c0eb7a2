"""The contract of a token pruner: which visual tokens are worth keeping, judged by signals of a model's prefill.

And what reads such signals while the layers run, a `Probe`.

Visual tokens are those of images and of videos. Letters: S columns, m visual tokens that may go, n rows of text, E hidden
size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.errors import SHARE, RecipeError, UnknownName, limited, one_of, warn
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.kv import KVState
from mmaccel.core.registry import Policy

SIGNALS = ("hidden", "attention", "vision_attention", "vision_key")
"""What a pruner may need; all float, without a batch axis.

hidden            [k, S, E]: what enters the decoder after `Stage.hidden[k]` layers (0: the input embeddings)
attention         [k, n, S]: the attention that the rows which see all visual tokens (`observers`) pay to every column, a
                  mean over heads and over the layers of the group `Stage.attention[k]`
vision_attention  [S]: the attention a visual token receives within its frame or tile in the vision tower; 0 elsewhere
vision_key        [S, D]: its key there, a mean over heads; 0 elsewhere
"""


class Signals(dict[str, Tensor]):
    """The signals that a pruner reads at one layer; reading one that it did not declare raises an error."""

    def __missing__(self, name: str) -> Tensor:
        raise RecipeError(
            f"prune: keep reads {name!r}, which is not there; put it in needs, and its layers in the stage."
        )


NO_COLUMNS = TokenLayout.text(1, 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillPass:
    """The values of a pass over new columns ``start .. start + n`` of a batch that a `Probe` reads.

    layout  every column up to the last new one; of a stream none
    state   the memory; None: the caller hands over all keys
    """

    layout: TokenLayout = NO_COLUMNS
    start: int = 0
    state: KVState | None = None


class Probe:
    """Reads what the layers of one pass compute, and no other; an error raised here ends it. Override what is to be read."""

    def entering(self, run: PrefillPass, layer: int, hidden: Tensor) -> None:
        """`hidden` [B, n, E], the new columns of `run`, enters `layer`; where `layer` is the number of layers, it leaves
        the last one.

        Called only for the layers that the draft's pruner of the attached recipe reads.
        """

    def attending(
        self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        """Inputs of the attention of `layer`, before it is computed: query [B, H, n, D]; key, value [B, G, N, D]."""


@dataclass(frozen=True)
class Stage:
    """One place at which a pruner drops tokens of a prompt.

    layer      decoder layers that have run before it; 0 is before the language model
    hidden     the states it reads, each by the number of layers run before it, at most `layer`
    attention  the layers whose attention it reads, in groups that are averaged; between layers of the target, `layer`
               itself or the one before
    share      the share of the prompt's candidates that is left by it
    """

    layer: int
    hidden: tuple[int, ...] = ()
    attention: tuple[tuple[int, ...], ...] = ()
    share: float = 1.0

    def count(self, at: Tensor, total: int | None) -> int:
        """How many of the candidates `at` [m] stay, `total` being those that the prompt had before any cut (None: m)."""
        return min(quota(self.share, at.numel() if total is None else total), at.numel())


@dataclass(frozen=True, eq=False)
class Kept:
    """Result of a cut: the kept columns [n], ascending, and their new states [n, E], or None if these are unchanged."""

    columns: Tensor
    states: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TokenPruner(Policy, ABC, kind="prune"):
    """Chooses the columns to keep, from signals it declares. Text and marks (such as LLaVA's newline) always stay.

    stage   whose columns go: those of the target before its language model ("frames") or between its layers ("layer"), or
            those of a "draft"'s prompt, by signals of the target, whose own output then stays as it is
    needs   names of `SIGNALS` it reads
    prunes  the modalities it prunes: images, videos or both; tokens of others stay
    group   frames (or temporal patches) that it prunes together

    compact  number the kept tokens anew, 0, 1, 2, ... on every rotary axis; otherwise each keeps its own position, so that
             M-RoPE's time and place stay true, and text stands where it stood
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
        """[m] the columns of `layout` (batch 1) that it may drop; none: it does nothing to such a prompt."""
        at = candidates(layout)
        prunes = torch.tensor(sorted(self.prunes), device=at.device)
        return at[torch.isin(layout.modality[0, at], prunes)]

    @abstractmethod
    def stages(self, depth: int) -> tuple[Stage, ...]:
        """The cuts of a model of `depth` layers, by layer, ascending; a draft's pruner has one.

        Raises `RecipeError` for a model that is too shallow.
        """

    @abstractmethod
    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        """[n] long, ascending: the columns of `layout` (batch 1) that stay at the cut `stage`.

        Signals have the columns of `layout`, in which earlier cuts are done. `total` is how many candidates the prompt had
        before any cut, which retention is counted in; None: those of `layout`.
        """

    def cut(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Kept:
        """What `keep` keeps, and the states it has from here on where it takes up what is dropped."""
        return Kept(self.keep(signals, layout, stage, total))

    def on_stream(self) -> TokenPruner | None:
        """What acts in its place on a stream, where a question sees keys and values of what was read before it and no
        states; None: it has no part in one. A pruner of stage "layer" acts on what the question recalls (`RecallPruning`),
        in layouts whose frames are the units shown, by rank, with no cells. A `compact` one of stage "frames" acts on each
        `group` of frames before it is stored, as one unit, of which it leaves `left`."""
        return self if self.stage == "layer" and self.needs <= {"attention"} else None

    def left(self, tokens: int) -> int:
        """How many tokens it leaves on a stream of a group of frames of `tokens` each."""
        raise RecipeError(
            f"prune {self.name!r} does not say how many tokens of a frame are left; write left."
        )

    @property
    def scoring_layer(self) -> int | None:
        """The layer by whose attention a decoded token's view of the video is chosen, for all layers after it; or None."""
        return None

    def recall(self, attention: Tensor, columns: Tensor, before: Tensor | None) -> Tensor | None:
        """The cached columns of candidates that a decoded token sees: [n] long, ascending, out of `columns` [m].

        attention [m]: the token's attention to them at `scoring_layer`, a mean over heads. before [m]: the same at the step
        before, or None at the first. None: those chosen last stay.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class QuotaPruner(TokenPruner):
    """A pruner that keeps a share of the candidates: authors write `choose`, and `stages`.

    retention  the share of the candidates that stays, rounded down to a whole token
    """

    retention: float = limited(0.1, SHARE)

    @abstractmethod
    def choose(self, signals: Signals, layout: TokenLayout, at: Tensor, count: int) -> Tensor:
        """[count] which of the candidates stay, by their place in `at` [m], their columns of `layout`; 0 <= count < m."""

    def keep(self, signals: Signals, layout: TokenLayout, stage: Stage, total: int | None = None) -> Tensor:
        at = candidates(layout)
        count = stage.count(at, total)
        return staying(layout, at if count == at.numel() else at[self.choose(signals, layout, at, count)])


@dataclass(frozen=True, kw_only=True)
class ScorePruner(QuotaPruner):
    """A pruner that scores every candidate and keeps the best: authors write `score`, and `stages`."""

    @abstractmethod
    def score(self, signals: Signals, layout: TokenLayout, at: Tensor) -> Tensor:
        """Scores [m] of the candidate tokens in columns `at` [m] of `layout`; the highest are kept."""

    def choose(self, signals: Signals, layout: TokenLayout, at: Tensor, count: int) -> Tensor:
        told = signals.get("score")  # [S]: of a stream (`core.streams.listening`)
        return best(self.score(signals, layout, at) if told is None else told[at], count)


def checked_stages(pruner: TokenPruner, depth: int) -> tuple[Stage, ...]:
    """The cuts of a model of `depth` layers; raises `RecipeError` for what `pruner` declares and no model can give."""
    who, stages = f"prune {pruner.name!r}", tuple(pruner.stages(depth))
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


def checked_columns(pruner: TokenPruner, columns: Tensor, layout: TokenLayout) -> Tensor:
    """`columns` that `pruner` keeps of `layout`; raises `RecipeError` where it must not keep these. One device read."""
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
        "drops columns that are not visual; keep every column but those of `candidates` (`staying` does)",
    )
    if any(wrong):
        raise RecipeError(f"{who} {messages[wrong.index(True)]}.")
    return columns


def quota(share: float, count: int) -> int:
    """How many of `count` tokens `share` of them is, rounded down; 0.29 of 100 is 29, whatever the binary fraction says."""
    return int(share * count + 1e-9)


def candidates(layout: TokenLayout) -> Tensor:
    """[m] the columns that a pruner may drop, in a layout of one sequence: the tokens of images and video frames."""
    return _may_go(layout).nonzero()[:, 0]


def _may_go(layout: TokenLayout) -> Tensor:
    """Which tokens belong to a frame, or to the finer tiles of an image: those with a cell. Marks have no cell."""
    celled = (layout.frame[0] >= 0) | (layout.row[0] >= 0)
    return (layout.modality[0] != TEXT) & celled & layout.valid[0]


def frames(layout: TokenLayout) -> list[Tensor]:
    """Indices of the candidate tokens of each frame, in order. An image counts as a frame, and all its tiles as another."""
    at = candidates(layout)
    number = torch.stack([layout.segment[0, at], layout.frame[0, at]])
    sizes = torch.unique_consecutive(number, return_counts=True, dim=1)[1]
    return list(torch.split(at, sizes.tolist()))


def alike(layout: TokenLayout) -> list[Tensor]:
    """The candidates of the frames of each size, [frames, size]: what is done with every frame is done at once."""
    by_size: dict[int, list[Tensor]] = {}
    for frame in frames(layout):
        by_size.setdefault(len(frame), []).append(frame)
    return [torch.stack(same) for same in by_size.values()]


def staying(layout: TokenLayout, *chosen: Tensor) -> Tensor:
    """[n] ascending: the `chosen` candidates and every column that is no candidate."""
    stays = ~_may_go(layout)
    if chosen:
        stays[torch.cat(chosen)] = True
    return stays.nonzero()[:, 0]


def others(chosen: Tensor, among: int) -> Tensor:
    """[among - n] ascending: the places out of `among` that are not `chosen` [n]."""
    left = torch.ones(among, dtype=torch.bool, device=chosen.device)
    left[chosen] = False
    return left.nonzero()[:, 0]


def question(layout: TokenLayout) -> Tensor:
    """[n] the columns of the question.

    The text after the last visual token, and what stands of the same message before it; that alone where nothing but the
    markup of the chat follows. Where the chat's markup is not known (`TokenLayout.asked` is empty) the text after the last
    visual token, all text where none follows. A sequence without text is asked by its last column.
    """
    rows = (layout.asked[0] & layout.valid[0]).nonzero()[:, 0]
    if rows.numel():
        return rows
    text, after = _text(layout)
    rows = text[after] if bool(after.any()) else text
    return rows if rows.numel() else rows.new_tensor([layout.length - 1])


def observers(layout: TokenLayout, last: int | None = None) -> Tensor:
    """[n] the columns whose attention to the visual tokens is read: the text after the last of them, which has read the
    question wherever that stands; the last column where no text follows, for none before it sees them all. All text where
    there is no visual token. `last`: of the last columns alone, those of a turn."""
    text, after = _text(layout)
    if last is not None:
        after = after & (text >= layout.length - last)
    return text[after] if bool(after.any()) else text.new_tensor([layout.length - 1])


def _text(layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """[n] the columns of text, and whether each comes after the last visual token."""
    rows = ((layout.modality[0] == TEXT) & layout.valid[0]).nonzero()[:, 0]
    visual = (layout.modality[0] != TEXT).nonzero()[:, 0]
    return rows, rows > (visual[-1] if visual.numel() else -1)


def best(score: Tensor, count: int) -> Tensor:
    """Indices [count] of the largest scores, ascending. Of equal scores the first counts, on every device."""
    return score.float().sort(descending=True, stable=True).indices[:count].sort().values


def spread(count: int, among: int, device: torch.device | str = "cpu") -> Tensor:
    """[count] ascending, distinct: `count` of `among` places, in the middles of `count` equal stretches."""
    return ((2 * torch.arange(count, device=device) + 1) * among).div(
        2 * max(count, 1), rounding_mode="floor"
    )


def thin(layout: TokenLayout, columns: Tensor) -> TokenLayout:
    """The layout of what stays: frames, cells and segments as they were, ranks among what stays."""
    left = layout.take(columns)
    return replace(left, position=(left.valid.long().cumsum(1) - 1).clamp(min=0))
