"""All checks: pure functions from the facts and the configuration to findings.

Each looks at one thing and names the key or the node to change. None of them reads a file, asks
a node or imports torch, dgl or ray.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace

from raygnn.preflight import comm_checks, data_checks, device_checks, node_checks, uniform_checks
from raygnn.preflight.findings import Finding, by_severity
from raygnn.preflight.job import Check, Job

# of the nodes alone: what `raygnn check` without a job looks at
CLUSTER_CHECKS: tuple[Check, ...] = (
    node_checks.nodes_answer,
    node_checks.versions_supported,
    uniform_checks.versions_uniform,
    uniform_checks.code_uniform,
    uniform_checks.hardware_uniform,
    uniform_checks.environment_uniform,
    node_checks.cpus_are_there,
    node_checks.shared_memory,
    comm_checks.host_name_resolves,
    comm_checks.interfaces_there,
    comm_checks.debug_level_safe,
    comm_checks.clocks_agree,
    comm_checks.open_files,
    comm_checks.network_links,
)

CHECKS: tuple[Check, ...] = (
    *CLUSTER_CHECKS,
    node_checks.resources_fit,
    device_checks.devices_suit,
    device_checks.bf16_is_there,
    device_checks.gpus_are_there,
    device_checks.gpus_are_free,
    node_checks.storage_visible,
    data_checks.partition_visible,
    data_checks.parts_agree,
    data_checks.arrays_usable,
    data_checks.inputs_exist,
    data_checks.nodes_to_train_on,
    node_checks.memory_fits,
    node_checks.disk_space,
    node_checks.cache_space,
    data_checks.parts_and_workers,
)


def check(job: Job, checks: tuple[Check, ...] = CHECKS) -> tuple[Finding, ...]:
    """All findings, errors first; errors that ``cluster.allow`` names become notes."""
    allowed = job.config.cluster.allow
    found = [_judged(finding, allowed) for each in checks for finding in each(job)]
    found += _unknown(allowed)
    return by_severity(found)


def _judged(finding: Finding, allowed: list[str]) -> Finding:
    if finding.check not in allowed or finding.severity != "error":
        return finding
    return replace(finding, severity="info", what=f"{finding.what} (allowed)")


def _unknown(allowed: list[str]) -> Iterator[Finding]:
    # those of the links are named by what is measured
    names = {each.__name__ for each in CHECKS} - {"network_links"}
    names |= {"network_reach", "network_latency", "network_bandwidth"}
    for name in allowed:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            yield Finding(
                "allow_known",
                "error",
                f"cluster.allow names {name!r}, which is no check",
                f"did you mean {near[0]}?" if near else f"checks are: {', '.join(sorted(names))}",
            )
