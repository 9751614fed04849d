"""YAML text to plain Python values and back, safely and with the line of every key.

PyYAML follows YAML 1.1, where ``1e-3`` is text, ``yes`` is true and ``12:30`` is 750. This module
reads scalars by the core schema of YAML 1.2 instead. Nesting, size and the expansion of aliases
are limited, keys must be text and unique, and tags are refused, so that no file can build an object
or exhaust the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from raygnn.errors import ConfigError

MAX_DEPTH = 50
MAX_VALUES = 10_000
MAX_CHARACTERS = 1 << 20
_LIMIT = f"more than {MAX_DEPTH} levels of nesting, or more than {MAX_VALUES} values"

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_INTEGER = r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = (
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    "float": lambda text: float(re.sub(r"\.(?=[in])", "", text.lower())),
    "str": str,
}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 that records the line of every key."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.nodes = self.values = 0
        self.lines: dict[KeyPath, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        self.nodes += 1
        if self.depth > MAX_DEPTH or self.nodes > 2 * MAX_VALUES:  # keys are nodes, too
            raise _error(self.peek_event(), _LIMIT)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def value(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        """Return the node's value. Aliases are expanded, so a shared value counts each time."""
        self.values += 1
        if self.values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise _error(node, f"{_LIMIT}, with aliases expanded")
        kind = node.tag.removeprefix(_TAG)
        if kind == "map" and isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if kind == "seq" and isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]
        if kind not in _SCALARS or not isinstance(node, yaml.ScalarNode):
            tag = node.tag.replace(_TAG, "!!")
            raise _error(node, f"the tag {tag!r}, but tags are not allowed")
        try:
            return _SCALARS[kind](node.value)
        except ValueError:
            raise _error(node, "a number that cannot be read") from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag != f"{_TAG}str" or not isinstance(key_node, yaml.ScalarNode):
                raise _error(key_node, "a key that is not text (put it in quotes)")
            key = key_node.value
            if key in result:
                raise _error(key_node, f"the key {key!r} a second time")
            here = (*path, key)
            self.lines[here] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, here)
        return result


def _error(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text that YAML 1.2 would read as a number."""


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INTEGER, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


def write_yaml(value: Any) -> str:
    """Return YAML of plain values that :func:`read_yaml` and any YAML 1.1 parser read back."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if any(mark in text for mark in "\x85\u2028\u2029"):  # unescaped, they are read back as blanks
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    return text


def read_yaml(text: str, where: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse one YAML document, called ``where`` in errors.

    Returns its value, and the line, from 1, of each key path. Raises ConfigError for bad syntax
    (with line and column), a duplicate key, a key that is not text, a tag, or a document that is
    too large or too deeply nested.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{len(text)} characters, more than the {MAX_CHARACTERS} of any configuration",
            where=where,
            remedy="check that this is the right file",
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None if node is None else loader.value(node)), loader.lines
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        problem = "a character that YAML does not allow"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    raise ConfigError(
        f"not a valid configuration in YAML: {problem}",
        where=f"{where}: line {line}, column {column}",
        remedy="correct this line; sections are written as `section:` and indented `key: value`",
    )
