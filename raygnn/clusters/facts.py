"""What the rules look at: groups of nodes that are made alike, whichever tool makes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raygnn.config.yaml_text import KeyPath
from raygnn.preflight.findings import Severity

_ASSIGNMENT = re.compile(r"(?:^|[\s;&|(])([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"]*\"|'[^']*'|[^\s;&|)]*)")
_RAY_START = re.compile(r"\bray\s+start\b")
_EXPORT = re.compile(r"[\s({]*export\s")
_SHELL_START = re.compile(r">>?\s*[^\s>]{0,200}(\.bashrc|profile|/etc/environment)\b")


@dataclass(frozen=True)
class Remark:
    """What a rule has to say about a key of a document.

    Attributes:
        check: the name of the rule.
        key: where; of a key that is missing, where it would stand.
        what: one sentence, with the value in it.
        remedy: one sentence, what to do.
    """

    check: str
    severity: Severity
    key: KeyPath
    what: str
    remedy: str


@dataclass(frozen=True)
class Text:
    """A text of the document, a command or the name of an image, and its key."""

    key: KeyPath
    text: str


@dataclass(frozen=True)
class Group:
    """Nodes that are made alike: the head, or the workers of one type.

    Attributes:
        key: of its section.
        setup: commands that install what it needs, in their order.
        start: commands that start Ray; none where an operator starts it.
        env: variables of its container. None: the value comes from elsewhere, such as a Secret.
        image: of its container.
        shm: bytes of /dev/shm that its container asks for; None where it asks for nothing.
        container: whether Ray runs in one.
        mounts: path → what is mounted there and is not the node's own: ``host:/path``, a claim.
        params: arguments of `ray start` that an operator is given, without their dashes.
    """

    name: str
    role: Literal["head", "worker"]
    key: KeyPath
    setup: tuple[Text, ...] = ()
    start: tuple[Text, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    image: Text | None = None
    shm: int | None = None
    container: bool = False
    mounts: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def starts(self) -> tuple[Text, ...]:
        """The commands among :attr:`start` that start Ray."""
        return tuple(each for each in self.start if _RAY_START.search(each.text))

    def variable(self, name: str) -> str | None:
        """What a variable is when Ray starts: of the container, written to a file that each shell
        reads, or set by the start command.

        Of start commands only what all of them set counts. "" stands for a value from elsewhere.
        """
        if name in self.env:
            return self.env[name] or ""
        for each in self.setup:
            if _SHELL_START.search(each.text) and name in (set_ := dict(assignments(each.text))):
                return set_[name]
        values = [handed(each.text).get(name) for each in self.starts]
        return values[0] if values and all(value == values[0] for value in values) else None


@dataclass(frozen=True)
class FileMount:
    """A file or directory that `ray up` carries to the nodes.

    Attributes:
        local: its path here, as in the document.
        exists: whether it is there.
        size: bytes that would be carried; no more is counted than a limit.
        git: whether a .git would be carried with it.
        mode: its permissions.
    """

    key: KeyPath
    remote: str
    local: str
    exists: bool
    size: int = 0
    git: bool = False
    mode: int = 0o600


@dataclass(frozen=True)
class Cluster:
    """One cluster, as a document describes it.

    Attributes:
        kind: ``"ray up"``, or the kind of the manifest.
        value: the document.
        base: the key of the section that describes the cluster: ``spec`` of a RayCluster.
        provider: of `ray up`: ``aws``, ``gcp``, ``local``, …; of manifests ``kubernetes``.
        refused: what Ray's own validation says: the key, and its words.
        keys: the sections that `ray up` knows.
        beside: the kinds of the manifests in the same file.
    """

    kind: str
    value: Mapping[str, Any]
    base: KeyPath = ()
    provider: str = "kubernetes"
    groups: tuple[Group, ...] = ()
    files: tuple[FileMount, ...] = ()
    refused: tuple[Text, ...] = ()
    keys: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()

    @property
    def heads(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.role == "head")

    @property
    def workers(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.role == "worker")

    @property
    def spec(self) -> Mapping[str, Any]:
        """The section at :attr:`base`; empty where it is none."""
        value: Any = self.value
        for part in self.base:
            value = section(value).get(str(part))
        return section(value)

    @property
    def with_token(self) -> bool:
        """Whether every Ray of it asks for a token."""
        if section(self.spec.get("authOptions")).get("mode") == "token":
            return True
        groups = [group for group in self.groups if group.start or group.container]
        return bool(groups) and all(group.variable("RAY_AUTH_MODE") == "token" for group in groups)


def section(value: Any) -> Mapping[str, Any]:
    """The value if it is a section, else an empty one: other rules say that it should be one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def texts(value: Any, key: KeyPath) -> tuple[Text, ...]:
    """The texts in a list, with their keys."""
    return tuple(
        Text((*key, i), each) for i, each in enumerate(listed(value)) if isinstance(each, str)
    )


def assignments(command: str) -> Iterator[tuple[str, str]]:
    """``A=1 B="2" ray start`` → (A, 1), (B, 2)."""
    for name, value in _ASSIGNMENT.findall(command):
        yield name, value.strip("\"'")


def handed(command: str) -> dict[str, str]:
    """What a command hands to the `ray start` in it: what it exports before, and what stands in
    front of it. ``A=1 ulimit -n 9; ray start`` hands over nothing."""
    exported: dict[str, str] = {}
    for part in re.split(r"&&|\|\||[;\n]", command):
        if found := _RAY_START.search(part):
            return {**exported, **dict(assignments(part[: found.start()]))}
        if _EXPORT.match(part):
            exported.update(assignments(part))
    return exported


def strings(value: Any, key: KeyPath = ()) -> Iterator[Text]:
    """Every text in a value, with its key."""
    if isinstance(value, str):
        yield Text(key, value)
        return
    inner: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for name, each in inner:
        yield from strings(each, (*key, name))
