"""YAML text to plain Python values and back, safely and with the line of every key.

PyYAML follows YAML 1.1, where ``1e-3`` and ``yes`` are not what they look like and ``12:30`` is
750. Scalars are read here by the core schema of YAML 1.2 instead. Nesting, size and the
expansion of aliases are bounded, keys must be text and unique, and tags are refused, so that
nothing in a file can build an object or use up the machine.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from raygnn.errors import ConfigError

MAX_DEPTH = 50
MAX_VALUES = 10_000
MAX_CHARACTERS = 1 << 20

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_INTEGER = r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = (
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class _Loader(yaml.SafeLoader):
    """SafeLoader's parser with the scalars of YAML 1.2 and bounds on what it composes."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = 0
        self.values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        self.values += 1
        mark = self.peek_event().start_mark
        if self.depth > MAX_DEPTH:
            raise _at(mark, f"more than {MAX_DEPTH} levels of nesting")
        if self.values > MAX_VALUES:
            raise _at(mark, f"more than {MAX_VALUES} values")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which YAML 1.2 would read as a number."""


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INTEGER, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


_LINE_ENDS = "\x85\u2028\u2029"


def write_yaml(value: Any) -> str:
    """YAML of plain values that :func:`read_yaml` and any YAML 1.1 parser read back the same."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if any(mark in text for mark in _LINE_ENDS):  # left bare, they are read back as blanks
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    return text


def read_yaml(text: str, where: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse one YAML document.

    Args:
        text: the document.
        where: what to call it in errors, such as the name of its file.

    Returns:
        Its value (dict, list, str, int, float, bool or None), and the line, from 1, on which
        each key path in it stands.

    Raises:
        ConfigError: for bad syntax (with line and column), a duplicate key, a key that is not
            text, a tag, or a document that is too large or too deeply nested.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{len(text)} characters, more than the {MAX_CHARACTERS} of any configuration",
            where=where,
            remedy="check that this is the file you meant",
        )
    try:
        node, builder = _Loader(text).get_single_node(), _Builder()
        return (None if node is None else builder.build(node, (), 0)), builder.lines
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise _syntax(where, line, column, "a character that YAML does not allow") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _syntax(where, line, column, problem) from None


def _syntax(where: str, line: int, column: int, problem: str) -> ConfigError:
    return ConfigError(
        f"not a valid configuration in YAML: {problem}",
        where=f"{where}: line {line}, column {column}",
        remedy="correct this line; sections are written as `section:` and indented `key: value`",
    )


def _at(mark: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class _Builder:
    """Builds values from nodes. Aliases are expanded, so that what is shared counts each time."""

    def __init__(self) -> None:
        self.values = 0
        self.lines: dict[KeyPath, int] = {}

    def build(self, node: yaml.Node, path: KeyPath, depth: int) -> Any:
        self.values += 1
        if depth > MAX_DEPTH or self.values > MAX_VALUES:
            raise _at(node.start_mark, "aliases that expand without end")
        if not node.tag.startswith(_TAG):
            raise _at(node.start_mark, f"the tag {node.tag!r}, but tags are not allowed")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            self._known_tag(node, "seq")
            return [
                self.build(item, (*path, number), depth + 1)
                for number, item in enumerate(node.value)
            ]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        self._known_tag(node, "map")
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = key_node.start_mark
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise _at(mark, "a key that is not text (put it in quotes)")
            if key in result:
                raise _at(mark, f"the key {key!r} a second time")
            here = (*path, key)
            self.lines[here] = mark.line + 1
            result[key] = self.build(value_node, here, depth + 1)
        return result

    def _known_tag(self, node: yaml.Node, *names: str) -> str:
        name = node.tag.removeprefix(_TAG)
        if name not in names:
            raise _at(node.start_mark, f"the tag !!{name}, but tags are not allowed")
        return name

    def _scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        name = self._known_tag(node, "null", "bool", "int", "float", "str")
        text = node.value
        if name == "null":
            return None
        if name == "bool":
            return text.lower() == "true"
        try:
            if name == "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if name == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            raise _at(node.start_mark, "a number that cannot be read") from None
        return str(text)
