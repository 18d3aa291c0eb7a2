"""`Recipe`: a frozen choice of sparse pattern, KV memory, draft, pruner and backend, from Python or YAML; always checked."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from mmaccel.backends import select
from mmaccel.core.decoding.draft import DraftStrategy
from mmaccel.core.errors import QUIET, ModelError, RecipeError, UnknownName, quoted, warn
from mmaccel.core.files import outside
from mmaccel.core.memory.kv import KVPolicy, StreamPolicy
from mmaccel.core.prefill.prune import ScorePruner, TokenPruner
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import BASES, DEFAULTS, check_registered, kind_of, policy, registry

YAML_BYTES = 1 << 18
"""Most bytes of a recipe's file."""
MAIN_PRESETS = ("exact", "long-video", "film-many-questions", "stream", "captions", "everything")
"""The presets for what people do; each file says what it keeps and risks, and where its figures stand."""
VERSION = 1
"""The version that recipes are written with; one without a version is of the first."""
FORMER = {"prompt-lookup": "exact"}
"""Presets of earlier versions, and those that are the same now."""


def _default(kind: str) -> Any:
    return field(default_factory=lambda: registry(kind).build(DEFAULTS[kind]))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of an accelerated model. A policy is given by its name, or as a mapping with its name and fields, such as
    ``{name: grid, stride: frame}``; `mmaccel describe NAME` explains those. Paths in a YAML file are relative to its folder.

    sparse      the sparse attention pattern of prefill
    kv          the KV memory: which keys and values are kept
    draft       the drafting method of speculative decoding
    prune       a token pruner, or None (null in YAML)
    backend     the attention kernels: "auto", or one by name ("reference", "flex", "triton", "flash"), which never falls
                back. "auto" chooses once, when the recipe is attached. On CUDA it measures costs, and runs dense attention
                wherever a pattern would not be faster. On a CPU it measures nothing and runs the pattern, though dense
                attention is faster on short prompts; only later turns and questions where no pairs are saved run dense
    chunk       prefill in chunks of this many tokens; None (null in YAML) runs the whole prompt at once
    dense_tail  number of last rows of a prompt that see every key: the question's rows decide the answer and cost next to
                nothing. 0 runs the pattern on every row, as the paper's baselines do
    dense_layers  layers that stay dense, by number
    """

    sparse: SparsePattern = _default("sparse")
    kv: KVPolicy = _default("kv")
    draft: DraftStrategy = _default("draft")
    prune: TokenPruner | None = None
    backend: str = "auto"
    chunk: int | None = None
    dense_tail: int = 64
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, base in BASES.items():
            value = getattr(self, name)
            if isinstance(value, str | Mapping):
                value = policy(name, value)
                object.__setattr__(self, name, value)
            if not isinstance(value, base) and (value is not None or name != "prune"):
                raise RecipeError(
                    f"{name}: {quoted(value)} is not a {base.__name__}; give a name, a mapping with a name, or an instance."
                )
            if value is not None:
                check_registered(value)
        if self.backend not in ("auto", *select.BACKENDS):
            raise UnknownName("backend", str(self.backend), ("auto", *select.BACKENDS))
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 64):
            raise RecipeError(
                f"chunk: {quoted(self.chunk)}; give at least 64 tokens, or null for the whole prompt at once."
            )
        if type(self.dense_tail) is not int or self.dense_tail < 0:
            raise RecipeError(f"dense_tail: {quoted(self.dense_tail)}; give a number of rows, 0 or more.")
        layers = self.dense_layers
        if not isinstance(layers, list | tuple) or any(type(n) is not int or n < 0 for n in layers):
            raise RecipeError(f"dense_layers: {quoted(layers)}; give a list of layer numbers, 0 or more.")
        object.__setattr__(self, "dense_layers", tuple(layers))
        check_policies_compatible(self)

    @classmethod
    def load(cls, source: Recipe | str | Path | Mapping[str, Any] | None = None, **choices: Any) -> Recipe:
        """Create a recipe from a `Recipe`, a policy or its name, the name of a preset, a YAML path, a table of head patterns
        (.json) or a mapping; `choices` replace fields. `version` in a mapping or a YAML file is checked, and is no field.

        Raises `UnknownName` with the nearest name and those of its kind, or `RecipeError`.
        """
        fields: dict[str, Any] = {}
        if isinstance(source, Mapping):
            fields = dict(source)
        elif isinstance(source, type):
            raise RecipeError(
                f"recipe: {source.__name__} is a class; give a policy made of it, {source.__name__}()."
            )
        elif isinstance(source, tuple(BASES.values())):
            fields = {kind_of(source): source}  # type: ignore[arg-type]
        elif source is not None and not isinstance(source, Recipe):
            fields = read_recipe_fields(source)
        version = fields.pop("version", VERSION)
        if type(version) is not int or not 1 <= version <= VERSION:
            raise RecipeError(
                f"version: {quoted(version)}; this mmaccel reads versions up to {VERSION}: give that, or update mmaccel."
            )
        known = [f.name for f in dataclasses.fields(cls)]
        try:
            if unknown := [name for name in (*choices, *fields) if name not in known]:
                _check_nesting({**fields, **choices}, unknown)
                raise UnknownName(
                    "recipe field", [one if isinstance(one, str) else quoted(one) for one in unknown], known
                )
            if isinstance(source, Recipe):
                return dataclasses.replace(source, **choices) if choices else source
            return cls(**{**fields, **choices})
        except RecipeError as error:
            if str(source).endswith((".yaml", ".yml")) and not choices:
                error.args = (f"recipe {quoted(str(source), outside.PATH)}: ", *error.args)
            raise

    def to_dict(self) -> dict[str, Any]:
        """Return a mapping from which `load` makes an equal recipe; of a loaded model only the class name is given."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_yaml(self) -> str:
        """Return the recipe as YAML text, with its `version`."""
        return yaml.safe_dump({"version": VERSION, **self.to_dict()}, sort_keys=False)


