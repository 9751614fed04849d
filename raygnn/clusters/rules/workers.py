"""How many nodes of which type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.clusters.facts import Cluster, Remark, Text, listed, section
from raygnn.config.problems import nearest, show
from raygnn.config.yaml_text import KeyPath


def head_type(cluster: Cluster) -> Iterator[Remark]:
    """The type of the head, which has to be one of the types."""
    types = section(cluster.value.get("available_node_types"))
    name = cluster.value.get("head_node_type")
    if types and str(name) not in types:
        what = "head_node_type is missing"
        if name is not None:
            what = f"head_node_type is {show(name)}, which available_node_types does not have"
        close = nearest(name, types) or ", ".join(types)
        yield Remark(
            "head_node_type", "error", ("head_node_type",), what, f"name one of them: {close}"
        )


def bounds(cluster: Cluster) -> Iterator[Remark]:
    """More workers asked for at least than are allowed at most."""
    if cluster.kind == "ray up":
        names = ("min_workers", "max_workers")
        places: list[tuple[KeyPath, Mapping[str, Any]]] = [((), cluster.value)]
        places += [
            (("available_node_types", name), section(value))
            for name, value in section(cluster.value.get("available_node_types")).items()
        ]
    else:
        names = ("minReplicas", "maxReplicas")
        specs = listed(cluster.spec.get("workerGroupSpecs"))
        places = [
            ((*cluster.base, "workerGroupSpecs", i), section(spec)) for i, spec in enumerate(specs)
        ]
    for key, value in places:
        least, most = (value.get(name) for name in names)
        if isinstance(least, int) and isinstance(most, int) and least > most:
            what = f"{names[0]} is {least}, more than {names[1]}, which is {most}"
            yield Remark("workers", "error", (*key, names[0]), what, f"raise {names[1]}")
    yield from _replicas(cluster)


def _replicas(cluster: Cluster) -> Iterator[Remark]:
    for i, each in enumerate(listed(cluster.spec.get("workerGroupSpecs"))):
        spec, most = section(each), section(each).get("maxReplicas")
        if (
            isinstance(most, int)
            and isinstance(spec.get("replicas"), int)
            and spec["replicas"] > most
        ):
            key = (*cluster.base, "workerGroupSpecs", i, "replicas")
            what = f"replicas is {spec['replicas']}, more than maxReplicas, which is {most}"
            yield Remark("workers", "error", key, what, "raise maxReplicas")


def autoscaler(cluster: Cluster) -> Iterator[Remark]:
    """Ray's second autoscaler, which starts one machine too few on machines of one's own."""
    if cluster.provider != "local" or not cluster.workers:
        return
    for head in cluster.heads:
        if head.starts and head.variable("RAY_enable_autoscaler_v2") != "0":
            at: Text = head.starts[0]
            what = "Ray's second autoscaler takes the head for a worker here and starts one too few"
            remedy = "set RAY_enable_autoscaler_v2=0 before ray start in head_start_ray_commands"
            yield Remark("autoscaler", "error", at.key, what, remedy)
