"""Speculative decoding: the interface of drafts, which propose the next tokens, and the verification of proposals.

The committed tokens are what the target alone would produce. Greedy: the longest prefix that agrees with the target's own
choices, then its next choice. Sampling: the accept rule of speculative sampling (Leviathan et al. 2023, arXiv 2211.17192,
Algorithm 1; Chen et al. 2023, arXiv 2302.01318): token x drawn from q is kept with probability min(1, p(x) / q(x)); at the
first rejection a token of the residual (p - q)+ is committed; if all are kept, a bonus token of p. A greedy token is the
case q(x) = 1.

Letters: n proposed tokens, V vocabulary of the target, S tokens before the proposal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.core.adapter import Columns, ModelView, Runner, TokenTree
from mmaccel.core.decoding.replay import LazilyCompiled
from mmaccel.core.decoding.watching import DraftStream, DraftStreamSettings
from mmaccel.core.errors import DraftError
from mmaccel.core.memory.kv import KVPolicy
from mmaccel.core.prefill.prune import ForwardProbe, TokenPruner
from mmaccel.core.registry import Policy, refuse_former_names

Warp = Callable[[Tensor, Tensor], Tensor]
"""(ids [S] before a token, its raw logits [V]) -> the probabilities [V] it is drawn from; one-hot if processors decide."""

FAULTS = (
    "the draft's q has mass beyond the target's {} tokens; cut its logits to them first.",
    "a row of the draft's q does not sum to one; give the distribution its token was drawn from.",
    "the draft's q gives a proposed token probability zero; give the distribution it was drawn from.",
)
UNIT_SLACK = 1e-3
"""How far the sum of a distribution over a large vocabulary may lie from one by rounding."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """Draft tokens that the target verifies in one pass.

    ids [n] long (n may be 0: then the target decodes one token by itself). parents [n] long or None: index among `ids` of
    each token's parent, an earlier token, or -1 for the last committed token; None is a chain. Children of one parent are
    distinct tokens, chosen deterministically (q is None). q [n, V] or None: the distribution each token was drawn from; None
    is a point mass (greedy or looked up).
    """

    ids: Tensor
    parents: Tensor | None = None
    q: Tensor | None = None

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Proposal:
        return cls(torch.empty(0, dtype=torch.long, device=device))

    def concatenate(self, other: Proposal) -> Proposal:
        """Return this proposed chain of tokens followed by the tokens of chain `other`."""
        if not other.ids.numel():
            return self
        if not self.ids.numel():
            return other
        q = None
        if self.q is not None or other.q is not None:
            vocab = (self.q if self.q is not None else other.q).shape[-1]  # type: ignore[union-attr]
            odds = [one.distributions(vocab) for one in (self, other)]
            if odds[0].shape[1] != odds[1].shape[1]:
                raise DraftError(
                    f"DraftState.tail has a q over {odds[1].shape[1]} tokens and the proposal one over {odds[0].shape[1]}; "
                    "give both over the target's vocabulary."
                )
            q = torch.cat([odds[0], odds[1].to(odds[0])])
        return Proposal(torch.cat([self.ids, other.ids.to(self.ids)]), q=q)

    def distributions(self, vocab: int) -> Tensor:
        """Return the distribution [n, vocab] float32 of each token: `q`, or one-hot rows if it is None."""
        if self.q is not None:
            return self.q
        return (self.ids[:, None] == torch.arange(vocab, device=self.ids.device)).float()

    @cached_property
    def branches(self) -> TokenTree:
        """The `TokenTree` of a token tree's verification (rows: the last committed token, then `ids`); on the host."""
        assert self.parents is not None
        parents = self.parents.tolist()
        sees = torch.eye(len(parents) + 1, dtype=torch.bool)
        depth = [0]
        for row, parent in enumerate(parents, 1):
            sees[row] |= sees[parent + 1]
            depth.append(depth[parent + 1] + 1)
        return TokenTree(sees, torch.tensor(depth))


@dataclass(frozen=True)
class Prompt:
    """Input of a draft: the raw model inputs (ids, pixels, grids), the ids [1, S], and the sampling settings.

    `warp` turns the raw logits of one token into the distribution it is drawn from (temperature, top-k, penalties, given the
    ids before it), or is None for greedy decoding. `max_new_tokens` 0 means that no limit is known. `stream`: in a session,
    the draft's own video stream, prepared for the question; `inputs` then have only ids. In a later turn of a conversation
    `past` are the columns in the target's KV cache, `inputs` only what follows them, `previous_state` what the last turn's
    `state_for_next_turn` returned. `lasts`: whether another turn may follow. `deadline`: when the call of `generate` ends.
    """

    inputs: Mapping[str, Any]
    ids: Tensor
    warp: Warp | None = None
    generator: torch.Generator | None = None
    max_new_tokens: int = 0
    stream: DraftStream | None = None
    past: Columns | None = None
    previous_state: Any = None
    lasts: bool = False
    deadline: Any = None


