"""`Policy`, the base class of all policies, the ranges of their fields, and the registry that maps names to policy classes.

A policy is registered by its file::

    @register("sparse", "a_shape")
    @dataclass(frozen=True, kw_only=True)
    class AShape(SparsePattern): ...

Recipes, the command line and the contract tests then find it by name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mmaccel.core.adapter import ModelAdapter
from mmaccel.core.errors import RecipeError, UnknownName, check_family_class, quoted

C = TypeVar("C", bound=type)

_FORMER = """
    placed:with_base_dir asks:query_time_fields lookback:max_rollback reach:rollback_limit admits_sparse:allows_sparse
    toll:max_blocks bound:max_blocks_total expected:expected_blocks guess:estimate_blocks plan_of:plan_heads
    stream:open_stream shown:shown_units glance:scoring_layer turn:question_scope enter:begin_pass leave:end_pass
    seat:new_kv_slot idle:end_ingest between:limit_to_units fit:units_that_fit let_go:forget_old_units
    merge:merge_units waiting:waiting_features seen:seen_tokens ahead:receive_hidden summaries:count_summary_columns
    wrote:record_written lacks:count_dropped at:for_layer left:kept_token_count cut:prune recall:recalled_columns
    watch:open_stream notes:report_notes bind:for_model finish_intake:end_ingest take_hidden:receive_hidden
    note_written:record_written note_shown_columns:record_shown_columns note_listed_rows:record_sparse_rows
    on_stream:for_stream write_slot:new_kv_slot write_slot_per_layer:new_kv_slots
    stages:pruning_stages choose:choose_candidates score:score_candidates parts:build_plan_parts groups:modality_groups
    probe:target_prefill_probe observe:observe_committed reorder:select_sequences for_layers:for_layer_share
    buffers:layer_buffers check:check_target pruner:prompt_pruner context:searched_prompt_length
