"""Keys that nothing reads, and what Ray itself refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.clusters import kuberay
from raygnn.clusters.facts import Cluster, Remark, section
from raygnn.config.problems import nearest
from raygnn.config.yaml_text import KeyPath

# What Ray's providers read; Ray passes any other key without a word.
_ANY = "type use_internal_ips use_external_head_ip disable_node_updaters worker_liveness_check "
_ANY += "disable_launch_config_check foreground_node_launch"
_PROVIDER = {
    "local": "head_ip worker_ips external_head_ip coordinator_address",
    "aws": "region availability_zone cache_stopped_nodes key_pair security_group aws_credentials "
    "cloudwatch",
    "gcp": "region availability_zone project_id cache_stopped_nodes gcp_credentials",
}


def unknown_keys(cluster: Cluster) -> Iterator[Remark]:
    """Keys that neither Ray nor KubeRay knows."""
    if cluster.kind == "ray up":
        yield from _unknown(cluster.value, (), cluster.keys)
        own = _PROVIDER.get(cluster.provider)
        if own is not None:
            known = frozenset(_ANY.split()) | frozenset(own.split())
            yield from _unknown(section(cluster.value.get("provider")), ("provider",), known)
    elif cluster.kind in kuberay.SPEC:
        for name, key, value in kuberay.sections(cluster):
            yield from _unknown(value, key, kuberay.KEYS[name])


def _unknown(value: Mapping[str, Any], key: KeyPath, known: frozenset[str]) -> Iterator[Remark]:
    for name in value:
        if name not in known:
            close = nearest(name, known)
            remedy = f"did you mean {close}?" if close else f"known are {', '.join(sorted(known))}"
            yield Remark("unknown_key", "error", (*key, name), f"nothing reads {name!r}", remedy)


def refused(cluster: Cluster) -> Iterator[Remark]:
    """What Ray's own validation says."""
    for refusal in cluster.refused:
        what = f"ray up refuses this: {refusal.text}"
        yield Remark(
            "schema", "error", refusal.key, what, "give the key as Ray's documentation has it"
        )


def ssh_user(cluster: Cluster) -> Iterator[Remark]:
    """The user of ssh, which Ray's schema does not ask for and its launcher fails without."""
    if cluster.kind == "ray up" and not section(cluster.value.get("auth")).get("ssh_user"):
        what = "auth.ssh_user is missing, and ray up fails at the first machine without it"
        yield Remark("ssh_user", "error", ("auth",), what, "name the user that ssh logs in as")
