"""The `per_head` pattern: a table gives a pattern for each head of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from mmaccel.core.errors import RecipeError, quoted, warn
from mmaccel.core.files import outside
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.merge_heads import Share, merge_plans
from mmaccel.core.prefill.plan import AttentionPlan, head_runs
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import policy, register, with_base_dir
from mmaccel.policies.sparse.dense import Dense

if TYPE_CHECKING:
    from mmaccel.core.adapter import ModelView

SHIPPED = "shipped"
"""Stands for the table in the model's own folder."""
FILE = "heads.json"
"""What that table is called."""
KIND, SCHEMA = "mmaccel heads", 1
"""What the file of a table says it is, and the version of what it holds."""
FIX = "give a file that `mmaccel search` wrote"


@register("sparse", "per_head", compile=False)
@dataclass(frozen=True, kw_only=True)
class PerHead(SparsePattern):
    """Each head of each layer follows the pattern that a table gives it (MMInference, section 3.3 and Algorithm 4).

    table    "shipped": the file heads.json in the model's folder; or the path of a file that `mmaccel search` wrote (a
             relative path in a YAML file starts at that file's folder); or the choices themselves, ``{layer: {head: {"name":
             "grid", "stride": "free"}}}``
    default  the pattern of layers and heads that the table does not name; None: dense. With "shipped", if the
             model's folder has no table, the pattern of all heads; then None raises `RecipeError`

    A file is bound to the model it was searched on: type, layers, heads, key/value heads, head size, rotary settings. Other
    weights of that shape, and prompts of less than half or more than twice the length of the search, give a warning. Under
    tensor parallelism each process follows the patterns of its own heads.
    Heads of one pattern and like fields are planned together, and the sparse heads of a layer run in few operator calls;
    dense heads go through the dense kernel. Every pattern has the block size of this one.
    """

    adaptive: ClassVar[bool] = True
    rounded: ClassVar[bool] = True
    file: ClassVar[tuple[str, str]] = (".json", "table")

    table: str | Mapping[int, Mapping[int, Any]] = SHIPPED
    default: SparsePattern | str | Mapping[str, Any] | None = None
    heads: ClassVar[range | None] = None  # the numbers of those at hand, on what `for_model` returns

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.default is not None:
            object.__setattr__(self, "default", self._pattern("default", self.default))
        if isinstance(self.table, Mapping):
            object.__setattr__(self, "table", self._patterns(self.table))
        elif not isinstance(self.table, str):
            raise RecipeError(
                f"per_head: table is {quoted(self.table)}; give 'shipped', a file, or a mapping of layers."
            )
        elif self.table != SHIPPED:
            _ = self._named

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        return fields if fields.get("table") == SHIPPED else with_base_dir(fields, folder, "table")

    @cached_property
    def _file(self) -> dict[str, Any] | None:
        """What the table's file holds; None for choices given themselves, and for a shipped table not found yet."""
        if not isinstance(self.table, str) or self.table == SHIPPED:
            return None
        file = read_head_table(self.table)
        if file["block"] != self.block:
            raise RecipeError(
                f"per_head: block is {self.block}, and table {self.table!r} was searched with {file['block']}; "
                f"set block to {file['block']}."
            )
        return file

    @cached_property
    def _named(self) -> Mapping[int, Mapping[int, SparsePattern]]:
        if isinstance(self.table, Mapping):
            return self.table
        return {} if self._file is None else self._patterns(patterns_by_layer_and_head(self._file))

    @property
    def searched_prompt_length(self) -> int | None:
        return None if self._file is None else self._file.get("context")

    @property
    def searched_table(self) -> str:
        return f"the table {self.table}"

    @cached_property
    def _layers(self) -> dict[int, SparsePattern]:
        return {}

    def _patterns(self, table: Mapping[Any, Any]) -> dict[int, dict[int, SparsePattern]]:
        file = self.table if isinstance(self.table, str) else None
        built: dict[int, dict[int, SparsePattern]] = {}
        for layer, heads in table.items():
            if not isinstance(heads, Mapping):
                raise RecipeError(
                    f"per_head: table[{quoted(layer)}] is {quoted(heads)}; give a mapping from head numbers to patterns."
                )
            of_layer = built[_number("layer", layer)] = {}
            for head, value in heads.items():
                where = f"table {file!r}, layer {layer}, head {head}" if file else f"table[{layer}][{head}]"
                of_layer[_number("head", head)] = self._pattern(where, value)
        return built

    def _pattern(self, where: str, value: Any) -> SparsePattern:
        if isinstance(value, Mapping):
            value = {"block": self.block, **value}
        elif isinstance(value, str):
            value = {"block": self.block, "name": value}
        pattern = policy("sparse", value, f"per_head: {where}")
        if not isinstance(pattern, SparsePattern) or isinstance(pattern, PerHead):
            raise RecipeError(
                f"per_head: {where} is {quoted(value)}; give one pattern, by name or as a mapping."
            )
        if pattern.block != self.block:
            raise RecipeError(
                f"per_head: {where} has blocks of {pattern.block} and the rest of {self.block}; give them one size."
            )
        return pattern

    def for_model(self, model: ModelView) -> SparsePattern:
        if self.table == SHIPPED:
            there = model.model_folder is not None and (model.model_folder / FILE).is_file()
            if not there and self.default is None:
                raise RecipeError(
                    f"per_head: no table is shipped with this model (there is no {FILE} in its folder); "
                    "run `mmaccel search` on it and give the file as table, or give a default."
                )
            bound = replace(self, table=f"{model.model_folder}/{FILE}" if there else {}).for_model(model)
            if not there:
                rest = getattr(self.default, "name", None)
                note = f"sparse: no table of heads ({FILE}) is in the model's folder; {rest} runs for all heads; "
                note += f"`mmaccel search MODEL --video FILE --out {FILE}` makes one"
                object.__setattr__(bound, "note", note)
            return bound
        file, adapter, whole = self._file, model.adapter, model.model
        if (
            file is not None
            and (other := describe_model_difference(file, adapter.fingerprint(whole))) is not None
        ):
            raise RecipeError(
                f"per_head: table {self.table!r} was searched on another model ({other}); run `mmaccel search` on this."
            )
        # Digests are made where the file names the weights it was searched on.
        weights = None if file is None else file.get("weights")
        if weights is not None and adapter.qk_checksum(whole) not in (None, weights):
            warn(
                f"per_head: table {self.table!r} was searched on other weights of this architecture; "
                "run `mmaccel search` on this model for patterns that fit its heads."
            )
        shape = adapter.global_geometry(whole)
        for layer, heads in self._named.items():
            if layer >= shape.layers:
                raise RecipeError(
                    f"per_head: table has layer {layer}; the model has layers 0 to {shape.layers - 1}."
                )
            if heads and max(heads) >= shape.heads:
                raise RecipeError(
                    f"per_head: table[{layer}] has head {max(heads)}; the model has heads 0 to {shape.heads - 1}."
                )
        bound = replace(self)
        object.__setattr__(bound, "heads", adapter.local_heads(whole))
        return bound

    def for_layer(self, layer: int) -> SparsePattern:
        if layer not in self._layers:
            rest = self.default if isinstance(self.default, SparsePattern) else Dense(block=self.block)
            named, count = self._named.get(layer, {}), None
            if self.heads is not None:
                count = len(self.heads)
                named = {n: named[head] for n, head in enumerate(self.heads) if head in named}
            of_layer = LayerHeadPatterns(block=self.block, named=named, rest=rest, heads=count)
            self._layers[layer] = of_layer if named else rest
        return self._layers[layer]

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        """Return the plan of layer 0; callers use `for_layer(layer)` for other layers."""
        return self.for_layer(0).plan(query, key, q_layout, k_layout)

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        return max(self.for_layer(layer).max_blocks_total(n_query, n_key) for layer in (0, *self._named))

    def head_pattern_names(self, heads: int) -> tuple[str, ...]:
        return self.for_layer(0).head_pattern_names(heads)