@dataclass(frozen=True, eq=False)
class DraftStep:
    """A request to run one step of a draft model: `runner` over `ids` [n]. The draft gets back the last token's logits
    [vocab], or only their argmax [1] if `greedy`; tokens of `never` are excluded."""

    runner: Runner
    ids: Tensor
    vocab: int
    never: tuple[int, ...] = ()
    greedy: bool = True

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """A key: the logits of steps with equal keys can be reduced by one call of `reduce_logits`."""
        return self.vocab, self.never, self.greedy

    def reduce_logits(self, logits: Tensor) -> Tensor:
        """Turn the logits [m, V] of m steps into what their drafts get: logits [m, vocab], or argmax [m, 1] if `greedy`."""
        logits = resize_vocab(logits, self.vocab, float("-inf"))
        if never := [token for token in self.never if token < self.vocab]:
            logits = logits.index_fill(1, torch.tensor(never, device=logits.device), float("-inf"))
        return logits.argmax(-1, keepdim=True) if self.greedy else logits


Drafting = Generator[DraftStep, Tensor, Any]
"""Work of a draft, which is sent what each of its steps says."""


class DraftState(ABC):
    """Drafts one sequence in one turn. `chooses`: obeys `most` of `draft_steps`; `unread`: has not prefilled the prompt."""

    chooses, unread = False, False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_names(cls)

    @abstractmethod
    def begin(self, prompt: Prompt) -> None:
        """Take the prompt that the draft will continue; called once, before the target's prefill."""

    def prompt_pruner(self, given: TokenPruner | None) -> TokenPruner | None:
        """Return the pruner of the draft's prompt: `given` (the recipe's), or None to read all. Called after `begin`."""
        return given

    def keep_columns(self, columns: Tensor) -> None:
        """Take the columns [n] of the prompt and of `Prompt.past` that the pruner keeps for the draft; called once, between
        `begin` and the first `observe_committed`, as soon as the target's early layers have run."""
        raise DraftError(f"{type(self).__name__} cannot prune what its draft sees; leave prune out.")

    def target_prefill_probe(self) -> ForwardProbe | None:
        """Return the `ForwardProbe` that reads the target's prefill for the draft, or None. Called after `begin`."""
        return None

    @abstractmethod
    def propose(self) -> Proposal:
        """Return the draft tokens that the target should verify next; may be empty."""

    def draft_steps(self, most: int | None = None) -> Drafting:
        """Generator form of `propose`: yields each `DraftStep` of the draft model, which the caller runs, and returns a
        proposal of at most `most` tokens (if the draft `chooses`)."""
        yield from ()
        return self.propose()

    def tail_token(self) -> Proposal:
        """Return a proposal of one token to verify after the last proposal, or an empty one. Called after the target's step
        was launched, so work here overlaps verification."""
        return Proposal.empty()

    @abstractmethod
    def observe_committed(self, committed: Tensor, kept: int) -> None:
        """Learn the `committed` [m] new tokens of the sequence; the first `kept` of them were in the last proposal."""

    def state_for_next_turn(self) -> Any:
        """Return what the draft of the next turn gets as `Prompt.previous_state`; called before `close`."""
        return None

    def close(self) -> None:
        """Release all resources of the draft; called at the end of a sequence, also after errors."""

    def counters(self) -> dict[str, float]:
        """Return the draft's figures for the report, under names that the drafting strategy chooses."""
        return {}

    def report_notes(self) -> list[str]:
        """Return sentences for the report, without a full stop, on what its figures mean: why nothing was drafted, say."""
        return []


