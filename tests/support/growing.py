"""A cloud for Ray's own autoscaler, whose instances are files: a test that sees one come starts the
node that it stands for, and stops it when the file has gone.

The autoscaler, a process of the head's, makes and removes the files through `Provider`, in the
directory that `autoscaling` names. Addresses are those of `tests.support.hosts`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

_TAGS = {
    TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
    TAG_RAY_USER_NODE_TYPE: "head",
    TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
}


def autoscaling(directory: Path, addresses: list[str], idle: float) -> dict[str, Any]:
    """Return the content of ``--autoscaling-config``: workers with one CPU each, none at first.

    Args:
        addresses: of the head, and of the nodes that may come.
        idle: seconds after which one that nothing uses goes.
    """
    kinds = {"head": 0, "worker": len(addresses) - 1}
    mappings = ("auth", "docker", "file_mounts", "head_node", "worker_nodes")
    lists = ("cluster_synced_files", "initialization_commands", "rsync_exclude", "rsync_filter")
    commands = [f"{role}setup_commands" for role in ("", "head_", "worker_")]
    commands += ["head_start_ray_commands", "worker_start_ray_commands"]
    return {
        **{name: {} for name in mappings},
        **{name: [] for name in (*lists, *commands)},
        "file_mounts_sync_continuously": False,
        "cluster_name": "growing",
        "max_workers": len(addresses) - 1,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle / 60,
        "provider": {
            "type": "external",
            "module": "tests.support.growing.Provider",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "directory": str(directory),
            "addresses": addresses,
        },
        "available_node_types": {
            kind: {"min_workers": 0, "max_workers": n, "resources": {"CPU": 1}, "node_config": {}}
            for kind, n in kinds.items()
        },
        "head_node_type": "head",
    }


class Provider(NodeProvider):  # type: ignore[misc]
    """Its instances are named by their addresses."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str):
        super().__init__(provider_config, cluster_name)
        self._directory = Path(provider_config["directory"])
        self._head, *self._addresses = provider_config["addresses"]

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        nodes = [self._head, *sorted(path.name for path in self._directory.iterdir())]
        return [n for n in nodes if tag_filters.items() <= self.node_tags(n).items()]

    def is_running(self, node_id: str) -> bool:
        return node_id == self._head or (self._directory / node_id).exists()

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        if node_id == self._head:
            return _TAGS
        tags: dict[str, str] = json.loads((self._directory / node_id).read_text())
        return tags

    def external_ip(self, node_id: str) -> str:
        return node_id

    def internal_ip(self, node_id: str) -> str:
        return node_id

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        free = [a for a in self._addresses if not self.is_running(a)]
        for address in free[:count]:
            made = {**tags, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
            (self._directory / address).write_text(json.dumps(made))

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        if node_id != self._head:
            made = {**self.node_tags(node_id), **tags}
            (self._directory / node_id).write_text(json.dumps(made))

    def terminate_node(self, node_id: str) -> None:
        (self._directory / node_id).unlink(missing_ok=True)