def _number(what: str, value: Any) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RecipeError(f"per_head: {quoted(value)} is not a {what}; give its number, 0 or more.")
    return value


@dataclass(frozen=True, kw_only=True)
class LayerHeadPatterns(SparsePattern):
    """The patterns of the heads of one layer: `named` has those of some heads, `rest` is that of all others. `heads`: number
    of heads, if known."""

    name: ClassVar[str] = PerHead.name
    adaptive: ClassVar[bool] = True
    rounded: ClassVar[bool] = True
    reads_values: ClassVar[bool] = True  # of heads that do
    compiles: ClassVar[bool] = False

    named: Mapping[int, SparsePattern]
    rest: SparsePattern = field(default_factory=Dense)
    heads: int | None = None

    def head_pattern(self, head: int) -> SparsePattern:
        """Return the sparse pattern of one head of this layer."""
        return self.named.get(head, self.rest)

    def heads_by_pattern(self, heads: int) -> list[tuple[SparsePattern, list[int]]]:
        """Return the different patterns of `heads` heads, each with the heads that use it."""
        kinds: list[tuple[SparsePattern, list[int]]] = []
        for head in range(heads):
            same = [some for known, some in kinds if known == self.head_pattern(head)]
            if same:
                same[0].append(head)
            else:
                kinds.append((self.head_pattern(head), [head]))
        return kinds

    def plan(
        self,
        query: Tensor,
        key: Tensor,
        q_layout: TokenLayout,
        k_layout: TokenLayout,
        value: Tensor | None = None,
    ) -> AttentionPlan | None:
        heads, group = query.shape[1], query.shape[1] // key.shape[1]
        shares: list[Share] = []
        for pattern, some in self.heads_by_pattern(heads):
            if not pattern.adaptive and not pattern.reads_values:
                # What looks at the layout alone is planned for one head, and all follow it.
                shares.append((some, pattern.plan(query[:, :1], key[:, :1], q_layout, k_layout)))
                continue
            runs = head_runs(some, group)
            if value is None or not pattern.reads_values:
                shares += pattern.plan_heads(runs, query, key, q_layout, k_layout)
                continue
            for run in runs:
                tensors = run.select_queries(query), key[:, run.groups], value[:, run.groups]
                shares.append((run.heads, pattern.plan_layer(*tensors, q_layout, k_layout)))
        return merge_plans(shares, heads, group, q_layout, k_layout)

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        whole = self.heads is not None and len(self.named) >= self.heads
        some = [*self.named.values(), *([] if whole else [self.rest])]
        return max(pattern.max_blocks_total(n_query, n_key) for pattern in some)

    def expected_blocks(
        self, n_query: int, n_key: int, layouts: tuple[TokenLayout, TokenLayout] | None = None
    ) -> float:
        if self.heads is None:
            return self.max_blocks_total(n_query, n_key)
        kinds = self.heads_by_pattern(self.heads)
        return sum(len(some) * p.expected_blocks(n_query, n_key, layouts) for p, some in kinds) / self.heads

    def head_pattern_names(self, heads: int) -> tuple[str, ...]:
        return tuple(self.head_pattern(head).head_pattern_names(1)[0] for head in range(heads))


