"""Contract test of model families, on a tiny model with random weights, with and without recipes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.contract.masks import pattern_mask
from mmaccel.core.adapter import unwrap
from mmaccel.core.attach import accelerate, family_of
from mmaccel.core.errors import MmaccelError, ModelError
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.streams.asking import run_question
from mmaccel.core.streams.session import VideoSession

BLOCK, EXACT, CLOSE = 16, 1e-6, 2e-5
"""Tokens of a block; and how far logits in float32 may be off: of a pattern that lists everything (or twice as far as those
of the plain model are by two kinds of attention), and of all others."""
_FILM = ("video", 33)
PIECES: Any = (("text", 6), _FILM, ("text", 1), ("image",), ("text", 3), _FILM, ("text", 9))
_INNER = {"name": "a_shape", "sink": 8, "window": 24}
_SIDES = {"text": {**_INNER, "window": 40}, "image": {**_INNER, "sink": 4}, "video": _INNER}
SPARSE: dict[str, dict[str, Any]] = {
    "a_shape": {"sink": 16, "window": 32},
    "tri_shape": {"sink": 16, "window": 32, "bottom": 24},
    "sf_fixed": {"stride": 24, "summary": 2},
    "sf_strided": {"stride": 24},
    "vertical_slash": {"vertical": 8, "slash": 2, "last_q": 16},
    "block_topk": {"budget": 0.2, "sink": 16, "score": "mean"},
    "grid": {"min_stride": 2, "last_q": 16, "vertical": False, "horizontal": False, "window": 16, "sink": 1},
    "q_boundary": _SIDES,
    "k_boundary": _SIDES,
    "boundary_2d": {"default": _INNER},
    "per_head": {
        "table": {0: {"name": "tri_shape", "sink": 16, "window": 32, "bottom": 24}, 1: {**_INNER, "sink": 0}},
        "default": {"name": "sf_strided", "stride": 24},
    },
}
"""Patterns by name, with budgets under half of the pairs of `PIECES`."""
FULL: dict[str, dict[str, Any]] = {
    "a_shape": {"window": 1 << 20},
    "vertical_slash": {"vertical": 1 << 20, "slash": 1 << 16},
    "block_topk": {"budget": 1.0},
    "boundary_2d": {"default": {"name": "a_shape", "window": 1 << 20}},
}
"""The same, with budgets that list everything."""

Row = tuple[str, str, bool]
"""A check, its result, and whether it passed."""


def check_family(model_or_class: Any, *, quiet: bool = False, device: str = "cpu") -> list[Row]:
    """Test a model family on a tiny random float32 model of the class of `model_or_class` (a model, class or model type).

    Compared with the plain model: the dense recipe, whole and in chunks; patterns that list every pair; a padded batch;
    drafts, token by token; a pruner that keeps everything; sessions that see all frames; the detached model, bit for bit.
    Patterns under half of the pairs are compared with eager attention under their masks. A frame's pixels must change the
    embeddings of its tokens and no others. What the family states in `unable` must be refused. An exception fails a check.

    Prints a table, unless `quiet`; returns its rows (check, result, passed). Raises `ModelError` that names failed checks.
    """
    form: Any = type(unwrap(model_or_class)) if isinstance(model_or_class, nn.Module) else model_or_class
    kind = form if isinstance(form, str) else getattr(getattr(form, "config_class", None), "model_type", None)
    if not isinstance(kind, str):
        raise ModelError("model_or_class: give a model of transformers, its class or a model type.")
    family: Any = family_of(kind)
    try:
        tried = _Tried(family, family.tiny_model_factory(form), device)
    except Exception as error:
        if isinstance(error, MmaccelError):
            raise
        raise ModelError(
            f"family {family.name!r}: its tiny {kind!r} does not run ({type(error).__name__}: {error}); make `tiny`, from "
            "which the model is made, fit `tiny_visual_input`, which makes the tokens and pixels of a prompt."
        ) from error
    rows = [row for check in CHECKS for row in _checked(check, tried)]
    if not quiet:
        wide = max(len(name) for name, _, _ in rows)
        print(f"{kind} ({family.name})")
        print(
            "\n".join(
                f"  {name:<{wide}}  {'ok  ' if kept else 'FAIL'}  {found}" for name, found, kept in rows
            )
        )
    if wrong := [f"{name}: {found}" for name, found, kept in rows if not kept]:
        raise ModelError(f"family {family.name!r} fails check_family on {kind!r}: {'; '.join(wrong)}.")
    return rows


def _checked(check: Callable[[Any], Iterator[Row]], tried: Any) -> Iterator[Row]:
    try:
        yield from check(tried)
    except Exception as error:  # whatever a family's own methods raise
        yield check.__name__.strip("_"), f"{type(error).__name__}: {error}", False


class _Tried:
    """A tiny model, its plain answer, and its answers under recipes."""

    def __init__(self, family: Any, sampler: Any, device: str) -> None:
        self.family = family
        self.sampler = sampler
        self.model: Any = sampler.model().to(device)
        self.model.generation_config.eos_token_id = None
        self.depth = family.geometry(self.model).layers
        self.pieces = [piece for piece in PIECES if self.family.mixes_modalities or piece[0] != "image"]
        self.inputs = self.prompt(self.pieces)
        self.plain = self.logits(self.inputs)
        attend = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        other = self.logits(self.inputs)
        self.model.set_attn_implementation(attend)
        # What rounding does to the plain model, between two ways to compute its attention.
        self.exact = max(EXACT, 2 * float((self.plain - other).abs().max()))

    def prompt(self, pieces: Any, seed: int = 0) -> dict[str, Tensor]:
        made = self.sampler.prompt(self.model.config, pieces, seed)
        return {name: x.to(self.model.device) for name, x in made.items()}

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Tensor], **more: Any) -> Tensor:
        return self.model(**inputs, **more).logits  # type: ignore[no-any-return]

    def tokens(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.model.generate(**inputs, max_new_tokens=8, do_sample=False)  # type: ignore[no-any-return]

    def off(
        self, recipe: Mapping[str, Any], most: float, inputs: Any = None, plain: Any = None
    ) -> tuple[str, bool]:
        """Return in words how far the logits under `recipe` are off, and whether that is at most `most`."""
        with accelerate(self.model, **recipe):
            ours = self.logits(self.inputs if inputs is None else inputs)
        far = float((ours - (self.plain if plain is None else plain)).abs().max())
        return f"logits off by {far:.1e}, at most {most:.0e}", far <= most

    def refused(self, recipe: Mapping[str, Any]) -> tuple[str, bool]:
        try:
            accelerate(self.model, **recipe).detach()
        except MmaccelError as error:
            return f"refused: {error}", True
        return "not refused", False


def _dense(tried: _Tried) -> Iterator[Row]:
    for name, pieces in (("text", PIECES[:1]), ("a video", PIECES[:3]), ("all kinds", tried.pieces)):
        inputs = tried.prompt(pieces)
        plain = tried.logits(inputs)
        yield f"dense, {name}", *tried.off({}, tried.exact, inputs, plain)
        yield f"dense in chunks, {name}", *tried.off({"chunk": 64}, CLOSE, inputs, plain)


def _layout(tried: _Tried) -> Iterator[Row]:
    """Check that pixels of a unit change only its columns' embeddings, and that a video encoded in parts gives the same."""
    units = 5
    inputs = tried.prompt([("text", 4), ("video", units), ("text", 5)])
    layout = tried.family.layout(tried.model, inputs)
    name = next(name for name in ("pixel_values_videos", "pixel_values") if name in inputs)
    with torch.no_grad():
        before = tried.family.embed(tried.model, inputs)
        wrong = []
        for unit in range(units):
            pixels = inputs[name].clone()
            part = pixels.view(-1).chunk(units)[unit]
            part += 1
            after = tried.family.embed(tried.model, {**inputs, name: pixels})
            changed = (after != before).any(-1)[0]
            if not torch.equal(changed, (layout.frame[0] == unit) & (layout.modality[0] == VIDEO)):
                wrong.append(unit)
    yield "columns of frames", f"{units} units, wrong: {wrong or 'none'}", not wrong
    each = tried.family.count_patches(tried.model, inputs[name]) // units
    film = tried.prompt([("video", (1 << 14) // each + 2)]) if each else inputs
    with torch.no_grad():
        before = tried.family.embed(tried.model, film)
        with accelerate(tried.model):
            far = float((tried.family.embed(tried.model, film) - before).abs().max())
    yield "pixels in parts", f"embeddings off by {far:.1e}, at most {CLOSE:.0e}", far <= CLOSE


def _patterns(tried: _Tried) -> Iterator[Row]:
    for name, budget in FULL.items():
        yield f"full {name}", *tried.off({"sparse": {"name": name, "block": BLOCK, **budget}}, tried.exact)
    attend, layout = tried.model.config._attn_implementation, tried.family.layout(tried.model, tried.inputs)
    length, whole = layout.length, tried.family.bidirectional_image_layers(tried.model)
    behind = _behind(layout.modality[0])
    for name, given in SPARSE.items():
        # A table has the heads of each layer.
        own = {"table": dict.fromkeys(range(tried.depth), given["table"])} if "table" in given else {}
        budget = {**given, **own}
        recipe: dict[str, Any] = {"sparse": {"name": name, "block": BLOCK, **budget}, "dense_tail": 0}
        found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        with accelerate(tried.model, backend="reference", **recipe) as fast:
            attention: Any = fast.attention
            plan = attention.plan

            def recorded(layer: int, *given: Any, plan: Callable[..., Any] = plan, found: Any = found) -> Any:
                made = plan(layer, *given)
                found[layer] = made.to_mask()[0], *given[:2]
                return made

            attention.plan = recorded
            ours = tried.logits(tried.inputs)
        fields, wrong = {"block": BLOCK, **budget}, []
        masks: dict[int, Tensor] = {}
        for layer, (listed, query, key) in found.items():
            least, most = pattern_mask(name, fields, layout, query, key)
            if not bool((least <= listed).all() and (listed <= most).all()):
                wrong.append(layer)
            masks[layer] = most | behind if layer in whole else most
        share = max(float(mask.float().mean()) for mask in masks.values()) * 2 * length / (length + 1)
        with _masked(tried, masks):
            far = float((tried.logits(tried.inputs) - ours).abs().max())
        moved = float((ours - tried.plain).abs().max())
        narrow = set(tried.family.sliding_layers(tried.model))
        missed = sorted(set(range(tried.depth)) - narrow - found.keys())
        kept = far <= CLOSE < moved and share < 0.5 and not wrong and not missed
        told = f"{share:.0%} of the pairs, off by {far:.1e} from eager attention, {moved:.0e} from dense"
        told = f"it does not act in layers {missed}" if missed else told
        yield name, f"other pairs than its definition in layers {wrong}" if wrong else told, kept
        yield f"{name} in chunks", *_in_chunks(tried, recipe, ours, name)
    tried.model.set_attn_implementation(attend)


def _behind(modality: Tensor) -> Tensor:
    """[S, S]: the pairs of a visual token and one behind it, between which stands no text."""
    number = (modality == TEXT).long().cumsum(0)
    return ((modality != TEXT)[:, None] & (number[:, None] == number)).triu(1)


def _in_chunks(tried: _Tried, recipe: Mapping[str, Any], whole: Tensor, name: str) -> tuple[str, bool]:
    chunk = -(-whole.shape[1] // 2)
    if name not in ("a_shape", "k_boundary", "boundary_2d"):
        # By content each piece chooses anew: it has to run, and to be sparse.
        with accelerate(tried.model, backend="reference", chunk=chunk, **recipe) as fast:
            finite = bool(torch.isfinite(tried.logits(tried.inputs)).all())
            kept = fast.report().kept or 0.0
        return f"{kept:.0%} of the pairs", finite and 0 < kept < 1
    return tried.off({**recipe, "backend": "reference", "chunk": chunk}, CLOSE, plain=whole)


@contextmanager
def _masked(tried: _Tried, masks: Mapping[int, Tensor]) -> Iterator[None]:
    """The plain model with eager attention, whose layers see what `masks` say."""
    tried.model.set_attn_implementation("eager")
    handles = []
    for number, module in enumerate(tried.family.attentions(tried.model)):

        def given(module: Any, args: Any, kwargs: dict[str, Any], number: int = number) -> Any:
            seen = masks.get(number)
            if seen is None:
                return None
            bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(
                ~seen, torch.finfo(torch.float32).min
            )
            return args, {**kwargs, "attention_mask": bias}

        handles.append(module.register_forward_pre_hook(given, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _batches(tried: _Tried) -> Iterator[Row]:
    more: list[Any] = [("image",), ("text", 2)] if tried.family.mixes_modalities else []
    alone = [tried.prompt([("text", n), ("video", 4), ("text", n + 3), *more], seed=n) for n in (2, 9, 5)]
    batch = tried.sampler.pad_and_stack(alone)
    plain = [tried.logits(one)[0] for one in alone]
    with accelerate(tried.model):
        together = tried.logits(batch)
    far = max(float((row[-len(one) :] - one).abs().max()) for row, one in zip(together, plain, strict=True))
    yield "a padded batch", f"logits off by {far:.1e}, at most {CLOSE:.0e}", far <= CLOSE
    whole = tried.tokens(batch)
    with accelerate(tried.model, draft={"name": "prompt_lookup", "in_batches": "always"}):
        same = torch.equal(tried.tokens(batch), whole)
    yield "a draft in a batch", f"tokens {'the same' if same else 'differ'}", same


def _generation(tried: _Tried) -> Iterator[Row]:
    plain = tried.tokens(tried.inputs)
    choices: dict[str, dict[str, Any]] = {
        "kv window": {"kv": {"name": "window", "window": 1 << 16}},
        "kv offload": {"kv": "offload"},
        "draft prompt_lookup": {"draft": "prompt_lookup"},
        "draft sequential": {
            "draft": {"name": "sequential", "model": copy.deepcopy(tried.model), "window": 3}
        },
        "draft tree": {"draft": {"name": "tree", "model": copy.deepcopy(tried.model)}},
    }
    lacking = {"kv offload": "streams", "draft tree": "trees"}
    for name, recipe in choices.items():
        if lacking.get(name) in tried.family.unable:
            yield name, *tried.refused(recipe)
            continue
        with accelerate(tried.model, **recipe) as fast:
            same = torch.equal(tried.tokens(tried.inputs), plain)
            draft = fast.report().draft or {}
        told = f", {draft['accepted']} of {draft['proposed']} accepted" if draft.get("proposed") else ""
        # A draft that sees the video as its target does is taken whole.
        whole = name != "draft sequential" or draft.get("accepted") == draft.get("proposed")
        yield name, f"tokens {'the same' if same else 'differ'}{told}", same and whole


def _pruners(tried: _Tried) -> Iterator[Row]:
    recipe = {"prune": {"name": "fastv", "layer": 1, "retention": 1.0}}
    if "pruning" in tried.family.unable:
        yield "prune fastv", *tried.refused(recipe)
        return
    if tried.depth > 1:
        yield "prune fastv, all kept", *tried.off(recipe, CLOSE)


def _seen(tried: _Tried) -> Iterator[Row]:
    """Check that the family's queries and keys, with RoPE, attend as the model's do: pruners and memories read them."""
    narrow, modules = tried.family.sliding_layers(tried.model), tried.family.attentions(tried.model)
    whole = (n for n, one in enumerate(modules) if one.layer_idx not in narrow and hasattr(one, "k_proj"))
    number = max(whole)
    caught: dict[str, Any] = {}

    def catch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        caught.update(kwargs, hidden_states=args[0] if args else kwargs["hidden_states"])

    attend = tried.model.config._attn_implementation
    tried.model.set_attn_implementation("eager")
    handle = tried.family.layers(tried.model)[modules[number].layer_idx].register_forward_pre_hook(
        catch, with_kwargs=True
    )
    try:
        with torch.no_grad():
            paid = tried.model(**tried.inputs, output_attentions=True).attentions[number][0, :, -1]
            rows = tried.family.input_norm(tried.model, number, caught["hidden_states"])
            cos, sin = (angle[:, None] for angle in caught["position_embeddings"])
            query = tried.family.project_query(tried.model, number, rows[:, -1:])
            query = tried.family.apply_rope(query, (cos[..., -1:, :], sin[..., -1:, :]))
            key = tried.family.apply_rope(tried.family.project_key(tried.model, number, rows), (cos, sin))
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            ours = (query @ key.transpose(-1, -2) * modules[number].scaling).softmax(-1)[0, :, 0]
    finally:
        handle.remove()
        tried.model.set_attn_implementation(attend)
    far, spread = float((ours - paid).abs().max()), float(paid.max() - paid.min())
    # Of small random weights attention is almost even.
    kept = far <= 1e-3 * spread and spread > 0
    yield "queries and keys", f"attention weights off by {far:.1e}, and {spread:.1e} apart", kept


def _sessions(tried: _Tried) -> Iterator[Row]:
    """Check that a stream that sees all of its frames equals the plain model's prompt with the same tokens."""
    if why := tried.family.unable.get("streams"):
        yield "session", f"not supported: its models {why}", True
        return
    frames_per_unit, question = tried.family.frames_per_unit(tried.model), "what moved?"
    generator = torch.Generator().manual_seed(5)
    frames = torch.randint(0, 256, (9 * frames_per_unit, 3, 28, 28), dtype=torch.uint8, generator=generator)
    processor = tried.sampler.processor(tried.model.config)
    fields: dict[str, dict[str, Any]] = {
        "window": {"window": 1 << 16},
        "full": {},
        "no_cache": {"kept": 1 << 10},
    }
    for name, more in fields.items():
        with VideoSession(tried.model, processor, None, kv={"name": name, **more}) as session:
            for part in frames.split(4 * frames_per_unit - 1):
                session.watch(part, fps=2.0)
            adapter, live = session._stream_adapter, session._live
            assert live is not None
            tail, words = adapter.question_ids([{"type": "text", "text": question}])
            prompt = adapter.prompt(frames, 2.0, live.info.times, tail.tolist())  # type: ignore[attr-defined]
            with run_question(live, question, 8) as turn:
                far = float((turn.logits - tried.logits(prompt)[:, -1]).abs().max())
            whole = tried.tokens(prompt)[0, prompt["input_ids"].shape[1] :].tolist()
            end = next((n for n, token in enumerate(whole) if token in adapter.end_token_ids()), len(whole))
            same = list(session.ask(question, 8).ids) == whole[:end]
        told = f"logits off by {far:.1e}, at most {CLOSE:.0e}; tokens {'the same' if same else 'differ'}"
        told += "" if words[0] < words[1] else "; no word of the question is found"
        yield f"session, kv {name}", told, same and far <= CLOSE and words[0] < words[1]


def _detached(tried: _Tried) -> Iterator[Row]:
    same = torch.equal(tried.logits(tried.inputs), tried.plain)
    yield "after detaching", "bit for bit the same" if same else "not the same", same


CHECKS: tuple[Callable[[_Tried], Iterator[Row]], ...] = (
    _dense,
    _layout,
    _patterns,
    _batches,
    _generation,
    _pruners,
    _seen,
    _sessions,
    _detached,
)