def _check_nesting(given: Mapping[str, Any], unknown: list[str]) -> None:
    """Raise `RecipeError` if the `unknown` fields of a recipe are those of a policy; it says where they belong."""
    moved = {name: given[name] for name in unknown}
    for kind in BASES:
        part = moved if "name" in moved else given.get(kind)
        part = {"name": part} if isinstance(part, str) else part
        if not isinstance(part, Mapping) or part.get("name") not in [*registry(kind)]:
            continue
        if part is moved or moved.keys() <= {
            one.name for one in dataclasses.fields(registry(kind)[part["name"]])
        }:
            others = {name: one for name, one in given.items() if name not in (*unknown, kind)}
            meant = quoted({**others, kind: {**part, **moved}}, 200)
            raise RecipeError(
                f"{kind} {part['name']!r}: give its fields in a mapping of their own; write {meant}."
            )


def load_session_recipe(where: Path, saved: Mapping[str, Any], again: bool = False) -> Recipe:
    """Return the recipe of the session saved in folder `where`; raises `ModelError` if it is invalid.

    Warns of field names of earlier versions, unless `again` is True: this recipe was read, and warned of, before.
    """
    kv = saved.get("kv")
    token = QUIET.set(again and json.dumps(kv) in _heard)
    try:
        return Recipe.load({**saved, "kv": kv})
    except RecipeError as error:
        raise ModelError(f"{where} was saved with a recipe that cannot be opened: {error}") from error
    finally:
        QUIET.reset(token)
        _heard.add(json.dumps(kv))


_heard: set[str] = set()
"""The memories of sessions that were read, whose former fields have been warned of."""


def check_policies_compatible(recipe: Recipe) -> None:
    """Raise `RecipeError` for the first two choices that exclude each other. Every rule is about two choices."""
    sparse, kv, draft = recipe.sparse, recipe.kv, recipe.draft
    if recipe.prune is not None:
        _check_prune(recipe, recipe.prune)
    ingests = isinstance(kv, StreamPolicy) and kv.ingests
    if not (sparse.dense or (kv.allows_sparse if kv.sequences else ingests)):
        raise RecipeError(
            f"sparse {sparse.name!r} cannot stand beside kv {kv.name!r}, which decides by itself what each "
            f"query sees, and does not ingest; set sparse to {DEFAULTS['sparse']!r} or kv to {DEFAULTS['kv']!r}."
        )
    if "memory" in draft.needs and not kv.sequences:
        caches = registry("kv").matching_names_text(lambda cls: cls.sequences)
        raise RecipeError(
            f"draft {draft.name!r} needs a contiguous KV cache of the prompt, which kv {kv.name!r} does not have; set kv to "
            f"{caches}."
        )
    for where, memory in (("kv", kv), ("draft.kv", draft.kv)):
        if "branches" in draft.needs and isinstance(memory, StreamPolicy) and not memory.allows_branches:
            chains = registry("draft").matching_names_text(
                lambda cls: cls.active and "branches" not in cls.needs
            )
            raise RecipeError(
                f"draft {draft.name!r} proposes trees and {where} {memory.name!r} takes chains alone (allows_branches is "
                f"not True); choose a draft that proposes chains: {chains}."
            )
    if "rollback" in draft.needs and kv.rollback_limit is not None and kv.rollback_limit < draft.max_rollback:
        raise RecipeError(
            f"draft {draft.name!r} rolls back up to {draft.max_rollback} tokens and kv {kv.name!r} only "
            f"{kv.rollback_limit}; set the memory's margin to {draft.max_rollback}, or lower the draft's window."
        )