@dataclass(frozen=True, kw_only=True)
class DraftStrategy(Policy, ABC, kind="draft"):
    """A drafting method for speculative decoding; `open` returns its `DraftState` for one sequence.

    active  whether this strategy drafts at all; one that does not is never opened
    needs   what the draft requires. Of the target's KV memory: "rollback" (drops the last `max_rollback` columns), "memory"
            (one contiguous cache of the prompt), "branches" (verifies token trees). Of the input: "prompt" (a prompt with
            its pixels, not a stream), "video" (that or a stream, see `open_stream`). "model": the recipe names a draft model

    in_batches  whether to draft for a batch, for one sequence after the other: "always"; "never"; or "measured": only where
                measured to be faster than plain steps of the whole batch, and never where tokens are sampled
    """

    active: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()
    kv: ClassVar[KVPolicy | None] = None  # the memory of a stream of its own; None: one like the target's

    in_batches: Literal["measured", "always", "never"] = "measured"

    @property
    def max_rollback(self) -> int:
        """The most cache columns that verification may have to roll back."""
        return 0

    @property
    def pruner(self) -> TokenPruner | None:
        """The pruner that chooses the prompt columns that the draft reads; None if it reads all or chooses by itself."""
        return None

    def check_target(self, target: ModelView) -> None:
        """Raise `DraftError` if the draft cannot serve `target`; called at attach, also for a `config_only` target."""

    @abstractmethod
    def open(self, target: ModelView) -> DraftState:
        """Return the `DraftState` of one sequence for `target`; raises `DraftError` if it cannot serve it."""

    def open_stream(self, target: ModelView, session: DraftStreamSettings) -> DraftStream:
        """Open the stream in which the draft model watches the video of `session`; called once if it needs "video"."""
        raise DraftError(f"{self.name}: it opens no stream of its own; leave 'video' out of needs.")


def resume_draft_steps(work: Drafting, given: Tensor | Exception | None) -> DraftStep:
    """Resume the generator `work` with the result or the error of its last step (None at first); return its next step."""
    return work.throw(given) if isinstance(given, Exception) else work.send(given)  # type: ignore[arg-type]


def run_draft(work: Drafting) -> Any:
    """Run the drafting generator `work` to its end, one model step at a time, unbatched; return what it returns."""
    given: Tensor | Exception | None = None
    while True:
        try:
            asked = resume_draft_steps(work, given)
        except StopIteration as over:
            return over.value
        try:
            given = asked.reduce_logits(asked.runner.step(asked.ids[None])[0, -1:])[0]
        except Exception as error:
            given = error


def accept(
    proposal: Proposal,
    logits: Tensor,
    ids: Tensor,
    warp: Warp | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, int]:
    """Verify a chain: return the tokens to commit, [kept + 1] long on `logits`' device, and `kept`, the number accepted.

    logits [n + 1, V]: row i follows the first i proposed tokens; or [n, V], and then no bonus token follows if all are kept.
    ids [S]: the committed tokens before the proposal. `warp` None decodes greedily. The result does not depend on the
    proposal: greedy, it is the target's own sequence; sampling, it has the target's own distribution, provided each proposed
    token was drawn from its row of q without knowledge of the random numbers used here. One read from the device a call.

    Raises `DraftError` for a tree, for shapes that do not fit, and for a q that is no distribution over the target's
    vocabulary, or not one that could have given its token. Columns of q beyond V may hold no mass; missing ones hold none.
    """
    validate(proposal)
    if proposal.parents is not None:
        raise DraftError("accept verifies chains; call accept_tree for a proposal with parents.")
    drafted = proposal.ids.to(logits.device)
    n, rows = drafted.numel(), logits.shape[0]
    if rows != n + 1 and (rows != n or not n):
        raise DraftError(f"{n} proposed tokens need {n + 1} rows of logits; {rows} were given.")
    if warp is None:
        best = logits.argmax(-1)
        kept = int((best[:n] == drafted).long().cumprod(0).sum()) if n else 0
        return best[: kept + 1], kept
    # A token the target does not have is refused below; processors, which look tokens up, must not trip over it.
    before = torch.cat([ids.to(logits.device), drafted.clamp(0, logits.shape[-1] - 1)])
    p = as_probability_dtype(torch.stack([warp(before[: ids.numel() + i], logits[i]) for i in range(rows)]))
    if not n:
        return sample_index(p[0], generator), 0
    if rows == n:  # in the place of the bonus token's row, which nothing is taken from
        p = torch.cat([p, p[:1]])
    q = proposal.q
    faults = torch.zeros(3, dtype=torch.long, device=p.device)
    if q is not None:
        faults = _faults(q.to(p), drafted, p.shape[-1])
        q = resize_vocab(q.to(p), p.shape[-1], 0.0)
    device = p.device if generator is None else generator.device
    u = torch.rand(n, dtype=p.dtype, device=device, generator=generator).to(p.device)
    sizes = p.shape, p.dtype, p.device, None if q is None else q.stride()
    count, rest = _judged(sizes, JUDGED_S if p.is_cuda else 0.0, drafted, p, q, u)
    # A q of NaN would make the draw fail before the fault is told; p stands in, and is never returned.
    last = sample_index(torch.where(faults.any(), p[0], rest), generator)
    kept, *wrong = torch.cat([count.view(1), faults]).tolist()
    for is_so, words in zip(wrong, FAULTS, strict=True):
        if is_so:
            raise DraftError(words.format(p.shape[-1]))
    return torch.cat([drafted[:kept], last])[:rows], kept


