"""Drafts on streams: under every memory the text is the one without a draft, and the draft proposes."""

import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.adapter import TokenTree
from mmaccel.core.decoding.draft import Proposal
from mmaccel.core.errors import DraftError, MmaccelWarning, ModelError, RecipeError
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.attention import AttentionConfig, ForwardPass
from mmaccel.core.registry import policy
from mmaccel.core.streams.asking import run_question as asked_of
from mmaccel.core.streams.draft_stream import LocalDraftStream
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.policies.draft import Parallel, Sequential, Tree
from mmaccel.policies.kv.recent import Recent
from mmaccel.policies.sparse.a_shape import AShape
from tests.models.streams import FPS, QUESTION, every_stream, film, inputs_of, open_session, pair
from tests.models.tiny_random import DRAFTS
from tests.spies import crossed, heard, returned

TIGHT = every_stream(frames=6, window=8)
FAMILIES = ("random-ov", "random-qwen")
TOKENS = 14


def drafts(name: str) -> dict[str, Any]:
    """Drafts that run on streams, by the model itself where they take one."""
    model = pair(name)[0]
    made = {
        one: DRAFTS[one](model) for one in ("prompt_lookup", "text_only", "sequential", "parallel", "tree")
    }
    return {**made, "dynamic": Tree(model=model, shape="dynamic", depth=3, width=2, nodes=6)}


LOOKS = ("sequential", "parallel", "tree", "dynamic")
"""Those with a stream of their own: of the target's own model they agree with it."""


@crossed(name=FAMILIES, kv=TIGHT, draft=drafts("random-ov"))
def test_the_text_is_the_one_without_a_draft(name: str, kv: str, draft: str) -> None:
    frames, found = film(18), []
    for choice in ("off", drafts(name)[draft]):
        with open_session(name, TIGHT[kv], draft=choice) as session:
            session.watch(frames[:11], fps=FPS)
            first = session.ask(QUESTION, TOKENS)
            session.watch(frames[11:], fps=FPS)
            found.append((first.ids, session.ask(QUESTION, TOKENS)))
    (before, alone), (then, drafted) = found
    assert (then, drafted.ids) == (before, alone.ids) and len(alone.ids) > 4
    # A lookup proposes nothing where no token comes twice before the last.
    quiet = draft == "prompt_lookup" and len(set(alone.ids[:-1])) == len(alone.ids) - 1
    assert (quiet or drafted.counters["drafted"] > 0) and "drafted" not in alone.counters
    if draft in LOOKS:
        assert agrees(drafted), "its draft saw what it saw"


@crossed(kv=TIGHT, name=FAMILIES)
@torch.no_grad()
def test_each_branch_of_a_tree_says_what_it_says_alone(name: str, kv: str) -> None:
    """Tokens 5 7 9 and 5 8, 6 4 as a tree, in one pass and in two; of which 5 7 9 is kept, and 3 comes after it."""
    tree = Proposal(torch.tensor([5, 6, 7, 8, 4, 9]), parents=torch.tensor([-1, -1, 0, 0, 1, 2])).branches
    ways, rows = ([1, 5, 7, 9], [1, 5, 8], [1, 6, 4]), torch.tensor([[1, 5, 6, 7, 8, 4, 9]])
    rows_of = ([0, 1, 3, 6], [0, 1, 4], [0, 2, 5])
    with open_session(name, TIGHT[kv]) as session:
        session.watch(film(17), fps=FPS)  # of a unit of two frames one is still to come
        with asked_of(session._live, QUESTION, 4) as asked:
            start = asked.length()
            alone = []
            for way in ways:
                alone.append(asked.step(torch.tensor([way]))[0])
                asked.truncate(start)
            asked.step(torch.tensor([ways[0]]))
            then = asked.step(torch.tensor([[3]]))[0]
            asked.truncate(start)
            for cut in (7, 3):
                pieces = [TokenTree(tree.sees[:cut, :cut], tree.depth[:cut])]
                if cut < 7:
                    pieces.append(TokenTree(tree.sees[cut:], tree.depth[cut:]))
                parts = rows.split([cut, 7 - cut][: len(pieces)], 1)
                found = torch.cat([asked.step(*one) for one in zip(parts, pieces, strict=True)], 1)[0]
                for own, want in zip(rows_of, alone, strict=True):
                    assert (found[own] - want).abs().max() <= 1e-5
                if cut == 7:
                    asked.accept(torch.tensor(rows_of[0]))
                    assert asked.length() == start + 4
                    assert (asked.step(torch.tensor([[3]]))[0] - then).abs().max() <= 1e-5
                    with pytest.raises(
                        ModelError, match="2 of the last columns cannot be kept; 1 were appended"
                    ):
                        asked.state.accept(2)
                asked.truncate(start)


