"""YAML file or mapping, plus overrides → a checked :class:`~raygnn.config.schema.Config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from raygnn.config.places import HIDDEN, is_secret
from raygnn.config.problems import (
    KeyPath,
    Problem,
    dotted,
    nearest,
    one_of,
    show,
    unknown_key,
    wanted,
    wrong_value,
)
from raygnn.config.rules import contradictions
from raygnn.config.schema import SECTIONS, Config
from raygnn.config.values import Duration, Section, classes_of, members, sections_in
from raygnn.config.yaml_text import MAX_CHARACTERS, MAX_DEPTH, read_yaml
from raygnn.errors import ConfigError
from raygnn.util.files import open_regular

S = TypeVar("S", bound=Section)

_PATHS = (
    ("graph", "path"),
    ("graph", "args", "root"),
    ("graph", "vocabulary"),
    ("partition", "path"),
    ("staging", "path"),
    ("storage",),
)


@dataclass(frozen=True)
class Override:
    """A value for one key; ``label`` names its source in errors (``--set``)."""

    key: tuple[str, ...]
    value: Any
    label: str


@dataclass
class Document:
    """Raw values and their origin."""

    data: dict[str, Any]  # unchecked values
    label: str  # name in errors: the file, as the user named it
    file: Path | None = None  # absolute path of the file, if there is one
    # key path → line in that file, from 1, or label of the override that set it
    sources: Mapping[KeyPath, int | str] = field(default_factory=dict)
    # keys of paths that were relative before `resolve_paths`
    relative: set[KeyPath] = field(default_factory=set)

    def apply(self, override: Override) -> None:
        """Set one key; a mapping is merged into a section, and replaces anything else. Raises
        ConfigError if a parent of the key is not a section."""
        key, value = override.key, override.value
        # A graph with a format replaces the graph: formats do not share their keys.
        mergeable = key[0] in SECTIONS or key[0] == "graph"
        if len(key) == 1 and mergeable and isinstance(value, dict) and "format" not in value:
            for name, inner in value.items():
                self.apply(Override((*key, str(name)), inner, override.label))
            return
        target = self.data
        for depth, part in enumerate(key[:-1], start=1):
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                raise ConfigError(
                    f"{dotted(key[:depth])} is {show(target)}, which has no keys",
                    where=f"{override.label} {dotted(key)}",
                    remedy=f"set {dotted(key[:depth])} itself",
                )
        target[key[-1]] = value
        others = {k: v for k, v in self.sources.items() if k[: len(key)] != key}
        self.sources = {**others, key: override.label}

    def resolve_paths(self) -> None:
        """Make paths absolute: relative to the file, or for overrides to the current directory.
        Values that are not paths stay."""
        if self.data.get("storage") is None:
            self.data["storage"] = Config.model_fields["storage"].default
        self.relative.clear()
        tasks = self.data.get("tasks")
        names = [
            ("task",),
            *(("tasks", name) for name in (tasks if isinstance(tasks, dict) else ())),
        ]
        lists = [(*name, part, "file") for name in names for part in ("negatives", "ranking")]
        tables = [(*name, "table", "files") for name in names]
        tables += [(*table, split) for table in tables for split in ("train", "val", "test")]
        for key in (*_PATHS, *lists, *tables):
            section: Any = self.data
            for part in key[:-1]:
                section = section.get(part) if isinstance(section, dict) else None
            value = section.get(key[-1]) if isinstance(section, dict) else None
            if not isinstance(value, (str, Path)) or not str(value) or "://" in str(value):
                continue
            here = key == ("storage",) or isinstance(self._source(key), str)
            base = self.file.parent if self.file and not here else Path.cwd()
            place = os.path.expanduser(value)
            if not os.path.isabs(place):
                self.relative.add(key)
            section[key[-1]] = os.path.abspath(base / place)

    def checked(self, root: type[S]) -> S:
        """Return the validated section. Raises ConfigError with all invalid keys."""
        given = {key: value for key, value in self.data.items() if value is not None}
        try:
            return root.model_validate(given)
        except ValidationError as error:
            details = error.errors(include_url=False)
        problems = [_schema_problem(root, detail) for detail in details]
        hints = {problem.remedy.split("?")[0] for problem in problems}
        raise self.error(
            [
                problem  # a misspelt key is not reported as missing, too
                for problem, detail in zip(problems, details, strict=True)
                if detail["type"] != "missing" or f"did you mean {dotted(problem.key)}" not in hints
            ]
        )

    def error(self, problems: Sequence[Problem]) -> ConfigError:
        """Return one error for all problems, in the order of the file."""
        if len(problems) == 1:
            (problem,) = problems
            place, source = self._place(problem.key), self._source(problem.key)
            where = place if isinstance(source, str) else f"{self.label}: {place}"
            return ConfigError(problem.what, where=where, remedy=problem.remedy)
        lines = {id(p): line for p in problems if isinstance(line := self._source(p.key), int)}
        listed = [
            f"\n  {self._place(problem.key)}: {problem.what}\n    → {problem.remedy}"
            for problem in sorted(problems, key=lambda problem: lines.get(id(problem), 0))
        ]
        return ConfigError(f"{len(problems)} problems{''.join(listed)}", where=self.label)

    def _place(self, key: KeyPath) -> str:
        """``train.lr (line 8)`` or ``--set train.lr``."""
        source = self._source(key)
        if isinstance(source, str):
            return f"{source} {dotted(key)}"
        return f"{dotted(key)} (line {source})" if source else dotted(key)

    def _source(self, key: KeyPath) -> int | str | None:
        """Return the source of the key, or of the closest section around it."""
        prefixes = (key[:length] for length in range(len(key), 0, -1))
        return next((self.sources[prefix] for prefix in prefixes if prefix in self.sources), None)


def read_mapping(source: Mapping[str, Any], label: str = "config") -> Document:
    """Return a document with a copy of the mapping. Raises ConfigError if it is nested too
    deeply."""
    return Document(_plain(source, label, 0), label)


_START = "write at least name, graph and model; `raygnn config-schema` describes all keys"


def read_file(source: str | Path, remedy: str = _START) -> Document:
    """Return a document from a YAML file. Raises ConfigError if the file is missing, unreadable,
    too large, not UTF-8, not YAML or not a mapping."""
    label, path = str(source), Path(source)
    data, lines = read_yaml(read_text(path, label), label)
    if not isinstance(data, dict):
        message = f"expected sections (`key: value`), got {show(data)}"
        message = "the file is empty" if data is None else message
        raise ConfigError(message, where=label, remedy=remedy)
    return Document(data, label, Path(os.path.abspath(path)), lines)


def read_text(path: Path, label: str) -> str:
    """Return the text of a YAML file, cut a little above the largest size of a document; ``label``:
    name of the file in errors. Raises ConfigError if the file does not exist or is not text."""

    def error(what: str, remedy: str) -> ConfigError:
        return ConfigError(what, where=label, remedy=remedy)

    try:
        with open_regular(path) as file:
            content = file.read(4 * MAX_CHARACTERS)
    except FileNotFoundError:
        raise error("there is no such file", f"check the name (from {Path.cwd()})") from None
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
        remedy = "check its name and permissions"
        raise error(f"the file cannot be read: {reason}", remedy) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = content.count(b"\n", 0, cause.start) + 1
        raise error(
            f"not UTF-8 text: byte 0x{content[cause.start]:02x} on line {line}",
            "save the file as UTF-8, and check that it is a YAML file",
        ) from None


def _plain(value: Any, label: str, depth: int) -> Any:
    """Return a deep copy with plain containers, and with NumPy values as Python values."""
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


ConfigSource = Config | str | Path | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


def load_config(
    source: str | Path | Mapping[str, Any], /, overrides: Overrides | None = None, **sections: Any
) -> Config:
    """Read and check a configuration. Nothing is started or written, torch is not loaded.

    Args:
        source: a YAML file, or a mapping of the same shape. Relative paths in a file are
            relative to that file, in a mapping or an override to the current directory;
            ``storage`` is always relative to the current directory. A section that is empty
            (null) stands for its defaults.
        overrides: replacements of values in ``source``: ``["train.lr=0.1"]`` with values in YAML,
            as for ``--set``, or ``{"train.lr": 0.1}``. A mapping for a section is merged into it;
            a graph with a format replaces the graph.
        **sections: more overrides: ``train={"lr": 0.1}``, ``name="other"``.

    Returns:
        The configuration, with absolute paths.

    Raises:
        ConfigError: with all problems found: file, key path, value and remedy of each.
    """
    return _load(source, overrides, sections)[0]


def as_config(config: ConfigSource) -> Config:
    """Return the configuration, loaded by `load_config` unless it is one. Raises ConfigError as
    `load_config` does."""
    return config if isinstance(config, Config) else load_config(config)


def load_for_elsewhere(
    source: str | Path | Mapping[str, Any], overrides: Overrides | None = None, /
) -> tuple[Config, frozenset[str]]:
    """Return a configuration for a job on other machines, and the keys whose paths were relative,
    such as ``graph.path``, or not set."""
    config, document = _load(source, overrides, {})
    return config, frozenset(map(dotted, document.relative))


def _load(
    source: str | Path | Mapping[str, Any], overrides: Overrides | None, sections: Mapping[str, Any]
) -> tuple[Config, Document]:
    document = read_mapping(source) if isinstance(source, Mapping) else read_file(source)
    for override in [*_parse(overrides or ()), *_parse(sections)]:
        document.apply(override)
    document.resolve_paths()
    config = document.checked(Config)
    config._file = document.file
    if problems := contradictions(config):
        raise document.error(problems)
    return config, document


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
_SECRETIVE = (("comm", "env"), ("logging", "loggers"))


@dataclass
class _Place:
    key: KeyPath
    section: type[Section]  # enclosing section
    key_info: FieldInfo | None = None  # the section's key that contains the value, or None
    meaning: str = ""  # description of that key
    # possible kinds of the section, or of the value
    kinds: Mapping[str, type[Section]] = field(default_factory=dict)
    kind: str = ""  # actual kind of the section


def _place(root: type[Section], loc: KeyPath) -> _Place:
    """Return the place of pydantic's path to a value, in which kinds of sections follow keys."""
    place = _Place((), root)
    annotation: Any = root
    for part in loc:
        if part == "[key]":  # pydantic's mark of an invalid key of a mapping
            break
        sections = sections_in(annotation)
        if len(sections) > 1:
            place.kinds, place.kind = classes_of(annotation), str(part)
            annotation = place.kinds[place.kind]
            continue
        place.key += (part,)
        if sections:
            (place.section,) = sections
            place.key_info = place.section.model_fields.get(str(part))
            annotation = place.key_info and place.key_info.annotation
            place.meaning = place.section.meaning(str(part)) if place.key_info else ""
            if place.section not in place.kinds.values():
                place.kinds = {}
        else:
            items = [get_args(m)[1] for m in members(annotation) if get_origin(m) is dict]
            annotation = items[0] if items else None
    if len(sections_in(annotation)) > 1:
        place.kinds = classes_of(annotation)
    return place