def _check_prune(recipe: Recipe, prune: TokenPruner) -> None:
    if prune.stage == "draft":
        drafts = [name for name, cls in registry("draft").items() if "video" in cls.needs]
        raise RecipeError(
            f"prune {prune.name!r} chooses what a draft sees; give it to the draft, for example as {{draft: {{name: "
            f"{drafts[0]}, prune: {prune.name}}}}}, or choose one for the target."
        )
    if not recipe.kv.sequences:
        _check_recalled(recipe.kv, prune)
    elif prune.stage == "layer" and recipe.chunk is not None:
        raise RecipeError(
            f"prune {prune.name!r} ranks the video by what comes after it and runs the prompt whole; set chunk to null."
        )
    if "memory" in recipe.draft.needs and prune.compact:
        raise RecipeError(
            f"draft {recipe.draft.name!r} gives its rows the prompt's positions, and prune {prune.name!r} gives the columns "
            "that it keeps new ones with compact = True; set compact to False."
        )
    if prune.scoring_layer is not None and recipe.draft.active:
        raise RecipeError(
            f"prune {prune.name!r} chooses tokens again after every decoded token, so the tokens of draft "
            f"{recipe.draft.name!r} cannot be verified together; set prune.forget to 0, or draft to {DEFAULTS['draft']!r}."
        )


def _check_recalled(kv: KVPolicy, prune: TokenPruner) -> None:
    """Raise `RecipeError` for a pruner that has no part in what a question on a stream recalls."""
    acts = prune.for_stream()
    if acts is None:
        others = registry("prune").matching_names_text(
            lambda cls: cls.stage == "layer" and cls.needs <= {"attention"}
        )
        raise RecipeError(
            f"prune {prune.name!r} works on the states of a whole prompt, and kv {kv.name!r} takes a video in unit by unit, "
            f"before there is a question; choose one that acts on units or on what is recalled, such as {others}, or ask by "
            f"generate or `mmaccel ask`, with kv {DEFAULTS['kv']!r}."
        )
    if prune.compact and acts.stage == "layer":
        raise RecipeError(
            f"prune {prune.name!r} has compact = True, and kv {kv.name!r} sets the positions of recalled tokens itself; set "
            "compact to False."
        )


def check_generate(recipe: Recipe) -> None:
    """Raise `RecipeError` if `recipe` cannot serve a model's own `generate`, as its KV memory is for streams only."""
    if not recipe.kv.sequences:
        _stream_memory(recipe)


def stream_policy(recipe: Recipe) -> StreamPolicy:
    """Return the recipe's KV memory as a `StreamPolicy`; raise `RecipeError` if it cannot serve a video stream."""
    kv, draft = _stream_memory(recipe), recipe.draft
    if draft.active and "prompt" in draft.needs:
        raise RecipeError(
            f"draft {draft.name!r} needs the prompt's own inputs, pixels included, and a stream has none; set draft to "
            f"{DEFAULTS['draft']!r}."
        )
    if draft.active and draft.pruner is not None and draft.pruner.compact:
        raise RecipeError(
            f"draft {draft.name!r} has prune {draft.pruner.name!r} with compact = True, and in a session the draft's own "
            "memory sets the positions of recalled tokens; set compact to False."
        )
    return kv


def _stream_memory(recipe: Recipe) -> StreamPolicy:
    """The memory of a recipe that reads a video as a stream, a session's or a prompt's."""
    kv, draft = recipe.kv, recipe.draft
    if not isinstance(kv, StreamPolicy):
        streams = registry("kv").matching_names_text(lambda cls: issubclass(cls, StreamPolicy))
        raise RecipeError(f"kv {kv.name!r} cannot hold a stream; set kv to {streams}.")
    if not (recipe.sparse.dense or kv.ingests):
        raise RecipeError(
            f"sparse {recipe.sparse.name!r} acts on a stream where a stored video is ingested, and kv {kv.name!r} does not "
            f"say ingests = True; set sparse to {DEFAULTS['sparse']!r}."
        )
    if recipe.prune is not None:
        _check_recalled(kv, recipe.prune)
    if draft.active and "memory" in draft.needs:
        raise RecipeError(
            f"draft {draft.name!r} needs a contiguous KV cache of the prompt, which a VideoSession does not have; set "
            f"draft to {DEFAULTS['draft']!r}."
        )
    own = draft.pruner if draft.active else None
    scored = isinstance(own, ScorePruner) and own.needs == {"hidden"}
    if own is not None and not (scored or own.needs <= {"attention"}):
        others = registry("prune").matching_names_text(
            lambda cls: cls.stage == "draft" and cls.needs <= {"attention"}
        )
        raise RecipeError(
            f"draft {draft.name!r} has prune {own.name!r}, which reads {' and '.join(sorted(own.needs))}, and on kv "
            f"{kv.name!r} one may read attention, or score by states (ScorePruner); choose another, such as {others}."
        )
    return kv