def test_a_draft_reads_a_stored_film_in_one_pass_under_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Sequential(model=pair("random-ov")[0], window=3)

    def told(runner: Any, frames: Any) -> Any:
        return runner.adapter.attention.recipe.sparse, len(frames)

    passes = heard(monkeypatch, StreamRunner, "encode_frames", told)
    with open_session("random-ov", TIGHT["mosaic"], draft=draft, chunk=None) as session:
        session.ingest(film(24), fps=FPS)
        (_, whole), (pattern, count) = passes
        unit = session._live.info.tokens_per_unit
        assert whole == count == 24 and isinstance(pattern, AShape) and pattern.window == 8 * unit
        ids = session.ask(QUESTION, TOKENS)
        session.watch(film(20), fps=FPS)
        assert [(sparse.dense, n) for sparse, n in passes[2:]] == [(True, n) for n in (16, 16, 4, 4)]
    assert ids.counters["drafted"] > 0
    with open_session("random-ov", TIGHT["mosaic"], chunk=None) as session:
        session.ingest(film(24), fps=FPS)
        assert session.ask(QUESTION, TOKENS).ids == ids.ids


def agreeing(**fields: Any) -> Sequential:
    """A draft by the target's own model, all of which is accepted as long as it sees what the target sees."""
    return Sequential(model=pair("random-qwen")[0], window=3, **fields)


def opened(kv: str, draft: Any = "off") -> mmaccel.VideoSession:
    return open_session("random-qwen", TIGHT[kv], draft=draft)


def agrees(answer: mmaccel.core.decoding.generate.Answer) -> bool:
    return answer.counters["accepted"] >= 0.9 * (len(answer.ids) - 1) * 3 / 4


