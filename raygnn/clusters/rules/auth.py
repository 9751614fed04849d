"""Whether Ray asks for a token, and whether the token is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raygnn.clusters.facts import Cluster, Remark, section, strings

_NEEDED = "whoever reaches a port of this Ray can run commands on it"
_LITERAL = re.compile(r"\bRAY_AUTH_TOKEN=[\"']?(?![\"'$`\s]|$)")
_ECHOED = re.compile(r"\b(?:echo|printf)\s[^$`;&|>]{1,200}>\s*\S{0,200}auth_token\b")
_ENV = ("RAY_AUTH_TOKEN",)


def off(cluster: Cluster) -> Iterator[Remark]:
    """A Ray that takes commands from everybody."""
    if not cluster.groups or cluster.with_token:
        return
    if cluster.kind == "ray up":
        for group in cluster.groups:
            if group.variable("RAY_AUTH_MODE") == "token":
                continue
            key = group.starts[0].key if group.starts else group.key
            what = f"Ray of {group.name} is started without RAY_AUTH_MODE=token: {_NEEDED}"
            remedy = "set it before ray start, and carry ~/.ray/auth_token with file_mounts"
            yield Remark("auth", "error", key, what, remedy)
    else:
        what = f"authOptions.mode is not token: {_NEEDED}"
        remedy = "set authOptions: {mode: token} (KubeRay 1.5.1 and newer, which makes the Secret)"
        yield Remark("auth", "error", (*cluster.base, "authOptions"), what, remedy)


def written(cluster: Cluster) -> Iterator[Remark]:
    """A token that stands in the file, and so in backups, histories and chats."""
    remedy = "make it with `ray get-auth-token --generate` and carry the file, or refer to a Secret"
    what = "a token stands here in plain text"
    for text in strings(cluster.value):
        if _LITERAL.search(text.text) or _ECHOED.search(text.text):
            yield Remark("token", "error", text.key, what, remedy)
        in_env = text.key[-1] == "value" and _named(cluster, text.key) in _ENV
        in_secret = cluster.kind == "Secret" and "auth_token" in text.key
        if in_env or in_secret:
            yield Remark("token", "error", text.key, what, remedy)


def _named(cluster: Cluster, key: tuple[str | int, ...]) -> str | None:
    """The name beside a value: of ``{name: A, value: b}``, A."""
    value: object = cluster.value
    for part in key[:-1]:
        value = value[part] if isinstance(value, list) else section(value).get(str(part))  # type: ignore[index]
    name = section(value).get("name")
    return name if isinstance(name, str) else None
