"""All checks: pure functions from the facts and the configuration to findings.

Each looks at one thing and names the key or the node to change. None of them reads a file, asks
a node or imports torch, dgl or ray.
"""

from __future__ import annotations

from raygnn.preflight import data_checks, node_checks
from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Check, Job

CHECKS: tuple[Check, ...] = (
    node_checks.nodes_answer,
    node_checks.versions_supported,
    node_checks.versions_uniform,
    node_checks.resources_fit,
    node_checks.cpus_are_there,
    node_checks.devices_suit,
    node_checks.storage_visible,
    data_checks.partition_visible,
    data_checks.parts_agree,
    data_checks.arrays_usable,
    data_checks.inputs_exist,
    data_checks.nodes_to_train_on,
    node_checks.memory_fits,
    node_checks.shared_memory,
    node_checks.disk_space,
    data_checks.parts_and_workers,
)

_ORDER = {"error": 0, "warn": 1, "info": 2}


def check(job: Job) -> tuple[Finding, ...]:
    """All findings of all checks, errors first."""
    found = [finding for each in CHECKS for finding in each(job)]
    return tuple(sorted(found, key=lambda finding: _ORDER[finding.severity]))
