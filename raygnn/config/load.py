"""YAML file or mapping, plus overrides → a checked :class:`~raygnn.config.schema.Config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from raygnn.config.execution import COMMS
from raygnn.config.graph import FORMATS
from raygnn.config.model import MODELS
from raygnn.config.places import HIDDEN, is_secret
from raygnn.config.problems import (
    KeyPath,
    Problem,
    dotted,
    missing_key,
    nearest,
    one_of,
    our_name,
    show,
    unknown_key,
    wanted,
    wrong_value,
)
from raygnn.config.rules import contradictions, garbled_paths, missing_paths
from raygnn.config.schema import SECTIONS, Config
from raygnn.config.task import SEVERAL_TASKS, TASKS
from raygnn.config.values import Section, members, sections_in
from raygnn.config.yaml_text import MAX_CHARACTERS, MAX_DEPTH, read_yaml
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


Source = Config | str | Path | Mapping[str, Any]  # what a configuration is made of, or one
Overrides = Sequence[str] | Mapping[str, Any]


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides | None = None,
    /,
    **sections: Any,
) -> Config:
    """Read and check a configuration. Nothing is started or written, torch is not loaded.

    Args:
        source: a YAML file, or a mapping of the same shape. Relative paths in a file are
            relative to that file, those in a mapping or an override to the current directory;
            ``storage`` is always relative to the current directory. A section that is empty
            (null) stands for its defaults.
        overrides: what replaces values of ``source``: ``["train.lr=0.1"]`` with values in YAML,
            as ``--set`` takes them, or ``{"train.lr": 0.1}``. A mapping given for a section is
            merged into it; a graph that states its format replaces the graph.
        **sections: more overrides: ``train={"lr": 0.1}``, ``name="other"``.

    Returns:
        The configuration, with absolute paths.

    Raises:
        ConfigError: with all problems found: file, key path, value and remedy of each.
    """
    document = _document(source, overrides, sections)
    config = _config(document)
    if problems := [*contradictions(config), *missing_paths(config), *garbled_paths(config)]:
        raise document.error(problems)
    return config


def as_config(config: Source) -> Config:
    """The configuration itself, or what `load_config` makes of it.

    Raises:
        ConfigError: as `load_config`.
    """
    return config if isinstance(config, Config) else load_config(config)


def load_for_elsewhere(
    source: str | Path | Mapping[str, Any], overrides: Overrides | None = None, /
) -> tuple[Config, frozenset[str]]:
    """The same for a job that will run on other machines: what it names need not be here.

    Returns:
        The configuration, and the keys of paths that were not written as absolute ones, such as
        ``graph.path``, or not written at all.

    Raises:
        ConfigError: as `load_config`.
    """
    document = _document(source, overrides, {})
    config = _config(document)
    if problems := list(contradictions(config)):
        raise document.error(problems)
    return config, frozenset(map(dotted, document.relative))


def _document(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides | None,
    sections: Mapping[str, Any],
) -> Document:
    document = read_mapping(source) if isinstance(source, Mapping) else read_file(source)
    for override in [*_parse(overrides or ()), *_parse(sections)]:
        document.apply(override)
    document.resolve_paths()
    return document


def _config(document: Document) -> Config:
    given = {key: value for key, value in document.data.items() if value is not None}
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        raise document.error(_schema_problems(error)) from None
    config._file = document.file
    return config


def _parse(overrides: Overrides) -> Iterator[Override]:
    if isinstance(overrides, Mapping):
        given = read_mapping(overrides, "override").data
        for key, value in given.items():
            yield Override(_key(str(key), "override"), value, "override")
        return
    for text in [overrides] if isinstance(overrides, str) else overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                "no value",
                where=f"--set {text[:100]!r}",
                remedy="write the key, '=' and the value, such as --set train.lr=0.1",
            )
        label = f"--set {name.strip()[:100]}"
        yield Override(_key(name, label), read_yaml(value, label)[0], "--set")


def _key(name: str, label: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in name.split("."))
    if not all(parts):
        raise ConfigError(
            f"{name[:100]!r} is not a key",
            where=label,
            remedy="write section.key, such as train.lr, or the name of a section",
        )
    return parts


# Sections whose values may be secrets.
_SECRETIVE = (("comm", "env"), ("logging", "mlflow"), ("logging", "wandb"))

_NO_EDGE_FEATURES = {"edge_features", "edge_feats", "edge_attr", "edge_dim"}

# The key that says what keys a section has, and the classes by its value.
_UNIONS: tuple[tuple[str, Mapping[str, type[Section]]], ...] = (
    ("format", FORMATS),
    ("kind", MODELS),
    ("kind", TASKS),
    ("kind", SEVERAL_TASKS),
    ("compression", COMMS),
)


@dataclass
class _Place:
    """Where pydantic found something: the key without the kinds that it puts in between."""

    key: KeyPath
    section: type[Section]
    field: FieldInfo | None
    union: tuple[str, Mapping[str, type[Section]]] | None
    kind: str = ""


def _place(loc: KeyPath) -> _Place:
    place = _Place((), Config, None, None)
    annotation: Any = Config
    for part in loc:
        sections = sections_in(annotation)
        if part == "[key]":  # pydantic's name for a mapping's key that is wrong
            break
        if len(sections) > 1:
            place.union = _union(sections)
            place.kind = str(part)
            annotation = place.union[1][place.kind]
            continue
        place.key += (part,)
        if sections:
            place.section = sections[0]
            place.field = place.section.model_fields.get(str(part))
            annotation = place.field.annotation if place.field else None
            place.union = (
                place.union if place.union and sections[0] in place.union[1].values() else None
            )
        else:
            annotation = _item(annotation)
    if len(sections := sections_in(annotation)) > 1:
        place.union = _union(sections)
    return place


def _union(sections: Sequence[type[Section]]) -> tuple[str, Mapping[str, type[Section]]]:
    return next(union for union in _UNIONS if sections[0] in union[1].values())


def _item(annotation: Any) -> Any:
    """What the values of a mapping may be; None of anything else."""
    values = [get_args(m)[1] for m in members(annotation) if get_origin(m) is dict]
    return values[0] if values else None


def _schema_problems(error: ValidationError) -> list[Problem]:
    """What pydantic found, in our words; a key that was only misspelt is not also missing."""
    details = error.errors(include_url=False)
    problems = [_problem(detail) for detail in details]
    hints = {problem.remedy.split("?")[0] for problem in problems}
    return [
        problem
        for problem, detail in zip(problems, details, strict=True)
        if detail["type"] != "missing" or f"did you mean {dotted(problem.key)}" not in hints
    ]


def _problem(detail: ErrorDetails) -> Problem:
    kind, value, place = detail["type"], detail["input"], _place(detail["loc"])
    key, field = place.key, place.field
    if kind.startswith("union_tag") and place.union and isinstance(value, dict):
        name, sections = place.union
        if value.get(name) is None:
            what, remedy = f"{name!r} is missing", f"give one of {', '.join(sections)}"
        else:
            what = f"unknown {name} {show(value[name])}"
            remedy = one_of(value[name], sections)
        return Problem((*key, name), what, remedy)
    if kind.startswith("union_tag"):
        return wrong_value(key, {**detail, "type": "dict_type"}, field)
    if kind == "extra_forbidden":
        return _unknown(place, value)
    if kind == "missing":
        return missing_key(key, field)
    if kind == "invalid_key":
        return Problem(key, "expected text as the key", "put the key in quotes")
    if key[:2] in _SECRETIVE and detail["loc"][-1] != "[key]" and _hidden(key, value):
        what = f"{wanted(detail)}, got {HIDDEN}"
        return Problem(key, what, f"correct it: {field and field.description}")
    return wrong_value(key, detail, field)


def _hidden(key: KeyPath, value: Any) -> bool:
    """Whether what was given for one of these, or for a key in it, may hold a secret."""
    text = value if isinstance(value, str) else ""
    return len(key) == 2 or is_secret(str(key[2]), text)


def _unknown(place: _Place, value: Any) -> Problem:
    """A key of another kind of the section, or of none; the remedy says where it belongs: to a
    near name in it, or the same name in another section."""
    word, key, fields = str(place.key[-1]), place.key, place.section.model_fields
    name, sections = place.union or ("", dict[str, type[Section]]())
    if kinds := [kind for kind, section in sections.items() if word in section.model_fields]:
        name = dotted((*key[:-1], name))
        return Problem(
            key,
            f"unknown key {show(word)} ({show(value)}): {name} is {place.kind}",
            f"remove {dotted(key)}: it is a key of {name} {', '.join(kinds)}",
        )
    problem = unknown_key(key, fields)
    if word.casefold() in _NO_EDGE_FEATURES:
        remedy = (
            "remove it: no model reads features of edges yet; sampling.edge_weight draws "
            "neighbours by an array of edges"
        )
        return replace(problem, remedy=remedy)
    if nearest(word, fields):
        return problem
    places: list[tuple[str, list[type[Section]]]] = [("", [Config])]
    places += [(f"{name}.", classes) for name, classes in SECTIONS.items()]
    for prefix, classes in places:
        if any((ours := our_name(word)) in section.model_fields for section in classes):
            remedy = f"did you mean {prefix}{ours}? known here: {', '.join(fields)}"
            return replace(problem, remedy=remedy)
    return problem
