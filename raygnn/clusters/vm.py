"""What a `ray up` file says, as facts: with Ray's defaults for the commands that it leaves out."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raygnn.clusters.facts import Cluster, FileMount, Group, Text, listed, section, texts
from raygnn.clusters.launcher import Look
from raygnn.clusters.quantity import quantity
from raygnn.config.yaml_text import KeyPath

_ENOUGH = 1 << 30  # bytes; a mount that has more is not measured to its end
_MANY = 100_000  # files, likewise


def cluster(config: Mapping[str, Any], ray: Look, directory: Path) -> Cluster:
    """The facts of a `ray up` file.

    Args:
        ray: what Ray thinks of it.
        directory: where `ray up` will be run: local paths are relative to it.
    """
    defaults = ray.defaults
    kinds = section(config.get("available_node_types"))
    head = config.get("head_node_type")
    groups = [_group(config, defaults, "head", "head", _key_of(config, "head_start_ray_commands"))]
    workers = [name for name in kinds if name != head]
    if workers:
        for name in workers:
            groups.append(_group(config, defaults, name, "worker", ("available_node_types", name)))
    elif section(config.get("provider")).get("worker_ips") or not kinds:
        key = _key_of(config, "worker_start_ray_commands")
        groups.append(_group(config, defaults, "worker", "worker", key))
    return Cluster(
        kind="ray up",
        value=config,
        provider=str(section(config.get("provider")).get("type")),
        groups=tuple(groups),
        files=_files(config, directory),
        refused=ray.refused,
        keys=ray.keys,
    )


def _key_of(config: Mapping[str, Any], name: str) -> KeyPath:
    return (name,) if name in config else ()


def _group(
    config: Mapping[str, Any], defaults: Mapping[str, Any], name: str, role: Any, key: KeyPath
) -> Group:
    docker = section(config.get("docker"))
    own = section(section(config.get("available_node_types")).get(name)) if role == "worker" else {}
    options = listed(docker.get("run_options")) + listed(docker.get(f"{role}_run_options"))
    options += listed(section(own.get("docker")).get("worker_run_options"))
    words = _words(" ".join(map(str, options)))
    image_key = f"{role}_image" if f"{role}_image" in docker else "image"
    image = docker.get(image_key)
    setup = [*_commands(config, defaults, "initialization_commands")]
    setup += _commands(config, defaults, "setup_commands")
    if "worker_setup_commands" in own:
        setup += texts(own["worker_setup_commands"], (*key, "worker_setup_commands"))
    else:
        setup += _commands(config, defaults, f"{role}_setup_commands")
    start = _commands(config, defaults, f"{role}_start_ray_commands")
    return Group(
        name=name,
        role=role,
        key=key,
        setup=tuple(setup),
        start=start,
        env=_variables(words),
        image=Text(("docker", image_key), image) if isinstance(image, str) else None,
        shm=_shm(words),
        container=bool(docker.get("container_name")),
        mounts=_mounts(tuple(setup)),
        params=_params(start),
    )


def _commands(
    config: Mapping[str, Any], defaults: Mapping[str, Any], name: str
) -> tuple[Text, ...]:
    if name in config:
        return texts(config[name], (name,))
    return tuple(Text((), each.text) for each in texts(defaults.get(name), ()))


def _words(command: str) -> list[str]:
    """The words of a command, with ``--name value`` as ``--name=value``."""
    try:
        found = shlex.split(command, comments=False)
    except ValueError:  # quotes that do not close: the shell will say so
        found = command.split()
    words: list[str] = []
    for word in found:
        if words and words[-1].startswith("-") and "=" not in words[-1] and word[:1] != "-":
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _variables(words: list[str]) -> dict[str, str | None]:
    """Of docker's ``--env NAME=VALUE``; NAME alone is taken from the host."""
    found: dict[str, str | None] = {}
    for word in words:
        option, _, rest = word.partition("=")
        if option in ("-e", "--env") and rest:
            name, given, value = rest.partition("=")
            found[name] = value if given else None
    return found


def _shm(words: list[str]) -> int | None:
    """Bytes of docker's ``--shm-size``; with ``--ipc=host`` all that the host has."""
    for word in words:
        option, _, rest = word.partition("=")
        if option == "--shm-size":
            return quantity(rest)
        if word == "--ipc=host":
            return 1 << 62
    return None


def _mounts(setup: tuple[Text, ...]) -> dict[str, str]:
    """path → source of what the commands mount: ``mount -t nfs4 … host:/path /mnt/path``."""
    found: dict[str, str] = {}
    for command in setup:
        for part in re.split(r"&&|\|\||;", command.text):
            words = part.split()
            if "mount" in words and len(words) >= 2 and words[-1].startswith("/"):
                found[words[-1].rstrip("/")] = words[-2]
    return found


def _params(start: tuple[Text, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for command in start:
        for part in re.split(r"&&|;", command.text):
            if re.search(r"\bray\s+start\b", part):
                for word in _words(part):
                    if word.startswith("--"):
                        option, _, value = word[2:].partition("=")
                        found[option] = value
    return found


def _files(config: Mapping[str, Any], directory: Path) -> tuple[FileMount, ...]:
    excluded = [str(each) for each in listed(config.get("rsync_exclude"))]
    found = []
    for remote, local in section(config.get("file_mounts")).items():
        if not isinstance(local, str):
            continue  # Ray's schema allows it, and Ray itself fails of it: see refused
        path, key = directory / os.path.expanduser(local), ("file_mounts", remote)
        try:
            mode = path.stat().st_mode & 0o777
        except (OSError, ValueError):  # no such path, or none that could be one
            found.append(FileMount(key, remote, local, exists=False))
            continue
        size, git = _measure(path, excluded)
        found.append(FileMount(key, remote, local, True, size, git, mode))
    return tuple(found)


def _measure(path: Path, excluded: list[str]) -> tuple[int, bool]:
    """Bytes below a path, without what is excluded, and whether a .git is there."""
    if not path.is_dir():
        return (path.stat().st_size if path.is_file() else 0), False
    size, count, git = 0, 0, False
    for folder, folders, files in os.walk(path):
        for names in (folders, files):
            names[:] = [n for n in names if not any(fnmatch.fnmatch(n, e) for e in excluded)]
        git = git or ".git" in folders
        with contextlib.suppress(OSError):  # a file that goes while it is looked at
            size += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
        count += len(files)
        if size > _ENOUGH or count > _MANY:
            break
    return size, git