def validate(proposal: Proposal) -> None:
    """Raise `DraftError` for a malformed proposal. Of tensors on a device only a tree's parents are read."""
    ids, parents, q = proposal.ids, proposal.parents, proposal.q
    n = ids.numel()
    if ids.ndim != 1 or ids.dtype != torch.long:
        raise DraftError(f"Proposal.ids must be [n] long; it is {list(ids.shape)} {ids.dtype}.")
    if parents is not None and (parents.shape != ids.shape or parents.dtype != torch.long):
        raise DraftError(f"Proposal.parents must be [{n}] long; it is {list(parents.shape)} {parents.dtype}.")
    if parents is not None and any(not -1 <= parent < i for i, parent in enumerate(parents.tolist())):
        raise DraftError(
            "Proposal.parents: a token comes before its parent; list parents first, -1 for the root."
        )
    if parents is not None and q is not None:
        raise DraftError(
            "the draft proposed a tree with probabilities (Proposal.q); choose children without sampling, and leave q out."
        )
    if q is not None and (q.ndim != 2 or q.shape[0] != n):
        raise DraftError(f"Proposal.q must be [{n}, V], a row for each token; it is {list(q.shape)}.")


def verify_chain(ids: Tensor, p: Tensor, q: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many proposed tokens are accepted, [...] long, and the weights [..., V] to draw the next token from.

    ids [..., n], p [..., n + 1, V], q [..., n, V] or None for point masses, u [..., n] independent uniforms of [0, 1).
    Static shapes, no device read. A token outside p's vocabulary (id < 0 or >= V) is rejected.
    """
    n, vocab = ids.shape[-1], p.shape[-1]
    inside = (ids >= 0) & (ids < vocab)
    at = ids.clamp(0, vocab - 1)[..., None]
    p_x = p[..., :n, :].gather(-1, at)[..., 0]
    q_x = torch.ones_like(p_x) if q is None else q.gather(-1, at)[..., 0]
    # u < p / q without the division: right for q = 0, and p = 0 is refused even when u = 0.
    kept = ((u * q_x < p_x) & inside).long().cumprod(-1).sum(-1)
    here = kept[..., None, None].expand(*kept.shape, 1, vocab)
    p_row = p.gather(-2, here)[..., 0, :]
    # Past the last proposed token nothing was proposed: q is zero there and the residual is p itself.
    if q is None:
        none = torch.full_like(ids[..., :1], vocab)
        x = torch.cat([torch.where(inside, ids, vocab), none], -1).gather(-1, kept[..., None])
        q_row = (torch.arange(vocab, device=p.device) == x).to(p)
    else:
        q_row = torch.cat([q, torch.zeros_like(q[..., :1, :])], -2).gather(-2, here)[..., 0, :]
    rest = (p_row - q_row).clamp(min=0)
    # Where p and q agree to the last bit a refusal is a rounding accident and the residual empty; p is then the limit.
    return kept, torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_row)


JUDGED_S = 1.5e-4
"""Seconds that a compiled `verify_chain` saves on CUDA (lab/LOG.md). All of it is by element: its bits are the same."""
_judged = LazilyCompiled(verify_chain, warmup_s=2.4)


def sample_index(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample one index, [1] long on the device of `p`, with weights `p` [V]; the generator may be on another device."""
    if generator is None or generator.device == p.device:
        return torch.multinomial(p, 1, generator=generator)
    return torch.multinomial(p.to(generator.device), 1, generator=generator).to(p.device)


def resize_vocab(x: Tensor, vocab: int, fill: float) -> Tensor:
    """Return `x` [..., V'] truncated, or padded with `fill`, to [..., vocab]."""
    short = vocab - x.shape[-1]
    return x[..., :vocab] if short <= 0 else pad(x, (0, short), value=fill)


def _faults(q: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """[3] long: mass beyond the vocabulary, a row that does not sum to one (or holds NaN), a token q could not give."""
    outside = (q[:, vocab:] > 0).any()
    uneven = ~((q.sum(-1) - 1).abs() <= UNIT_SLACK).all() | (q < 0).any()
    beyond = (ids < 0) | (ids >= q.shape[-1])
    unlikely = ~(q.gather(-1, ids.clamp(0, q.shape[-1] - 1)[:, None]) > 0).all() | beyond.any()
    return torch.stack([outside, uneven, unlikely]).long()


def as_probability_dtype(p: Tensor) -> Tensor:
    """Return `p` in a dtype for probabilities: float64 stays, any other becomes float32."""
    return p if p.dtype == torch.float64 else p.float()
