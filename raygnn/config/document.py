"""A configuration before it is checked: plain values, and where each was written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raygnn.config.problems import Problem, dotted, nearest, show
from raygnn.config.schema import SECTIONS, Config
from raygnn.config.yaml_text import MAX_CHARACTERS, MAX_DEPTH, KeyPath, read_yaml
from raygnn.errors import ConfigError

_PATHS = (
    ("graph", "path"),
    ("graph", "vocabulary"),
    ("partition", "path"),
    ("staging", "path"),
    ("fault", "mirror"),
    ("storage",),
)


# sections for which one of their keys may stand alone
_SHORT = {("guard",): "mode", ("train", "schedule"): "kind"}


@dataclass(frozen=True)
class Override:
    """A value for one key; ``label`` says in errors who gave it (``--set``)."""

    key: tuple[str, ...]
    value: Any
    label: str


@dataclass
class Document:
    """Raw values and their origin.

    Attributes:
        data: the values, to be checked by the schema.
        label: what errors call the document: its file as it was named.
        file: the file, absolute, if it came from one.
        lines: key path → line in that file, from 1.
        overridden: key path → label of the override that set it.
        relative: paths that were not absolute, once they are resolved.
    """

    data: dict[str, Any]
    label: str
    file: Path | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)
    relative: set[KeyPath] = field(default_factory=set)

    def apply(self, override: Override) -> None:
        """Set one key; a mapping is merged into a section, and replaces anything else.

        Raises:
            ConfigError: when a part of the key has a value that has no keys.
        """
        key, value = override.key, override.value
        if len(key) == 1 and isinstance(value, dict) and _is_merged(key[0], value):
            for name, inner in value.items():
                self.apply(Override((*key, str(name)), inner, override.label))
            return
        target = self.data
        for depth, part in enumerate(key[:-1], start=1):
            if target.get(part) is None:
                target[part] = {}
            if (name := _SHORT.get(key[:depth])) and not isinstance(target[part], dict):
                target[part] = {name: target[part]}
            target = target[part]
            if not isinstance(target, dict):
                raise ConfigError(
                    f"{dotted(key[:depth])} is {show(target)}, which has no keys",
                    where=f"{override.label} {dotted(key)}",
                    remedy=f"set {dotted(key[:depth])} itself",
                )
        target[key[-1]] = value
        self.overridden = {k: v for k, v in self.overridden.items() if k[: len(key)] != key}
        self.overridden[key] = override.label

    def resolve_paths(self) -> None:
        """Make paths absolute, each from where it was written; what is no path stays."""
        if self.data.get("storage") is None:
            self.data["storage"] = Config.model_fields["storage"].default
        self.relative.clear()
        for key in _PATHS:
            section: Any = self.data if len(key) == 1 else self.data.get(key[0])
            value = section.get(key[-1]) if isinstance(section, dict) else None
            if not isinstance(value, (str, Path)) or not str(value) or "://" in str(value):
                continue
            in_file = self.file and key != ("storage",) and not self._override(key)
            base = self.file.parent if self.file and in_file else Path.cwd()
            place = os.path.expanduser(value)
            if not os.path.isabs(place):
                self.relative.add(key)
            section[key[-1]] = os.path.abspath(base / place)

    def error(self, problems: Sequence[Problem]) -> ConfigError:
        """One error for all problems, in the order of the file."""
        if len(problems) == 1:
            (problem,) = problems
            return ConfigError(problem.what, where=self._where(problem.key), remedy=problem.remedy)
        ordered = sorted(problems, key=lambda problem: self._line(problem.key) or 0)
        listed = [
            f"\n  {self._place(problem.key)}: {problem.what}\n    → {problem.remedy}"
            for problem in ordered
        ]
        return ConfigError(f"{len(problems)} problems{''.join(listed)}", where=self.label)

    def _where(self, key: KeyPath) -> str:
        place = self._place(key)
        return place if self._override(key) else f"{self.label}: {place}"

    def _place(self, key: KeyPath) -> str:
        """``train.lr (line 8)`` or ``--set train.lr``."""
        if label := self._override(key):
            return f"{label} {dotted(key)}"
        line = self._line(key)
        return f"{dotted(key)} (line {line})" if line else dotted(key)

    def _override(self, key: KeyPath) -> str | None:
        return _nearest_prefix(key, self.overridden)

    def _line(self, key: KeyPath) -> int | None:
        return None if self._override(key) else _nearest_prefix(key, self.lines)


def _nearest_prefix(key: KeyPath, table: Mapping[KeyPath, Any]) -> Any:
    """The entry of the key, or else of the closest section around it."""
    prefixes = (key[:length] for length in range(len(key), 0, -1))
    return next((table[prefix] for prefix in prefixes if prefix in table), None)


def _is_merged(section: str, value: dict[str, Any]) -> bool:
    # Keys of one graph format mean nothing to another.
    return section in SECTIONS or (section == "graph" and "format" not in value)


def read_mapping(source: Mapping[str, Any], label: str = "config") -> Document:
    """A document from a mapping, which is copied.

    Raises:
        ConfigError: when it is nested too deeply.
    """
    return Document(_plain(source, label, 0), label)


def read_file(source: str | Path) -> Document:
    """A document from a YAML file.

    Raises:
        ConfigError: when the file is missing, unreadable, too large, not UTF-8, not YAML or
            not a mapping.
    """
    label, path = str(source), Path(source)
    data, lines = read_yaml(read_text(path, label), label)
    if data is None:
        raise ConfigError(
            "the file is empty",
            where=label,
            remedy="write a configuration: name, graph and model at least",
        )
    if not isinstance(data, dict):
        raise ConfigError(
            f"expected sections (`key: value`), got {show(data)}",
            where=label,
            remedy="start with `name: my-run`; `raygnn config-schema` describes all keys",
        )
    return Document(data, label, Path(os.path.abspath(path)), lines)


def read_text(path: Path, label: str) -> str:
    """The text of a YAML file, or a little more of it than a document may have.

    Args:
        label: what to call it in errors.

    Raises:
        ConfigError: there is none, or it is no text.
    """

    def error(what: str, remedy: str) -> ConfigError:
        return ConfigError(what, where=label, remedy=remedy)

    try:
        if path.is_dir():
            raise error("this is a directory, expected a YAML file", "name the file in it")
        if path.exists() and not path.is_file():
            raise error("this is not a regular file", "name a YAML file")
        with path.open("rb") as file:
            content = file.read(4 * MAX_CHARACTERS)
    except FileNotFoundError:
        parent = path.parent
        names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        close = nearest(path.name, names)
        remedy = (
            f"did you mean {parent / close}?" if close else f"check the name (from {Path.cwd()})"
        )
        raise error("there is no such file", remedy) from None
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
        raise error(
            f"the file cannot be read: {reason}", "check its name and permissions"
        ) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = content.count(b"\n", 0, cause.start) + 1
        raise error(
            f"not UTF-8 text: byte 0x{content[cause.start]:02x} on line {line}",
            "save the file as UTF-8, and check that it is a YAML file",
        ) from None


def _plain(value: Any, label: str, depth: int) -> Any:
    """A deep copy with plain containers, and NumPy's numbers and arrays as Python's."""
    if depth > MAX_DEPTH:
        raise ConfigError(
            f"more than {MAX_DEPTH} levels of nesting",
            where=label,
            remedy="give values no deeper than section.key",
        )
    if isinstance(value, Mapping):
        return {key: _plain(inner, label, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, label, depth + 1) for inner in value]
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    return str(value) if isinstance(value, str) else value
