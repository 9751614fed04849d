"""Trust in runs: decides whether code that a run names may be imported.

A run directory can come from anyone, and its ``config.yaml`` names classes to import. Training
therefore records a digest of each configuration and of the files of its classes in the user's
``$XDG_STATE_HOME/raygnn/runs`` (default: ``~/.local/state``). No owner, path or file of the run
directory would do: a downloaded directory belongs to the user, and its author chose the rest. A run
that was moved is still known by its configuration; a run with a changed configuration, or whose
classes are now found in other files, is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raygnn.config.load import read_text
from raygnn.config.problems import KeyPath, dotted
from raygnn.config.schema import Config
from raygnn.config.values import CLASS_PATTERN, find_module
from raygnn.config.yaml_text import read_yaml
from raygnn.errors import ConfigError, DataError, InputError, RaygnnError

# sections whose `args` are data, as are the variables of comm.env
_WITH_ARGS = (("graph",), ("model",), ("task",))
_REACHES = re.compile(rf"(?s).*://.*|env:.*|sentence-transformers/.*|{CLASS_PATTERN.pattern}")
_CALLBACKS = ("train", "callbacks")
_NOT_YOURS = "and was not trained by this user on this machine"
# keys of a stranger's run that are not used: where to connect to, and where to keep copies
_OF_MACHINE = (("cluster", "address"), ("staging", "path"))


def record(config: Mapping[str, Any]) -> None:
    """Record that this user trained with a configuration; without a home directory do nothing.
    ``config``: the content of a run's ``config.yaml``."""
    with suppress(OSError, RuntimeError):
        file = _record_of(config)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch()


def is_own(config: Mapping[str, Any]) -> bool:
    """Return True if this user has trained on this machine with exactly this configuration."""
    try:
        return _record_of(config).is_file()
    except (OSError, RuntimeError, TypeError, ValueError):  # no home; no JSON, such as a date
        return False


def _record_of(config: Mapping[str, Any]) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    files = sorted({_file(spec) for _, spec in classes(config)})
    digest = hashlib.sha256(json.dumps([config, files], sort_keys=True).encode()).hexdigest()
    return Path(state) / "raygnn" / "runs" / digest


def classes(value: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the key and the text of each ``package.module:Class`` in a configuration."""
    if isinstance(value, str) and CLASS_PATTERN.fullmatch(value):
        yield at, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from classes(key, at)
            if not _is_data((*at, str(key))):
                yield from classes(inner, (*at, str(key)))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from classes(inner, at)


def _is_data(at: KeyPath) -> bool:
    """Return True for arguments of classes and for variables, which name no classes."""
    args = at[:-1] in _WITH_ARGS or (len(at) == 3 and at[0] == "tasks")
    of_callbacks = len(at) == 3 and at[:2] == _CALLBACKS
    return at == ("comm", "env") or (at[-1] == "args" and args) or of_callbacks


def check_classes(config: Config) -> None:
    """Raise ConfigError for a class whose module cannot be found; nothing is imported."""
    for at, spec in classes(config.to_dict()):
        if isinstance(missing := find_module(spec.partition(":")[0]), str):
            remedy = "correct the name, install the package, or start in the directory that "
            remedy += f"contains it (now {Path.cwd()})"
            what = f"{spec}: there is no module {missing}"
            raise ConfigError(what, where=config.where(dotted(at)), remedy=remedy)


def usable(
    config: Mapping[str, Any], shown: str, trust: bool, place: Path | None = None
) -> dict[str, Any]:
    """Return the part of a run's configuration that may be used.

    Environment variables of a run are never used: ``PYTHONPATH`` or ``LD_PRELOAD`` would run code
    in every worker. The address of a cluster and the path of copies are used only if the run is
    trusted or the user's own. Raises InputError if another run names classes or an object store, or
    has modules in the current directory, and DataError if it is damaged.
    """
    _check_sections(config, shown)
    trust = trust or is_own(config)
    if (found := dict.fromkeys(classes(config))) and not trust:
        named = [f"{spec} ({dotted(at)}) from {_file(spec)}" for at, spec in found]
        remedy = "read that code, and pass --trust if you want to run it (in Python trust=True)"
        raise InputError(
            f"this run would import {', '.join(named)}, {_NOT_YOURS}", where=shown, remedy=remedy
        )
    if not trust:
        _check_reach(config, shown, place)
    keys = [("comm", "env"), *(() if trust else _OF_MACHINE)]
    result = dict(config)
    for section, key in keys:
        if isinstance(values := result.get(section), Mapping):
            result[section] = {name: values[name] for name in values if name != key}
    return result


def _check_reach(config: Mapping[str, Any], shown: str, place: Path | None) -> None:
    """Raise InputError for a stranger's run that names an object store, which would receive the
    user's requests, or an encoder of text, or whose modules Ray's workers would import, since they
    import from the current directory."""
    stored = str((config.get("partition") or {}).get("path"))
    what = f"connect to {stored!a} (partition.path)" if "://" in stored else ""
    for found in _reached_by_tables(config):
        what = f"import or connect to {found!a} (graph.path)"
    if place is not None and (partitions := place.parent / "partitions").is_symlink():
        what = f"write its partition to {str(partitions.resolve())!a}, through a link"
    here = Path.cwd()
    if place is not None and here.is_relative_to(place.resolve().parent):
        modules = [*here.glob("*.py"), *here.glob("*.so"), *here.glob("*/__init__.py")]
        if modules:
            what = f"import modules from the current directory, such as {str(modules[0])!a}"
    if what:
        remedy = (
            "run the command in a directory of your own, or pass --trust if you trust the run (in "
            "Python trust=True)"
        )
        raise InputError(f"this run would {what}, {_NOT_YOURS}", where=shown, remedy=remedy)


def _reached_by_tables(config: Mapping[str, Any]) -> list[str]:
    """Return the URIs of files and databases, and the encoders of text, in the description of
    tables that a configuration names."""
    graph = config.get("graph") or {}
    file = Path(str(graph.get("path")))
    if file.suffix not in (".yaml", ".yml") and graph.get("format") != "tables":
        return []
    try:
        described = read_yaml(read_text(file, str(file)), str(file))[0]
    except (RaygnnError, OSError, ValueError):  # reported when the graph is read
        return []
    return [text for text in _texts(described) if _REACHES.fullmatch(text)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _check_sections(config: Mapping[str, Any], shown: str) -> None:
    sections = {name: config.get(name) for name in ("graph", "partition", "task", "tasks", "model")}
    if isinstance(tasks := sections["tasks"], Mapping):
        sections |= {f"tasks.{name}": task for name, task in tasks.items()}
    for name, section in [*sections.items()]:
        if name.startswith("task") and isinstance(section, Mapping):
            sections[f"{name}.ranking"] = section.get("ranking")
    for name, section in sections.items():
        if section is not None and not isinstance(section, Mapping):
            message = f"{name} in its configuration is not a section"
            remedy = "put back the config.yaml that training wrote"
            raise DataError(message, where=shown, remedy=remedy)


def _file(spec: str) -> str:
    module = find_module(spec.partition(":")[0])
    return f"{module} (not found)" if isinstance(module, str) else str(module.origin)