"""
RENAMED = dict(pair.split(":") for pair in _FORMER.split())
"""Members of policies, memories and drafts, as earlier versions called them: former name -> name."""


def refuse_former_names(cls: type) -> None:
    """Raise `RecipeError` if `cls` defines a method of its base class under its name of an earlier version (`RENAMED`)."""
    for former, name in RENAMED.items():
        if former in vars(cls) and hasattr(cls, name):
            raise RecipeError(f"{cls.__name__}: {former} is called {name} now; rename it.")


class _TakesFormerFields(ABCMeta):
    upgrade: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return super().__call__(*args, **cls.upgrade(fields))

    def __setattr__(cls, name: str, value: Any) -> None:
        # What `dataclass` sets first: it would refuse an unfrozen subclass itself, in words of Python.
        bases = (getattr(base, name, None) for base in cls.__mro__[1:])
        if name == "__dataclass_params__" and not value.frozen and any(one and one.frozen for one in bases):
            raise RecipeError(
                f"{cls.__name__}: it is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True)."
            )
        super().__setattr__(name, value)


class Policy(metaclass=_TakesFormerFields):
    """Base of sparse patterns, KV memories, drafts and pruners. Each kind has a base: ``class KVPolicy(Policy, kind="kv")``.

    file   (extension, field): a file with this extension is by itself a recipe with this policy; `field` holds its path
    words  names that users may try for this kind and that mean something else: name -> the end of a sentence that says what
           it means and what to use instead
    """

    name: ClassVar[str]
    file: ClassVar[tuple[str, str] | None] = None
    words: ClassVar[Mapping[str, str]] = {}
    no_tensor_parallel: ClassVar[str | None] = None
    """Why it does not serve a process that has some of a layer's heads (tensor parallelism), after "it"; None: it does."""

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__()
        refuse_former_names(cls)
        if kind is not None:
            BASES[kind] = cls

    def __post_init__(self) -> None:
        check_field_values(getattr(self, "name", type(self).__name__), self)

    @classmethod
    def upgrade(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `fields` with field names of earlier versions replaced by the present ones, with a warning for each.

        Raises `RecipeError` for a value that is no longer supported.
        """
        return fields

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """Return `fields`, read from a file in `folder`, with relative paths resolved against `folder`."""
        return fields


@dataclasses.dataclass(frozen=True)
class FieldLimit:
    """The allowed values of a policy's field: `fits` tests a value, `give` says in words what is allowed."""

    fits: Callable[[Any], bool]
    give: str

    def check(self, who: str, field: str, value: Any) -> None:
        """Raise `RecipeError`, which names policy `who` and `field`, if `value` is not allowed."""
        if not self.fits(value):
            raise RecipeError(f"{who}: {field} is {quoted(value)}; give {self.give}.")


def at_least(least: float, of: str = "") -> FieldLimit:
    """Return a `FieldLimit` that allows numbers >= `least`; `of` is appended to its description."""
    return FieldLimit(lambda x: isinstance(x, _PLAIN[float]) and x >= least, f"at least {least}{of}")


def one_of(*choices: object, why: str = "") -> FieldLimit:
    """Return a `FieldLimit` that allows the given choices; `why` is appended to its description."""
    *most, last = map(repr, choices)
    return FieldLimit(choices.__contains__, f"{', '.join(most)} or {last}{why}")


def in_range(least: float, most: float, give: str) -> FieldLimit:
    """Return a `FieldLimit` that allows numbers from `least` to `most`, both included; `give` describes them in errors."""

    def fits(value: Any) -> bool:
        """Return whether `value` is a number in the range; true and false are no numbers."""
        return isinstance(value, Real) and not isinstance(value, bool) and least <= value <= most  # type: ignore[operator]

    return FieldLimit(fits, give)


SHARE = in_range(0, 1, "a share from 0 to 1")


def limited(default: Any, limit: FieldLimit) -> Any:
    """Return a dataclass field with a `default` and a `limit` on its values, checked when the policy is created."""
    return dataclasses.field(default=default, metadata={"limit": limit})


def check_field_values(who: str, fields: Any) -> None:
    """Raise `RecipeError`, beginning with `who`, for the first of `fields` that has a wrong type or breaks its `limited`."""
    for name, types in _plain_types(fields.__class__).items():
        value = getattr(fields, name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(_WORDS[one] for one in types)
            text = "the text " * isinstance(value, str)
            raise RecipeError(f"{who}: {name} is {text}{quoted(value)}; give {wanted}.")
    for name, limit in field_limits(fields.__class__).items():
        limit.check(who, name, getattr(fields, name))


_NONE, _ALONE_OR_UNION = type(None), (None, typing.Union, type(int | None))
_PLAIN: dict[Any, Any] = {int: Integral, float: Real, bool: bool, str: str, _NONE: _NONE}
_WORDS = {Integral: "a whole number", Real: "a number", bool: "true or false", str: "a text", _NONE: "null"}


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, AttributeError, TypeError):
        return {}  # a class may name types that only a type checker sees


@functools.cache
def _plain_types(cls: type) -> dict[str, tuple[type, ...]]:
    """Field -> the types of its values, of the fields whose types are all of `_PLAIN`; richer fields check themselves."""
    each, named = dict[str, tuple[Any, ...]](), {field.name for field in dataclasses.fields(cls)}
    for name, hint in _hints(cls).items():
        if name in named and typing.get_origin(hint) in _ALONE_OR_UNION:
            each[name] = typing.get_args(hint) or (hint,)
    return {name: tuple(_PLAIN[one] for one in some) for name, some in each.items() if {*some} <= {*_PLAIN}}


@functools.cache
def field_limits(cls: type) -> dict[str, FieldLimit]:
    """Return field -> its allowed values: the choices of its type, or the limit that `limited` sets in the class or its
    nearest base. If the type allows None, None is allowed too."""
    hints, found = _hints(cls), {}
    for name, one in getattr(cls, "__dataclass_fields__", {}).items():
        bases = (base.__dict__.get("__dataclass_fields__", {}).get(name) for base in cls.__mro__)
        limit = next(
            (field.metadata["limit"] for field in bases if field and "limit" in field.metadata), None
        )
        if limit is None and typing.get_origin(hint := hints.get(name)) is typing.Literal:
            limit = one_of(*typing.get_args(hint))
        if limit is not None:
            found[name] = _or_null(limit) if "None" in str(one.type) else limit
    return found


def field_texts(cls: type) -> dict[str, str]:
    """Return field -> what the docstring of dataclass `cls` says of it: the paragraph that begins with its name, joined."""
    if not dataclasses.is_dataclass(cls):
        return {}
    names = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, str] = {}
    current = None
    for line in (inspect.getdoc(cls) or "").splitlines():
        first = line.split(maxsplit=1)[0].rstrip(",") if line.strip() else ""
        if line and not line.startswith(" "):
            current = first if first in names and "  " in line else None
        if current is not None and line.strip():
            found[current] = f"{found.get(current, '')} {' '.join(line.split())}".strip()
    return found