def _schema_problem(root: type[Section], detail: ErrorDetails) -> Problem:
    error, value, place = detail["type"], detail["input"], _place(root, detail["loc"])
    key, field = place.key, place.key_info
    if error.startswith("union_tag"):
        if not isinstance(value, dict):
            return wrong_value(key, {**detail, "type": "dict_type"}, field, place.meaning)
        name = next(iter(place.kinds.values())).kind_key
        if "like" in value and ":" in str(value.get(name)):
            name = "like"
        if value.get(name) is None:
            remedy = f"give one of {', '.join(place.kinds)}"
            return Problem((*key, name), f"{name!r} is missing", remedy)
        what = f"unknown {name} {show(value[name])}"
        return Problem((*key, name), what, one_of(value[name], place.kinds))
    if error == "extra_forbidden":
        return _unknown(root, place, value)
    if error == "missing":
        return Problem(key, f"{show(key[-1])} is missing", f"add {key[-1]}: {place.meaning}")
    if error == "invalid_key":
        return Problem(key, "expected text as the key", "put the key in quotes")
    if detail["loc"][-1] == "[key]":
        return Problem(key, f"{wanted(detail)}, got {show(value)}", "give the key another name")
    if key[:2] in _SECRETIVE:
        text = value if isinstance(value, str) else ""
        whole = len(key) == 2 or key[:2] == ("logging", "loggers")
        if whole or is_secret(str(key[2]), text):
            what = f"{wanted(detail)}, got {HIDDEN}"
            return Problem(key, what, f"correct it: {place.meaning}")
    return wrong_value(key, detail, field, place.meaning)


