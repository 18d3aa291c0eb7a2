"""`mmaccel list` and `mmaccel describe`: registered names and which of them combine."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module, resources
from typing import Annotated, Any

import torch
from rich.table import Table
from typer import Argument, Option

from mmaccel.backends import select
from mmaccel.cli.choices import policy_has_field
from mmaccel.cli.console import echo, out, print_json
from mmaccel.core.errors import RecipeError, UnknownName
from mmaccel.core.recipe import FORMER, MAIN_PRESETS, VERSION, Recipe, check_generate, presets, stream_policy
from mmaccel.core.registry import (
    BASES,
    DEFAULTS,
    KINDS,
    PARTS,
    FieldLimit,
    every_field_text,
    field_limits,
    field_texts,
    policy,
    registry,
)
from mmaccel.models import shipped
from mmaccel.models.shapes import SHAPES

STEPS = "captured steps", "CUDA-graph decode"  # of a family: in JSON, and in words
RECIPE = "recipe"
"""The word for what a recipe holds."""
DESCRIBED = tuple(kind for kind in KINDS if kind != "model")


def registered_names_by_kind() -> dict[str, Any]:
    """Return kind -> registered names; for backends name -> None if it runs here, else the reason why not."""
    return {
        **{kind: list(registry(kind)) for kind in DESCRIBED},
        "recipe": list(presets()),
        "model": list(shipped.NAMES),
        "family": list(registry("model")),
        "shape": sorted(SHAPES),
        "backend": select.why_unusable("cuda" if torch.cuda.is_available() else "cpu"),
    }


def list_names(
    as_json: Annotated[bool, Option("--json", help="One JSON object: kind -> names.")] = False,
    pairs: Annotated[bool, Option("--pairs", help="What composes with what, as Markdown.")] = False,
) -> None:
    """List the policies, recipes, models and families that there are, or which policies combine."""
    if pairs:
        print(_combination_tables(), end="")
        return
    found = registered_names_by_kind()
    if as_json:
        print_json({**found, "abilities": _family_features()})
        return
    table = Table("kind", "names", box=None, pad_edge=False)
    for kind, names in found.items():
        if kind == "backend":
            names = [f"{name} (unavailable: {why})" if why else name for name, why in names.items()]
        table.add_row(kind, ", ".join(names) or "(none)")
    out().print(table, "`--recipe`: a sparse, kv, draft, prune or recipe name, or a YAML file.", sep="\n")
    uses, lines = Table("preset", "what for", box=None, pad_edge=False), presets()
    for name in MAIN_PRESETS:
        uses.add_row(name, lines[name])
    out().print()
    out().print(uses)
    features = (one.replace(*STEPS) for one in next(iter(_family_features().values())))
    families = Table("family", "model types", *features, box=None, pad_edge=False)
    for name, can in _family_features().items():
        families.add_row(name, ", ".join(registry("model")[name].model_types), *can.values())
    out().print(
        "",
        families,
        "streams: sessions, and each kv but full and window, which all have. trees: drafts tree and sparse_to_dense. "
        "vision pruners: visionzip. "
        f"{STEPS[1]}: faster on CUDA, not for quantized weights; in generic and other for Llama, Mistral, Qwen2 and Qwen3. "
        "Recurrent layers (qwen3_5) prefill in transformers' code, which is slow without flash-linear-attention.",
        sep="\n",
    )


def _family_features() -> dict[str, dict[str, str]]:
    """Family -> feature -> "yes" or "no": what the models of each family support."""
    found = {}
    for name in registry("model"):
        family: Any = registry("model")[name]
        can = {what: what not in family.unable for what in ("streams", "trees", "pruning")}
        can |= {
            "vision pruners": family.vision_scorer is not None and can["pruning"],
            STEPS[0]: bool(family.decoder_layers),
        }
        found[name] = {what: "yes" if able else "no" for what, able in can.items()}
        if isinstance(some := family.vision_scorer, Mapping) and can["pruning"]:
            found[name]["vision pruners"] = ", ".join(some)
    return found


def describe_name(
    name: Annotated[
        str, Argument(help="A name from list, a model type, a word of a policy, or recipe: its fields.")
    ],
) -> None:
    """Describe a name: its text, its fields with types and defaults, or its YAML."""
    name, found = FORMER.get(name, name), registered_names_by_kind()
    kinds = [kind for kind in DESCRIBED if name in registry(kind)]
    texts = []
    if name in found["recipe"]:
        text = resources.files("mmaccel").joinpath("recipes", f"{name}.yaml").read_text()
        both = f"; there is a {' and a '.join(kinds)} of this name too, below" if kinds else ""
        texts.append(f"{name} (recipe: what `--recipe {name}` is{both})\n\n{text.rstrip()}")
    if name == RECIPE:
        texts.append(
            f"{RECIPE} (what a YAML file or `accelerate` sets)\n\n{inspect.getdoc(Recipe)}\n\ndefaults"
        )
        for field, value in Recipe().to_dict().items():
            default = value["name"] if isinstance(value, dict) else "null" if value is None else value
            texts[-1] += f"\n  {field} = {default}"
    texts += [_class(kind, name) for kind in kinds]
    texts += [
        _class("model", one) for one, cls in registry("model").items() if name in (one, *cls.model_types)
    ]
    texts += [_other(kind, name) for kind in ("model", "shape", "backend") if name in found[kind]]
    texts = texts or _words(name)
    if not texts:
        known = {one: kind for kind in found for one in found[kind]}
        raise UnknownName("name", name, known, known, own=True)
    echo("\n\n".join(texts))


def _class(kind: str, name: str) -> str:
    cls = registry(kind)[name]
    lines = [f"{name} ({'family' if kind == 'model' else kind})", "", inspect.getdoc(cls) or ""]
    if kind == "model":
        family: Any = cls
        lines += ["", f"serves {', '.join(family.model_types).replace('*', 'any other type')}"]
        lines += [f"  {what.replace(*STEPS)}: {able}" for what, able in _family_features()[name].items()]
        lines += [f"  no {what}: its models {why}" for what, why in family.unable.items()]
    elif dataclasses.is_dataclass(cls):
        limits = field_limits(cls)
        texts = {**every_field_text(cls), **dict.fromkeys(field_texts(cls), "")}  # its own stand above
        fields = [one for one in dataclasses.fields(cls) if one.init]
        told = [_field(one, limits.get(one.name), texts.get(one.name, "")) for one in fields]
        lines += ["", "fields (None is null in YAML)", *(told or ["  none"])]
    return "\n".join(lines)


def _field(field: dataclasses.Field[Any], limit: FieldLimit | None, text: str) -> str:
    # A string, unless the file of the class has its annotations evaluated.
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    default = "(required)"
    if field.default is not dataclasses.MISSING:
        default = repr(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        default = repr(field.default_factory())
    # The choices of a Literal are its type.
    allowed = "" if limit is None or "Literal" in kind else f" ({limit.give})"
    about = textwrap.wrap(text.removeprefix(field.name).strip(), 114)
    return "\n      ".join([f"  {field.name}: {kind} = {default}{allowed}", *about])


def _words(word: str) -> list[str]:
    """What a word means to policies: a maker of theirs of that name, or a value that the text of a field puts in quotes."""
    told = []
    for kind in DESCRIBED:
        for name, cls in registry(kind).items():
            maker = vars(cls).get(word)
            if isinstance(maker, classmethod) and not word.startswith("_"):
                shape = str(inspect.signature(getattr(cls, word))).replace("'", "")
                told.append(
                    f"{word} (of {kind} {name})\n\n{cls.__name__}.{word}{shape}\n{inspect.getdoc(maker) or ''}"
                )
            told += [
                f"{word} (of {kind} {name})\n\n  {field}: {text.removeprefix(field).strip()}"
                for field, text in field_texts(cls).items()
                if f'"{word}"' in text
            ]
    return told


def _other(kind: str, name: str) -> str:
    if kind == "shape":
        sizes = "\n".join(f"  {key}: {value}" for key, value in dataclasses.asdict(SHAPES[name]).items())
        text = f"A published configuration with random weights, for benchmarks.\n\n{sizes}"
    elif kind == "backend":
        text = inspect.getdoc(import_module(select.BACKENDS[name])) or ""
    else:
        card = shipped.tiny_model_folder(name) / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else str(shipped.tiny_model_folder(name))
    return f"{name} ({kind})\n\n{text}"


SLOTS = {"sparse": "sparse", "kv": "memory (kv)", "draft": "draft", "prune": "prune"}
YES = "yes"


def build_default_policy(slot: str, name: str, **fields: Any) -> Any:
    """Build policy `name` of `slot` with defaults but for `fields`; a draft that needs a model gets a placeholder name."""
    if policy_has_field(slot, name, "model"):
        fields = {"model": "a-draft", **fields}
    return policy(slot, {"name": name, **fields})


def recipe_error_or_yes(works: Callable[[], object], names: Iterable[str] = ()) -> str:
    """Call `works`; return `YES`, or the message of the `RecipeError` that it raises. The quoted policy names `names` are
    cut from the message, so that one reason has the same text for all policies."""
    try:
        works()
    except RecipeError as error:
        told = str(error)
        for name in names:
            told = told.replace(f" {name!r}", "")
        return told
    return YES


USES: dict[str, Callable[[Recipe], object]] = {"generate": check_generate, "VideoSession": stream_policy}
"""What a recipe serves, and what raises `RecipeError` for one that does not."""


def policy_names_by_field() -> dict[str, list[str]]:
    """Return recipe field -> names that it can take; "own" is the pruner of a draft's own prompt; "none" is no pruner."""
    names = {slot: list(registry(slot)) for slot in SLOTS}
    own = {name for name, cls in registry("prune").items() if cls.stage == "draft"}
    pruners = {"own": sorted(own), "prune": [name for name in names["prune"] if name not in own]}
    return {**names, **{kind: ["none", *some] for kind, some in pruners.items()}}