def every_field_text(cls: type) -> dict[str, str]:
    """Return field -> what docstrings say of it (see `field_texts`), in the class or else in its nearest base."""
    return {field: text for base in reversed(cls.__mro__) for field, text in field_texts(base).items()}


def _or_null(limit: FieldLimit) -> FieldLimit:
    give = limit.give if "null" in limit.give else f"{limit.give}, or null"
    return FieldLimit(lambda value: value is None or limit.fits(value), give)


def with_base_dir(fields: Mapping[str, Any], folder: Path, name: str) -> Mapping[str, Any]:
    """Return `fields` with the path in field `name` resolved against `folder`; a value that is no path is unchanged."""
    path = fields.get(name)
    return {**fields, name: str(folder / path)} if isinstance(path, str) and path else fields


def kind_of(made: Policy) -> str:
    """Return the kind of a policy: the recipe's field that it is for."""
    return next(kind for kind, base in BASES.items() if isinstance(made, base))


def check_registered(made: Policy) -> None:
    """Raise `RecipeError` for a policy whose class is not registered, so that it has no name."""
    if not hasattr(made, "name"):
        kind = kind_of(made)
        raise RecipeError(
            f"{kind}: {type(made).__name__} has no name; write @register({kind!r}, NAME) above its @dataclass."
        )


BASES: dict[str, type[Policy]] = dict.fromkeys(("sparse", "kv", "draft", "prune"), Policy)
"""The kinds of policy, each a field of a recipe, and the contract of each, once it is imported."""
PARTS = ("index", "store")
"""The kinds that are fields of memories which keep a stream on the host, and no policies of a recipe by themselves."""
DEFAULTS = {"sparse": "dense", "kv": "full", "draft": "off", "store": "host"}
"""The policies of a recipe that names none: the plain model; and the part that a mapping without a name means."""
KINDS = (*BASES, *PARTS, "model")
"""Besides, "model": the families."""