def _unknown(root: type[Section], place: _Place, value: Any) -> Problem:
    """Return the problem of a key of another kind of the section, or an unknown key. The remedy
    names a similar key, or the same key in another section."""
    key, word, keys = place.key, str(place.key[-1]), place.section.model_fields
    if kinds := [kind for kind, other in place.kinds.items() if word in other.model_fields]:
        name = dotted((*key[:-1], place.section.kind_key))
        what = f"unknown key {show(word)} ({show(value)}): {name} is {place.kind}"
        remedy = f"remove {dotted(key)}: it is a key of {name} {', '.join(kinds)}"
        return Problem(key, what, remedy)
    problem = unknown_key(key, keys)
    if root is Config and not nearest(word, keys):
        places: dict[str, list[type[Section]]] = {"": [Config], **SECTIONS}
        for name, classes in places.items():
            if any(word in section.model_fields for section in classes):
                elsewhere = f"{name}.{word}".lstrip(".")
                remedy = f"did you mean {elsewhere}? known here: {', '.join(keys)}"
                return replace(problem, remedy=remedy)
    return problem


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration, for completion in editors."""
    schema = Config.model_json_schema()
    for section in schema["$defs"].values():
        for key in section.get("properties", {}).values():
            if isinstance(key.get("default"), dict) and "seconds" in key["default"]:
                key["default"] = str(Duration(**key["default"]))  # as in YAML
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "raygnn configuration",
    }