def why_use_refused(use: str, names: Iterable[str] = (), **parts: Any) -> str:
    """Return `YES`, or why a recipe with the policies `parts` does not support `use` ("generate" or "VideoSession"). `names`
    are cut from the reason, as in `recipe_error_or_yes`."""
    return recipe_error_or_yes(lambda: USES[use](Recipe(**parts)), names)


def why_pair_refused(one: str, other: str, a: str, b: str) -> str:
    """Return `YES` if some use supports policy `a` in recipe field `one` with `b` in field `other`; else why none does."""

    told = [
        why_use_refused(
            use, (a, b), **{one: build_default_policy(one, a), other: build_default_policy(other, b)}
        )
        for use in USES
    ]
    return YES if YES in told else told[-1]


def why_pruner_refused(draft: str, prune: str) -> str:
    """Return `YES`, or why the draft `draft` cannot take the pruner `prune` for its own prompt."""
    return recipe_error_or_yes(lambda: build_default_policy("draft", draft, prune=prune), (draft, prune))


def _combination_tables() -> str:
    """Markdown tables of which policies combine, by trying each pair in a recipe; numbered reasons follow each table."""
    parts, names = (
        [],
        {kind: [name for name in some if name != "none"] for kind, some in policy_names_by_field().items()},
    )
    for one, other in itertools.combinations(SLOTS, 2):
        title = f"{SLOTS[one]} beside {SLOTS[other]}"
        parts.append(_table(title, names[one], names[other], partial(why_pair_refused, one, other)))
    pruners = list(registry("prune"))
    parts.append(_table("prune of a draft (inside draft)", names["draft"], pruners, why_pruner_refused))
    for slot, said in SLOTS.items():
        refused = lambda name, use, slot=slot: why_use_refused(  # noqa: E731
            use, (name,), **{slot: build_default_policy(slot, name)}
        )
        parts.append(_table(f"what a {said} serves", names[slot], [*USES], refused))
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: list[str], columns: list[str], cell: Callable[[str, str], str]) -> str:
    """One table; rows that are alike are one, and so are columns."""
    cells = {(a, b): cell(a, b) for a in rows for b in columns}
    across = _alike(columns, lambda b: tuple(cells[a, b] for a in rows))
    down = _alike(rows, lambda a: tuple(cells[a, b] for b in columns))
    reasons: list[str] = []
    head = f"| | {' | '.join(map(_named, across))} |"
    lines = [f"### {title}", "", head, "| --- " * (1 + len(across)) + "|"]
    for group in down:
        marks = []
        for column in across:
            told = cells[group[0], column[0]]
            if told != YES and told not in reasons:
                reasons.append(told)
            marks.append(YES if told == YES else f"no ({1 + reasons.index(told)})")
        lines.append(f"| {_named(group)} | {' | '.join(marks)} |")
    notes = [f"{number}. {told}" for number, told in enumerate(reasons, 1)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _alike(names: list[str], key: Callable[[str], tuple[str, ...]]) -> list[list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())


def _named(group: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in group)


PLAIN = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}


