"""`raygnn cluster check`: a file in, findings out. Nothing is started, and no network is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raygnn.clusters import kuberay, launcher, vm
from raygnn.clusters.facts import Cluster, Remark
from raygnn.clusters.rules import RULES
from raygnn.config.document import read_text
from raygnn.config.problems import dotted
from raygnn.config.yaml_text import KeyPath, read_documents
from raygnn.errors import ConfigError
from raygnn.preflight.findings import Finding, by_severity, counted


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        file: as it was given.
        kinds: of its documents: ``ray up``, or the kind of a manifest.
        findings: errors first. ``values`` has the ``key``, and the ``line`` on which it stands or
            would stand, from 1.
    """

    file: str
    kinds: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One line: what was looked at, and how many findings there are of each kind."""
        told = counted(self.findings) or "nothing to say"
        return f"{self.file}: {', '.join(self.kinds)}: {told}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        findings = [
            {
                "check": finding.check,
                "severity": finding.severity,
                "what": finding.what,
                "remedy": finding.remedy,
                **finding.values,
            }
            for finding in self.findings
        ]
        return {"ok": self.ok, "file": self.file, "kinds": list(self.kinds), "findings": findings}


def check(file: str, directory: str | Path = ".") -> Report:
    """Check a `ray up` file, or Kubernetes manifests for KubeRay.

    Args:
        directory: where `ray up` will be run: paths in the file are relative to it.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or neither of the two.
    """
    documents = read_documents(read_text(Path(file), file), file)
    kinds = frozenset(str(value.get("kind")) for value, _ in documents if isinstance(value, dict))
    clusters, findings = [], []
    for value, lines in documents:
        if not isinstance(value, dict):
            raise _not_a_cluster(file, lines)
        cluster = _facts(value, kinds, Path(directory))
        if cluster is None:
            raise _not_a_cluster(file, lines)
        clusters.append(cluster)
        for rule in RULES:
            findings += [_finding(remark, lines) for remark in rule(cluster)]
    if not any(cluster.kind == "ray up" or cluster.base for cluster in clusters):
        raise _not_a_cluster(file, {})
    found = tuple(dict.fromkeys(cluster.kind for cluster in clusters))
    return Report(file, found, by_severity(findings))


def _facts(value: Mapping[str, Any], kinds: frozenset[str], directory: Path) -> Cluster | None:
    if "kind" in value and "apiVersion" in value:
        return kuberay.cluster(value, kinds)
    if not isinstance(value.get("provider"), dict) and "cluster_name" not in value:
        return None
    return vm.cluster(value, launcher.look(value), directory)


def _not_a_cluster(file: str, lines: Mapping[KeyPath, int]) -> ConfigError:
    line = min(lines.values(), default=1)
    return ConfigError(
        "neither a file for ray up nor a RayCluster or RayJob",
        where=f"{file}: line {line}",
        remedy="see cluster/ for one of each kind",
    )


def _finding(remark: Remark, lines: Mapping[KeyPath, int]) -> Finding:
    at = remark.key
    while at and at not in lines:
        at = at[:-1]
    values = {"key": dotted(remark.key), "line": lines.get(at, min(lines.values(), default=1))}
    return Finding(remark.check, remark.severity, remark.what, remark.remedy, values=values)