def presets() -> dict[str, str]:
    """Return the shipped presets: name -> the first comment line of its YAML file."""
    files = resources.files("mmaccel").joinpath("recipes").iterdir()
    texts = {f.name.removesuffix(".yaml"): f.read_text() for f in files if f.name.endswith(".yaml")}
    return {name: text.splitlines()[0].removeprefix("#").strip() for name, text in sorted(texts.items())}


def list_recipes() -> dict[str, str]:
    """Return every name that `Recipe.load` accepts: recipes and policies -> "recipe" or the policy's kind."""
    found = {name: kind for kind in BASES for name in registry(kind)}
    return {**found, **dict.fromkeys(presets(), "recipe")}


def recipe_file_extensions() -> tuple[str, ...]:
    """Return the file extensions that `Recipe.load` reads: YAML, and those that policies declare (`Policy.file`)."""
    own = (cls.file for kind in BASES for cls in registry(kind).values())
    return (".yaml", ".yml", *(file[0] for file in own if file is not None))


def read_recipe_fields(source: str | Path) -> dict[str, Any]:
    """Return the fields, not yet checked, that a preset, a policy's name, a YAML file or a policy's own file (`Policy.file`)
    sets. Relative paths in a YAML file are resolved against its folder.

    Raises `UnknownName` with the nearest name and those of its kind, or `RecipeError` if the file is not a recipe.
    """
    text, folder = str(source), None
    if text in FORMER:
        warn(f"recipe {text!r} is the former name; write {FORMER[text]!r}.")
        text = FORMER[text]
    where = f"recipe {quoted(text, outside.PATH)}"
    for kind in BASES:
        for name, cls in registry(kind).items():
            if cls.file is not None and text.endswith(cls.file[0]):
                return {kind: {"name": name, cls.file[1]: text}}
    if isinstance(source, Path) or text.endswith((".yaml", ".yml")):
        folder = Path(text).parent
        if not os.path.exists(text):
            raise RecipeError(
                f"recipe: there is no file {quoted(text, outside.PATH)}; give an existing YAML file, or a name "
                "(`mmaccel list` has them)."
            )
        content = outside.read_text(Path(text), where, RecipeError, most=YAML_BYTES, fix="give a YAML file")
    elif text in presets():
        content = resources.files("mmaccel").joinpath("recipes", f"{text}.yaml").read_text()
    else:
        for kind in BASES:
            if text in registry(kind):
                return {kind: text}
        meant = next(filter(None, (registry(kind).explain_foreign_name(text) for kind in BASES)), None)
        kinds = {**list_recipes(), **{name: kind for kind in BASES for name in registry(kind)}}
        raise UnknownName("recipe", text, kinds, kinds, own=True, meant=meant)
    fields = outside.read_yaml(content, where)
    example = f"sparse: {next(iter(registry('sparse')))}"
    if fields is None:
        raise RecipeError(
            f"{where} is empty; write a mapping such as {example!r}, or name {DEFAULTS['sparse']!r}."
        )
    if not isinstance(fields, dict):
        raise RecipeError(f"{where} holds {type(fields).__name__}; write a mapping such as {example!r}.")
    if fields.get("draft") is False:
        fields["draft"] = DEFAULTS["draft"]  # YAML reads a bare off as false
    if folder is None:
        return fields
    for kind in BASES:
        given = fields.get(kind)
        if isinstance(given, dict) and isinstance(given.get("name"), str) and given["name"] in registry(kind):
            fields[kind] = registry(kind)[given["name"]].with_base_dir(given, folder)
    return fields


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and isinstance(getattr(value, "name", None), str):  # a policy
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"name": value.name, **fields}  # type: ignore[union-attr]
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, Real) and hasattr(value, "item"):
        return value.item()  # NumPy's numbers are written as Python's
    if value is None or isinstance(value, str | int | float | bool):
        return value
    # An object given from Python, such as a loaded model, is told and not stored.
    return str(value) if isinstance(value, Path) else type(value).__name__