def print_schema() -> None:
    """Print the JSON schema of recipe YAML files, for editors; it includes the policies of files given by --import."""
    print_json(recipe_schema())


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 7) of a recipe, made of the fields and docstrings of registered policies."""
    kinds: dict[str, Any] = {}
    for kind in DESCRIBED:
        # YAML 1.1 reads a bare off as false.
        names = [*registry(kind), *([False] if "off" in registry(kind) else [])]
        policies = [_object(cls, name) for name, cls in registry(kind).items()]
        if kind in PARTS and kind in DEFAULTS:  # its mapping needs no name
            default = policies[[*registry(kind)].index(DEFAULTS[kind])]
            default["required"].remove("name")
        kinds[kind] = {"anyOf": [{"enum": names}, *policies]}
    whole = _object(Recipe)
    whole["properties"]["backend"] |= {"enum": ["auto", *select.BACKENDS]}
    whole["properties"]["version"] = {"enum": list(range(1, VERSION + 1)), "default": VERSION}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of mmaccel",
        **whole,
        "definitions": kinds,
    }


def _object(cls: Any, name: str | None = None) -> dict[str, Any]:
    """The schema of a mapping that gives the fields of `cls`, and its name."""
    texts, hints = every_field_text(cls), typing.get_type_hints(cls)
    properties: dict[str, Any] = {} if name is None else {"name": {"const": name}}
    required = [] if name is None else ["name"]
    for field in dataclasses.fields(cls):
        if field.init:
            described = {"description": text} if (text := texts.get(field.name)) else {}
            default = {} if field.default is dataclasses.MISSING else {"default": field.default}
            # Parts of a memory are a kind of their own, which the hint does not say.
            part = {"$ref": f"#/definitions/{field.name}"} if field.name in PARTS else None
            kind = part or _kind(hints[field.name])
            # Beside a $ref nothing is read.
            properties[field.name] = (
                {"allOf": [kind], **described, **default}
                if "$ref" in kind
                else {**kind, **described, **default}
            )
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                required.append(field.name)
    about = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    return {
        "type": "object",
        "description": " ".join(about.split()),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _kind(hint: Any) -> dict[str, Any]:
    """The schema of a type; of one that only Python can give, nothing passes."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        found = [one for one in map(_kind, inner) if one != {"not": {}}]
        return found[0] if len(found) == 1 else {"anyOf": found}
    if origin is tuple:
        return {"type": "array", "items": _kind(inner[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _kind(inner[1])}
    kind = next(
        (kind for kind, base in BASES.items() if isinstance(hint, type) and issubclass(hint, base)), None
    )
    return {"not": {}} if kind is None else {"$ref": f"#/definitions/{kind}"}
