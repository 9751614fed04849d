"""What of a directory does not travel: what ignore files name, as git reads them, and secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec
from pathspec.pattern import Pattern

GIT, RAY = ".gitignore", ".rayignore"

# names alone, in lower case
_SECRETS = GitIgnoreSpec.from_lines(
    ["*.env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", ".envrc"]
    + ["secrets.y*ml", "secrets.json", "secrets.toml", "token.txt"]
    + [".ssh/", ".aws/", ".azure/", ".gnupg/", ".kube/", "kubeconfig", "*.kubeconfig", "gcloud/"]
    + [".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf"]
    + ["auth_token", ".vault-token", ".htpasswd", ".docker/"]
    + ["id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!id_*.pub", "*.pem", "*.key", "*.ppk"]
    + ["*.p12", "*.pfx", "*.jks", "*.keystore", "credentials.json", "client_secret*.json"]
    + ["*service_account*.json", "*service-account*.json", "application_default_credentials.json"]
)
_SMALL = 2**16  # bytes: no key is larger
_KEY = re.compile(rb'(?:^|"private_key": ?")-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----', re.MULTILINE)


@dataclass(frozen=True)
class Rule:
    """A line of an ignore file.

    Attributes:
        base: directory of the file.
        by_name: it has no slash but a last one, or ``**/`` before, and is about names alone.
        deep: it ends in ``/**``, and is about all that lies in a directory, at any depth.
        ray: the file is a ``.rayignore``.
    """

    base: Path
    pattern: Pattern
    by_name: bool
    deep: bool
    ray: bool

    def applies(self, path: Path, end: str) -> bool:
        """Whether it is about this path, rather than a directory above it.

        Args:
            end: "/" of a directory.
        """
        if self.by_name:
            return self._matches(path.name + end)
        name = path.relative_to(self.base).as_posix()
        if self.deep:
            return self._matches(name)
        parent = name.rpartition("/")[0]
        return self._matches(name + end) and not (parent and self._matches(f"{parent}/"))

    def _matches(self, name: str) -> bool:
        return self.pattern.match_file(name) is not None


def rules_above(directory: Path) -> tuple[Rule, ...]:
    """The rules of the directories above, up to the top of the repository; none outside of one."""
    places = [directory, *directory.parents]
    top = next((i for i, place in enumerate(places) if (place / ".git").exists()), 0)
    return tuple(rule for place in reversed(places[1 : top + 1]) for rule in rules_in(place))


def rules_in(directory: Path) -> Iterator[Rule]:
    """The rules of a directory's own ignore files, in order: a later one wins."""
    for name in (GIT, RAY):
        file = directory / name
        if file.is_file():
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                yield from _parse(line, directory, ray=name == RAY)


def ignored(path: Path, rules: Sequence[Rule], end: str = "") -> bool | None:
    """What the last rule that applies says; None where none does.

    Args:
        end: "/" of a directory.
    """
    for rule in reversed(rules):
        if rule.applies(path, end):
            return bool(rule.pattern.include)
    return None


def looks_secret(path: Path, rules: Iterable[Rule], end: str = "") -> bool:
    """Whether its name is one of a secret, and no ``.rayignore`` lets it travel."""
    return _SECRETS.match_file(path.name.lower() + end) and not _let(path, rules, end)


def holds_key(path: Path, size: int, rules: Iterable[Rule]) -> bool:
    """Whether it is a small file with a private key in it, and no ``.rayignore`` lets it travel.

    Raises:
        OSError: it cannot be read.
    """
    if size > _SMALL or _let(path, rules):
        return False
    return _KEY.search(path.read_bytes()) is not None


def _let(path: Path, rules: Iterable[Rule], end: str = "") -> bool:
    return ignored(path, [rule for rule in rules if rule.ray], end) is False


def _parse(line: str, base: Path, *, ray: bool) -> Iterator[Rule]:
    try:
        patterns = GitIgnoreSpec.from_lines([line]).patterns
    except ValueError:  # which matches nothing, says git
        return
    text = line.strip().removeprefix("!").removeprefix("**/")
    for pattern in patterns:
        if pattern.include is not None:  # no comment
            yield Rule(base, pattern, "/" not in text[:-1], text.endswith("/**"), ray)
