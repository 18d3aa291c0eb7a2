"""Reads all text that comes from outside the package, with limits on its size, depth and numbers.

Only regular files are read: a pipe, a device or a folder is refused before it is opened, as opening could block and reading
need not end. Text is UTF-8. Anything else raises an error, of the class that the caller names, in one sentence. Videos and
images are read by `mmaccel.media`, tensors by `core.files.checkpoint_io`; both check files by `check_regular_file`.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from typing import Any

import yaml

from mmaccel.core.errors import MmaccelError, RecipeError, quoted

TEXT_BYTES = 1 << 20
"""Most bytes of a file that people write: a recipe, a chat template, a list of questions."""
JSON_BYTES = 64 << 20
"""Most bytes of a file that a program wrote: a table of heads, the facts of a session, the settings of a processor."""
NODES, CONTAINERS = 16_000_000, 2_000_000
"""Most values of a JSON file, and most lists and mappings among them."""
YAML_NODES = 50_000
"""Most values of a YAML file, with its aliases expanded."""
DEPTH = 64
"""How deep values may be nested."""
PATH = 240
"""Characters of a path that an error shows."""
DIGITS = 40
"""Most characters of a number."""

Failure = type[MmaccelError]


def check_regular_file(
    path: str | os.PathLike[str], what: str, failure: Failure, fix: str = "give a file"
) -> int:
    """Check that `path` is a regular file, without opening it, and return its size in bytes; raise `failure` for anything
    else."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        place = quoted(os.path.abspath(path), PATH)[1:-1]
        raise failure(f"{what} cannot be read ({os_reason(error)}: {place}); {fix}.") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise failure(f"{what} is {kind}, not a file; {fix}.")
    return status.st_size


def read_text(
    path: str | os.PathLike[str],
    what: str,
    failure: Failure,
    *,
    most: int = TEXT_BYTES,
    fix: str = "give a file",
) -> str:
    """Return the text of a UTF-8 file of at most `most` bytes; `what` and `fix` are words for error messages."""
    check_regular_file(path, what, failure, fix)
    # Without waiting: another kind of file may have taken its place meanwhile.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise failure(f"{what} is not a file; {fix}.")
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, MmaccelError):
            raise
        raise failure(f"{what} cannot be read ({os_reason(error)}); {fix}.") from error
    return decode_text(data, what, failure, most=most, fix=fix)


def decode_text(
    data: bytes, what: str, failure: Failure, *, most: int = TEXT_BYTES, fix: str = "give text"
) -> str:
    """Return UTF-8 `data` as text, without a byte-order mark; raise `failure` for other bytes or more than `most`."""
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise failure(f"{what} has more than {size}; {fix}.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise failure(f"{what} is not UTF-8 text: line {line} has other bytes; {fix}.") from error


def read_json(
    path: str | os.PathLike[str],
    what: str,
    failure: Failure,
    *,
    most: int = JSON_BYTES,
    fix: str = "give a file",
) -> Any:
    """Read a JSON file of at most `most` bytes, with limits on its values, nesting and numbers."""
    text = read_text(path, what, failure, most=most, fix=fix)
    # Commas and brackets bound the number of values before any of them takes memory.
    containers = text.count("[") + text.count("{")
    if containers > CONTAINERS or text.count(",") + containers > NODES:
        raise failure(f"{what} holds too many values; {fix}.")
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise failure(f"{what} has more than {DEPTH} values nested in each other; {fix}.") from error
    except ValueError as error:
        fault = str(error) if isinstance(error, json.JSONDecodeError) else str(error).partition(": ")[0]
        raise failure(f"{what} is not valid JSON ({fault.rstrip('.').lower()}); {fix}.") from error
    level = [values]  # walked without recursion
    for _ in range(DEPTH):
        if any(isinstance(one, int) and one.bit_length() > 64 for one in level):
            raise failure(f"{what} has a whole number of more than 64 bits; {fix}.")
        lists = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level = list(itertools.chain.from_iterable(lists))
    if level:
        raise failure(f"{what} has more than {DEPTH} values within each other; {fix}.")
    return values


def read_yaml(text: str, what: str, failure: Failure = RecipeError) -> Any:
    """Parse YAML into plain values; raise `failure` for a duplicate key. Tags create no objects."""
    try:
        return yaml.load(text, _Limited)
    except yaml.YAMLError as error:
        raise failure(f"{what} is not valid YAML: {_clipped(error)}.") from error
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        # What PyYAML's own constructors raise of a scalar that is not what its tag says.
        raise failure(f"{what} is not valid YAML: a value does not match its tag.") from error


class _Limited(yaml.SafeLoader):
    """YAML in which no key of a mapping is given twice, and whose size with aliases expanded is limited."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node as PyYAML does; raise `YAMLError` if the text is nested too deeply or holds too many values."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        name: str | None = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            # An anchor has no size before its end: within it, it would hold itself.
            self._count(self._sizes.get(str(name), YAML_NODES) if name in self.anchors else 1)
            return super().compose_node(parent, index)
        before = self._nodes
        self._depth += 1
        if self._depth > DEPTH:
            raise yaml.YAMLError(f"more than {DEPTH} values are nested in each other")
        self._count(1)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if name is not None:
            self._sizes[name] = self._nodes - before
        return node

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > YAML_NODES:
            raise yaml.YAMLError(f"it holds more than {YAML_NODES} values, with its aliases expanded")

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        """Compose a scalar as PyYAML does; raise `YAMLError` for a number with too many characters."""
        node = super().compose_scalar_node(anchor)
        if node.tag.rpartition(":")[2] in ("int", "float") and len(node.value) > DIGITS:
            raise yaml.YAMLError(
                f"the number in line {node.start_mark.line + 1} has more than {DIGITS} characters"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping as PyYAML does; raise `YAMLError` for a duplicate key."""
        lines: dict[str, int] = {}
        for key, _ in getattr(node, "value", ()):
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    fault = f"{quoted(key.value)} is given twice, in lines {lines[key.value]} and {line}"
                    raise yaml.YAMLError(f"{fault}; leave one out")
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def os_reason(error: BaseException) -> str:
    """Return in a few words why the operating system refused: the text of a system error."""
    return (
        _clipped(getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".").lower()
    )


def _clipped(error: Any, most: int = 200) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[: most - 3] + "..."