@pytest.mark.parametrize("kv", ["mosaic", "no_cache"])
def test_the_draft_is_rolled_back_with_the_target(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = film(18)
    with opened(kv, agreeing()) as session, opened(kv) as quiet:
        for first in (True, False):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                returned(patch, LocalDraftStream, "add_frames", Mock(side_effect=KeyboardInterrupt))
                session.watch(film(18, seed=4)[:7], fps=FPS)
            for one in (session, quiet):
                one.watch(frames[:9] if first else frames[9:], fps=FPS)
            answer, alone = session.ask(QUESTION, TOKENS), quiet.ask(QUESTION, TOKENS)
            assert answer.ids == alone.ids and agrees(answer) and len(session) == len(quiet)
            assert seconds(session) == quiet._live.info.times


def seconds(session: mmaccel.VideoSession) -> list[float]:
    """When the frames were shown that the draft has watched."""
    stream = session._live.draft_stream.stream
    assert len(stream._live.info.times) >= stream._live.state.units() > 0
    return list(stream._live.info.times)


@pytest.mark.parametrize("kv", TIGHT)
def test_the_draft_is_saved_and_loaded_with_the_target(tmp_path: Path, kv: str) -> None:
    frames, recent = film(18), {"name": "recent", "window": 7, "local": 7}
    draft = agreeing(kv=recent) if kv == "rekv" else agreeing()
    with opened(kv, draft) as session:
        session.watch(frames[:11], fps=FPS)
        session.save(tmp_path / "saved")
        session.watch(frames[11:], fps=FPS)
        want = session.ask(QUESTION, TOKENS)
    with opened(kv, draft) as session:
        session.load(tmp_path / "saved")
        assert seconds(session) == session._live.info.times and len(session) == 11
        session.watch(frames[11:], fps=FPS)
        answer = session.ask(QUESTION, TOKENS)
        assert answer.ids == want.ids
        for name in ("drafted", "accepted"):
            assert answer.counters[name] == want.counters[name] > 0, name
    with opened(kv) as session:
        session.load(tmp_path / "saved")
        assert len(session) == 11
        with pytest.raises(DraftError, match=r"not saved: open a session with it, and call its load\('"):
            mmaccel.VideoSession.resume(session._stream_adapter.model, session._processor, tmp_path / "saved")


def test_a_session_saved_without_the_draft_goes_on_without_it(tmp_path: Path) -> None:
    with opened("mosaic") as session:
        session.watch(film(11), fps=FPS)
        session.save(tmp_path / "saved")
        want = session.ask(QUESTION, TOKENS)
    with opened("mosaic", agreeing()) as session:
        with pytest.warns(MmaccelWarning, match="go on without it.*saved without this draft's stream"):
            session.load(tmp_path / "saved")
        assert session.ask(QUESTION, TOKENS).ids == want.ids
        assert "saved without this draft's stream" in str(session.report())


@functools.cache
def quiet() -> tuple[int, ...]:
    """What is said without a draft."""
    with opened("mosaic") as session:
        for part in film(18).split(9):
            session.watch(part, fps=FPS)
        return session.ask(QUESTION, TOKENS).ids


@pytest.mark.parametrize(
    "method",
    ["add_frames", "checkpoint", "prepare_question", "read_question", "end_question", "save", "end_ingest"],
)
def test_a_failing_draft_loses_nothing_of_the_stream(tmp_path: Path, method: str, monkeypatch) -> None:
    frames, want = film(18), quiet()
    with opened("mosaic", agreeing()) as session:
        session.watch(frames[:9], fps=FPS)
        monkeypatch.setattr(LocalDraftStream, method, Mock(side_effect=RuntimeError("out of cheese")))
        with pytest.warns(MmaccelWarning, match="without.*out of cheese"):
            session.watch(frames[9:], fps=FPS)
            first = session.ask(QUESTION, TOKENS)
            session.save(tmp_path / "saved")
            second = session.ask(QUESTION, TOKENS)
        assert first.ids == second.ids == want
        assert "out of cheese" in str(session.report())
    with opened("mosaic") as again:
        again.load(tmp_path / "saved")
        assert again.ask(QUESTION, TOKENS).ids == want


def test_the_folder_of_the_drafts_memory_counts_from_its_recipe(tmp_path: Path) -> None:
    kv = "{name: rekv, store: {spill: disk, folder: slabs}}"
    (tmp_path / "mine.yaml").write_text(f"kv: recent\ndraft: {{name: sequential, model: x, kv: {kv}}}\n")
    draft: Any = mmaccel.Recipe.load(tmp_path / "mine.yaml").draft
    assert draft.kv.store.folder == str(tmp_path / "slabs")
    assert mmaccel.Recipe.load(mmaccel.Recipe.load(tmp_path / "mine.yaml").to_dict()).draft == draft


def test_a_memory_of_a_draft_that_a_call_has_no_use_for_is_told() -> None:
    model, inputs = pair("random-ov")[0], inputs_of("random-ov", 5)
    for draft in (Sequential(model=model, kv="recent"), Parallel(model=model, process=False, kv="recent")):  # type: ignore[arg-type]
        with mmaccel.accelerate(model, draft=draft) as fast:
            model.generate(**inputs, max_new_tokens=6, do_sample=False)
            assert "its kv 'recent' did nothing" in str(fast.report())


def test_what_cannot_draft_on_a_stream_is_told_in_one_sentence() -> None:
    model = pair("random-qwen")[0]
    for kv, why in (("nowhere", "nowhere"), ({"name": "recent", "window": 0}, "window")):
        with pytest.raises(RecipeError, match=why):
            Sequential(model=model, kv=kv)  # type: ignore[arg-type]
    for field in ("kv", "prune"):  # there is no video in its prompt
        with pytest.raises(RecipeError, match=f"draft 'text_only' cannot use {field} 'recent'; leave it out"):
            policy("draft", {"name": "text_only", field: "recent"})
    with pytest.raises(DraftError, match="beside"):
        opened("mosaic", "sequential")


def test_a_tree_on_a_stream_is_weighed_as_a_chain_is() -> None:
    """The scores of what a question was shown first have a bias, as those of summary tokens have."""
    draw = torch.Generator().manual_seed(0)
    sizes = (4, 3), (2, 10), (2, 10)
    query, key, value = (torch.randn(1, heads, n, 8, generator=draw) for heads, n in sizes)

    def attended(
        query: torch.Tensor, keep: list[int], branches: TokenTree | None, bias: float
    ) -> torch.Tensor:
        shown = KVView(key[:, :, keep], value[:, :, keep], query=query, bias=torch.full((5,), bias))
        state: Any = SimpleNamespace(view=lambda layer, query: shown)
        config = AttentionConfig(mmaccel.Recipe(), "auto", None)
        run = ForwardPass(config, state=state, prefill=False, stream=True, branches=branches)
        return run.attend(0, query, key, value, 8**-0.5)

    chain = TokenTree(torch.ones(3, 3).tril().bool(), torch.arange(3))
    fork = TokenTree(torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool(), torch.tensor([0, 1, 1]))
    everything = list(range(10))
    want = attended(query, everything, None, 3.0)
    assert (attended(query, everything, chain, 3.0) - want).abs().max() <= 1e-6
    assert (attended(query, everything, chain, 0.0) - want).abs().max() > 1e-2
    other = attended(query[:, :, [0, 2]], [*range(8), 9], None, 3.0)
    assert (attended(query, everything, fork, 3.0)[:, :, [0, 2]] - other).abs().max() <= 1e-6


@dataclass(frozen=True, kw_only=True)
class Treeless(Recent):
    """Somebody else's memory, which takes chains alone."""

    allows_branches: ClassVar[bool] = False


def test_a_tree_on_a_memory_of_chains_is_refused_before_it_is_attached() -> None:
    model = pair("random-ov")[0]
    own = Tree(model=model, kv=Treeless())
    for where, kv, draft in (("kv", Treeless(), Tree(model=model)), (r"draft\.kv", "recent", own)):
        with pytest.raises(RecipeError, match=f"'tree' proposes trees and {where} .* takes chains alone"):
            mmaccel.Recipe(kv=kv, draft=draft)
        assert mmaccel.Recipe(kv=kv, draft=Sequential(model=model)).kv


@pytest.mark.parametrize("draft", ["off", "sequential"])
def test_criteria_of_a_call_are_shown_the_scores(draft: str) -> None:
    """As transformers shows them: of every token so far, where scores are asked for; each is made once."""
    model, inputs = pair("random-ov")[0], inputs_of("random-ov", 11)
    shown: list[tuple[int, int]] = []
    kinds: list[Any] = []

    def stops(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        kinds.append(scores if scores is None else torch.cat(scores))
        shown.append((ids.shape[1] - inputs["input_ids"].shape[1], len(scores or ())))
        return torch.zeros(1, dtype=torch.bool)

    choice = "off" if draft == "off" else Sequential(model=model, window=3)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "stopping_criteria": [stops]}
    with mmaccel.accelerate(model, kv=TIGHT["mosaic"], draft=choice) as fast:
        model.generate(**inputs, **how)
        assert len(shown) > 3 and all(one is None for one in kinds)
        shown.clear(), kinds.clear()
        how |= {"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.3}
        found, told = model.generate(**inputs, **how), fast.report()
    assert draft == "off" or told.draft["proposed"] > 0, "the target itself may draft"
    assert shown == [(n, n) for n in range(1, len(found.scores) + 1)]
    assert torch.equal(kinds[-1], torch.cat(found.scores))