class Registry(Mapping[str, type[Any]]):
    """A read-only mapping from names to the registered classes of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[Any]] = {}

    def add(self, name: str, cls: type) -> None:
        """Register `cls` as `name`, or anew when its code runs again; raises `RecipeError` if another class has the name."""
        held = self._classes.get(name, cls)
        if (held.__module__, held.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RecipeError(f"{self.kind} {name!r} is registered already; choose another name.")
        self._classes[name] = cls

    def __getitem__(self, name: str) -> type[Any]:
        try:
            return self._classes[name]
        except KeyError:
            own, meant = self.kind != "model", self.explain_foreign_name(name)
            raise UnknownName(self.kind, name, self._classes, own=own, meant=meant) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def __len__(self) -> int:
        return len(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def explain_foreign_name(self, name: str) -> str | None:
        """Return what `name` means elsewhere and what to use instead, if a class declares it (`Policy.words`); else None."""
        meanings = (getattr(cls, "words", {}).get(name) for cls in self._classes.values())
        return next((meaning for meaning in meanings if meaning is not None), None)

    def matching_names_text(self, fits: Callable[[Any], bool]) -> str:
        """Return the names of the classes for which `fits` is true, as words of a sentence: "'one' or 'two'"."""
        return " or ".join(repr(name) for name, cls in self.items() if fits(cls))

    def reject_unused_part(self, name: str, field: str, part: Any) -> None:
        """Raise `RecipeError` if policy `name`, which has no such `field`, was given `part` for it (an index, a store), and
        other policies of this kind have the field."""
        if having := self.matching_names_text(
            lambda cls: field in {one.name for one in dataclasses.fields(cls)}
        ):
            named = part.get("name") if isinstance(part, Mapping) else getattr(part, "name", part)
            raise RecipeError(
                f"{self.kind} {name!r} cannot use {field} {quoted(named)}; leave it out, or take {self.kind} {having}."
            )

    def build(self, name: str, fields: Mapping[str, Any] | None = None) -> Any:
        """Create an instance of the class registered as `name`, with `fields` as its dataclass fields.

        Raises `UnknownName` for an unknown name or field, and `RecipeError` for a value out of range.
        """
        cls = self[name]
        given = dict(cls.upgrade(fields or {}) if issubclass(cls, Policy) else fields or {})
        known = [f.name for f in dataclasses.fields(cls) if f.init]
        if given and not known:
            field = next(iter(given))
            having = self.matching_names_text(lambda one: field in {f.name for f in dataclasses.fields(one)})
            more = f", or take {self.kind} {having}" if having else ""
            raise RecipeError(f"{self.kind} {name!r} has no fields; remove {quoted(field)}{more}.")
        if unknown := [field for field in given if field not in known]:
            for field in unknown:
                if field in BASES:
                    self.reject_unused_part(name, field, given[field])
            parts = [one for kind in PARTS if kind in known for one in registry(kind).values()]
            own = [one.name for part in parts for one in dataclasses.fields(part)]
            others = [*getattr(cls, "FORMER", ()), *own]
            texts = [field if isinstance(field, str) else quoted(field) for field in unknown]
            raise UnknownName("field", texts, known, others=others, owner=f"{self.kind} {name!r}")
        try:
            return cls(**given)
        except TypeError as error:
            raise RecipeError(f"{self.kind} {name!r}: {str(error)[:200]}.") from error


_registries = {kind: Registry(kind) for kind in KINDS}


def registry(kind: str) -> Registry:
    """Return the registry of one kind of `KINDS`; raises `UnknownName` for another kind."""
    if kind not in _registries:
        raise UnknownName("kind", kind, KINDS)
    return _registries[kind]


def policy(kind: str, value: Any, where: str = "") -> Any:
    """Create a policy from its name, or from a mapping with its name and fields; return any other value unchanged.

    `where` names the field in error messages, which begin with it. The caller checks what is returned.
    """
    if isinstance(value, str):
        value = {"name": value}
    elif not isinstance(value, Mapping):
        return value
    fields = dict(value)
    name = fields.pop("name", DEFAULTS.get(kind) if kind in PARTS else None)
    if name is False:
        name = DEFAULTS["draft"]  # YAML reads a bare off as false
    if not isinstance(name, str):
        raise RecipeError(
            f"{where or kind}: a mapping needs the policy's name, for example "
            f"{{name: {next(iter(registry(kind)), '...')}}}."
        )
    try:
        return registry(kind).build(name, fields)
    except RecipeError as error:
        error.args = (f"{where}: ", *error.args) if where else error.args
        raise


def register(kind: str, name: str, *, compile: bool | None = None) -> Callable[[C], C]:
    """Return a class decorator that registers a class of `kind` as `name`, and sets the class attribute `name`.

    compile  of a sparse pattern: whether inductor may compile its `plan`, as one graph, where that pays (on CUDA; see
             `core.decoding.replay.LazilyCompiled`); None keeps the class attribute `compiles`, by default True

    Raises `RecipeError` for a class that is no frozen dataclass derived from its kind's base, or no family with model types
    of its own, or `compile` of another kind.
    """

    def put(cls: C) -> C:
        base = BASES.get(kind)
        if base is not None and not issubclass(cls, base):
            raise RecipeError(
                f"{kind} {name!r}: {cls.__name__} is not a {base.__name__}; derive it from that."
            )
        if base is not None and not getattr(vars(cls).get("__dataclass_params__"), "frozen", False):
            raise RecipeError(
                f"{kind} {name!r}: {cls.__name__} is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) "
                "below @register."
            )
        if compile is not None and kind in KINDS and kind != "sparse":
            raise RecipeError(f"{kind} {name!r}: compile is of sparse patterns alone; leave it out.")
        if kind == "model":
            check_family_class(name, cls, ModelAdapter, registry(kind))
        registry(kind).add(name, cls)
        if compile is not None:
            setattr(cls, "compiles", compile)  # noqa: B010 - as below
        setattr(cls, "name", name)  # noqa: B010 - the attribute is declared by each base class
        return cls

    return put
