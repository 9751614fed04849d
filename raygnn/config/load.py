"""YAML file or mapping, plus overrides → a checked :class:`~raygnn.config.schema.Config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raygnn.config.document import Document, Override, read_file, read_mapping
from raygnn.config.problems import dotted, schema_problems
from raygnn.config.rules import contradictions, garbled_paths, missing_paths
from raygnn.config.schema import Config
from raygnn.config.yaml_text import read_yaml
from raygnn.errors import ConfigError

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
        raise document.error(schema_problems(error)) from None
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
