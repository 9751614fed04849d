"""All checks: pure functions from the facts and the configuration to findings.

Each looks at one thing and names the key or the node to change. None of them reads a file, asks
a node or imports torch, dgl or ray.
"""

from __future__ import annotations

from dataclasses import replace

from raygnn.preflight import (
    advice_checks,
    comm_checks,
    data_checks,
    device_checks,
    network_checks,
    node_checks,
    uniform_checks,
)
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
    device_checks.model_runs,
    node_checks.storage_visible,
    data_checks.partition_visible,
    data_checks.parts_agree,
    data_checks.arrays_usable,
    data_checks.inputs_exist,
    data_checks.embeddings_usable,
    data_checks.nodes_to_train_on,
    data_checks.fold_is_unseen,
    data_checks.splits_agree,
    advice_checks.batch_size_fits,
    advice_checks.edge_arrays_read,
    node_checks.memory_fits,
    node_checks.disk_space,
    node_checks.cache_usable,
    node_checks.cache_space,
    data_checks.parts_and_workers,
)


def check(job: Job, checks: tuple[Check, ...] = CHECKS) -> tuple[Finding, ...]:
    """All findings, errors first; errors that ``cluster.allow`` names become notes."""
    allowed = job.config.cluster.allow
    return by_severity(_judged(finding, allowed) for each in checks for finding in each(job))


def described() -> dict[str, str]:
    """The name of each finding that there may be → what is looked at, one sentence."""
    links = (network_checks.network_reach, network_checks.network_latency)
    checks = [each for each in CHECKS if each is not comm_checks.network_links]
    found = {}
    for each in (*checks, *links, network_checks.network_bandwidth):
        sentence = (each.__doc__ or "").split("\n\n")[0]
        found[each.__name__] = " ".join(sentence.split())
    return found


def _judged(finding: Finding, allowed: list[str]) -> Finding:
    if finding.check not in allowed or finding.severity != "error":
        return finding
    return replace(finding, severity="info", what=f"{finding.what} (allowed)", remedy="")
