"""The rules: a file for each kind of trouble, a function for each rule, from facts to remarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raygnn.clusters.facts import Cluster, Remark
from raygnn.clusters.rules import (
    addresses,
    auth,
    exposure,
    files,
    limits,
    schema,
    storage,
    versions,
    workers,
)

Rule = Callable[[Cluster], Iterator[Remark]]

RULES: tuple[Rule, ...] = (
    schema.unknown_keys,
    schema.refused,
    schema.ssh_user,
    addresses.malformed,
    addresses.repeated,
    workers.head_type,
    workers.bounds,
    workers.autoscaler,
    versions.pins,
    versions.images,
    auth.off,
    auth.written,
    exposure.dashboard,
    exposure.firewall,
    exposure.services,
    limits.shared_memory,
    limits.open_files,
    limits.stopped_first,
    storage.same_place,
    files.missing,
    files.heavy,
    files.readable_token,
)