def read_head_table(path: str | Path) -> dict[str, Any]:
    """Read a table of head patterns: `model` (fingerprint), `weights` (their checksum), `context` (tokens that its budgets
    are for), `block`, `layers` (for each layer and head a mapping with its `pattern` and measurements), and whatever else
    the search wrote. Raises `RecipeError` for a file that cannot be read, is no such table, or has another version."""
    where = f"table {quoted(str(path), outside.PATH)}"
    table = outside.read_json(path, where, RecipeError, fix=FIX)
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise RecipeError(f"{where} holds no head patterns; {FIX}.")
    if table.get("schema") != SCHEMA:
        raise RecipeError(
            f"{where} has schema {quoted(table.get('schema'))} and this version reads {SCHEMA}; search again."
        )
    layers: Any = table.get("layers")
    # Tables of before name no weights and, made by hand, no length.
    kinds: dict[str, Any] = {"model": dict, "block": int, "context": int, "weights": str | None}
    whole = all(isinstance({"context": 1, **table}.get(name), kind) for name, kind in kinds.items())
    if not (whole and isinstance(layers, list) and layers and all(map(_names_patterns, layers))):
        raise RecipeError(f"{where} is not whole; search again.")
    return table


def patterns_by_layer_and_head(table: Mapping[str, Any]) -> dict[int, dict[int, Any]]:
    """Return layer -> head -> pattern of a table, as `per_head` takes them."""
    return {
        number: {h: head["pattern"] for h, head in enumerate(layer)}
        for number, layer in enumerate(table["layers"])
    }


def describe_model_difference(table: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return in a few words how a table's model differs from `model` (a fingerprint of it); None if it does not."""
    theirs = table["model"]
    for name in dict.fromkeys((*model, *theirs)):
        if theirs.get(name) != model.get(name):
            return f"{name} {quoted(theirs.get(name))} there, {quoted(model.get(name))} here"
    return None


def _names_patterns(layer: Any) -> bool:
    """Whether it is a list of one head or more, each with a pattern that has a name."""
    heads = layer if isinstance(layer, list) else []
    patterns = [head.get("pattern") if isinstance(head, dict) else None for head in heads]
    return bool(heads) and all(isinstance(p, dict) and isinstance(p.get("name"), str) for p in patterns)
